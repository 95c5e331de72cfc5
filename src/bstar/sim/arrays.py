"""Settings, loads and engines as the kernel's arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bstar.errors import SpecError
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.state import (
    EXPECTED,
    FREE,
    LEAST_FREE,
    NUM_COUNTS,
    PENDING,
    RUN_SPANS,
    SLOT_BITS,
    TAIL,
    UNUSED,
    Blocks,
    Engine,
    Limits,
    Load,
    Outcome,
    Slots,
)
from bstar.sim.settings import SchedulerSettings
from bstar.traffic.load import Traffic, is_constant

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]

_SMALL = np.int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelLoad:
    """A load for one engine or many; per-request arrays are shared by the engines that run it.

    load    by request number
    order   requests whose arrival is given, in the order of arrival
    keys    how many different blocks there can be (prefix caching)
    """

    load: Load
    order: SmallInts
    keys: int


def kernel_load(settings: SchedulerSettings, traffic: Traffic) -> KernelLoad:
    """The requests of `traffic` for engines with these settings.

    Raises SpecError on a prompt that does not leave room for a token within max_model_len.
    """
    longest = int(traffic.input_tokens.max())
    if longest >= settings.max_model_len:
        raise SpecError(f"input_tokens: a prompt of {longest} tokens needs a max_model_len above it, "
                        f"is {settings.max_model_len}")  # fmt: skip
    n = traffic.num_requests
    prompt = np.asarray(traffic.input_tokens).astype(_SMALL)
    output = np.maximum(np.minimum(traffic.output_tokens, settings.max_model_len - prompt), 1).astype(_SMALL)
    urgency, by_urgency = _urgencies(settings, traffic)
    roots, child, sibling = _turns(traffic)
    given = traffic.num_scheduled
    start, ids, per, shared, own, keys = _keys(settings, traffic, prompt, output)
    return KernelLoad(
        load=Load(
            arrival_s=np.array(traffic.arrival_s, dtype=np.float64), prompt=prompt, output=output, urgency=urgency,
            by_urgency=by_urgency, roots=roots, child=child, sibling=sibling,
            think_s=np.array(traffic.think_s, dtype=np.float64) if given < n else np.zeros(1), hash_start=start,
            hashes=ids, blocks_per_hash=per, shared_blocks=shared, own_key=own,
        ),
        order=np.arange(given, dtype=_SMALL), keys=keys,
    )  # fmt: skip


def _urgencies(settings: SchedulerSettings, traffic: Traffic) -> tuple[SmallInts, SmallInts]:
    """Ranks in (priority, number), and the requests in that order; stubs where nothing goes by priority."""
    if settings.policy != "priority":
        return np.zeros(1, _SMALL), np.zeros(1, _SMALL)
    number = np.arange(traffic.num_requests)
    by_urgency = np.lexsort((number, np.asarray(traffic.priority))).astype(_SMALL)
    urgency = np.empty_like(by_urgency)
    urgency[by_urgency] = number
    return urgency, by_urgency


def _turns(traffic: Traffic) -> tuple[SmallInts, SmallInts, SmallInts]:
    """(requests that free clients send, first child and next sibling of each request)."""
    n, none = traffic.num_requests, np.zeros(0, _SMALL)
    undecided = np.isnan(traffic.arrival_s)
    if not undecided.any():
        return none, none, none
    roots = none
    if traffic.concurrency is not None:
        roots = np.flatnonzero(undecided & (np.asarray(traffic.parent) < 0)).astype(_SMALL)
    if not traffic.has_sessions:
        return roots, none, none
    child, sibling = np.full(n, -1, _SMALL), np.full(n, -1, _SMALL)
    parents = traffic.parent
    for r in np.flatnonzero(undecided & (np.asarray(parents) >= 0))[::-1]:
        sibling[r] = child[parents[r]]
        child[parents[r]] = r
    return roots, child, sibling


def _keys(
    settings: SchedulerSettings, traffic: Traffic, prompt: SmallInts, output: SmallInts
) -> tuple[Ints, Ints, int, SmallInts, Ints, int]:
    """What the blocks of each request hold (Load.hash_start … own_key), and how many keys there are."""
    n, size, one = traffic.num_requests, settings.block_size, np.zeros(1, np.int64)
    if not settings.enable_prefix_caching:
        return one, one, 1, np.zeros(1, _SMALL), one, 0
    start, ids, per, shared = _shared_keys(settings, traffic)
    keys = (int(ids.max(initial=-1)) + 1) * per
    blocks = (-(-(prompt + output) // size)).astype(np.int64)
    stream = _streams(traffic)
    if stream is None:
        blocks = np.maximum(blocks - shared, 0)
        own = keys + np.cumsum(blocks) - blocks - shared
        return start, ids, per, shared.astype(_SMALL), own, keys + int(blocks.sum())
    longest = np.zeros(n, dtype=np.int64)
    np.maximum.at(longest, stream, blocks)
    own = keys + (np.cumsum(longest) - longest)[stream]
    return start, ids, per, shared.astype(_SMALL), own, keys + int(longest.sum())


def _streams(traffic: Traffic) -> Ints | None:
    """Per request, the conversation whose text it continues, named by its first request; None without sessions."""
    if not traffic.has_sessions:
        return None
    stream, continued = np.arange(traffic.num_requests), np.zeros(traffic.num_requests, dtype=np.bool_)
    parents, inputs, outputs = traffic.parent, traffic.input_tokens, traffic.output_tokens
    for r in np.flatnonzero(np.asarray(parents) >= 0):
        parent = parents[r]
        # One text can go on in one way; a second child, or one without the whole history, starts anew.
        if not continued[parent] and inputs[r] >= inputs[parent] + outputs[parent]:
            stream[r] = stream[parent]
            continued[parent] = True
    return stream


def _shared_keys(settings: SchedulerSettings, traffic: Traffic) -> tuple[Ints, Ints, int, Ints]:
    """(start per request, ids, blocks per id, leading blocks that they cover)."""
    n, size, hashes = traffic.num_requests, settings.block_size, traffic.block_hashes
    if hashes is not None:
        unit, counts = hashes.tokens_per_block, np.diff(hashes.offsets)
        shared = np.minimum(np.asarray(traffic.input_tokens) // size, counts * unit // size)
        if unit % size == 0:
            return hashes.offsets[:-1].astype(np.int64), hashes.ids.astype(np.int64), unit // size, shared
        start = np.cumsum(shared) - shared
        number = np.arange(int(shared.sum())) - np.repeat(start, shared)
        place = np.repeat(hashes.offsets[:-1], shared) + ((number + 1) * size - 1) // unit
        pairs = hashes.ids[place] * (int(shared.max(initial=0)) + 1) + number
        return start, np.unique(pairs, return_inverse=True)[1].astype(np.int64), 1, shared
    if is_constant(traffic.prefix_group) and int(traffic.prefix_group[0]) < 0:
        return np.zeros(n, np.int64), np.zeros(0, np.int64), 1, np.zeros(n, np.int64)
    groups, group = np.unique(np.asarray(traffic.prefix_group), return_inverse=True)
    shared = np.where(np.asarray(traffic.prefix_group) >= 0, np.asarray(traffic.prefix_tokens) // size, 0)
    longest = int(shared.max()) + 1
    return (group * longest).astype(np.int64), np.arange(len(groups) * longest, dtype=np.int64), 1, shared


def limits_of(settings: SchedulerSettings, *, feedback: bool = False, empty_step_s: float = 0.0) -> Limits:
    """The settings as numbers."""
    return Limits(
        block_size=settings.block_size, num_blocks=settings.num_blocks, seats=settings.seat_limit,
        budget=settings.token_budget, batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len, threshold=settings.long_prefill_token_threshold,
        adaptive=int(settings.long_prefill_token_threshold_adaptive), chunked=int(settings.enable_chunked_prefill),
        reserve_prompt=int(settings.scheduler_reserve_full_isl), by_priority=int(settings.policy == "priority"),
        pipelined=int(settings.async_scheduling), watermark=settings.watermark_blocks,
        caching=int(settings.enable_prefix_caching), feedback=int(feedback), empty_step_s=float(empty_step_s),
    )  # fmt: skip


def outcome_of(count: int) -> Outcome:
    """Room for the results of `count` requests."""
    return Outcome(
        scheduled_s=np.full(count, np.nan), first_token_s=np.full(count, np.nan), finish_s=np.full(count, np.nan),
        preemptions=np.zeros(count, _SMALL), cached_tokens=np.zeros(count, _SMALL),
    )  # fmt: skip


def blocks_of(settings: SchedulerSettings, loaded: KernelLoad) -> Blocks:
    """The block pool, all free in order of number; a stub where nothing is cached."""
    if not settings.enable_prefix_caching:
        one, ones = np.zeros(1, _SMALL), np.zeros(1, np.int64)
        return Blocks(one, one, one, ones, one, one, one, np.zeros((1, 1), _SMALL), ones, ones, one, ones)
    n, seats = settings.num_blocks, settings.seat_limit + 1
    ring = np.arange(n, dtype=_SMALL)
    longest = int((loaded.load.prompt + loaded.load.output).max(initial=1))
    return Blocks(
        after=np.roll(ring, -1), before=np.roll(ring, 1), references=np.zeros(n, _SMALL),
        key=np.full(n, -1, dtype=np.int64), first=np.zeros(loaded.keys + 1, _SMALL), younger=ring.copy(),
        older=ring.copy(), table=np.zeros((seats, -(-longest // settings.block_size) + 1), _SMALL),
        held=np.zeros(seats, np.int64), named=np.zeros(seats, np.int64), stash=np.zeros(n, _SMALL),
        sizes=np.zeros(1, np.int64),
    )  # fmt: skip


def engine_of(
    settings: SchedulerSettings, cost: StepCost, order: ArrayLike, num_requests: int, *, log_rows: int = 0,
    run_rows: int = 0, list_finished: bool = False, first_place: int = 0,
) -> Engine:  # fmt: skip
    """An idle engine at time 0 that expects the requests `order`; they start at `first_place` of `order`."""
    seats = settings.seat_limit + 1
    groups = len(cost.span_limit)
    if seats * max(groups, 1) >= 1 << SLOT_BITS:
        raise SpecError(f"max_num_seqs: the simulator takes at most {(1 << SLOT_BITS) // max(groups, 1) - 2:,}")
    queue = np.zeros(num_requests, _SMALL)
    known = np.asarray(order, dtype=_SMALL)
    queue[first_place : first_place + known.size] = known
    n = np.zeros(NUM_COUNTS, np.int64)
    n[TAIL], n[UNUSED], n[FREE] = -1, seats, settings.num_blocks - 1
    n[PENDING], n[EXPECTED] = first_place, first_place + known.size
    n[LEAST_FREE] = n[FREE]
    room = num_requests if settings.policy == "priority" else seats
    return Engine(
        n=n, t=np.zeros(2), slots=_slots(seats), order=queue, known=np.zeros(num_requests, _SMALL),
        last_s=np.zeros(num_requests), running=np.full(4 * seats + 16, -1, dtype=np.int64),
        unused=np.arange(seats - 1, -1, -1, dtype=np.int64), ends=np.empty(4 * seats + 64, np.int64),
        front=np.empty(room + 1, np.int64), phases=np.zeros(settings.block_size, np.int64),
        leaving=np.empty(seats, np.int64), done=np.empty(seats, np.int64), victims=np.empty(seats, np.int64),
        chunks=np.empty(seats, np.int64), reach=np.zeros(groups, np.int64), growing=np.zeros(groups, np.int64),
        crossing=np.full(seats * max(groups, 1), -1, dtype=np.int64),
        crossings=np.empty(4 * seats * max(groups, 1) + 64, np.int64), x=np.zeros(len(cost.linear)),
        log=np.zeros((log_rows, 3), np.int64), log_s=np.zeros(log_rows),
        runs=np.zeros((run_rows, RUN_SPANS + 2 * len(cost.prompt_limit) + 2 * groups)),
        gaps=np.zeros(max(run_rows, 8 * seats + 64) if run_rows else 0),
        finished=np.zeros(num_requests if list_finished else 0, _SMALL),
    )  # fmt: skip


def _slots(count: int) -> Slots:
    def filled(value: int) -> Ints:
        return np.full(count, value, dtype=np.int64)

    return Slots(
        request=filled(-1), state=filled(0), place=filled(-1), target=filled(0), total=filled(0), computed=filled(0),
        offset=filled(0), taken=filled(0), ends=filled(-1), last_s=np.full(count, np.nan),
    )  # fmt: skip
