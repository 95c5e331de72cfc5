"""Seeing routers over compiled engines: each arrival advances the replicas that the router looks at, and no others.

A replica that only decodes finishes nothing before its next completion, whatever comes: until then its number of
requests is known without running it (`quiet_s`). What is behind in time catches up when it is looked at, or at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bstar.sim.cluster.time_heap import put, take
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
    ENDS,
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
    SLOT_MASK,
    STEPS,
    TIE,
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


def engine_of_row(stack: Engine, k: int) -> Engine:
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


def pool_of_row(stack: Blocks, k: int) -> Blocks:
    """The block pool of replica k."""
    return Blocks(
        stack.after[k], stack.before[k], stack.references[k], stack.key[k], stack.first[k], stack.younger[k],
        stack.older[k], stack.table[k], stack.held[k], stack.named[k], stack.stash[k], stack.sizes[k],
    )  # fmt: skip


engine_at, pool_at = inlined(engine_of_row), inlined(pool_of_row)


class Desk(NamedTuple):
    """Where the router stands. A row is a replica's place in the stack.

    arrivals   requests in the order in which they come
    draws      two uniform numbers per request
    given      per request: the row that a hash names, -1: in turn
    row        written: who got each request
    next       [0] how many of the arrivals have been sent, [1] the row that stopped it, [2] sent in turn,
               [3] how many are in `born`, [4] how many roots free clients have sent, [5] how many are in `answers`
    open       rows that take requests, in order of the replicas' numbers
    sent       per row: requests sent
    finished   per row: requests it has finished, as of its last look
    quiet_s    per row: it finishes nothing before
    answer_s, answers, born   where answers make requests come, else empty: per request, when it ends, once that is
               known; requests that end then, a heap; requests that will come, a heap by arrival
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
    answer_s: Floats
    answers: Ints
    born: Ints


@part
def _after(now: float) -> float:
    """The earliest time whose arrivals do not join a step planned at `now`."""
    return float(np.nextafter(now * TIE, np.inf))


@part
def _quiet_until(limits: Limits, load: Load, cost: StepCost, engine: Engine) -> float:
    """A time before which the replica finishes no request, if it is given none."""
    n, now, decoding = engine.n, float(engine.t[NOW]), engine.n[DECODING]
    waits = _anyone_waits(limits, engine)
    if n[RUNNING] == 0 and not waits:
        return _after(max(now, load.arrival_s[engine.order[n[ARRIVED]]])) if n[ARRIVED] < n[EXPECTED] else np.inf
    if n[ARRIVED] < n[EXPECTED] or n[PREFILLING] > 0 or n[LATE] > 0:
        return _after(now)
    if waits and (n[BLOCKED] != 1 or n[FINISHING] > 0):  # somebody may be admitted, and may end with the prompt
        return _after(now)
    if decoding == 0 or decoding > limits.budget:
        return _after(now)
    rate = 0.0
    for g in range(cost.span_limit.size):
        if cost.span_limit[g] == 0:
            rate += cost.span_rate[g]
    steps = (engine.ends[0] >> SLOT_BITS) - n[STEPS]
    first_s = now + (1.0 - 1e-9) * float(run_s(cost.decode_s[decoding] + rate * n[CONTEXTS], rate * decoding, steps))
    return max(first_s, _after(now))


@part
def _anyone_waits(limits: Limits, engine: Engine) -> bool:
    """Whether requests wait in the replica."""
    n = engine.n
    if limits.by_priority:
        return bool(n[FRONT] > 0)
    return bool(n[FRONT] + n[ARRIVED] - n[ADMITTED] > 0)


@part
def _used_blocks(limits: Limits, blocks: Blocks, engine: Engine, at: float) -> int:
    """Blocks in use; those of requests that have ended by `at`, and give them up with the next step, not counted."""
    n, slots = engine.n, engine.slots
    used = limits.num_blocks - 1 - n[FREE]
    for i in range(n[FINISHING]):
        if slots.state[engine.done[i]] == DONE:
            used -= _given_up(limits, blocks, slots, engine.done[i])
    if n[ENDS] > 0 and engine.ends[0] >> SLOT_BITS <= n[STEPS] and engine.t[NOW] <= at:
        for i in range(n[ENDS]):
            slot = engine.ends[i] & SLOT_MASK
            if _ends_now(engine, i):
                used -= _given_up(limits, blocks, slots, slot)
    return int(used)


