"""Batch landmarks: B*, B_gemm, B_c, B_mem, the batch curve and its regions. Pure functions of floats or arrays.

Symbols as in `docs/physics.md` and the mission page: W weight bytes that a decode step streams, kv bytes of
cache that it reads for one sequence, P parameters that a token multiplies with, I* the ridge point. Nothing
here knows a model or a device; `bstar.physics.deployment_landmarks` puts a deployment's numbers in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from bstar.physics.roofline import (
    Number,
    _divide,
    arithmetic_intensity,
    arithmetic_intensity_limit,
    ridge_point,
)

if TYPE_CHECKING:
    from bstar.physics.deployment_landmarks import Landmarks
    from bstar.specs.deployment import Deployment
    from bstar.specs.workload import Workload

__all__ = [
    "Number", "Region", "amortized_limit_s", "amortized_time_s", "arithmetic_intensity",
    "arithmetic_intensity_limit", "b_compute", "b_compute_fixed_point", "b_gemm", "b_gemm_fixed_point", "b_mem",
    "b_mem_over_b_star", "b_star", "b_star_fixed_point", "batch_at_step_time", "doubling_gain",
    "expected_distinct_experts", "gain_knee", "in_flight", "in_flight_at_step_time", "landmarks_of",
    "max_request_rate", "region", "regions", "ridge_point", "solve_increasing", "static_slot_utilization",
    "step_time_floor_s",
]  # fmt: skip

Region = Literal["weight_bound", "saturating", "diminishing", "over_memory"]

# A doubling below B*/8 still gains 78 % or more: "a doubling nearly halves the amortized time" (mission §7).
WEIGHT_BOUND_FRACTION: Final = 1.0 / 8.0
_ITERATIONS: Final = 200


# ---- the walls -------------------------------------------------------------------------------------------


def b_star(weight_bytes: Number, kv_bytes_per_sequence: Number) -> Number:
    """B* = W / kv, in sequences: reading the KV cache costs as much as reading the weights.

    inf where a sequence has no cache. Source: mission §7.
    """
    return _divide(weight_bytes, kv_bytes_per_sequence)


def b_gemm(ridge: Number, weight_bytes: Number, parameters: Number) -> Number:
    """B_gemm = I*·W / (2P), in sequences: the weight GEMMs turn compute bound, at every context."""
    return _divide(ridge * weight_bytes, 2.0 * parameters)


def b_compute(ridge: Number, weight_bytes: Number, parameters: Number, kv_bytes_per_sequence: Number) -> Number:
    """B_c = I*·W / (2P − I*·kv), in sequences: the whole step's intensity crosses the ridge.

    nan where AI(∞) = 2P/kv never reaches the ridge. Attention FLOPs are left out, as in the source.
    """
    slack = 2.0 * parameters - ridge * kv_bytes_per_sequence
    if np.ndim(slack) == 0 and np.ndim(weight_bytes) == 0 and np.ndim(ridge) == 0:
        return float(ridge * weight_bytes / slack) if slack > 0 else float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(slack) > 0, ridge * weight_bytes / slack, np.nan)


def b_mem(kv_pool_bytes: Number, kv_bytes_per_sequence: Number) -> Number:
    """B_mem = pool / kv, in sequences, not rounded: beyond it requests wait or are preempted.

    `kv_pool_bytes` is usable − weights − activations − run-time overhead; below 0 it counts as 0.
    """
    return _divide(np.maximum(kv_pool_bytes, 0.0), kv_bytes_per_sequence)


def b_mem_over_b_star(usable_bytes: Number, weight_bytes: Number) -> Number:
    """B_mem / B* = (usable − W) / W: the context cancels. Overheads beside the weights left out."""
    return (usable_bytes - weight_bytes) / weight_bytes


# ---- fixed points: a MoE model streams more weights the more tokens there are ------------------------------


def solve_increasing(
    excess: Callable[[NDArray[np.float64]], NDArray[np.float64]], low: Number, high: Number
) -> NDArray[np.float64]:
    """Root of an increasing `excess` in [low, high], elementwise; high where it stays negative.

    False position with the Illinois halving (an end that stays twice counts half), and a bisection every
    eighth step so that no shape of `excess` can stall it.
    """
    lo, hi = (np.array(x, dtype=float) for x in np.broadcast_arrays(low, high))
    f_lo, f_hi = excess(lo), excess(hi)
    never, last = f_hi < 0.0, np.zeros(np.shape(lo))
    middle = hi
    for step in range(_ITERATIONS):
        width = f_hi - f_lo
        cut = lo - f_lo * (hi - lo) / np.where(width > 0.0, width, 1.0)
        bisect = (step % 8 == 7) | ~(width > 0.0) | ~((cut >= lo) & (cut <= hi))
        previous, middle = middle, np.where(bisect, 0.5 * (lo + hi), cut)
        value = excess(middle)
        side = np.where(value < 0.0, -1.0, 1.0)
        again = side == last
        below = side < 0.0
        f_lo = np.where(below, value, np.where(again, 0.5 * f_lo, f_lo))
        f_hi = np.where(below, np.where(again, 0.5 * f_hi, f_hi), value)
        lo, hi, last = np.where(below, middle, lo), np.where(below, hi, middle), side
        tolerance = 1e-14 * np.abs(middle)
        if np.all((value == 0.0) | (hi - lo <= tolerance) | (np.abs(middle - previous) <= tolerance)):
            break
    result: NDArray[np.float64] = np.where(never, np.asarray(high, dtype=float), middle)
    return result


def b_star_fixed_point(
    weight_bytes_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    kv_bytes_per_sequence: Number,
    weight_bytes_max: Number,
) -> Number:
    """B* of a model whose streamed bytes depend on the batch: W(B) = B·kv, by bisection.

    `weight_bytes_of` must be increasing and concave in B (expected distinct experts is), so that
    B·kv − W(B) changes sign once in (0, W_max/kv].
    """
    kv = np.asarray(kv_bytes_per_sequence, dtype=float)
    top = np.asarray(b_star(weight_bytes_max, kv), dtype=float)
    if not np.any(np.isfinite(top)):
        return float("inf") if top.ndim == 0 else top
    root = solve_increasing(lambda b: b * kv - weight_bytes_of(b), 0.0, top)
    return root if root.ndim else float(root)


def b_gemm_fixed_point(
    ridge: Number,
    weight_bytes_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    parameters: Number,
    weight_bytes_max: Number,
) -> Number:
    """B_gemm with W(B): B·2P = I*·W(B), P the active parameters of one token."""
    top = np.asarray(b_gemm(ridge, weight_bytes_max, parameters), dtype=float)
    root = solve_increasing(lambda b: b * (2.0 * parameters) - ridge * weight_bytes_of(b), 0.0, top)
    return root if root.ndim else float(root)


def b_compute_fixed_point(
    ridge: Number,
    weight_bytes_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    parameters: Number,
    kv_bytes_per_sequence: Number,
    weight_bytes_max: Number,
) -> Number:
    """B_c with W(B): B·2P = I*·(W(B) + B·kv); nan where 2P/kv never reaches the ridge."""
    top = np.asarray(b_compute(ridge, weight_bytes_max, parameters, kv_bytes_per_sequence), dtype=float)
    if np.all(np.isnan(top)):
        return top if top.ndim else float("nan")
    slack = 2.0 * parameters - ridge * kv_bytes_per_sequence
    root = solve_increasing(lambda b: b * slack - ridge * weight_bytes_of(b), 0.0, np.nan_to_num(top, nan=1.0))
    root = np.where(np.isnan(top), np.nan, root)
    return root if root.ndim else float(root)


def expected_distinct_experts(num_experts: Number, top_k: Number, tokens: Number) -> Number:
    """n·(1 − (1 − k/n)^tokens): experts that `tokens` tokens touch under uniform routing (mission §10)."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


