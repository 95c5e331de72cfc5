"""How much one replica carries inside the SLO, and how many replicas a load takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Margin = Callable[[Floats, Ints], Floats]

# Of the throughput at a full batch, where the SLO sets no earlier limit: queues grow without bound at 1.
MOST_UTILISED = 0.95
# What meets the SLO only below this share of its own throughput meets it when it is idle: that is no answer.
IDLE = 0.01
# Capacities are found to this share, where they are compared and where only headroom depends on them; numbers of
# replicas exactly.
TOLERANCE = 0.004
HEADROOM_TOLERANCE = 0.02
# Lanes that are followed up at once, those with the most in hand first.
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The largest load found, and the lanes that carry it, in the order of the lanes."""

    load: float
    lanes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Looks for the largest load that any of a number of lanes (settings of one replica) carries inside the SLO.

    margin     share of requests inside the SLO over the share asked for, of lanes at a load each: at least 0 where
               they meet it; it never grows with the load
    top        loads that the lanes cannot exceed
    total      what all replicas carry together; loads of total/R are probed, so that the number of replicas is exact
    least      loads that are as good as none
    """

    margin: Margin
    top: Floats
    least: Floats
    total: float | None = None
    tolerance: float = TOLERANCE

    def at(self, load: float, lanes: Ints) -> Ints:
        """Which of `lanes` carry `load`."""
        return self._passing(load, lanes)[0]

    def _passing(self, load: float, lanes: Ints) -> tuple[Ints, Floats]:
        able = lanes[self.top[lanes] >= load]
        margin = self.margin(np.full(able.size, load), able) if able.size else np.empty(0)
        return able[margin >= 0], margin[margin >= 0]

    def largest(self, groups: Sequence[Ints], near: Callable[[Ints], Ints]) -> Found | None:
        """The largest load over groups of lanes, earlier ones preferred: a later one must save a replica.

        near   further lanes beside the best ones, tried last
        Where there is no total, any larger load is better. None: only idle lanes meet the SLO.
        """
        best: Found | None = None
        for lanes in groups:
            if lanes.size:
                best = self._first(lanes) if best is None else self._better(best, lanes)
        return best if best is None else self._better(best, near(best.lanes[:1]))

    def _better(self, best: Found, lanes: Ints) -> Found:
        """`best`, or what beats it among `lanes`."""
        while lanes.size:
            if self.total is not None and best.load >= self.total:
                return best  # one replica is enough, and no setting makes it fewer
            load = self._to_beat(best.load)
            lanes, margin = self._passing(load, lanes)
            first = np.sort(np.argsort(-margin, kind="stable")[:_FEW])
            if first.size:
                best = self.rise(load, lanes[first])
                lanes = np.delete(lanes, first)
        return best

    def _first(self, lanes: Ints) -> Found | None:
        """The largest load of `lanes`, of which nothing is known yet."""
        failed, least = math.inf, float(self.least[lanes].min())
        probe = min(0.75 * float(self.top[lanes].max()), self.total or math.inf)
        while probe > 2.0 * least:
            good = self.at(probe, lanes)
            if good.size:
                return self.rise(probe, good, high=failed)
            failed, probe = probe, 0.5 * probe
        able = lanes[self.margin(self.least[lanes], lanes) >= 0]
        return self.rise(float(self.least[able].min()), able) if able.size else None

    def _to_beat(self, load: float) -> float:
        """The load that makes another lane the better one: one replica less, or where there is no total just more."""
        if self.total is None:
            return load * (1.0 + self.tolerance)
        return self.total / (replicas_needed(self.total, load) - 1)

    def rise(self, low: float, lanes: Ints, *, high: float = math.inf) -> Found:
        """The largest load of `lanes`, all of which carry `low`: those that fail where another succeeds are out."""
        high = min(high, float(self.top[lanes].max()))
        while high > low:
            probe = self._probe(low, high)
            if probe is None:
                break
            good = self.at(probe, lanes)
            if good.size:
                low, lanes = probe, good
                high = min(high, max(float(self.top[lanes].max()), low))
            else:
                high = probe
        return Found(load=low, lanes=lanes)

    def _probe(self, low: float, high: float) -> float | None:
        """A load between the two, total/R for a whole R where there is one; None: they are close enough."""
        middle = 0.5 * (low + high)
        if self.total is not None:
            replicas = max(math.floor(self.total / middle), 1)
            for count in (replicas, replicas + 1):
                if low < self.total / count < high:
                    return self.total / count
        return middle if high > low * (1.0 + self.tolerance) else None


def replicas_needed(load: float, per_replica: float) -> int:
    """The smallest whole number of replicas that carry `load` together."""
    return max(math.ceil(load / per_replica - 1e-9), 1)


def fewest(feasible: Callable[[int], bool], *, at_least: int, at_most: int) -> int | None:
    """The smallest count that is feasible, where more are never worse: doubled up to the first, then bisected."""
    failed, count = at_least - 1, at_least
    while not feasible(count):
        if count >= at_most:
            return None
        failed, count = count, min(2 * count, at_most)
    while count - failed > 1:
        middle = (failed + count) // 2
        failed, count = (failed, middle) if feasible(middle) else (middle, count)
    return count
