"""Does a run have a steady state, where does it begin, and how sure are the means in it?

    overload    requests without a place keep growing in number until the last arrival: the engine answers fewer than
                come. Means of such a run grow with its length; the excess is named instead
    warm-up     cut where MSER-5 says: the truncation that minimizes the standard error of what is left (White 1997)
    intervals   95 %, by means of consecutive batches of requests
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bstar.metrics.intervals import Interval, batch_means, student_t
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.sim.result import SimResult

Floats = NDArray[np.float64]

_SEGMENTS = 12
# A queue has to be at least this long at the last arrival to be called growing.
_LEAST_QUEUE = 10
# An engine is full when it has this fraction of the requests that it has in the end, at this many looks.
_FULL = 0.95
_LOOKS = 501


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """What the run says about its steady state.

    reached            whether there is one and the run is long enough to show it; None: interrupted, not judged
    message            in a sentence; None where there is nothing to say
    overload_fraction  arrival rate / capacity - 1 where arrivals exceed it, else None
    warmup_s           cut off at the start, in seconds from the first request
    warmup_requests    requests sent before that
    intervals          of the means of ttft_s, tpot_s, e2e_s and of their p95, warm-up and overload aside
    """

    reached: bool | None
    message: str | None
    overload_fraction: float | None
    capacity_requests_per_s: float | None
    warmup_s: float
    warmup_requests: int
    intervals: dict[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        return {
            "reached": self.reached, "message": self.message, "overload_fraction": self.overload_fraction,
            "capacity_requests_per_s": self.capacity_requests_per_s, "warmup_s": self.warmup_s,
            "warmup_requests": self.warmup_requests,
            "confidence": {name: interval.to_dict() for name, interval in self.intervals.items()},
        }  # fmt: skip


def steadiness(result: SimResult) -> Steadiness:
    """Judge a run; see the module."""
    if result.interrupted:  # how it would have gone on is not known
        return Steadiness(reached=None, message=None, overload_fraction=None, capacity_requests_per_s=None,
                          warmup_s=0.0, warmup_requests=0, intervals={})
    sent = result.arrival_s
    # A run that was stopped at a time knows of arrivals that it never came to.
    known = ~np.isnan(sent) & ~result.rejected & (sent <= result.span_s[1])
    if result.unserved.any():
        return _unsteady(_refusal(result))
    if known.sum() < 2:
        return _unsteady("no steady state: fewer than two requests")
    start, last = float(sent[known].min()), float(sent[known].max())
    if result.open_loop and last <= start:
        return _unsteady("no steady state: all requests are sent at once")
    overload = _overload(result, start, last) if result.open_loop else None
    if overload is not None:
        return overload
    warmup = _warmup_s(result, start, last)
    inside = known & result.measured & (sent >= start + warmup)
    # The traffic's own warm-up shows no steady state either.
    first = float(sent[known & result.measured].min(initial=last))
    short = _too_short(result, max(start + warmup, first), last)
    return Steadiness(
        reached=short is None, message=short, overload_fraction=None, capacity_requests_per_s=None, warmup_s=warmup,
        warmup_requests=int((known & (sent < start + warmup)).sum()), intervals=_intervals(result, inside),
    )  # fmt: skip


def mser(values: Floats, *, group: int = 5) -> int:
    """How many leading values MSER-`group` cuts off: at most half of them."""
    count = values.size // group
    if count < 4:
        return 0
    means = values[: count * group].reshape(count, group).mean(axis=1)
    left = np.arange(count, 0, -1.0)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means * means)[::-1])[::-1]
    error = np.maximum(squares - sums * sums / left, 0.0) / (left * left)
    return int(np.argmin(error[: count // 2 + 1])) * group


def _unsteady(message: str, *, overload_fraction: float | None = None, capacity: float | None = None) -> Steadiness:
    return Steadiness(reached=False, message=message, overload_fraction=overload_fraction,
                      capacity_requests_per_s=capacity, warmup_s=0.0, warmup_requests=0, intervals={})


def _refusal(result: SimResult) -> str:
    """How many requests no engine took, and since when."""
    count, sent = int(result.unserved.sum()), result.arrival_s
    late = sent[result.unserved & (result.replica < 0)]  # an engine that failed had the others
    since = f"none takes what is sent from {late.min():.3g} s on" if late.size else "they were lost with theirs"
    return f"no steady state: {count:,} of {len(result):,} requests are left without an engine ({since})"


def _overload(result: SimResult, start: float, last: float) -> Steadiness | None:
    """What to say where the queue grows until the last arrival, else None.

    An engine that is filling up gives places faster than it answers: its capacity counts from the moment that it is
    full, and only where it stays so for half as long as a request takes.
    """
    edges = np.linspace(start, last, _SEGMENTS + 1)
    sent, placed = np.sort(_known(result.arrival_s[~result.rejected])), np.sort(_known(result.placed_s))
    queue = _upto(sent, edges) - _upto(placed, edges)
    thirds = np.array_split(queue[1:], 3)
    growing = thirds[0].mean() < thirds[1].mean() < thirds[2].mean() and thirds[2].min() > 0
    if queue[-1] < _LEAST_QUEUE or not growing:
        return None
    begin = int(np.flatnonzero(queue >= 1)[0])
    steps = np.diff(queue[max(begin - 1, 0) :])
    if steps.size < 4:
        return None
    mean, spread = float(steps.mean()), float(steps.std(ddof=1))
    if mean <= student_t(steps.size - 1) * spread / np.sqrt(steps.size):
        return None
    full = _full_s(result, start, last)
    window = np.array([full, last])
    come, taken = (float(np.diff(_upto(times, window))[0]) for times in (sent, placed))
    took = result.finish_s - result.placed_s
    took_s = float(np.nanmean(took)) if not np.isnan(took).all() else np.inf
    if last - full < 0.5 * took_s or taken < _LEAST_QUEUE:
        return _unsteady(
            f"no steady state: the queue grows until the last arrival; requests come for "
            f"{format_seconds(last - start)} and are too few to tell by how much they exceed the capacity; send more")
    excess, capacity = come / taken - 1.0, taken / (last - full)
    if excess <= 0.005:
        return None
    return _unsteady(
        f"no steady state: arrivals exceed capacity by {excess:.0%} (the queue grows until the last arrival; "
        f"capacity about {capacity:.3g} requests/s)", overload_fraction=excess, capacity=capacity)


def _full_s(result: SimResult, start: float, last: float) -> float:
    """When first nearly as many requests had a place as have on average shortly before the last arrival."""
    times = np.linspace(start, last, _LOOKS)
    running = _upto(np.sort(_known(result.placed_s)), times) - _upto(np.sort(_known(result.finish_s)), times)
    return float(times[np.argmax(running >= _FULL * running[-(_LOOKS // 4) :].mean())])


def _upto(times: Floats, edges: Floats) -> Floats:
    """How many of the ordered `times` are not after each edge."""
    return np.searchsorted(times, edges, side="right").astype(float)


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _warmup_s(result: SimResult, start: float, last: float) -> float:
    """Seconds that MSER-5 cuts off the number of requests in the system while they come."""
    from bstar.sim.series import _in_system

    end = last if result.open_loop else max(last, start + 1e-9)
    if end <= start:
        return 0.0
    edges = np.linspace(start, end, 501)
    cut = mser(_in_system(result, edges))
    return float(edges[cut] - start)


def _too_short(result: SimResult, start: float, last: float) -> str | None:
    """Why what is left shows no steady state, or None."""
    longest = float(np.nanmean(result.e2e_s)) if not np.isnan(result.e2e_s).all() else float("inf")
    if result.open_loop and last - start < 3.0 * longest:
        return (f"no steady state: requests come for {last - start:.3g} s after warm-up, and one takes "
                f"{longest:.3g} s; send more requests")
    if result.concurrency is not None and np.count_nonzero(~np.isnan(result.finish_s)) < 3 * result.concurrency:
        return (f"no steady state: {np.count_nonzero(~np.isnan(result.finish_s))} answers for {result.concurrency} "
                "clients; send at least three requests each")
    return None


def _intervals(result: SimResult, inside: NDArray[np.bool_]) -> dict[str, Interval]:
    order = np.argsort(np.where(np.isnan(result.arrival_s), np.inf, result.arrival_s), kind="stable")
    order = order[inside[order]]
    out: dict[str, Interval] = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        values = getattr(result, name)[order]
        out[f"{name}.mean"] = batch_means(values)
        out[f"{name}.p95"] = batch_means(values, batches=10, least=40, statistic=_p95)
    return out


def _p95(values: Floats) -> float:
    return float(np.percentile(values, 95))
