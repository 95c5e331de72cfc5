"""The settings of one layout that are searched: token budgets times places, each pair a lane."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstar.errors import BstarError
from bstar.physics.memory import memory_budget
from bstar.planning.draws import RequestDraws
from bstar.planning.feasibility import NoAnswerError, room_sequences
from bstar.planning.limits import LONGEST_STEP_TPOTS, floored
from bstar.planning.outcomes import saturated_rate_per_s
from bstar.planning.replica import Replica, full_chunk_s, prefill_of_a_request_s, secure_room
from bstar.planning.space import lanes
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)
# max_num_seqs stays this far below the walls of the memory; mission §7 gives 0.8–0.9.
MEMORY_SHARE = 0.9
_NEAREST = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """Arrays of one length, a lane each: places `cap` (over all data-parallel ranks) at a token budget.

    top_per_s   requests per second with every place taken: no lane carries more
    group       0 the budget of the rule (the engine's default without a TPOT limit) near B_slo, tried first;
                1 other budgets whose full step takes at most twice the TPOT limit; 2 those that are felt as a stutter;
                3 places between the usual ones
    room        sequences that the cache holds, by budget
    """

    budget: Ints
    cap: Ints
    top_per_s: Floats
    group: Ints
    room: Mapping[int, float]

    def groups(self) -> tuple[Ints, Ints, Ints]:
        """Indices of the lanes of each group but the last."""
        first, second, third = (np.flatnonzero(self.group == g) for g in range(3))
        return first, second, third

    def near(self, lanes: Ints) -> Ints:
        """Places between the usual ones that are next to those of `lanes`, at the same budget."""
        budget, cap = self.budget[lanes[0]], self.cap[lanes[0]]
        beside = (self.cap > cap / 1.5) & (self.cap < cap * 1.5)
        return np.flatnonzero((self.group == 3) & (self.budget == budget) & beside)


def token_budgets(deployment: Deployment, *, free: bool) -> tuple[int, ...]:
    """Values of max_num_batched_tokens to search, ascending: the one that it has, and the usual ones if `free`.

    Raises NoAnswerError where none holds the longest prompt of an engine that does not split prompts.
    """
    engine = deployment.engine
    used = engine.max_num_batched_tokens
    least = 1 if engine.enable_chunked_prefill else engine.max_model_len
    found = tuple(sorted(b for b in {used, *(TOKEN_BUDGETS if free else ())} if b >= least))
    if not found:
        raise NoAnswerError("layout", f"without chunked prefill no step of up to {max(used, *TOKEN_BUDGETS):,} tokens "
                            f"holds a prompt of {least:,}: give --enable-chunked-prefill or a smaller --max-model-len")
    return found


def room_by_budget(
    deployment: Deployment, budgets: Sequence[int], context: float, *, shared_tokens: float
) -> dict[int, float]:
    """Sequences that the cache has room for at each token budget with which the engine starts."""
    engine = deployment.engine
    found: dict[int, float] = {}
    for budget in budgets:
        seqs = min(engine.max_num_seqs, budget)
        at = replace(deployment, engine=replace(engine, max_num_batched_tokens=budget, max_num_seqs=seqs))
        try:
            # Activations grow with the budget: what starts with more tokens starts with fewer.
            if budget > engine.max_num_batched_tokens and not memory_budget(at).fits:
                break
            found[budget] = room_sequences(at, context, shared_tokens=shared_tokens)
        except BstarError:
            if budget == engine.max_num_batched_tokens:
                raise
    return {budget: room for budget, room in found.items() if room >= 1.0}


def places_of(budget: int, room: float, *, context_cv: float, ranks: int, asked: int | None) -> list[int]:
    """Values of max_num_seqs times the data-parallel ranks, up to what the memory holds in 99 % of the moments.

    asked   max_num_seqs as the user fixed it: more places than the cache has room for are not counted on
    """
    most = max(int(min(MEMORY_SHARE * room, secure_room(room, context_cv)) / ranks), 1)
    if asked is not None:
        return [min(asked, most) * ranks] if asked <= budget else []
    return [n * ranks for n in lanes(min(most, budget))]


def lanes_of(
    replica: Replica, draws: RequestDraws, slo: Slo, room: Mapping[int, float],
    places: Mapping[int, list[int]], *, utilisation: float,
) -> Lanes:  # fmt: skip
    """All lanes of a layout with their bounds, grouped by which are tried first."""
    budgets = [b for b in room if places[b]]
    each = replace(replica, token_budget=np.array(budgets, dtype=np.int64)[:, None])
    rate = saturated_rate_per_s(each, draws)
    b_slo = _b_slo(each, draws, slo, rate)
    smooth = _smooth(each, draws, slo, b_slo)
    default = budgets.index(int(np.max(replica.token_budget))) if int(np.max(replica.token_budget)) in budgets else 0
    rule = default
    if slo.tpot_s is not None and not smooth[default] and smooth.any():
        rule = int(np.flatnonzero(smooth)[-1])
    rows: list[tuple[int, int, float, int]] = []
    for i, budget in enumerate(budgets):
        # Places beyond twice B_slo are never taken inside the SLO.
        near = [p for p in places[budget] if p <= 2 * b_slo[i]]
        kept = places[budget][: len(near) + 1]
        for place, cap in enumerate(kept):
            tried_first = i == rule and place >= len(kept) - _NEAREST
            group = 0 if tried_first else 1 if smooth[i] else 2
            rows.append((budget, cap, float(rate[i, cap - 1]) * utilisation, group))
        between = _between(kept, replica.attention_dp)
        rows += [(budget, cap, float(rate[i, cap - 1]) * utilisation, 3) for cap in between]
    rows.sort(key=lambda row: (row[1], row[0]))
    table = np.array(rows)
    whole = table[:, [0, 1, 3]].astype(np.int64)
    return Lanes(budget=whole[:, 0], cap=whole[:, 1], top_per_s=table[:, 2], group=whole[:, 2], room=dict(room))


def bound_per_s(replica: Replica, draws: RequestDraws, slo: Slo, budgets: Sequence[int]) -> float:
    """Requests per second that no lane of these budgets exceeds, whatever its room."""
    each = replace(replica, token_budget=np.array(budgets, dtype=np.int64)[:, None])
    rate = saturated_rate_per_s(each, draws)
    # The largest places that are tried are the first of the usual ones beyond twice B_slo.
    most = min(3.0 * float(_b_slo(each, draws, slo, rate).max()) + replica.attention_dp, float(replica.largest_batch))
    return float(rate[:, : max(int(most), 1)].max())


def _between(caps: list[int], ranks: int) -> list[int]:
    """Places between neighbours of `caps`, three where there is room, as engines pad them."""
    found: list[int] = []
    for low, high in itertools.pairwise(caps):
        inside = {floored((low + share * (high - low)) / ranks) * ranks for share in (0.25, 0.5, 0.75)}
        found += sorted(inside - {low, high})
    return found


def _b_slo(each: Replica, draws: RequestDraws, slo: Slo, rate: Floats) -> Floats:
    """Largest batch whose step, with its share of prefill, meets the TPOT limit, a budget each; inf without one."""
    decode = draws.mean_decode_tokens
    if slo.tpot_s is None or decode <= 0:
        return np.full(rate.shape[0], np.inf)
    batch = np.arange(1, each.largest_batch + 1, dtype=np.float64)
    cost = prefill_of_a_request_s(each, draws, batch, rate * each.decode_step_s)
    within = each.decode_step_s + batch * cost / decode <= slo.tpot_s
    return np.asarray(np.where(within, batch, 1.0).max(axis=1))


def _smooth(each: Replica, draws: RequestDraws, slo: Slo, b_slo: Floats) -> NDArray[np.bool_]:
    """Whether a full step takes at most twice the TPOT limit: a longer one is felt as a stutter."""
    if slo.tpot_s is None or draws.mean_decode_tokens <= 0:
        return np.ones(b_slo.size, dtype=np.bool_)
    crowd = np.minimum(b_slo, float(each.largest_batch))[:, None]
    step = each.step_s(crowd) + full_chunk_s(each, draws, crowd, np.ones_like(crowd))
    return np.asarray(step[:, 0] <= LONGEST_STEP_TPOTS * slo.tpot_s)
