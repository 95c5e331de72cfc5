"""The roofline: ridge point, arithmetic intensity, achieved fractions. Pure functions, floats or numpy arrays.

Every argument and result broadcasts: pass arrays of any compatible shapes. Symbols of `docs/physics.md`:
P parameters that a token multiplies with, W bytes of weights a step streams, kv bytes of cache a step reads
for one sequence, a·L the attention FLOPs of one query over its context, I* the ridge point.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Number: TypeAlias = float | NDArray[np.float64]


def ridge_point(peak_flops_per_s: Number, bandwidth_bytes_per_s: Number) -> Number:
    """I* = peak / bandwidth, in FLOP/byte: below it memory bounds, above it compute.

    `peak_flops_per_s` is the dense peak of the dtype that the GEMM computes in (Williams et al. 2009).
    """
    return peak_flops_per_s / bandwidth_bytes_per_s


def flops_per_token(parameters: Number) -> Number:
    """2·P FLOPs: one multiply and one add per parameter that the token meets."""
    return 2.0 * parameters


def arithmetic_intensity(
    batch: Number,
    parameters: Number,
    weight_bytes: Number,
    kv_bytes_per_sequence: Number = 0.0,
    attention_flops_per_sequence: Number = 0.0,
) -> Number:
    """AI(B) = B·(2P + a·L) / (W + B·kv) of one decode step, in FLOP/byte.

    `attention_flops_per_sequence` is a·L; 0 gives the intensity of the sources, which leave it out.
    """
    flops = batch * (2.0 * parameters + attention_flops_per_sequence)
    return flops / (weight_bytes + batch * kv_bytes_per_sequence)


def arithmetic_intensity_limit(
    parameters: Number, kv_bytes_per_sequence: Number, attention_flops_per_sequence: Number = 0.0
) -> Number:
    """AI(∞) = (2P + a·L) / kv, in FLOP/byte: what no batch exceeds (inf where kv is 0)."""
    with np.errstate(divide="ignore"):
        return _divide(2.0 * parameters + attention_flops_per_sequence, kv_bytes_per_sequence)


def attainable_flops_per_s(
    intensity: Number, peak_flops_per_s: Number, bandwidth_bytes_per_s: Number
) -> Number:
    """The roof over `intensity` (FLOP/byte): min(peak, intensity · bandwidth), in FLOP/s."""
    return np.minimum(peak_flops_per_s, intensity * bandwidth_bytes_per_s)


def model_bandwidth_utilization(moved_bytes_per_s: Number, bandwidth_bytes_per_s: Number) -> Number:
    """MBU: bytes moved per second over what the memory can move, a fraction."""
    return moved_bytes_per_s / bandwidth_bytes_per_s


def model_flops_utilization(achieved_flops_per_s: Number, peak_flops_per_s: Number) -> Number:
    """MFU: useful FLOP/s over the dense peak, a fraction."""
    return achieved_flops_per_s / peak_flops_per_s


def _divide(numerator: Number, denominator: Number) -> Number:
    """numerator / denominator with x / 0 = inf, for floats as for arrays."""
    if isinstance(numerator, np.ndarray) or isinstance(denominator, np.ndarray):
        with np.errstate(divide="ignore", invalid="ignore"):
            result: NDArray[np.float64] = np.true_divide(numerator, denominator)
            return result
    return numerator / denominator if denominator else (float("inf") if numerator > 0 else float("nan"))
