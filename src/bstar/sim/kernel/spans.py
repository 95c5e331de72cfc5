"""What decoding slots see of their contexts: Σ min(context, window) per limited span, and when a window fills up.

inside    tokens of the context within the span; each step adds one while the slot is growing
crossing  step at which a window is full (growth ends) or a chunk restarts (inside falls to 0)
"""

from __future__ import annotations

from bstar.sim.kernel.compiled import part
from bstar.sim.kernel.heap import pop, push
from bstar.sim.kernel.state import CROSSINGS, DECODE, ENTRIES, SLOT_BITS, SLOT_MASK, STEPS, Ints


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
def enter_spans(
    limits: Ints, restarts: Ints, reach: Ints, growing: Ints, crossing: Ints, crossings: Ints, n: Ints, context: int,
    slot: int,
) -> None:  # fmt: skip
    """Count a slot that starts to decode with `context` tokens in the cache."""
    groups = limits.size
    for g in range(groups):
        limit = limits[g]
        if limit == 0:
            continue
        at = slot * groups + g
        inside = context % limit if restarts[g] else min(context, limit)
        reach[g] += inside
        crossing[at] = -1
        if inside < limit:
            growing[g] += 1
            if n[CROSSINGS] == crossings.size:
                n[CROSSINGS] = purged(crossings, n[CROSSINGS], crossing)
            crossing[at] = ((n[STEPS] + limit - inside) << SLOT_BITS) | at
            n[CROSSINGS] = push(crossings, n[CROSSINGS], crossing[at])


@part
def leave_spans(
    limits: Ints, restarts: Ints, reach: Ints, growing: Ints, crossing: Ints, context: int, slot: int
) -> None:
    """Take a decoding slot with `context` tokens in the cache out."""
    groups = limits.size
    for g in range(groups):
        limit = limits[g]
        if limit == 0:
            continue
        inside = context % limit if restarts[g] else min(context, limit)
        reach[g] -= inside
        growing[g] -= inside < limit
        crossing[slot * groups + g] = -1


@part
def cross_spans(
    limits: Ints, restarts: Ints, reach: Ints, growing: Ints, crossing: Ints, crossings: Ints, n: Ints
) -> None:
    """Apply the crossings that are due."""
    steps, groups = n[STEPS], limits.size
    while n[CROSSINGS] > 0 and crossings[0] >> SLOT_BITS <= steps:
        key = crossings[0]
        at = key & SLOT_MASK
        n[CROSSINGS] = pop(crossings, n[CROSSINGS])
        if crossing[at] != key:
            continue
        g = at % groups
        if restarts[g]:
            reach[g] -= limits[g]
            crossing[at] = ((steps + limits[g]) << SLOT_BITS) | at
            n[CROSSINGS] = push(crossings, n[CROSSINGS], crossing[at])
        else:
            growing[g] -= 1
            crossing[at] = -1


@part
def recount_spans(
    limits: Ints, restarts: Ints, reach: Ints, growing: Ints, crossing: Ints, crossings: Ints, n: Ints, running: Ints,
    state: Ints, offset: Ints,
) -> None:  # fmt: skip
    """Count every decoding slot afresh."""
    reach[:] = 0
    growing[:] = 0
    crossing[:] = -1
    n[CROSSINGS] = 0
    for at in range(n[ENTRIES]):
        slot = running[at]
        if slot >= 0 and state[slot] == DECODE:
            context = n[STEPS] - offset[slot]
            enter_spans(limits, restarts, reach, growing, crossing, crossings, n, context, slot)
