"""The capacity of a layout under a load, and its replicas: open and closed loops, bursts, jobs without a load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstar.planning.arrivals import Replay, Stream
from bstar.planning.draws import RequestDraws
from bstar.planning.experience import Outcomes
from bstar.planning.feasibility import NoAnswerError
from bstar.planning.lanes import Lanes
from bstar.planning.outcomes import closed_outcomes, open_outcomes
from bstar.planning.replica import Replica
from bstar.planning.sizing import HEADROOM_TOLERANCE, IDLE, TOLERANCE, Found, Search, fewest, replicas_needed
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOST_REPLICAS = 100_000
_CLIENT_TOLERANCE = 0.01
# Settings that are tried in bursts: a replay takes its time.
_MOST_IN_BURSTS = 24
_MOST_IN_RISE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica carries with `cap` places at a token budget.

    load             requests per second (open loop) or clients (closed loop)
    requests_per_s   the throughput at that load
    """

    load: float
    cap: int
    budget: int
    requests_per_s: float


def capacity_of(
    replica: Replica, draws: RequestDraws, workload: Workload, slo: Slo, lanes: Lanes, total: float | None,
    replay: Replay | None = None,
) -> tuple[Capacity, int]:  # fmt: skip
    """What a replica carries at its best setting, and how many replicas the load takes.

    total   requests per second or clients of all replicas, headroom included; None: whatever one replica carries
    replay  the arrivals of a trace, where the workload is one
    Raises NoAnswerError where the SLO is out of reach.
    """
    if workload.concurrency is not None:
        if slo.is_empty:
            full = full_house(replica, draws, lanes)
            return full, replicas_needed(total or 1.0, full.load)
        return _closed(replica, draws, slo, lanes, total)
    if slo.is_empty and total is None:
        # Nothing arrives at a rate and nothing is asked for: a batch job that keeps every place taken.
        return full_house(replica, draws, lanes), 1
    stream = Stream(gap_cv_squared=workload.gap_cv_squared, replay=replay)
    return _open(replica, draws, stream, slo, lanes, total)


def _open(
    replica: Replica, draws: RequestDraws, stream: Stream, slo: Slo, lanes: Lanes, total: float | None
) -> tuple[Capacity, int]:
    def search(stream: Stream, wanted: float | None) -> Search:
        def margin(rate: Floats, chosen: Ints) -> Floats:
            found = open_outcomes(_at(replica, lanes, chosen), draws, rate, lanes.cap[chosen], stream=stream)
            return found.attainment(slo) - slo.attainment_fraction

        return Search(margin=margin, top=lanes.top_per_s, least=IDLE * lanes.top_per_s, total=wanted,
                      tolerance=TOLERANCE if total is None else HEADROOM_TOLERANCE)

    found = _unlimited(search(Stream(), total), lanes) if slo.is_empty else None
    found = found or search(Stream(), total).largest(lanes.groups(), lanes.near)
    if found is None:
        most = float(IDLE * lanes.top_per_s.max())
        raise NoAnswerError("slo", f"meets the SLO only when it is idle, below {most:.2g} requests/s a replica "
                            f"({IDLE:.0%} of its throughput)")
    if not stream.is_poisson:
        return _bursty(stream, lanes, search, found, total)
    capacity = _capacity(lanes, found)
    return capacity, 1 if total is None else replicas_needed(total, capacity.load)


def _unlimited(search: Search, lanes: Lanes) -> Found | None:
    """Without limits every request is inside them unless the queue grows without end: the lane that carries most, where
    it does not."""
    best = np.array([int(np.argmax(lanes.top_per_s))])
    load = float(lanes.top_per_s[best[0]])
    return Found(load=load, lanes=best) if search.at(load, best).size else None


