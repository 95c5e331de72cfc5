"""Latency points: every row is read, mapped by rule and replayed as its harness ran it, with errors as stated."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bstar.calibration.bundled import LATENCY, bundled_points
from bstar.calibration.latency_points import LatencyPoint, latency_point, read_latency_points
from bstar.calibration.latency_points_labels import below_floor_note, label_notes, measured_tpot_s
from bstar.calibration.latency_points_loads import is_typed, request_load
from bstar.calibration.latency_points_mapping import engine_of, latency_deployment
from bstar.calibration.latency_points_replay import LatencyPrediction, replay_latency_point
from bstar.calibration.latency_points_static import mean_decode_s, static_times, with_identical_tokens
from bstar.codec.build import build_deployment
from bstar.errors import BstarError, ConfigError, NotInCatalogError, SpecError
from bstar.latency.step_model import step_model
from bstar.physics.batch import BatchShape
from bstar.physics.kv_cache import kv_bytes_per_token

ROW = {
    "id": "x", "engine": "TensorRT-LLM", "engine_version": "0.9.0", "model": "meta-llama/Llama-2-7b-hf",
    "gpu": "H100-SXM-80GB", "n_gpus": "1", "tp": "1.0", "pp": "1.0", "weight_dtype": "fp8", "isl": "128.0",
    "osl": "128.0", "load_kind": "static_batch", "load_value": "8", "ttft_ms": "16.04", "tpot_ms": "4.2633",
}  # fmt: skip


def row(**changes: str) -> LatencyPoint:
    return latency_point(ROW | changes)


@pytest.fixture(scope="module")
def points() -> list[LatencyPoint]:
    return [latency_point(p.columns) for p in bundled_points(LATENCY)]


@pytest.fixture(scope="module")
def static_rows(points: list[LatencyPoint]) -> list[tuple[LatencyPoint, LatencyPrediction]]:
    return [
        (p, replay_latency_point(p, latency_deployment(p).deployment)) for p in points if p.load == "static_batch"]


# ---- reading


def test_cells_become_si_units_and_empty_ones_are_none() -> None:
    point = row(load_value="inf", load_kind="max_load", osl="800-1000", ttft_ms="")
    assert (point.tpot_s, point.ttft_s, point.output_tokens) == (pytest.approx(4.2633e-3), None, 900.0)
    assert math.isinf(point.load_value) and point.tp == 1 and point.dp is None


@pytest.mark.parametrize(("column", "text"), [("isl", "many"), ("tpot_ms", "-3"), ("load_kind", "sideways")])
def test_what_is_no_figure_is_refused_by_the_name_of_its_column(column: str, text: str) -> None:
    with pytest.raises(ConfigError, match=column):
        row(**{column: text})


def test_a_file_that_is_no_such_table_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("model,gpu\na,b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="load_kind"):
        read_latency_points(path)


# ---- mapping


def test_every_bundled_row_names_a_deployment_but_for_unknown_models(points: list[LatencyPoint]) -> None:
    refused = {}
    for point in points:
        try:
            latency_deployment(point)
        except BstarError as error:
            refused[point.model] = error
    assert set(refused) == {"qwen-agentworld-35b-a3b awq-int4"}
    assert isinstance(refused["qwen-agentworld-35b-a3b awq-int4"], NotInCatalogError)


@pytest.mark.parametrize(("text", "device"), [
    ("H100-SXM-80GB (power-capped)", "h100-sxm-80gb"), ("GH200-96GB(480GB)", "gh200-96gb"),
    ("H100-80GB (GKE)", "h100-sxm-80gb"), ("RTX-PRO-6000-SE", "rtx-pro-6000-server"), ("H100-NVL", "h100-nvl-94gb"),
])  # fmt: skip
def test_spellings_of_gpus(text: str, device: str) -> None:
    assert latency_deployment(row(gpu=text)).deployment.device.id == device


def test_engines_and_their_versions() -> None:
    assert engine_of("TensorRT-LLM (static batch, gptSessionBenchmark)") == "trtllm"
    assert engine_of("NIM (TensorRT-LLM)") == "trtllm" and engine_of("NIM (vLLM backend)") == "vllm"
    # A product's version is not its engine's.
    assert latency_deployment(row(engine="NIM", engine_version="1.8.0")).deployment.engine.version == "0.17.0"
    prototype = row(engine="vLLM (prototype)", engine_version="2023-11 era", weight_dtype="fp16")
    old = latency_deployment(prototype).deployment
    assert old.engine.version == "0.2.2" and old.engine.enforce_eager
    with pytest.raises(SpecError, match="engine"):
        engine_of("a server of ours")


@pytest.mark.parametrize(("changes", "weights", "cache"), [
    ({"weight_dtype": "fp8"}, "fp8", "fp8"),
    ({"weight_dtype": 'fp16 (labelled "Mixed")'}, "fp16", "fp16"),
    ({"weight_dtype": "fp8", "kv_dtype": "fp16"}, "fp8", "fp16"),
    ({"model": "Qwen/Qwen3-32B-FP8", "engine_version": "1.2.0", "flags": "trtllm-serve Qwen/Qwen3-32B-FP8"},
     "fp8_block", "bf16"),
    ({"model": "openai/gpt-oss-20b", "weight_dtype": "fp8(label)", "engine_version": "1.1"}, "mxfp4", "fp8"),
    ({"engine": "vLLM", "engine_version": "v0.11.0", "model": "Qwen/Qwen3-14B-AWQ", "weight_dtype": "awq"},
     "w4a16", "bf16"),
    ({"engine": "vLLM", "engine_version": "v0.11.0", "weight_dtype": "fp8", "flags": "--quantization bitsandbytes"},
     "w4a16", "fp16"),
])  # fmt: skip
def test_formats_of_labels(changes: dict[str, str], weights: str, cache: str) -> None:
    found = latency_deployment(row(**changes)).deployment
    assert (found.model.weight_dtype, found.kv_format.name) == (weights, cache)


def test_layouts_of_columns_notes_and_commands() -> None:
    spread = {"model": "Qwen/Qwen3-235B-A22B", "engine_version": "1.1", "n_gpus": "4", "tp": "", "pp": ""}
    dep = latency_deployment(row(**spread, dp="4.0", ep="4")).deployment.parallel
    assert (dep.tp, dep.attention_dp, dep.ep) == (1, 4, 4)
    told = latency_deployment(row(**spread | {"tp": "4"}, notes="MoE runs used enable_attention_dp")).deployment
    assert (told.parallel.tp, told.parallel.attention_dp) == (1, 4)
    ranks = {"engine": "SGLang", "engine_version": "v0.5.6", "model": "deepseek-ai/DeepSeek-V3.2", "n_gpus": "8",
             "tp": "8", "dp": "8", "weight_dtype": "checkpoint default"}  # fmt: skip
    # A table cut the command off: what stands before the broken flag counts.
    cut = latency_deployment(row(**ranks, flags="--tp-size 8 --enable-dp-attention --dp 8 --kv-cache-dt")).deployment
    assert (cut.parallel.tp, cut.parallel.attention_dp) == (1, 8)
    flags = "vllm serve m -tp 2 --max-num-seqs 32 --max-num-batched-tokens 4096 --max-model-len 4096"
    launched = row(engine="vLLM", engine_version="0.11.0", tp="2", n_gpus="2", flags=flags)
    served = latency_deployment(launched).deployment
    assert (served.parallel.tp, served.engine.max_num_seqs, served.engine.max_num_batched_tokens) == (2, 32, 4096)


def test_the_cache_of_narrow_weights_is_as_wide_as_the_measured_memory_says(points: list[LatencyPoint]) -> None:
    """Peak memory of static batches, regressed on tokens held: bytes of cache per token, what the model says."""
    groups: dict[tuple[object, ...], list[LatencyPoint]] = defaultdict(list)
    for p in points:
        if p.load == "static_batch" and p.peak_memory_gb:
            groups[p.model, p.gpu, p.weight_dtype, p.tp].append(p)
    checked = 0
    for members in groups.values():
        d = latency_deployment(members[0]).deployment
        held = np.array([[1.0, p.load_value * (p.input_tokens + p.output_tokens), p.load_value * p.input_tokens]
                         for p in members])  # fmt: skip
        peak = np.array([p.peak_memory_gb for p in members]) * 1e9
        if len(members) < 20 or peak.max() > 0.95 * d.device.reported_memory_bytes:
            continue  # some of the batches may have run out of memory
        slope = float(np.linalg.lstsq(held, peak, rcond=None)[0][1])
        assert slope == pytest.approx(kv_bytes_per_token(d.model, d.kv_format, d.parallel), rel=0.05), members[0]
        checked += 1
    assert checked > 30


# ---- the closed form


@pytest.mark.parametrize(("model", "batch"), [("llama-3.1-8b", 7), ("mistral-7b-v0.1", 3), ("gpt-oss-20b", 5)])
def test_the_mean_step_is_the_mean_of_all_steps(model: str, batch: int) -> None:
    found = step_model(build_deployment(model, "h100-sxm-80gb", tp=2))
    each = [mean_decode_s(found, batch=batch, first=c, last=c)[0] for c in range(4000, 4300)]
    assert mean_decode_s(found, batch=batch, first=4000, last=4299)[0] == pytest.approx(np.mean(each), rel=2e-4)


def test_prefill_in_groups_of_prompts_is_the_sum_of_its_steps() -> None:
    model = step_model(build_deployment("llama-3.1-8b", "h100-sxm-80gb"))
    one = static_times(model, batch=2, input_tokens=1000, output_tokens=1).ttft_s
    last = static_times(model, batch=1, input_tokens=1000, output_tokens=1).ttft_s
    found = static_times(model, batch=5, input_tokens=1000, output_tokens=1, prefill_tokens=2048)
    assert found.ttft_s == pytest.approx(2 * one + last) and math.isnan(found.tpot_s)


def test_equal_tokens_touch_no_more_experts_than_one() -> None:
    model = step_model(build_deployment("mixtral-8x7b", "h100-sxm-80gb", tp=2))
    same = with_identical_tokens(model)
    many, alike, one = (m.work_of(m.step.values(BatchShape.decode(b, 500))).light_memory
                        for m, b in ((model, 64), (same, 64), (same, 1)))
    experts = model.routed
    assert alike[experts] == pytest.approx(one[experts])
    assert alike[experts] == pytest.approx(model.light_weights_s[experts] * 2 / 8)
    assert np.all(many[experts] > 3.0 * alike[experts])


# ---- loads


def test_lengths_that_somebody_typed_are_fixed_and_others_are_spread() -> None:
    assert all(is_typed(mean) for mean in (128.0, 127.7, 512, 1000, 1012, 1036, 1996.3, 2048, 3995.9, 8204, 32000))
    assert not any(is_typed(mean) for mean in (214.5, 219.1, 328.1, 857.5))
    burst = row(load_kind="all_at_once", load_value="500", num_prompts="500", isl="1996.3", osl="100.0")
    load = request_load(burst)
    assert load.num_requests == load.concurrency == 500 and set(load.input_tokens.tolist()) <= {1996, 1997}


def test_loads_as_harnesses_make_them() -> None:
    closed = row(load_kind="closed", load_value="4")
    assert (request_load(closed).num_requests, request_load(closed).warmup_requests) == (40, 8)
    counted = request_load(row(load_kind="closed", load_value="4", num_prompts="100"))
    assert (counted.num_requests, counted.warmup_requests) == (100, 0)
    rate = request_load(row(load_kind="rate (constant)", load_value="10", num_prompts="50", isl="200.9", osl="62.5",
                            dataset="shared_prefix 10 sys prompts x10 users, 128+64 -> 64"))
    assert np.allclose(np.diff(rate.arrival_s), 0.1) and set(rate.prefix_tokens.tolist()) == {128}
    halves = request_load(row(load_kind="max_load", load_value="inf", num_prompts="300"), share=2)
    assert halves.num_requests == 150


# ---- replay


def test_a_static_batch_adds_up() -> None:
    point = row()
    found = replay_latency_point(point, latency_deployment(point).deployment)
    assert found.e2e_s == pytest.approx(found.ttft_s + 127 * found.tpot_s)
    assert found.out_tokens_per_s == pytest.approx(8 * 128 / found.e2e_s)
    assert found.floor_s < found.tpot_s
    larger = row(load_value="64")
    assert replay_latency_point(larger, latency_deployment(larger).deployment).tpot_s > found.tpot_s


def test_a_row_without_lengths_is_a_decode_step_and_says_so() -> None:
    point = row(isl="", osl="", load_kind="closed", load_value="32")
    found = replay_latency_point(point, latency_deployment(point).deployment)
    assert found.tpot_s and found.ttft_s is None and "not stated" in found.notes[0]


def test_what_does_not_fit_is_answered_with_what_was_granted() -> None:
    point = row(engine="SGLang", engine_version="0.5.4", model="meta-llama/Llama-3.1-70B", weight_dtype="bf16",
                load_kind="all_at_once", load_value="10", num_prompts="10")
    found = replay_latency_point(point, latency_deployment(point).deployment)
    assert found.reason is None and found.tpot_s and "memory taken as" in found.notes[0]


def test_other_constants_move_the_prediction() -> None:
    from bstar.latency.constants import constants_for

    point = row()
    d = latency_deployment(point).deployment
    slower = replay_latency_point(point, d, constants_for(d).replace(layer_s=1e-4))
    assert slower.tpot_s > replay_latency_point(point, d).tpot_s


def test_no_measured_step_is_faster_than_the_floor(static_rows: list[tuple[LatencyPoint, LatencyPrediction]]) -> None:
    assert [p.id for p, found in static_rows if below_floor_note(p, found.floor_s)] == []


def test_static_batches_are_predicted(static_rows: list[tuple[LatencyPoint, LatencyPrediction]]) -> None:
    """Seen rows; benchmarks/fit/static.py --check has those of groups that the fit did not see (TPOT 6 %)."""
    tpot = np.array([f.tpot_s / p.tpot_s for p, f in static_rows if p.tpot_s])
    ttft = np.array([f.ttft_s / p.ttft_s for p, f in static_rows if p.ttft_s])
    assert tpot.size > 2100 and np.median(np.abs(tpot - 1.0)) < 0.06 and np.mean(np.abs(tpot - 1.0)) < 0.09
    assert np.median(np.abs(ttft - 1.0)) < 0.10


@pytest.mark.slow
def test_every_bundled_row_is_answered(points: list[LatencyPoint]) -> None:
    """But for an unknown model and a row whose flags are another engine's."""
    refused = set()
    for p in points:
        try:
            found = replay_latency_point(p, latency_deployment(p).deployment)
        except BstarError:
            refused.add(p.id)
            continue
        if found.reason is not None:
            refused.add(p.id)
    assert len(refused) <= 2


# ---- labels


def test_labels_that_cannot_be_right(points: list[LatencyPoint]) -> None:
    notes = label_notes(points)
    kinds = {"tpot is e2e": 0, "same figures as": 0, "made of": 0, "no options of": 0, "speculative": 0}
    for note in notes.values():
        for kind in kinds:
            kinds[kind] += kind in note
    assert all(kinds.values()) and len(notes) < 0.05 * len(points)
    capped = [p for p in points if "power-capped" in p.gpu]
    assert capped and all("made of" in notes[p.id] for p in capped)


def test_the_time_between_tokens_is_itl_where_tpot_is_a_share_of_the_whole() -> None:
    point = replace(row(load_kind="closed"), ttft_s=592.3, tpot_s=0.636, itl_s=0.05786, output_tokens=1024.0)
    assert measured_tpot_s(point) == 0.05786
    assert measured_tpot_s(replace(point, tpot_s=0.060)) == 0.060
    assert below_floor_note(point, 0.05) is None and "below" in str(below_floor_note(point, 0.06))
