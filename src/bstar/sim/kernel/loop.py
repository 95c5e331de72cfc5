"""Requests through one engine in time, from event to event.

Between events only decode steps happen, all alike but for the growing contexts: a run of them is one closed-form
sum. Events are an arrival that can be admitted, the end of a prompt chunk, a completion, a window that fills up,
and the step in which free blocks run out. A step with a prompt chunk is planned by itself, in constant time
unless memory or tokens are short; then request by request, as the engine does.

The decisions are those of `bstar.sim.scheduler`.
"""

from __future__ import annotations

import numpy as np

from bstar.sim.kernel.cache import adopt_hits, find_hits, name_upto, stash, take_for
from bstar.sim.kernel.closed_forms import blocks_of, run_s, steps_to_reach, steps_with_blocks, zero
from bstar.sim.kernel.compiled import entry, inlined, part
from bstar.sim.kernel.cost import CACHED as X_CACHED
from bstar.sim.kernel.cost import DECODE as X_DECODE
from bstar.sim.kernel.cost import FIRST_SPAN, StepCost, add_chunk, mixed_step_s
from bstar.sim.kernel.cost import PROMPT as X_PROMPT
from bstar.sim.kernel.cost import SEQUENCES as X_SEQUENCES
from bstar.sim.kernel.heap import push
from bstar.sim.kernel.queue import head_of, leave_queue, take_arrivals, take_completions, waiting_of
from bstar.sim.kernel.shortage import plan_by_request, reach_of_taken, settle_by_request
from bstar.sim.kernel.spans import cross_spans, enter_spans, purged, recount_spans
from bstar.sim.kernel.state import (
    AT_FAULT,
    BLOCKED,
    CONTEXTS,
    CROSSINGS,
    DECODE,
    DECODING,
    ENDED,
    ENDLESS,
    ENDS,
    ENTRIES,
    EVENTS,
    EXPECTED,
    FINISHING,
    FREE,
    FULL,
    GAPS,
    IN_FLIGHT,
    LATE,
    LEAST_FREE,
    LOG_CACHED,
    LOG_SCHEDULED,
    LOG_STEPS,
    LOGGED,
    LOOKS,
    NOW,
    PAUSED,
    PENDING,
    PREFILL,
    PREFILLING,
    RUN_SPANS,
    RUNNING,
    RUNS,
    SEEN,
    SLOT_BITS,
    STEPS,
    STUCK,
    TAIL,
    TIE,
    UNUSED,
    Blocks,
    Engine,
    Floats,
    Ints,
    Keys,
    Limits,
    Load,
    Outcome,
    Slots,
)


@entry
def advance(
    limits: Limits, load: Load, cost: StepCost, blocks: Blocks, engine: Engine, out: Outcome, until_s: float
) -> int:
    """Run on to `until_s` or to the end; returns how it ended (`state.ENDED` …)."""
    n, t, slots = engine.n, engine.t, engine.slots
    keys = Keys(load.hash_start, load.hashes, load.blocks_per_hash, load.shared_blocks, load.own_key)
    limited = False
    full_rate = 0.0  # seconds per token of context that every query sees
    for g in range(cost.span_limit.size):
        if cost.span_limit[g] == 0:
            full_rate += cost.span_rate[g]
        else:
            limited = True

    while True:
        if t[NOW] * TIE >= until_s:
            return PAUSED
        if _out_of_room(limits, engine):
            return FULL
        n[EVENTS] += 1
        if limited:
            cross_spans(cost.span_limit, cost.span_restarts, engine.reach, engine.growing, engine.crossing,
                        engine.crossings, n)  # fmt: skip
        take_completions(limits, load, keys, cost, blocks, engine, out, limited)
        waiting = take_arrivals(limits, load, engine, t[SEEN] if n[IN_FLIGHT] else t[NOW])
        if waiting == 0:
            n[BLOCKED] = 0
            if n[RUNNING] == 0:
                n[IN_FLIGHT] = 0
                if n[PENDING] >= n[EXPECTED]:
                    return ENDED
                following = load.arrival_s[engine.order[n[PENDING]]]
                if following >= until_s:
                    return PAUSED
                t[NOW] = max(t[NOW], following)
                continue

        if (
            n[PREFILLING] == 0 and 0 < n[DECODING] <= limits.budget and (waiting == 0 or n[BLOCKED] > 0)
            and n[LATE] == 0 and _run_decodes(limits, load, cost, blocks, engine, full_rate, limited, waiting, until_s)
        ):  # fmt: skip
            continue

        scheduled, chunks, victims, short = plan_step(limits, load, keys, cost, blocks, engine, out, waiting)
        if scheduled + chunks > 0:
            _run_step(limits, load, cost, engine, out, full_rate, limited, short, scheduled, chunks, victims)
            continue
        # Nothing to run.
        if victims > 0:
            request = slots.request[engine.victims[victims - 1]]
            if engine.log.shape[0] > 0:
                _log_steps(engine.log, engine.log_s, n, zero() + 1, t[NOW])
            room, total = (limits.num_blocks - 1) * limits.block_size, load.prompt[request] + load.output[request]
            if n[RUNNING] == 0 and room <= engine.known[request] < total:
                n[AT_FAULT] = request
                return ENDLESS
            if not n[IN_FLIGHT]:
                t[NOW] += limits.empty_step_s
        elif not n[IN_FLIGHT] and n[FINISHING] == 0:
            n[AT_FAULT] = head_of(limits, load, engine)
            if n[PENDING] >= n[EXPECTED] or not limits.by_priority or n[RUNNING] > 0:
                return STUCK
            following = load.arrival_s[engine.order[n[PENDING]]]
            if following >= until_s:
                return PAUSED
            t[NOW] = max(t[NOW], following)
        n[IN_FLIGHT] = 0


