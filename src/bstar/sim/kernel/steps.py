"""Closed forms of runs of decode steps, and the planning of steps where memory or budget is short."""

from __future__ import annotations

import numpy as np
from bstar.sim.kernel.compiled import inlined, part

from bstar.sim.kernel.cache import name_upto, release, stash, take_for
from bstar.sim.kernel.state import (
    DECODE,
    DONE,
    EMPTY,
    LOG_PREEMPTED,
    PREFILL,
    Blocks,
    Ints,
    Limits,
    Load,
    Outcome,
    Slots,
)


@part
def run_s(base_s: float, slope_s: float, steps: int) -> float:
    """Seconds of `steps` decode steps: step j takes base_s + slope_s · j."""
    return steps * base_s + slope_s * (0.5 * steps * (steps + 1.0))


@part
def steps_to_reach(base_s: float, slope_s: float, wait_s: float, most: int) -> int:
    """Fewest whole steps whose seconds are at least wait_s (at most `most`)."""
    if wait_s <= 0.0:
        return 0
    linear = base_s + 0.5 * slope_s
    guess = 2.0 * wait_s / (linear + np.sqrt(linear * linear + 2.0 * slope_s * wait_s))
    if guess > most:
        return most
    steps = int(np.ceil(guess))
    while steps > 0 and run_s(base_s, slope_s, steps - 1) >= wait_s:
        steps -= 1
    while steps < most and run_s(base_s, slope_s, steps) < wait_s:
        steps += 1
    return steps


@part
def steps_with_blocks(phases: Ints, phase: int, count: int, free: int, most: int) -> tuple[int, int]:
    """(steps, blocks they take): decode steps of `count` slots before a step finds too few free blocks.

    phases[p] slots take a new block in the steps with D mod block_size = p; `phase` is that of the first step.
    """
    size = phases.size
    cycles = most // size
    if count * (cycles + 1) > free:
        cycles = min(cycles, free // count)
    steps, taken = cycles * size, cycles * count
    while steps < most:
        need = phases[phase]
        if taken + need > free:
            break
        taken += need
        steps += 1
        phase += 1
        if phase == size:
            phase = 0
    return steps, taken


@part
def blocks_of(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


@inlined
def leave(slots: Slots, slot: int, running: Ints) -> None:
    """Take a slot out of the running list (its entry stays, dead)."""
    running[slots.place[slot]] = -1
    slots.place[slot] = -1
    slots.state[slot] = EMPTY
    slots.ends[slot] = -1


@part
def preempted_blocks(limits: Limits, load: Load, slots: Slots, blocks: Blocks, slot: int, steps: int) -> int:
    """Free the blocks of a slot that is preempted; returns how many became free. `steps` is D."""
    size, state = limits.block_size, slots.state[slot]
    computed = steps - slots.offset[slot]
    if state == PREFILL:
        computed = slots.computed[slot]
    elif state == DONE:  # steps may have been run without it
        computed = slots.total[slot] - 1
    held = blocks_of(computed + slots.taken[slot], size)
    if not limits.caching:
        return held
    full = computed + slots.taken[slot]
    if state != PREFILL and limits.pipelined:
        # The key of a block comes with the output of the step that filled it, which still runs.
        full = max(slots.target[slot], full - 1)
    return release(blocks, load, slots.request[slot], slot, held, full // size)


@part
def plan_running(
    limits: Limits, load: Load, out: Outcome, slots: Slots, blocks: Blocks, running: Ints, count: int,
    free: int, longest: int, steps: int, known: Ints, victims: Ints, log: Ints, logged: int,
) -> tuple[int, int, int, int]:
    """Tokens for running requests one by one, with preemption: the scheduler's first loop, as written there.

    slots.taken[slot] gets the tokens. Returns (budget left, free blocks, victims, log rows).
    """
    budget, size, gone = limits.budget, limits.block_size, 0
    for at in range(count):
        slot = running[at]
        if slot < 0 or slots.state[slot] == DONE:
            continue
        if budget == 0:
            break
        decoding = slots.state[slot] == DECODE
        computed = steps - slots.offset[slot] if decoding else slots.computed[slot]
        tokens = 1 if decoding else min(min(slots.target[slot] - computed, longest), budget)
        need = blocks_of(computed + tokens, size) - blocks_of(computed, size)
        while need > free and slots.state[slot] != EMPTY:
            victim = -1
            if limits.by_priority:
                worst = -1
                for k in range(count):
                    other = running[k]
                    if other >= 0 and load.urgency[slots.request[other]] > worst:
                        worst, victim = load.urgency[slots.request[other]], other
            else:
                for k in range(count - 1, -1, -1):
                    if running[k] >= 0:
                        victim = running[k]
                        break
            request = slots.request[victim]
            budget += slots.taken[victim]
            free += preempted_blocks(limits, load, slots, blocks, victim, steps)
            out.preemptions[request] += 1
            if slots.state[victim] == PREFILL:
                known[request] = slots.target[victim]
            else:
                known[request] = steps - slots.offset[victim] + 1
            victims[gone] = victim
            gone += 1
            if log.shape[0] > 0:
                log[logged, 0], log[logged, 1] = LOG_PREEMPTED, request
                logged += 1
            slots.taken[victim] = 0
            leave(slots, victim, running)
        if slots.state[slot] == EMPTY:
            break
        free -= need
        slots.taken[slot] = tokens
        budget -= tokens
        if limits.caching:
            if decoding:
                stash(blocks, need)
            else:
                take_for(blocks, slot, need)
                name_upto(blocks, load, slots.request[slot], slot, (computed + tokens) // size)
    return budget, free, gone, logged


@part
def span_reach(limit: int, restarts: int, context: int) -> int:
    """Tokens that one decoded token at `context` (itself included) sees."""
    if limit == 0:
        return context
    if restarts:
        return (context - 1) % limit + 1
    return min(context, limit)


@part
def reach_of_taken(slots: Slots, running: Ints, count: int, steps: int, limit: int, restarts: int) -> float:
    """Σ reach over the decoding slots that take part in the step being planned."""
    total = 0
    for at in range(count):
        slot = running[at]
        if slot >= 0 and slots.state[slot] == DECODE and slots.taken[slot] > 0:
            total += span_reach(limit, restarts, steps - slots.offset[slot] + 1)
    return float(total)