@part
def _ends_now(engine: Engine, i: int) -> bool:
    """Whether entry i of the heap of completions is of a request whose last token came with the step just run."""
    slots, steps, slot = engine.slots, engine.n[STEPS], engine.ends[i] & SLOT_MASK
    if engine.ends[i] >> SLOT_BITS > steps or slots.ends[slot] != engine.ends[i]:
        return False
    return bool(slots.total[slot] - 1 + slots.offset[slot] <= steps)


@part
def _given_up(limits: Limits, blocks: Blocks, slots: Slots, slot: int) -> int:
    """Blocks that nobody refers to when a slot that has ended is freed."""
    held = blocks_of(slots.total[slot] - 1, limits.block_size)
    if not limits.caching:
        return held
    dealt = blocks.held[slot]
    freed = held - dealt
    for j in range(dealt):
        freed += blocks.references[blocks.table[slot, j]] == 1
    return int(freed)


@inlined
def _look_at(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, k: int,
    until_s: float,
) -> int:  # fmt: skip
    """Advance row k and note what it has finished by then; returns PAUSED, or why it stopped."""
    engine, pool = engine_at(engines, k), pool_at(pools, k)
    status = advance(limits, load, cost, pool, engine, out, until_s)
    if status != PAUSED and status != ENDED:
        desk.next[1] = k
        return status
    if desk.answers.size > 0:
        _tell(engine, desk)
    else:
        desk.finished[k] = engine.n[FINISHED]
    desk.quiet_s[k] = _quiet_until(limits, load, cost, engine)
    return PAUSED


@part
def _tell(engine: Engine, desk: Desk) -> None:
    """Requests whose last token comes with the step that has just been run: their answers are due now."""
    n, slots = engine.n, engine.slots
    if n[ENDS] == 0 or engine.ends[0] >> SLOT_BITS > n[STEPS]:
        return
    for i in range(n[ENDS]):
        request = slots.request[engine.ends[i] & SLOT_MASK]
        if _ends_now(engine, i) and np.isnan(desk.answer_s[request]):
            desk.answer_s[request] = engine.t[NOW]
            desk.next[5] = put(desk.answers, desk.next[5], desk.answer_s, request)


@part
def _answer(load: Load, desk: Desk) -> None:
    """The first answer that is due: whoever waited for it sends the next request."""
    request = desk.answers[0]
    desk.next[5] = take(desk.answers, desk.next[5], desk.answer_s)
    desk.finished[desk.row[request]] += 1
    turns = False
    if load.child.size > 0:
        turn = int(load.child[request])
        while turn >= 0:
            load.arrival_s[turn] = desk.answer_s[request] + load.think_s[turn]
            desk.next[3] = put(desk.born, desk.next[3], load.arrival_s, turn)
            turns = True
            turn = int(load.sibling[turn])
    if not turns and desk.next[4] < load.roots.size:
        root = int(load.roots[desk.next[4]])
        desk.next[4] += 1
        load.arrival_s[root] = desk.answer_s[request] + load.think_s[root]
        desk.next[3] = put(desk.born, desk.next[3], load.arrival_s, root)


@inlined
def _choose(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, code: int,
    request: int, at: float,
) -> int:  # fmt: skip
    """The row for a request that comes at `at`; below 0: minus the status of row desk.next[1]."""
    count, best = desk.open.size, -1
    if code == RANDOM:
        best = desk.open[min(int(desk.draws[request, 0] * count), count - 1)]
    elif code == GIVEN:
        best = desk.given[request]
    if code <= GIVEN:
        if best < 0:
            best = desk.open[desk.next[2] % count]
            desk.next[2] += 1
        return best
    looks, first, second = count, 0, 0
    if code == POWER_OF_TWO and count > 1:
        first = min(int(desk.draws[request, 0] * count), count - 1)
        second = (first + 1 + min(int(desk.draws[request, 1] * (count - 1)), count - 2)) % count
        looks = 2
    best_a, best_b, status = 0, 0, PAUSED
    for i in range(looks):
        k = desk.open[i]
        if code == POWER_OF_TWO and count > 1:
            k = desk.open[first if i == 0 else second]
        if desk.quiet_s[k] < at or code >= LEAST_KV:
            status = _look_at(limits, load, cost, out, pools, engines, desk, k, at)
            if status != PAUSED:
                break
        a, b = desk.sent[k] - desk.finished[k], 0
        if code >= LEAST_KV:
            b = a
            a = _used_blocks(limits, pool_at(pools, k), engine_at(engines, k), at)
            if code == PREFIX_AFFINITY and limits.caching:
                full = (load.prompt[request] - 1) // limits.block_size
                a -= find_hits(pool_at(pools, k), load, request, full)[0]
        if best < 0 or a < best_a or (a == best_a and b < best_b):
            best, best_a, best_b = k, a, b
    return best if status == PAUSED else -status


