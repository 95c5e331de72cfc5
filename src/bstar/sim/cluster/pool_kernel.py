"""A closed loop of clients over a prefill pool and a decode pool, compiled: from event to event.

Ranks of a worker step together. Between events all decoding workers do is decode: the step of the slowest rank is
affine in the step number until another rank becomes the slowest, so a run of steps is one sum. Events are an arrival,
the end of a prompt step, a cache that lands, a completion, a context that fills its window, an overtaking rank.

`bstar.sim.cluster.pool_stepwise` is the same, step by step, to be read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bstar.sim.cluster.pool_cost import Curve, DecodeCost, Floats, Ints, PromptCost
from bstar.sim.cluster.time_heap import put, take
from bstar.sim.kernel.closed_forms import run_s, steps_to_reach
from bstar.sim.kernel.compiled import entry, inlined, part
from bstar.sim.kernel.cost import PROMPT, add_chunk, mixed_step_s
from bstar.sim.kernel.heap import pop, push

BITS = 22  # of a request's number, below its step in a heap of completions
MASK = (1 << BITS) - 1
FROM_PREFILL, ON_LANDING, AFTER_STEP = range(3)
IN_TURN, LEAST = range(2)
HEAD, TAIL, LANDING, SENT, PREFILL_TURN, DECODE_TURN, FINISHED, RUNS, FRESH = range(9)
PREFILL_RUN, DECODE_RUN = range(2)
ENDLESS = 1 << 40


class PoolRules(NamedTuple):
    """How both pools work; `pools.PoolSettings` says what the fields mean."""

    prefill_workers: int
    prefill_ranks: int
    prompts: int
    budget: int
    chunked: int
    prompts_shared: int
    decode_workers: int
    decode_ranks: int
    seats: int
    room: int
    decode_shared: int
    ahead: int
    prefill_router: int
    decode_router: int
    first_token: int
    clients: int
    front_s: float
    growth: float


class PoolLoad(NamedTuple):
    """Per request: prompt tokens, decode steps, tokens of cache that it needs room for, seconds of its transfer."""

    prompt: Ints
    steps: Ints
    hold: Ints
    moved_s: Floats


class PoolTimes(NamedTuple):
    """Per request, written: seconds (nan: did not happen) and where it was decoded."""

    arrival_s: Floats
    prefilled_s: Floats
    landed_s: Floats
    first_s: Floats
    finish_s: Floats
    worker: Ints
    rank: Ints


class PoolState(NamedTuple):
    """Everything that changes. Queues are linked lists through `after`: one a worker, or one a rank.

    n          counters (HEAD …)
    order      requests in the order of arrival
    after      the next of a queue, -1: none
    done       prompt tokens computed
    p_*        prefill workers: end of the step, queues, what the step computes (request, tokens), rank of the next one
    x, width   a rank's batch statistics, tokens and prompts
    landing    heap of requests by landed_s
    fresh      requests that join the run that starts now
    d_*        decode workers: steps so far, the run (start, steps, base, slope, end, slowest rank), sequences, queues,
               rank in turn, requests sent and not finished
    b, late, room, late_room   ranks: sequences, seats that are free one step later, tokens of room, likewise
    reach, growing             ranks and spans: Σ context seen, sequences whose reach grows
    since      decode step at which a request came in
    ends, crossings            heaps of (step, request)
    line, rise                 ranks: the next step's seconds, and its growth
    runs       log: kind, worker, start, steps, base, slope, sequences of the slowest rank and of all,
               Σ reach of the slowest
    """

    n: Ints
    order: Ints
    after: Ints
    done: Ints
    p_end: Floats
    p_head: Ints
    p_tail: Ints
    p_plan: Ints
    p_take: Ints
    p_count: Ints
    p_turn: Ints
    p_out: Ints
    x: Floats
    tokens: Ints
    prompts: Ints
    landing: Ints
    fresh: Ints
    d_step: Ints
    d_start: Floats
    d_run: Ints
    d_base: Floats
    d_slope: Floats
    d_end: Floats
    d_slow: Ints
    d_active: Ints
    d_head: Ints
    d_tail: Ints
    d_turn: Ints
    d_out: Ints
    b: Ints
    late: Ints
    room: Ints
    late_room: Ints
    reach: Floats
    growing: Ints
    since: Ints
    ends: Ints
    ends_count: Ints
    crossings: Ints
    crossings_count: Ints
    line: Floats
    rise: Floats
    runs: Floats


@part
def curve_s(entries: Floats, dense: int, stride: int, n: int) -> float:
    """`pool_cost.curve_at`."""
    if n < dense:
        return float(entries[n])
    place = dense - 1 + (n - dense + 1) / stride
    low = int(place)
    if low + 1 >= entries.size:
        return float(entries[entries.size - 1])
    return float(entries[low] + (place - low) * (entries[low + 1] - entries[low]))


@inlined
def _on(curve: Curve, n: int) -> float:
    return curve_s(curve.entries, curve.dense, curve.stride, n)


@part
def launched_s(kernels_s: float, launch_s: float, power: float) -> float:
    """Kernels that are launched from the host: smoothly the longer of both."""
    if launch_s <= 0.0:
        return kernels_s
    if power == 3.0:
        return float(np.cbrt(kernels_s * kernels_s * kernels_s + launch_s * launch_s * launch_s))
    return float((kernels_s**power + launch_s**power) ** (1.0 / power))


@inlined
def decode_line_s(cost: DecodeCost, sequences: int, shared_s: float) -> float:
    """A decode step of a rank with so many sequences, but for the contexts that they see."""
    launch_s = cost.launch_s if sequences * cost.tokens > cost.graph_tokens else cost.piece_s
    kernels_s = launched_s(_on(cost.own, sequences) + shared_s, launch_s, cost.power)
    return kernels_s + cost.host_s + cost.host_sequence_s * sequences


@part
def _enqueue(head: Ints, tail: Ints, after: Ints, queue: int, request: int) -> None:
    after[request] = -1
    if head[queue] < 0:
        head[queue] = request
    else:
        after[tail[queue]] = request
    tail[queue] = request


@part
def _least(outstanding: Ints) -> int:
    best = 0
    for i in range(1, outstanding.size):
        if outstanding[i] < outstanding[best]:
            best = i
    return best


@part
def _first_end(ends: Floats) -> int:
    best = 0
    for i in range(1, ends.size):
        if ends[i] < ends[best]:
            best = i
    return best


@part
def growing_steps(limit: int, growth: float, prompt: int) -> int:
    """Decode steps whose contexts are all within the limit: a sequence's reach grows for so long."""
    if limit == 0:
        return ENDLESS
    if prompt >= limit:
        return 0
    steps = int((limit - prompt) / growth)
    while prompt + growth * steps > limit:
        steps -= 1
    while prompt + growth * (steps + 1) <= limit:
        steps += 1
    return steps


