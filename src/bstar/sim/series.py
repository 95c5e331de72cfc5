"""A run in time: what was running, waiting, held, made and moved, at equal intervals."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bstar.sim.result import SimResult

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeSeries:
    """Means over intervals, of all replicas together; arrays of equal length.

    time_s                 middle of the interval, in seconds from the first request
    in_system              requests that were sent and are not answered
    running, waiting       those of them that the scheduler knows, with a place in steps and without
    kv_usage               fraction of KV blocks in use
    output_tokens_per_s, prompt_tokens_per_s   made, and computed (recomputed ones too)
    step_s                 mean seconds of a step, nan where there was none
    busy                   fraction of the time with a step running
    mbu, mfu               fractions of bandwidth and of peak FLOP/s, over all time
    flops_per_s            achieved, per GPU of a replica, added over replicas
    preemptions            in the interval
    """

    time_s: Floats
    in_system: Floats
    running: Floats
    waiting: Floats
    kv_usage: Floats
    output_tokens_per_s: Floats
    prompt_tokens_per_s: Floats
    step_s: Floats
    busy: Floats
    mbu: Floats
    mfu: Floats
    flops_per_s: Floats
    preemptions: Floats

    def __len__(self) -> int:
        return int(self.time_s.size)

    def to_dict(self) -> dict[str, Any]:
        """Columns by name; nan becomes null."""
        return {f.name: [None if np.isnan(v) else float(v) for v in getattr(self, f.name)] for f in fields(self)}


def time_series(result: SimResult, points: int) -> TimeSeries:
    """The series of `result` at `points` equal intervals from its first request to its end."""
    log, (start, end) = result.steps, result.span_s
    edges = np.linspace(start, max(end, start + 1e-9), points + 1)
    width = edges[1] - edges[0]
    steps = log.steps.astype(float)
    duration = log.duration_s

    def total(amount: Floats) -> Floats:
        """Per interval; `amount` is that of each run, spread evenly over its time."""
        out = np.zeros(points)
        for replica in np.unique(log.replica):
            mine = log.replica == replica
            out += _spread(edges, log.start_s[mine], duration[mine], amount[mine])
        return out

    count, busy = total(steps), total(duration)
    share = width * log.replicas
    with np.errstate(divide="ignore", invalid="ignore"):
        step_s = np.where(count > 1e-9, busy / count, np.nan)
    in_system, running = _in_system(result, edges), total(log.running * duration) / width
    known = _in_system(result, edges, late_s=result.front_end_s)
    return TimeSeries(
        time_s=(edges[:-1] + edges[1:]) / 2.0 - start, in_system=in_system,
        running=running, waiting=np.maximum(known - running, 0.0),
        kv_usage=total(log.mean_used_blocks * duration) / (width * max(log.kv_blocks, 1)),
        output_tokens_per_s=total(log.made * steps) / width,
        prompt_tokens_per_s=total(log.prompt_tokens * steps) / width, step_s=step_s, busy=busy / share,
        mbu=total(log.memory_s) / share, mfu=total(log.compute_s) / share, flops_per_s=total(log.flops) / width,
        preemptions=total(log.preempted.astype(float)),
    )  # fmt: skip


def _spread(edges: Floats, start: Floats, duration: Floats, amount: Floats) -> Floats:
    """Amounts of runs that do not overlap, per interval."""
    if start.size == 0:
        return np.zeros(edges.size - 1)
    done = np.cumsum(amount)
    times = np.stack([start, start + duration], axis=1).reshape(-1)
    grown = np.stack([done - amount, done], axis=1).reshape(-1)
    return np.diff(np.interp(edges, np.maximum.accumulate(times), grown))


def _in_system(result: SimResult, edges: Floats, *, late_s: float = 0.0) -> Floats:
    """Mean number of requests in the system per interval, `late_s` after they were sent until the answer."""
    come = result.arrival_s[~np.isnan(result.arrival_s) & ~result.turned_away] + late_s
    gone = result.finish_s[~np.isnan(result.finish_s)]
    found: Floats = (_presence(edges, come) - _presence(edges, gone)) / (edges[1] - edges[0])
    return found


def _presence(edges: Floats, times: Floats) -> Floats:
    """Σ over `times` of the seconds of each interval that lie after it."""
    ordered = np.sort(times)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    before = np.searchsorted(ordered, edges, side="right")
    return np.diff(edges * before - sums[before])
