"""Loads one after another: a grid, doublings, or a search for where the SLO ends and where the gain does.

A load is a number of clients (closed loop) or a rate (open loop). What is sought:

    best      the most goodput: requests per second within every limit
    boundary  the largest load whose share of good requests is what the SLO asks
    knee      the smallest load whose double gains less than 5 % of throughput. It is the knee of this very mix, and
              not B* (see docs/physics.md)

The search doubles until the gain is below the threshold and the SLO is missed, then halves intervals on a log scale.
It asks `measure` for a point and knows nothing of servers, so that a simulator can stand in for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from bstar.errors import SpecError

Axis = Literal["concurrency", "rate"]
GAIN: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a load gave.

    load                    clients, or requests per second
    throughput_per_s        output tokens per second
    goodput_per_s           requests per second within the SLO
    attainment_fraction     share of requests within it
    valid                   whether it is a result of the server
    detail                  anything: the run
    """

    load: float
    throughput_per_s: float
    goodput_per_s: float
    attainment_fraction: float
    valid: bool = True
    interrupted: bool = False
    detail: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Landmark:
    """A load that was sought: about `load`, between the measured loads `low` and `high`.

    edge   "" inside what was measured; "below", "above": beyond its first or last load
    """

    load: float | None
    low: float | None = None
    high: float | None = None
    edge: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"load": self.load, "low": self.low, "high": self.high, "edge": self.edge or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The points in the order of their loads, and what they show."""

    axis: Axis
    points: tuple[Point, ...]
    target_fraction: float | None
    interrupted: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def valid(self) -> tuple[Point, ...]:
        """Points that are results of the server."""
        return tuple(p for p in self.points if p.valid)

    @property
    def best(self) -> Point | None:
        """The point of most goodput."""
        return max(self.valid, key=lambda p: (p.goodput_per_s, -p.load), default=None)

    @property
    def boundary(self) -> Landmark:
        """Where the SLO ends."""
        if self.target_fraction is None:
            return Landmark(load=None)
        return boundary_of(self.valid, self.target_fraction)

    @property
    def knee(self) -> Landmark:
        """Where doubling the load stops paying."""
        return knee_of(self.valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Which loads to measure.

    loads     a grid; empty: doublings from `start`
    search    halve intervals around the boundary and the knee afterwards
    most      largest load; None: until nothing is gained any more
    relative  how close the search gets, as a fraction of the load
    """

    axis: Axis
    loads: tuple[float, ...] = ()
    start: float = 1.0
    most: float | None = None
    search: bool = False
    relative: float = 0.1
    most_points: int = 30


def parse_sweep(text: str) -> SweepPlan:
    """The plan of "concurrency=1,2,4", "rate=1..32" (doublings), "concurrency=1..auto", or "rate=auto" (search).

    Raises SpecError.
    """
    axis, sign, rest = text.partition("=")
    axis, rest = axis.strip(), rest.strip()
    if axis not in ("concurrency", "rate") or not sign or not rest:
        raise SpecError(f"--sweep: {text!r} is not understood; write concurrency=1,2,4,8, concurrency=1..256, "
                        "rate=1..auto or rate=auto")
    kind: Axis = "rate" if axis == "rate" else "concurrency"
    if rest == "auto":
        return SweepPlan(axis=kind, search=True)
    if ".." in rest:
        low, _, high = rest.partition("..")
        start = _load(kind, low)
        if high.strip() == "auto":
            return SweepPlan(axis=kind, start=start, search=True)
        most = _load(kind, high)
        if most < start:
            raise SpecError(f"--sweep: {rest!r} goes down; write the smaller load first")
        return SweepPlan(axis=kind, loads=_doublings(start, most))
    loads = tuple(sorted({_load(kind, part) for part in rest.split(",") if part.strip()}))
    return SweepPlan(axis=kind, loads=loads)


def sweep(
    measure: Callable[[float], Point], plan: SweepPlan, *, target_fraction: float | None = None,
    known: Sequence[Point] = (),
) -> SweepResult:  # fmt: skip
    """Measure the loads of `plan`.

    target_fraction   share of good requests that the SLO asks; None: there is none
    known             points of an earlier, interrupted sweep: their loads are not measured again
    """
    search = _Search(measure, plan, target_fraction, {p.load: p for p in known})
    for load in plan.loads:
        if search.at(load) is None:
            break
    if not plan.loads:
        search.double()
    if plan.search and not search.interrupted:
        search.narrow()
    return search.result()


