"""A measured point through the compiled simulator, and its steps as a weighted sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from steps import StepSample, binned, integral, statistic_columns

from bstar.calibration.loads import load_of
from bstar.calibration.point import Point
from bstar.calibration.replay import _with_room
from bstar.errors import BstarError, InfeasibleError, SpecError
from bstar.sim.arrays import kernel_load
from bstar.sim.deployed import DeployedEngine, deployed_engine
from bstar.sim.engine import KernelEngine
from bstar.sim.policies import registry
from bstar.sim.policies.fast import policy_kernel
from bstar.sim.step_cost import step_cost
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
# Columns of the kernel's run log.
START, STEPS, BASE, SLOPE, DECODES, PROMPT, CHUNKS, SPANS = 0, 1, 2, 3, 11, 12, 14, 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """Means over requests, in seconds; request_s is in ttft_s and not in the sample's Σ.

    tpot_factor, ttft_factor   the simulation over the sample's Σ, 1 but for what binning loses
    """

    deployment: Deployment
    ttft_s: float
    tpot_s: float
    request_s: float
    preemptions: int
    sample: StepSample
    tpot_factor: float
    ttft_factor: float


def simulated(point: Point, deployment: Deployment, constants: Any = None, *, bins: int = 48) -> Simulated:
    """The engine with most clients; with more memory where the model says that it would not start."""
    first: BstarError | None = None
    for tried, _ in _with_room(deployment):
        try:
            deployed = deployed_engine(tried, constants)
            clients = -(-point.concurrency // deployed.replicas)
            return _simulated(deployed, load_of(point, clients), bins)
        except (InfeasibleError, SpecError) as error:
            first = first or error
    assert first is not None
    raise first


def _simulated(deployed: DeployedEngine, traffic: Traffic, bins: int) -> Simulated:
    seconds = deployed.per_request_s
    load = replace(traffic, arrival_s=traffic.arrival_s + seconds, think_s=traffic.think_s[:1] + seconds)
    runs, cost, arrival, first, finish, made, preemptions = _run(deployed, load)
    m = runs[:, STEPS]
    duration = m * runs[:, BASE] + runs[:, SLOPE] * (m * (m + 1) / 2)
    start, end = runs[:, START], runs[:, START] + duration
    counts = np.arange(len(first)) >= traffic.warmup_requests
    tpot = (finish - first) / np.maximum(made - 1, 1)
    many = (made > 1) & counts
    each = np.where(many, 1.0 / np.maximum(made - 1, 1), 0.0) / many.sum()
    one = counts / counts.sum()
    step_s = np.maximum(duration / m, 1e-12)
    w_tpot = (integral(first, finish, each, end) - integral(first, finish, each, start)) / step_s
    w_ttft = (integral(arrival, first, one, end) - integral(arrival, first, one, start)) / step_s
    prompts, spans = cost.prompt_limit.size, cost.span_limit.size
    columns = runs[:, : SPANS + 2 * prompts + 2 * spans].copy()
    for g in range(spans):
        at = SPANS + 2 * prompts + 2 * g
        columns[:, at] += runs[:, at + 1] * ((m - 1) / 2)
    values = statistic_columns(deployed.model, cost) @ columns.T
    sample = binned(values, w_tpot, w_ttft, duration / m, runs[:, PROMPT] > 0, bins)
    in_bins = deployed.model.expected_s(sample.values)
    waited, each_s = float(np.mean((first - arrival)[counts])), float(tpot[many].mean())
    return Simulated(
        deployment=deployed.deployment, ttft_s=waited + seconds, tpot_s=each_s, request_s=seconds,
        preemptions=int(preemptions.sum()), sample=sample, tpot_factor=each_s / float(sample.tpot @ in_bins),
        ttft_factor=waited / float(sample.ttft @ in_bins),
    )  # fmt: skip


def _run(deployed: DeployedEngine, load: Traffic):
    settings = deployed.settings
    engine = deployed.deployment.engine.name
    if engine == "vllm":
        cost = step_cost(deployed.deployment, max_tokens=settings.max_num_batched_tokens,
                         max_sequences=settings.max_num_seqs, one_rank=True, model=deployed.model)
        kernel = KernelEngine(settings, cost, kernel_load(settings, load), keep_runs=True)
        kernel.advance()
        made = np.asarray(load.output_tokens, dtype=float)
        return (kernel.runs, cost, kernel.load.arrival_s, kernel.out.first_token_s, kernel.out.finish_s, made,
                kernel.out.preemptions)
    built = registry._BUILDERS["sglang" if engine == "sglang" else "trtllm-no-evict"](deployed, {})
    seats = settings.seat_limit
    cost = step_cost(deployed.deployment, max_tokens=settings.token_budget + seats, max_sequences=2 * seats,
                     one_rank=True, model=deployed.model)
    kernel = policy_kernel(settings, built.fast, load, cost)
    kernel.advance()
    s = kernel.state
    made = s.known - kernel.requests.prompt
    return kernel.runs, cost, kernel.requests.arrival_s, s.first_s, s.finish_s, made, s.preemptions
