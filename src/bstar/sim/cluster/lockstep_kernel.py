"""Engines whose steps start together (data-parallel attention), from event to event: `bstar.sim.policies.lockstep`.

Every rank has the state of an engine of `loop` and plans as it does; a step takes as long as the slowest rank's, whose
experts see the tokens of all ranks. While all ranks only decode, the slowest rank's step is affine in the step number
until another one overtakes it: a run of steps is one sum, as in `loop`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bstar.sim.cluster.compiled import engine_at, pool_at
from bstar.sim.cluster.pool_cost import DecodeCost, PromptCost
from bstar.sim.cluster.pool_kernel import curve_s, decode_line_s, launched_s
from bstar.sim.kernel.cache import stash
from bstar.sim.kernel.closed_forms import run_s, steps_to_reach, steps_with_blocks
from bstar.sim.kernel.compiled import entry, inlined, part
from bstar.sim.kernel.cost import CACHED as X_CACHED
from bstar.sim.kernel.cost import DECODE as X_DECODE
from bstar.sim.kernel.cost import FIRST_SPAN, StepCost, add_chunk, mixed_step_s
from bstar.sim.kernel.cost import PROMPT as X_PROMPT
from bstar.sim.kernel.cost import SEQUENCES as X_SEQUENCES
from bstar.sim.kernel.heap import push
from bstar.sim.kernel.loop import plan_step, start_to_decode
from bstar.sim.kernel.queue import answered, head_of, take_completions, waiting_of
from bstar.sim.kernel.shortage import reach_of_taken, settle_by_request
from bstar.sim.kernel.spans import cross_spans, recount_spans
from bstar.sim.kernel.state import (
    ADMITTED,
    ARRIVED,
    AT_FAULT,
    BLOCKED,
    CONTEXTS,
    CROSSINGS,
    DECODING,
    ENDED,
    ENDLESS,
    EVENTS,
    EXPECTED,
    FINISHED,
    FINISHING,
    FREE,
    FRONT,
    FULL,
    GAPS,
    IN_FLIGHT,
    LATE,
    NOW,
    PAUSED,
    PENDING,
    PREFILLING,
    RUN_SPANS,
    RUNNING,
    RUNS,
    SEEN,
    SLOT_BITS,
    STEPS,
    STUCK,
    TIE,
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


class Together(NamedTuple):
    """What the ranks have in common, and one entry per rank of what the step being planned is.

    n, t, order   as of an engine: requests to come, the clock, rows in use; EVENTS
    again         1: answers make further requests arrive
    looked        finished requests of each rank whose clients have been told
    scheduled, chunks, victims, short   decodes and prompt chunks of the step, preempted, whether planned by request
    line, rise    seconds of the rank's next step, and its growth with every further one
    runs          the run log, of all ranks together; no rows: none is kept
    """

    n: Ints
    t: Floats
    order: SmallInts
    again: int
    looked: Ints
    scheduled: Ints
    chunks: Ints
    victims: Ints
    short: Ints
    line: Floats
    rise: Floats
    runs: Floats


@entry
def advance_together(
    limits: Limits, load: Load, own: StepCost, prompts: PromptCost, decode: DecodeCost, pools: Blocks, engines: Engine,
    all_: Together, out: Outcome, until_s: float,
) -> int:  # fmt: skip
    """Run on to `until_s` or to the end; returns how it ended, as `loop.advance`. n[AT_FAULT] is of rank n[GAPS]."""
    n, t, ranks = all_.n, all_.t, engines.n.shape[0]
    keys = Keys(load.hash_start, load.hashes, load.blocks_per_hash, load.shared_blocks, load.own_key)
    limited = False
    for g in range(own.span_limit.size):
        limited = limited or own.span_limit[g] > 0
    while True:
        if t[NOW] * TIE >= until_s:
            return PAUSED
        if _out_of_room(limits, engines, all_):
            return FULL
        n[EVENTS] += 1
        for r in range(ranks):
            engine, blocks = engine_at(engines, r), pool_at(pools, r)
            engine.t[NOW], engine.t[SEEN], engine.n[IN_FLIGHT] = t[NOW], t[SEEN], n[IN_FLIGHT]
            if limited:
                cross_spans(own.span_limit, own.span_restarts, engine.reach, engine.growing, engine.crossing,
                            engine.crossings, engine.n)  # fmt: skip
            take_completions(limits, load, keys, own, blocks, engine, out, limited)
            while all_.looked[r] < engine.n[FINISHED]:
                request = engine.finished[all_.looked[r]]
                all_.looked[r] += 1
                n[FINISHED] += 1
                if all_.again:
                    answered(load.arrival_s, load.think_s, load.child, load.sibling, load.roots, n, all_.order,
                             t[NOW], request)  # fmt: skip
        _take_arrivals(limits, load, engines, all_, t[SEEN] if n[IN_FLIGHT] else t[NOW])
        busy = False
        for r in range(ranks):
            waiting = waiting_of(limits, engines.n[r])
            if waiting == 0:
                engines.n[r, BLOCKED] = 0
            busy = busy or waiting > 0 or engines.n[r, RUNNING] > 0
        if not busy:
            n[IN_FLIGHT] = 0
            if n[PENDING] >= n[EXPECTED]:
                return ENDED
            following = load.arrival_s[all_.order[n[PENDING]]]
            if following >= until_s:
                return PAUSED
            t[NOW] = max(t[NOW], following)
            continue
        if _run_decodes(limits, load, own, decode, pools, engines, all_, limited, until_s):
            continue

        any_tokens, any_victims, finishing = False, False, False
        for r in range(ranks):
            engine, blocks = engine_at(engines, r), pool_at(pools, r)
            all_.scheduled[r], all_.chunks[r], all_.victims[r], short = plan_step(
                limits, load, keys, own, blocks, engine, out, waiting_of(limits, engine.n))
            all_.short[r] = 1 if short else 0
            any_tokens = any_tokens or all_.scheduled[r] + all_.chunks[r] > 0
            any_victims = any_victims or all_.victims[r] > 0
            finishing = finishing or engine.n[FINISHING] > 0
            if all_.scheduled[r] + all_.chunks[r] == 0 and all_.victims[r] > 0:
                request = engine.slots.request[engine.victims[all_.victims[r] - 1]]
                room, total = (limits.num_blocks - 1) * limits.block_size, load.prompt[request] + load.output[request]
                if engine.n[RUNNING] == 0 and room <= engine.known[request] < total:
                    n[AT_FAULT], n[GAPS] = request, r
                    return ENDLESS
        if any_tokens:
            _run_step(limits, own, prompts, decode, engines, all_, out, limited)
            continue
        if not any_victims and not n[IN_FLIGHT] and not finishing:
            if n[PENDING] >= n[EXPECTED]:
                for r in range(ranks):
                    if waiting_of(limits, engines.n[r]) > 0:
                        n[AT_FAULT], n[GAPS] = head_of(limits, load, engine_at(engines, r)), r
                return STUCK
            following = load.arrival_s[all_.order[n[PENDING]]]
            if following >= until_s:
                return PAUSED
            t[NOW] = max(t[NOW], following)
        elif any_victims and not n[IN_FLIGHT]:
            t[NOW] += limits.empty_step_s
        n[IN_FLIGHT] = 0


@inlined
def _out_of_room(limits: Limits, engines: Engine, all_: Together) -> bool:
    """Whether a log could overflow in the next step."""
    if all_.runs.shape[0] > 0 and all_.n[RUNS] >= all_.runs.shape[0]:
        return True
    rows, full = 3 * limits.seats + 16, False
    for r in range(engines.n.shape[0]):
        full = full or (engines.gaps.shape[1] > 0 and engines.n[r, GAPS] + rows > engines.gaps.shape[1])
    return full


@inlined
def _take_arrivals(limits: Limits, load: Load, engines: Engine, all_: Together, planned_at: float) -> None:
    """Requests that have come go to the rank with the least to do, waiting ones counted four times (vLLM's rule)."""
    n, latest = all_.n, planned_at * TIE
    while n[PENDING] < n[EXPECTED] and load.arrival_s[all_.order[n[PENDING]]] <= latest:
        request = all_.order[n[PENDING]]
        all_.order[n[ARRIVED]] = request
        n[PENDING] += 1
        n[ARRIVED] += 1
        best, least = 0, np.int64(1) << 60
        for r in range(engines.n.shape[0]):
            load_ = 4 * waiting_of(limits, engines.n[r]) + engines.n[r, RUNNING]
            if load_ < least:
                best, least = r, load_
        mine = engines.n[best]
        engines.order[best, mine[ARRIVED]] = request
        if limits.by_priority:
            urgency = load.urgency[request]
            mine[FRONT] = push(engines.front[best], mine[FRONT], urgency)
            if engines.front[best, 0] == urgency:
                mine[BLOCKED] = 0
        mine[ARRIVED] += 1
        mine[PENDING] = mine[EXPECTED] = mine[ARRIVED]
        if limits.by_priority:
            mine[ADMITTED] = mine[ARRIVED]


@inlined
def _run_decodes(
    limits: Limits, load: Load, own: StepCost, decode: DecodeCost, pools: Blocks, engines: Engine, all_: Together,
    limited: bool, until_s: float,
) -> bool:  # fmt: skip
    """Decode steps of all ranks up to the next event on any. False where a rank has something else to do."""
    n, t, ranks, groups = all_.n, all_.t, engines.n.shape[0], own.span_limit.size
    keep = all_.runs.shape[0] > 0
    most, total = 1 << 60, 0
    for r in range(ranks):
        mine = engines.n[r]
        waiting = waiting_of(limits, mine)
        if mine[PREFILLING] > 0 or mine[DECODING] > limits.budget or mine[LATE] > 0:
            return False
        if waiting > 0 and (mine[BLOCKED] == 0 or mine[DECODING] == 0):
            return False
        if mine[FINISHING] > 0 and (waiting > 0 or keep):
            most = 1
        if mine[DECODING] == 0:
            continue
        total += mine[DECODING]
        most = min(most, (engines.ends[r, 0] >> SLOT_BITS) - mine[STEPS])
        if limited and mine[CROSSINGS] > 0:
            most = min(most, (engines.crossings[r, 0] >> SLOT_BITS) - mine[STEPS])
    if total == 0:
        return False
    shared_s = curve_s(decode.shared.entries, decode.shared.dense, decode.shared.stride, total)
    slowest = -1
    for r in range(ranks):
        mine = engines.n[r]
        if mine[DECODING] == 0:
            continue
        line, rise = decode_line_s(decode, mine[DECODING], shared_s), 0.0
        for g in range(groups):
            if own.span_limit[g] == 0:
                line += own.span_rate[g] * mine[CONTEXTS]
                rise += own.span_rate[g] * mine[DECODING]
            else:
                line += own.span_rate[g] * engines.reach[r, g]
                rise += own.span_rate[g] * engines.growing[r, g]
        all_.line[r], all_.rise[r] = line, rise
        if slowest < 0:
            slowest = r
        else:
            ahead = line + rise - (all_.line[slowest] + all_.rise[slowest])
            if ahead > 0.0 or (ahead == 0.0 and rise > all_.rise[slowest]):
                slowest = r
    base_s, slope_s = all_.line[slowest], all_.rise[slowest]
    for r in range(ranks):
        if engines.n[r, DECODING] > 0 and all_.rise[r] > slope_s:
            most = min(most, max(int((base_s - all_.line[r]) / (all_.rise[r] - slope_s)), 1))
    if n[PENDING] < n[EXPECTED]:
        wait_s = load.arrival_s[all_.order[n[PENDING]]] / TIE - t[NOW]
        most = min(most, max(steps_to_reach(base_s, slope_s, wait_s, most) + limits.pipelined, 1))
    if until_s < np.inf:
        most = min(most, max(steps_to_reach(base_s, slope_s, until_s / TIE - t[NOW], most), 1))
    for r in range(ranks):
        mine = engines.n[r]
        if mine[DECODING] > 0:
            most = steps_with_blocks(engines.phases[r], mine[STEPS] % limits.block_size, mine[DECODING], mine[FREE],
                                     most)[0]  # fmt: skip
        if most == 0:
            return False
    now = t[NOW]
    if keep:
        _begin_row(all_, now, most, base_s, slope_s)
    for r in range(ranks):
        engine, blocks = engine_at(engines, r), pool_at(pools, r)
        mine = engine.n
        taken = 0
        if mine[DECODING] > 0:
            taken = steps_with_blocks(engine.phases, mine[STEPS] % limits.block_size, mine[DECODING], mine[FREE],
                                      most)[1]  # fmt: skip
        mine[FREE] -= taken
        if limits.caching:
            stash(blocks, taken)
        if keep:
            _add_to_row(limits, own, engine, all_, mine[DECODING], 0, 0, 0)
            all_.runs[n[RUNS] - 1, 4] += mine[DECODING]
        mine[STEPS] += most
        mine[CONTEXTS] += mine[DECODING] * most
        if limited:
            for g in range(groups):
                engine.reach[g] += engine.growing[g] * most
    t[SEEN] = now + run_s(base_s, slope_s, most - 1)
    t[NOW] = now + run_s(base_s, slope_s, most)
    n[IN_FLIGHT] = limits.pipelined
    return True


@inlined
def _run_step(
    limits: Limits, own: StepCost, prompts: PromptCost, decode: DecodeCost, engines: Engine, all_: Together,
    out: Outcome, limited: bool,
) -> None:  # fmt: skip
    """Run the step that all ranks have planned."""
    n, t, ranks, groups = all_.n, all_.t, engines.n.shape[0], own.span_limit.size
    tokens, prompt_tokens = 0, 0
    for r in range(ranks):
        engine = engine_at(engines, r)
        x = engine.x
        x[:] = 0.0
        x[X_DECODE] = all_.scheduled[r]
        x[X_SEQUENCES] = all_.scheduled[r]
        for i in range(all_.chunks[r]):
            slot = engine.chunks[i]
            add_chunk(own, x, engine.slots.taken[slot], engine.slots.computed[slot])
        tokens += all_.scheduled[r] + int(x[X_PROMPT])
        prompt_tokens += int(x[X_PROMPT])
    shared_s = 0.0
    if prompt_tokens > 0:
        shared_s = curve_s(prompts.shared.entries, prompts.shared.dense, prompts.shared.stride, tokens)
    else:
        shared_s = curve_s(decode.shared.entries, decode.shared.dense, decode.shared.stride, tokens)
    seconds = 0.0
    for r in range(ranks):
        engine = engine_at(engines, r)
        if all_.scheduled[r] + all_.chunks[r] == 0:
            continue
        reach_s = 0.0
        for g in range(groups):
            if all_.short[r]:
                reach_s += own.span_rate[g] * reach_of_taken(
                    engine.slots, engine.running, engine.n, own.span_limit[g], own.span_restarts[g])
            elif own.span_limit[g] == 0:
                reach_s += own.span_rate[g] * (engine.n[CONTEXTS] + all_.scheduled[r])
            else:
                reach_s += own.span_rate[g] * (engine.reach[g] + engine.growing[g])
        rank_s = reach_s
        if all_.chunks[r] == 0:
            rank_s += decode_line_s(decode, all_.scheduled[r], shared_s)
        else:
            mine = all_.scheduled[r] + int(engine.x[X_PROMPT])
            kernels_s = mixed_step_s(prompts.own, engine.x, mine, all_.scheduled[r] + all_.chunks[r], 0.0) + shared_s
            launch_s = prompts.launch_s if mine > prompts.graph_tokens else prompts.piece_s
            rank_s += launched_s(kernels_s, launch_s, own.power)
            rank_s += prompts.host_s + prompts.host_sequence_s * engine.x[X_SEQUENCES]
        seconds = max(seconds, rank_s)
    now = t[NOW]
    if all_.runs.shape[0] > 0:
        _begin_row(all_, now, 1, seconds, 0.0)
        for r in range(ranks):
            _add_to_row(limits, own, engine_at(engines, r), all_, all_.scheduled[r], all_.victims[r], all_.chunks[r],
                        all_.short[r])  # fmt: skip
    t[SEEN] = now
    t[NOW] = now + seconds
    n[IN_FLIGHT] = limits.pipelined
    for r in range(ranks):
        _settle(limits, own, engine_at(engines, r), all_, out, limited, r, now, t[NOW])


@inlined
def _settle(
    limits: Limits, own: StepCost, engine: Engine, all_: Together, out: Outcome, limited: bool, r: int, now: float,
    end_s: float,
) -> None:  # fmt: skip
    """The step has run on rank r. Prompts that are complete have their first token."""
    n, slots = engine.n, engine.slots
    engine.t[SEEN], engine.t[NOW] = now, end_s
    n[STEPS] += 1
    n[CONTEXTS] += n[DECODING]
    regular = n[DECODING]
    if all_.short[r]:
        regular = settle_by_request(slots, engine.running, engine.phases, engine.gaps, n, now, end_s)
        recount_spans(own.span_limit, own.span_restarts, engine.reach, engine.growing, engine.crossing,
                      engine.crossings, n, engine.running, slots.state, slots.offset)  # fmt: skip
    elif limited:
        for g in range(own.span_limit.size):
            engine.reach[g] += engine.growing[g]
    if all_.runs.shape[0] > 0:
        all_.runs[all_.n[RUNS] - 1, 4] += regular
    for i in range(all_.chunks[r]):
        slot = engine.chunks[i]
        slots.computed[slot] += slots.taken[slot]
        slots.taken[slot] = 0
        if slots.computed[slot] == slots.target[slot]:
            start_to_decode(limits, own, engine, out, slot, limited)
            if all_.runs.shape[0] > 0:
                all_.runs[all_.n[RUNS] - 1, 5] += 1.0


@part
def _begin(runs: Floats, n: Ints, start_s: float, steps: int, base_s: float, slope_s: float) -> None:
    row = runs[n[RUNS]]
    n[RUNS] += 1
    row[:] = 0.0
    row[0], row[1], row[2], row[3] = start_s, steps, base_s, slope_s


@inlined
def _begin_row(all_: Together, start_s: float, steps: int, base_s: float, slope_s: float) -> None:
    """A row of the run log; the ranks add themselves to it."""
    _begin(all_.runs, all_.n, start_s, steps, base_s, slope_s)


@inlined
def _add_to_row(
    limits: Limits, own: StepCost, engine: Engine, all_: Together, decodes: int, victims: int, chunks: int, short: int
) -> None:
    """Count a rank in the row that was begun last. Called before its steps are counted."""
    n, x = engine.n, engine.x
    row = all_.runs[all_.n[RUNS] - 1]
    row[5] += decodes
    row[6] += n[RUNNING] - n[FINISHING]
    row[7] += waiting_of(limits, n)
    row[8] += n[FREE]
    row[9] += victims
    row[11] += decodes
    pairs = x.size - FIRST_SPAN
    if chunks > 0:
        row[12] += x[X_PROMPT]
        row[13] += x[X_CACHED]
        row[14] += chunks
        for j in range(pairs):
            row[RUN_SPANS + j] += x[FIRST_SPAN + j]
    every = float(n[CONTEXTS] + decodes) if decodes > 0 else 0.0
    if short:
        every = reach_of_taken(engine.slots, engine.running, n, 0, 0)
    row[10] += every
    for g in range(own.span_limit.size):
        at = RUN_SPANS + pairs + 2 * g
        if own.span_limit[g] == 0:
            row[at] += every
            row[at + 1] += decodes
        elif short:
            row[at] += reach_of_taken(engine.slots, engine.running, n, own.span_limit[g], own.span_restarts[g])
        else:
            row[at] += engine.reach[g] + engine.growing[g]
            row[at + 1] += engine.growing[g]