@inlined
def _out_of_room(limits: Limits, engine: Engine) -> bool:
    """Whether a log could overflow in the next step."""
    rows = 3 * limits.seats + 16
    if engine.log.shape[0] > 0 and engine.n[LOGGED] + rows > engine.log.shape[0]:
        return True
    if engine.gaps.size > 0 and engine.n[GAPS] + rows > engine.gaps.size:
        return True
    return engine.runs.shape[0] > 0 and engine.n[RUNS] >= engine.runs.shape[0]


@inlined
def _run_decodes(
    limits: Limits, load: Load, cost: StepCost, blocks: Blocks, engine: Engine, full_rate: float, limited: bool,
    waiting: int, until_s: float,
) -> bool:  # fmt: skip
    """Decode steps up to the next event. False where already the first one finds too few blocks."""
    n, t, slots = engine.n, engine.t, engine.slots
    decoding, now = n[DECODING], t[NOW]
    base_s = cost.decode_s[decoding] + full_rate * n[CONTEXTS]
    slope_s = full_rate * decoding
    most = (engine.ends[0] >> SLOT_BITS) - n[STEPS]
    if limited:
        for g in range(cost.span_limit.size):
            base_s += cost.span_rate[g] * engine.reach[g]
            slope_s += cost.span_rate[g] * engine.growing[g]
        if n[CROSSINGS] > 0:
            most = min(most, (engine.crossings[0] >> SLOT_BITS) - n[STEPS])
    if n[FINISHING] > 0 and (waiting > 0 or engine.log.shape[0] > 0 or engine.runs.shape[0] > 0):
        most = 1  # their seats and blocks are free after one step, which those that wait and the logs shall see
    if n[PENDING] < n[EXPECTED] and (waiting == 0 or limits.by_priority):
        wait_s = load.arrival_s[engine.order[n[PENDING]]] / TIE - now
        most = min(most, max(steps_to_reach(base_s, slope_s, wait_s, most) + limits.pipelined, 1))
    if until_s < np.inf:
        most = min(most, max(steps_to_reach(base_s, slope_s, until_s / TIE - now, most), 1))
    steps, taken = steps_with_blocks(engine.phases, n[STEPS] % limits.block_size, decoding, n[FREE], most)
    if steps == 0:
        return False
    n[FREE] -= taken
    if limits.caching:
        stash(blocks, taken)
    t[SEEN] = now + run_s(base_s, slope_s, steps - 1)
    t[NOW] = now + run_s(base_s, slope_s, steps)
    if engine.log.shape[0] > 0:
        _log_scheduled(slots, engine.running, engine.log, n, True)
        _log_steps(engine.log, engine.log_s, n, steps, now)
    if engine.runs.shape[0] > 0:
        none, x = zero(), engine.x
        _note_run(engine.runs, n, x, slots, engine.running, cost.span_limit, cost.span_restarts, engine.reach,
                  engine.growing, now, steps, base_s, slope_s, decoding, waiting, none, none, none)  # fmt: skip
    n[IN_FLIGHT] = limits.pipelined
    n[STEPS] += steps
    n[CONTEXTS] += decoding * steps
    if limited:
        for g in range(cost.span_limit.size):
            engine.reach[g] += engine.growing[g] * steps
    return True


