"""Confidence intervals of a simulated or measured mean (or quantile): batch means of one run, or replications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """mean ± half_width at `confidence`, from `batches` batches or replications; no width from fewer than two."""

    mean: float | None
    half_width: float | None
    confidence: float
    batches: int

    @property
    def relative_half_width(self) -> float | None:
        """Half width as a fraction of the mean."""
        if self.mean is None or self.half_width is None or self.mean == 0:
            return None
        return self.half_width / abs(self.mean)

    def holds(self, value: float) -> bool:
        """Whether `value` is inside."""
        return self.mean is not None and self.half_width is not None and abs(value - self.mean) <= self.half_width

    def to_dict(self) -> dict[str, float | int | None]:
        return {"mean": self.mean, "half_width": self.half_width, "confidence": self.confidence,
                "batches": self.batches}


def replications(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """The interval of the mean of independent values, one a replication (Student's t)."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
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
    batches    fewer where a batch would have less than `least` values
    statistic  of a batch, instead of its mean (a percentile)
    """
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    count = min(batches, known.size // least)
    if count < 2:
        mean = None if known.size == 0 else float(known.mean() if statistic is None else statistic(known))
        return Interval(mean=mean, half_width=None, confidence=confidence, batches=count)
    parts = np.array_split(known, count)
    return replications([float(p.mean()) if statistic is None else statistic(p) for p in parts], confidence=confidence)


def student_t(degrees: int, confidence: float = 0.95) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2.0))
