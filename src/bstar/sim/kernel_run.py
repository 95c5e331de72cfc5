"""The compiled kernel's run of one engine, in the form of the readable one: `EngineRun` with its `StepLog`."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bstar.latency.step_model import StepModel
from bstar.physics.statistics import Statistic
from bstar.sim.deployed import DeployedEngine
from bstar.sim.steps import StepLog
from bstar.sim.stepwise import EngineRun, Progress
from bstar.traffic.load import Traffic

if TYPE_CHECKING:
    from bstar.sim.kernel.cost import StepCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Columns of the kernel's run log; pairs and keys per prompt span follow, then reach and growth per decode span.
(_START, _STEPS, _BASE, _SLOPE, _REGULAR, _SAMPLED, _RUNNING, _WAITING, _FREE, _PREEMPTED, _CONTEXT, _DECODES, _PROMPT,
 _CACHED, _CHUNKS, _SPANS) = range(16)  # fmt: skip

# Slices of simulated time between looks at the progress bar and at Ctrl-C.
_SLICES = 200


def run_kernel(
    deployed: DeployedEngine, traffic: Traffic, *, until_s: float = math.inf, progress: Progress | None = None
) -> EngineRun:
    """Serve `traffic` with the compiled kernel, to the end, to `until_s` or to an interrupt."""
    from bstar.sim.arrays import kernel_load
    from bstar.sim.engine import KernelEngine
    from bstar.sim.step_cost import step_cost

    settings = deployed.settings
    cost = step_cost(
        deployed.deployment, max_tokens=settings.max_num_batched_tokens, max_sequences=settings.max_num_seqs,
        one_rank=True)
    load = kernel_load(settings, traffic)
    engine = KernelEngine(settings, cost, load, keep_runs=True)
    interrupted = False
    try:
        _advance(engine, traffic, until_s, progress)
    except KeyboardInterrupt:
        interrupted = True
    made = _made_tokens(engine, traffic, settings.max_model_len)
    return EngineRun(
        arrival_s=np.array(engine.load.arrival_s, dtype=float), scheduled_s=engine.out.scheduled_s,
        first_token_s=engine.out.first_token_s, finish_s=engine.out.finish_s, made_tokens=made,
        preemptions=engine.out.preemptions.astype(np.int64), cached_tokens=engine.out.cached_tokens.astype(np.int64),
        log=step_log(engine.runs, engine.gaps_s, deployed, cost), interrupted=interrupted, implementation="kernel",
    )  # fmt: skip


def prepare() -> float:
    """Load the compiled kernel (compiling it where no cache has it); returns the seconds, 0 after the first time."""
    begun = time.perf_counter()
    _serve_two()
    return time.perf_counter() - begun


@lru_cache(maxsize=1)
def _serve_two() -> None:
    from bstar.codec.build import build_deployment
    from bstar.sim.deployed import deployed_engine
    from bstar.traffic.load import Traffic

    small = Traffic(arrival_s=np.zeros(2), input_tokens=np.array([20, 20]), output_tokens=np.array([2, 2]))
    run_kernel(deployed_engine(build_deployment("llama-3.1-8b", "h100-sxm-80gb")), small)


def _advance(engine: Any, traffic: Traffic, until_s: float, progress: Progress | None) -> None:
    """Run in slices of simulated time; the next slice is as long as the run has shown to need."""
    total = traffic.num_requests
    slice_s = max(traffic.span_s / _SLICES, 1.0)
    horizon = float(np.nanmin(traffic.arrival_s))
    while True:
        horizon = min(horizon + slice_s, until_s)
        done = engine.advance(horizon)
        if progress is not None:
            progress(int(engine.num_finished), total, float(engine.now_s))
        if done or horizon >= until_s:
            return
        slice_s *= 1.25  # few slices for whatever comes after the last arrival


def _made_tokens(engine: Any, traffic: Traffic, max_model_len: int) -> Ints:
    """Tokens made by finished requests; of unfinished ones those that are sure: 1 where there is a first token."""
    asked = np.minimum(traffic.output_tokens, np.maximum(max_model_len - traffic.input_tokens, 1))
    finished, begun = ~np.isnan(engine.out.finish_s), ~np.isnan(engine.out.first_token_s)
    made: Ints = np.where(finished, asked, begun.astype(np.int64)).astype(np.int64)
    return made


def step_log(runs: Floats, gaps_s: Floats, deployed: DeployedEngine, cost: StepCost, *, replica: int = 0) -> StepLog:
    """The kernel's run log, with the work of every run counted by `bstar.physics`."""
    flops, compute_s, memory_s = run_work(runs, deployed.model, cost)

    def whole(column: int) -> Ints:
        return runs[:, column].astype(np.int64)

    blocks = deployed.settings.num_blocks - 1
    return StepLog(
        start_s=runs[:, _START].copy(), base_s=runs[:, _BASE].copy(), slope_s=runs[:, _SLOPE].copy(),
        steps=whole(_STEPS), regular=whole(_REGULAR), made=whole(_SAMPLED), running=whole(_RUNNING),
        waiting=whole(_WAITING), preempted=whole(_PREEMPTED), prompt_tokens=whole(_PROMPT),
        sequences=whole(_DECODES) + whole(_CHUNKS), used_blocks=blocks - whole(_FREE), flops=flops,
        compute_s=compute_s, memory_s=memory_s, replica=np.full(len(runs), replica, dtype=np.int64),
        single_gap_s=np.array(gaps_s, dtype=float), kv_blocks=blocks, block_size=deployed.settings.block_size,
    )  # fmt: skip


