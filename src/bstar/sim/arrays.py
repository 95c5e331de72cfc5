"""Settings and loads as the kernel's arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bstar.sim.kernel.state import Blocks, Limits, Load, Outcome
from bstar.sim.settings import SchedulerSettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def limits_of(settings: SchedulerSettings) -> Limits:
    """The settings as numbers."""
    return Limits(
        block_size=settings.block_size, num_blocks=settings.num_blocks, seats=settings.seat_limit,
        budget=settings.token_budget, batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len, threshold=settings.long_prefill_token_threshold,
        adaptive=int(settings.long_prefill_token_threshold_adaptive), chunked=int(settings.enable_chunked_prefill),
        reserve_prompt=int(settings.scheduler_reserve_full_isl), by_priority=int(settings.policy == "priority"),
        pipelined=int(settings.async_scheduling), watermark=settings.watermark_blocks,
        caching=int(settings.enable_prefix_caching),
    )  # fmt: skip


def load_of(
    settings: SchedulerSettings, arrival_s: Floats, prompt: Ints, output: Ints, *, priority: Ints | None = None,
    clients: int = 0, think_s: Floats | None = None, prefix_ids: tuple[Ints, Ints, int] | None = None,
    prefix_tokens: Ints | None = None,
) -> tuple[Load, int]:  # fmt: skip
    """The load, and how many block keys it has.

    arrival_s      per request; in a closed loop those of the first `clients`, the rest are overwritten
    output         tokens asked for; cut at max_model_len here
    prefix_ids     (start per request, ids, blocks per id): what the leading blocks of each prompt hold
    prefix_tokens  how many leading tokens of each request those ids cover
    """
    n, size = len(prompt), settings.block_size
    made = np.maximum(np.minimum(output, settings.max_model_len - prompt), 1).astype(np.int64)
    number = np.arange(n, dtype=np.int64)
    by_urgency, urgency = number, number
    if priority is not None and settings.policy == "priority":
        by_urgency = np.lexsort((number, priority)).astype(np.int64)
        urgency = np.empty(n, dtype=np.int64)
        urgency[by_urgency] = number
    order = number.copy() if clients else np.argsort(arrival_s, kind="stable").astype(np.int64)
    none = np.zeros(1, dtype=np.int64)
    start, ids, per, shared, own, keys = none, none, 1, none, none, 0
    if settings.enable_prefix_caching:
        start, ids, per = prefix_ids if prefix_ids is not None else (np.zeros(n, dtype=np.int64), none, 1)
        shared = np.zeros(n, np.int64) if prefix_tokens is None else (np.asarray(prefix_tokens) // size).astype(np.int64)
        keys = (int(ids.max(initial=0)) + 1) * per
        blocks = np.maximum(-(-(prompt + made) // size) - shared, 0)
        own = (keys + np.concatenate(([0], np.cumsum(blocks)[:-1])) - shared).astype(np.int64)
        keys += int(blocks.sum())
    return Load(
        order=order, arrival_s=np.array(arrival_s, dtype=np.float64), prompt=np.ascontiguousarray(prompt, np.int64),
        output=made, urgency=urgency, by_urgency=by_urgency, clients=min(clients, n),
        think_s=np.zeros(n) if think_s is None else np.ascontiguousarray(think_s, np.float64),
        hash_start=start, hashes=ids, blocks_per_hash=per, shared_blocks=shared, own_key=own,
    ), keys  # fmt: skip


def outcome_of(count: int) -> Outcome:
    """Room for the results of `count` requests."""
    return Outcome(
        scheduled_s=np.full(count, np.nan), first_token_s=np.full(count, np.nan), finish_s=np.full(count, np.nan),
        preemptions=np.zeros(count, dtype=np.int64), cached_tokens=np.zeros(count, dtype=np.int64),
    )  # fmt: skip


def blocks_of(settings: SchedulerSettings, load: Load, keys: int) -> Blocks:
    """The block pool, all free in order of number; a stub where nothing is cached."""
    small = np.int32
    if not settings.enable_prefix_caching:
        one, ones = np.zeros(1, small), np.zeros(1, np.int64)
        return Blocks(one, one, one, ones, one, one, one, np.zeros((1, 1), small), ones, ones, one, ones)
    n, seats = settings.num_blocks, settings.seat_limit + 1
    ring = np.arange(n, dtype=small)
    longest = int((load.prompt + load.output).max(initial=1))
    return Blocks(
        after=np.roll(ring, -1), before=np.roll(ring, 1), references=np.zeros(n, small),
        key=np.full(n, -1, dtype=np.int64), first=np.zeros(keys + 1, small), younger=ring.copy(), older=ring.copy(),
        table=np.zeros((seats, -(-longest // settings.block_size) + 1), small), held=np.zeros(seats, np.int64),
        named=np.zeros(seats, np.int64), stash=np.zeros(n, small), sizes=np.zeros(1, np.int64),
    )  # fmt: skip
