"""The gaps between tokens of a whole run, kept as runs of steps: exact mean and quantiles without storing every token.

A simulated decode step gives every sequence in it one token, so each of them sees the step's seconds as a gap. A run
of m equal steps with w sequences is m · w gaps, step j = 1 … m of base + slope · j seconds. Gaps that are no single
step (after a preemption, or where a sequence was passed over) are listed one by one; so are those of a real server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bstar.metrics.distribution import PERCENTILES, Distribution, interpolated, percentiles_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _floats() -> Floats:
    return np.zeros(0)


def _ints() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenGaps:
    """Runs of steps (four arrays of equal length) and single gaps, in seconds.

    base_s, slope_s   step j = 1 … steps takes base_s + slope_s · j; slope_s is not negative
    steps, weight     steps of the run, and how many sequences see each as a gap
    single_s          gaps one by one
    """

    base_s: Floats = field(default_factory=_floats)
    slope_s: Floats = field(default_factory=_floats)
    steps: Ints = field(default_factory=_ints)
    weight: Ints = field(default_factory=_ints)
    single_s: Floats = field(default_factory=_floats)

    @classmethod
    def of_samples(cls, gaps_s: ArrayLike) -> TokenGaps:
        """Of measured gaps."""
        return cls(single_s=np.asarray(gaps_s, dtype=float))

    @classmethod
    def of_token_times(cls, times_s: Sequence[ArrayLike]) -> TokenGaps:
        """Of the token times of each request."""
        parts = [np.diff(np.asarray(t, dtype=float)) for t in times_s]
        return cls.of_samples(np.concatenate(parts) if parts else [])

    @property
    def count(self) -> int:
        return int(np.dot(self.steps.astype(np.int64), self.weight.astype(np.int64))) + self.single_s.size

    @property
    def total_s(self) -> float:
        """Sum of all gaps: the time from first to last token, over all requests."""
        m = self.steps.astype(float)
        runs = self.weight * (m * self.base_s + self.slope_s * (m * (m + 1.0) / 2.0))
        return float(runs.sum() + self.single_s.sum())

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count else None

    def expanded(self) -> Floats:
        """Every gap, for tests and small runs; unordered."""
        parts = [
            np.repeat(b + s * np.arange(1.0, m + 1.0), w)
            for b, s, m, w in zip(self.base_s, self.slope_s, self.steps, self.weight, strict=True)
        ]
        return np.concatenate([*parts, self.single_s])

    def quantile(self, fraction: float) -> float | None:
        """What numpy's quantile gives on `expanded()`; None without gaps."""
        return self.quantiles([fraction])[0] if self.count else None

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Several quantiles. Raises ValueError without gaps."""
        count = self.count
        if count == 0:
            raise ValueError("there are no gaps")
        order = _Order(self._as_runs())
        out = []
        for fraction in fractions:
            place = (count - 1) * fraction
            below = int(place)
            low = order.statistic(below)
            high = low if below == place else order.statistic(min(below + 1, count - 1))
            out.append(interpolated(low, high, place - below))
        return out

    def distribution(self) -> Distribution:
        """Mean, standard deviation and percentiles of all gaps."""
        if self.count == 0:
            return Distribution(count=0)
        mean = self.total_s / self.count
        m, runs = self.steps.astype(float), self._as_runs()
        # Var = E[(x - mean)²], summed over a run in closed form around its own base.
        off, s1, s2 = self.base_s - mean, m * (m + 1.0) / 2.0, m * (m + 1.0) * (2.0 * m + 1.0) / 6.0
        square = self.weight * (m * off * off + 2.0 * off * self.slope_s * s1 + self.slope_s**2 * s2)
        variance = (square.sum() + ((self.single_s - mean) ** 2).sum()) / self.count
        return Distribution(
            count=self.count, mean=mean, std=math.sqrt(max(float(variance), 0.0)), min=float(runs.first.min()),
            max=float(runs.last.max()), **percentiles_of(self.quantiles([p / 100.0 for p in PERCENTILES])),
        )  # fmt: skip

    def joined(self, *others: TokenGaps) -> TokenGaps:
        """All gaps of several runs (replicas, replications)."""
        every = (self, *others)
        return TokenGaps(**{
            name: np.concatenate([getattr(g, name) for g in every])
            for name in ("base_s", "slope_s", "steps", "weight", "single_s")
        })  # fmt: skip

    def _as_runs(self) -> _Runs:
        """Runs and single gaps alike, empty ones left out, equal single gaps together."""
        single, times = np.unique(self.single_s, return_counts=True)
        keep = (self.steps > 0) & (self.weight > 0)
        nothing = np.zeros(single.size)
        return _Runs(
            np.concatenate([self.base_s[keep], single]), np.concatenate([self.slope_s[keep], nothing]),
            np.concatenate([self.steps[keep].astype(np.int64), np.ones(single.size, dtype=np.int64)]),
            np.concatenate([self.weight[keep].astype(np.int64), times.astype(np.int64)]),
        )  # fmt: skip


class _Runs:
    """Runs of steps with the order of their values."""

    def __init__(self, base: Floats, slope: Floats, steps: Ints, weight: Ints) -> None:
        self.base, self.slope, self.steps, self.weight = base, slope, steps, weight
        self.first = base + slope
        self.last = base + slope * steps

    def upto(self, value: float) -> Ints:
        """Steps of each run that take at most `value`, exactly as their seconds are computed."""
        steps = self.steps
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            guess = np.floor((value - self.base) / self.slope)
        guess = np.where(self.slope > 0, guess, np.where(self.first <= value, np.inf, 0.0))
        found = np.clip(guess, 0, steps).astype(np.int64)
        # The division can be a step off either way.
        found += (found < steps) & (self.base + self.slope * (found + 1) <= value)
        found -= (found > 0) & (self.base + self.slope * found > value)
        return found

    def part(self, chosen: NDArray[np.bool_] | Ints) -> _Runs:
        return _Runs(self.base[chosen], self.slope[chosen], self.steps[chosen], self.weight[chosen])


class _Order:
    """Brackets for order statistics: runs sorted by their smallest and by their largest value."""

    def __init__(self, runs: _Runs) -> None:
        self.runs = runs
        values = runs.steps * runs.weight
        self.by_first, self.by_last = np.argsort(runs.first), np.argsort(runs.last)
        self.upto_first, self.upto_last = np.cumsum(values[self.by_first]), np.cumsum(values[self.by_last])

    def statistic(self, rank: int) -> float:
        """The value with `rank` values before it."""
        runs = self.runs
        # At most the runs that begin by v, and at least those that end by v, have values up to v.
        low = float(runs.first[self.by_first[np.searchsorted(self.upto_first, rank, side="right")]])
        high = float(runs.last[self.by_last[np.searchsorted(self.upto_last, rank, side="right")]])
        ended = int(np.searchsorted(runs.last[self.by_last], low, side="right"))
        base = int(self.upto_last[ended - 1]) if ended else 0
        return _order_statistic(runs.part((runs.last > low) & (runs.first <= high)), rank - base, low, high)


def _order_statistic(runs: _Runs, rank: int, low: float, high: float) -> float:
    """The value in [low, high] with `rank` values of `runs` before it, by halving the range of floating-point numbers.

    Positive floats are ordered as their bits are, so at most 64 halvings are exact; runs that the range has left
    behind are dropped on the way.
    """
    base = 0  # values of dropped runs, all of them before the one that is sought
    if rank < 0 or _count(runs, low) > rank:
        return low
    low_bits, high_bits = _bits(low), _bits(high)
    while high_bits - low_bits > 1:
        middle = (low_bits + high_bits) // 2
        value = _float(middle)
        if base + _count(runs, value) > rank:
            high_bits = middle
            keep = runs.first <= value
        else:
            low_bits = middle
            keep = runs.last > value
            base += int((runs.steps * runs.weight)[~keep].sum())
        if not keep.all():
            runs = runs.part(keep)
    return _float(high_bits)


def _count(runs: _Runs, value: float) -> int:
    return int(runs.upto(value) @ runs.weight)


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
