"""Seeing routers over compiled engines: each arrival advances the replicas that the router looks at, and no others.

A replica that only decodes finishes nothing before its next completion, whatever comes: until then its number of
requests is known without running it (`quiet_s`). What is behind in time catches up when it is looked at, or at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bstar.sim.kernel.cache import find_hits
from bstar.sim.kernel.closed_forms import blocks_of, run_s
from bstar.sim.kernel.compiled import entry, inlined, part
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.loop import advance
from bstar.sim.kernel.state import (
    ADMITTED,
    ARRIVED,
    BLOCKED,
    CONTEXTS,
    DECODING,
    DONE,
    ENDED,
    EXPECTED,
    FINISHED,
    FINISHING,
    FREE,
    FRONT,
    LATE,
    NOW,
    PAUSED,
    PREFILLING,
    RUNNING,
    SLOT_BITS,
    STEPS,
    Blocks,
    Engine,
    Floats,
    Ints,
    Limits,
    Load,
    Outcome,
    Slots,
    SmallInts,
)

IN_TURN, RANDOM, GIVEN, LEAST_OUTSTANDING, POWER_OF_TWO, LEAST_KV, PREFIX_AFFINITY = range(7)
CODES = {"round-robin": IN_TURN, "random": RANDOM, "session-affinity": GIVEN, "prefix-hash": GIVEN,
         "least-outstanding": LEAST_OUTSTANDING, "power-of-two": POWER_OF_TWO, "least-kv": LEAST_KV,
         "prefix-affinity": PREFIX_AFFINITY}  # fmt: skip


@inlined
def engine_at(stack: Engine, k: int) -> Engine:
    """Replica k of a stack: arrays with the replica as their first index, but for what is by request number."""
    s = stack.slots
    return Engine(
        stack.n[k], stack.t[k],
        Slots(s.request[k], s.state[k], s.place[k], s.target[k], s.total[k], s.computed[k], s.offset[k], s.taken[k],
              s.ends[k], s.last_s[k]),
        stack.order[k], stack.known, stack.last_s, stack.running[k], stack.unused[k], stack.ends[k], stack.front[k],
        stack.phases[k], stack.leaving[k], stack.done[k], stack.victims[k], stack.chunks[k], stack.reach[k],
        stack.growing[k], stack.crossing[k], stack.crossings[k], stack.x[k], stack.log[k], stack.log_s[k],
        stack.runs[k], stack.gaps[k], stack.finished[k],
    )  # fmt: skip


@inlined
def pool_at(stack: Blocks, k: int) -> Blocks:
    """The block pool of replica k."""
    return Blocks(
        stack.after[k], stack.before[k], stack.references[k], stack.key[k], stack.first[k], stack.younger[k],
        stack.older[k], stack.table[k], stack.held[k], stack.named[k], stack.stash[k], stack.sizes[k],
    )  # fmt: skip


class Desk(NamedTuple):
    """Where the router stands. A row is a replica's place in the stack.

    arrivals   requests in the order in which they come
    draws      two uniform numbers per request
    given      per request: the row that a hash names, -1: in turn
    row        written: who got each request
    next       [0] how many of the arrivals have been sent, [1] the row that stopped it, [2] sent in turn
    open       rows that take requests, in order of the replicas' numbers
    sent       per row: requests sent
    finished   per row: requests it has finished, as of its last look
    quiet_s    per row: it finishes nothing before
    """

    arrivals: SmallInts
    draws: Floats
    given: Ints
    row: Ints
    next: Ints
    open: Ints
    sent: Ints
    finished: Ints
    quiet_s: Floats


@part
def _quiet_until(limits: Limits, cost: StepCost, engine: Engine) -> float:
    """A time before which the replica finishes no request, if it is given none."""
    n, now = engine.n, engine.t[NOW]
    if n[ARRIVED] < n[EXPECTED]:
        return now
    if n[RUNNING] == 0 and n[DECODING] == 0 and n[PREFILLING] == 0:
        return np.inf
    decoding = n[DECODING]
    waits = _anyone_waits(limits, engine)
    if n[PREFILLING] > 0 or n[LATE] > 0 or decoding == 0 or decoding > limits.budget or (waits and n[BLOCKED] != 1):
        return now
    rate = 0.0
    for g in range(cost.span_limit.size):
        if cost.span_limit[g] == 0:
            rate += cost.span_rate[g]
    steps = (engine.ends[0] >> SLOT_BITS) - n[STEPS]
    return now + (1.0 - 1e-9) * run_s(cost.decode_s[decoding] + rate * n[CONTEXTS], rate * decoding, steps)


@part
def _anyone_waits(limits: Limits, engine: Engine) -> bool:
    """Whether requests wait in the replica."""
    n = engine.n
    if limits.by_priority:
        return n[FRONT] > 0
    return n[FRONT] + n[ARRIVED] - n[ADMITTED] > 0


@part
def _used_blocks(limits: Limits, blocks: Blocks, engine: Engine) -> int:
    """Blocks in use; those of requests that have ended, and give them up with the next step, not counted."""
    n, slots, size = engine.n, engine.slots, limits.block_size
    used = limits.num_blocks - 1 - n[FREE]
    for i in range(n[FINISHING]):
        slot = engine.done[i]
        if slots.state[slot] != DONE:
            continue
        held = blocks_of(slots.total[slot] - 1, size)
        if limits.caching:
            dealt = blocks.held[slot]
            used -= held - dealt
            for j in range(dealt):
                used -= blocks.references[blocks.table[slot, j]] == 1
        else:
            used -= held
    return used


@entry
def route(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, code: int,
    last: int,
) -> int:  # fmt: skip
    """Send requests until `last` have been sent. Returns PAUSED then, else why row desk.next[1] stopped."""
    count = desk.open.size
    while desk.next[0] < last:
        request = desk.arrivals[desk.next[0]]
        at = load.arrival_s[request]
        best = -1
        if code == RANDOM:
            best = desk.open[min(int(desk.draws[request, 0] * count), count - 1)]
        elif code == GIVEN:
            best = desk.given[request]
        if code <= GIVEN:
            if best < 0:
                best = desk.open[desk.next[2] % count]
                desk.next[2] += 1
        else:
            looks, first, second = count, 0, 0
            if code == POWER_OF_TWO and count > 1:
                first = min(int(desk.draws[request, 0] * count), count - 1)
                second = (first + 1 + min(int(desk.draws[request, 1] * (count - 1)), count - 2)) % count
                looks = 2
            best_a, best_b = 0, 0
            for look in range(looks):
                k = desk.open[look]
                if code == POWER_OF_TWO and count > 1:
                    k = desk.open[first if look == 0 else second]
                if desk.quiet_s[k] < at or code >= LEAST_KV:
                    engine, pool = engine_at(engines, k), pool_at(pools, k)
                    status = advance(limits, load, cost, pool, engine, out, at)
                    if status != PAUSED and status != ENDED:
                        desk.next[1] = k
                        return status
                    desk.quiet_s[k] = _quiet_until(limits, cost, engine)
                    desk.finished[k] = engine.n[FINISHED]
                a, b = desk.sent[k] - desk.finished[k], 0
                if code >= LEAST_KV:
                    b = a
                    a = _used_blocks(limits, pool_at(pools, k), engine_at(engines, k))
                    if code == PREFIX_AFFINITY and limits.caching:
                        full = (load.prompt[request] - 1) // limits.block_size
                        a -= find_hits(pool_at(pools, k), load, request, full)[0]
                if best < 0 or a < best_a or (a == best_a and b < best_b):
                    best, best_a, best_b = k, a, b
        engines.order[best, engines.n[best, EXPECTED]] = request
        engines.n[best, EXPECTED] += 1
        desk.sent[best] += 1
        desk.row[request] = best
        desk.quiet_s[best] = min(desk.quiet_s[best], engines.t[best, NOW])
        desk.next[0] += 1
    return PAUSED


@entry
def look(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, k: int,
    request: int, at: float, seen: Ints,
) -> int:  # fmt: skip
    """Advance row k to `at` and write what is seen there: [0] blocks in use, [1] blocks of `request` in its cache."""
    engine, pool = engine_at(engines, k), pool_at(pools, k)
    status = advance(limits, load, cost, pool, engine, out, at)
    desk.quiet_s[k] = _quiet_until(limits, cost, engine)
    desk.finished[k] = engine.n[FINISHED]
    seen[0] = _used_blocks(limits, pool, engine)
    seen[1] = 0
    if limits.caching and request >= 0:
        seen[1] = find_hits(pool, load, request, (load.prompt[request] - 1) // limits.block_size)[0]
    return status