# ---- the batch curve ---------------------------------------------------------------------------------------


def step_time_floor_s(weight_bytes: Number, kv_bytes: Number, bandwidth_bytes_per_s: Number) -> Number:
    """(W + Σ kv) / bandwidth, in seconds: the bandwidth floor of one decode step (mission §4)."""
    return (weight_bytes + kv_bytes) / bandwidth_bytes_per_s


def amortized_time_s(
    batch: Number, weight_bytes: Number, kv_bytes_per_sequence: Number, bandwidth_bytes_per_s: Number
) -> Number:
    """(W + B·kv) / (B·bandwidth), in seconds per output token of the system: 1 / output throughput.

    Not the TPOT that a user feels: that is the step time, and it does not fall as the batch grows.
    """
    return (weight_bytes / batch + kv_bytes_per_sequence) / bandwidth_bytes_per_s


def amortized_limit_s(kv_bytes_per_sequence: Number, bandwidth_bytes_per_s: Number) -> Number:
    """kv / bandwidth, in seconds: the amortized time that no batch undercuts; twice it at B*."""
    return kv_bytes_per_sequence / bandwidth_bytes_per_s


def doubling_gain(batch_over_b_star: Number) -> Number:
    """throughput(2B)/throughput(B) at x = B/B*: 2(1 + x)/(1 + 2x); 4/3 at B*."""
    x = batch_over_b_star
    return 2.0 * (1.0 + x) / (1.0 + 2.0 * x)


