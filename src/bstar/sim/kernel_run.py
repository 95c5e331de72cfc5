"""The compiled kernel's run of one engine, in the form of the readable one: `EngineRun` with its `StepLog`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bstar.sim.deployed import DeployedEngine
from bstar.sim.kernel_log import LogFold
from bstar.sim.slices import in_slices, loaded
from bstar.sim.steps import StepLog
from bstar.sim.stepwise import EngineRun, Progress
from bstar.traffic.load import Traffic

if TYPE_CHECKING:
    from bstar.sim.kernel.cost import StepCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Requests up to which every step is kept: about 300 bytes a request.
MOST_LOGGED = 2_000_000


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
        one_rank=True, model=deployed.model)
    load = kernel_load(settings, traffic)
    keep = traffic.num_requests <= MOST_LOGGED
    engine = KernelEngine(settings, cost, load, keep_runs=keep)
    steps = LogFold(deployed.model, cost, kv_blocks=settings.num_blocks - 1, block_size=settings.block_size,
                    expected_rows=4 * traffic.num_requests + 1024 if keep else 1)
    engine.sink = steps.fold
    compile_s = loaded(engine.advance)
    interrupted = run_sliced(engine, traffic, until_s, progress)
    if keep:
        steps.fold(engine.runs, engine.gaps_s)
    made = _made_tokens(engine, traffic, settings.max_model_len)
    return EngineRun(
        arrival_s=engine.load.arrival_s, scheduled_s=engine.out.scheduled_s,
        first_token_s=engine.out.first_token_s, finish_s=engine.out.finish_s, made_tokens=made,
        preemptions=engine.out.preemptions, cached_tokens=engine.out.cached_tokens,
        log=steps.log(), interrupted=interrupted, implementation="kernel", compile_s=compile_s,
    )  # fmt: skip


class Compiled(Protocol):
    """An engine that a compiled function takes from event to event."""

    @property
    def num_finished(self) -> int: ...
    @property
    def now_s(self) -> float: ...
    def advance(self, until_s: float) -> bool: ...


def run_sliced(engine: Compiled, traffic: Traffic, until_s: float, progress: Progress | None) -> bool:
    """Run a compiled engine on, to the end, to `until_s` or to an interrupt.

    Returns whether it was interrupted.
    """

    def advance(horizon_s: float) -> bool:
        done = engine.advance(horizon_s)
        if progress is not None:
            progress(engine.num_finished, traffic.num_requests, engine.now_s)
        return done

    return in_slices(advance, from_s=float(traffic.arrival_s[0]), span_s=traffic.span_s, until_s=until_s)


def _made_tokens(engine: Any, traffic: Traffic, max_model_len: int) -> Ints:
    """Tokens made by finished requests; of unfinished ones those that are sure: 1 where there is a first token."""
    asked = np.minimum(traffic.output_tokens, np.maximum(max_model_len - traffic.input_tokens, 1))
    finished, begun = ~np.isnan(engine.out.finish_s), ~np.isnan(engine.out.first_token_s)
    made: Ints = np.where(finished, asked, begun)
    return made


def step_log(
    runs: Floats, gaps_s: Floats, deployed: DeployedEngine, cost: StepCost, *, replica: int = 0
) -> StepLog:
    """A run log that was kept whole, as the `StepLog` of engine number `replica`."""
    blocks, size = deployed.settings.num_blocks - 1, deployed.settings.block_size
    fold = LogFold(deployed.model, cost, kv_blocks=blocks, block_size=size)
    fold.fold(runs, gaps_s)
    log = fold.log()
    return replace(log, replica=np.full(len(log), replica, dtype=np.int32))
