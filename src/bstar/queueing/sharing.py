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

    probability      P(n) for n = 0 … cap; the last dimension
    tail_ratio       ratio of successive probabilities beyond the cap, where requests queue: λ/μ(cap)
    queued_fraction  share of arrivals that find every place taken
    Leading dimensions are those of the arguments.
    """

    probability: Floats
    tail_ratio: Floats
    queued_fraction: Floats

    @property
    def stable(self) -> NDArray[np.bool_]:
        return self.tail_ratio < 1.0

    @property
    def mean(self) -> Floats:
        """Mean number in flight (at most the cap), queue not counted."""
        count = np.arange(self.probability.shape[-1])
        beyond = self.queued_fraction - self.probability[..., -1]
        return np.asarray((self.probability * count).sum(-1) + beyond * count[-1])


def in_flight_distribution(load_s: Floats, step_s: Floats) -> InFlight:
    """π(n) of a replica: processor sharing up to a cap, first come first served beyond.

    load_s   λ·D, expected tokens asked for per second; shape (…)
    step_s   s(n) in seconds for n = 1 … cap; shape (…, cap) or (cap,)
    Up to the cap exact for Poisson arrivals; beyond it the queue empties at the rate of a full batch,
    which is exact for exponential D only. Where it is unstable every arrival queues (queued_fraction 1).
    """
    load = np.asarray(load_s, dtype=np.float64)[..., None]
    cap = step_s.shape[-1]
    count = np.arange(1, cap + 1)
    ratio = load * step_s / count
    with np.errstate(divide="ignore"):
        log_weight = np.cumsum(np.log(ratio), axis=-1)
    log_weight = np.concatenate([np.zeros((*log_weight.shape[:-1], 1)), log_weight], axis=-1)
    log_weight -= log_weight.max(axis=-1, keepdims=True)
    weight = np.exp(log_weight)
    tail_ratio = np.broadcast_to(ratio[..., -1], weight.shape[:-1])
    stable = tail_ratio < 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        queued = np.where(stable, weight[..., -1] / (1.0 - tail_ratio), np.inf)
    total = weight[..., :-1].sum(-1) + queued
    with np.errstate(invalid="ignore"):
        probability = np.where(stable[..., None], weight / total[..., None], 0.0)
        queued_fraction = np.where(stable, queued / total, 1.0)
    return InFlight(probability=probability, tail_ratio=np.asarray(tail_ratio), queued_fraction=queued_fraction)