def run_work(runs: Floats, model: StepModel, cost: StepCost) -> tuple[Floats, Floats, Floats]:
    """(FLOPs, seconds at peak FLOP/s, seconds at full bandwidth) of each run: sums over its steps.

    Everything but the touched experts is linear in the counts of a step, and the counts of a run grow linearly.
    """
    count, stages = len(runs), float(model.pipeline_stages)
    values = np.zeros((len(model.step.statistics), count))
    for j, statistic in enumerate(model.step.statistics):
        values[j] = _mean_statistic(statistic, runs, model, cost)
    steps = runs[:, _STEPS]
    flops_row, compute_row, memory_row = model.step.flops.sum(axis=0), model.rates[3].sum(axis=0), model.rates[4]
    n = len(model.weights_s)
    memory_s = memory_row.sum(axis=0) @ values
    active = values[model.row_index] > 0
    tokens = values[model.step.expert_tokens_index] / stages
    for i in range(n):
        touched: Floats = active[i].astype(float)
        where = np.flatnonzero(model.routed == i)
        if where.size:
            touched = touched * (1.0 - model.miss[where[0]] ** tokens)
        memory_s = memory_s + stages * model.light_weights_s[i] * touched
    return steps * (flops_row @ values), steps * (compute_row @ values) / stages, steps * memory_s / stages


def _mean_statistic(statistic: Statistic, runs: Floats, model: StepModel, cost: StepCost) -> Floats | float:
    """A statistic of `bstar.physics` per step, averaged over the steps of each run, on one rank."""
    name, span = statistic
    decodes, prompt = runs[:, _DECODES], runs[:, _PROMPT]
    if span is None:
        per_rank = {
            "tokens": decodes + prompt, "decode_tokens": decodes, "prefill_tokens": prompt,
            "expert_tokens": (decodes + prompt) * model.step.attention_dp,
            "sampled": decodes + runs[:, _CHUNKS], "sequences": decodes + runs[:, _CHUNKS],
            "cached_prefill": runs[:, _CACHED],
        }  # fmt: skip
        return per_rank[name]
    limit = 0 if span.limit is None else span.limit
    prompts = cost.prompt_limit.size
    if name.endswith("_prefill"):
        for g in range(prompts):
            same = (int(cost.prompt_limit[g]) == limit and bool(cost.prompt_gathers[g]) == span.gather
                    and float(cost.prompt_stride[g]) == span.stride)  # fmt: skip
            if same and bool(cost.prompt_restarts[g]) == (span.chunked and limit > 0):
                return runs[:, _SPANS + 2 * g + (name == "keys_prefill")]
        return 0.0
    for g in range(cost.span_limit.size):
        if int(cost.span_limit[g]) == limit and bool(cost.span_restarts[g]) == (span.chunked and limit > 0):
            at = _SPANS + 2 * prompts + 2 * g
            first, growth = runs[:, at], runs[:, at + 1]
            return (first + growth * (runs[:, _STEPS] - 1.0) / 2.0) / span.stride
    return 0.0
