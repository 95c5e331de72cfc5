"""What the kernel reads and writes: flat arrays in NamedTuples, no objects.

    request   one line of the load, by number; ties are broken by it
    slot      a running request's place in the small arrays that stay in the processor's cache
    D         steps that have been run so far; a decoding slot has D - offset tokens in the cache
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]

# Heap keys are step · 2^SLOT_BITS + slot.
SLOT_BITS = 20
SLOT_MASK = (1 << SLOT_BITS) - 1

EMPTY, PREFILL, DECODE, DONE = 0, 1, 2, 3  # DONE: has its last token, still holds its seat (async scheduling)

# An arrival within this of a step's start joins that step.
TIE = 1.0 + 1e-9

# How a run ended.
ENDED, STUCK, LOG_FULL, ENDLESS = 0, 1, 2, 3
# Rows of the log: (kind, a, b).
LOG_SCHEDULED, LOG_PREEMPTED, LOG_STEPS, LOG_CACHED = 0, 1, 2, 3


class Limits(NamedTuple):
    """`bstar.sim.settings.SchedulerSettings` as numbers; flags are 0 or 1."""

    block_size: int
    num_blocks: int
    seats: int
    budget: int
    batched_tokens: int
    max_model_len: int
    threshold: int
    adaptive: int
    chunked: int
    reserve_prompt: int
    by_priority: int
    pipelined: int
    watermark: int
    caching: int


class Load(NamedTuple):
    """Requests by number.

    order       requests in the order of arrival (open loop: all; closed loop: filled as they arrive)
    arrival_s   closed loop: the first `clients` are given, the rest are written
    output      tokens that will be made, max_model_len respected
    urgency     rank in (priority, number), smallest first; by_urgency is its inverse
    clients     0: open loop
    think_s     closed loop: from an answer to this request
    hash_start, hashes, blocks_per_hash, shared_blocks, own_key   what blocks hold: block i of request r has key
                hashes[hash_start[r] + i // blocks_per_hash] · blocks_per_hash + i % blocks_per_hash
                below shared_blocks[r], own_key[r] + i from there
    """

    order: Ints
    arrival_s: Floats
    prompt: Ints
    output: Ints
    urgency: Ints
    by_urgency: Ints
    clients: int
    think_s: Floats
    hash_start: Ints
    hashes: Ints
    blocks_per_hash: int
    shared_blocks: Ints
    own_key: Ints


class Outcome(NamedTuple):
    """Written per request: seconds (nan where it did not happen) and counts."""

    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    preemptions: Ints
    cached_tokens: Ints


class Slots(NamedTuple):
    """Written per slot.

    place     index of its entry in the running list, -1: none
    target    tokens to compute before its next token
    total     tokens when it is done, prompt included
    computed  while it prefills; decoding: D - offset
    taken     tokens given to it in the step being planned
    ends      its key in the completions heap
    """

    request: Ints
    state: Ints
    place: Ints
    target: Ints
    total: Ints
    computed: Ints
    offset: Ints
    taken: Ints
    ends: Ints


class Blocks(NamedTuple):
    """The block pool (prefix caching only). Block 0 is the null block and the head of the free queue's ring.

    after, before   the free queue
    key, first      key of a block (-1: none); oldest block of a key (0: none)
    younger, older  ring of the blocks of one key
    table, held, named   per slot: its blocks, how many it has been dealt, how many have a key
    stash           blocks taken for decoding slots and not dealt yet; which slot gets which does not matter
    sizes           [0] blocks in the stash
    """

    after: SmallInts
    before: SmallInts
    references: SmallInts
    key: Ints
    first: SmallInts
    younger: SmallInts
    older: SmallInts
    table: SmallInts
    held: Ints
    named: Ints
    stash: SmallInts
    sizes: Ints
