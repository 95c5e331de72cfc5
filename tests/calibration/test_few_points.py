"""Calibration from few points: what is planted is found, what the points do not say stays."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import bstar
from bstar.calibration import few_points
from bstar.calibration.few_points import calibrate
from bstar.calibration.observations import Observation, observations, predicted
from bstar.calibration.points import read_rows
from bstar.calibration.priors import knobs_for
from bstar.calibration.profile import Profile, calibrated, limits_of, profile_notes
from bstar.catalog.probe import Probe, device_of
from bstar.errors import BstarError, InputError, SpecError
from bstar.latency.constants import constant_specs
from bstar.specs.calibration import Calibration
from bstar.specs.deployment import Deployment

DEPLOYMENT = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="vllm@0.19.0", max_num_seqs=256)
LOAD: dict[str, Any] = {"input_tokens": "uniform:400-600", "output_tokens": "uniform:40-80", "start": "burst"}


def measured(deployment: Deployment, concurrency: int, keys: tuple[str, ...] = ("ttft_s", "tpot_s")) -> dict[str, Any]:
    """A point that `deployment` itself would give."""
    load = LOAD | {"concurrency": concurrency, "id": f"c{concurrency}"}
    (one,) = observations(load | {"e2e_s": 1.0})
    found = predicted(deployment, one)
    return load | {key: found[key] for key in keys}


def planted(**values: float) -> Deployment:
    return replace(DEPLOYMENT, calibration=Calibration(name="truth", values=tuple(
        (name.replace("__", "."), value) for name, value in values.items())))  # fmt: skip


def off(deployment: Deployment, point: dict[str, Any]) -> dict[str, float]:
    (one,) = observations(point)
    found = predicted(deployment, one)
    return {m: found[m] / v - 1.0 for m, v in one.measured.items()}


@cache
def slow_server() -> tuple[Deployment, Profile]:
    truth = planted(scale__gemm_memory=0.75, sequence_s=4e-5, request_s=0.08)
    return truth, calibrate(DEPLOYMENT, [measured(truth, 2), measured(truth, 48)], name="slow")


def test_two_points_predict_the_loads_between_them() -> None:
    truth, profile = slow_server()
    mine = calibrated(DEPLOYMENT, profile)
    for clients in (8, 24):
        point = measured(truth, clients)
        fitted, found = off(DEPLOYMENT, point), off(mine, point)
        assert abs(fitted["tpot_s"]) > 3 * abs(found["tpot_s"])
        assert abs(fitted["tpot_s"]) > 0.08
        assert abs(found["tpot_s"]) < 0.03, clients
        assert abs(found["ttft_s"]) < 0.10, clients


def test_the_profile_says_what_it_did() -> None:
    _, profile = slow_server()
    assert [p.id for p in profile.points] == ["c2", "c48"]
    for point in profile.points:
        for metric, value in point.measured.items():
            assert abs(point.after[metric] / value - 1) < 0.03
            assert abs(point.after[metric] / value - 1) < abs(point.before[metric] / value - 1)
    names = [c.name for c in profile.constants]
    assert {"request_s", "scale.gemm_memory"} <= set(names)
    specs = constant_specs()
    for i, one in enumerate(profile.constants):
        assert specs[one.name].low <= one.value <= specs[one.name].high
        assert one.standard_error == pytest.approx(profile.covariance[i][i] ** 0.5)
    assert max(abs(r) for r in profile.residuals("tpot_s")) < 0.03


def test_what_is_fitted_already_moves_nothing() -> None:
    profile = calibrate(DEPLOYMENT, [measured(DEPLOYMENT, 4), measured(DEPLOYMENT, 32)])
    for one in profile.constants:
        assert abs(one.value / one.prior - 1) < 0.01
    assert abs(off(calibrated(DEPLOYMENT, profile), measured(DEPLOYMENT, 16))["tpot_s"]) < 0.005


def test_calibrating_again_changes_nothing() -> None:
    truth, profile = slow_server()
    again = calibrate(calibrated(DEPLOYMENT, profile), [measured(truth, 2), measured(truth, 48)], name="slow")
    assert again == profile  # it starts from the fitted constants, whatever the deployment carries


def test_the_order_of_points_does_not_matter() -> None:
    truth, profile = slow_server()
    other = calibrate(DEPLOYMENT, [measured(truth, 48), measured(truth, 2)], name="slow")
    assert {c.name: c.value for c in other.constants} == pytest.approx({c.name: c.value for c in profile.constants})


def test_throughput_alone_says_as_much_as_latency() -> None:
    truth, _ = slow_server()
    keys = ("output_tokens_per_s",)
    profile = calibrate(DEPLOYMENT, [measured(truth, 2, keys), measured(truth, 48, keys)])
    found = off(calibrated(DEPLOYMENT, profile), measured(truth, 16, keys))
    assert abs(found["output_tokens_per_s"]) < 0.05


def test_one_point_is_enough_and_said_to_be_little() -> None:
    truth, _ = slow_server()
    profile = calibrate(DEPLOYMENT, measured(truth, 8))
    assert any("one point" in note for note in profile.notes)
    assert abs(off(calibrated(DEPLOYMENT, profile), measured(truth, 8))["tpot_s"]) < 0.03


def test_what_no_constant_explains_is_said() -> None:
    strange = [measured(DEPLOYMENT, 2) | {"ttft_s": 3.0}, measured(DEPLOYMENT, 48)]
    profile = calibrate(DEPLOYMENT, strange)
    assert any("ttft_s" in note or "request_s" in note for note in profile.notes)
    for one in profile.constants:
        spec = constant_specs()[one.name]
        assert spec.low <= one.value <= spec.high
    contradicting = [measured(DEPLOYMENT, 2) | {"tpot_s": 0.03}, measured(DEPLOYMENT, 48) | {"tpot_s": 0.008}]
    hopeless = calibrate(DEPLOYMENT, contradicting)
    assert any("does not explain its own points" in note for note in profile_notes(DEPLOYMENT, hopeless))


def test_points_of_an_open_loop() -> None:
    truth, _ = slow_server()
    load = {k: v for k, v in LOAD.items() if k != "start"} | {"rate_per_s": 8.0, "num_requests": 80}
    (one,) = observations(load | {"tpot_s": 1.0})
    point = load | {k: predicted(truth, one)[k] for k in ("ttft_s", "tpot_s")}
    profile = calibrate(DEPLOYMENT, [point, measured(truth, 2)])
    assert abs(off(calibrated(DEPLOYMENT, profile), point)["tpot_s"]) < 0.03


def test_rows_and_files_of_measured_points(tmp_path: Path) -> None:
    header = "id,engine,engine_version,model,gpu,isl_tokens,osl_tokens,concurrency,ttft_ms,tpot_ms\n"
    rows = "a,vllm,0.19.0,llama-3.1-8b,h100,512,64,2,60,8\nb,vllm,0.19.0,llama-3.1-8b,h100,512,64,32,150,11\n"
    from_points = calibrate(DEPLOYMENT, read_rows(header + rows))
    table = tmp_path / "points.csv"
    table.write_text(header + rows + "c,vllm,0.19.0,llama-3.1-8b,h100,512,64,4,,\n")  # a row without figures
    from_table = calibrate(DEPLOYMENT, table)
    assert from_table.notes[0] == "points.csv: row c is left out: it has neither ttft nor tpot"
    assert replace(from_table, notes=from_points.notes) == from_points
    table.write_text(header + rows + "d,vllm,0.19.0,llama-3.1-70b,h100,512,64,4,60,8\n")
    with pytest.raises(SpecError, match=r"point d: its row is of llama-3\.1-70b"):
        calibrate(DEPLOYMENT, table)
    listed = tmp_path / "points.json"
    listed.write_text(json.dumps({"points": [measured(DEPLOYMENT, 2), measured(DEPLOYMENT, 16)]}))
    assert [o.id for o in observations(listed)] == ["c2", "c16"]
    listed.write_text(json.dumps([measured(DEPLOYMENT, 2)]))
    with pytest.raises(InputError, match="is a list; write"):
        observations(listed)


@pytest.mark.parametrize(("point", "said"), [
    ({}, "concurrency or rate_per_s"),
    ({"concurrency": 4, "rate_per_s": 2, "input": 9, "output": 9, "tpot_ms": 8}, "one of the two"),
    ({"concurrency": 4, "input": 9, "tpot_ms": 8}, "output_tokens"),
    ({"concurrency": 4, "input": 9, "output": 9}, "nothing was measured"),
    ({"concurrency": 4, "input": 9, "output": 9, "tpot_ms": 0}, "above 0"),
    ({"concurrency": 4, "input": 9, "output": 9, "tpot_s": "fast"}, "above 0"),
    ({"concurrency": 2.5, "input": 9, "output": 9, "tpot_s": 0.01}, "whole number"),
    ({"concurrency": 4, "input": 9, "output": 9, "tpott_ms": 8}, "tpott_ms"),
    ({"concurrency": 4, "input": 9, "output": 9, "tpot_ms": 8, "start": "slowly"}, "even or burst"),
    ({"concurrency": 10**9, "input": 9, "output": 9, "tpot_ms": 8}, "at most 100,000"),
    ({"concurrency": 4, "input": 9, "output": 9, "tpot_ms": 8, "num_requests": 10**12}, "at most"),
    ({"concurrency": 4, "input": 9, "output": 9, "tpot_ms": 8, "tpot_s": 1}, "given twice, as tpot_ms and as tpot_s"),
    ({"concurrency": 4, "input": 900, "output": 90, "tpot_ms": 1.0}, "below what the memory"),
])  # fmt: skip
def test_a_point_that_is_none_is_one_line(point: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        calibrate(DEPLOYMENT, [point])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_points_and_too_many() -> None:
    with pytest.raises(SpecError, match="none given"):
        calibrate(DEPLOYMENT, [])
    with pytest.raises(SpecError, match="more than"):
        calibrate(DEPLOYMENT, [LOAD | {"concurrency": 1, "tpot_s": 0.01}] * 65)
    for nonsense in ([3], None, 3):
        with pytest.raises(BstarError):
            calibrate(DEPLOYMENT, nonsense)
    with pytest.raises(SpecError, match=r"bstar\.deployment"):
        calibrate("llama-3.1-8b", [LOAD])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="name"):
        calibrate(DEPLOYMENT, LOAD | {"concurrency": 2, "tpot_s": 0.01}, name=" ")
    with pytest.raises(SpecError, match="profile"):
        bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", profile=3)


def test_only_constants_that_are_felt_may_move() -> None:
    names = {k.name for k in knobs_for(DEPLOYMENT)}
    assert "scale.gemm_memory" in names
    assert not any(n.startswith(("collective.", "scale.moe")) for n in names)  # one GPU, a dense model
    wide = bstar.deployment(model="qwen3-30b-a3b", gpu="h100-sxm-80gb", tp=4)
    found = {k.name for k in knobs_for(wide)}
    assert {"scale.moe_memory", "collective.nvlink.latency_s"} <= found
    assert not any(n.startswith("collective.network") for n in found)


@pytest.mark.parametrize("knob", knobs_for(DEPLOYMENT), ids=lambda k: k.name)
def test_a_knob_is_the_fitted_value_at_zero_and_stays_in_its_range(knob: Any) -> None:
    low, high, _ = limits_of(knob.name)
    assert knob.value(0.0) == pytest.approx(knob.fitted)
    assert knob.time(0.0) == pytest.approx(0.0, abs=1e-12)
    for u in (-50.0, -1.0, 1.0, 50.0):
        assert low <= knob.value(u) <= high
    assert knob.time(1.0) >= knob.time(0.0) >= knob.time(-1.0)  # time grows with u


def test_an_observation_is_of_its_own_requests() -> None:
    load = bstar.traffic.closed_loop(4, 300, 20, 24, seed=5)
    (one,) = observations(LOAD | {"concurrency": 4, "tpot_s": 0.01})
    recorded = replace(one, sent=load)
    assert isinstance(recorded, Observation)
    assert recorded.traffic() is load
    assert predicted(DEPLOYMENT, recorded) != predicted(DEPLOYMENT, one)


def test_what_a_server_shows_of_its_own_load_is_a_point() -> None:
    from bstar.calibration.sources import of_window
    from bstar.errors import ConfigError
    from bstar.measure.server.histogram import Histogram
    from bstar.measure.server.snapshot import Window

    def histogram(mean: float, count: float) -> Histogram:
        return Histogram.of_cumulative({float("inf"): count}, mean * count, count)

    def shown(**changes: Any) -> Window:
        parts: dict[str, Any] = {
            "duration_s": 60.0, "engine": "vllm", "restarted": False, "counters": {"requests": 300.0},
            "histograms": {"ttft_s": histogram(0.08, 300), "itl_s": histogram(0.011, 30000),
                           "tpot_s": histogram(0.012, 300), "input_tokens": histogram(511.6, 300),
                           "output_tokens": histogram(100.2, 300)},
        }  # fmt: skip
        return Window(**(parts | changes))

    one = of_window(shown())
    assert one.load == ("rate_per_s", 5.0)
    assert (one.input_tokens.mean, one.output_tokens.mean) == (512.0, 100.0)
    assert dict(one.measured) == pytest.approx({"ttft_s": 0.08, "tpot_s": 0.012})
    profile = calibrate(DEPLOYMENT, one)
    assert profile.points[0].after["tpot_s"] == pytest.approx(0.012, rel=0.05)
    for broken, said in (
        ({"restarted": True}, "restarted"), ({"counters": {"requests": 3.0}}, r"3 requests .* for longer \(--window\)"),
        ({"counters": {"requests": 0.0}}, "idle, no request was answered .* is there load"),
        ({"counters": {"requests": 0.0, "generated_tokens": 50.0}}, "for longer"), ({"counters": {}}, "no count"),
        ({"histograms": {}}, "how long"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"metrics: .*{said}"):
            of_window(shown(**broken))
    notes = calibrate(DEPLOYMENT, of_window(shown(served=("tiny",)), name="http://here")).notes
    assert notes[0].startswith("http://here served tiny, the deployment is llama-3.1-8b")


@pytest.mark.parametrize("name", ["vllm_detailed.json", "guidellm.json", "aiperf"])
def test_results_of_other_tools_are_points(name: str) -> None:
    (one,) = observations(Path(__file__).parents[1] / "measure" / "data" / "imports" / name)
    assert one.load == ("concurrency", 4.0)
    assert one.sent is not None
    assert one.sent.num_requests == 24
    assert one.output_tokens.mean == 20.0
    assert {"ttft_s", "tpot_s", "output_tokens_per_s"} <= set(one.measured)
    assert set(one.measured) <= set(predicted(DEPLOYMENT, one))


def test_a_peak_that_is_a_guess_is_calibrated_too() -> None:
    """Of a CPU bstar knows what numpy reaches; an engine's kernels may compute ten times as fast."""
    guessed = replace(DEPLOYMENT.device, id="cpu", bandwidth_bytes_per_s=30e9, peak_flops_per_s={"bf16": 2e11},
                      compute_capability=None)  # fmt: skip
    there = replace(DEPLOYMENT, device=guessed)
    fast = replace(there, device=replace(guessed, peak_flops_per_s={"bf16": 2e12}, bandwidth_bytes_per_s=70e9))
    points = [measured(fast, 1), measured(fast, 12)]
    profile = calibrate(there, points)
    peak = next(c for c in profile.constants if c.name == "device.peak")
    assert peak.value > 3
    mine = calibrated(there, profile)
    assert mine.device.peak("bf16") == pytest.approx(2e11 * peak.value)
    assert mine.calibration is not None
    assert mine.device.bandwidth_bytes_per_s > 40e9
    assert all(not name.startswith("device.") for name, _ in mine.calibration.values)
    found = off(mine, measured(fast, 4))
    assert abs(found["tpot_s"]) < 0.05
    assert abs(found["ttft_s"]) < 0.15
    again = calibrate(mine, points)  # from the guess, not from what it carries
    assert {c.name: c.value for c in again.constants} == pytest.approx({c.name: c.value for c in profile.constants})
    assert all(k.name != "device.peak" for k in knobs_for(DEPLOYMENT))
    assert profile.device is not None
    assert profile.device.bandwidth_bytes_per_s == 30e9
    assert again.device is not None
    assert again.device.bandwidth_bytes_per_s == pytest.approx(30e9)


