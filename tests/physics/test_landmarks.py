"""The landmark formulas: identities, vectorisation, fixed points, and a deployment's numbers put in."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bstar
from bstar.errors import SpecError
from bstar.physics import landmarks as lm
from bstar.physics.kv_cache import kv_bytes_per_sequence
from bstar.physics.landmarks import landmarks_of
from bstar.physics.operators import compiled_step
from bstar.physics.weights import streamed_weight_bytes
from bstar.specs.deployment import Deployment
from bstar.specs.workload import LengthDistribution, Workload

BYTES = st.floats(1e6, 1e12)
POSITIVE = st.floats(1e-3, 1e4)


@given(weights=BYTES, kv=BYTES, bandwidth=st.floats(1e11, 1e13))
def test_at_b_star_the_amortized_time_is_twice_its_limit(weights: float, kv: float, bandwidth: float) -> None:
    at = lm.amortized_time_s(lm.b_star(weights, kv), weights, kv, bandwidth)
    assert math.isclose(float(at), 2 * float(lm.amortized_limit_s(kv, bandwidth)), rel_tol=1e-9)


@given(x=POSITIVE)
def test_doubling_gain_is_the_ratio_of_throughputs(x: float) -> None:
    weights, kv, bandwidth = 16e9, 1e8, 2e12
    batch = x * float(lm.b_star(weights, kv))
    ratio = lm.amortized_time_s(batch, weights, kv, bandwidth) / lm.amortized_time_s(2 * batch, weights, kv, bandwidth)
    assert math.isclose(float(lm.doubling_gain(x)), float(ratio), rel_tol=1e-9)


@given(gain=st.floats(0.001, 0.9))
def test_the_knee_inverts_the_gain(gain: float) -> None:
    assert math.isclose(float(lm.doubling_gain(lm.gain_knee(gain))) - 1.0, gain, rel_tol=1e-9)


@given(ridge=st.floats(1, 1000), weights=BYTES, parameters=st.floats(1e6, 1e12), kv=st.floats(1, 1e10))
def test_b_compute_exists_exactly_where_the_limit_passes_the_ridge(
    ridge: float, weights: float, parameters: float, kv: float
) -> None:
    b = float(lm.b_compute(ridge, weights, parameters, kv))
    limit = float(lm.arithmetic_intensity_limit(parameters, kv))
    if math.isclose(limit, ridge, rel_tol=1e-6):
        return
    assert math.isnan(b) == (limit < ridge)
    if limit > ridge:
        assert math.isclose(float(lm.arithmetic_intensity(b, parameters, weights, kv)), ridge, rel_tol=1e-6)
        assert b >= float(lm.b_gemm(ridge, weights, parameters)) * (1 - 1e-9)


@given(low=st.floats(0.01, 10), weights=BYTES, share=st.floats(0.01, 0.99))
def test_b_mem_over_b_star_cancels_the_context(low: float, weights: float, share: float) -> None:
    usable = weights / share
    for context in (512, 8192):
        kv = low * context
        ratio = lm.b_mem(usable - weights, kv) / lm.b_star(weights, kv)
        assert math.isclose(float(ratio), float(lm.b_mem_over_b_star(usable, weights)), rel_tol=1e-9)
    assert (float(lm.b_mem_over_b_star(usable, weights)) >= 1) == (share <= 0.5)


def test_functions_broadcast_and_agree_with_their_scalars() -> None:
    weights = np.array([16e9, 140e9])[:, None]
    kv = np.array([6.7e7, 1.1e9, 3e9])[None, :]
    calls = {
        "b_star": (lm.b_star, (weights, kv)), "b_mem": (lm.b_mem, (weights, kv)),
        "b_compute": (lm.b_compute, (161.0, weights, weights / 2, kv)),
        "b_gemm": (lm.b_gemm, (161.0, weights, weights / 2)),
        "intensity": (lm.arithmetic_intensity, (64.0, weights / 2, weights, kv)),
        "amortized": (lm.amortized_time_s, (64.0, weights, kv, 2e12)),
        "in_flight": (lm.in_flight, (10.0, 500.0, weights, kv, 3.3e12)),
    }  # fmt: skip
    for name, (function, arguments) in calls.items():
        table = np.broadcast_to(np.asarray(function(*arguments)), (2, 3))  # type: ignore[operator]
        for i in range(2):
            for j in range(3):
                scalar = [float(np.broadcast_to(a, (2, 3))[i, j]) for a in arguments]  # type: ignore[arg-type]
                assert np.isclose(table[i, j], function(*scalar), equal_nan=True), name  # type: ignore[operator]


def test_a_fixed_point_of_constant_weights_is_the_plain_formula() -> None:
    def constant(b: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return np.full(np.shape(b), 16e9)

    kv = np.array([6.7e7, 1.07e9])
    assert np.allclose(lm.b_star_fixed_point(constant, kv, 16e9), lm.b_star(16e9, kv))
    assert np.allclose(lm.b_gemm_fixed_point(161.0, constant, 8e9, 16e9), lm.b_gemm(161.0, 16e9, 8e9))
    assert np.allclose(
        lm.b_compute_fixed_point(161.0, constant, 8e9, kv, 16e9), lm.b_compute(161.0, 16e9, 8e9, kv), equal_nan=True)


@given(dense=st.floats(1e8, 1e10), expert=st.floats(1e6, 1e9), kv=st.floats(1e5, 1e9))
def test_the_fixed_point_of_a_moe_solves_its_equation(dense: float, expert: float, kv: float) -> None:
    def weights(b: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return dense + expert * np.asarray(lm.expected_distinct_experts(128.0, 8.0, b))

    b = float(lm.b_star_fixed_point(weights, kv, dense + 128 * expert))
    assert math.isclose(float(weights(np.array(b))), b * kv, rel_tol=1e-6)
    assert b <= float(lm.b_star(dense + 128 * expert, kv)) * (1 + 1e-9)


def test_a_sequence_without_cache_has_no_b_star() -> None:
    assert lm.b_star(16e9, 0.0) == math.inf
    assert lm.b_star_fixed_point(lambda b: np.full(np.shape(b), 1.0), 0.0, 1.0) == math.inf


def test_regions_cover_the_axis_once() -> None:
    for b_star, b_mem in ((100.0, 350.0), (100.0, 60.0), (100.0, 5.0), (math.inf, 10.0)):
        spans = lm.regions(b_star, b_mem)
        assert spans[0][1] == 0.0
        assert spans[-1][0] == "over_memory"
        for (name, start, stop), following in pairwise(spans):
            assert stop == following[1]
            assert lm.region((start + stop) / 2, b_star, b_mem) == name
    assert lm.region(12.5, 100.0, 1000.0) == "weight_bound"
    assert lm.region(100.0, 100.0, 1000.0) == "saturating"
    assert lm.region(101.0, 100.0, 1000.0) == "diminishing"
    assert lm.region(1001.0, 100.0, 1000.0) == "over_memory"


def deploy(model: str = "llama-3.1-8b", gpu: str = "h100-sxm-80gb", **settings: object) -> Deployment:
    return bstar.deployment(model=model, gpu=gpu, **settings)  # type: ignore[no-any-return, arg-type]


def test_a_dense_deployment_is_the_plain_formulas() -> None:
    d = deploy()
    marks = landmarks_of(d, 4096)
    weights = streamed_weight_bytes(d.model)
    kv = kv_bytes_per_sequence(d.model, d.kv_format, 4096)
    assert math.isclose(marks.b_star or 0, weights / kv, rel_tol=1e-9)
    assert math.isclose(marks.b_gemm, marks.ridge_point * weights / (2 * marks.parameters), rel_tol=1e-9)
    assert math.isclose(marks.ridge_point, 989.4e12 / 3.35e12, rel_tol=1e-9)
    assert marks.b_compute is None
    assert math.isclose(marks.b_mem or 0, marks.kv_pool_bytes / kv, rel_tol=1e-9)
    assert math.isclose(marks.parameters, 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
                        + 4096 * 128256, rel_tol=1e-12)
    assert marks.attention_flops_per_sequence == 4 * 32 * 32 * 128 * 4096


def test_a_workload_is_seen_at_its_mean_decode_context() -> None:
    lengths = LengthDistribution(kind="uniform", mean=500, cv=0.3, low=100, high=900)
    workload = Workload(input_tokens=LengthDistribution(kind="fixed", mean=1000), output_tokens=lengths)
    marks = landmarks_of(deploy(), workload)
    assert math.isclose(marks.context_tokens, 1000 + 500 * 1.09 / 2)
    assert marks.full_context_tokens == 1500
    assert (marks.b_mem_full or 0) < (marks.b_mem or 0)


def test_tensor_parallelism_keeps_b_star_until_it_replicates_the_cache() -> None:
    at = {tp: landmarks_of(deploy(tp=tp), 4096).b_star or 0.0 for tp in (1, 2, 8, 16)}
    assert math.isclose(at[1], at[2], rel_tol=1e-3)
    assert math.isclose(at[1], at[8], rel_tol=1e-3)
    # 16 ranks, 8 KV heads: half the weights for the same cache (q, out and the FFN halve; k and v do not).
    assert at[16] < 0.55 * at[8]


def test_attention_data_parallelism_and_stages_multiply_b_star() -> None:
    one = landmarks_of(deploy("deepseek-r1", "h200-sxm-141gb", tp=8), 4096)
    many = landmarks_of(deploy("deepseek-r1", "h200-sxm-141gb", attention_dp=8, ep=8), 4096)
    # TP replicates the latent on all ranks, attention DP does not: eight times the sequences for about as many bytes.
    assert (many.b_star or 0) > 6 * (one.b_star or 0)
    assert many.b_tok == 8 * one.b_tok
    whole, staged = landmarks_of(deploy(), 4096), landmarks_of(deploy(pp=2), 4096)
    assert math.isclose(staged.b_star or 0, 2 * (whole.b_star or 0), rel_tol=1e-9)


def test_sparse_attention_reads_less_than_it_keeps() -> None:
    marks = landmarks_of(deploy("deepseek-v3.2", "h200-sxm-141gb", tp=8), 60_000)
    assert marks.kv_bytes_per_sequence < 0.5 * marks.kept_bytes_per_sequence


def test_moe_b_star_is_the_fixed_point_of_the_streamed_weights() -> None:
    d = deploy("qwen3-30b-a3b", "a100-sxm-80gb")
    marks = landmarks_of(d, 30_000)
    assert marks.b_star is not None
    assert math.isclose(
        marks.b_star * marks.kv_bytes_per_sequence, streamed_weight_bytes(d.model, tokens=marks.b_star), rel_tol=1e-6)
    assert marks.weight_bytes < marks.weight_bytes_all
    step = compiled_step(d.model, d.parallel, d.kv_format, "all")
    assert math.isclose(marks.weight_bytes_all, float(step.weight_bytes.sum()), rel_tol=1e-12)


def test_a_context_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SpecError, match="context"):
        landmarks_of(deploy(), 0)
