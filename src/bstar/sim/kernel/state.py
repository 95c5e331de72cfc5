"""What the kernel reads and writes: flat arrays in NamedTuples, no objects.

    request   one line of the load, by number; ties are broken by it
    slot      a running request's place in the small arrays that stay in the processor's cache
    steps     steps that have been run so far; a decoding slot has steps - offset tokens in the cache

`Engine.n` and `Engine.t` hold everything that is a single number, by the indices below, so that a run can stop at
any planning point and go on later.
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

# How `advance` returned: nothing left; at until_s; a request that can never be scheduled; one that outgrows the
# cache; a log without room for another step.
ENDED, PAUSED, STUCK, ENDLESS, FULL = 0, 1, 2, 3, 4
# Rows of the decision log: (kind, a, b).
LOG_SCHEDULED, LOG_PREEMPTED, LOG_STEPS, LOG_CACHED = 0, 1, 2, 3

# Engine.n
STEPS = 0
DECODING = 1  # slots that decode, …
CONTEXTS = 2  # … and their tokens in the cache
PREFILLING = 3
TAIL = 4  # the last slot of the running list, if it prefills; else -1
FREE = 5  # free blocks
ENTRIES = 6  # of the running list, dead ones included
RUNNING = 7  # requests that hold a seat
ENDS = 8  # size of the heap of completions
CROSSINGS = 9  # size of the heap of window crossings
FRONT = 10  # preempted requests, last in first out; by priority: all that wait, a heap of urgencies
FINISHING = 11  # slots in state DONE
UNUSED = 12  # empty slots on the stack
ARRIVED, ADMITTED, EXPECTED = 13, 14, 15  # `order`: end of those that have arrived, of those admitted, of all
NEXT_ROOT = 16  # first request that no client has sent
BLOCKED = 17  # 1: the head of the queue waits for a completion; 2: for fewer decoding slots (tokens)
IN_FLIGHT = 18  # a step runs whose outputs are not known yet (async scheduling)
LATE = 19  # decoding slots that were passed over in the last step
LOGGED, RUNS, GAPS, FINISHED = 20, 21, 22, 23  # rows in use
EVENTS, LOOKS, LEAST_FREE, AT_FAULT = 24, 25, 26, 27
PENDING = 28  # `order`: first of those that are still to come
NUM_COUNTS = 29
# Engine.t
NOW, SEEN = 0, 1  # the clock; when the step in flight was started

# Columns of the run log, then pairs and keys per prompt span, then reach and growth per decode span.
(RUN_START_S, RUN_STEPS, RUN_BASE_S, RUN_SLOPE_S, RUN_REGULAR, RUN_SAMPLED, RUN_RUNNING, RUN_WAITING, RUN_FREE,
 RUN_PREEMPTED, RUN_CONTEXTS, RUN_DECODES, RUN_PROMPT, RUN_CACHED, RUN_CHUNKS, RUN_SPANS) = range(16)  # fmt: skip


class Limits(NamedTuple):
    """`bstar.sim.settings.SchedulerSettings` as numbers; flags are 0 or 1.

    feedback       answers make further requests arrive (closed loops, sessions)
    empty_step_s   seconds of a step that schedules nothing
    """

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
    feedback: int
    empty_step_s: float


class Load(NamedTuple):
    """Requests by number; arrays that are not needed have one entry (`roots`, `child`: none).

    arrival_s   given, or written when an answer makes the request arrive
    output      tokens that will be made, max_model_len respected
    urgency     rank in (priority, number), smallest first; by_urgency is its inverse
    roots       requests that free clients send, in order
    child, sibling   first later turn of a request, and the next one with the same parent; -1
    think_s     from the answer to the request
    hash_start, hashes, blocks_per_hash, shared_blocks, own_key   what blocks hold: block i of request r has key
                hashes[hash_start[r] + i // blocks_per_hash] · blocks_per_hash + i % blocks_per_hash
                below shared_blocks[r], own_key[r] + i from there
    """

    arrival_s: Floats
    prompt: SmallInts
    output: SmallInts
    urgency: SmallInts
    by_urgency: SmallInts
    roots: SmallInts
    child: SmallInts
    sibling: SmallInts
    think_s: Floats
    hash_start: Ints
    hashes: Ints
    blocks_per_hash: int
    shared_blocks: SmallInts
    own_key: Ints


class Keys(NamedTuple):
    """The part of a load that says what blocks hold."""

    hash_start: Ints
    hashes: Ints
    blocks_per_hash: int
    shared_blocks: SmallInts
    own_key: Ints


class Outcome(NamedTuple):
    """Written per request: seconds (nan where it did not happen) and counts."""

    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    preemptions: SmallInts
    cached_tokens: SmallInts


class Slots(NamedTuple):
    """Written per slot.

    place     index of its entry in the running list, -1: none
    target    tokens to compute before its next token
    total     tokens when it is done, prompt included
    computed  while it prefills; decoding: steps - offset
    taken     tokens given to it in the step being planned
    ends      its key in the heap of completions
    last_s    its last token, where it was passed over since; else nan
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
    last_s: Floats


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


class Engine(NamedTuple):
    """Where one engine stands.

    n, t        numbers and times, by the indices above
    order       requests in the order of arrival: those that have arrived, room, those still to come
    known       tokens of a preempted request, prompt and generated (0: the prompt)
    last_s      last token of a preempted request
    running     slots in the order of admission; -1: gone
    phases      decoding slots that take a new block in the steps with steps mod block_size = index
    leaving, done, victims, chunks   slots, by what happens to them at this point
    reach, growing, crossing, crossings   see `spans`
    x           counts of the step being planned, see `cost`
    log, log_s  decisions, and when a step starts; no rows: none are kept
    runs, gaps  the run log, and gaps between tokens that are no single step; no rows: none are kept
    finished    requests in the order of finishing; no rows: not kept
    """

    n: Ints
    t: Floats
    slots: Slots
    order: SmallInts
    known: SmallInts
    last_s: Floats
    running: Ints
    unused: Ints
    ends: Ints
    front: Ints
    phases: Ints
    leaving: Ints
    done: Ints
    victims: Ints
    chunks: Ints
    reach: Ints
    growing: Ints
    crossing: Ints
    crossings: Ints
    x: Floats
    log: Ints
    log_s: Floats
    runs: Floats
    gaps: Floats
    finished: SmallInts
