"""Confidence intervals of figures of a run, or of several: what each assumes, and when it says nothing.

    replications        a mean of independent values: Student's t
    batch_means         a mean of one run's values, which hang together: batches of them, then Student's t over their
                        means (Schmeiser 1982, "Batch size effects in the analysis of simulation output": 10 to 30
                        batches; below FEWEST_BATCHES the quantile of t is of the deviations' own size)
    quantile_interval   a percentile of one run's values: two of them by rank (David and Nagaraja, "Order statistics",
                        section 7.1), so never wider than the data; for values that hang together the ranks are those
                        of fewer, independent ones
    share_interval      the share of requests that something is true of: exact binomial (Clopper and Pearson 1934),
                        again of as many independent ones
    rate_interval       a rate over one run: equal slices of its time, as batches

No width is given where there are too few values to say one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# Student's t at 95 % is 12.7 with 1 degree of freedom, 4.3 with 2, 2.8 with 4.
FEWEST_BATCHES: Final = 5
_MOST_SLICES: Final = 12
# Answers that a slice of time should have, on average.
_ANSWERS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From low to high at `confidence`; without them mean ± half_width. No width where nothing can be said.

    mean         the estimate: of a mean, a percentile or a rate
    half_width   half of the interval
    batches      batches, replications, slices or independent values that it comes from
    low, high    its ends where they do not lie evenly around the estimate
    """

    mean: float | None
    half_width: float | None
    confidence: float
    batches: int
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """(low, high); None where there is no width."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        if self.mean is None or self.half_width is None:
            return None
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def relative_half_width(self) -> float | None:
        """Half width as a fraction of the mean."""
        if self.mean is None or self.half_width is None or self.mean == 0:
            return None
        return self.half_width / abs(self.mean)

    def holds(self, value: float) -> bool:
        """Whether `value` is inside."""
        return self.ends is not None and self.ends[0] <= value <= self.ends[1]

    def is_apart_from(self, other: Interval) -> bool | None:
        """Whether the two do not touch; None where one has no width."""
        if self.ends is None or other.ends is None:
            return None
        return self.ends[0] > other.ends[1] or other.ends[0] > self.ends[1]

    def to_dict(self) -> dict[str, float | int | None]:
        found: dict[str, float | int | None] = {
            "mean": self.mean, "half_width": self.half_width, "confidence": self.confidence, "batches": self.batches}
        return found if self.low is None else found | {"low": self.low, "high": self.high}


def replications(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """The interval of the mean of independent values, one a replication (Student's t)."""
    known = _known(values)
    if known.size == 0:
        return Interval(mean=None, half_width=None, confidence=confidence, batches=0)
    mean = float(known.mean())
    if known.size < 2:
        return Interval(mean=mean, half_width=None, confidence=confidence, batches=known.size)
    half = student_t(known.size - 1, confidence) * float(known.std(ddof=1)) / np.sqrt(known.size)
    return Interval(mean=mean, half_width=float(half), confidence=confidence, batches=known.size)


def batch_means(
    values: ArrayLike, *, batches: int = 20, least: int = 10, confidence: float = 0.95,
    statistic: Callable[[Floats], float] | None = None,
) -> Interval:  # fmt: skip
    """The interval from one run: consecutive values are cut into batches, whose means are nearly independent.

    values     in the order of arrival, warm-up cut off; nan entries do not count
    batches    fewer where a batch would have less than `least` values; no width from fewer than FEWEST_BATCHES
    statistic  of a batch, instead of its mean (a percentile)
    """
    known = _known(values)
    count = min(batches, known.size // least)
    if count < FEWEST_BATCHES:
        mean = None if known.size == 0 else float(known.mean() if statistic is None else statistic(known))
        return Interval(mean=mean, half_width=None, confidence=confidence, batches=count)
    parts = np.array_split(known, count)
    return replications([float(p.mean()) if statistic is None else statistic(p) for p in parts], confidence=confidence)


def quantile_interval(values: ArrayLike, quantile: float, *, confidence: float = 0.95) -> Interval:
    """The interval of a quantile: from one of the values to another, whose ranks hold it with `confidence`.

    The number of n independent values below the true quantile is binomial(n, quantile), whatever they are
    distributed like. Where it may be 0 or n, as for a p99 of fewer than 368 values, the interval has no end: no width.

    values   in the order of arrival, warm-up cut off; nan entries do not count. Where being above the quantile comes in
             clusters, n is the number of independent values that would say as much (`effective_size`; few values
             show little of that: of 40 that hang together closely, with 0.8 from one to the next, 80 % are held)
    """
    known = _known(values)
    if known.size == 0:
        return Interval(mean=None, half_width=None, confidence=confidence, batches=0)
    estimate = float(np.quantile(known, quantile))
    size = int(effective_size(known > estimate))
    tail = (1.0 - confidence) / 2.0
    low, high = _binomial_quantiles(size, quantile, (tail, 1.0 - tail)) + np.array([0, 1])
    if low < 1 or high > size:
        return Interval(mean=estimate, half_width=None, confidence=confidence, batches=size)
    in_order = np.sort(known)
    first, last = int(np.floor(low * known.size / size)), int(np.ceil(high * known.size / size))
    ends = float(in_order[first - 1]), float(in_order[last - 1])
    return Interval(mean=estimate, half_width=(ends[1] - ends[0]) / 2.0, confidence=confidence, batches=size,
                    low=ends[0], high=ends[1])  # fmt: skip


def _binomial_quantiles(size: int, share: float, levels: tuple[float, ...]) -> NDArray[np.int64]:
    """How many of `size` values lie below their `share` quantile with probability of at most each level.

    scipy.stats has it too, and takes half a second to import.
    """
    from scipy.special import bdtr

    return np.searchsorted(bdtr(np.arange(size + 1), size, share), levels).astype(np.int64)


def share_interval(is_true: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """The interval of a share, inside [0, 1] and with a width where all or none of the requests are true.

    is_true   in the order of arrival, warm-up cut off
    """
    from scipy.special import betaincinv

    known = np.asarray(is_true, dtype=bool)
    if known.size == 0:
        return Interval(mean=None, half_width=None, confidence=confidence, batches=0)
    share, size, tail = float(known.mean()), effective_size(known), (1.0 - confidence) / 2.0
    hits, misses = share * size, (1.0 - share) * size
    low = float(betaincinv(hits, misses + 1.0, tail)) if share > 0 else 0.0
    high = float(betaincinv(hits + 1.0, misses, 1.0 - tail)) if share < 1 else 1.0
    return Interval(mean=share, half_width=(high - low) / 2.0, confidence=confidence, batches=int(size),
                    low=low, high=high)  # fmt: skip


def effective_size(values: ArrayLike) -> float:
    """How many independent values have a mean as sure as that of these, in their order: n / (1 + 2 Σ autocorrelations).

    Those of the first lags count, up to the first that n independent values could show too (2 / √n, Bartlett 1946).
    """
    series = np.asarray(values, dtype=float)
    n = series.size
    around = series - series.mean() if n else series
    power = float(around @ around)
    if n < 2 or power == 0.0:
        return float(n)
    total = 0.0
    for lag in range(1, n):
        found = float(around[lag:] @ around[:-lag]) / power
        if found <= 2.0 / np.sqrt(n):
            break
        total += found
    return max(n / (1.0 + 2.0 * total), 1.0)


def rate_interval(
    start_s: ArrayLike, end_s: ArrayLike, amount: ArrayLike, *, from_s: float, to_s: float, request_s: float,
    confidence: float = 0.95,
) -> Interval:  # fmt: skip
    """The interval of a rate: amounts a second in slices of the time between `from_s` and `to_s`, as batches.

    Each amount counts evenly from its start to its end: a whole one at its end would make the rate of a slice depend on
    which answers happen to end in it. A slice is at least `request_s` long (the mean time of a request: neighbours then
    have few requests in common) and has 8 ends or more on average; no width from fewer than FEWEST_BATCHES of them.

    start_s, end_s, amount   (n,) of what ended; nan: it did not, and does not count
    """
    begin, end, much = (np.asarray(a, dtype=float) for a in (start_s, end_s, amount))
    kept = ~(np.isnan(begin) | np.isnan(end))
    begin, end, much = begin[kept], end[kept], much[kept]
    length = to_s - from_s
    long_enough = length / request_s if request_s > 0 else 0.0
    count = int(min(_MOST_SLICES, begin.size // _ANSWERS, long_enough)) if length > 0 else 0
    if count < FEWEST_BATCHES:
        return Interval(mean=None, half_width=None, confidence=confidence, batches=count)
    edges = np.linspace(from_s, to_s, count + 1)
    took = np.maximum(end - begin, 1e-12)  # what came at once came at its end
    done: Floats = np.array([float(much @ np.clip((edge - begin) / took, 0.0, 1.0)) for edge in edges])
    return replications(np.diff(done) / np.diff(edges), confidence=confidence)


def student_t(degrees: int, confidence: float = 0.95) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2.0))


def _known(values: ArrayLike) -> Floats:
    found: Floats = np.asarray(values, dtype=float)
    return found[~np.isnan(found)]
