"""Routed experts of a step: which share of them is read, and how much more the busiest rank has than the mean one.

Experts differ in popularity; `skew` is its coefficient of variation (0: uniform routing, top k of n equally likely).
With a Gamma-distributed popularity an expert is missed by all of T tokens with probability

    (1 + skew² · λ·T)^(−1/skew²),    λ = −ln(1 − k/n)        → (1 − k/n)^T for skew → 0

A step ends when the last expert-parallel rank is done. With many ranks the busiest of r lies z_r standard deviations
above the mean, z_r the expected largest of r normal deviates (Blom's approximation); rows of a rank vary by chance
(multinomial) and by which experts it holds (skew).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, log1p, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """Routing of some operators, one entry each: experts, top k, expert-parallel ranks; and the skew of all."""

    experts: FloatArray
    top_k: FloatArray
    ranks: FloatArray
    skew: float

    def missed(self, tokens: FloatArray | float) -> FloatArray:
        """Mean share of experts that none of `tokens` goes to: (operators,), or (operators, m) for (m,) tokens."""
        rate = -np.log1p(-np.minimum(self.top_k / self.experts, 1.0 - 1e-12))
        reach = np.multiply.outer(rate, tokens)
        if self.skew == 0.0:
            return np.asarray(np.exp(-reach))
        square = self.skew * self.skew
        return np.asarray(np.exp(-np.log1p(square * reach) / square))

    def busiest(self, tokens: FloatArray | float) -> tuple[FloatArray, FloatArray]:
        """(share of its experts that the busiest rank reads, its rows over the mean rank's), shapes as `missed`."""
        missed = self.missed(tokens)
        shape = (-1,) + (1,) * np.ndim(tokens)
        ranks, z = self.ranks.reshape(shape), np.array([largest_of(int(r)) for r in self.ranks]).reshape(shape)
        held = self.experts.reshape(shape) / ranks
        read = np.minimum(1.0 - missed + z * np.sqrt(missed * (1.0 - missed) / held), 1.0)
        rows = np.maximum(np.multiply.outer(self.top_k / self.ranks, tokens), 1e-12)
        spread = np.sqrt((1.0 / rows + self.skew**2 / held) * (1.0 - 1.0 / ranks))
        return read, np.minimum(1.0 + z * spread, ranks)

    def scalar(self, tokens: float) -> tuple[list[tuple[float, float]], list[float]]:
        """`busiest` and `missed` of one step: per operator (share read by the busiest rank, mean share read), rows."""
        shares: list[tuple[float, float]] = []
        factors: list[float] = []
        known: dict[tuple[float, float, float], int] = {}
        square = self.skew * self.skew
        for n, k, ranks in zip(self.experts.tolist(), self.top_k.tolist(), self.ranks.tolist(), strict=True):
            at = known.setdefault((n, k, ranks), len(shares))
            if at < len(shares):
                shares.append(shares[at])
                factors.append(factors[at])
                continue
            reach = -log1p(-min(k / n, 1.0 - 1e-12)) * tokens
            missed = exp(-reach) if square == 0.0 else exp(-log1p(square * reach) / square)
            z, held = largest_of(int(ranks)), n / ranks
            spread = sqrt((1.0 / max(k / ranks * tokens, 1e-12) + square / held) * (1.0 - 1.0 / ranks))
            shares.append((min(1.0 - missed + z * sqrt(missed * (1.0 - missed) / held), 1.0), 1.0 - missed))
            factors.append(min(1.0 + z * spread, ranks))
        return shares, factors


@lru_cache(maxsize=64)
def largest_of(count: int) -> float:
    """Expected largest of `count` standard normal deviates (Blom, 1958); 0 for one."""
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
