"""What a sweep shows: the knee with its uncertainty, the onset of waiting and preemption, the SLO's batch, the regions,
and which value to set by which rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bstar.measure.sweeps import Landmark, Point, boundary_of, knee_of
from bstar.tuning.decode_fit import DecodeFit
from bstar.tuning.points import TunePoint

Rule = Literal["knee", "slo", "preemption", "waiting", "largest_measured"]
_DRAWS = 400
_SIGMAS = 1.96
_OFTEN_WAITING = 0.1
_MOSTLY = 0.75
_BELOW = "doubling even the smallest measured one gains less than 5 % of throughput: measure smaller ones"
_SAYS = {
    "knee": "doubling it gains less than 5 % of throughput",
    "slo": "the largest whose requests meet the SLO",
    "preemption": "the largest measured one below the first preemption",
    "waiting": "the largest measured one before requests wait: more find no room",
    "largest_measured": "the largest measured: neither knee, SLO nor a wall was reached, measure larger ones",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A value, the rule that bound it, and how sure it is.

    low, high   the measured values about it
    sure        "sure": they are within a quarter; "rough": within a doubling; "open": wider, or not reached
    """

    value: int
    rule: Rule
    reason: str
    low: float
    high: float
    sure: Literal["sure", "rough", "open"]

    @property
    def range_text(self) -> str:
        """ "between 8 and 16", "8 or more", "8 or less"."""
        if not math.isfinite(self.high):
            return f"{self.low:g} or more"
        return f"between {self.low:g} and {self.high:g}" if self.low > 0 else f"{self.high:g} or less"

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "rule": self.rule, "reason": self.reason,
                "between": [self.low, self.high if math.isfinite(self.high) else None],
                "sure": self.sure}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything that a sweep shows.

    knee, knee_90         the 5 % knee of this mix, and its 90 % interval by the throughputs' own uncertainty
    waiting, preemption   first value at which requests wait, or are preempted: between low and high
    slo                   where the SLO ends
    decode                the fit of decode steps; its b_star is another number than the knee
    regions               (name, from, to) along the values
    """

    points: tuple[TunePoint, ...]
    knee: Landmark
    knee_90: tuple[float, float] | None
    waiting: Landmark
    preemption: Landmark
    slo: Landmark
    decode: DecodeFit | None
    regions: tuple[tuple[str, float, float], ...]
    advice: Advice | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "points": [p.to_dict() for p in self.points],
            "knee": {**self.knee.to_dict(), "interval_90": None if self.knee_90 is None else list(self.knee_90)},
            "waiting": self.waiting.to_dict(), "preemption": self.preemption.to_dict(), "slo": self.slo.to_dict(),
            "decode_fit": None if self.decode is None else self.decode.to_dict(),
            "regions": [{"name": n, "from": a, "to": b} for n, a, b in self.regions],
            "recommended": None if self.advice is None else self.advice.to_dict(),
        }  # fmt: skip


def read_sweep(
    points: Sequence[TunePoint], *, target_fraction: float | None, decode: DecodeFit | None, seats_swept: bool = False,
    seed: int = 0,
) -> Reading:  # fmt: skip
    """Everything that the valid points show.

    seats_swept   values are max_num_seqs under one load: that requests wait for a seat is then the point of it
    """
    good = tuple(sorted((p for p in points if p.valid), key=lambda p: p.value))
    sweep = [_as_point(p) for p in good]
    knee, interval = knee_of(sweep), knee_interval(good, seed=seed)
    waiting = onset(good, lambda p: p.server.get("waiting_share", 0.0) > _OFTEN_WAITING)
    preemption = onset(good, lambda p: p.server.get("preemptions", 0.0) > 0)
    slo = Landmark(load=None) if target_fraction is None else boundary_of(sweep, target_fraction)
    return Reading(
        points=good, knee=knee, knee_90=interval, waiting=waiting, preemption=preemption, slo=slo, decode=decode,
        regions=regions(good, decode, preemption),
        advice=_advise(good, knee, interval, Landmark(load=None) if seats_swept else waiting, preemption, slo,
                       target_fraction),
    )  # fmt: skip


def _as_point(p: TunePoint, throughput: float | None = None) -> Point:
    return Point(load=float(p.value), throughput_per_s=p.throughput_per_s if throughput is None else throughput,
                 goodput_per_s=p.goodput_per_s, attainment_fraction=p.attainment_fraction)


def knee_interval(points: Sequence[TunePoint], *, seed: int = 0) -> tuple[float, float] | None:
    """The knee's 90 % interval: throughputs are drawn within their own intervals, a knee is sought in each draw.

    A draw whose knee lies beyond the last value counts as half of it: no nearer is known.
    """
    if len(points) < 3 or any(p.half_width is None for p in points):
        return None
    draw = np.random.default_rng(seed)
    mean = np.array([p.throughput_per_s for p in points])
    deviation = np.array([(p.half_width or 0.0) / _SIGMAS for p in points])
    knees = []
    for _ in range(_DRAWS):
        rates = np.maximum(mean + deviation * draw.standard_normal(mean.size), 1e-9)
        found = knee_of([_as_point(p, float(r)) for p, r in zip(points, rates, strict=True)])
        load = found.load if found.load is not None else found.low
        if load is not None:
            knees.append(load)
    return (float(np.quantile(knees, 0.05)), float(np.quantile(knees, 0.95))) if knees else None


def onset(points: Sequence[TunePoint], happens: Callable[[TunePoint], bool]) -> Landmark:
    """The first value at which something happens and keeps happening: between the one before and it."""
    flags = [happens(p) for p in points]
    # A hit below mostly clean values is a disturbance, not the onset.
    kept = [i for i in range(len(flags)) if flags[i] and np.mean(flags[i:]) >= _MOSTLY]
    if not kept:
        return Landmark(load=None, low=float(points[-1].value), edge="above") if points else Landmark(load=None)
    first = kept[0]
    value = float(points[first].value)
    if first == 0:
        return Landmark(load=value, high=value, edge="below")
    return Landmark(load=value, low=float(points[first - 1].value), high=value)


def regions(
    points: Sequence[TunePoint], decode: DecodeFit | None, preemption: Landmark
) -> tuple[tuple[str, float, float], ...]:
    """weight-bound to B*/8, saturating to B*, diminishing to the first preemption, over memory beyond."""
    if not points:
        return ()
    least, most = float(points[0].value), float(points[-1].value)
    wall = preemption.load if preemption.load is not None else math.inf
    if decode is None:
        edges = [("not told apart", least, min(most, wall))]
    else:
        edges = [("weight-bound", 0.0, decode.b_star / 8.0), ("saturating", decode.b_star / 8.0, decode.b_star),
                 ("diminishing", decode.b_star, wall)]
    edges.append(("over memory", wall, math.inf))
    clipped = [(name, max(a, least), min(b, most, wall if name != "over memory" else most)) for name, a, b in edges]
    return tuple((n, a, b) for n, a, b in clipped if b > a or (n == "over memory" and b >= a and a >= wall))


def _advise(
    points: Sequence[TunePoint], knee: Landmark, knee_90: tuple[float, float] | None, waiting: Landmark,
    preemption: Landmark, slo: Landmark, target: float | None,
) -> Advice | None:  # fmt: skip
    if not points:
        return None
    found: list[tuple[float, Rule, float, float]] = []
    if knee.load is not None:
        # No surer than the measured values about it, nor than the throughputs that it was read from.
        near, far = knee_90 or (knee.load, knee.load)
        low = 0.0 if knee.edge == "below" else min(knee.low or knee.load, near)
        found.append((knee.load, "knee", low, max(knee.high or knee.load, far)))
    if target is not None and slo.load is not None and slo.high is not None:
        found.append((slo.load, "slo", slo.load, slo.high))
    for mark, rule in ((preemption, "preemption"), (waiting, "waiting")):
        if mark.load is not None:
            at = mark.low if mark.low is not None else mark.load
            found.append((at, rule, at, mark.load))  # type: ignore[arg-type]
    if not found:
        last = float(points[-1].value)
        found.append((last, "largest_measured", last, math.inf))
    value, rule, low, high = min(found, key=lambda f: f[0])
    width = high / low - 1.0 if low > 0 else math.inf
    sure: Literal["sure", "rough", "open"] = "sure" if width <= 0.25 else "rough" if width <= 1.0 else "open"
    reason = _BELOW if rule == "knee" and knee.edge == "below" else _SAYS[rule]
    return Advice(value=max(round(value), 1), rule=rule, reason=reason, low=low, high=high, sure=sure)
