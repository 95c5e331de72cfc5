"""Mean and percentiles of a sample. A percentile is a linear interpolation between order statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of `count` values, in their unit; None where there is no value."""

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None

    @classmethod
    def of(cls, values: ArrayLike) -> Distribution:
        """Of an array; nan entries are values that do not exist (TPOT of a single token) and do not count."""
        known = np.asarray(values, dtype=float)
        known = known[~np.isnan(known)]
        if known.size == 0:
            return cls(count=0)
        return cls(
            count=int(known.size), mean=float(known.mean()), std=float(known.std()), min=float(known.min()),
            max=float(known.max()), **percentiles_of(np.percentile(known, PERCENTILES)),
        )  # fmt: skip

    def to_dict(self) -> dict[str, float | int | None]:
        return {
            "mean": self.mean, "p50": self.p50, "p90": self.p90, "p95": self.p95, "p99": self.p99, "p999": self.p999,
            "min": self.min, "max": self.max, "std": self.std, "count": self.count,
        }  # fmt: skip


def percentiles_of(values: Sequence[float] | Floats) -> dict[str, float]:
    """The values at PERCENTILES by name."""
    return {f"p{p:g}".replace(".", ""): float(v) for p, v in zip(PERCENTILES, values, strict=True)}


def interpolated(low: float, high: float, fraction: float) -> float:
    """Between two order statistics, in the arithmetic of numpy's percentile."""
    if fraction >= 0.5:
        return high - (high - low) * (1.0 - fraction)
    return low + (high - low) * fraction
