"""A deployment as the simulator sees it: the scheduler's settings, and the step times of one engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bstar.errors import InfeasibleError
from bstar.latency.constants import Constants, constants_for
from bstar.latency.step_model import StepModel, step_model
from bstar.physics.batch import BatchShape
from bstar.physics.memory import memory_budget
from bstar.sim.settings import SchedulerSettings
from bstar.specs.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedEngine:
    """One engine of a deployment, of `replicas` equal ones behind its endpoint.

    A rank of attention data parallelism is one: it has a scheduler and a cache of its own, and its experts see the
    tokens of all ranks, which are taken to be alike.

    per_request_s   outside the steps: tokenizing, HTTP; before the scheduler sees the request
    """

    deployment: Deployment
    settings: SchedulerSettings
    model: StepModel
    replicas: int
    per_request_s: float


def deployed_engine(deployment: Deployment, constants: Constants | None = None) -> DeployedEngine:
    """The engine of `deployment`, with its own constants or others. InfeasibleError where it would not start."""
    if constants is None:
        constants = constants_for(deployment)
    engine, parallel = deployment.engine, deployment.parallel
    budget = memory_budget(deployment)
    if not budget.fits:
        raise InfeasibleError(f"{deployment.model.name} does not fit: {budget.reason}", reasons=[str(budget.reason)])
    # Several groups of layers share the pool: a token then costs a block in each, and what counts is tokens.
    size, blocks = engine.max_model_len, int(budget.max_concurrency) + 1  # states alone: a sequence has one place
    if budget.block_size:
        size, blocks = budget.block_size, min(budget.num_blocks, budget.kv_cache_tokens // budget.block_size + 1)
    settings = SchedulerSettings(
        block_size=size, num_blocks=max(blocks, 2), max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens, max_model_len=engine.max_model_len,
        enable_prefix_caching=engine.enable_prefix_caching, enable_chunked_prefill=engine.enable_chunked_prefill,
        long_prefill_token_threshold=engine.long_prefill_token_threshold, policy=engine.scheduling_policy,
        async_scheduling=engine.async_scheduling,
    )  # fmt: skip
    return DeployedEngine(
        deployment=deployment, settings=settings, model=step_model(deployment, constants),
        replicas=parallel.dp * parallel.attention_dp, per_request_s=constants["request_s"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Of one step: expected seconds, its FLOPs, and what arithmetic and reading alone would take at the peaks."""

    seconds: float
    flops: float
    compute_s: float
    memory_s: float


def step_figures(model: StepModel, shape: BatchShape) -> StepFigures:
    """The figures of a step of one engine's batch, `shape`.

    With pipeline stages a step is one token for everybody, and each stage works on its share of the sequences.
    """
    stages, ranks = 1.0, model.step.attention_dp
    if ranks > 1:
        shape = replace(shape, count=shape.count * ranks)
    if model.pipeline_stages > 1:
        total = float(shape.count.sum())
        stages = total / float(model.microbatch(total))
        shape = replace(shape, count=shape.count / stages)
    values = model.step.values(shape)
    work = model.work_of(values)
    return StepFigures(
        seconds=float(model.times(work).total_s), flops=stages * float((model.step.flops @ values).sum()),
        compute_s=stages / model.pipeline_stages * float(work.light_compute.sum()),
        memory_s=stages / model.pipeline_stages * float(work.light_memory.sum()),
    )  # fmt: skip
