"""Which wall a server stands at: rules over the evidence, each with the sentence that says why.

Rules go from what the counters prove to what the physics tells:

    client_limited     the load's client was the limit; or nothing waits and nobody says what a step is bound by: then
                       the load that comes is the limit, not the server
    idle               hardly anything is in the server, by its gauges, latencies and tokens
    unknown            too few scrapes lie inside the load; or requests wait and nothing is seen to be full
    kv_capacity        requests are preempted, or wait while the cache has no room for the next prompt
    max_num_seqs       requests wait while every seat is taken and the cache has room
    token_budget       requests wait, or prefill is cut up, while steps are filled to the token budget,
                       mostly with prompts
    compute_bound      a step's arithmetic takes longer than its reading
    overhead_bound     most of a step is neither arithmetic nor reading
    weight_bound       B ≤ B*/8: a larger batch is nearly free
    saturating         B*/8 < B ≤ B*
    kv_bandwidth       B > B*: reading the cache dominates

Engines do not export max_num_seqs. Where nobody told it, a number that running keeps to while others wait is the
seats, also against what a deployment assumes, but not where steps are full of prompts: then prompts hold it there. A
number that was told counts as untold where more than that were seen to run.

The last five need the deployment (model, GPU); without it the GPU's own counters decide where they are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
_IDLE_REQUESTS = 0.5
_FEWEST_SCRAPES = 3
_OFTEN = 0.3
_FREE_SEATS = 0.1
_MOSTLY_TAKEN = 0.75
_FULL_STEP = 0.8
_MOST = 0.5
# Untold, a budget can bind from here on: no engine's default is smaller.
_SMALLEST_BUDGET = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A wall, and the sentences that say why.

    also    walls that are near, in the order of importance
    seats   of all engines, that running was seen to keep to, where that is the wall and not what was told or assumed
    """

    wall: Wall
    because: tuple[str, ...]
    also: tuple[Wall, ...] = ()
    seats: int | None = None

    @property
    def title(self) -> str:
        return TITLES[self.wall]


def find_wall(seen: Evidence, use: Use | None = None) -> Finding:
    """The wall of a window; `use` is what the physics says of it."""
    if seen.client_limits:
        return Finding(wall="client_limited", because=(*seen.client_limits, "the client was measured, not the server"))
    if seen.in_flight <= _IDLE_REQUESTS:
        return Finding(wall="idle", because=(f"{seen.in_flight:.2g} requests are in the server on average",))
    if not seen.preemptions > 0 and seen.scrapes < _FEWEST_SCRAPES:
        return _too_few(seen)
    queue = _queue_wall(seen)
    inside = _inside(seen, use)
    if queue is not None:
        also = () if inside is None or inside.wall in ("unknown", queue.wall) else (inside.wall,)
        return replace(queue, also=also)
    return inside if inside is not None else _by_the_load(seen)


def _too_few(seen: Evidence) -> Finding:
    """Hardly a scrape saw the load: a queue or a full cache could have been there unseen."""
    scrapes = {0: "no scrape lies", 1: "one scrape lies"}.get(seen.scrapes, f"{seen.scrapes} scrapes lie")
    return Finding(wall="unknown", because=(
        f"{scrapes} inside the load of {format_seconds(seen.duration_s)}, too few to tell a wall; "
        "measure longer, or scrape more often (--scrape-interval of bstar bench, --interval of bstar diagnose)",))


def waits_often(seen: Evidence) -> bool:
    """Whether requests wait as a rule."""
    return seen.waiting_share >= _OFTEN


def _by_the_load(seen: Evidence) -> Finding:
    """No wall of the server: more requests would be served at once."""
    seats = f" of {seen.seats:,} seats" if _told(seen, "max_num_seqs") else ""
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
    if not waits_often(seen):
        return starved if starved is not None and seen.prompt_share > _MOST else None
    waits = f"{seen.mean_waiting:.3g} requests wait on average, at {seen.waiting_share:.0%} of the scrapes"
    if _cache_full(seen):
        return Finding(wall="kv_capacity", because=(waits, *_usage(seen)))
    if seen.seats is not None and not seen.outrun and _keeps_to(seen, seen.seats):
        each = f"max_num_seqs of {seen.engines} engines" if seen.engines > 1 else "max_num_seqs"
        return _seats_taken(seen, waits, seen.seats, each)
    if starved is not None:
        return Finding(wall="token_budget", because=(waits, *starved.because))
    guessed = None if _told(seen, "max_num_seqs") else _guessed_seats(seen)
    if guessed is None:
        # In waves the cache is empty at many a scrape, and full when the next prompt comes.
        if _full_share(seen) >= _OFTEN:
            return Finding(wall="kv_capacity", because=(waits, *_usage(seen)))
        return _unsaid(seen, waits)
    return replace(_seats_taken(seen, waits, guessed, "as many as ever run at a time here"), seats=guessed)


def _seats_taken(seen: Evidence, waits: str, seats: int, told: str) -> Finding:
    # By latencies a request runs a moment longer than it has its seat; no more than all seats are taken.
    running = min(seen.mean_running, max(float(seats), float(seen.running.mean())))
    return Finding(wall="max_num_seqs", because=(
        waits, f"{running:.3g} of {seats:,} seats ({told}) are taken on average, nearly all at "
        f"{_taken_share(seen, seats):.0%} of the scrapes", *_usage(seen)))


