"""Which wall a server stands at: rules over the evidence, each with the sentence that says why.

Rules go from what the counters prove to what the physics tells:

    client_limited     the load's client was the limit; or nothing waits and nobody says what a step is bound by: then
                       the load that comes is the limit, not the server
    idle               hardly anything runs
    kv_capacity        requests are preempted, or wait while the cache has no room for the next prompt
    max_num_seqs       requests wait while every seat is taken and the cache has room
    token_budget       requests wait, or prefill is cut up, while steps are filled to the token budget
    compute_bound      a step's arithmetic takes longer than its reading
    overhead_bound     most of a step is neither arithmetic nor reading
    weight_bound       B ≤ B*/8: a larger batch is nearly free
    saturating         B*/8 < B ≤ B*
    kv_bandwidth       B > B*: reading the cache dominates

The last five need the deployment (model, GPU); without it the GPU's own counters decide where they are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from bstar.tuning.evidence import Evidence
from bstar.tuning.use import Use
from bstar.units import format_seconds

Wall = Literal[
    "client_limited", "idle", "kv_capacity", "max_num_seqs", "token_budget", "compute_bound", "overhead_bound",
    "weight_bound", "saturating", "kv_bandwidth", "unknown",
]  # fmt: skip
TITLES: Final[dict[Wall, str]] = {
    "client_limited": "the load is the limit (client-limited)", "idle": "idle", "kv_capacity": "KV-cache capacity",
    "max_num_seqs": "max_num_seqs", "token_budget": "token budget (prefill-starved)", "compute_bound": "compute-bound",
    "overhead_bound": "overhead-bound", "weight_bound": "weight-bound: a larger batch is nearly free",
    "saturating": "saturating", "kv_bandwidth": "KV bandwidth: beyond B*", "unknown": "no wall seen",
}  # fmt: skip

# Below: what counts as "often", "full" and "most". None of them is fitted; the margins between planted situations and
# these are wide (tests/vllm/test_walls_vllm.py).
_IDLE_RUNNING = 0.5
_OFTEN = 0.3
_FREE_SEATS = 0.1
_FULL_STEP = 0.8
_MOST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A wall, and the sentences that say why. `also` walls are near, in the order of importance."""

    wall: Wall
    because: tuple[str, ...]
    also: tuple[Wall, ...] = ()

    @property
    def title(self) -> str:
        return TITLES[self.wall]


def find_wall(seen: Evidence, use: Use | None = None) -> Finding:
    """The wall of a window; `use` is what the physics says of it."""
    if seen.client_limits:
        return Finding(wall="client_limited", because=(*seen.client_limits, "the client was measured, not the server"))
    if not seen.mean_running > _IDLE_RUNNING and not seen.mean_waiting > _IDLE_RUNNING:
        return Finding(wall="idle", because=(f"{seen.mean_running:.2g} requests run on average",))
    queue = _queue_wall(seen)
    inside = _inside(seen, use)
    if queue is not None:
        also = () if inside is None or inside.wall == "unknown" else (inside.wall,)
        return Finding(wall=queue.wall, because=queue.because, also=also)
    return inside if inside is not None else _by_the_load(seen)


def _by_the_load(seen: Evidence) -> Finding:
    """No wall of the server: more requests would be served at once."""
    seats = "" if seen.max_num_seqs is None else f" of {seen.max_num_seqs:,} seats"
    return Finding(wall="client_limited", because=(
        f"no request waits for long and none was preempted; {seen.mean_running:.3g}{seats} run on average",
        *_usage(seen), "the load that comes is the limit, not the server; give the model and GPU to see what a step is "
        "bound by"))


def _queue_wall(seen: Evidence) -> Finding | None:
    """The walls that requests wait at."""
    if seen.preemptions > 0:
        return Finding(wall="kv_capacity", because=(
            f"{seen.preemptions:,.0f} preemptions in {format_seconds(seen.duration_s)}",
            *_usage(seen)))  # fmt: skip
    starved = _starved(seen)
    if not seen.waiting_share >= _OFTEN:
        return starved if starved is not None and seen.prompt_share > _MOST else None
    waits = f"{seen.mean_waiting:.3g} requests wait on average, at {seen.waiting_share:.0%} of the scrapes"
    if _cache_full(seen):
        return Finding(wall="kv_capacity", because=(waits, *_usage(seen)))
    seats, known = _seats(seen)
    if seats is not None and (known or starved is None):
        taken = seen.running >= seats - max(_FREE_SEATS * seats, 1.0)
        # Seats are free for a moment between an answer and the next admission: most scrapes decide, not the mean.
        if float(np.mean(taken)) >= _MOST:
            told = "max_num_seqs" if known else "as many as ever run at a time here"
            return Finding(wall="max_num_seqs", because=(
                waits, f"{seen.mean_running:.3g} of {seats:,} seats ({told}) are taken on average", *_usage(seen)))
    if starved is not None:
        return Finding(wall="token_budget", because=(waits, *starved.because))
    if seen.prompt_share > _MOST:
        return Finding(wall="token_budget", because=(
            waits, f"neither seats nor cache are full, and {seen.prompt_share:.0%} of all tokens are prompt: prompts "
            "wait for their turn in a step"))
    return Finding(wall="unknown", because=(
        waits, *_usage(seen), "neither seats, cache nor steps are seen to be full; give --max-num-seqs and "
        "--max-num-batched-tokens as the server was started"))


