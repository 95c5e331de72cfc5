"""Which wall a window shows, from planted counters; and what the knobs are predicted to do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import bstar
from bstar.errors import SpecError
from bstar.latency import decode_step_time
from bstar.measure.server.histogram import Histogram
from bstar.measure.server.snapshot import Snapshot
from bstar.measure.telemetry.table import GpuSample, Telemetry
from bstar.tuning.diagnosis import diagnose
from bstar.tuning.evidence import evidence_of
from bstar.tuning.knobs import effects, knobs, load_seen
from bstar.tuning.use import use_of
from bstar.tuning.walls import find_wall


def histogram(mean: float, count: float) -> Histogram:
    return Histogram(bounds=(math.inf,), counts=(count,), total=mean * count)


def snapshots(
    *, running: float = 8.0, waiting: float = 0.0, kv: float = 0.3, preempted: float = 0.0, step_s: float = 0.01,
    prompt_per_step: float = 0.0, seconds: int = 10, cache_tokens: int = 100_000, input_tokens: float = 512.0,
    output_tokens: float = 128.0,
) -> list[Snapshot]:  # fmt: skip
    """A server in a steady state: `running` sequences, each step one token for each."""
    found = []
    for t in range(seconds + 1):
        steps = t / step_s
        made = steps * running
        found.append(Snapshot(
            time_s=float(t), engine="vllm",
            gauges={"running": running, "waiting": waiting, "kv_usage_fraction": kv},
            counters={"preemptions": preempted * t, "generated_tokens": made, "prompt_tokens": steps * prompt_per_step,
                      "requests": made / output_tokens},
            histograms={"step_tokens": histogram(running + prompt_per_step, steps),
                        "input_tokens": histogram(input_tokens, made / output_tokens),
                        "output_tokens": histogram(output_tokens, made / output_tokens),
                        "itl_s": histogram(step_s, made)},
            info={"num_gpu_blocks": str(cache_tokens // 16), "block_size": "16"},
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
])  # fmt: skip
def test_counters_tell_the_wall(planted: dict[str, Any], expected: str) -> None:
    assert wall(**planted) == expected


def test_seats_that_are_free_for_a_moment_are_taken_all_the_same() -> None:
    """A scrape between an answer and the next admission sees a free seat; that is no token budget."""
    seen = snapshots(running=16.0, waiting=15.0, prompt_per_step=27.0)
    for i in (2, 5, 7):
        seen[i] = replace(seen[i], gauges={**seen[i].gauges, "running": 13.0})
    for told in (16, None):
        assert find_wall(evidence_of(seen, max_num_seqs=told, max_num_batched_tokens=8192)).wall == "max_num_seqs"


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
    seen = snapshots(running=float(batch), step_s=step, kv=kv, cache_tokens=int(batch * context / kv))
    found = diagnose(seen, deployment, simulate=False)
    assert found.finding.wall == expected
    assert found.use is not None
    assert found.use.context == pytest.approx(context, rel=0.01)
    assert found.use.predicted_s == pytest.approx(step, rel=1e-6)
    assert 0 < found.use.mbu < 1


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


@pytest.mark.parametrize("name", ["idle", "kv_capacity", "token_budget", "overhead_bound", "compute_bound",
                                  "weight_bound", "kv_bandwidth", "client_limited"])  # fmt: skip
def test_every_wall_has_a_knob(name: Any) -> None:
    assert list(knobs(deployed(max_num_seqs=64), name))


def test_one_scrape_is_no_window() -> None:
    with pytest.raises(SpecError, match="two or more scrapes"):
        evidence_of(snapshots()[:1])


def test_a_restart_is_noted() -> None:
    found = diagnose([*snapshots(), *snapshots(seconds=2)])
    assert any("restarted" in n for n in found.notes)
    assert found.evidence.duration_s == 2.0
    assert found.evidence.seen.count("generated_tokens") == 2 * 800
    with pytest.raises(SpecError, match="look again"):
        diagnose([*snapshots(), snapshots()[0]])
