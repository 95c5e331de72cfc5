"""SGLang's and TensorRT-LLM's schedulers, and swapping, in time, from event to event.

Every event is planned request by request, as the readable schedulers do (`bstar.sim.policies`). Where the step that
was planned is nothing but decodes and the next ones can only be like it, they are one closed-form run: until a
request ends, somebody arrives whom the scheduler would look at, a window fills up, or free blocks run out.
"""

from __future__ import annotations

import numpy as np

from bstar.sim.kernel.closed_forms import run_s, span_reach, steps_to_reach, steps_with_blocks
from bstar.sim.kernel.compiled import entry, inlined, part
from bstar.sim.kernel.cost import CACHED, DECODE, FIRST_SPAN, PROMPT, SEQUENCES, StepCost, add_chunk, mixed_step_s
from bstar.sim.kernel.policy_state import (
    ALIVE,
    ARRIVED,
    AT_FAULT,
    BATCH,
    CHUNKED,
    DECAYS,
    EVENTS,
    EXPECTED,
    EXTRA,
    FINISHED,
    FLIGHT,
    FLIGHT_ROW,
    FLIGHT_START,
    FREE,
    FULL_BATCH,
    GAPS,
    HEAD,
    HELD_BACK,
    IN_FLIGHT,
    LOOKED,
    MAX_UTILIZATION,
    MOVED,
    NEXT,
    NOW,
    POLLS,
    ROWS,
    SEEN,
    SGLANG,
    STEP,
    STEPS,
    SWAPPED,
    SWAPPING,
    VICTIMS,
    WAITED,
    WAITING,
    PolicyState,
    Requests,
    Rules,
)
from bstar.sim.kernel.sglang import look, plan_sglang
from bstar.sim.kernel.state import (
    ENDED,
    ENDLESS,
    FULL,
    PAUSED,
    RUN_BASE_S,
    RUN_CACHED,
    RUN_CHUNKS,
    RUN_CONTEXTS,
    RUN_DECODES,
    RUN_FREE,
    RUN_PREEMPTED,
    RUN_PROMPT,
    RUN_REGULAR,
    RUN_RUNNING,
    RUN_SAMPLED,
    RUN_SLOPE_S,
    RUN_SPANS,
    RUN_START_S,
    RUN_STEPS,
    RUN_WAITING,
    STUCK,
    TIE,
    Floats,
)
from bstar.sim.kernel.swapping import plan_swapping
from bstar.sim.kernel.trtllm import ending, plan_trtllm


