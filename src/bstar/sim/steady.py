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

if TYPE_CHECKING:
    from bstar.sim.result import SimResult

Floats = NDArray[np.float64]

_SEGMENTS = 12
# A queue has to be at least this long at the last arrival to be called growing.
_LEAST_QUEUE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """What the run says about its steady state.

    reached            whether there is one and the run is long enough to show it
    message            in a sentence; None where there is nothing to say
    overload_fraction  arrival rate / capacity - 1 where arrivals exceed it, else None
    warmup_s           cut off at the start, in seconds from the first request
    warmup_requests    requests sent before that
    intervals          of the means of ttft_s, tpot_s, e2e_s and of their p95, warm-up and overload aside
    """

    reached: bool
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
    sent = result.arrival_s
    known = ~np.isnan(sent) & ~result.rejected
    if known.sum() < 2:
        return _unsteady("no steady state: fewer than two requests")
    start, last = float(sent[known].min()), float(sent[known].max())
    if result.open_loop and last <= start:
        return _unsteady("no steady state: all requests are sent at once")
    overload = _overload(result, start, last) if result.open_loop else None
    if overload is not None:
        excess, capacity = overload
        return _unsteady(
            f"no steady state: arrivals exceed capacity by {excess:.0%} (the queue grows until the last arrival; "
            f"capacity about {capacity:.3g} requests/s)", overload_fraction=excess, capacity=capacity)
    warmup = _warmup_s(result, start, last)
    inside = known & result.measured & (sent >= start + warmup)
    short = _too_short(result, start + warmup, last)
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


def _overload(result: SimResult, start: float, last: float) -> tuple[float, float] | None:
    """(arrival rate / capacity - 1, capacity) where the queue grows until the last arrival, else None."""
    edges = np.linspace(start, last, _SEGMENTS + 1)
    sent, placed = np.sort(_known(result.arrival_s)), np.sort(_known(result.scheduled_s))
    come = np.searchsorted(sent, edges, side="right").astype(float)
    taken = np.searchsorted(placed, edges, side="right").astype(float)
    queue = come - taken
    thirds = np.array_split(queue[1:], 3)
    growing = thirds[0].mean() < thirds[1].mean() < thirds[2].mean() and thirds[2].min() > 0
    if queue[-1] < _LEAST_QUEUE or not growing:
        return None
    # The engine fills up first: growth counts from where the queue begins.
    begin = int(np.flatnonzero(queue >= 1)[0])
    steps = np.diff(queue[max(begin - 1, 0) :])
    if steps.size < 4:
        return None
    mean, spread = float(steps.mean()), float(steps.std(ddof=1))
    if mean <= student_t(steps.size - 1) * spread / np.sqrt(steps.size):
        return None
    span = edges[-1] - edges[max(begin - 1, 0)]
    capacity = (taken[-1] - taken[max(begin - 1, 0)]) / span
    arrivals = (come[-1] - come[max(begin - 1, 0)]) / span
    excess = arrivals / capacity - 1.0 if capacity > 0 else float("inf")
    return (excess, capacity) if excess > 0.005 else None


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