@inlined
def _log(
    s: PoolState, kind: int, worker: int, start: float, steps: int, base: float, slope: float, own: int, everybody: int,
    reach: float,
) -> None:  # fmt: skip
    row = s.n[RUNS]
    if row < s.runs.shape[0]:
        runs = s.runs
        runs[row, 0], runs[row, 1], runs[row, 2], runs[row, 3] = kind, worker, start, steps
        runs[row, 4], runs[row, 5], runs[row, 6], runs[row, 7] = base, slope, own, everybody
        runs[row, 8] = reach
    s.n[RUNS] += 1


@inlined
def _plan_prompts(rules: PoolRules, load: PoolLoad, cost: PromptCost, s: PoolState, p: int, at: float) -> None:
    """The next prompt step of worker p; idle where nobody waits."""
    ranks, total, count = rules.prefill_ranks, 0, 0
    s.x[:, :] = 0.0
    s.tokens[:] = 0
    s.prompts[:] = 0
    queues = 1 if rules.prompts_shared else ranks
    for k in range(queues):
        queue = p * queues + k
        while s.p_head[queue] >= 0:
            request = s.p_head[queue]
            left, rank = load.prompt[request] - s.done[request], -1
            chunk = left
            for i in range(ranks if rules.prompts_shared else 1):
                r = i if rules.prompts_shared else k
                fits = s.prompts[r] < rules.prompts and (s.tokens[r] == 0 or s.tokens[r] + left <= rules.budget)
                if rules.chunked:
                    fits = s.prompts[r] < rules.prompts and s.tokens[r] < rules.budget
                if fits and (rank < 0 or s.tokens[r] < s.tokens[rank]):
                    rank = r
            if rank < 0:
                break
            if rules.chunked:
                chunk = min(left, rules.budget - s.tokens[rank])
            add_chunk(cost.own, s.x[rank], chunk, s.done[request])
            s.tokens[rank] += chunk
            s.prompts[rank] += 1
            s.p_plan[p, count] = request
            s.p_take[p, count] = chunk
            count += 1
            total += chunk
            if chunk < left:
                break
            s.p_head[queue] = s.after[request]
    s.p_count[p] = count
    if count == 0:
        s.p_end[p] = np.inf
    else:
        seconds, longest, shared_s = 0.0, 0, _on(cost.shared, total)
        for r in range(ranks):
            if s.tokens[r] == 0:
                continue
            kernels_s = mixed_step_s(cost.own, s.x[r], s.tokens[r], s.prompts[r], 0.0) + shared_s
            launch_s = cost.launch_s if s.tokens[r] > cost.graph_tokens else cost.piece_s
            rank_s = launched_s(kernels_s, launch_s, cost.own.power)
            rank_s += cost.host_s + cost.host_sequence_s * s.prompts[r]
            if rank_s > seconds:
                seconds, longest = rank_s, r
        s.p_end[p] = at + seconds
        _log(s, PREFILL_RUN, p, at, 1, seconds, 0.0, s.tokens[longest], total, s.x[longest, PROMPT])


