"""A static batch in closed form: one prefill of the whole batch, then decode steps of growing context.

    ttft = step(B prompts of I tokens)          what the harness calls the first token's latency
    tpot = mean over j = 2 … O of step(B sequences at I + j - 1 tokens)
    e2e  = ttft + (O - 1)·tpot

All members start together and end together: nobody waits, nothing is scheduled, so no simulation is needed. Step
times are affine in the context between the ends of attention windows; the mean is exact there by trapezoids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstar.latency.experts import ExpertLoad
from bstar.latency.step_model import StepModel
from bstar.physics.batch import BatchShape

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTimes:
    """Seconds of a static batch, as expected and at the floor. tpot: nan with one output token."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    ttft_floor_s: float
    tpot_floor_s: float


def static_times(model: StepModel, *, batch: float, input_tokens: float, output_tokens: float,
                 prefill_tokens: float | None = None) -> StaticTimes:
    """The times of `batch` equal sequences on a deployment whose step model this is.

    prefill_tokens   most tokens of one prefill step: the batch's prompts are prefilled in groups of whole prompts
                     that fit; None: all at once
    """
    prompts = batch if prefill_tokens is None else max(1.0, min(batch, prefill_tokens // input_tokens))
    ttft_s = ttft_floor_s = 0.0
    left = float(batch)
    while left > 0:
        some = min(prompts, left)
        expected, floor = _seconds(model, BatchShape.prefill(input_tokens, count=some))
        whole, rest = divmod(left, some)
        times = whole if some == prompts else 1.0
        ttft_s, ttft_floor_s = ttft_s + times * expected, ttft_floor_s + times * floor
        left = rest if some == prompts else 0.0
    if output_tokens <= 1:
        return StaticTimes(ttft_s=ttft_s, tpot_s=float("nan"), e2e_s=ttft_s, ttft_floor_s=ttft_floor_s,
                           tpot_floor_s=float("nan"))
    tpot_s, tpot_floor_s = mean_decode_s(
        model, batch=batch, first=input_tokens + 1, last=input_tokens + output_tokens - 1)
    return StaticTimes(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=ttft_s + (output_tokens - 1) * tpot_s,
                       ttft_floor_s=ttft_floor_s, tpot_floor_s=tpot_floor_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SameTokens(ExpertLoad):
    """Routing of equal tokens: all of them go to the same top k experts, on as few ranks as hold them."""

    def missed(self, tokens: Floats | float) -> Floats:
        missed = np.multiply.outer(1.0 - self.top_k / self.experts, np.asarray(tokens) > 0)
        return np.where(np.asarray(tokens) > 0, missed, 1.0)

    def busiest(self, tokens: Floats | float) -> tuple[Floats, Floats]:
        some = np.ones(np.shape(tokens))
        held = np.minimum(np.ceil(self.top_k / self.ranks) * self.ranks / self.experts, 1.0)
        rows = np.ceil(self.top_k / self.ranks) * self.ranks / self.top_k
        return np.multiply.outer(held, some), np.multiply.outer(rows, some)


def with_identical_tokens(model: StepModel) -> StepModel:
    """The model where all tokens of a step are the same: a router sends them to the same experts.

    So a layer reads top_k experts whatever the batch; their arithmetic grows with it as ever.
    """
    load = model.load
    return replace(model, load=_SameTokens(experts=load.experts, top_k=load.top_k, ranks=load.ranks, skew=load.skew))


def mean_decode_s(model: StepModel, *, batch: float, first: float, last: float) -> tuple[float, float]:
    """(expected, floor) seconds of a decode step of `batch` sequences, mean over contexts first … last."""
    contexts, share = decode_contexts(model, first, last)
    some = float(model.microbatch(batch))
    work = model.work_of(np.stack([some * model.step.decode_values(c) for c in contexts], axis=1))
    return float(share @ model.times(work).total_s), float(share @ model.floor_s(work).sum(axis=0))


def decode_contexts(model: StepModel, first: float, last: float) -> tuple[Floats, Floats]:
    """(contexts, their shares): the mean of anything affine between window ends over contexts first … last."""
    step, last = model.step, max(last, first)
    limits = step.decode_limit[np.isfinite(step.decode_limit)]
    points = np.unique(np.concatenate(([first], limits[(limits > first) & (limits < last)], [last])))
    if step.decode_chunk.any():  # chunks restart: a saw, whose mean takes more points
        points = np.unique(np.concatenate((points, np.linspace(first, last, 65))))
    if len(points) == 1:
        return points, np.ones(1)
    gaps = np.diff(points) / (2.0 * (last - first))
    share = np.zeros(len(points))
    share[:-1] += gaps
    share[1:] += gaps
    return points, share


def _seconds(model: StepModel, shape: BatchShape) -> tuple[float, float]:
    """(expected, floor) seconds of one step of a replica's batch."""
    from bstar.sim.deployed import step_figures

    values = model.step.values(shape)
    if model.pipeline_stages == 1:
        work = model.work_of(values)
        return float(model.times(work).total_s), float(model.floor_s(work).sum())
    figures = step_figures(model, shape)
    return figures.seconds, max(figures.compute_s, figures.memory_s)
