"""Requests through one engine in time, from event to event.

Between events only decode steps happen, all alike but for the growing contexts: a run of them is one closed-form
sum. Events are an arrival that can be admitted, the end of a prompt chunk, a completion, a window that fills up,
and the step in which free blocks run out. A step with a prompt chunk is planned by itself, in constant time
unless memory or tokens are short; then request by request, as the engine does.

The decisions are those of `bstar.sim.scheduler`.
"""

from __future__ import annotations

import numpy as np
from bstar.sim.kernel.compiled import entry, part

from bstar.sim.kernel.cache import adopt_hits, find_hits, name_upto, release, stash, take_for
from bstar.sim.kernel.cost import DECODE as X_DECODE
from bstar.sim.kernel.cost import PROMPT as X_PROMPT
from bstar.sim.kernel.cost import SEQUENCES as X_SEQUENCES
from bstar.sim.kernel.cost import StepCost, add_chunk, mixed_step_s
from bstar.sim.kernel.heap import pop, push
from bstar.sim.kernel.spans import cross_spans, enter_spans, leave_spans, purged, recount_spans
from bstar.sim.kernel.state import (
    DECODE,
    DONE,
    ENDED,
    ENDLESS,
    LOG_CACHED,
    LOG_FULL,
    LOG_SCHEDULED,
    LOG_STEPS,
    PREFILL,
    SLOT_BITS,
    SLOT_MASK,
    STUCK,
    TIE,
    Blocks,
    Floats,
    Ints,
    Limits,
    Load,
    Outcome,
    Slots,
)
from bstar.sim.kernel.steps import (
    blocks_of,
    leave,
    plan_running,
    reach_of_taken,
    run_s,
    steps_to_reach,
    steps_with_blocks,
)


@part
def _new_slots(count: int) -> Slots:
    none, zero = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    return Slots(none.copy(), zero.copy(), none.copy(), zero.copy(), zero.copy(), zero.copy(), zero.copy(),
                 zero.copy(), none.copy())  # fmt: skip


@part
def _compacted(running: Ints, entries: int, slots: Slots) -> int:
    """Drop the dead entries of the running list; returns what is left."""
    left = 0
    for at in range(entries):
        slot = running[at]
        if slot >= 0:
            running[left] = slot
            slots.place[slot] = left
            left += 1
    return left


@part
def _sort_by_place(some: Ints, count: int, place: Ints) -> None:
    """Sort the first `count` slots by their place in the running list (few, nearly always one)."""
    for i in range(1, count):
        slot = some[i]
        at = i
        while at > 0 and place[some[at - 1]] > place[slot]:
            some[at] = some[at - 1]
            at -= 1
        some[at] = slot


