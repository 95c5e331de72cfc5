"""Steps where memory or tokens are short: planned request by request, as the engine does."""

from __future__ import annotations

import numpy as np

from bstar.sim.kernel.cache import name_upto, release, stash, take_for
from bstar.sim.kernel.closed_forms import blocks_of, span_reach
from bstar.sim.kernel.compiled import part
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.heap import push
from bstar.sim.kernel.spans import recount_spans
from bstar.sim.kernel.state import (
    BLOCKED,
    CONTEXTS,
    DECODE,
    DECODING,
    DONE,
    EMPTY,
    ENTRIES,
    FREE,
    FRONT,
    GAPS,
    LATE,
    LOG_PREEMPTED,
    LOGGED,
    NOW,
    PREFILL,
    PREFILLING,
    RUNNING,
    STEPS,
    TAIL,
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
    SmallInts,
)


@part
def plan_by_request(
    limits: Limits, load: Load, keys: Keys, cost: StepCost, blocks: Blocks, engine: Engine, out: Outcome, longest: int
) -> tuple[int, int, int, int]:
    """Tokens for running requests one by one, with preemption: the scheduler's first loop, as written there.

    slots.taken[slot] gets the tokens. Returns (budget left, decoding slots with a token, chunks, victims).
    """
    slots, running, size = engine.slots, engine.running, limits.block_size
    budget, victims, steps = limits.budget, 0, engine.n[STEPS]
    for at in range(engine.n[ENTRIES]):
        slot = running[at]
        if slot < 0 or slots.state[slot] == DONE:
            continue
        if budget == 0:
            break
        decoding = slots.state[slot] == DECODE
        computed = steps - slots.offset[slot] if decoding else slots.computed[slot]
        tokens = 1 if decoding else min(min(slots.target[slot] - computed, longest), budget)
        need = blocks_of(computed + tokens, size) - blocks_of(computed, size)
        while need > engine.n[FREE] and slots.state[slot] != EMPTY:
            victim = _victim(limits.by_priority, load.urgency, slots.request, running, engine.n[ENTRIES])
            budget += slots.taken[victim]
            _preempt(limits, load, keys, blocks, engine, out, victim)
            engine.victims[victims] = victim
            victims += 1
        if slots.state[slot] == EMPTY:
            break
        engine.n[FREE] -= need
        slots.taken[slot] = tokens
        budget -= tokens
        if limits.caching:
            if decoding:
                stash(blocks, need)
            else:
                take_for(blocks, slot, need)
                name_upto(blocks, keys, slots.request[slot], slot, (computed + tokens) // size)
    if victims > 0:
        engine.n[BLOCKED] = 0
    scheduled, chunks = _recount(slots, running, engine.phases, engine.chunks, engine.n)
    recount_spans(
        cost.span_limit, cost.span_restarts, engine.reach, engine.growing, engine.crossing, engine.crossings, engine.n,
        running, slots.state, slots.offset,
    )  # fmt: skip
    return budget, scheduled, chunks, victims


@part
def _victim(by_priority: int, urgency: SmallInts, requests: Ints, running: Ints, entries: int) -> int:
    """The last admitted; by priority the last in (priority, arrival)."""
    victim, worst = -1, -1
    for at in range(entries - 1, -1, -1):
        slot = running[at]
        if slot < 0:
            continue
        if not by_priority:
            return slot
        if urgency[requests[slot]] > worst:
            worst, victim = urgency[requests[slot]], slot
    return victim


@part
def _preempt(limits: Limits, load: Load, keys: Keys, blocks: Blocks, engine: Engine, out: Outcome, slot: int) -> None:
    """Give up a slot's blocks and seat; its request waits again, unless its last token is on its way."""
    slots, n, steps, size = engine.slots, engine.n, engine.n[STEPS], limits.block_size
    request, state = slots.request[slot], slots.state[slot]
    computed, known = slots.computed[slot], slots.target[slot]
    if state != PREFILL:
        computed = slots.total[slot] - 1 if state == DONE else steps - slots.offset[slot]
        known = computed + 1
        engine.last_s[request] = engine.t[NOW] if np.isnan(slots.last_s[slot]) else slots.last_s[slot]
    full = computed + slots.taken[slot]
    held = blocks_of(full, size)
    if limits.caching:
        if state != PREFILL and limits.pipelined:
            # The key of a block comes with the output of the step that filled it, which still runs.
            full = max(slots.target[slot], full - 1)
        held = release(blocks, keys, request, slot, held, full // size)
    n[FREE] += held
    out.preemptions[request] += 1
    engine.known[request] = known
    if known < slots.total[slot]:
        if limits.by_priority:
            n[FRONT] = push(engine.front, n[FRONT], load.urgency[request])
        else:
            engine.front[n[FRONT]] = request
            n[FRONT] += 1
    if engine.log.shape[0] > 0:
        engine.log[n[LOGGED], 0], engine.log[n[LOGGED], 1] = LOG_PREEMPTED, request
        n[LOGGED] += 1
    engine.running[slots.place[slot]] = -1
    slots.place[slot] = -1
    slots.state[slot] = EMPTY
    slots.ends[slot] = -1
    slots.taken[slot] = 0
    slots.last_s[slot] = np.nan
    engine.unused[n[UNUSED]] = slot
    n[UNUSED] += 1
    n[RUNNING] -= 1


@part
def _recount(slots: Slots, running: Ints, phases: Ints, chunk_slots: Ints, n: Ints) -> tuple[int, int]:
    """Count the running list afresh; returns (decoding slots with a token, chunks)."""
    n[DECODING], n[CONTEXTS], n[PREFILLING], n[TAIL], n[LATE] = 0, 0, 0, -1, 0
    phases[:] = 0
    scheduled, chunks = 0, 0
    for at in range(n[ENTRIES]):
        slot = running[at]
        if slot < 0:
            continue
        n[TAIL] = -1
        if slots.state[slot] == DECODE:
            n[DECODING] += 1
            n[CONTEXTS] += n[STEPS] - slots.offset[slot]
            phases[slots.offset[slot] % phases.size] += 1
            scheduled += slots.taken[slot] > 0
            n[LATE] += not np.isnan(slots.last_s[slot])
        elif slots.state[slot] == PREFILL:
            n[PREFILLING] += 1
            n[TAIL] = slot
            if slots.taken[slot] > 0:
                chunk_slots[chunks] = slot
                chunks += 1
    return scheduled, chunks


@part
def reach_of_taken(slots: Slots, running: Ints, n: Ints, limit: int, restarts: int) -> float:
    """Σ reach over the decoding slots that take part in the step being planned."""
    total = 0
    for at in range(n[ENTRIES]):
        slot = running[at]
        if slot >= 0 and slots.state[slot] == DECODE and slots.taken[slot] > 0:
            total += span_reach(limit, restarts, n[STEPS] - slots.offset[slot] + 1)
    return float(total)


@part
def settle_by_request(
    slots: Slots, running: Ints, phases: Ints, gaps: Floats, n: Ints, start_s: float, end_s: float
) -> int:
    """The step has run: decoding slots that were passed over fall a step behind. Returns those that were in time."""
    regular, size = 0, phases.size
    for at in range(n[ENTRIES]):
        slot = running[at]
        if slot < 0 or slots.state[slot] != DECODE:
            continue
        late = not np.isnan(slots.last_s[slot])
        if slots.taken[slot] == 0:
            phases[slots.offset[slot] % size] -= 1
            slots.offset[slot] += 1
            phases[slots.offset[slot] % size] += 1
            n[CONTEXTS] -= 1
            if not late:
                slots.last_s[slot] = start_s
                n[LATE] += 1
        elif late:
            if gaps.size > 0:
                gaps[n[GAPS]] = end_s - slots.last_s[slot]
                n[GAPS] += 1
            slots.last_s[slot] = np.nan
            n[LATE] -= 1
        else:
            regular += 1
        slots.taken[slot] = 0
    return regular