@entry
def advance_policy(
    rules: Rules, requests: Requests, s: PolicyState, cost: StepCost, rows: Floats, gaps: Floats, until_s: float
) -> int:
    """Go on until nothing is left, a step would be planned at `until_s` or later, or a log is full; says which.

    rows   (n, RUN_SPANS + 2 · prompt spans + 2 · decode spans) run log; no rows: none is kept
    gaps   seconds between tokens that are no single step
    """
    n, t, keep = s.n, s.t, rows.shape[0] > 0
    while n[ALIVE] > 0 or n[WAITING] > 0 or n[LOOKED] < n[EXPECTED] or n[IN_FLIGHT]:
        if keep and (n[ROWS] + 4 > rows.shape[0] or n[GAPS] + 2 * s.step.size > gaps.size):
            return FULL
        n[EVENTS] += 1
        planned_at = t[SEEN] if n[IN_FLIGHT] else t[NOW]
        if planned_at * TIE >= until_s:
            return PAUSED
        _arrivals(requests, s, planned_at)
        n[STEP] = 0
        n[VICTIMS] = 0
        if rules.scheme == SGLANG:
            if n[ALIVE] == 0:
                n[POLLS] = 0
                if n[LOOKED] < n[ARRIVED]:
                    look(s)
            if plan_sglang(rules, requests, s):
                return ENDLESS
        elif rules.scheme == SWAPPING:
            plan_swapping(rules, requests, s)
        else:
            plan_trtllm(rules, requests, s)
        if n[VICTIMS] > 0 and n[ALIVE] == 0 and n[FREE] == rules.num_blocks - 1 and (
            s.known[s.victims[n[VICTIMS] - 1]] >= n[FREE] * rules.block_size
        ):
            n[AT_FAULT] = s.victims[n[VICTIMS] - 1]
            return ENDLESS
        start_s = t[NOW]
        if n[STEP] == 0 and not n[IN_FLIGHT]:
            if n[VICTIMS] > 0:
                continue
            if n[ARRIVED] == n[EXPECTED]:
                n[AT_FAULT] = s.queue[n[HEAD]] if n[WAITING] > 0 else s.batch[0]
                return STUCK
            next_s = requests.arrival_s[s.order[n[ARRIVED]]]
            if next_s >= until_s:
                return PAUSED
            t[NOW] = max(start_s, next_s)
            continue
        prompts, samples = _start_step(rules, requests, s, cost, rows, keep, start_s)
        row, ended = n[ROWS] - 1, 0
        if rules.pipelined:
            had, had_row, had_start_s = n[FLIGHT], n[FLIGHT_ROW], t[FLIGHT_START]
            if n[IN_FLIGHT]:
                ended = _end_step(requests, s, rows, gaps, keep, had, had_row, had_start_s, start_s, rules)
            _collect(s, samples)
            n[FLIGHT_ROW] = row
            t[FLIGHT_START] = start_s
            t[SEEN] = start_s
            n[IN_FLIGHT] = 1 if n[STEP] > 0 else 0
        else:
            _collect(s, samples)
            ended = _end_step(requests, s, rows, gaps, keep, n[FLIGHT], row, start_s, t[NOW], rules)
        if prompts == 0 and n[STEP] > 0 and samples == n[STEP] and n[VICTIMS] == 0 and n[MOVED] == 0 and (
            ended == 0 or n[WAITING] == 0  # else who waits may have the room from the next step on
        ):
            _extend(rules, requests, s, cost, rows, gaps, keep, start_s, until_s)
    return ENDED


@inlined
def _arrivals(requests: Requests, s: PolicyState, planned_at: float) -> None:
    n = s.n
    while n[ARRIVED] < n[EXPECTED] and requests.arrival_s[s.order[n[ARRIVED]]] <= planned_at * TIE:
        n[ARRIVED] += 1


@inlined
def _start_step(
    rules: Rules, requests: Requests, s: PolicyState, cost: StepCost, rows: Floats, keep: bool, start_s: float
) -> tuple[int, int]:
    """Run the planned step; returns (prompt chunks, tokens sampled). Samples are left in s.fit."""
    n, x = s.n, s.x
    if n[STEP] == 0:
        return 0, 0
    x[:] = 0.0
    decodes, prompts, samples, contexts, tokens_total = 0, 0, 0, 0, 0
    reach_s = 0.0
    for i in range(n[STEP]):
        r, tokens = s.step[i], s.take[i]
        tokens_total += tokens
        if np.isnan(s.scheduled_s[r]):
            s.scheduled_s[r] = start_s
        if s.computed[r] >= s.target[r]:
            decodes += 1
            contexts += s.computed[r] + 1
            for g in range(cost.span_limit.size):
                reach_s += cost.span_rate[g] * span_reach(
                    cost.span_limit[g], cost.span_restarts[g], s.computed[r] + 1)
        else:
            prompts += 1
            add_chunk(cost, x, tokens, s.computed[r])
        wasted = s.gone[r] or (rules.scheme == SGLANG and ending(requests, s, r))
        s.computed[r] += tokens
        if not wasted and s.computed[r] == s.known[r] + s.promised[r]:
            s.promised[r] += 1
            s.fit[samples] = r
            samples += 1
    x[DECODE] = decodes
    x[SEQUENCES] += decodes
    if prompts == 0:
        seconds = cost.decode_s[decodes] + reach_s
    else:
        seconds = mixed_step_s(cost, x, tokens_total, decodes + prompts, reach_s)
    seconds += s.t[EXTRA]
    n[STEPS] += 1
    s.t[NOW] = start_s + seconds
    if keep:
        row = rows[n[ROWS]]
        row[:] = 0.0
        row[RUN_START_S], row[RUN_STEPS], row[RUN_BASE_S] = start_s, 1.0, seconds
        row[RUN_SAMPLED], row[RUN_RUNNING], row[RUN_FREE] = samples, n[ALIVE], n[FREE]
        row[RUN_WAITING], row[RUN_PREEMPTED] = n[WAITING] + n[ARRIVED] - n[LOOKED], n[VICTIMS]
        row[RUN_CONTEXTS], row[RUN_DECODES], row[RUN_PROMPT] = contexts, decodes, x[PROMPT]
        row[RUN_CACHED], row[RUN_CHUNKS] = x[CACHED], prompts
        spans = 2 * cost.prompt_limit.size
        for j in range(spans):
            row[RUN_SPANS + j] = x[FIRST_SPAN + j]
        for g in range(cost.span_limit.size):
            seen = 0
            for i in range(n[STEP]):
                r = s.step[i]
                if s.computed[r] > s.target[r]:
                    seen += span_reach(cost.span_limit[g], cost.span_restarts[g], s.computed[r])
            row[RUN_SPANS + spans + 2 * g] = seen
        n[ROWS] += 1
    return prompts, samples


