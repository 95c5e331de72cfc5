"""Replayed points: the load of the harness, the means, and what is said where there is no answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import bstar
from bstar.calibration.bundled import SERVING, bundled_points
from bstar.calibration.loads import load_of
from bstar.calibration.points import Point, deployment_of
from bstar.calibration.replay import replay
from bstar.latency.constants import constants_for

POINT = Point(
    id="p", harness="inferencex", engine="vllm", engine_version="0.18.0", model="meta-llama/Llama-3.1-70B",
    gpu="h100_sxm", weight_dtype="fp8", input_tokens=1024, output_tokens=128, concurrency=16, num_gpus=4,
    attention_tp=4,
)  # fmt: skip


def test_the_load_is_the_harness() -> None:
    load = load_of(POINT)
    assert (load.num_requests, load.concurrency, load.num_scheduled) == (160, 16, 16)
    assert not load.arrival_s[:16].any(), "all clients at once"
    assert load.input_tokens.min() >= 819 and load.input_tokens.max() <= 1024
    assert abs(load.input_tokens.mean() / (0.9 * 1024) - 1) < 0.02
    fixed = load_of(replace(POINT, harness="unknown"))
    assert set(fixed.input_tokens.tolist()) == {1024} and set(fixed.output_tokens.tolist()) == {128}
    assert load_of(replace(POINT, harness="x", input_tokens=217.4)).input_tokens.max() == 218


def test_the_prediction_is_the_simulators_mean() -> None:
    found = replay(POINT)
    deployment = deployment_of(POINT)
    result = bstar.simulate(deployment, load_of(POINT))
    assert found.ttft_s == pytest.approx(float(np.mean(result.first_token_s - result.arrival_s)), rel=1e-9)
    tpot = (result.finish_s - result.first_token_s) / (result.output_tokens - 1)
    assert found.tpot_s == pytest.approx(float(tpot.mean()), rel=1e-9)
    assert found.reason is None and found.regime is not None and found.floor_s is not None


def test_what_was_measured_does_not_change_the_prediction() -> None:
    assert replay(replace(POINT, ttft_s=9.0, tpot_s=9.0)) == replay(POINT)


def test_more_clients_are_not_served_faster() -> None:
    found = [replay(replace(POINT, concurrency=c)) for c in (1, 4, 16, 64)]
    tpots = [f.tpot_s or math.nan for f in found]
    assert tpots == sorted(tpots)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_no_prediction_is_below_the_floor(engine: str, concurrency: int) -> None:
    found = replay(replace(POINT, engine=engine, engine_version="", concurrency=concurrency))
    assert found.tpot_s and found.floor_s and found.floor_s <= found.tpot_s
    assert found.ttft_s and found.ttft_s > 0


def test_constants_may_be_others() -> None:
    deployment = deployment_of(POINT)
    slow = constants_for(deployment).replace(layer_s=1e-4)
    assert (replay(POINT, deployment, slow).tpot_s or 0) > (replay(POINT, deployment).tpot_s or 0)


def test_clients_are_dealt_out_to_replicas() -> None:
    four = replace(POINT, attention_tp=4, attention_dp=2, num_gpus=8, concurrency=8)
    alone = replace(POINT, concurrency=4)
    assert replay(four).tpot_s == pytest.approx(replay(alone).tpot_s, rel=0.02)
    assert replay(replace(four, concurrency=1)).tpot_s is not None, "an engine may be idle"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_ranks_of_data_parallel_attention_hold_all_clients_together(engine: str) -> None:
    wide = replace(POINT, engine=engine, engine_version="", model="deepseek-ai/DeepSeek-R1", gpu="h200_sxm",
                   concurrency=32, num_gpus=8, attention_tp=1, attention_dp=8, expert_parallel=8)  # fmt: skip
    found = replay(wide)
    assert found.regime is not None and 16 < found.regime.batch <= 32
    assert found.tpot_s and found.floor_s and found.floor_s < found.tpot_s


def test_what_was_measured_fits() -> None:
    small = replace(POINT, model="deepseek-ai/DeepSeek-R1", weight_dtype="fp8", num_gpus=1, attention_tp=1)
    found = replay(small)
    assert found.tpot_s is not None
    assert any("memory taken as" in note for note in found.notes)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "tiiuae/falcon-mamba-7b", "weight_dtype": "bf16"},  # states and no cache of tokens
        {"gpu": "b300_sxm", "weight_dtype": "int8"},  # no kernels for int8 activations
        {"engine_version": "0.5.8"},  # does not chunk prompts
        {"model": "moonshotai/Kimi-K2-Instruct", "weight_dtype": "bf16", "gpu": "l40s", "num_gpus": 1},
    ],
)
def test_what_was_measured_ran(change: dict[str, object]) -> None:
    found = replay(replace(POINT, harness="x", attention_tp=1, **change))  # type: ignore[arg-type]
    assert found.reason is None and found.tpot_s


def test_one_token_has_a_first_token_and_no_others() -> None:
    found = replay(replace(POINT, harness="x", output_tokens=1))
    assert found.ttft_s is not None and found.tpot_s is None


@pytest.mark.parametrize(
    ("change", "said"),
    [({"gpu": "x9000"}, "gpu"), ({"model": "no-such-model"}, "model"), ({"fault": "osl_tokens: empty"}, "osl_tokens")],
)
def test_what_is_not_known_has_a_reason(change: dict[str, str], said: str) -> None:
    found = replay(replace(POINT, **change))  # type: ignore[arg-type]
    assert found.tpot_s is None and found.ttft_s is None
    assert said in (found.reason or "") and "\n" not in (found.reason or "")


def test_a_sample_of_bundled_rows_is_answered() -> None:
    rows = [p for p in bundled_points(SERVING) if not p.is_disaggregated and p.concurrency <= 64][::60]
    for point in rows:
        found = replay(point)
        assert found.reason is None and found.tpot_s and found.ttft_s, point.id
        assert found.floor_s is not None and found.tpot_s >= found.floor_s, point.id
