"""One replica as the closed forms see it: step times by batch, prefill cost, room in the cache. Numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.latency.step_model import smooth_max
from bstar.planning.draws import RequestDraws

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSteps:
    """Steps of data-parallel ranks that wait for the busiest one.

    own_s, shared_s    kernels by the tokens of that rank (its attention apart), and by those of all; at `grid` tokens
    gaps_s             between the kernels
    launch_s           launching a step that is not captured: of more than `graph_tokens` tokens of a rank, or of
                       prompts where the engine captures none; prompts_s, decodes_s: of one that is
    power              of the smooth maximum of both
    """

    grid: Floats
    own_s: Floats
    shared_s: Floats
    gaps_s: float
    launch_s: float
    prompts_s: float
    decodes_s: float
    graph_tokens: float
    prompts_captured: bool
    power: float

    def step_s(self, own: Floats, together: Floats, *, prompts: bool) -> Floats:
        """Seconds with `own` tokens on the busiest rank of `together` on all, the host's own work apart."""
        kernels = np.interp(own, self.grid, self.own_s) + np.interp(together, self.grid, self.shared_s) + self.gaps_s
        captured = (own <= self.graph_tokens) & (self.prompts_captured or not prompts)
        launching = np.where(captured, self.prompts_s if prompts else self.decodes_s, self.launch_s)
        return np.asarray(np.where(launching > 0, smooth_max(kernels, launching, self.power), kernels))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replica:
    """What the planner needs to know about one replica under one workload.

    decode_step_s     T(n): expected time of a step of n decoding sequences at the mean context, n = 1 … N
    floor_step_s      the bandwidth and compute floor of the same
    token_grid, token_step_s   G(t): time of a step that computes t prompt tokens, attention apart
    ranks             where data-parallel ranks step together: steps of which one has more tokens than the others
    pair_s            time of one (query, key) pair of prefill attention, all layers
    token_budget      max_num_batched_tokens, of one data-parallel rank; (lanes, 1) where lanes differ in it
    room_sequences    sequences whose cache fits, contexts at their mean (B_mem)
    context_cv        coefficient of variation of the cache of one sequence in flight
    request_s         time of a request outside the engine's steps (HTTP, tokenizer, first stream chunk)
    pipeline_stages, attention_dp   see `stalled_fraction` and `marginal_prefill_s`
    prefill_lag_steps steps between a request's arrival in the engine and the one it joins (asynchronous scheduling)
    """

    decode_step_s: Floats
    floor_step_s: Floats
    token_grid: Floats
    token_step_s: Floats
    pair_s: float
    token_budget: int | Ints
    room_sequences: float
    context_cv: float
    prefill_lag_steps: float = 0.0
    pipeline_stages: int = 1
    attention_dp: int = 1
    request_s: float = 0.0
    ranks: RankSteps | None = None

    @property
    def largest_batch(self) -> int:
        return int(self.decode_step_s.size)

    def step_s(self, batch: Floats) -> Floats:
        """T(n) at any real n ≥ 0, linear between whole batches; T(1) below 1."""
        table = self.decode_step_s
        if table.size == 1:
            return np.full_like(batch, table[0])
        place = np.clip(batch - 1.0, 0.0, table.size - 1.0)
        below = np.minimum(place.astype(np.int64), table.size - 2)
        low = table[below]
        return np.asarray(low + (place - below) * (table[below + 1] - low))

    def tokens_s(self, tokens: Floats) -> Floats:
        """G(t) at any real t."""
        return np.interp(tokens, self.token_grid, self.token_step_s)

    def marginal_prefill_s(self, batch: Floats, tokens: Floats, prompts: Floats | float = 1.0) -> Floats:
        """Seconds that one more prompt token adds to a step of `batch` decodes and `tokens` prompt tokens, in the mean.

        A prompt token is nearly free while the step waits for the weights anyway, and costs its GEMMs beyond.
        Data-parallel ranks step together: one prompt keeps them all as long as the rank that has it, `prompts`
        of them even out.
        """
        added = self.tokens_s(batch + tokens) - self.tokens_s(batch)
        if self.ranks is not None:
            each = batch / self.attention_dp
            alone = (self.ranks.step_s(each + tokens, batch + tokens, prompts=True)
                     - self.ranks.step_s(each, batch, prompts=False))
            added = added + (np.maximum(alone, added) - added) / np.maximum(prompts, 1.0)
        return np.asarray(added / tokens)

    def imbalance(self, prompts: Floats) -> Floats:
        """Prompt tokens of the busiest data-parallel rank over the mean, with `prompts` in a step: (A + ν − 1)/ν."""
        many = np.maximum(prompts, 1.0)
        return (self.attention_dp + many - 1.0) / many

    @property
    def stalled_fraction(self) -> float:
        """Share of a prefill's time that a decoding sequence waits for it, in the mean.

        Over S pipeline stages a chunk holds each for 1/S of its time: that delays the microbatches behind it;
        the one that it is in waits for all of it.
        """
        stages = self.pipeline_stages
        return (2.0 - 1.0 / stages) / stages