@inlined
def _finish(rules: PoolRules, load: PoolLoad, out: PoolTimes, s: PoolState, request: int, at: float) -> None:
    """The last token: its client sends the next request."""
    out.finish_s[request] = at
    n = s.n
    n[FINISHED] += 1
    if n[SENT] < load.prompt.size:
        s.order[n[TAIL]] = n[SENT]
        out.arrival_s[n[SENT]] = at
        n[SENT] += 1
        n[TAIL] += 1


@inlined
def _come_in(
    rules: PoolRules, load: PoolLoad, cost: DecodeCost, s: PoolState, out: PoolTimes, d: int, r: int, request: int
) -> None:
    """A request joins rank r of worker d."""
    step = s.d_step[d]
    s.b[d, r] += 1
    s.d_active[d] += 1
    s.room[d, r] -= load.hold[request]
    s.since[request] = step
    out.worker[request], out.rank[request] = d, r
    groups = cost.span_limit.size
    for g in range(groups):
        grows = growing_steps(cost.span_limit[g], rules.growth, load.prompt[request])
        if grows == 0:
            s.reach[d, r, g] += cost.span_limit[g]
            continue
        s.reach[d, r, g] += load.prompt[request]
        s.growing[d, r, g] += 1
        if grows < load.steps[request]:
            key = ((step + grows) << BITS | request) * groups + g
            s.crossings_count[d] = push(s.crossings[d], s.crossings_count[d], key)
    s.ends_count[d] = push(s.ends[d], s.ends_count[d], ((step + load.steps[request]) << BITS) | request)


@inlined
def _admit(
    rules: PoolRules, load: PoolLoad, cost: DecodeCost, s: PoolState, out: PoolTimes, d: int, seen: float
) -> bool:
    """Requests whose caches had landed before `seen` get seats. True: one waits that a step from now may get one."""
    ranks, soon = rules.decode_ranks, False
    queues = 1 if rules.decode_shared else ranks
    for k in range(queues):
        queue = d * queues + k
        while s.d_head[queue] >= 0:
            request, rank = s.d_head[queue], -1
            if out.landed_s[request] >= seen:
                soon = True
                break
            for i in range(ranks if rules.decode_shared else 1):
                r = i if rules.decode_shared else k
                if s.late[d, r] > 0:
                    soon = True
                free = rules.seats - s.b[d, r] - s.late[d, r] > 0 and s.room[d, r] >= load.hold[request]
                if free and (rank < 0 or s.b[d, r] < s.b[d, rank]):
                    rank = r
            if rank < 0:
                break
            s.d_head[queue] = s.after[request]
            _come_in(rules, load, cost, s, out, d, rank, request)
            s.fresh[s.n[FRESH]] = request
            s.n[FRESH] += 1
    return soon


