"""step(B) = a + b·B from decode steps without prefill: a/b is the measured B*."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.tuning.points import TunePoint

Floats = NDArray[np.float64]

_DRAWS, _CONFIDENCE = 400, (0.05, 0.95)
_FEWEST_BATCHES, _LEAST_SPREAD = 3, 3.0
# More gaps of a batch size than this add no information: what is left is the machine's own drift.
_ENOUGH_GAPS = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """step(B) = a_s + b_s · B.

    b_star        a/b: the batch at which the part that grows costs as much as the part that does not
    low, high     90 % interval of b_star, by resampling the batch sizes
    error         median |fit / measured − 1| over batch sizes
    batches       (smallest, largest) of the samples
    """

    a_s: float
    b_s: float
    b_star: float
    low: float
    high: float
    error: float
    batches: tuple[float, float]

    def step_s(self, batch: float) -> float:
        return self.a_s + self.b_s * batch

    def to_dict(self) -> dict[str, Any]:
        return {"a_s": self.a_s, "b_s": self.b_s, "b_star": self.b_star, "b_star_90": [self.low, self.high],
                "median_error": self.error, "batches": list(self.batches)}


def fit_decode(points: Iterable[TunePoint], *, seed: int = 0) -> DecodeFit | None:
    """The fit over all points; None where too few batch sizes were seen, or they lie too close together.

    Points with preemptions say nothing: nobody outside knows how many ran.
    """
    clean = [p for p in points if p.valid and not p.server.get("preemptions", 0.0) > 0]
    rows = np.array([d for p in clean for d in p.decode], dtype=float).reshape(-1, 3)
    if rows.shape[0] < _FEWEST_BATCHES or rows[:, 0].max() < _LEAST_SPREAD * rows[:, 0].min():
        return None
    batch, gap, weight = rows[:, 0], rows[:, 1], np.minimum(rows[:, 2], _ENOUGH_GAPS)
    a, b = _line(batch, gap, weight)
    if not a > 0 or not b > 0:
        return None
    draw = np.random.default_rng(seed)
    ratios = []
    for _ in range(_DRAWS):
        chosen = draw.integers(0, batch.size, batch.size)
        if np.unique(batch[chosen]).size < 2:
            continue
        one, other = _line(batch[chosen], gap[chosen], weight[chosen])
        if other > 0:
            ratios.append(one / other)
    low, high = np.quantile(ratios, _CONFIDENCE) if ratios else (a / b, a / b)
    fitted = a + b * batch
    return DecodeFit(a_s=a, b_s=b, b_star=a / b, low=float(low), high=float(high),
                     error=float(np.median(np.abs(fitted / gap - 1.0))),
                     batches=(float(batch.min()), float(batch.max())))


def _line(batch: Floats, gap: Floats, weight: Floats) -> tuple[float, float]:
    """Least squares of relative errors with a, b ≥ 0, reweighted so that a slow sample does not tilt the line."""
    from scipy.optimize import nnls

    scale = np.sqrt(weight) / gap
    robust = np.ones_like(scale)
    found = np.zeros(2)
    for _ in range(6):
        matrix = np.column_stack((scale * robust, scale * robust * batch))
        found, _ = nnls(matrix, scale * robust * gap)
        relative = np.abs((found[0] + found[1] * batch) / gap - 1.0)
        spread = max(float(np.median(relative)) * 1.5, 1e-4)
        robust = np.sqrt(1.0 / np.maximum(relative / spread, 1.0))
    return float(found[0]), float(found[1])