def _bursty(
    stream: Stream, lanes: Lanes, search: Callable[[Stream, float | None], Search], poisson: Found,
    total: float | None,
) -> tuple[Capacity, int]:  # fmt: skip
    """Bursts and the number of replicas depend on each other: the more replicas, the smoother what each one sees."""
    usual = np.flatnonzero(lanes.group < 3)

    def at_replicas(count: int) -> Search:
        return search(replace(stream, replicas=count), None)

    if total is None:
        alone = at_replicas(1).largest(lanes.groups(), lanes.near)
        if alone is None:
            raise NoAnswerError("slo", f"bursts (CV² {stream.gap_cv_squared:.3g}) let one replica meet the SLO only "
                                "when it is idle; give a rate: many replicas see smoother streams")
        return _capacity(lanes, alone), 1
    bound = poisson.load if stream.gap_cv_squared > 1.0 else float(lanes.top_per_s.max())
    least = replicas_needed(total, bound)
    steady = search(Stream(), None)

    def able(replicas: int) -> Ints:
        """Lanes that carry their share in bursts, of those with the most in hand without."""
        tried = steady.at(total / replicas, usual) if stream.gap_cv_squared > 1.0 else usual
        tried = np.sort(tried[np.argsort(-lanes.top_per_s[tried], kind="stable")[:_MOST_IN_BURSTS]])
        return at_replicas(replicas).at(total / replicas, tried)

    count = fewest(lambda n: bool(able(n).size), at_least=least, at_most=max(_MOST_REPLICAS, least))
    if count is None:
        raise NoAnswerError("slo", f"bursts (CV² {stream.gap_cv_squared:.3g}) miss the SLO on any number of replicas")
    return _capacity(lanes, at_replicas(count).rise(total / count, able(count)[:_MOST_IN_RISE])), count


def _capacity(lanes: Lanes, found: Found) -> Capacity:
    # Among equals the fewest places: they leave the least to go wrong in a burst.
    lane = int(found.lanes[0])
    return Capacity(
        load=found.load, cap=int(lanes.cap[lane]), budget=int(lanes.budget[lane]), requests_per_s=found.load
    )


def _closed(
    replica: Replica, draws: RequestDraws, slo: Slo, lanes: Lanes, total: float | None
) -> tuple[Capacity, int]:
    """The most clients that one replica serves inside the SLO (a real number).

    Clients beyond the places wait at the door as long as the SLO lets them; where it limits no wait there is none.
    """
    waits = [limit for limit in (slo.ttft_s, slo.e2e_s) if limit is not None]
    top: Floats = lanes.cap + (min(waits) if waits else 0.0) * lanes.top_per_s

    def margin(clients: Floats, chosen: Ints) -> Floats:
        found = closed_outcomes(_at(replica, lanes, chosen), draws, clients, lanes.cap[chosen])
        return found.attainment(slo) - slo.attainment_fraction

    search = Search(margin=margin, top=top, least=np.ones(top.size), total=total, tolerance=_CLIENT_TOLERANCE)
    found = search.largest(lanes.groups(), lanes.near)
    if found is None:
        raise NoAnswerError("slo", "not even one client is served inside the SLO")
    lane = found.lanes[:1]
    there = closed_outcomes(_at(replica, lanes, lane), draws, np.array([found.load]), lanes.cap[lane])
    capacity = replace(_capacity(lanes, found), requests_per_s=float(there.rate_per_s[0]))
    return capacity, 1 if total is None else replicas_needed(total, capacity.load)


def full_house(replica: Replica, draws: RequestDraws, lanes: Lanes) -> Capacity:
    """Every place taken all the time: a batch job, or more clients than places."""
    most = np.array([int(np.flatnonzero((lanes.budget == b) & (lanes.group < 3))[-1]) for b in np.unique(lanes.budget)])
    cap = lanes.cap[most]
    rate = closed_outcomes(_at(replica, lanes, most), draws, cap.astype(np.float64), cap).rate_per_s
    best = int(np.argmax(rate))
    places = int(cap[best])
    return Capacity(
        load=float(places), cap=places, budget=int(lanes.budget[most[best]]), requests_per_s=float(rate[best])
    )


def _at(replica: Replica, lanes: Lanes, chosen: Ints) -> Replica:
    """The replica with the token budgets of the chosen lanes, and steps for their places."""
    most = int(lanes.cap[chosen].max(initial=1))
    return replace(
        replica, token_budget=lanes.budget[chosen][:, None], decode_step_s=replica.decode_step_s[:most],
        floor_step_s=replica.floor_step_s[:most],
    )  # fmt: skip


def outcomes_of(
    replica: Replica, draws: RequestDraws, workload: Workload, *, load: float, cap: int, replicas: int,
    replay: Replay | None = None,
) -> Outcomes:  # fmt: skip
    """One lane: `load` requests per second (or clients, for a closed loop) on one of `replicas`."""
    places = np.array([cap], dtype=np.int64)
    if workload.concurrency is not None:
        return closed_outcomes(replica, draws, np.array([load]), places)
    stream = Stream(gap_cv_squared=workload.gap_cv_squared, replicas=replicas, replay=replay)
    return open_outcomes(replica, draws, np.array([load]), places, stream=stream)