def _usage(seen: Evidence) -> tuple[str, ...]:
    if not seen.kv_usage.size:
        return ()
    return (f"the KV cache is {seen.kv_usage.mean():.0%} full on average, {seen.kv_usage.max():.0%} at most",)


def _cache_full(seen: Evidence) -> bool:
    """Whether the next prompt finds no room: that is what makes it wait, not that the last block is taken."""
    if not seen.kv_usage.size:
        return False
    needed = seen.mean_of("input_tokens")
    room = 0.1 if math.isnan(needed) or not seen.kv_total_tokens > 0 else min(
        max(1.25 * needed / seen.kv_total_tokens, 0.05), 0.6)  # fmt: skip
    return float(np.median(seen.kv_usage)) >= 1.0 - room


def _seats(seen: Evidence) -> tuple[int | None, bool]:
    """(seats, whether they were told). Untold: a number that running keeps to while others wait."""
    if seen.max_num_seqs is not None:
        return seen.max_num_seqs, True
    if seen.running.size < 3:
        return None, False
    most = float(seen.running.max())
    near = seen.running >= most - max(_FREE_SEATS * most, 1.0)
    return (int(most), False) if most >= 1 and float(np.mean(near)) >= _MOST else (None, False)


def _starved(seen: Evidence) -> Finding | None:
    """Steps filled to the token budget, mostly with prompts."""
    budget, tokens = seen.max_num_batched_tokens, seen.step_tokens
    if budget is None or math.isnan(tokens):
        return None
    if tokens >= _FULL_STEP * budget and not seen.prompt_share < _MOST:
        return Finding(wall="token_budget", because=(
            f"a step holds {tokens:,.0f} of {budget:,} tokens on average, {seen.prompt_share:.0%} of them prompt",))
    return None


def _inside(seen: Evidence, use: Use | None) -> Finding | None:
    """What a step is bound by."""
    if use is None:
        return _by_gpu(seen)
    said = (f"batch {use.batch:.3g} at {use.context:,.0f} tokens: a step takes {format_seconds(use.step_s)}; reading "
            f"alone takes {format_seconds(use.memory_s)}, arithmetic {format_seconds(use.compute_s)}",)
    if use.overhead_fraction > _MOST:
        return Finding(wall="overhead_bound", because=(
            *said, f"{use.overhead_fraction:.0%} of the step is neither at what kernels reach"))
    if use.compute_fraction >= use.memory_fraction:
        return Finding(wall="compute_bound", because=(*said, f"MFU {use.mfu:.0%}, MBU {use.mbu:.0%}"))
    star = use.b_star
    if star is None:
        wall: Wall = "kv_bandwidth" if use.kv_fraction > use.memory_fraction / 2 else "saturating"
        return Finding(wall=wall, because=(*said, "B* does not exist: the weights read grow with the batch"))
    where = f"B = {use.batch:.3g}, B* = {star:.3g}"
    if use.batch <= star / 8:
        return Finding(wall="weight_bound", because=(*said, f"{where}: below B*/8 a doubling nearly halves the "
                                                            "amortized time per token"))  # fmt: skip
    if use.batch <= star:
        return Finding(wall="saturating", because=(*said, where))
    return Finding(wall="kv_bandwidth", because=(*said, where))


def _by_gpu(seen: Evidence) -> Finding | None:
    """From the GPU's counters, where it shows bandwidth (not nvidia-smi's share of time)."""
    if seen.telemetry is None:
        return None
    memory = seen.telemetry.mean("dram_active_fraction")
    compute = seen.telemetry.mean("tensor_active_fraction")
    if memory is None:
        return None
    said = f"memory bandwidth is {memory:.0%} used" + ("" if compute is None else f", tensor cores {compute:.0%}")
    if compute is not None and compute > max(memory, _MOST):
        return Finding(wall="compute_bound", because=(said,))
    if memory > _MOST:
        return Finding(wall="saturating", because=(said, "give the model to see whether weights or cache are read"))
    return Finding(wall="overhead_bound", because=(said,))
