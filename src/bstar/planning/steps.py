"""From a deployment and its requests to the numbers of one replica: many step times in one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bstar.latency.constants import constants_for
from bstar.latency.step_model import StepModel, step_model
from bstar.latency.times import decode_curve
from bstar.physics.batch import BatchShape
from bstar.physics.kv_cache import cache_groups
from bstar.physics.operators import CompiledStep
from bstar.planning.draws import RequestDraws
from bstar.planning.replica import RankSteps, Replica
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
_GRID_STEP = 1.1
# Step times are looked up on grids that do not depend on the flags: a flag that is fixed to what the planner
# would have chosen gives the same numbers, to the last bit.
LARGEST_BUDGET = 16384
_PAIR_CHUNK = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillCost:
    """What prefill costs on a deployment, by the tokens of a step that are spread evenly over the data-parallel ranks;
    attention apart, which is pair_s a pair.

    ranks   where several step together: what one of them has alone
    """

    token_grid: Floats
    token_step_s: Floats
    pair_s: float
    ranks: RankSteps | None = None


def batch_grid(largest: int) -> Floats:
    """Whole batches from 1 to the first grid point that is not below `largest`: all up to 16, then a tenth apart."""
    fine = np.arange(1.0, min(largest, 16) + 1)
    if largest <= 16:
        return fine
    count = int(np.ceil(np.log(largest / 16.0) / np.log(_GRID_STEP) + 1e-9))
    return np.unique(np.concatenate([fine, np.ceil(16.0 * _GRID_STEP ** np.arange(count + 1))]))


def prefill_cost(deployment: Deployment, longest_tokens: float) -> PrefillCost:
    """G(t) and the pair time, from steps that hold one prompt chunk of t tokens and nothing else.

    The pair time is the slope in the cached tokens between none and the longest prompt, so windows count.
    """
    model = step_model(deployment)
    ranks = deployment.parallel.attention_dp
    grid = _token_grid(float(max(deployment.engine.max_num_batched_tokens, LARGEST_BUDGET) * ranks))
    chunk = float(_PAIR_CHUNK * ranks)
    reach = max(float(longest_tokens), chunk)
    values = _prefill_statistics(model.step, float(grid[-1]), chunk, reach)
    times = model.expected_s(values)
    pair_s = max(float(times[-1] - times[-2]) / (chunk * reach), 0.0)
    pairs_s = pair_s * grid * (grid + 1.0) / 2.0
    even = np.maximum.accumulate(np.maximum(times[:-2] - pairs_s, 0.0))
    return PrefillCost(token_grid=grid, token_step_s=even, pair_s=pair_s,
                       ranks=_rank_steps(model, grid, values[:, :-2], ranks, pairs_s) if ranks > 1 else None)


def _rank_steps(model: StepModel, grid: Floats, values: Floats, ranks: int, pairs_s: Floats) -> RankSteps:
    """Steps of which one rank has more tokens than the others; `values` are those of even ones, (statistics, grid)."""
    everybody = model.row_index == model.step.expert_tokens_index  # routed experts see the tokens of all ranks
    together, alone = (model.times(model.work_of(v)) for v in (values, values * ranks))
    own = (alone.fixed + alone.body)[~everybody].sum(axis=0) - ranks * pairs_s
    shared = (together.fixed + together.body)[everybody].sum(axis=0)
    return RankSteps(
        grid=grid, own_s=np.maximum.accumulate(np.maximum(own, 0.0)), shared_s=np.maximum.accumulate(shared),
        gaps_s=model.layers_s, launch_s=model.launch_s, prompts_s=model.piece_s,
        decodes_s=model.piece_s if model.graphs.pieces else 0.0, graph_tokens=float(model.graphs.largest),
        prompts_captured=model.graphs.mixed, power=model.smoothing,
    )  # fmt: skip


def _token_grid(most: float) -> Floats:
    """Tokens of a step: powers of two from 1 to the first that is not below `most`."""
    return np.asarray(2.0 ** np.arange(int(np.ceil(np.log2(most))) + 1), dtype=np.float64)


@lru_cache(maxsize=256)
def _prefill_statistics(step: CompiledStep, most: float, chunk: float, reach: float) -> Floats:
    """Statistics of the steps that `prefill_cost` looks at: the same for every device that runs this layout.

    Steps of each number of prompt tokens up to `most`, then a chunk with nothing and with `reach` tokens before it.
    """
    shapes = [BatchShape.prefill(t) for t in _token_grid(most)]
    shapes += [BatchShape.prefill(chunk), BatchShape.prefill(chunk, reach)]
    return np.stack([step.values(shape) for shape in shapes], axis=1)


def cache_bytes(deployment: Deployment, context: Floats) -> Floats:
    """Cache bytes per rank of sequences at `context`, states included, whole blocks of the largest group."""
    groups = cache_groups(deployment.model, deployment.kv_format, deployment.parallel)
    block = deployment.engine.block_size or 16
    rounded = context + block / 2.0
    return np.asarray(sum(g.bytes_at(rounded) + g.state_bytes_per_sequence for g in groups), dtype=np.float64)


def cache_cv(deployment: Deployment, draws: RequestDraws) -> float:
    """Coefficient of variation of the cache of a sequence at a random moment of its decoding.

    A request of D decode tokens is seen D times, at contexts I … I + D.
    """
    weight = np.maximum(draws.decode_tokens, 1e-9)
    ages: Sequence[float] = (1 / 6, 1 / 2, 5 / 6)
    held = np.stack([cache_bytes(deployment, draws.input_tokens + age * draws.output_tokens) for age in ages])
    mean = float((held.mean(axis=0) * weight).sum() / weight.sum())
    square = float(((held * held).mean(axis=0) * weight).sum() / weight.sum())
    return float(np.sqrt(max(square - mean * mean, 0.0)) / mean) if mean > 0 else 0.0


def replica_of(
    deployment: Deployment, draws: RequestDraws, *, context: float, room_sequences: float, largest_batch: int,
    context_cv: float = 0.0,
) -> Replica:
    """The numbers of one replica for steps up to `largest_batch` sequences at `context` tokens."""
    grid = batch_grid(largest_batch)
    curve = decode_curve(deployment, grid, context)
    whole = np.arange(1, largest_batch + 1, dtype=np.float64)
    cost = prefill_cost(deployment, float(draws.input_tokens.max()))
    return Replica(
        decode_step_s=np.interp(whole, grid, np.maximum.accumulate(curve.expected_s)),
        floor_step_s=np.interp(whole, grid, curve.floor_s),
        token_grid=cost.token_grid, token_step_s=cost.token_step_s, ranks=cost.ranks, pair_s=cost.pair_s,
        token_budget=deployment.engine.max_num_batched_tokens, room_sequences=room_sequences,
        context_cv=context_cv, pipeline_stages=deployment.parallel.pp,
        attention_dp=deployment.parallel.attention_dp,
        request_s=constants_for(deployment)["request_s"],
        prefill_lag_steps=1.0 if deployment.engine.async_scheduling else 0.0,
    )  # fmt: skip