@inlined
def _collect(s: PolicyState, samples: int) -> None:
    for i in range(samples):
        s.flight[i] = s.fit[i]
    s.n[FLIGHT] = samples


@inlined
def _end_step(
    requests: Requests, s: PolicyState, rows: Floats, gaps: Floats, keep: bool, count: int, row: int,
    step_start_s: float, now: float, rules: Rules,
) -> int:  # fmt: skip
    """The first `count` of s.flight have a token, stamped `now`; returns how many are complete and leave."""
    n = s.n
    regular, finished = 0, 0
    for i in range(count):
        r = s.flight[i]
        s.known[r] += 1
        if s.held[r] > 0 and s.promised[r] > 0:
            s.promised[r] -= 1
        if np.isnan(s.first_s[r]):
            s.first_s[r] = now
        elif s.last_s[r] == step_start_s:
            regular += 1
        elif keep:
            gaps[n[GAPS]] = now - s.last_s[r]
            n[GAPS] += 1
        s.last_s[r] = now
        if s.known[r] - requests.prompt[r] >= requests.output[r]:
            s.finish_s[r] = now
            s.gone[r] = 1
            finished += 1
            n[FINISHED] += 1
            if s.held[r] > 0:
                n[FREE] += s.held[r]
                s.held[r] = 0
                n[ALIVE] -= 1
            else:
                _unqueue(s, r)
                if s.kept[r] > 0:
                    s.kept[r] = 0
                    n[SWAPPED] -= 1
            if rules.clients > 0 and n[NEXT] < requests.arrival_s.size:
                _send(requests, s, now)
    if keep:
        rows[row, RUN_REGULAR] += regular
    if finished > 0 and rules.scheme != SGLANG:
        left = 0
        for i in range(n[BATCH]):
            r = s.batch[i]
            if not s.gone[r]:
                s.batch[left] = r
                left += 1
        n[BATCH] = left
    return finished


@part
def _unqueue(s: PolicyState, r: int) -> None:
    """A request that was preempted while its last token was made waits no longer."""
    n, left = s.n, 0
    for i in range(n[WAITING]):
        place = n[HEAD] + i
        other = s.queue[place if place < s.queue.size else place - s.queue.size]
        if other != r:
            to = n[HEAD] + left
            s.queue[to if to < s.queue.size else to - s.queue.size] = other
            left += 1
    n[WAITING] = left


@part
def _send(requests: Requests, s: PolicyState, now: float) -> None:
    """A client that has its answer sends the next request."""
    n = s.n
    number = n[NEXT]
    n[NEXT] += 1
    requests.arrival_s[number] = now + requests.think_s[number]
    at = n[EXPECTED]
    while at > n[ARRIVED] and requests.arrival_s[s.order[at - 1]] > requests.arrival_s[number]:
        s.order[at] = s.order[at - 1]
        at -= 1
    s.order[at] = number
    n[EXPECTED] += 1


