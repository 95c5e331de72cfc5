"""Requests through the readable scheduler in time, step by step: what the kernel must reproduce, in plain words.

synchronous    plan a step, run it, take its tokens, plan the next
asynchronous   while a step runs, the next one is planned: it knows the arrivals and the finished requests
               of the moment the running step started
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.kernel.cost import CACHED, DECODE, FIRST_SPAN, PROMPT, SEQUENCES, StepCost
from bstar.sim.kernel.state import TIE
from bstar.sim.replay import check_progress
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduled step: (request, tokens) in order, who was preempted, blocks left free."""

    start_s: float
    scheduled: list[list[int]]
    preempted: list[int]
    free_blocks: int


@dataclass(slots=True)
class Times:
    """Per request, by number; nan where it did not happen."""

    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    preemptions: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    steps: list[Step] = field(default_factory=list)
    end_s: float = 0.0


def simulate_stepwise(
    settings: SchedulerSettings, requests: Sequence[Request], arrival_s: Floats, cost: StepCost, *,
    clients: int = 0, think_s: Floats | None = None, empty_step_s: float = 0.0,
) -> Times:  # fmt: skip
    """Run `requests` (by rank) that arrive at `arrival_s`; with `clients` a closed loop, as in the kernel's Load."""
    n = len(requests)
    nan = np.full(n, np.nan)
    times = Times(nan.copy(), nan.copy(), nan.copy(), np.zeros(n, np.int64), np.zeros(n, np.int64))
    arrival = np.array(arrival_s, dtype=float)
    pending = sorted(range(min(clients, n) if clients else n), key=lambda i: (arrival[i], i))
    following = len(pending)
    scheduler = Scheduler(settings)
    now = seen = 0.0
    in_flight: Plan | None = None
    while pending or scheduler.running or scheduler.waiting:
        if in_flight is None and not scheduler.running and not scheduler.waiting:
            now = max(now, arrival[pending[0]])
        planned_at = seen if in_flight is not None else now
        while pending and arrival[pending[0]] <= planned_at * TIE:
            scheduler.add(requests[pending.pop(0)])
        plan = scheduler.schedule()
        if plan.tokens or plan.preempted:
            times.steps.append(Step(
                now, [[r.rank, t] for r, t in plan.tokens.items()], sorted(r.rank for r in plan.preempted),
                len(scheduler.pool.free)))  # fmt: skip
        elif in_flight is None and not (settings.policy == "priority" and pending and not scheduler.running):
            if scheduler.running or scheduler.waiting:
                raise SpecError("a request can never be scheduled with these settings")
        elif in_flight is None:
            now = max(now, arrival[pending[0]])
        check_progress(scheduler, plan)
        for request in plan.tokens:
            if np.isnan(times.scheduled_s[request.rank]):
                times.scheduled_s[request.rank] = now
                times.cached_tokens[request.rank] = request.cached_tokens
        start, took = now, step_seconds(cost, plan) if plan.tokens else 0.0
        if settings.async_scheduling:
            ended, ended_s = in_flight or Plan({}, []), start
            in_flight = plan if plan.tokens else None
            seen = start
        else:
            ended, ended_s = plan, start + took
        if plan.preempted and not plan.tokens and ended is not None and not ended.tokens:
            took = empty_step_s
        now = start + took
        for request in ended.samples:
            if np.isnan(times.first_token_s[request.rank]):
                times.first_token_s[request.rank] = ended_s
        for request in scheduler.update(ended):
            times.finish_s[request.rank] = ended_s
            if clients and following < n:
                arrival[following] = ended_s + (0.0 if think_s is None else think_s[following])
                pending.append(following)
                pending.sort(key=lambda i: (arrival[i], i))
                following += 1
    for request in requests:
        times.preemptions[request.rank] = request.preemptions
    times.end_s = now
    return times


def step_seconds(cost: StepCost, plan: Plan) -> float:
    """Seconds of a step from its batch, request by request."""
    x, reach_s, tokens = np.zeros(len(cost.linear)), 0.0, 0
    for request, new in plan.tokens.items():
        cached = request.computed - new
        tokens += new
        x[SEQUENCES] += 1
        if cached >= request.target:
            x[DECODE] += 1
            for rate, limit, restarts in zip(cost.span_rate, cost.span_limit, cost.span_restarts, strict=True):
                reach_s += rate * _sees(cached + 1, limit, bool(restarts))
            continue
        x[PROMPT] += new
        x[CACHED] += cached
        for g, (limit, restarts, gathers, stride) in enumerate(
            zip(cost.prompt_limit, cost.prompt_restarts, cost.prompt_gathers, cost.prompt_stride, strict=True)
        ):
            pairs = sum(_sees(p, limit, bool(restarts)) for p in range(cached + 1, cached + new + 1))
            keys = cached + new
            if limit and restarts:
                keys = min(keys, cached % limit + new)
            elif limit:
                keys = min(keys, new * limit if gathers else limit + new - 1)
            x[FIRST_SPAN + 2 * g] += pairs / stride
            x[FIRST_SPAN + 2 * g + 1] += keys / stride
    if x[PROMPT] == 0:
        return float(cost.decode_s[int(x[DECODE])] + reach_s)
    drafts = (cost.decode_tokens - 1) * int(x[DECODE])
    tokens += drafts
    total = cost.step_s + cost.token_s[tokens] + cost.sampled_s[len(plan.tokens) + drafts] + cost.linear @ x
    total += cost.prompt_fixed_s + (cost.decode_fixed_s if x[DECODE] else 0.0)
    for compute, memory, most, base, phase in zip(
        cost.row_compute, cost.row_memory, cost.row_compute_base, cost.row_base, cost.row_phase, strict=True
    ):
        if phase != 1 or x[DECODE]:
            own = compute @ x
            own += own * most / max(own + most, 1e-30)
            total += (own ** cost.power + (base + memory @ x) ** cost.power) ** (1 / cost.power)
    launching = cost.launch_s if tokens > cost.graph_tokens else cost.piece_s
    total = (total**cost.power + launching**cost.power) ** (1 / cost.power)
    total += cost.host_s + cost.host_sequence_s * x[SEQUENCES] + cost.decode_reach_s * x[DECODE]
    return float(total + reach_s)


def _sees(position: int, limit: int, restarts: bool) -> int:
    """Tokens that the token at `position` (from 1) attends."""
    if not limit:
        return position
    return (position - 1) % limit + 1 if restarts else min(position, limit)
