"""Requests that come and go: completions, what they make arrive, arrivals, and the head of the queue."""

from __future__ import annotations

from bstar.sim.kernel.cache import release
from bstar.sim.kernel.closed_forms import blocks_of
from bstar.sim.kernel.compiled import inlined, part
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.heap import pop, push
from bstar.sim.kernel.spans import leave_spans
from bstar.sim.kernel.state import (
    ADMITTED,
    ARRIVED,
    BLOCKED,
    CONTEXTS,
    DECODING,
    DONE,
    EMPTY,
    ENDS,
    EXPECTED,
    FINISHED,
    FINISHING,
    FREE,
    FRONT,
    IN_FLIGHT,
    NEXT_ROOT,
    NOW,
    PENDING,
    RUNNING,
    SLOT_BITS,
    SLOT_MASK,
    STEPS,
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
    SmallInts,
)


@inlined
def give_up_seat(limits: Limits, keys: Keys, blocks: Blocks, engine: Engine, slot: int) -> None:
    """A request that has ended frees its blocks and its seat."""
    slots, n = engine.slots, engine.n
    computed = slots.total[slot] - 1  # its last token was never an input
    freed = blocks_of(computed, limits.block_size)
    if limits.caching:
        freed = release(blocks, keys, slots.request[slot], slot, freed, computed // limits.block_size)
    n[FREE] += freed
    engine.running[slots.place[slot]] = -1
    slots.place[slot] = -1
    slots.state[slot] = EMPTY
    engine.unused[n[UNUSED]] = slot
    n[UNUSED] += 1
    n[RUNNING] -= 1
    n[BLOCKED] = 0


@inlined
def take_completions(
    limits: Limits, load: Load, keys: Keys, cost: StepCost, blocks: Blocks, engine: Engine, out: Outcome, limited: bool
) -> None:
    """Slots whose last token has come. Under async scheduling they keep seat and blocks for one more planning."""
    slots, n, steps = engine.slots, engine.n, engine.n[STEPS]
    gone = n[FINISHING]
    for i in range(gone):
        engine.leaving[i] = engine.done[i]
    n[FINISHING] = 0
    leaving = gone
    while n[ENDS] > 0 and engine.ends[0] >> SLOT_BITS <= steps:
        key = engine.ends[0]
        n[ENDS] = pop(engine.ends, n[ENDS])
        slot = key & SLOT_MASK
        if slots.ends[slot] != key:
            continue
        slots.ends[slot] = -1  # a slot that was left and taken again may have left an equal key behind
        last = slots.total[slot] - 1 + slots.offset[slot]
        if last > steps:  # it was passed over in some steps
            slots.ends[slot] = (last << SLOT_BITS) | slot
            n[ENDS] = push(engine.ends, n[ENDS], slots.ends[slot])
            continue
        engine.leaving[leaving] = slot
        leaving += 1
    if limits.caching:  # blocks are freed in the order of the running list
        _sort_by_place(engine.leaving, gone, leaving, slots.place)
    for i in range(gone, leaving):
        slot = engine.leaving[i]
        request = slots.request[slot]
        out.finish_s[request] = engine.t[NOW]
        n[DECODING] -= 1
        n[CONTEXTS] -= steps - slots.offset[slot]
        engine.phases[slots.offset[slot] % limits.block_size] -= 1
        if limited:
            leave_spans(
                cost.span_limit, cost.span_restarts, engine.reach, engine.growing, engine.crossing,
                steps - slots.offset[slot], slot,
            )  # fmt: skip
        slots.state[slot] = DONE
        if n[BLOCKED] == 2:
            n[BLOCKED] = 0
        if engine.finished.size > 0:
            engine.finished[n[FINISHED]] = request
        n[FINISHED] += 1
        if limits.feedback:
            answered(load.arrival_s, load.think_s, load.child, load.sibling, load.roots, n, engine.order,
                     engine.t[NOW], request)  # fmt: skip
        if n[IN_FLIGHT]:
            engine.done[n[FINISHING]] = slot
            n[FINISHING] += 1
    if n[IN_FLIGHT]:
        leaving = gone
    for i in range(leaving):
        if slots.state[engine.leaving[i]] == DONE:  # else it was preempted since
            give_up_seat(limits, keys, blocks, engine, engine.leaving[i])


@part
def _sort_by_place(some: Ints, start: int, end: int, place: Ints) -> None:
    """Sort some[start:end] by place in the running list (few, nearly always one)."""
    for i in range(start + 1, end):
        slot = some[i]
        at = i
        while at > start and place[some[at - 1]] > place[slot]:
            some[at] = some[at - 1]
            at -= 1
        some[at] = slot


@part
def answered(
    arrival_s: Floats, think_s: Floats, child: SmallInts, sibling: SmallInts, roots: SmallInts, n: Ints,
    order: SmallInts, now: float, request: int,
) -> None:  # fmt: skip
    """Whoever waited for this answer sends its next request: the next turns, else a free client the next root."""
    turns = False
    if child.size > 0:
        turn = child[request]
        while turn >= 0:
            expect(arrival_s, n, order, now + think_s[turn], turn)
            turns = True
            turn = sibling[turn]
    if not turns and n[NEXT_ROOT] < roots.size:
        root = roots[n[NEXT_ROOT]]
        n[NEXT_ROOT] += 1
        expect(arrival_s, n, order, now + think_s[root], root)


@part
def expect(arrival_s: Floats, n: Ints, order: SmallInts, at_s: float, request: int) -> None:
    """`request` will arrive at `at_s`: insert it into the part of the queue that is still to come.

    Whichever side of its place has fewer entries makes room: with many arrivals given in advance, those before it.
    """
    arrival_s[request] = at_s
    low, high = n[PENDING], n[EXPECTED]
    while low < high:
        middle = (low + high) >> 1
        other = order[middle]
        if arrival_s[other] < at_s or (arrival_s[other] == at_s and other < request):
            low = middle + 1
        else:
            high = middle
    before, after = low - n[PENDING], n[EXPECTED] - low
    if n[PENDING] > n[ARRIVED] and (before <= after or n[EXPECTED] == order.size):
        for i in range(n[PENDING], low):
            order[i - 1] = order[i]
        order[low - 1] = request
        n[PENDING] -= 1
    else:
        for i in range(n[EXPECTED], low, -1):
            order[i] = order[i - 1]
        order[low] = request
        n[EXPECTED] += 1


@inlined
def take_arrivals(limits: Limits, load: Load, engine: Engine, planned_at: float) -> int:
    """Requests that have arrived join the queue. Returns how many wait."""
    n = engine.n
    latest = planned_at * TIE
    while n[PENDING] < n[EXPECTED] and load.arrival_s[engine.order[n[PENDING]]] <= latest:
        request = engine.order[n[PENDING]]
        engine.order[n[ARRIVED]] = request
        n[PENDING] += 1
        if limits.by_priority:
            urgency = load.urgency[request]
            n[FRONT] = push(engine.front, n[FRONT], urgency)
            if engine.front[0] == urgency:
                n[BLOCKED] = 0
        n[ARRIVED] += 1
    if limits.by_priority:
        n[ADMITTED] = n[ARRIVED]  # they wait in the heap
    return waiting_of(limits, n)


@inlined
def waiting_of(limits: Limits, n: Ints) -> int:
    """Requests in the queue."""
    if limits.by_priority:
        return n[FRONT]
    return n[FRONT] + n[ARRIVED] - n[ADMITTED]


@inlined
def head_of(limits: Limits, load: Load, engine: Engine) -> int:
    """The request at the head of the queue."""
    if limits.by_priority:
        return load.by_urgency[engine.front[0]]
    if engine.n[FRONT] > 0:
        return engine.front[engine.n[FRONT] - 1]
    return engine.order[engine.n[ADMITTED]]


@inlined
def leave_queue(limits: Limits, engine: Engine) -> None:
    """The head of the queue is admitted."""
    n = engine.n
    if limits.by_priority:
        n[FRONT] = pop(engine.front, n[FRONT])
    elif n[FRONT] > 0:
        n[FRONT] -= 1
    else:
        n[ADMITTED] += 1