def _unsaid(seen: Evidence, waits: str) -> Finding:
    """Requests wait at what no flag that was given explains."""
    crowded = _crowded(seen)
    if crowded and seen.running.size and seen.step_tokens >= _SMALLEST_BUDGET and not _steady(seen):
        return Finding(wall="token_budget", because=(
            waits, f"a step holds {seen.step_tokens:,.0f} tokens on average, {seen.prompt_share:.0%} of them prompt; "
            f"{seen.mean_running:.3g} requests run on average, {seen.running.max():.3g} at most: no number of seats "
            "that they keep to",
            "prompts wait for their turn in a step; --max-num-seqs and --max-num-batched-tokens, as the server was "
            "started, would make it sure"))
    missing = [flag for flag, told in (("--max-num-seqs", _told(seen, "max_num_seqs")),
                                       ("--max-num-batched-tokens", _told(seen, "max_num_batched_tokens"))) if not told]
    if not missing:
        return Finding(wall="unknown", because=(
            waits, *_usage(seen), "neither seats, cache nor steps are seen to be full: were the flags those that the "
            "server was started with?"))
    said = ("steps may be full of prompts, so that what runs does not tell the seats" if crowded
            else "neither seats, cache nor steps are seen to be full")
    return Finding(wall="unknown", because=(
        waits, *_usage(seen), f"{said}; give {' and '.join(missing)} as the server was started"))


def _told(seen: Evidence, name: str) -> bool:
    refuted = name == "max_num_seqs" and seen.outrun
    return name not in seen.assumed and getattr(seen, name) is not None and not refuted


def _usage(seen: Evidence) -> tuple[str, ...]:
    if not seen.kv_usage.size:
        return ()
    return (f"the KV cache is {seen.kv_usage.mean():.0%} full on average, {seen.kv_usage.max():.0%} at most",)


def _cache_full(seen: Evidence) -> bool:
    """Whether the next prompt mostly finds no room: that is what makes it wait, not that the last block is taken."""
    return _full_share(seen) >= _MOST


def _full_share(seen: Evidence) -> float:
    """Share of scrapes at which the cache had no room for the next prompt, in whole blocks."""
    if not seen.kv_usage.size:
        return 0.0
    needed = seen.mean_of("input_tokens")
    if math.isnan(needed) or not seen.kv_total_tokens > 0:
        room = 0.1
    else:
        block = float(seen.config.get("block_size") or 1)
        room = min(max(1.25 * math.ceil(needed / block) * block / seen.kv_total_tokens, 0.05), 0.6)
    return float(np.mean(seen.kv_usage >= 1.0 - room))


def _keeps_to(seen: Evidence, seats: float) -> bool:
    """Seats are free for a moment between an answer and the next admission: most scrapes decide, not the mean."""
    return _taken_share(seen, seats) >= _MOST


def _taken_share(seen: Evidence, seats: float) -> float:
    """Share of scrapes at which nearly all seats were taken."""
    return float(np.mean(seen.running >= seats - max(_FREE_SEATS * seats, 1.0))) if seen.running.size else 0.0


def _guessed_seats(seen: Evidence) -> int | None:
    """A number that running keeps to while others wait, unless prompts that fill the steps hold it there."""
    if seen.running.size < _FEWEST_SCRAPES or _crowded(seen):
        return None
    most = float(seen.running.max())
    # A spread of small numbers lies near its end too; a limit is reached mostly, or all but reached on average.
    limit = _steady(seen) or max(seen.mean_running, float(seen.running.mean())) >= _MOSTLY_TAKEN * most
    return int(most) if most >= 1 and limit and _keeps_to(seen, most) else None


def _steady(seen: Evidence) -> bool:
    """Whether the most that ever ran is what runs mostly: a limit, and not the end of a spread."""
    return float(np.mean(seen.running >= seen.running.max())) >= _MOST


def _crowded(seen: Evidence) -> bool:
    """Whether steps could be full of prompts, by a budget that was told; else by any that an engine might have."""
    if not seen.prompt_share > _MOST:
        return False
    budget = seen.max_num_batched_tokens if _told(seen, "max_num_batched_tokens") else None
    full = _SMALLEST_BUDGET if budget is None else _FULL_STEP * budget
    return not seen.step_tokens < full


def fills_steps(seen: Evidence) -> bool:
    """Whether a mean step is near the token budget."""
    budget, tokens = seen.max_num_batched_tokens, seen.step_tokens
    if budget is None or not tokens >= _FULL_STEP * budget:
        return False
    # Above one that is only assumed: the server has another.
    return tokens <= budget or _told(seen, "max_num_batched_tokens")


def _starved(seen: Evidence) -> Finding | None:
    """Steps filled to the token budget, mostly with prompts."""
    if not fills_steps(seen) or seen.prompt_share < _MOST:
        return None
    return Finding(wall="token_budget", because=(
        f"a step holds {seen.step_tokens:,.0f} of {seen.max_num_batched_tokens:,} tokens on average, "
        f"{seen.prompt_share:.0%} of them prompt",))


def _inside(seen: Evidence, use: Use | None) -> Finding | None:
    """What a step is bound by."""
    if use is None:
        return _by_gpu(seen)
    said = (f"batch {use.batch:.3g} at {use.context:,.0f} tokens: a step takes {format_seconds(use.step_s)}; at the "
            f"device's full rates its reading takes {format_seconds(use.memory_s)}, its arithmetic "
            f"{format_seconds(use.compute_s)}",)
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