def gain_knee(gain_fraction: Number) -> Number:
    """B/B* at which a doubling gains `gain_fraction`: (1 − g)/(2g); 9.5 for 5 %. Inverse of doubling_gain − 1."""
    return (1.0 - gain_fraction) / (2.0 * gain_fraction)


def region(batch: float, b_star_value: float, b_mem_value: float) -> Region:
    """Which region of the batch curve `batch` sits in. Memory goes first: beyond B_mem nothing else counts."""
    if batch > b_mem_value:
        return "over_memory"
    if batch <= b_star_value * WEIGHT_BOUND_FRACTION:
        return "weight_bound"
    return "saturating" if batch <= b_star_value else "diminishing"


def regions(b_star_value: float, b_mem_value: float) -> tuple[tuple[Region, float, float], ...]:
    """The regions that exist, as (name, from batch, to batch), ascending; the last one is open (inf)."""
    edges: list[tuple[Region, float, float]] = [
        ("weight_bound", 0.0, b_star_value * WEIGHT_BOUND_FRACTION),
        ("saturating", b_star_value * WEIGHT_BOUND_FRACTION, b_star_value),
        ("diminishing", b_star_value, float("inf")),
    ]
    out = [(name, start, min(stop, b_mem_value)) for name, start, stop in edges if start < b_mem_value]
    return (*out, ("over_memory", b_mem_value, float("inf")))


# ---- operating points ----------------------------------------------------------------------------------------


def in_flight_at_step_time(rate_per_s: Number, output_tokens: Number, step_s: Number) -> Number:
    """Little: rate · output tokens · step, in requests: in flight if every step took `step_s`.

    Counts `output_tokens` steps of residence as the source does; (n − 1) steps plus TTFT is exact.
    """
    return rate_per_s * output_tokens * step_s


def in_flight(
    rate_per_s: Number, output_tokens: Number, weight_bytes: Number, kv_bytes_per_sequence: Number,
    bandwidth_bytes_per_s: Number,
) -> Number:
    """The operating point B = rate·n_out·step(B) of a bandwidth-bound decode, in sequences; inf where unstable."""
    per_step = rate_per_s * output_tokens / bandwidth_bytes_per_s
    slack = 1.0 - per_step * kv_bytes_per_sequence
    if np.ndim(slack) == 0 and np.ndim(weight_bytes) == 0:
        return float(per_step * weight_bytes / slack) if slack > 0 else float("inf")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(slack) > 0, per_step * weight_bytes / slack, np.inf)


def batch_at_step_time(
    step_s: Number, weight_bytes: Number, kv_bytes_per_sequence: Number, bandwidth_bytes_per_s: Number
) -> Number:
    """Largest batch whose floor step takes at most `step_s`: (step·bandwidth − W)/kv, not below 0."""
    return b_mem(step_s * bandwidth_bytes_per_s - weight_bytes, kv_bytes_per_sequence)


def max_request_rate(batch: Number, output_tokens: Number, step_s: Number) -> Number:
    """B / (n_out · step), in requests per second: what a full batch completes, before prefill."""
    return batch / (output_tokens * step_s)


def static_slot_utilization(output_tokens: NDArray[np.float64] | list[float]) -> float:
    """Share of slot-steps of one static batch that make a token: mean / max of the output lengths."""
    lengths = np.asarray(output_tokens, dtype=float)
    return float(lengths.mean() / lengths.max())


def landmarks_of(deployment: Deployment, workload: Workload | float) -> Landmarks:
    """B*, B_gemm, B_c, B_mem, B_tok of a deployment under a workload (or at one context, in tokens).

    What B counts under TP, PP and attention data parallelism: `bstar.physics.deployment_landmarks`.
    Raises SpecError where the device cannot compute the model's dtype.
    """
    from bstar.physics.deployment_landmarks import landmarks_at

    return landmarks_at(deployment, workload)