@inlined
def _hand_over(limits: Limits, load: Load, cost: StepCost, engines: Engine, desk: Desk, k: int, request: int) -> None:
    engines.order[k, engines.n[k, EXPECTED]] = request
    engines.n[k, EXPECTED] += 1
    desk.sent[k] += 1
    desk.row[request] = k
    desk.quiet_s[k] = min(desk.quiet_s[k], _quiet_until(limits, load, cost, engine_at(engines, k)))


@entry
def route(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, code: int,
    last: int,
) -> int:  # fmt: skip
    """Send requests until `last` have been sent. Returns PAUSED then, else why row desk.next[1] stopped."""
    while desk.next[0] < last:
        request = desk.arrivals[desk.next[0]]
        best = _choose(limits, load, cost, out, pools, engines, desk, code, request, load.arrival_s[request])
        if best < 0:
            return -best
        _hand_over(limits, load, cost, engines, desk, best, request)
        desk.next[0] += 1
    return PAUSED


@entry
def serve(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, code: int,
    until_s: float, rounds: int,
) -> int:  # fmt: skip
    """`route` where answers make requests come: whichever is first, an arrival or a possible answer, goes first.

    Returns ENDED when nothing is left before until_s, PAUSED after `rounds`, else why row desk.next[1] stopped.
    """
    for _ in range(rounds):
        arrival_s, request, born = np.inf, -1, False
        if desk.next[0] < desk.arrivals.size:
            request = int(desk.arrivals[desk.next[0]])
            arrival_s = load.arrival_s[request]
        if desk.next[3] > 0:
            other = int(desk.born[0])
            if load.arrival_s[other] < arrival_s or (load.arrival_s[other] == arrival_s and other < request):
                arrival_s, request, born = load.arrival_s[other], other, True
        k = int(np.argmin(desk.quiet_s))
        quiet_s = desk.quiet_s[k]
        answer_s = desk.answer_s[desk.answers[0]] if desk.next[5] > 0 else np.inf
        if min(min(arrival_s, quiet_s), answer_s) >= until_s:
            return ENDED
        if answer_s <= min(arrival_s, quiet_s):
            _answer(load, desk)
            continue
        if quiet_s <= arrival_s:
            status = _look_at(limits, load, cost, out, pools, engines, desk, k, max(quiet_s, _after(engines.t[k, NOW])))
            if status != PAUSED:
                return status
            continue
        best = _choose(limits, load, cost, out, pools, engines, desk, code, request, arrival_s)
        if best < 0:
            return -best
        if born:
            desk.next[3] = take(desk.born, desk.next[3], load.arrival_s)
        else:
            desk.next[0] += 1
        _hand_over(limits, load, cost, engines, desk, best, request)
    return PAUSED


@entry
def look(
    limits: Limits, load: Load, cost: StepCost, out: Outcome, pools: Blocks, engines: Engine, desk: Desk, k: int,
    request: int, at: float, seen: Ints,
) -> int:  # fmt: skip
    """Advance row k to `at` and write what is seen there: [0] blocks in use, [1] blocks of `request` in its cache."""
    engine, pool = engine_at(engines, k), pool_at(pools, k)
    status = advance(limits, load, cost, pool, engine, out, at)
    desk.quiet_s[k] = _quiet_until(limits, load, cost, engine)
    desk.finished[k] = engine.n[FINISHED]
    seen[0] = _used_blocks(limits, pool, engine, at)
    seen[1] = 0
    if limits.caching and request >= 0:
        seen[1] = find_hits(pool, load, request, (load.prompt[request] - 1) // limits.block_size)[0]
    return status
