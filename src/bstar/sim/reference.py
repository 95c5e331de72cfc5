"""Requests through one engine in time, step by step, with the readable scheduler: slow, and simple to trust.

    synchronous    plan, run, outputs; a request that arrives during a step joins the next
    asynchronous   a step is planned when the one before it starts, so arrivals join and finished requests leave a
                   step later; an arrival within 1e-9 (relative) of a step's start joins that step
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.physics.batch import BatchShape
from bstar.sim.load_keys import block_keys
from bstar.sim.replay import check_progress
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.sim.steps import StepLog, StepRows
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Progress = Callable[[int, int, float], None]  # requests finished, of how many, the clock
# Of a step's shape: expected seconds, at peak FLOP/s, at full bandwidth.
StepSeconds = Callable[[BatchShape], tuple[float, float, float]]

_TIE = 1.0 + 1e-9
_REPORT_EVERY = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRun:
    """Per request, in the order of the load: seconds (nan where it did not happen) and counts; and the steps."""

    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    made_tokens: Ints
    preemptions: Ints
    cached_tokens: Ints
    log: StepLog
    interrupted: bool = False


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A step that runs."""

    plan: Plan
    start_s: float
    row: int


class ReferenceEngine:
    """One engine and its load. `run` it once."""

    def __init__(self, settings: SchedulerSettings, traffic: Traffic, seconds: StepSeconds) -> None:
        self.settings, self.traffic, self.seconds = settings, traffic, seconds
        self.scheduler = Scheduler(settings)
        self.rows = StepRows()
        n = traffic.num_requests
        self.arrival_s = np.array(traffic.arrival_s, dtype=float)
        self.scheduled_s, self.first_s, self.finish_s, self.last_s = (np.full(n, math.nan) for _ in range(4))
        self.made = np.zeros(n, dtype=np.int64)
        keys = block_keys(traffic, settings.block_size)
        self.requests = [
            Request(rank=r, prompt_tokens=p, output_tokens=o, priority=q, block_key=k)
            for r, (p, o, q, k) in enumerate(zip(
                traffic.input_tokens.tolist(), traffic.output_tokens.tolist(), traffic.priority.tolist(), keys,
                strict=True))
        ]  # fmt: skip
        self.decoding: set[int] = set()
        parents = traffic.parent.tolist()
        self.children: dict[int, list[int]] = {}
        for rank, parent in enumerate(parents):
            if parent >= 0:
                self.children.setdefault(parent, []).append(rank)
        known = int(traffic.num_scheduled)
        self.arrivals = [(float(self.arrival_s[r]), r) for r in range(known)]
        self.unsent = [r for r in range(known, n) if parents[r] < 0][::-1]

    def run(
        self, *, until_s: float = math.inf, progress: Progress | None = None
    ) -> EngineRun:
        """Run to the end, to `until_s`, or to an interrupt (the results so far are kept)."""
        interrupted = False
        try:
            self._loop(until_s, progress)
        except KeyboardInterrupt:
            interrupted = True
        return EngineRun(
            arrival_s=self.arrival_s, scheduled_s=self.scheduled_s, first_token_s=self.first_s,
            finish_s=self.finish_s, made_tokens=self.made,
            preemptions=np.array([r.preemptions for r in self.requests], dtype=np.int64),
            cached_tokens=np.array([r.cached_tokens for r in self.requests], dtype=np.int64),
            log=self.rows.log(kv_blocks=self.settings.num_blocks - 1, block_size=self.settings.block_size),
            interrupted=interrupted,
        )  # fmt: skip

    def _loop(self, until_s: float, progress: Progress | None) -> None:
        scheduler, pipelined = self.scheduler, self.settings.async_scheduling
        now, flight, finished, turns = 0.0, None, 0, 0
        while self.arrivals or scheduler.running or scheduler.waiting:
            turns += 1
            if progress is not None and turns % _REPORT_EVERY == 0:
                progress(finished, len(self.requests), now)
            if now >= until_s:
                return
            planned_at = flight.start_s if flight is not None else now
            while self.arrivals and self.arrivals[0][0] <= planned_at * _TIE:
                scheduler.add(self.requests[heapq.heappop(self.arrivals)[1]])
            plan = scheduler.schedule()
            check_progress(scheduler, plan)
            self.decoding.difference_update(r.rank for r in plan.preempted)
            following = None
            took = 0.0
            if plan.tokens:
                took, row = self._start(plan, now)
                following = _Flight(plan=plan, start_s=now, row=row)
            elif flight is None and not plan.preempted:
                if not self.arrivals:
                    raise SpecError(self._stuck())
                now = max(now, self.arrivals[0][0])
            if pipelined:
                ended, flight, at = flight, following, now
            else:
                ended, at = following, now + took
            if ended is not None:
                finished += self._end(ended, at)
            now += took
            if following is not None:
                row = following.row
                self._state(row, len(plan.preempted))

    def _start(self, plan: Plan, now: float) -> tuple[float, int]:
        """Run a step: its seconds and its row in the log."""
        table, prompt = [], 0
        for request, tokens in plan.tokens.items():
            decodes = request.rank in self.decoding
            prompt += 0 if decodes else tokens
            table.append((float(tokens), float(request.computed), 1.0, not decodes))
            if math.isnan(self.scheduled_s[request.rank]):
                self.scheduled_s[request.rank] = now
        took, compute_s, memory_s = self.seconds(BatchShape.from_rows(table))
        self.decoding.update(r.rank for r in plan.samples)
        row = self.rows.add(
            start_s=now, steps=1, base_s=took, slope_s=0.0, made=len(plan.samples), sequences=len(plan.tokens),
            running=0, waiting=0, used_blocks=self.settings.num_blocks - 1 - len(self.scheduler.pool.free),
            preempted=0, prompt_tokens=prompt, compute_s=compute_s, memory_s=memory_s,
        )  # fmt: skip
        return took, row

    def _state(self, row: int, preempted: int) -> None:
        """Requests that run and wait, as the step's row says."""
        fields = list(self.rows.rows[row])
        fields[6], fields[7], fields[9] = len(self.scheduler.running), len(self.scheduler.waiting), preempted
        self.rows.rows[row] = tuple(fields)

    def _end(self, step: _Flight, now: float) -> int:
        """Tokens of a step that has run, stamped `now`; returns how many requests finished."""
        for request in step.plan.samples:
            rank = request.rank
            self.made[rank] += 1
            if math.isnan(self.first_s[rank]):
                self.first_s[rank] = now
            elif self.last_s[rank] == step.start_s:
                self.rows.regular[step.row] += 1
            else:
                self.rows.single_gap_s.append(now - float(self.last_s[rank]))
            self.last_s[rank] = now
        gone = self.scheduler.update(step.plan)
        for request in gone:
            self.finish_s[request.rank] = now
            self.decoding.discard(request.rank)
            self._answered(request.rank, now)
        return len(gone)

    def _answered(self, rank: int, now: float) -> None:
        """Whoever waited for this answer sends its next request."""
        children = self.children.get(rank, [])
        following = [c for c in children if math.isnan(self.arrival_s[c])]
        if not following and self.traffic.concurrency is not None and self.unsent:
            following = [self.unsent.pop()]
        for child in following:
            self.arrival_s[child] = now + float(self.traffic.think_s[child])
            heapq.heappush(self.arrivals, (float(self.arrival_s[child]), child))

    def _stuck(self) -> str:
        request = [*self.scheduler.running, *self.scheduler.waiting][0]
        s = self.settings
        return (
            f"request {request.rank}: {request.num_tokens} tokens can never be scheduled with {s.num_blocks} blocks of "
            f"{s.block_size} and {s.token_budget} tokens a step (max_num_batched_tokens)"
        )
