"""The simulator's word on a plan's best layouts: the load one replica carries inside the SLO, request by request.

Closed forms screen thousands of settings in a moment, and err where queues, prompts and caches act on each other. So
those that come out best are simulated: the largest load of a replica is searched again, now by the share of simulated
requests that meet every limit, from where the closed forms put it. Replicas, cost and order follow from that.

A replica is simulated alone, under what a router that spreads at random gives it (`simulated_load`). Every load is
probed with the same draws, so a larger one is a denser one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from bstar.errors import BstarError
from bstar.metrics.intervals import share_interval
from bstar.planning.capacity import outcomes_of
from bstar.planning.evaluate import Sized, final_deployment
from bstar.planning.feasibility import NoAnswerError
from bstar.planning.results import Percentiles, Simulated
from bstar.planning.screen import Spot, Task
from bstar.planning.simulated_load import closed_load, replica_load
from bstar.planning.sizing import HEADROOM_TOLERANCE, MOST_UTILISED, Floats, Ints, Search, replicas_needed

if TYPE_CHECKING:
    from bstar.sim.result import SimResult
    from bstar.specs.deployment import Deployment
    from bstar.traffic.load import Traffic

Key = Callable[[Sized], tuple[float, ...]]
Tell = Callable[[int, str], None]

# Requests of a run: enough that one in a hundred is known to a few tenths of a percent, and that those in flight at
# its ends are few among them.
_LEAST_REQUESTS: Final = 4_000
_MOST_REQUESTS: Final = 40_000
_TIMES_IN_FLIGHT: Final = 35
_LONGER: Final = 4
# From the load of the closed forms in steps, down to one that is carried and up to one that is not.
_DOWN: Final = (1.0, 0.96, 0.88, 0.75, 0.6, 0.4, 0.2, 0.05)
_UP: Final = (1.04, 1.12, 1.3, 1.7, 2.5, 4.0)
# Layouts simulated for each that is asked for: where some fall behind, others move up.
_TRIED: Final = 3


def simulate_best(
    task: Task, sized: Sequence[Sized], count: int, key: Key, tell: Tell | None = None
) -> tuple[list[tuple[Sized, Simulated | None]], list[tuple[Spot, NoAnswerError]]]:
    """The same layouts in their new order, the best `count` of them simulated; and those that came out as no answer.

    tell   called with the number and the name of each layout before it is simulated
    """
    known: dict[int, Simulated | None] = {}
    ranked, refused = list(sized), []
    for number in range(1, _TRIED * count + 1):
        ranked.sort(key=key)
        one = next((s for s in ranked[:count] if id(s) not in known), None)
        if one is None:
            break
        if tell is not None:
            tell(number, f"{one.spot.device.id} {one.spot.layout}")
        ranked.remove(one)
        try:
            found, seen = simulate_one(task, one)
        except NoAnswerError as no:
            refused.append((one.spot, no))
            continue
        ranked.append(found)
        known[id(found)] = seen
    return [(s, known.get(id(s))) for s in sorted(ranked, key=key)], refused


def simulate_one(task: Task, sized: Sized) -> tuple[Sized, Simulated]:
    """The layout with the capacity and replicas that simulations of one replica say, and what its users see then.

    Raises NoAnswerError where it carries next to nothing inside the SLO, or takes more GPUs than allowed.
    """
    probe = _Probe(task=task, sized=sized, deployment=final_deployment(task, sized),
                   num_requests=_num_requests(task, sized))  # fmt: skip
    wanted = None if task.load is None else task.load / (1.0 - task.headroom_fraction)
    load, replicas = probe.capacity(wanted), sized.replicas
    if wanted is not None and not (task.slo.is_empty and probe.closed):
        replicas = replicas_needed(wanted, load)
    gpus = replicas * sized.spot.layout.num_gpus
    if task.max_gpus is not None and gpus > task.max_gpus:
        raise NoAnswerError("max_gpus", f"needs {gpus} GPUs ({replicas} replicas) as simulated, more than the "
                            f"{task.max_gpus} allowed")
    shown = probe.at(load if task.load is None else task.load / replicas)
    full = shown if task.load is None else probe.at(load)
    served = probe.closed or (task.load is None and task.slo.is_empty)
    capacity = replace(sized.capacity, load=load, requests_per_s=full.summary.requests_per_s if served else load)
    return replace(sized, capacity=capacity, replicas=replicas), _seen(task, shown, sized)


@dataclass(slots=True, kw_only=True, eq=False)
class _Probe:
    """Simulations of one replica at loads of its own: requests per second, or clients.

    num_requests   of a run; a doubtful one is made longer
    """

    task: Task
    sized: Sized
    deployment: Deployment
    num_requests: int
    known: dict[float, SimResult] = field(default_factory=dict)

    def at(self, load: float) -> SimResult:
        if load not in self.known:
            replicas = 1.0 if self.task.load is None else max(self.task.load / load, 1.0)
            count = self.num_requests
            found = self._run(load, replicas, count)
            while self._is_doubtful(found) and count < _MOST_REQUESTS:
                count = min(_LONGER * count, _MOST_REQUESTS)
                found = self._run(load, replicas, count)
            self.known[load] = found
        return self.known[load]

    def _run(self, load: float, replicas: float, count: int) -> SimResult:
        return _simulated(self.task, self.deployment, replica_load(self.task, load, replicas, count))

    def _is_doubtful(self, found: SimResult) -> bool:
        """Whether it meets the SLO, and might not with other requests: near its capacity a replica has long good and
        long bad times."""
        asked = self.task.slo.attainment_fraction
        if self.task.slo.is_empty or found.summary.slo_attainment_fraction < asked:
            return False
        low = share_interval(found.records.meets(self.task.slo)).low
        return low is not None and low < asked

    def capacity(self, wanted: float | None) -> float:
        """The largest load inside the SLO, near that of the closed forms; `wanted` / R exactly for whole R.

        An open loop is kept below what the replica serves with every place taken: over the finite run that is simulated
        a queue that grows without end may still be short.
        """
        if self.task.slo.is_empty and (self.closed or self.task.load is None):
            return self.sized.capacity.load
        top = math.inf if self.closed else MOST_UTILISED * self._full_house_per_s()
        if self.task.slo.is_empty:
            return top
        guess = min(self.sized.capacity.load, top)
        failed, low = self._descended(guess)
        if failed is None:
            low, failed = self._climbed(guess, top)
        if failed is None:
            return low
        search = Search(margin=self._margins, top=np.array([failed]), least=np.array([low]), total=wanted,
                        tolerance=HEADROOM_TOLERANCE)  # fmt: skip
        return search.rise(low, np.zeros(1, dtype=np.int64), high=failed).load

    def _descended(self, guess: float) -> tuple[float | None, float]:
        """(a load that is too much, the next below that is not)."""
        failed = None
        for factor in _DOWN:
            if self._margin(guess * factor) >= 0:
                return failed, guess * factor
            failed = guess * factor
        attained = self.at(guess * _DOWN[-1]).summary.slo_attainment_fraction
        raise NoAnswerError("slo", f"{attained:.1%} of requests meet the SLO as simulated, at {_DOWN[-1]:.0%} of the "
                            "load that closed forms find")

    def _climbed(self, guess: float, top: float) -> tuple[float, float | None]:
        """(the last load that is carried, the first that is not; None: not even `top` is too much)."""
        low = guess
        for factor in _UP:
            load = min(guess * factor, top)
            if load <= low:
                break
            if self._margin(load) < 0:
                return low, load
            low = load
        return low, None

    @property
    def closed(self) -> bool:
        return self.task.workload.concurrency is not None

    def _full_house_per_s(self) -> float:
        places = float(self.sized.capacity.cap)
        full = _simulated(self.task, self.deployment, closed_load(self.task.workload, places, self.num_requests))
        return full.summary.requests_per_s

    def _margin(self, load: float) -> float:
        load = max(load, 1.0) if self.closed else load
        return self.at(load).summary.slo_attainment_fraction - self.task.slo.attainment_fraction

    def _margins(self, loads: Floats, lanes: Ints) -> Floats:
        return np.array([self._margin(float(load)) for load in loads])


def _num_requests(task: Task, sized: Sized) -> int:
    """By the requests in flight that the closed forms expect."""
    found = outcomes_of(sized.replica, task.draws, task.workload, load=sized.capacity.load, cap=sized.capacity.cap,
                        replicas=sized.replicas, replay=task.replay)  # fmt: skip
    flight = float(found.in_flight[0])
    flight = flight if np.isfinite(flight) else float(sized.capacity.cap)
    return int(min(max(_TIMES_IN_FLIGHT * flight, _LEAST_REQUESTS), _MOST_REQUESTS))


def _simulated(task: Task, deployment: Deployment, load: Traffic) -> SimResult:
    from bstar.sim.run import simulate

    try:
        return simulate(deployment, load, slo=task.slo)
    except BstarError as error:
        raise NoAnswerError("slo", f"cannot be simulated: {error}") from None


def _seen(task: Task, found: SimResult, sized: Sized) -> Simulated:
    records, summary = found.records, found.summary
    share = share_interval(records.meets(task.slo))
    return Simulated(
        ttft_s=Percentiles.of(records.ttft_s), tpot_s=Percentiles.of(records.tpot_s),
        e2e_s=Percentiles.of(records.e2e_s), slo_attainment_fraction=summary.slo_attainment_fraction,
        attainment_low=share.low, attainment_high=share.high, num_requests=len(records),
        num_preemptions=int(found.num_preemptions.sum()), requests_per_s=summary.requests_per_s,
        closed_form_replicas=sized.replicas, closed_form_capacity_requests_per_s=sized.carried_per_s,
    )  # fmt: skip