@entry
def simulate(
    limits: Limits, load: Load, cost: StepCost, blocks: Blocks, out: Outcome, log: Ints, log_s: Floats,
    empty_step_s: float, until_s: float,
) -> tuple[int, int, float, Ints]:  # fmt: skip
    """Run the load. Returns (how it ended, the request at fault, the clock, counters).

    log, log_s    (rows, 3) decisions and (rows,) when a step starts; no rows: none are kept
    empty_step_s  seconds of a step that schedules nothing
    counters      steps, events, blocked looks at the queue, most blocks in use, decode tokens · steps
    """
    none = np.int64(0)  # a literal 0 would compile every callee once more
    n = load.order.size
    size = limits.block_size
    seats = limits.seats
    budget = limits.budget
    capacity = seats + 1
    slots = _new_slots(capacity)
    unused = np.arange(capacity - 1, -1, -1)  # empty slots, a stack
    num_unused = capacity
    running = np.full(4 * capacity + 16, -1, dtype=np.int64)
    entries = none
    num_running = none
    ends = np.empty(4 * capacity + 64, dtype=np.int64)
    num_ends = none
    phases = np.zeros(size, dtype=np.int64)
    groups = cost.span_limit.size
    limited = False
    full_rate = 0.0
    for g in range(groups):
        if cost.span_limit[g] == 0:
            full_rate += cost.span_rate[g]
        else:
            limited = True
    reach, growing = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.int64)
    crossing = np.full(capacity * max(groups, 1), -1, dtype=np.int64)
    crossings = np.empty(4 * crossing.size + 64 if limited else 1, dtype=np.int64)
    num_crossings = none
    x = np.zeros(cost.linear.size)

    known = load.prompt.copy()
    front = np.empty(n + 1 if limits.by_priority else capacity + 1, dtype=np.int64)
    num_front = none  # preempted requests, last in first out; by priority: all that wait, a heap of urgencies
    arrived, admitted, expected = 0, 0, (load.clients if load.clients else n)
    next_number = load.clients

    leaving = np.empty(capacity, dtype=np.int64)  # slots that end at this point in time
    done = np.empty(capacity, dtype=np.int64)  # slots in state DONE
    num_done = none
    victims = np.empty(capacity, dtype=np.int64)
    chunks = np.empty(capacity, dtype=np.int64)

    now = 0.0
    seen = 0.0  # when the step in flight was started, and the next one planned (async scheduling)
    in_flight = False
    steps = none
    decoding, contexts = 0, 0  # slots that decode, and their tokens in the cache
    prefilling, tail = 0, -1  # slots that prefill; the last entry of the running list if it is one
    free = limits.num_blocks - 1
    blocked = False
    logged = none
    keep_log = log.shape[0] > 0
    counters = np.zeros(8, dtype=np.int64)
    least_free = free

    while True:
        counters[1] += 1
        planned_at = seen if in_flight else now
        if keep_log and logged + 3 * capacity + 16 > log.shape[0]:
            return LOG_FULL, 0, now, counters

        # Requests whose last token came with the step before the one in flight give up seat and blocks.
        for i in range(num_done):
            slot = done[i]
            if slots.state[slot] == DONE:
                held = blocks_of(slots.total[slot] - 1, size)
                if limits.caching:
                    held = release(blocks, load, slots.request[slot], slot, held, (slots.total[slot] - 1) // size)
                free += held
                leave(slots, slot, running)
                unused[num_unused] = slot
                num_unused += 1
                num_running -= 1
                blocked = False
        num_done = none

        if limited:
            num_crossings = cross_spans(cost, steps, reach, growing, crossing, crossings, num_crossings)

        # Completions.
        num_leaving = none
        while num_ends > 0 and ends[0] >> SLOT_BITS <= steps:
            key = ends[0]
            num_ends = pop(ends, num_ends)
            slot = key & SLOT_MASK
            if slots.ends[slot] != key:
                continue
            slots.ends[slot] = -1  # a slot that was left and taken again may have left an equal key behind
            last = slots.total[slot] - 1 + slots.offset[slot]
            if last > steps:  # it was passed over in some steps
                slots.ends[slot] = (last << SLOT_BITS) | slot
                num_ends = push(ends, num_ends, slots.ends[slot])
                continue
            leaving[num_leaving] = slot
            num_leaving += 1
        if limits.caching:  # blocks are freed in the order of the running list
            _sort_by_place(leaving, num_leaving, slots.place)
        for i in range(num_leaving):
            slot = leaving[i]
            out.finish_s[slots.request[slot]] = now
            decoding -= 1
            contexts -= steps - slots.offset[slot]
            phases[slots.offset[slot] % size] -= 1
            if limited:
                leave_spans(cost, slots, slot, steps, reach, growing, crossing)
            slots.state[slot] = DONE
            if in_flight:
                done[num_done] = slot
                num_done += 1
            else:
                held = blocks_of(slots.total[slot] - 1, size)
                if limits.caching:
                    held = release(blocks, load, slots.request[slot], slot, held, (slots.total[slot] - 1) // size)
                free += held
                leave(slots, slot, running)
                unused[num_unused] = slot
                num_unused += 1
                num_running -= 1
                blocked = False
            if load.clients and next_number < n:
                load.arrival_s[next_number] = now + load.think_s[next_number]
                at = expected
                while at > arrived and load.arrival_s[load.order[at - 1]] > load.arrival_s[next_number]:
                    load.order[at] = load.order[at - 1]
                    at -= 1
                load.order[at] = next_number
                expected += 1
                next_number += 1

        # Arrivals.
        while arrived < expected and load.arrival_s[load.order[arrived]] <= planned_at * TIE:
            if limits.by_priority:
                urgency = load.urgency[load.order[arrived]]
                num_front = push(front, num_front, urgency)
                if front[0] == urgency:
                    blocked = False
            arrived += 1
        waiting = num_front if limits.by_priority else num_front + arrived - admitted
        if waiting == 0:
            blocked = False
        if now >= until_s:
            break
        if num_running == 0 and waiting == 0:
            if arrived >= expected:
                break
            now = max(now, load.arrival_s[load.order[arrived]])
            in_flight = False
            continue

        # A run of decode steps.
        if prefilling == 0 and 0 < decoding <= budget and (waiting == 0 or blocked):
            base_s = cost.decode_s[decoding] + full_rate * contexts
            slope_s = full_rate * decoding
            if limited:
                for g in range(groups):
                    base_s += cost.span_rate[g] * reach[g]
                    slope_s += cost.span_rate[g] * growing[g]
            most = (ends[0] >> SLOT_BITS) - steps
            if num_crossings > 0:
                most = min(most, (crossings[0] >> SLOT_BITS) - steps)
            if num_done > 0 and (waiting > 0 or keep_log):  # they are gone after one step
                most = 1
            if arrived < expected and (waiting == 0 or limits.by_priority):
                wait_s = load.arrival_s[load.order[arrived]] / TIE - now
                ahead = steps_to_reach(base_s, slope_s, wait_s, most) + limits.pipelined
                most = min(most, max(ahead, 1))
            if until_s < np.inf:
                most = min(most, max(steps_to_reach(base_s, slope_s, until_s - now, most), 1))
            run, taken = steps_with_blocks(phases, steps % size, decoding, free, most)
            if run > 0:
                free -= taken
                if limits.caching:
                    stash(blocks, taken)
                if keep_log:
                    for at in range(entries):
                        slot = running[at]
                        if slot >= 0 and slots.state[slot] == DECODE:
                            log[logged, 0], log[logged, 1], log[logged, 2] = LOG_SCHEDULED, slots.request[slot], 1
                            logged += 1
                    log[logged, 0], log[logged, 1], log[logged, 2] = LOG_STEPS, run, free
                    log_s[logged] = now
                    logged += 1
                seen = now + run_s(base_s, slope_s, run - 1)
                now += run_s(base_s, slope_s, run)
                in_flight = limits.pipelined == 1
                steps += run
                contexts += decoding * run
                if limited:
                    for g in range(groups):
                        reach[g] += growing[g] * run
                continue

        # A step by itself. First those that run.
        longest = limits.max_model_len + limits.batched_tokens
        if limits.threshold > 0 and num_running + waiting > 1:
            longest = limits.threshold
            if limits.adaptive:
                longest = max(longest, limits.batched_tokens // (num_running + waiting))
        left = budget - decoding
        need = phases[steps % size]
        short = left < 0 or need > free or prefilling > 1 or (prefilling == 1 and tail < 0)
        tokens, computed = 0, 0
        if not short and tail >= 0 and left > 0:
            computed = slots.computed[tail]
            tokens = min(min(slots.target[tail] - computed, longest), left)
            short = need + blocks_of(computed + tokens, size) - blocks_of(computed, size) > free
        num_victims, num_chunks = none, none
        scheduled = decoding
        if not short:
            free -= need
            if limits.caching:
                stash(blocks, need)
            if tokens > 0:
                more = blocks_of(computed + tokens, size) - blocks_of(computed, size)
                free -= more
                left -= tokens
                slots.taken[tail] = tokens
                chunks[0] = tail
                num_chunks = 1
                if limits.caching:
                    take_for(blocks, tail, more)
                    name_upto(blocks, load, slots.request[tail], tail, (computed + tokens) // size)
        else:
            left, free, num_victims, logged = plan_running(
                limits, load, out, slots, blocks, running, entries, free, longest, steps, known, victims, log, logged
            )
            for i in range(num_victims):
                slot = victims[i]
                request = slots.request[slot]
                unused[num_unused] = slot
                num_unused += 1
                num_running -= 1
                if known[request] < slots.total[slot]:  # else its last token is on its way
                    if limits.by_priority:
                        num_front = push(front, num_front, load.urgency[request])
                    else:
                        front[num_front] = request
                        num_front += 1
            blocked = blocked and num_victims == 0
            # Count afresh what is left.
            decoding, contexts, scheduled, prefilling, tail = 0, 0, 0, 0, -1
            phases[:] = 0
            for at in range(entries):
                slot = running[at]
                if slot < 0:
                    continue
                tail = -1
                if slots.state[slot] == DECODE:
                    decoding += 1
                    contexts += steps - slots.offset[slot]
                    phases[slots.offset[slot] % size] += 1
                    scheduled += slots.taken[slot] > 0
                elif slots.state[slot] == PREFILL:
                    prefilling += 1
                    tail = slot
                    if slots.taken[slot] > 0:
                        chunks[num_chunks] = slot
                        num_chunks += 1
            if limited:
                num_crossings = recount_spans(
                    cost, slots, running, entries, steps, reach, growing, crossing, crossings)

        # Then those that wait.
        if num_victims == 0:
            while True:
                waiting = num_front if limits.by_priority else num_front + arrived - admitted
                if waiting == 0:
                    break
                if left <= 0:
                    blocked = num_chunks == 0
                    break
                counters[2] += 1
                if num_running >= seats:
                    blocked = True
                    break
                if limits.by_priority:
                    request = load.by_urgency[front[0]]
                elif num_front > 0:
                    request = front[num_front - 1]
                else:
                    request = load.order[admitted]
                hits, idle_hits = 0, 0
                if limits.caching:
                    hits, idle_hits = find_hits(blocks, load, request, (known[request] - 1) // size)
                cached = hits * size
                tokens = min(known[request] - cached, longest)
                if tokens > left and not limits.chunked:
                    blocked = num_chunks == 0
                    break
                tokens = min(tokens, left)
                fit = cached + tokens
                if limits.reserve_prompt:
                    fit = max(fit, known[request])
                fit = max(blocks_of(min(fit, limits.max_model_len), size) - hits, 0) + idle_hits
                if fit + (limits.watermark if num_running > 0 else 0) > free:
                    blocked = True
                    break
                blocked = False
                if limits.by_priority:
                    num_front = pop(front, num_front)
                elif num_front > 0:
                    num_front -= 1
                else:
                    admitted += 1
                num_unused -= 1
                slot = unused[num_unused]
                if entries == running.size:
                    entries = _compacted(running, entries, slots)
                running[entries] = slot
                slots.place[slot] = entries
                entries += 1
                num_running += 1
                slots.request[slot] = request
                slots.state[slot] = PREFILL
                slots.target[slot] = known[request]
                slots.total[slot] = load.prompt[request] + load.output[request]
                slots.computed[slot] = cached
                slots.taken[slot] = tokens
                more = blocks_of(cached + tokens, size) - hits
                free -= more + idle_hits
                if limits.caching:
                    adopt_hits(blocks, load, request, slot, hits)
                    take_for(blocks, slot, more)
                    name_upto(blocks, load, request, slot, (cached + tokens) // size)
                    if keep_log:
                        log[logged, 0], log[logged, 1], log[logged, 2] = LOG_CACHED, request, cached
                        logged += 1
                if out.preemptions[request] == 0:
                    out.scheduled_s[request] = now
                    out.cached_tokens[request] = cached
                left -= tokens
                chunks[num_chunks] = slot
                num_chunks += 1
                prefilling += 1
                tail = slot
        least_free = min(least_free, free)

        if scheduled == 0 and num_chunks == 0:
            if num_victims > 0:
                if keep_log:
                    log[logged, 0], log[logged, 1], log[logged, 2] = LOG_STEPS, 1, free
                    log_s[logged] = now
                    logged += 1
                if num_running == 0 and free == limits.num_blocks - 1:
                    request = slots.request[victims[num_victims - 1]]
                    if known[request] >= free * size and known[request] < slots.total[victims[num_victims - 1]]:
                        return ENDLESS, request, now, counters
                if not in_flight:
                    now += empty_step_s
            elif not in_flight and num_done == 0:
                if arrived >= expected or not limits.by_priority or num_running > 0:
                    at_fault = load.by_urgency[front[0]] if limits.by_priority else (
                        front[num_front - 1] if num_front > 0 else load.order[admitted])
                    return STUCK, at_fault, now, counters
                now = max(now, load.arrival_s[load.order[arrived]])
            in_flight = False
            continue

        # The step is run.
        if keep_log:
            for at in range(entries):
                slot = running[at]
                if slot < 0:
                    continue
                tokens = slots.taken[slot]
                if slots.state[slot] == DECODE and not short:
                    tokens = 1
                if tokens > 0:
                    log[logged, 0], log[logged, 1], log[logged, 2] = LOG_SCHEDULED, slots.request[slot], tokens
                    logged += 1
            log[logged, 0], log[logged, 1], log[logged, 2] = LOG_STEPS, 1, free
            log_s[logged] = now
            logged += 1
        if short:
            reach_s = 0.0
            for g in range(groups):
                reach_s += cost.span_rate[g] * reach_of_taken(
                    slots, running, entries, steps, cost.span_limit[g], cost.span_restarts[g])
        else:
            reach_s = full_rate * (contexts + decoding)
            if limited:
                for g in range(groups):
                    reach_s += cost.span_rate[g] * (reach[g] + growing[g])
        seen = now
        if num_chunks == 0:
            now += cost.decode_s[scheduled] + reach_s
        else:
            x[:] = 0.0
            x[X_DECODE] = scheduled
            x[X_SEQUENCES] = scheduled
            for i in range(num_chunks):
                add_chunk(cost, x, slots.taken[chunks[i]], slots.computed[chunks[i]])
            tokens = scheduled + int(x[X_PROMPT])
            now += mixed_step_s(cost, x, tokens, scheduled + num_chunks, reach_s)
        in_flight = limits.pipelined == 1
        steps += 1
        contexts += decoding
        if limited:
            for g in range(groups):
                reach[g] += growing[g]
        if short:
            for at in range(entries):
                slot = running[at]
                if slot < 0 or slots.state[slot] != DECODE:
                    continue
                if slots.taken[slot] == 0:  # passed over: one step behind the others from now on
                    phases[slots.offset[slot] % size] -= 1
                    slots.offset[slot] += 1
                    phases[slots.offset[slot] % size] += 1
                    contexts -= 1
                slots.taken[slot] = 0
            if limited:
                num_crossings = recount_spans(
                    cost, slots, running, entries, steps, reach, growing, crossing, crossings)

        # Prompts that are complete have their first token.
        for i in range(num_chunks):
            slot = chunks[i]
            slots.computed[slot] += slots.taken[slot]
            slots.taken[slot] = 0
            if slots.computed[slot] < slots.target[slot]:
                continue
            prefilling -= 1
            if slot == tail:
                tail = -1
            slots.state[slot] = DECODE
            slots.offset[slot] = steps - slots.target[slot]
            phases[slots.offset[slot] % size] += 1
            decoding += 1
            contexts += slots.target[slot]
            if limited:
                num_crossings = enter_spans(
                    cost, slots, slot, steps, reach, growing, crossing, crossings, num_crossings)
            if num_ends == ends.size:
                num_ends = purged(ends, num_ends, slots.ends)
            slots.ends[slot] = ((slots.total[slot] - 1 + slots.offset[slot]) << SLOT_BITS) | slot
            num_ends = push(ends, num_ends, slots.ends[slot])
            request = slots.request[slot]
            if np.isnan(out.first_token_s[request]):
                out.first_token_s[request] = now

    counters[0] = steps
    counters[3] = limits.num_blocks - 1 - least_free
    return ENDED, 0, now, counters