@inlined
def _start_run(
    rules: PoolRules, load: PoolLoad, cost: DecodeCost, s: PoolState, out: PoolTimes, d: int, at: float, soon: bool
) -> None:
    """Decode steps of worker d until something changes on one of its ranks."""
    if s.d_active[d] == 0:
        s.d_run[d] = 0
        s.d_end[d] = np.inf
        return
    step, groups = s.d_step[d], cost.span_limit.size
    most = (s.ends[d, 0] >> BITS) - step
    if s.crossings_count[d] > 0:
        most = min(most, ((s.crossings[d, 0] // groups) >> BITS) - step)
    if soon:
        most = 1
    slowest, shared_s = -1, _on(cost.shared, s.d_active[d])
    for r in range(rules.decode_ranks):
        if s.b[d, r] == 0:
            continue
        line, rise = decode_line_s(cost, s.b[d, r], shared_s), 0.0
        for g in range(groups):
            line += cost.span_rate[g] * s.reach[d, r, g]
            rise += cost.span_rate[g] * (s.growing[d, r, g] * rules.growth)
        s.line[r], s.rise[r] = line, rise
        if slowest < 0:
            slowest = r
        else:
            ahead = line + rise - (s.line[slowest] + s.rise[slowest])
            if ahead > 0.0 or (ahead == 0.0 and rise > s.rise[slowest]):
                slowest = r
    for r in range(rules.decode_ranks):
        if s.b[d, r] > 0 and s.rise[r] > s.rise[slowest]:
            overtakes = (s.line[slowest] - s.line[r]) / (s.rise[r] - s.rise[slowest])
            if overtakes < most:
                most = max(int(overtakes), 1)
    s.d_start[d] = at
    s.d_run[d] = most
    s.d_base[d] = s.line[slowest]
    s.d_slope[d] = s.rise[slowest]
    s.d_end[d] = at + run_s(s.d_base[d], s.d_slope[d], most)
    s.d_slow[d] = slowest
    if rules.first_token != FROM_PREFILL:
        shown = at if rules.first_token == ON_LANDING else at + (s.d_base[d] + s.d_slope[d])
        for i in range(s.n[FRESH]):
            out.first_s[s.fresh[i]] = shown
    s.n[FRESH] = 0


@inlined
def _end_run(
    rules: PoolRules, load: PoolLoad, cost: DecodeCost, s: PoolState, out: PoolTimes, d: int, at: float
) -> None:
    """The run of worker d is over: contexts have grown, answers may be complete."""
    steps, groups = s.d_run[d], cost.span_limit.size
    slow = s.d_slow[d]
    _log(s, DECODE_RUN, d, s.d_start[d], steps, s.d_base[d], s.d_slope[d], s.b[d, slow], s.d_active[d],
         s.reach[d, slow, 0])  # fmt: skip
    s.d_step[d] += steps
    step = s.d_step[d]
    for r in range(rules.decode_ranks):
        s.late[d, r] = 0
        s.room[d, r] += s.late_room[d, r]
        s.late_room[d, r] = 0
        if s.b[d, r] > 0:
            for g in range(groups):
                s.reach[d, r, g] += s.growing[d, r, g] * rules.growth * steps
    while s.crossings_count[d] > 0 and (s.crossings[d, 0] // groups) >> BITS <= step:
        key = s.crossings[d, 0]
        g, request = key % groups, (key // groups) & MASK
        s.crossings_count[d] = pop(s.crossings[d], s.crossings_count[d])
        r = out.rank[request]
        s.growing[d, r, g] -= 1
        s.reach[d, r, g] += cost.span_limit[g] - (load.prompt[request] + rules.growth * (step - s.since[request]))
    while s.ends_count[d] > 0 and s.ends[d, 0] >> BITS <= step:
        request = s.ends[d, 0] & MASK
        s.ends_count[d] = pop(s.ends[d], s.ends_count[d])
        r = out.rank[request]
        s.b[d, r] -= 1
        s.d_active[d] -= 1
        s.d_out[d] -= 1
        if rules.ahead:
            s.late[d, r] += 1
            s.late_room[d, r] += load.hold[request]
        else:
            s.room[d, r] += load.hold[request]
        for g in range(groups):
            if growing_steps(cost.span_limit[g], rules.growth, load.prompt[request]) >= load.steps[request]:
                s.growing[d, r, g] -= 1
                s.reach[d, r, g] -= load.prompt[request] + rules.growth * load.steps[request]
            else:
                s.reach[d, r, g] -= cost.span_limit[g]
        _finish(rules, load, out, s, request, at)
    if s.d_active[d] == 0:
        for r in range(rules.decode_ranks):
            s.late[d, r] = 0
            s.room[d, r] += s.late_room[d, r]
            s.late_room[d, r] = 0


@inlined
def _land(
    rules: PoolRules, load: PoolLoad, cost: DecodeCost, s: PoolState, out: PoolTimes, request: int, at: float
) -> None:
    """The cache of a request is there: its worker takes it in as soon as it has a seat."""
    d = out.worker[request]
    queue = d
    if not rules.decode_shared:
        queue = d * rules.decode_ranks + s.d_turn[d] % rules.decode_ranks
        s.d_turn[d] += 1
    _enqueue(s.d_head, s.d_tail, s.after, queue, request)
    if s.d_run[d] == 0:
        soon = _admit(rules, load, cost, s, out, d, np.inf)
        _start_run(rules, load, cost, s, out, d, at, soon)
        return
    seat = False
    for r in range(rules.decode_ranks):
        seat = seat or s.b[d, r] < rules.seats
    if seat:
        steps = steps_to_reach(s.d_base[d], s.d_slope[d], at - s.d_start[d], s.d_run[d])
        while steps < s.d_run[d] and s.d_start[d] + run_s(s.d_base[d], s.d_slope[d], steps) <= at:
            steps += 1
        steps = max(steps, 1) + rules.ahead
        if steps < s.d_run[d]:
            s.d_run[d] = steps
            s.d_end[d] = s.d_start[d] + run_s(s.d_base[d], s.d_slope[d], steps)


@inlined
def _end_prompts(
    rules: PoolRules, load: PoolLoad, cost: PromptCost, s: PoolState, out: PoolTimes, p: int, at: float
) -> None:
    """A prompt step has run: complete prompts have their first token, and their caches leave."""
    for i in range(s.p_count[p]):
        request = s.p_plan[p, i]
        s.done[request] += s.p_take[p, i]
        if s.done[request] < load.prompt[request]:
            continue
        s.p_out[p] -= 1
        out.prefilled_s[request] = at
        if rules.first_token == FROM_PREFILL or load.steps[request] == 0:
            out.first_s[request] = at
        if load.steps[request] == 0:
            _finish(rules, load, out, s, request, at)
            continue
        if rules.decode_router == LEAST:
            d = _least(s.d_out)
        else:
            d = s.n[DECODE_TURN] % rules.decode_workers
            s.n[DECODE_TURN] += 1
        out.worker[request] = d
        s.d_out[d] += 1
        out.landed_s[request] = at + load.moved_s[request]
        s.n[LANDING] = put(s.landing, s.n[LANDING], out.landed_s, request)
    _plan_prompts(rules, load, cost, s, p, at)


@inlined
def _arrive(rules: PoolRules, load: PoolLoad, cost: PromptCost, s: PoolState, request: int, at: float) -> None:
    """A request comes to the prefill pool."""
    if rules.prefill_router == LEAST:
        p = _least(s.p_out)
    else:
        p = s.n[PREFILL_TURN] % rules.prefill_workers
        s.n[PREFILL_TURN] += 1
    queue = p
    if not rules.prompts_shared:
        queue = p * rules.prefill_ranks + s.p_turn[p] % rules.prefill_ranks
        s.p_turn[p] += 1
    s.p_out[p] += 1
    _enqueue(s.p_head, s.p_tail, s.after, queue, request)
    if s.p_end[p] == np.inf:
        _plan_prompts(rules, load, cost, s, p, at)


@entry
def serve_pools(
    rules: PoolRules, load: PoolLoad, prompts: PromptCost, decode: DecodeCost, s: PoolState, out: PoolTimes, until: int
) -> int:
    """Serve until `until` requests are finished; returns how many are. Fewer: the rest can never be served."""
    n = s.n
    while n[FINISHED] < until:
        d, p = _first_end(s.d_end), _first_end(s.p_end)
        decode_s, prompt_s, land_s, come_s = s.d_end[d], s.p_end[p], np.inf, np.inf
        if n[LANDING] > 0:
            land_s = out.landed_s[s.landing[0]]
        if n[HEAD] < n[TAIL]:
            come_s = out.arrival_s[s.order[n[HEAD]]] + rules.front_s
        at = min(min(decode_s, prompt_s), min(land_s, come_s))
        if at == np.inf:
            break
        if decode_s == at:
            seen = np.inf
            if rules.ahead:
                seen = s.d_start[d] + run_s(s.d_base[d], s.d_slope[d], s.d_run[d] - 1)
            _end_run(rules, load, decode, s, out, d, at)
            if s.d_active[d] == 0:
                seen = np.inf
            soon = _admit(rules, load, decode, s, out, d, seen)
            _start_run(rules, load, decode, s, out, d, at, soon)
        elif prompt_s == at:
            _end_prompts(rules, load, prompts, s, out, p, at)
        elif land_s == at:
            request = s.landing[0]
            n[LANDING] = take(s.landing, n[LANDING], out.landed_s)
            _land(rules, load, decode, s, out, request, at)
        else:
            request = s.order[n[HEAD]]
            n[HEAD] += 1
            _arrive(rules, load, prompts, s, request, at)
    return int(n[FINISHED])