def secure_room(room_sequences: float, context_cv: float, *, z: float = 2.33) -> float:
    """Sequences that fit together in 99 % of the moments (z = 2.33): n·m + z·σ·√n ≤ pool.

    room_sequences is pool/m, context_cv is σ/m of the cache of one sequence. Sums of many independent contexts
    are nearly normal; few of them are not, and then this is cautious.
    """
    spread = z * context_cv
    root = (-spread + math.sqrt(spread * spread + 4.0 * room_sequences)) / 2.0
    return root * root


def overflow_fraction(room_sequences: float, context_cv: float, sequences: float) -> float:
    """Share of the moments in which `sequences` hold more than the pool (they are then preempted): a normal tail."""
    spread = max(context_cv * math.sqrt(max(sequences, 1e-9)), 1e-9)
    return 0.5 * math.erfc((room_sequences - sequences) / spread / math.sqrt(2.0))


def mean_prefill_s(replica: Replica, draws: RequestDraws, rate_per_s: Floats) -> Floats:
    """c(n) beside n = 1 … N decoding sequences at a rate; `rate_per_s` broadcasts against (N,)."""
    batch = np.arange(1, replica.largest_batch + 1, dtype=np.float64)
    return prefill_of_a_request_s(replica, draws, batch, rate_per_s * replica.decode_step_s)


def prefill_of_a_request_s(replica: Replica, draws: RequestDraws, batch: Floats, arrive: Floats) -> Floats:
    """c: mean seconds that the prefill of one request takes from `batch` decoding sequences.

    arrive   requests that come during one decode step. The more prompts share a step, the fewer of their tokens
             ride free: a step holds the prompt itself and what came meanwhile, within the token budget.
    """
    skew = replica.imbalance(arrive)
    mean_new, own = draws.mean_new_tokens, draws.weighted_new_tokens
    # Weighted by tokens: the step that a token is in holds the token's own prompt.
    together = np.minimum(own + arrive * mean_new, np.maximum(prompt_budget(replica, batch) / skew, 1.0))
    pairs = draws.mean_pairs * replica.pair_s * skew
    return (replica.marginal_prefill_s(batch, together, arrive) * mean_new + pairs) * replica.stalled_fraction


def full_chunk_s(replica: Replica, draws: RequestDraws, batch: Floats, arrive: Floats) -> Floats:
    """Seconds for which prompts that fill the token budget delay a step of `batch` decodes: no step holds more.

    arrive   requests that come during one decode step
    """
    skew = replica.imbalance(arrive)
    budget = np.maximum(prompt_budget(replica, batch) / skew, 1.0)
    pairs = draws.mean_pairs * replica.pair_s * skew / draws.mean_new_tokens
    return (replica.marginal_prefill_s(batch, budget, arrive) + pairs) * budget * replica.stalled_fraction


def prompt_budget(replica: Replica, batch: Floats) -> Floats:
    """Prompt tokens of all data-parallel ranks that a step takes beside `batch` decodes."""
    return np.asarray(np.maximum(replica.token_budget * replica.attention_dp - batch, 1.0), dtype=np.float64)
