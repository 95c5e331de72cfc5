"""Processor sharing with a rate that depends on how many share: the queue that continuous batching is.

With n sequences in flight a step takes s(n) seconds and gives each of them one token, so a request that
still needs D tokens is served at the rate 1/(D·s(n)). For Poisson arrivals this is a symmetric queue: the
number in flight has the product form

    π(n) ∝ Π_{k=1..n} λ·D·s(k)/k

whatever the distribution of D around its mean (insensitivity). s(k) ∝ k is M/G/1-PS, s constant M/G/∞.
Source: F. P. Kelly, Reversibility and Stochastic Networks (1979), chapter 3; L. Kleinrock, vol. 2 (1976), 4.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ps_mean_residence_s(rate_per_s: float, service_s: float) -> float:
    """Mean residence in M/G/1-PS, S/(1 − ρ): insensitive to the distribution of S; inf where ρ ≥ 1.

    A request of size x stays x/(1 − ρ) in the mean.
    """
    rho = rate_per_s * service_s
    return service_s / (1 - rho) if rho < 1 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Stationary number of requests that a replica holds, with room for `cap` in flight.

    probability      P(n) of n = 0 … cap in the system; the last dimension (0 beyond a lane's own cap)
    tail_ratio       ratio of successive probabilities beyond the cap, where requests queue: λ/μ(cap)
    queued_fraction  share of arrivals that find every place taken, P(n ≥ cap)
    cap              places; leading dimensions are those of the arguments
    """

    probability: Floats
    tail_ratio: Floats
    queued_fraction: Floats
    cap: NDArray[np.int64]

    @property
    def stable(self) -> NDArray[np.bool_]:
        return self.tail_ratio < 1.0

    @property
    def mean(self) -> Floats:
        """Mean number in flight, at most the cap; those that queue are not counted."""
        count = np.arange(self.probability.shape[-1])
        below = np.where(count < self.cap[..., None], self.probability, 0.0)
        return np.asarray((below * count).sum(-1) + self.queued_fraction * self.cap)


def in_flight_distribution(load_tokens_per_s: Floats, step_s: Floats, cap: NDArray[np.int64] | None = None) -> InFlight:
    """π(n) of a replica: processor sharing up to a cap, first come first served beyond.

    load_tokens_per_s   λ·D, tokens asked for per second; shape (…)
    step_s   s(n) in seconds for n = 1 … N; shape (…, N) or (N,)
    cap      places of each lane, at most N; shape (…). None: N
    Up to the cap exact for Poisson arrivals; beyond it the queue empties at the rate of a full batch,
    which is exact for exponential D only. Where it is unstable every arrival queues (queued_fraction 1).
    """
    load = np.asarray(load_tokens_per_s, dtype=np.float64)
    most = step_s.shape[-1]
    places = np.broadcast_to(np.asarray(most if cap is None else cap, dtype=np.int64), load.shape)
    ratio = load[..., None] * step_s / np.arange(1, most + 1)
    log_weight = np.zeros((*load.shape, most + 1))
    with np.errstate(divide="ignore"):
        np.cumsum(np.log(ratio), axis=-1, out=log_weight[..., 1:])
    log_weight[np.arange(most + 1) > places[..., None]] = -np.inf
    log_weight -= log_weight.max(axis=-1, keepdims=True)
    weight = np.exp(log_weight)
    tail_ratio = np.take_along_axis(ratio, places[..., None] - 1, axis=-1)[..., 0]
    at_cap = np.take_along_axis(weight, places[..., None], axis=-1)[..., 0]
    stable = tail_ratio < 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        queued = np.where(stable, at_cap / (1.0 - tail_ratio), np.inf)
        total = weight.sum(-1) - at_cap + queued
        probability = np.where(stable[..., None], weight / total[..., None], 0.0)
        queued_fraction = np.where(stable, queued / total, 1.0)
    return InFlight(probability=probability, tail_ratio=tail_ratio, queued_fraction=queued_fraction, cap=places)