@inlined
def _extend(
    rules: Rules, requests: Requests, s: PolicyState, cost: StepCost, rows: Floats, gaps: Floats, keep: bool,
    start_s: float, until_s: float,
) -> None:  # fmt: skip
    """As many more steps like the one that was just run as can only be like it."""
    n, t, size, count = s.n, s.t, rules.block_size, s.n[STEP]
    if rules.scheme == SGLANG:
        if n[BATCH] != count or (n[WAITING] > 0 and not n[FULL_BATCH]) or n[CHUNKED] >= 0:
            return
        looks = not n[FULL_BATCH]
    else:
        if n[BATCH] != count:
            return
        looks = n[WAITING] == 0 or rules.threshold > 0
    most = 1 << 40
    if rules.scheme != SGLANG and rules.scheme != SWAPPING and n[HELD_BACK]:
        if rules.scheme == MAX_UTILIZATION:
            return  # who fits depends on the blocks that are taken meanwhile
        looks, most = True, rules.wait_iters - n[WAITED]
    s.phases[:] = 0
    for i in range(count):
        r = s.step[i]
        most = min(most, requests.prompt[r] + requests.output[r] - s.known[r] - s.promised[r])
        s.phases[(size - s.computed[r] % size) % size] += 1
        for g in range(cost.span_limit.size):
            limit = cost.span_limit[g]
            if limit > 0 and cost.span_restarts[g]:
                most = min(most, limit - s.computed[r] % limit)
            elif limit > s.computed[r]:
                most = min(most, limit - s.computed[r])
    if most <= 0:
        return
    base_s, slope_s = cost.decode_s[count], 0.0
    for g in range(cost.span_limit.size):
        limit, seen, growing = cost.span_limit[g], 0, 0
        for i in range(count):
            after = span_reach(limit, cost.span_restarts[g], s.computed[s.step[i]] + 1)
            grows = limit == 0 or cost.span_restarts[g] or s.computed[s.step[i]] < limit
            seen += after - (1 if grows else 0)
            growing += 1 if grows else 0
        base_s += cost.span_rate[g] * seen
        slope_s += cost.span_rate[g] * growing
    if rules.scheme == SGLANG and rules.recv_interval > 1 and (n[LOOKED] < n[ARRIVED] or not looks):
        most = min(most, rules.recv_interval - n[POLLS] - 1)
    if looks and n[LOOKED] == n[ARRIVED] and n[ARRIVED] < n[EXPECTED]:
        next_s = requests.arrival_s[s.order[n[ARRIVED]]]
        most = min(most, _steps_before(next_s, rules, base_s, slope_s, start_s, t[NOW], most))
    if until_s < np.inf:
        most = min(most, _steps_before(until_s, rules, base_s, slope_s, start_s, t[NOW], most))
    if most <= 0:
        return
    steps, taken = steps_with_blocks(s.phases, 0, count, n[FREE], most)
    if steps <= 0:
        return
    n[FREE] -= taken
    begun = t[NOW]
    for i in range(count):
        r = s.step[i]
        after = s.computed[r] + steps
        s.held[r] = (after + size - 1) // size
        s.computed[r] = after
        s.known[r] += steps
    if keep:
        if rules.pipelined:
            _end_first(s, rows, gaps, count, start_s, begun)
            _grow_rows(s, cost, rows, steps, 1, steps - 1, base_s, slope_s)
            _grow_rows(s, cost, rows, steps, steps, 1, base_s, slope_s)
            rows[n[ROWS] - 1, RUN_REGULAR] = 0.0  # counted when the step that runs has ended
        else:
            _grow_rows(s, cost, rows, steps, 1, steps, base_s, slope_s)
    t[NOW] = begun + run_s(base_s, slope_s, steps)
    t[SEEN] = begun + run_s(base_s, slope_s, steps - 1)
    t[FLIGHT_START] = t[SEEN]
    n[FLIGHT_ROW] = n[ROWS] - 1
    ends = False
    for i in range(count):
        r = s.step[i]
        s.last_s[r] = t[SEEN] if rules.pipelined else t[NOW]
        if not rules.pipelined and s.known[r] - requests.prompt[r] >= requests.output[r]:
            s.gone[r] = 1
            ends = True
    n[STEPS] += steps
    if n[HELD_BACK] and rules.scheme != SGLANG:
        n[WAITED] += steps
    if rules.scheme == SGLANG:
        n[DECAYS] += steps
        n[POLLS] = (n[POLLS] + steps) % rules.recv_interval
    if not rules.pipelined and ends:
        _leave(rules, requests, s, count)


