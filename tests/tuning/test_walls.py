"""Which wall a window shows, from planted counters; and what the knobs are predicted to do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

import bstar
from bstar.catalog.probe import Probe, device_of
from bstar.errors import SpecError
from bstar.interfaces.cli.diagnose import _facts
from bstar.interfaces.cli.main import cli
from bstar.latency import decode_step_time
from bstar.measure.server.histogram import Histogram
from bstar.measure.server.snapshot import Snapshot
from bstar.measure.telemetry.table import GpuSample, Telemetry
from bstar.tuning.diagnosis import Diagnosis, diagnose
from bstar.tuning.evidence import Evidence, evidence_of
from bstar.tuning.knobs import Effect, effects, knobs, load_seen
from bstar.tuning.use import use_of
from bstar.tuning.walls import find_wall


def histogram(mean: float, count: float) -> Histogram:
    return Histogram(bounds=(math.inf,), counts=(count,), total=mean * count)


def snapshots(
    *, running: float = 8.0, waiting: float = 0.0, kv: float = 0.3, preempted: float = 0.0, step_s: float = 0.01,
    prompt_per_step: float = 0.0, seconds: int = 10, cache_tokens: int = 100_000, input_tokens: float = 512.0,
    output_tokens: float = 128.0, latencies: bool = False, block: int = 16,
) -> list[Snapshot]:  # fmt: skip
    """A server in a steady state: `running` sequences, each step one token for each.

    latencies   whether it counts those of its requests too; they keep Little's law
    """
    found = []
    for t in range(seconds + 1):
        steps = t / step_s
        made = steps * running
        done = made / output_tokens
        held = {} if not latencies else {
            "queue_s": histogram(waiting * t / done if done else 0.0, done),
            "e2e_s": histogram((running + waiting) * t / done if done else 0.0, done)}  # fmt: skip
        found.append(Snapshot(
            time_s=float(t), engine="vllm",
            gauges={"running": running, "waiting": waiting, "kv_usage_fraction": kv},
            counters={"preemptions": preempted * t, "generated_tokens": made, "prompt_tokens": steps * prompt_per_step,
                      "requests": made / output_tokens},
            histograms={"step_tokens": histogram(running + prompt_per_step, steps),
                        "input_tokens": histogram(input_tokens, made / output_tokens),
                        "output_tokens": histogram(output_tokens, made / output_tokens),
                        "itl_s": histogram(step_s, made), **held},
            info={"num_gpu_blocks": str(cache_tokens // block), "block_size": str(block)},
        ))  # fmt: skip
    return found


def wall(**planted: Any) -> str:
    told = {k: planted.pop(k) for k in ("max_num_seqs", "max_num_batched_tokens", "client_limits") if k in planted}
    return find_wall(evidence_of(snapshots(**planted), **told)).wall


@pytest.mark.parametrize(("planted", "expected"), [
    ({"running": 0.0}, "idle"),
    ({"client_limits": ("sent late",), "preempted": 1.0}, "client_limited"),
    ({"preempted": 0.5, "kv": 0.98}, "kv_capacity"),
    ({"waiting": 4.0, "kv": 0.97}, "kv_capacity"),
    # A prompt of 3,000 tokens finds no room in a cache of 10,000 that is 70 % full.
    ({"waiting": 4.0, "kv": 0.7, "cache_tokens": 10_000, "input_tokens": 3_000.0}, "kv_capacity"),
    ({"waiting": 4.0, "kv": 0.7, "cache_tokens": 1_000_000, "max_num_seqs": 8}, "max_num_seqs"),
    ({"waiting": 4.0, "kv": 0.2}, "max_num_seqs"),  # untold: running never changes while others wait
    ({"waiting": 4.0, "kv": 0.2, "max_num_seqs": 256, "max_num_batched_tokens": 512, "prompt_per_step": 500.0},
     "token_budget"),
    ({"kv": 0.2, "max_num_seqs": 256, "max_num_batched_tokens": 512, "prompt_per_step": 500.0}, "token_budget"),
    ({"kv": 0.2, "max_num_seqs": 256}, "client_limited"),
    # Half of the tokens are prompt, but steps are far from full: seats, whether told or seen.
    ({"waiting": 8.0, "kv": 0.1, "prompt_per_step": 16.0, "max_num_seqs": 8, "max_num_batched_tokens": 1024},
     "max_num_seqs"),
    ({"waiting": 8.0, "kv": 0.1, "prompt_per_step": 16.0, "max_num_batched_tokens": 1024}, "max_num_seqs"),
    ({"waiting": 8.0, "kv": 0.1, "prompt_per_step": 16.0}, "max_num_seqs"),
    # Steps full of prompts: what runs is no number of seats.
    ({"running": 3.0, "waiting": 5.0, "kv": 0.1, "prompt_per_step": 1010.0, "step_s": 0.5}, "unknown"),
    ({"running": 3.0, "waiting": 5.0, "kv": 0.1, "prompt_per_step": 1010.0, "step_s": 0.5,
      "max_num_batched_tokens": 1024}, "token_budget"),
    ({"running": 3.0, "waiting": 5.0, "kv": 0.1, "prompt_per_step": 1010.0, "step_s": 0.5,
      "max_num_batched_tokens": 8192, "max_num_seqs": 8}, "unknown"),
])  # fmt: skip
def test_counters_tell_the_wall(planted: dict[str, Any], expected: str) -> None:
    assert wall(**planted) == expected


def some_run_more(running: float, step_s: float = 0.5) -> list[Snapshot]:
    """Prompts of which mostly so many run in steps that are full of them, and now and then one more."""
    seen = snapshots(running=running, waiting=5.0, kv=0.1, prompt_per_step=1010.0, step_s=step_s)
    seen[4] = replace(seen[4], gauges={**seen[4].gauges, "running": running + 1})
    return seen


def test_prompts_that_fill_the_steps_are_seen_where_no_flag_is_told() -> None:
    found = find_wall(evidence_of(some_run_more(3.0)))
    assert found.wall == "token_budget"
    assert found.seats is None
    assert any("--max-num-seqs and --max-num-batched-tokens" in b for b in found.because)


def test_flags_that_would_tell_are_named() -> None:
    seen = snapshots(running=3.0, waiting=5.0, kv=0.1, prompt_per_step=1010.0, step_s=0.5)
    assert "give --max-num-seqs and --max-num-batched-tokens" in find_wall(evidence_of(seen)).because[-1]
    told = find_wall(evidence_of(seen, max_num_seqs=8))
    assert "give --max-num-batched-tokens" in told.because[-1]
    assert "were the flags those" in find_wall(evidence_of(seen, max_num_seqs=8,
                                                           max_num_batched_tokens=8192)).because[-1]


def test_a_default_does_not_overrule_what_is_seen() -> None:
    """Eight run while others wait: the deployment's 256 seats are but the engine's default."""
    seen = snapshots(waiting=8.0, kv=0.1, prompt_per_step=16.0)
    deployment = deployed()
    found = diagnose(seen, deployment)
    assert found.evidence.assumed == {"max_num_seqs", "max_num_batched_tokens"}
    assert (found.finding.wall, found.finding.seats) == ("max_num_seqs", 8)
    assumed = deployment.engine.max_num_seqs
    assert any(f"8 seats seem to be set, the deployment assumes {assumed:,}: give --max-num-seqs" in n
               for n in found.notes)
    assert found.best is not None
    assert found.best.change.startswith("max_num_seqs 8 →")
    told = diagnose(seen, deployed(max_num_seqs=8), simulate=False)
    assert told.evidence.assumed == {"max_num_batched_tokens"}
    assert told.finding.seats is None
    assert not any("seats" in n for n in told.notes)


def test_a_budget_that_steps_do_not_fill_is_no_wall() -> None:
    """Also with a model: nine in ten tokens are prompt, and a step holds 80 of 8,192."""
    seen = some_run_more(8.0)
    few = [replace(s, counters={**s.counters, "prompt_tokens": 72 * s.counters["generated_tokens"] / 8},
                   histograms={**s.histograms, "step_tokens": histogram(80.0, s.histograms["step_tokens"].count)})
           for s in seen]  # fmt: skip
    assert diagnose(few, deployed(), simulate=False).finding.wall == "max_num_seqs"


def test_idle_is_told_by_counters_too() -> None:
    """A server shows 0 running at every scrape, yet makes 1,600 tokens/s."""
    seen = [replace(s, gauges={**s.gauges, "running": 0.0}) for s in snapshots(running=16.0)]
    found = evidence_of(seen)
    assert found.in_flight == pytest.approx(16.0)
    assert find_wall(found).wall != "idle"
    assert wall(running=0.0) == "idle"
    assert wall(running=0.0, latencies=True) == "idle"


def test_too_few_scrapes_tell_no_wall() -> None:
    for count in (2, 3):
        found = find_wall(evidence_of(snapshots(waiting=4.0, kv=0.2)[:count]))
        assert (found.wall == "unknown") == (count == 2)
    assert "2 scrapes lie inside the load" in find_wall(evidence_of(snapshots(waiting=4.0, kv=0.2)[:2])).because[0]
    assert wall(preempted=5.0, seconds=1) == "kv_capacity"  # counted, not seen


def test_requests_in_flight_keep_littles_law() -> None:
    """Latencies tell it where the server counts them; gauges that are read between two waves do not count."""
    seen = snapshots(running=4.0, waiting=3.0, latencies=True)
    seen = [replace(s, gauges={**s.gauges, "running": 0.0 if i % 3 == 0 else 4.0}) for i, s in enumerate(seen)]
    found = evidence_of(seen)
    assert found.by_latencies
    assert (found.mean_running, found.mean_waiting, found.in_flight) == pytest.approx((4.0, 3.0, 7.0))
    plain = evidence_of(snapshots(running=4.0, waiting=3.0))
    assert not plain.by_latencies
    assert (plain.mean_running, plain.mean_waiting) == (4.0, 3.0)
    # Requests as long as the window: those that began before it, or end after it, would be missed.
    long = evidence_of(snapshots(running=4.0, waiting=3.0, latencies=True, output_tokens=500.0, seconds=8))
    assert long.mean_of("e2e_s") > 8 / 4
    assert not long.by_latencies
    assert replace(long, whole=True).by_latencies


def test_seats_that_are_free_for_a_moment_are_taken_all_the_same() -> None:
    """A scrape between an answer and the next admission sees a free seat; that is no token budget."""
    seen = snapshots(running=16.0, waiting=15.0, prompt_per_step=27.0)
    for i in (2, 5, 7):
        seen[i] = replace(seen[i], gauges={**seen[i].gauges, "running": 13.0})
    for told in (16, None):
        assert find_wall(evidence_of(seen, max_num_seqs=told, max_num_batched_tokens=8192)).wall == "max_num_seqs"


@pytest.mark.parametrize(("running", "expected"), [
    ((8, 8, 1, 8, 8, 1, 8, 8, 1, 8, 1), "max_num_seqs"),  # clients in step, by a real vLLM: waves of eight
    ((7, 8, 7, 7, 8, 7, 7, 8, 7, 7, 7), "max_num_seqs"),  # one leaves in most steps
    ((2, 3, 3, 2, 3, 3, 1, 4, 2, 3, 2), "unknown"),  # a spread, and its end
])  # fmt: skip
def test_a_limit_is_no_end_of_a_spread(running: tuple[int, ...], expected: str) -> None:
    seen = [replace(s, gauges={**s.gauges, "running": float(n)})
            for s, n in zip(snapshots(waiting=5.0, prompt_per_step=16.0), running, strict=True)]
    found = find_wall(evidence_of(seen))
    assert found.wall == expected
    assert found.seats == (8 if expected == "max_num_seqs" else None)


def deployed(**flags: Any) -> Any:
    return bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", tp=1, **flags)


@pytest.mark.parametrize(("batch", "context", "expected"), [
    (1, 1024, "weight_bound"), (40, 2048, "saturating"), (250, 8192, "kv_bandwidth"),
])  # fmt: skip
def test_physics_tells_what_a_step_is_bound_by(batch: int, context: int, expected: str) -> None:
    """A window whose steps take as long as predicted lies where its batch lies between the landmarks."""
    deployment = deployed(max_num_seqs=512)
    step = decode_step_time(deployment, batch, context).expected_s
    kv = 0.5
    seen = snapshots(running=float(batch), step_s=step, kv=kv, cache_tokens=int(batch * context / kv),
                     input_tokens=context - 64.0, output_tokens=128.0)
    found = diagnose(seen, deployment, simulate=False)
    assert found.finding.wall == expected
    assert found.use is not None
    assert found.use.context == pytest.approx(context, rel=0.01)
    assert found.use.predicted_s == pytest.approx(step, rel=1e-6)
    assert 0 < found.use.mbu < 1


@pytest.mark.parametrize("block", [16, 128])
def test_context_is_that_of_the_requests_not_of_their_blocks(block: int) -> None:
    """30 tokens and 40 answers: 50 on average, though a block of 128 is taken from the first on."""
    held = 64.0 if block == 16 else 128.0
    seen = snapshots(running=4.0, kv=0.5, cache_tokens=int(4 * held / 0.5), input_tokens=30.0, output_tokens=40.0,
                     block=block)
    use = use_of(evidence_of(seen), deployed(max_num_seqs=512))
    assert use is not None
    assert use.context == 50.0
    for name in ("input_tokens", "output_tokens"):
        seen = [replace(s, histograms={k: h for k, h in s.histograms.items() if k != name}) for s in seen]
    by_cache = use_of(evidence_of(seen), deployed(max_num_seqs=512))
    assert by_cache is not None
    assert by_cache.context == held - block / 2


def test_a_step_shorter_than_its_work_is_noted() -> None:
    deployment = deployed(max_num_seqs=512)
    step = decode_step_time(deployment, 8, 576).expected_s
    found = diagnose(snapshots(step_s=step / 4), deployment, simulate=False)
    assert found.use is not None
    assert found.use.mbu > 1
    assert any(n.startswith("MBU") and "not what runs" in n for n in found.notes)
    usual = diagnose(snapshots(step_s=step), deployment, simulate=False)
    assert not any("not what runs" in n for n in usual.notes)
    assert usual.use is not None
    assert "datasheet" in usual.use.basis


def test_a_cpu_has_no_datasheet() -> None:
    probe = Probe(processor="nominal", logical_cpus=2, memory_bytes=16_000_000_000, read_bytes_per_s=8e9,
                  copy_bytes_per_s=8e9, fp32_flops_per_s=80e9, measured_at="2026-11-30")  # fmt: skip
    use = use_of(evidence_of(snapshots()), bstar.deployment(model="qwen3-0.6b", gpu=device_of(probe)))
    assert use is not None
    assert "measured" in use.basis


def test_a_step_much_longer_than_its_work_is_overhead() -> None:
    deployment = deployed(max_num_seqs=512)
    step = 4 * decode_step_time(deployment, 4, 1024).expected_s
    found = diagnose(snapshots(running=4.0, step_s=step, kv=0.5, cache_tokens=8192), deployment, simulate=False)
    assert found.finding.wall == "overhead_bound"


def test_prompts_make_a_step_compute_bound() -> None:
    deployment = deployed(max_num_seqs=512, max_num_batched_tokens=16384)
    seen = evidence_of(snapshots(running=16.0, step_s=0.35, prompt_per_step=8000.0, kv=0.5, cache_tokens=130_000))
    use = use_of(seen, deployment)
    assert use is not None
    assert find_wall(seen, use).wall == "compute_bound"


def test_gpu_counters_tell_where_the_model_is_not_given() -> None:
    def telemetry(**values: float) -> Telemetry:
        return Telemetry(source="dcgm", samples=(GpuSample(time_s=0.0, gpu=0, values=values),))

    def found(**values: float) -> str:
        return find_wall(evidence_of(snapshots(), telemetry=telemetry(**values))).wall

    assert found(dram_active_fraction=0.8, tensor_active_fraction=0.2) == "saturating"
    assert found(dram_active_fraction=0.3, tensor_active_fraction=0.7) == "compute_bound"
    assert found(dram_active_fraction=0.1) == "overhead_bound"
    assert found(memory_busy_fraction=0.9) == "client_limited"  # a share of time, not of bandwidth


def test_more_seats_are_predicted_to_help_where_seats_are_the_wall() -> None:
    deployment = deployed(max_num_seqs=8)
    seen = evidence_of(snapshots(waiting=24.0), max_num_seqs=8)
    load = load_seen(seen)
    assert load is not None
    assert load.concurrency == 32
    best = effects(deployment, "max_num_seqs", load)[0]
    assert best.change == "max_num_seqs 8 → 32"
    assert best.throughput is not None
    assert best.throughput > 1.5
    assert best.ttft is not None
    assert best.ttft < 1.0
    assert "--max-num-seqs 32" in best.command


def test_what_cannot_work_is_no_knob() -> None:
    """One GPU of this kind a node is not two."""
    probe = Probe(processor="nominal", logical_cpus=2, memory_bytes=64_000_000_000, read_bytes_per_s=8e9,
                  copy_bytes_per_s=8e9, fp32_flops_per_s=80e9, measured_at="2026-11-30")  # fmt: skip
    cpu = bstar.deployment(model="qwen3-0.6b", gpu=device_of(probe))
    found = effects(cpu, "compute_bound", load_seen(evidence_of(snapshots(running=2.0))))
    assert not any("tensor parallel" in e.change or e.failed for e in found)


def test_the_knob_to_turn_helps_what_suffers() -> None:
    def effect(change: str, throughput: float, ttft: float) -> Effect:
        return Effect(change=change, reason="", command="serve", throughput=throughput, ttft=ttft, tpot=1.0)

    slower, faster, none = effect("a", 1.1, 1.3), effect("b", 1.0, 0.5), effect("c", 1.0, 1.0)
    waiting, running = evidence_of(snapshots(waiting=4.0)), evidence_of(snapshots())

    def best(seen: Evidence, *found: Effect) -> str | None:
        chosen = Diagnosis(finding=find_wall(seen), evidence=seen, effects=found).best
        return None if chosen is None else chosen.change

    assert best(waiting, slower, none, faster) == "b"
    assert best(running, none, faster, slower) == "a"
    assert best(waiting, slower, none) is None
    assert best(running, none) is None


@pytest.mark.parametrize("arguments", [["--window", "5s"], ["--interval", "1s"], ["--watch"], ["--telemetry", "x"]])
def test_what_is_for_a_running_server_is_refused_for_a_run(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["diagnose", "--run", "none", *arguments])
    assert result.exit_code == 2
    assert result.stderr.strip() == f"error: {arguments[0]}: is for a running server; a run holds its own"


def test_gpu_figures_are_printed_and_contradictions_noted() -> None:
    values = {"gpu_busy_fraction": 0.97, "memory_busy_fraction": 0.4, "power_w": 512.0, "memory_used_bytes": 7e10}
    gpus = Telemetry(source="nvidia-smi dmon", note="all samples lie elsewhere",
                     samples=(GpuSample(time_s=0.0, gpu=0, values=values),))
    found = diagnose(snapshots(running=0.0), telemetry=gpus)
    assert found.finding.wall == "idle"
    assert "all samples lie elsewhere" in found.notes
    assert any("GPU is busy 97%" in n for n in found.notes)
    shown = [" ".join(row) for row in _facts(found)]
    for text in ("GPU busy 97%", "memory busy 40%", "power 512 W", "GPU memory 65.19 GiB"):
        assert any(text in row for row in shown), shown


@pytest.mark.parametrize("name", ["idle", "kv_capacity", "token_budget", "overhead_bound", "compute_bound",
                                  "weight_bound", "kv_bandwidth", "client_limited"])  # fmt: skip
def test_every_wall_has_a_knob(name: Any) -> None:
    assert list(knobs(deployed(max_num_seqs=64), name))


def test_one_scrape_is_no_window() -> None:
    with pytest.raises(SpecError, match="two or more scrapes"):
        evidence_of(snapshots()[:1])


def test_a_restart_is_noted() -> None:
    found = diagnose([*snapshots(), *snapshots(seconds=2)])
    assert any("restarted" in n and "12.0 s" in n for n in found.notes)
    assert found.evidence.duration_s == 12.0
    assert found.evidence.seen.count("generated_tokens") == 12 * 800
    assert diagnose([*snapshots(), snapshots()[0]]).evidence.duration_s == 10.0
    with pytest.raises(SpecError, match="look again"):
        diagnose([snapshots()[5], snapshots()[0]])


def test_more_requests_than_seats_refute_the_seats() -> None:
    """Eight run while others wait: four were told."""
    found = diagnose(snapshots(waiting=8.0, kv=0.1), deployed(max_num_seqs=4), max_num_seqs=4)
    assert (found.finding.wall, found.finding.seats) == ("max_num_seqs", 8)
    assert "8 of 8 seats (as many as ever run at a time here)" in found.finding.because[1]
    assert any("8 seats seem to be set, 4 were told: give --max-num-seqs" in n for n in found.notes)
    assert found.effects[0].change.startswith("max_num_seqs 8 →")
    assert ("running", "8", "more than the 4 seats") in _facts(found)
    plain = diagnose(snapshots(waiting=8.0, kv=0.1), max_num_seqs=4)
    assert (plain.finding.seats, plain.notes) == (8, found.notes[:1])


def test_seats_are_refuted_where_they_are_no_wall_too() -> None:
    found = diagnose(snapshots(kv=0.98, preempted=1.0), deployed(max_num_seqs=4))
    assert found.finding.wall == "kv_capacity"
    assert any("8 requests ran at a time, there are at least as many seats, 4 were told" in n for n in found.notes)
    assert any(e.change == "max_num_seqs 8 → 4" for e in found.effects)
    by_load = diagnose(snapshots(), max_num_seqs=1)
    assert "of 1 seats" not in " ".join(by_load.finding.because)
    assert any("1 was told" in n for n in by_load.notes)
    assumed = deployed().engine.max_num_seqs
    beyond = diagnose(snapshots(running=assumed + 44.0), deployed(), simulate=False)
    assert any(f"the deployment assumes {assumed:,}" in n for n in beyond.notes)
    crowded = diagnose(snapshots(waiting=8.0, kv=0.1, prompt_per_step=1010.0), max_num_seqs=4)
    assert "give --max-num-seqs" in crowded.finding.because[-1]
    assert not any("seats" in n for n in diagnose(snapshots(waiting=8.0), max_num_seqs=8).notes)


def test_seats_are_those_of_all_engines() -> None:
    """Two engines with four each; by latencies a request runs a moment longer than it has its seat."""
    seen = [replace(s, engines=2) for s in snapshots(waiting=8.0, kv=0.1, latencies=True)]
    seen = [replace(s, histograms={**s.histograms, "e2e_s": replace(e, total=1.01 * e.total)})
            for s in seen for e in (s.histograms["e2e_s"],)]  # fmt: skip
    found = diagnose(seen, deployed(max_num_seqs=4), max_num_seqs=4)
    assert (found.finding.wall, found.finding.seats) == ("max_num_seqs", None)
    assert "8 of 8 seats (max_num_seqs of 2 engines)" in found.finding.because[1]
    assert found.evidence.mean_running == 8.0
    assert not any("seats" in n for n in found.notes)
    assert found.effects[0].change.startswith("max_num_seqs 4 →")


def test_another_model_is_noted() -> None:
    """Where the metrics name it; by any spelling of the deployment's it is the same."""
    def notes(*names: str, **given: Any) -> list[str]:
        seen = [replace(s, served=names) for s in snapshots(waiting=8.0)]
        return [n for n in diagnose(seen, given.get("deployment", deployed()), simulate=False).notes if "served" in n]

    (note,) = notes("tiny")
    assert note.startswith("the server served tiny, the deployment is llama-3.1-8b")
    for same in ((), ("meta-llama/Llama-3.1-8B-Instruct",), ("tiny", "/srv/llama-3.1-8b")):
        assert notes(*same) == []
    assert notes("tiny", deployment=None) == []
