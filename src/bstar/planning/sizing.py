"""How much one replica carries inside the SLO, and how many replicas a load takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.planning.draws import RequestDraws
from bstar.planning.experience import Outcomes
from bstar.planning.outcomes import closed_outcomes, open_outcomes, saturated_rate_per_s
from bstar.planning.replica import Replica
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Of the throughput at a full batch, where the SLO sets no earlier limit: queues grow without bound at 1.
MOST_UTILISED = 0.95
_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica carries with `cap` places.

    load             requests per second (open loop) or clients (closed loop)
    requests_per_s   the throughput at that load
    """

    load: float
    cap: int
    requests_per_s: float


def open_capacity(
    replica: Replica, draws: RequestDraws, slo: Slo, lanes: Ints, *, gap_cv_squared: float = 1.0
) -> Capacity | None:
    """The largest rate at which `slo.attainment_fraction` of the requests meet every limit, over `lanes` of places.

    Attainment falls with the rate (the draws are the same), so bisection finds it. None: not even a rate
    near 0 meets the SLO.
    """
    top = saturated_rate_per_s(replica, draws)[lanes - 1] * MOST_UTILISED
    if slo.is_empty:
        best = int(np.argmax(top))
        return Capacity(load=float(top[best]), cap=int(lanes[best]), requests_per_s=float(top[best]))

    def attained(rate: float, chosen: Ints) -> NDArray[np.bool_]:
        found = open_outcomes(replica, draws, np.full(chosen.shape, rate), chosen, gap_cv_squared=gap_cv_squared)
        return np.asarray(found.attainment(slo) >= slo.attainment_fraction)

    low, high = float(top.min()) * 1e-4, float(top.max())
    able = attained(low, lanes)
    if not able.any():
        return None
    lanes, top = lanes[able], top[able]
    # One rate for all lanes: those that fail at a rate where another one succeeds are out.
    for _ in range(_ROUNDS):
        middle = 0.5 * (low + high)
        good = attained(middle, lanes) & (top >= middle)
        if good.any():
            low, lanes, top = middle, lanes[good], top[good]
        else:
            high = middle
    # Among equals the fewest places: they leave the least to go wrong in a burst.
    return Capacity(load=low, cap=int(lanes[0]), requests_per_s=low)


def closed_capacity(replica: Replica, draws: RequestDraws, slo: Slo, lanes: Ints) -> Capacity | None:
    """The most clients of a closed loop that one replica serves inside the SLO (a real number)."""
    largest = int(lanes[-1])

    def experience(clients: float) -> Outcomes:
        return closed_outcomes(replica, draws, np.array([clients]), np.array([largest]))

    def attained(clients: float) -> bool:
        return bool(experience(clients).attainment(slo)[0] >= slo.attainment_fraction)

    if slo.is_empty:
        return full_house(replica, draws, largest)

    if not attained(1.0):
        return None
    low, high = 1.0, 2.0
    while high < 1e6 and attained(high):
        low, high = high, 2.0 * high
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if attained(middle) else (low, middle)
    return Capacity(load=low, cap=largest, requests_per_s=float(experience(low).rate_per_s[0]))


def full_house(replica: Replica, draws: RequestDraws, cap: int) -> Capacity:
    """Every place taken all the time: a batch job, or more clients than places."""
    rate = float(closed_outcomes(replica, draws, np.array([float(cap)]), np.array([cap])).rate_per_s[0])
    return Capacity(load=float(cap), cap=cap, requests_per_s=rate)


def replicas_needed(load: float, per_replica: float) -> int:
    """The smallest whole number of replicas that carry `load` together."""
    return max(math.ceil(load / per_replica - 1e-9), 1)


def per_replica_gap_cv_squared(workload: Workload, replicas: int) -> float:
    """CV² of the gaps that one of `replicas` sees when a router spreads arrivals at random: 1 + (CV² − 1)/R.

    Thinning a renewal stream makes it more Poisson. A round-robin router does better; this is the cautious case.
    """
    return 1.0 + (workload.gap_cv_squared - 1.0) / replicas


def outcomes_of(
    replica: Replica, draws: RequestDraws, workload: Workload, *, load: float, cap: int, replicas: int
) -> Outcomes:
    """One lane: `load` requests per second (or clients, for a closed loop) on one of `replicas`."""
    places = np.array([cap], dtype=np.int64)
    if workload.concurrency is not None:
        return closed_outcomes(replica, draws, np.array([load]), places)
    gaps = per_replica_gap_cv_squared(workload, replicas)
    return open_outcomes(replica, draws, np.array([load]), places, gap_cv_squared=gaps)