@inlined
def _steps_before(
    arrival_s: float, rules: Rules, base_s: float, slope_s: float, start_s: float, now: float, most: int
) -> int:
    """Further steps that are planned before an arrival is seen; the last step ran from start_s to now."""
    if not rules.pipelined:
        return steps_to_reach(base_s, slope_s, arrival_s / TIE - now, most)
    if arrival_s <= start_s * TIE:
        return 0
    return 1 + steps_to_reach(base_s, slope_s, arrival_s / TIE - now, most)


@part
def _end_first(s: PolicyState, rows: Floats, gaps: Floats, count: int, start_s: float, now: float) -> None:
    """Gaps of the tokens of the step that precedes a run (async scheduling: the run's first step knows them)."""
    n = s.n
    for i in range(count):
        r = s.step[i]
        if s.last_s[r] == start_s:
            rows[n[FLIGHT_ROW], RUN_REGULAR] += 1.0
        else:
            gaps[n[GAPS]] = now - s.last_s[r]
            n[GAPS] += 1


@part
def _grow_rows(
    s: PolicyState, cost: StepCost, rows: Floats, run: int, first: int, steps: int, base_s: float, slope_s: float
) -> None:
    """A row for steps `first` … `first + steps - 1` of a run of `run` steps that s.computed counts already."""
    if steps <= 0:
        return
    n, count = s.n, s.n[STEP]
    row = rows[n[ROWS]]
    row[:] = 0.0
    row[RUN_START_S], row[RUN_STEPS] = s.t[NOW] + run_s(base_s, slope_s, first - 1), steps
    row[RUN_BASE_S], row[RUN_SLOPE_S] = base_s + slope_s * (first - 1), slope_s
    row[RUN_REGULAR], row[RUN_SAMPLED], row[RUN_RUNNING], row[RUN_FREE] = count, count, n[ALIVE], n[FREE]
    row[RUN_WAITING] = n[WAITING] + n[ARRIVED] - n[LOOKED]
    row[RUN_DECODES] = count
    for i in range(count):
        row[RUN_CONTEXTS] += s.computed[s.step[i]] - run + first
    spans = 2 * cost.prompt_limit.size
    for g in range(cost.span_limit.size):
        seen, growing, limit = 0, 0, cost.span_limit[g]
        for i in range(count):
            context = s.computed[s.step[i]] - run + first
            seen += span_reach(limit, cost.span_restarts[g], context)
            growing += 1 if limit == 0 or cost.span_restarts[g] or context <= limit else 0
        row[RUN_SPANS + spans + 2 * g], row[RUN_SPANS + spans + 2 * g + 1] = seen, growing
    n[ROWS] += 1


@part
def _leave(rules: Rules, requests: Requests, s: PolicyState, count: int) -> None:
    """Those who ended with a run that was synchronous."""
    n, now = s.n, s.t[NOW]
    for i in range(count):
        r = s.step[i]
        if not s.gone[r] or s.held[r] == 0:
            continue
        s.finish_s[r] = now
        n[FREE] += s.held[r]
        s.held[r] = 0
        n[ALIVE] -= 1
        n[FINISHED] += 1
        if rules.clients > 0 and n[NEXT] < requests.arrival_s.size:
            _send(requests, s, now)
    if rules.scheme != SGLANG:
        left = 0
        for i in range(n[BATCH]):
            r = s.batch[i]
            if not s.gone[r]:
                s.batch[left] = r
                left += 1
        n[BATCH] = left
