"""A Prometheus histogram, and what happened between two readings of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bstar.metrics.distribution import interpolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations by upper bound (the last bound is infinite).

    bounds   rising upper bounds
    counts   observations in each bucket (not cumulative)
    total    sum of the observed values; nan where the server gives none
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float = math.nan

    @classmethod
    def of_cumulative(cls, buckets: dict[float, float], total: float, count: float | None = None) -> Histogram:
        """From `le` -> cumulative count, as a scrape shows it."""
        cumulative = dict(buckets)
        if math.inf not in cumulative and count is not None:
            cumulative[math.inf] = count
        bounds = tuple(sorted(cumulative))
        rising = np.maximum.accumulate([cumulative[b] for b in bounds]) if bounds else np.zeros(0)
        return cls(bounds=bounds, counts=tuple(np.diff(rising, prepend=0.0).tolist()), total=total)

    @property
    def count(self) -> float:
        return math.fsum(self.counts)

    @property
    def mean(self) -> float:
        """nan without observations."""
        return self.total / self.count if self.count > 0 else math.nan

    def minus(self, earlier: Histogram | None) -> Histogram:
        """What was observed since `earlier`. A count that fell (a restart) makes all of this one new."""
        if earlier is None or earlier.bounds != self.bounds or self.count < earlier.count:
            return self
        counts = tuple(max(a - b, 0.0) for a, b in zip(self.counts, earlier.counts, strict=True))
        return Histogram(bounds=self.bounds, counts=counts, total=self.total - earlier.total)

    def plus(self, other: Histogram) -> Histogram:
        """Both together; with other bounds only what both resolve is kept."""
        if other.bounds == self.bounds:
            counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
            return Histogram(bounds=self.bounds, counts=counts, total=self.total + other.total)
        common = tuple(sorted(set(self.bounds) & set(other.bounds)))
        if not common or common[-1] != math.inf:
            return self
        joint = np.array([self._upto(b) + other._upto(b) for b in common])
        return Histogram(bounds=common, counts=tuple(np.diff(joint, prepend=0.0).tolist()),
                         total=self.total + other.total)

    def _upto(self, bound: float) -> float:
        return math.fsum(c for b, c in zip(self.bounds, self.counts, strict=True) if b <= bound)

    def quantile(self, fraction: float) -> float:
        """Linear within a bucket, as PromQL's histogram_quantile; the last finite bound at most. nan when empty."""
        if not self.count > 0:
            return math.nan
        wanted, below, low = fraction * self.count, 0.0, 0.0
        for bound, inside in zip(self.bounds, self.counts, strict=True):
            if inside > 0 and below + inside >= wanted:
                return low if math.isinf(bound) else interpolated(low, bound, (wanted - below) / inside)
            below += inside
            low = bound if math.isfinite(bound) else low
        return low

    def resolution(self, fraction: float) -> tuple[float, float]:
        """The bucket that the quantile lies in: all that the histogram knows of it. nan when empty."""
        if not self.count > 0:
            return (math.nan, math.nan)
        wanted, below, low = fraction * self.count, 0.0, 0.0
        for bound, inside in zip(self.bounds, self.counts, strict=True):
            below += inside
            if inside > 0 and below >= wanted:
                return (low, bound)
            low = bound
        return (low, math.inf)

    @property
    def _used(self) -> int:
        """Buckets with an observation."""
        return sum(c > 0 for c in self.counts)

    def known_quantile(self, fraction: float) -> float:
        """The quantile where its bucket is narrower than the value, else nan: a bucket from 0 to 0.3 s tells no median.

        Also nan where the mean rules the value out (no share 1 - q of values that are not negative is above
        mean / (1 - q)), and where all observations lie in one bucket: then the mean is all that is known.
        """
        low, high = self.resolution(fraction)
        value = self.quantile(fraction)
        if self._used < 2 or not high - low <= value:
            return math.nan
        most = self.mean / (1.0 - fraction) if fraction < 1.0 else math.inf
        return math.nan if value > most else value

    def to_dict(self) -> dict[str, Any]:
        """Figures for a summary; None where there are none, and for percentiles that the buckets do not tell.

        buckets   percentile -> the bucket that it lies in (None: no upper bound), where there is more than one
        """
        keys = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        out: dict[str, Any] = {"count": self.count, "mean": _number(self.mean)}
        out |= {name: _number(self.known_quantile(q)) for name, q in keys.items()}
        if self._used > 1:
            out["buckets"] = {name: [None if math.isinf(v) else v for v in self.resolution(q)]
                              for name, q in keys.items()}
        return out


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