@inlined
def plan_step(
    limits: Limits, load: Load, keys: Keys, cost: StepCost, blocks: Blocks, engine: Engine, out: Outcome, waiting: int
) -> tuple[int, int, int, bool]:
    """Plan a step by itself: first those that run, then those that wait.

    Returns (decodes, prompt chunks, preempted, whether it was planned request by request); the chunks are in `engine`.
    """
    n, slots = engine.n, engine.slots
    longest = limits.max_model_len + limits.batched_tokens
    if limits.threshold > 0 and n[RUNNING] + waiting > 1:
        longest = limits.threshold
        if limits.adaptive:
            longest = max(longest, limits.batched_tokens // (n[RUNNING] + waiting))
    scheduled, victims, chunks = n[DECODING], zero(), zero()
    left = limits.budget - scheduled
    need = engine.phases[n[STEPS] % limits.block_size]
    tail, tokens, more, computed = n[TAIL], zero(), zero(), zero()
    short = left < 0 or n[LATE] > 0 or n[PREFILLING] > 1 or (n[PREFILLING] == 1 and tail < 0)
    if not short and tail >= 0 and left > 0:
        computed = slots.computed[tail]
        tokens = min(min(slots.target[tail] - computed, longest), left)
        more = blocks_of(computed + tokens, limits.block_size) - blocks_of(computed, limits.block_size)
    short = short or need + more > n[FREE]
    if short:
        left, scheduled, chunks, victims = plan_by_request(limits, load, keys, cost, blocks, engine, out, longest)
    else:
        n[FREE] -= need + more
        left -= tokens
        if limits.caching:
            stash(blocks, need)
        if tokens > 0:
            slots.taken[tail] = tokens
            engine.chunks[0] = tail
            chunks = zero() + 1
            if limits.caching:
                take_for(blocks, tail, more)
                name_upto(blocks, keys, slots.request[tail], tail, (computed + tokens) // limits.block_size)
    if victims == 0:
        chunks = _admit(limits, load, keys, blocks, engine, out, longest, left, chunks)
    n[LEAST_FREE] = min(n[LEAST_FREE], n[FREE])
    return scheduled, chunks, victims, short


@inlined
def _admit(
    limits: Limits, load: Load, keys: Keys, blocks: Blocks, engine: Engine, out: Outcome, longest: int, left: int,
    chunks: int,
) -> int:  # fmt: skip
    """Admit waiting requests while seats, tokens and blocks last; returns the chunks of the step."""
    n, size = engine.n, limits.block_size
    while waiting_of(limits, n) > 0:
        if left <= 0:
            n[BLOCKED] = 0 if chunks else 2
            break
        n[LOOKS] += 1
        if n[RUNNING] >= limits.seats:
            n[BLOCKED] = 1
            break
        request = head_of(limits, load, engine)
        known = max(engine.known[request], load.prompt[request])
        hits, idle_hits = zero(), zero()
        if limits.caching:
            hits, idle_hits = find_hits(blocks, keys, request, (known - 1) // size)
        cached = hits * size
        tokens = min(known - cached, longest)
        if tokens > left and not limits.chunked:
            n[BLOCKED] = 0 if chunks else 2
            break
        tokens = min(tokens, left)
        must_hold = max(cached + tokens, known) if limits.reserve_prompt else cached + tokens
        need = max(blocks_of(min(must_hold, limits.max_model_len), size) - hits, 0) + idle_hits
        if n[RUNNING] > 0:
            need += limits.watermark
        if need > n[FREE]:
            n[BLOCKED] = 1
            break
        n[BLOCKED] = 0
        leave_queue(limits, engine)
        slot = _take_seat(load, engine, request, known, cached, tokens)
        more = blocks_of(cached + tokens, size) - hits
        n[FREE] -= more + idle_hits
        if limits.caching:
            adopt_hits(blocks, keys, request, slot, hits)
            take_for(blocks, slot, more)
            name_upto(blocks, keys, request, slot, (cached + tokens) // size)
            if engine.log.shape[0] > 0:
                row = n[LOGGED]
                engine.log[row, 0], engine.log[row, 1], engine.log[row, 2] = LOG_CACHED, request, cached
                n[LOGGED] += 1
        if out.preemptions[request] == 0:
            out.scheduled_s[request] = engine.t[NOW]
            if limits.caching:
                out.cached_tokens[request] = cached
        left -= tokens
        engine.chunks[chunks] = slot
        chunks += 1
    return chunks


@inlined
def _take_seat(load: Load, engine: Engine, request: int, known: int, cached: int, tokens: int) -> int:
    """A slot for an admitted request, at the end of the running list."""
    n, slots = engine.n, engine.slots
    if n[ENTRIES] == engine.running.size:
        left = 0
        for at in range(engine.running.size):
            other = engine.running[at]
            if other >= 0:
                engine.running[left] = other
                slots.place[other] = left
                left += 1
        n[ENTRIES] = left
    n[UNUSED] -= 1
    slot = engine.unused[n[UNUSED]]
    engine.running[n[ENTRIES]] = slot
    slots.place[slot] = n[ENTRIES]
    n[ENTRIES] += 1
    n[RUNNING] += 1
    slots.request[slot] = request
    slots.state[slot] = PREFILL
    slots.target[slot] = known
    slots.total[slot] = load.prompt[request] + load.output[request]
    slots.computed[slot] = cached
    slots.taken[slot] = tokens
    n[PREFILLING] += 1
    n[TAIL] = slot
    return slot


@inlined
def _run_step(
    limits: Limits, load: Load, cost: StepCost, engine: Engine, out: Outcome, full_rate: float, limited: bool,
    short: bool, scheduled: int, chunks: int, victims: int,
) -> None:  # fmt: skip
    """Run a planned step. Prompts that are complete have their first token."""
    n, t, slots, x = engine.n, engine.t, engine.slots, engine.x
    if engine.log.shape[0] > 0:
        _log_scheduled(slots, engine.running, engine.log, n, not short)
        _log_steps(engine.log, engine.log_s, n, zero() + 1, t[NOW])
    reach_s = full_rate * (n[CONTEXTS] + scheduled)
    if short:
        reach_s = 0.0
        for g in range(cost.span_limit.size):
            reach_s += cost.span_rate[g] * reach_of_taken(
                slots, engine.running, n, cost.span_limit[g], cost.span_restarts[g]
            )
    elif limited:
        for g in range(cost.span_limit.size):
            reach_s += cost.span_rate[g] * (engine.reach[g] + engine.growing[g])
    now = t[NOW]
    if chunks == 0:
        seconds = cost.decode_s[scheduled] + reach_s
    else:
        x[:] = 0.0
        x[X_DECODE] = scheduled
        x[X_SEQUENCES] = scheduled
        for i in range(chunks):
            add_chunk(cost, x, slots.taken[engine.chunks[i]], slots.computed[engine.chunks[i]])
        seconds = mixed_step_s(cost, x, scheduled + int(x[X_PROMPT]), scheduled + chunks, reach_s)
    if engine.runs.shape[0] > 0:
        one = zero() + 1
        _note_run(engine.runs, n, x, slots, engine.running, cost.span_limit, cost.span_restarts, engine.reach,
                  engine.growing, now, one, seconds, 0.0 * seconds, scheduled, waiting_of(limits, n), victims, chunks,
                  one if short else one - 1)  # fmt: skip
    t[SEEN] = now
    t[NOW] = now + seconds
    n[IN_FLIGHT] = limits.pipelined
    n[STEPS] += 1
    n[CONTEXTS] += n[DECODING]
    if short:
        regular = settle_by_request(slots, engine.running, engine.phases, engine.gaps, n, now, t[NOW])
        recount_spans(cost.span_limit, cost.span_restarts, engine.reach, engine.growing, engine.crossing,
                      engine.crossings, n, engine.running, slots.state, slots.offset)  # fmt: skip
        if engine.runs.shape[0] > 0:
            engine.runs[n[RUNS] - 1, 4] = regular
    elif limited:
        for g in range(cost.span_limit.size):
            engine.reach[g] += engine.growing[g]
    for i in range(chunks):
        slot = engine.chunks[i]
        slots.computed[slot] += slots.taken[slot]
        slots.taken[slot] = 0
        if slots.computed[slot] == slots.target[slot]:
            start_to_decode(limits, cost, engine, out, slot, limited)
            if engine.runs.shape[0] > 0:
                engine.runs[n[RUNS] - 1, 5] += 1.0


@inlined
def start_to_decode(limits: Limits, cost: StepCost, engine: Engine, out: Outcome, slot: int, limited: bool) -> None:
    """A prompt is complete: its slot decodes from now on."""
    n, slots = engine.n, engine.slots
    n[PREFILLING] -= 1
    if slot == n[TAIL]:
        n[TAIL] = -1
    slots.state[slot] = DECODE
    slots.offset[slot] = n[STEPS] - slots.target[slot]
    engine.phases[slots.offset[slot] % limits.block_size] += 1
    n[DECODING] += 1
    n[CONTEXTS] += slots.target[slot]
    if limited:
        enter_spans(cost.span_limit, cost.span_restarts, engine.reach, engine.growing, engine.crossing,
                    engine.crossings, n, slots.target[slot], slot)  # fmt: skip
    if n[ENDS] == engine.ends.size:
        n[ENDS] = purged(engine.ends, n[ENDS], slots.ends)
    slots.ends[slot] = ((slots.total[slot] - 1 + slots.offset[slot]) << SLOT_BITS) | slot
    n[ENDS] = push(engine.ends, n[ENDS], slots.ends[slot])
    request, now = slots.request[slot], engine.t[NOW]
    if np.isnan(out.first_token_s[request]):
        out.first_token_s[request] = now
    elif engine.gaps.size > 0:  # it was preempted
        engine.gaps[n[GAPS]] = now - engine.last_s[request]
        n[GAPS] += 1


@part
def _log_scheduled(slots: Slots, running: Ints, log: Ints, n: Ints, all_decode: bool) -> None:
    """Rows of the decision log: who gets how many tokens, in the order of the running list."""
    for at in range(n[ENTRIES]):
        slot = running[at]
        if slot < 0:
            continue
        tokens = slots.taken[slot]
        if slots.state[slot] == DECODE and all_decode:
            tokens = 1
        if tokens > 0:
            row = n[LOGGED]
            log[row, 0], log[row, 1], log[row, 2] = LOG_SCHEDULED, slots.request[slot], tokens
            n[LOGGED] += 1


@part
def _log_steps(log: Ints, log_s: Floats, n: Ints, steps: int, start_s: float) -> None:
    """A row of the decision log: the requests listed since the last such row take these steps."""
    row = n[LOGGED]
    log[row, 0], log[row, 1], log[row, 2] = LOG_STEPS, steps, n[FREE]
    log_s[row] = start_s
    n[LOGGED] += 1


@part
def _note_run(
    runs: Floats, n: Ints, x: Floats, slots: Slots, running: Ints, limits: Ints, restarts: Ints, reach: Ints,
    growing: Ints, start_s: float, steps: int, base_s: float, slope_s: float, decodes: int, waiting: int, victims: int,
    chunks: int, short: int,
) -> None:  # fmt: skip
    """A row of the run log (columns: `state.RUN_START_S` …). Called before the steps are counted."""
    row = runs[n[RUNS]]
    n[RUNS] += 1
    row[:] = 0.0
    row[0], row[1], row[2], row[3], row[4], row[5] = start_s, steps, base_s, slope_s, decodes, decodes
    row[6], row[7], row[8], row[9] = n[RUNNING] - n[FINISHING], waiting, n[FREE], victims
    row[11] = decodes
    prompts = x.size - FIRST_SPAN  # pairs and keys
    if chunks > 0:
        row[12], row[13], row[14] = x[X_PROMPT], x[X_CACHED], chunks
        for j in range(prompts):
            row[RUN_SPANS + j] = x[FIRST_SPAN + j]
    every = n[CONTEXTS] + decodes  # contexts in the first step, its tokens included
    if short:
        every = int(reach_of_taken(slots, running, n, 0, 0))
    row[10] = every
    for g in range(limits.size):
        at = RUN_SPANS + prompts + 2 * g
        if limits[g] == 0:
            row[at], row[at + 1] = every, decodes
        elif short:
            row[at] = reach_of_taken(slots, running, n, limits[g], restarts[g])
        else:
            row[at], row[at + 1] = reach[g] + growing[g], growing[g]