def served(one: Observation, *names: str, **changes: Any) -> tuple[str, ...]:
    return calibrate(DEPLOYMENT, [replace(one, id="r4", served=names, **changes)]).notes


def test_runs_of_another_model_or_with_fewer_places_are_said_first() -> None:
    (one,) = observations(LOAD | {"concurrency": 4, "tpot_s": 0.009, "ttft_s": 0.05})
    notes = served(one, "tiny", "/models/tiny", seats=8, notes=("c1 is left out",))
    assert notes[0].startswith("r4 served tiny, the deployment is llama-3.1-8b")
    assert notes[1].startswith("r4 never ran more than 8 requests while others waited, the deployment has max_num_seqs")
    assert notes[2] == "c1 is left out"
    for names in ((), ("llama-3.1-8b",), ("Llama_3.1_8B",), ("meta-llama/Llama-3.1-8B",), ("/srv/llama-3.1-8b/",),
                  ("chat", "/srv/meta-llama/Llama-3.1-8B-Instruct"), ("Meta-Llama-3.1-8B",)):  # fmt: skip
        assert not any("served" in note for note in served(one, *names)), names
    assert not any("never ran" in note for note in served(one, seats=256))


def test_errors_are_predicted_over_measured_everywhere() -> None:
    """The table's `off` and the notes' agree in sign: a server that is slower than predicted is off by less than 0."""
    strange = [measured(DEPLOYMENT, 2) | {"ttft_s": 30.0}, measured(DEPLOYMENT, 48)]
    profile = calibrate(DEPLOYMENT, strange)
    (note,) = (note for note in profile.notes if note.startswith("c2 stays off"))
    off = profile.points[0].after["ttft_s"] / 30.0 - 1
    assert off < -0.5
    assert f"(predicted / measured − 1): ttft_s {off:+.0%}" in note


