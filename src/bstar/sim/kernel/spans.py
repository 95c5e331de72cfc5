"""What decoding slots see of their contexts: Σ min(context, window) per limited span, and when a window fills up.

inside    tokens of the context within the span; each step adds one while the slot is growing
crossing  step at which a window is full (growth ends) or a chunk restarts (inside falls to 0)
"""

from __future__ import annotations

from bstar.sim.kernel.compiled import part
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.heap import pop, push
from bstar.sim.kernel.state import CROSSINGS, DECODE, ENTRIES, SLOT_BITS, SLOT_MASK, STEPS, Engine, Ints


@part
def purged(heap: Ints, count: int, live: Ints) -> int:
    """Drop the entries of a heap that are no longer true (live[entry] is another key); returns what is left."""
    left = 0
    for i in range(count):
        key = heap[i]
        if live[key & SLOT_MASK] == key:
            left = push(heap, left, key)
    return left


@part
def enter_spans(cost: StepCost, engine: Engine, slot: int) -> None:
    """Count a slot that starts to decode."""
    steps, groups = engine.n[STEPS], cost.span_limit.size
    for g in range(groups):
        limit = cost.span_limit[g]
        if limit == 0:
            continue
        at, context = slot * groups + g, steps - engine.slots.offset[slot]
        inside = context % limit if cost.span_restarts[g] else min(context, limit)
        engine.reach[g] += inside
        engine.crossing[at] = -1
        if inside < limit:
            engine.growing[g] += 1
            if engine.n[CROSSINGS] == engine.crossings.size:
                engine.n[CROSSINGS] = purged(engine.crossings, engine.n[CROSSINGS], engine.crossing)
            engine.crossing[at] = ((steps + limit - inside) << SLOT_BITS) | at
            engine.n[CROSSINGS] = push(engine.crossings, engine.n[CROSSINGS], engine.crossing[at])


@part
def leave_spans(cost: StepCost, engine: Engine, slot: int) -> None:
    """Take a decoding slot out."""
    groups = cost.span_limit.size
    for g in range(groups):
        limit = cost.span_limit[g]
        if limit == 0:
            continue
        context = engine.n[STEPS] - engine.slots.offset[slot]
        inside = context % limit if cost.span_restarts[g] else min(context, limit)
        engine.reach[g] -= inside
        engine.growing[g] -= inside < limit
        engine.crossing[slot * groups + g] = -1


@part
def cross_spans(cost: StepCost, engine: Engine) -> None:
    """Apply the crossings that are due."""
    steps, groups, heap = engine.n[STEPS], cost.span_limit.size, engine.crossings
    while engine.n[CROSSINGS] > 0 and heap[0] >> SLOT_BITS <= steps:
        key = heap[0]
        at = key & SLOT_MASK
        engine.n[CROSSINGS] = pop(heap, engine.n[CROSSINGS])
        if engine.crossing[at] != key:
            continue
        g = at % groups
        if cost.span_restarts[g]:
            engine.reach[g] -= cost.span_limit[g]
            engine.crossing[at] = ((steps + cost.span_limit[g]) << SLOT_BITS) | at
            engine.n[CROSSINGS] = push(heap, engine.n[CROSSINGS], engine.crossing[at])
        else:
            engine.growing[g] -= 1
            engine.crossing[at] = -1


@part
def recount_spans(cost: StepCost, engine: Engine) -> None:
    """Count every decoding slot afresh."""
    engine.reach[:] = 0
    engine.growing[:] = 0
    engine.crossing[:] = -1
    engine.n[CROSSINGS] = 0
    for at in range(engine.n[ENTRIES]):
        slot = engine.running[at]
        if slot >= 0 and engine.slots.state[slot] == DECODE:
            enter_spans(cost, engine, slot)
