"""Arrivals as renewal processes: independent gaps of one law, in unit time or at a rate.

    exponential   Poisson process                     CV² = 1
    gamma         `vllm bench serve --burstiness k`   CV² = 1/k      (k = 1: exponential; k → ∞: constant)
    weibull       shape k                             CV² = Γ(1 + 2/k)/Γ(1 + 1/k)² - 1
    constant      evenly spaced                       CV² = 0

The first request comes after a gap, as in vLLM 0.32's `get_request` (vllm/benchmarks/serve.py), which
draws one delay for every request, the first included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bstar.errors import SpecError
from bstar.traffic.lengths import Floats

GapKind = Literal["exponential", "gamma", "weibull", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The law of the gaps between arrivals, with mean 1; `shape` is that of the gamma or the Weibull."""

    kind: GapKind = "exponential"
    shape: float = 1.0

    def __post_init__(self) -> None:
        low = 0.01 if self.kind == "weibull" else 0.0  # below, the mean overflows
        if not low < self.shape < math.inf:
            name = "burstiness" if self.kind == "gamma" else "shape"
            raise SpecError(f"{name}: must be above {low:g} and finite, is {self.shape}")

    @property
    def cv_squared(self) -> float:
        """Variance over squared mean."""
        if self.kind == "constant":
            return 0.0
        if self.kind == "gamma":
            return 1.0 / self.shape
        if self.kind == "exponential":
            return 1.0
        first, second = (math.lgamma(1.0 + i / self.shape) for i in (1, 2))
        return math.exp(second - 2.0 * first) - 1.0

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """`count` gaps of mean 1."""
        if self.kind == "exponential":
            return rng.standard_exponential(count)
        if self.kind == "gamma":
            gaps = rng.standard_gamma(self.shape, count)
            gaps /= self.shape
            return gaps
        if self.kind == "weibull":
            gaps = rng.weibull(self.shape, count)
            gaps /= math.gamma(1.0 + 1.0 / self.shape)
            return gaps
        return np.ones(count)


def arrivals(
    gaps: Gaps, rate_per_s: float, rng: np.random.Generator, *, count: int | None = None,
    duration_s: float | None = None, rescale: bool = False,
) -> Floats:  # fmt: skip
    """Arrival times in seconds, ascending: `count` of them, or all up to `duration_s`.

    rescale   stretches them so that the last comes at exactly count/rate, as `vllm bench serve` does
    """
    # A hair more than duration·rate, so that an evenly spaced request at the very end is not lost to rounding.
    limit = None if duration_s is None else duration_s * rate_per_s * (1 + 1e-12)
    times = epochs(gaps, rng, count=count, limit=limit)
    if rescale and times.size and times[-1] > 0:
        times *= times.size / times[-1]
    times /= rate_per_s
    return times


def ramp_up(
    gaps: Gaps, start_per_s: float, end_per_s: float, rng: np.random.Generator, *, count: int,
    strategy: Literal["linear", "exponential"] = "linear",
) -> Floats:  # fmt: skip
    """Arrival times with vLLM's ramp-up: the rate grows with the NUMBER of the request, not with time.

    Request i of n comes a gap of mean 1/rate_i after the one before it, rate_i going from start to end along
    a line, or in equal ratios, in i/(n - 1). Source: `_get_current_request_rate` in vLLM 0.32's serve.py
    (`--ramp-up-strategy`), which does not rescale such arrivals. A ramp in time is `rates.ramp`.
    """
    for name, rate in (("start", start_per_s), ("end", end_per_s)):
        if not 0 < rate < math.inf:
            raise SpecError(f"ramp-up: the {name} rate must be positive and finite, is {rate}")
    progress = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        rates = start_per_s + (end_per_s - start_per_s) * progress
    elif strategy == "exponential":
        rates = start_per_s * (end_per_s / start_per_s) ** progress
    else:
        raise SpecError(f"ramp-up: the strategy is linear or exponential, is {strategy!r}")
    return np.cumsum(gaps.draw(count, rng) / rates)


def epochs(gaps: Gaps, rng: np.random.Generator, *, count: int | None, limit: float | None) -> Floats:
    """Arrivals in unit time (mean gap 1): the first `count`, those up to `limit`, or the fewer of both."""
    if count is not None and limit is None:
        return _running_sum(gaps, count, rng)
    assert limit is not None
    pieces: list[Floats] = []
    last, left = 0.0, math.inf if count is None else count
    while last <= limit and left > 0:
        size = int(min(left, 1.05 * max(limit - last, 0.0) + 100.0))
        piece = gaps.draw(size, rng)
        piece[0] += last
        np.cumsum(piece, out=piece)
        pieces.append(piece)
        last, left = float(piece[-1]), left - size
    times = np.concatenate(pieces) if pieces else np.empty(0)
    return times[: int(np.searchsorted(times, limit, side="right"))]


def _running_sum(gaps: Gaps, count: int, rng: np.random.Generator) -> Floats:
    if gaps.kind == "constant":
        return np.arange(1.0, count + 1.0)
    times = gaps.draw(count, rng)
    np.cumsum(times, out=times)
    return times