def test_all_steps_that_go_too_far_are_shortened() -> None:
    """Far from the fitted constants the sum of times may miss in every round: less of the first step is then better
    than to leave everything as it was."""
    (one,) = observations(LOAD | {"concurrency": 4, "tpot_s": 0.012, "ttft_s": 0.08})
    problem = few_points._Problem.of([(DEPLOYMENT, one)])
    start = problem.solved(kept=[])
    good = problem.solved()
    assert good.cost < start.cost
    beyond = replace(good, u=good.u * 4.0)
    assert start.cost > problem._nearer(start, beyond).cost > 0
    assert problem._nearer(good, beyond) is good


def test_a_guessed_device_far_from_the_truth_is_found(tmp_path: Path) -> None:
    """Real vLLM on a CPU of two processors, one of them its own (benchmarks/calibrate_vllm.py): numpy's figures are so
    far off, in two directions, that a search from them alone ends where other constants stand for the device's."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "head_dim": 64,
              "intermediate_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8,
              "vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    cpu = device_of(Probe(processor="two CPUs", logical_cpus=2, memory_bytes=25_000_000_000, read_bytes_per_s=31.9e9,
                          copy_bytes_per_s=27.7e9, fp32_flops_per_s=202.7e9, measured_at="2026-11-30"))  # fmt: skip
    deployment = bstar.deployment(
        model=str(tmp_path), gpu=cpu, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024,
        enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, num_gpu_blocks_override=512)
    load = {"input_tokens": "uniform:8-96", "output_tokens": "uniform:8-32"}
    points = [load | {"concurrency": 1, "ttft_ms": 188.0, "tpot_ms": 42.0, "output_tokens_per_s": 20.0},
              load | {"concurrency": 8, "ttft_ms": 456.0, "tpot_ms": 84.0, "output_tokens_per_s": 73.3}]
    for point in calibrate(deployment, points).points:
        for metric in ("tpot_s", "output_tokens_per_s"):
            assert point.after[metric] == pytest.approx(point.measured[metric], rel=0.12), point.id
