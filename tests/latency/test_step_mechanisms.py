"""Mechanisms of the step time, each with the law that it obeys."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bstar
from bstar.latency import decode_step_time, step_time
from bstar.latency.constants import constants_for
from bstar.latency.experts import ExpertLoad, largest_of
from bstar.latency.step_model import StepModel, smooth_max, step_model
from bstar.physics.batch import BatchShape
from bstar.specs.deployment import Deployment

CASES: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-8b"}, {"model": "llama-3.1-70b", "tp": 4, "weight_dtype": "fp8"},
    {"model": "deepseek-r1", "tp": 8, "engine": "sglang"}, {"model": "deepseek-v3.2", "dp": 8, "ep": 8},
    {"model": "gpt-oss-120b", "tp": 2, "engine": "trtllm"}, {"model": "qwen3-30b-a3b", "tp": 2, "ep": 2},
    {"model": "qwen3.5-35b-a3b", "tp": 2, "enforce_eager": True}, {"model": "llama-3.1-70b", "tp": 2, "pp": 4},
    {"model": "mixtral-8x7b", "tp": 2, "cudagraph_mode": "piecewise"},
)  # fmt: skip


@cache
def _deploy(items: tuple[tuple[str, Any], ...]) -> Deployment:
    given_ = dict(items)
    made: Deployment = bstar.deployment(gpu=given_.pop("gpu", "h200-sxm-141gb"), **given_)
    return made


def deploy(**settings_: Any) -> Deployment:
    return _deploy(tuple(settings_.items()))


def with_constants(d: Deployment, **changes: float) -> StepModel:
    return step_model(d, constants_for(d).replace({k.replace("__", "."): v for k, v in changes.items()}))


def decode_s(model: StepModel, batch: float, context: float = 1000.0) -> float:
    return float(model.expected_s(model.step.decode_values(context) * model.stage_batch(batch)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_step_at_a_time_is_what_many_at_once_are(case: dict[str, Any]) -> None:
    model, rng = step_model(deploy(**case)), np.random.default_rng(3)
    for _ in range(60):
        shape = BatchShape.decode(int(rng.integers(1, 900)), int(rng.integers(1, 20_000)))
        kind = rng.integers(0, 3)
        if kind:
            chunk = BatchShape.prefill(int(rng.integers(1, 4000)), int(rng.integers(0, 5000)))
            shape = chunk if kind == 2 else shape + chunk
        values = model.step.values(shape)
        expected_s, floor_s = model.scalar.seconds(values)
        assert math.isclose(expected_s, float(model.expected_s(values)), rel_tol=1e-12)
        assert math.isclose(floor_s, float(model.floor_s(model.work_of(values)).sum()), rel_tol=1e-12)
        assert 0 < floor_s < expected_s


# ---- roofs --------------------------------------------------------------------------------------------------


@given(a=st.floats(1e-9, 1.0), b=st.floats(1e-9, 1.0), power=st.floats(1.0, 12.0))
@settings(max_examples=60, deadline=None)
def test_a_smooth_max_lies_between_the_max_and_the_sum(a: float, b: float, power: float) -> None:
    found = float(smooth_max(np.array(a), np.array(b), power))
    assert max(a, b) * (1 - 1e-12) <= found <= (a + b) * (1 + 1e-12)
    assert math.isclose(found, float(smooth_max(np.array(b), np.array(a), power)), rel_tol=1e-12)


def test_tiles_pad_few_rows_to_twice_as_many_and_many_rows_by_half_rows() -> None:
    """n rows are computed as n + n·h/(n + h)."""
    d = deploy(model="llama-3.1-8b")
    none, half = (with_constants(d, gemm__bf16__half_rows=h, smoothing=20.0) for h in (0.0, 64.0))
    i = next(i for i, w in enumerate(none.step.works) if w.name == "mlp" and w.kind == "gemm")

    def seconds(model: StepModel, tokens: float) -> float:
        work = model.work_of(model.step.values(BatchShape.prefill(tokens)))
        return float(work.compute[i])

    for tokens in (8.0, 64.0, 4096.0):
        padded = tokens + tokens * 64.0 / (tokens + 64.0)
        assert math.isclose(seconds(half, tokens), seconds(none, tokens) * padded / tokens, rel_tol=1e-9)
    assert seconds(half, 1e6) - seconds(none, 1e6) == pytest.approx(seconds(none, 64.0), rel=1e-3)


# ---- launching ----------------------------------------------------------------------------------------------


def test_a_step_that_is_not_replayed_takes_at_least_its_launching() -> None:
    d = deploy(model="llama-3.1-8b", enforce_eager=True)
    layer_s = constants_for(d)["eager_layer_s"]
    assert decode_step_time(d, 1, 10).expected_s > 32 * layer_s
    slow = with_constants(d, eager_layer_s=1e-3)
    assert 32e-3 < decode_s(slow, 1) < 34e-3 + 2 * constants_for(d)["step_s"]
    # Behind long kernels launching is hidden: a large prompt takes no longer.
    prompt = slow.step.values(BatchShape.prefill(60_000))
    assert float(slow.expected_s(prompt)) == pytest.approx(
        float(with_constants(d, eager_layer_s=0.0).expected_s(prompt)), rel=1e-3)


def test_beyond_the_largest_captured_batch_steps_are_launched() -> None:
    d = deploy(model="qwen3-1.7b", cudagraph_max_size=64)
    model = with_constants(d, eager_layer_s=2e-3)
    assert decode_s(model, 65) > decode_s(model, 64) + 28 * 1e-3
    assert decode_s(with_constants(d, eager_layer_s=0.0), 65) < decode_s(model, 64) * 1.2


def test_who_replays_mixed_steps() -> None:
    """vLLM replays small mixed steps in pieces; engines that capture decode steps alone launch every prompt."""
    shape = BatchShape.decode(4, 100) + BatchShape.prefill(50)
    for engine, mode, key in (
        ("vllm", "full_and_piecewise", "piece_layer_s"), ("sglang", "full_decode_only", "eager_layer_s")
    ):  # fmt: skip
        d = deploy(model="llama-3.1-8b", engine=engine)
        assert d.engine.cudagraph_mode == mode
        none = with_constants(d, eager_layer_s=0.0, piece_layer_s=0.0)
        one = with_constants(d, **{"eager_layer_s": 0.0, "piece_layer_s": 0.0, key: 1e-3})
        values = none.step.values(shape)
        assert float(one.expected_s(values)) > float(none.expected_s(values)) + 20e-3
        assert decode_s(one, 4) == decode_s(none, 4)
    pieces = deploy(model="llama-3.1-8b", cudagraph_mode="piecewise")
    assert decode_s(with_constants(pieces, piece_layer_s=1e-3), 4) > 32e-3


def test_latent_and_state_layers_have_their_own_launching() -> None:
    for model, key in (("deepseek-r1", "eager_latent_layer_s"), ("qwen3-next-80b-a3b", "eager_state_layer_s")):
        d = deploy(model=model, tp=8, engine="sglang")
        values = step_model(d).step.values(BatchShape.prefill(10))
        less, more = (float(with_constants(d, **{key: x}).expected_s(values)) for x in (1e-3, 4e-3))
        assert more > less + 50e-3


def test_a_replayed_step_is_padded_to_a_captured_batch() -> None:
    """Sequences of the padding read no cache and cost the host nothing: between two sizes only those two grow."""
    d = deploy(model="llama-3.1-8b", engine="trtllm")
    sizes = step_model(d).graphs.sizes
    assert {1.0, 2.0, 4.0, 8.0, 16.0} <= set(sizes)
    model = with_constants(d, sequence_s=0.0)
    work = [model.work_of(model.step.decode_values(0.0) * b) for b in (9.0, 16.0)]
    assert np.array_equal(work[0].compute[model.rounded][:3], work[1].compute[model.rounded][:3])
    assert work[0].light_compute.sum() < work[1].light_compute.sum()
    graphs = model.graphs
    assert [float(graphs.padded(b)) for b in (1.0, 3.0, 9.0, 16.0, 100.5)] == [1.0, 4.0, 16.0, 16.0, 104.0]
    assert float(graphs.padded(graphs.largest + 1)) == graphs.largest + 1


# ---- experts ------------------------------------------------------------------------------------------------


def load(experts: int = 128, top_k: int = 8, ranks: int = 1, skew: float = 0.0) -> ExpertLoad:
    return ExpertLoad(experts=np.array([float(experts)]), top_k=np.array([float(top_k)]),
                      ranks=np.array([float(ranks)]), skew=skew)


def test_uniform_routing_reads_the_expected_distinct_experts() -> None:
    for tokens, distinct in ((1, 8.0), (32, 163.0), (64, 222.0)):  # mission §10: 256 experts, top 8
        read = load(256, 8).busiest(float(tokens))[0] * 256
        assert float(read[0]) == pytest.approx(distinct, abs=0.7)


@given(tokens=st.floats(0.5, 5000), ranks=st.sampled_from([1, 2, 8, 32]), skew=st.sampled_from([0.0, 0.7, 1.5]))
@settings(max_examples=80, deadline=None)
def test_the_busiest_rank_reads_and_multiplies_at_least_the_mean(tokens: float, ranks: int, skew: float) -> None:
    one = load(ranks=ranks, skew=skew)
    read, rows = (float(x[0]) for x in one.busiest(tokens))
    mean = 1.0 - float(one.missed(tokens)[0])
    assert mean * (1 - 1e-12) <= read <= 1.0
    assert 1.0 <= rows <= ranks
    more = one.busiest(tokens * 1.1)
    assert float(more[0][0]) >= read * (1 - 1e-12)
    assert float(more[1][0]) * tokens * 1.1 >= rows * tokens * (1 - 1e-12)
    if ranks == 1:
        assert (read, rows) == (pytest.approx(mean), 1.0)
    shares, factors = one.scalar(tokens)
    assert shares[0] == (pytest.approx(read, rel=1e-12), pytest.approx(mean, rel=1e-12))
    assert factors[0] == pytest.approx(rows, rel=1e-12)


def test_popular_experts_leave_others_unread() -> None:
    few, fewer = (float(load(skew=s).busiest(30.0)[0][0]) for s in (0.0, 1.5))
    assert fewer < few
    assert float(load(skew=1e-4).missed(30.0)[0]) == pytest.approx(float(load().missed(30.0)[0]), rel=1e-6)


def test_the_busiest_of_more_ranks_is_busier() -> None:
    rng = np.random.default_rng(1)
    for count in (2, 8, 64):
        drawn = rng.standard_normal((20_000, count)).max(axis=1).mean()
        assert largest_of(count) == pytest.approx(drawn, abs=0.05)
    assert largest_of(1) == 0.0
    # Against draws: 32 tokens of top 8 over 8 ranks of 16 experts.
    picks = np.argsort(rng.random((2000, 32, 128)), axis=2)[:, :, :8] // 16
    rows = np.stack([(picks == r).sum(axis=(1, 2)) for r in range(8)]).max(axis=0).mean()
    assert float(load(ranks=8).busiest(32.0)[1][0]) * 32 == pytest.approx(rows, rel=0.05)


def test_an_expert_with_rows_costs_more_than_its_bytes() -> None:
    d = deploy(model="qwen3-30b-a3b")
    none, some = (with_constants(d, expert_s=s, smoothing=1.0) for s in (0.0, 1e-6))
    for batch in (1.0, 40.0):
        # 48 layers, each of as many experts as are read.
        read = 128 * float(some.load.busiest(batch)[0][0])
        assert decode_s(some, batch) - decode_s(none, batch) == pytest.approx(48 * read * 1e-6, rel=1e-9)


# ---- collectives --------------------------------------------------------------------------------------------


def test_collectives_take_a_latency_by_ranks_and_a_bandwidth_by_link() -> None:
    for gpu, kind in (("h100-sxm-80gb", "nvlink"), ("l40s", "pcie")):
        d = deploy(model="llama-3.1-8b", gpu=gpu, tp=8)
        base = with_constants(d)
        i = next(i for i, w in enumerate(base.step.works) if w.name == "allreduce")
        one = with_constants(d, **{f"collective__{kind}__latency_s": 0.0, f"collective__{kind}__rank_latency_s": 2e-6})
        # Two a layer, one of the embedding; six ranks beyond two.
        assert one.fixed_s[i] == pytest.approx(one.step.launches[i] * 6 * 2e-6)
        shared = with_constants(d, **{f"collective__{kind}__sharing": 1.0})
        alone = with_constants(d, **{f"collective__{kind}__sharing": 0.0})
        values = base.step.values(BatchShape.prefill(1000))
        assert float(shared.work_of(values).activations[i]) == pytest.approx(
            4.0 * float(alone.work_of(values).activations[i]))


def test_a_norm_over_the_heads_of_all_ranks_is_one_more_collective() -> None:
    """MiniMax's q and k norms: under tensor parallelism a third all-reduce a layer, of 8 bytes a token."""
    for tp, more in ((1, 0.0), (4, 62.0)):
        works = step_model(deploy(model="minimax-m2.5", tp=tp, gpu="b200-sxm-180gb")).step.works
        small = [w for w in works if w.collective and w.message.get(("tokens", None)) == 8.0]
        assert sum(w.layers for w in small) == more


# ---- monotone where physics is ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_more_work_is_not_faster(case: dict[str, Any]) -> None:
    d = deploy(**case)
    times = [decode_step_time(d, b, 1500).expected_s for b in (1, 2, 3, 7, 8, 9, 31, 33, 64, 200, 511, 513, 800)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))
    prompts = [step_time(d, BatchShape.prefill(t)).expected_s for t in (1, 17, 128, 511, 513, 2048, 8192)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(prompts))
    faster = replace(d, device=replace(d.device, bandwidth_bytes_per_s=2 * d.device.bandwidth_bytes_per_s))
    assert decode_step_time(faster, 16, 1500).expected_s < decode_step_time(d, 16, 1500).expected_s