class _Search:
    """The points so far."""

    def __init__(
        self, measure: Callable[[float], Point], plan: SweepPlan, target: float | None, points: dict[float, Point]
    ) -> None:
        self.measure, self.plan, self.target, self.points = measure, plan, target, points
        self.interrupted = False
        self.notes: list[str] = []

    def at(self, load: float) -> Point | None:
        """The point of a load; None where the sweep has to end."""
        if self.interrupted or (load not in self.points and len(self.points) >= self.plan.most_points):
            return None
        if load not in self.points:
            point = self.measure(load)
            if point.interrupted:
                self.interrupted = True
                return None
            self.points[load] = point
        return self.points[load]

    def double(self) -> None:
        """Doublings until neither throughput nor goodput gains, and the SLO (if any) is missed."""
        load, idle = self.plan.start, 0
        while self.plan.most is None or load <= self.plan.most:
            before = self._last()
            point = self.at(load)
            if point is None:
                return
            if not point.valid:
                self.notes.append(f"at {load:g} the client or the server gives out: larger loads are left out")
                return
            if before is not None:
                gained = point.throughput_per_s > (1.0 + GAIN) * before.throughput_per_s
                better = self.target is not None and (
                    point.attainment_fraction >= self.target or point.goodput_per_s > before.goodput_per_s)
                idle = 0 if gained or better else idle + 1
                # One doubling without gain may be noise.
                if idle >= 2 or (idle == 1 and point.throughput_per_s < (1.0 + GAIN / 2) * before.throughput_per_s):
                    return
            load *= 2.0

    def narrow(self) -> None:
        """Halve the interval of each landmark until it is narrow."""
        for find in (self._boundary_interval, self._knee_interval, self._best_interval):
            while (pair := find()) is not None:
                middle = self._between(*pair)
                if middle is None or self.at(middle) is None:
                    break

    def result(self) -> SweepResult:
        ordered = tuple(self.points[load] for load in sorted(self.points))
        return SweepResult(axis=self.plan.axis, points=ordered, target_fraction=self.target,
                           interrupted=self.interrupted, notes=tuple(self.notes))  # fmt: skip

    def _last(self) -> Point | None:
        return self.points[max(self.points)] if self.points else None

    def _between(self, low: float, high: float) -> float | None:
        """The geometric middle; None where the interval is narrow enough."""
        middle = math.sqrt(low * high)
        if self.plan.axis == "concurrency":
            middle = float(round(middle))
            if middle <= low or middle >= high:
                return None
        else:
            middle = float(f"{middle:.4g}")
        if high - low <= self.plan.relative * low or middle in self.points:
            return None
        return middle

    def _boundary_interval(self) -> tuple[float, float] | None:
        if self.target is None:
            return None
        found = self.result().boundary
        return None if found.edge or found.low is None or found.high is None else (found.low, found.high)

    def _knee_interval(self) -> tuple[float, float] | None:
        found = self.result().knee
        return None if found.edge or found.low is None or found.high is None else (found.low, found.high)

    def _best_interval(self) -> tuple[float, float] | None:
        """The wider of the two intervals beside the point of most goodput (unimodal over the load)."""
        if self.target is None:
            return None
        result = self.result()
        best, loads = result.best, [p.load for p in result.valid]
        if best is None:
            return None
        at = loads.index(best.load)
        sides = [(loads[i], loads[i + 1]) for i in (at - 1, at) if i >= 0 and i + 1 < len(loads)]
        open_ = [pair for pair in sides if self._between(*pair) is not None]
        return max(open_, key=lambda pair: pair[1] / pair[0], default=None)


def boundary_of(points: Sequence[Point], target_fraction: float) -> Landmark:
    """The largest load that meets the target, and the smallest above it that does not."""
    good = [p.load for p in points if p.attainment_fraction >= target_fraction]
    if not points:
        return Landmark(load=None)
    if not good:
        return Landmark(load=None, high=points[0].load, edge="below")
    load = max(good)
    above = [p.load for p in points if p.load > load]
    if not above:
        return Landmark(load=load, low=load, edge="above")
    return Landmark(load=load, low=load, high=min(above))


def knee_of(points: Sequence[Point], gain: float = GAIN) -> Landmark:
    """The smallest load n whose double gains less than `gain`: X(2n) < (1 + gain) · X(n).

    X is the measured throughput, its dips filled (a dip is noise or another regime, not a gain to come), and straight
    between the measured loads on a log scale; low and high are the measured loads about n.
    """
    ordered = sorted(points, key=lambda p: p.load)
    if len(ordered) < 2 or ordered[-1].load < 2.0 * ordered[0].load or ordered[0].throughput_per_s <= 0:
        return Landmark(load=None)
    loads = np.log2([p.load for p in ordered])
    rates = np.log2(np.maximum.accumulate([p.throughput_per_s for p in ordered]))
    tried = np.unique(np.concatenate((np.linspace(loads[0], loads[-1] - 1.0, 2049), loads[loads <= loads[-1] - 1.0])))
    gained = np.interp(tried + 1.0, loads, rates) - np.interp(tried, loads, rates)
    small = np.flatnonzero(gained < math.log2(1.0 + gain))
    if small.size == 0:
        return Landmark(load=None, low=ordered[-1].load / 2.0, edge="above")
    found = float(2.0 ** tried[small[0]])
    if small[0] == 0:
        return Landmark(load=ordered[0].load, high=ordered[0].load, edge="below")
    above = int(np.searchsorted(loads, tried[small[0]], side="left"))
    return Landmark(load=found, low=ordered[above - 1].load, high=ordered[above].load)


def _doublings(start: float, most: float) -> tuple[float, ...]:
    loads, load = [], start
    while load < most:
        loads.append(load)
        load *= 2.0
    return (*loads, most)


def _load(axis: Axis, text: str) -> float:
    from bstar.units import parse_count, parse_rate

    value = float(parse_count(text, field="--sweep")) if axis == "concurrency" else parse_rate(text, field="--sweep")
    if not value > 0:
        raise SpecError(f"--sweep: a load must be more than 0, is {text.strip()!r}")
    return value
