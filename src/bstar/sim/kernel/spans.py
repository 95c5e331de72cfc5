"""What decoding slots see of their contexts: Σ min(context, window) per limited span, and when a window fills up.

    inside    tokens of the context within the span; each step adds one while the slot is growing
    crossing  step at which a window is full (growth ends) or a chunk restarts (inside falls to 0)
"""

from __future__ import annotations

from bstar.sim.kernel.compiled import part

from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.heap import pop, push
from bstar.sim.kernel.state import DECODE, SLOT_BITS, SLOT_MASK, Ints, Slots


@part
def purged(heap: Ints, count: int, live: Ints) -> int:
    """Drop the entries of a heap that are no longer true (live[entry] is another key); returns what is left."""
    kept = heap[:count].copy()
    left = 0
    for key in kept:
        if live[key & SLOT_MASK] == key:
            left = push(heap, left, key)
    return left


@part
def enter_spans(
    cost: StepCost, slots: Slots, slot: int, steps: int, reach: Ints, growing: Ints, crossing: Ints, heap: Ints,
    count: int,
) -> int:  # fmt: skip
    """Count a slot that starts to decode; returns the size of the crossings heap."""
    groups = cost.span_limit.size
    for g in range(groups):
        limit = cost.span_limit[g]
        if limit == 0:
            continue
        at, context = slot * groups + g, steps - slots.offset[slot]
        inside = context % limit if cost.span_restarts[g] else min(context, limit)
        reach[g] += inside
        crossing[at] = -1
        if inside < limit:
            growing[g] += 1
            if count == heap.size:
                count = purged(heap, count, crossing)
            crossing[at] = ((steps + limit - inside) << SLOT_BITS) | at
            count = push(heap, count, crossing[at])
    return count


@part
def leave_spans(
    cost: StepCost, slots: Slots, slot: int, steps: int, reach: Ints, growing: Ints, crossing: Ints
) -> None:
    """Take a decoding slot out."""
    groups = cost.span_limit.size
    for g in range(groups):
        limit = cost.span_limit[g]
        if limit == 0:
            continue
        context = steps - slots.offset[slot]
        inside = context % limit if cost.span_restarts[g] else min(context, limit)
        reach[g] -= inside
        growing[g] -= inside < limit
        crossing[slot * groups + g] = -1


@part
def cross_spans(cost: StepCost, steps: int, reach: Ints, growing: Ints, crossing: Ints, heap: Ints, count: int) -> int:
    """Apply the crossings that are due; returns the size of the heap."""
    groups = cost.span_limit.size
    while count > 0 and heap[0] >> SLOT_BITS <= steps:
        key = heap[0]
        at = key & SLOT_MASK
        count = pop(heap, count)
        if crossing[at] != key:
            continue
        g = at % groups
        if cost.span_restarts[g]:
            reach[g] -= cost.span_limit[g]
            crossing[at] = ((steps + cost.span_limit[g]) << SLOT_BITS) | at
            count = push(heap, count, crossing[at])
        else:
            growing[g] -= 1
            crossing[at] = -1
    return count


@part
def recount_spans(
    cost: StepCost, slots: Slots, running: Ints, entries: int, steps: int, reach: Ints, growing: Ints, crossing: Ints,
    heap: Ints,
) -> int:  # fmt: skip
    """Count every decoding slot afresh; returns the size of the crossings heap."""
    reach[:] = 0
    growing[:] = 0
    crossing[:] = -1
    count = 0
    for at in range(entries):
        slot = running[at]
        if slot >= 0 and slots.state[slot] == DECODE:
            count = enter_spans(cost, slots, slot, steps, reach, growing, crossing, heap, count)
    return count

