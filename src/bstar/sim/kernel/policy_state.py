"""What the kernel of SGLang's and TensorRT-LLM's schedulers and of swapping reads and writes: flat arrays.

The lists of running requests are short and are walked at every event; nothing is walked between events.
"""

from __future__ import annotations

from typing import NamedTuple

from bstar.sim.kernel.state import Floats, Ints

SGLANG, NO_EVICT, MAX_UTILIZATION, SWAPPING = 0, 1, 2, 3

# PolicyState.n
FREE = 0  # free blocks
HEAD, WAITING = 1, 2  # of the ring `queue`
ARRIVED, LOOKED, EXPECTED = 3, 4, 5  # of `order`: arrived; seen by the scheduler (SGLang polls); known
NEXT = 6  # first request that no client has sent
BATCH = 7  # running requests (SGLang: those that decode)
PREFILLED = 8  # SGLang: requests of the last prompt step
CHUNKED = 9  # SGLang: the request whose prompt is not done; -1
FULL_BATCH = 10  # SGLang: nobody looks at the queue until a request ends
POLLS, DECAYS = 11, 12  # SGLang: steps since the last look; decode steps since the ratio was set
ALIVE = 13  # requests that hold a place (SGLang's `running`)
STEP = 14  # entries of the step being planned
VICTIMS = 15
FLIGHT, FLIGHT_ROW, IN_FLIGHT = 16, 17, 18  # samples of the step that runs (async scheduling), its row, whether
ROWS, GAPS = 19, 20
FINISHED, AT_FAULT, EVENTS, STEPS = 21, 22, 23, 24
SWAPPED = 25  # requests at the head of the queue whose cache is in host memory
MOVED = 26  # blocks that the step being planned moves to or from host memory
WAITED = 27  # TensorRT-LLM: steps that prompts have been kept waiting for others
HELD_BACK = 28  # TensorRT-LLM: whether the step being planned keeps prompts waiting
NUM_COUNTS = 29
# PolicyState.t
NOW, SEEN, RATIO, FLIGHT_START, EXTRA = 0, 1, 2, 3, 4


class Rules(NamedTuple):
    """The settings as numbers; flags are 0 or 1.

    chunk    SGLang: prompt tokens of a step; TensorRT-LLM: the unit of chunks; 0: prompts are not split
    threshold … watermark   vLLM's, as in `kernel.state.Limits`
    swap, block_s, latency_s   whether the preempted go to host memory; seconds per block and per transfer
    wait_iters, wait_tokens    TensorRT-LLM: steps that prompts wait at most beside generation, and the tokens of a step
                               that end it (0 and 0: they do not wait)
    """

    scheme: int
    block_size: int
    num_blocks: int
    seats: int
    budget: int
    max_model_len: int
    pipelined: int
    chunk: int
    max_prefill: int
    mixed: int
    recv_interval: int
    clip: int
    retract_steps: int
    first_ratio: float
    least_ratio: float
    decay: float
    clients: int
    chunked: int
    threshold: int
    adaptive: int
    batched_tokens: int
    reserve: int
    watermark: int
    swap: int
    block_s: float
    latency_s: float
    wait_iters: int
    wait_tokens: float


class Requests(NamedTuple):
    """By number. output: tokens that will be made; grants: tokens that its answer may have (an admission's view)."""

    arrival_s: Floats
    prompt: Ints
    output: Ints
    grants: Ints
    think_s: Floats


class PolicyState(NamedTuple):
    """Per request: known, promised, computed, target, held (blocks), kept (tokens in host memory), gone (1: finished),
    last_s (its last token).

    queue, order       rings and lists of request numbers
    batch, prefilled   running requests
    step, take         requests of the step being planned, and their tokens
    fit, victims, flight, phases   scratch
    """

    known: Ints
    promised: Ints
    computed: Ints
    target: Ints
    held: Ints
    kept: Ints
    gone: Ints
    preemptions: Ints
    scheduled_s: Floats
    first_s: Floats
    finish_s: Floats
    last_s: Floats
    queue: Ints
    order: Ints
    batch: Ints
    prefilled: Ints
    step: Ints
    take: Ints
    fit: Ints
    fit_tokens: Ints
    victims: Ints
    flight: Ints
    phases: Ints
    x: Floats
    n: Ints
    t: Floats
