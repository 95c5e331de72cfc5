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
from bstar.sim.deployed import StepFigures
from bstar.sim.load_keys import block_keys
from bstar.sim.replay import check_progress
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.sim.steps import StepLog, StepRows
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = NDArray[np.int64] | NDArray[np.int32]
Progress = Callable[[int, int, float], None]  # requests finished, of how many, the clock
Figures = Callable[[BatchShape], StepFigures]

_TIE = 1.0 + 1e-9
_REPORT_EVERY = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRun:
    """Per request, in the order of the load: seconds (nan where it did not happen) and counts; and the steps.

    compile_s   spent on loading compiled code before the first step
    """

    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    made_tokens: Counts
    preemptions: Counts
    cached_tokens: Counts
    log: StepLog
    interrupted: bool = False
    implementation: str = "reference"
    compile_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A step that runs."""

    plan: Plan
    start_s: float
    row: int


class ReferenceEngine:
    """One engine and its load.

    `run` it once, or `advance` it from time to time and push arrivals (`arrivals`, a heap of (seconds, request)) in
    between, as a router does.
    scheduler   another one with the methods of `bstar.sim.scheduler.Scheduler`; its plans may carry `extra_s`
                (seconds beside the batch) and `made` (tokens per request, where a step makes more than one)
    """

    def __init__(
        self, settings: SchedulerSettings, traffic: Traffic, figures: Figures, *, scheduler: Scheduler | None = None
    ) -> None:
        self.settings, self.traffic, self.figures = settings, traffic, figures
        self.scheduler = scheduler if scheduler is not None else Scheduler(settings)
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
        parents = traffic.parent.tolist()
        self.children: dict[int, list[int]] = {}
        for rank, parent in enumerate(parents):
            if parent >= 0:
                self.children.setdefault(parent, []).append(rank)
        known = int(traffic.num_scheduled)
        self.arrivals = [(float(self.arrival_s[r]), r) for r in range(known)]
        self.unsent = [r for r in range(known, n) if parents[r] < 0][::-1]
        self.now, self.finished, self.interrupted = 0.0, 0, False
        self.flight: _Flight | None = None

    def run(self, *, until_s: float = math.inf, progress: Progress | None = None) -> EngineRun:
        """Run to the end, to `until_s`, or to an interrupt (the results so far are kept)."""
        try:
            self.advance(until_s, progress)
        except KeyboardInterrupt:
            self.interrupted = True
        return self.result()

    def result(self) -> EngineRun:
        """What has happened so far."""
        return EngineRun(
            arrival_s=self.arrival_s, scheduled_s=self.scheduled_s, first_token_s=self.first_s,
            finish_s=self.finish_s, made_tokens=self.made,
            preemptions=np.array([r.preemptions for r in self.requests], dtype=np.int64),
            cached_tokens=np.array([r.cached_tokens for r in self.requests], dtype=np.int64),
            log=self.rows.log(kv_blocks=self.settings.num_blocks - 1, block_size=self.settings.block_size),
            interrupted=self.interrupted,
        )  # fmt: skip

    def advance(self, until_s: float = math.inf, progress: Progress | None = None) -> None:
        """Go on until nothing is left to do, or a step would be planned at `until_s` or later."""
        turns = 0
        while self.arrivals or self.scheduler.running or self.scheduler.waiting:
            turns += 1
            if progress is not None and turns % _REPORT_EVERY == 0:
                progress(self.finished, len(self.requests), self.now)
            planned_at = self.flight.start_s if self.flight is not None else self.now
            if planned_at * _TIE >= until_s or not self._turn(planned_at, until_s):
                return

    def _turn(self, planned_at: float, until_s: float) -> bool:
        """Plan a step and run it; False where nothing happens before `until_s`."""
        scheduler = self.scheduler
        while self.arrivals and self.arrivals[0][0] <= planned_at * _TIE:
            scheduler.add(self.requests[heapq.heappop(self.arrivals)[1]])
        plan = scheduler.schedule()
        check_progress(scheduler, plan)
        started: _Flight | None = None
        start_s, took = self.now, 0.0
        if plan.tokens:
            took, row = self._start(plan, start_s)
            started = _Flight(plan=plan, start_s=start_s, row=row)
        elif self.flight is None and not plan.preempted:
            if not self.arrivals:
                raise SpecError(self._stuck())
            if self.arrivals[0][0] >= until_s:
                return False
            self.now = max(start_s, self.arrivals[0][0])
            return True
        if self.settings.async_scheduling:
            ended, self.flight = self.flight, started
            ended_s = start_s
        else:
            ended, ended_s = started, start_s + took
        self.now = start_s + took
        if started is not None and started is ended:
            self._state(started.row, len(plan.preempted))
        if ended is not None:
            self.finished += self._end(ended, ended_s)
        if started is not None and started is not ended:  # without those that ended with the step before
            self._state(started.row, len(plan.preempted))
        return True

    def _start(self, plan: Plan, now: float) -> tuple[float, int]:
        """Run a step: its seconds and its row in the log."""
        table, prompt = [], 0
        for request, tokens in plan.tokens.items():
            decodes = request.computed - tokens >= request.target
            prompt += 0 if decodes else tokens
            table.append((float(tokens), float(request.computed), 1.0, not decodes))
            if math.isnan(self.scheduled_s[request.rank]):
                self.scheduled_s[request.rank] = now
        step = self.figures(BatchShape.from_rows(table))
        seconds = step.seconds + float(getattr(plan, "extra_s", 0.0))
        row = self.rows.add(
            start_s=now, steps=1, base_s=seconds, slope_s=0.0, made=sum(_tokens_of(plan, r) for r in plan.samples),
            sequences=len(plan.tokens), running=0, waiting=0, preempted=0, prompt_tokens=prompt,
            used_blocks=self.settings.num_blocks - 1 - len(self.scheduler.pool.free), flops=step.flops,
            compute_s=step.compute_s, memory_s=step.memory_s,
        )  # fmt: skip
        return seconds, row

    def _state(self, row: int, preempted: int) -> None:
        """Requests that run and wait, as the step's row says."""
        fields = list(self.rows.rows[row])
        fields[6], fields[7], fields[9] = len(self.scheduler.running), len(self.scheduler.waiting), preempted
        self.rows.rows[row] = tuple(fields)

    def _end(self, step: _Flight, now: float) -> int:
        """Tokens of a step that has run, stamped `now`; returns how many requests finished."""
        for request in step.plan.samples:
            rank, tokens = request.rank, _tokens_of(step.plan, request)
            self.made[rank] += tokens
            self.rows.single_gap_s += [0.0] * (tokens - 1)  # they come together
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


def _tokens_of(plan: Plan, request: Request) -> int:
    """Tokens that a step makes for a request that it samples."""
    made: dict[Request, int] | None = getattr(plan, "made", None)
    return 1 if made is None else made[request]
