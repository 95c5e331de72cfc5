"""Lock-step data-parallel attention in the compiled form: the same run as `lockstep`'s, from event to event."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.arrays import KernelLoad, blocks_of, engine_of, kernel_load, limits_of, outcome_of
from bstar.sim.cluster.lockstep_kernel import Together, advance_together
from bstar.sim.cluster.pool_cost import decode_cost, prompt_cost
from bstar.sim.deployed import DeployedEngine
from bstar.sim.kernel.state import (
    AT_FAULT,
    ENDED,
    ENDLESS,
    FINISHED,
    FULL,
    GAPS,
    NOW,
    NUM_COUNTS,
    RUN_CONTEXTS,
    RUN_FREE,
    RUNS,
    STUCK,
    Blocks,
    Engine,
    Outcome,
    Slots,
)
from bstar.sim.kernel_log import LogFold, RunWork
from bstar.sim.kernel_run import run_sliced
from bstar.sim.slices import loaded
from bstar.sim.step_cost import step_cost
from bstar.sim.stepwise import EngineRun, Progress
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]

_ROWS = 1 << 14
# Steps of up to so many tokens of all ranks have an entry each in the table of what the ranks do together.
_EXACT_TOKENS = 1 << 13


class _OneOf(RunWork):
    """The work of the mean rank, from rows that count all ranks together."""

    ranks: int = 1

    def of(self, runs: Floats) -> tuple[Floats, Floats, Floats]:
        shared = runs.copy()
        shared[:, RUN_CONTEXTS:] /= self.ranks
        return super().of(shared)


class LockStepEngine:
    """The ranks of one deployment and their load; `advance`, then read `out`, `load` and `log`."""

    def __init__(self, deployed: DeployedEngine, traffic: Traffic) -> None:
        model, deployment, settings = deployed.model, deployed.deployment, deployed.settings
        if model.pipeline_stages > 1:
            raise SpecError("policy: lock-step is not simulated with pipeline stages; use pp=1")
        self.settings, self.ranks = settings, deployment.parallel.attention_dp
        tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
        self.cost = step_cost(deployment, max_tokens=tokens, max_sequences=seqs, one_rank=True, model=model)
        self.prompts = prompt_cost(deployment, model, max_tokens=tokens, max_prompts=seqs, dense=_EXACT_TOKENS)
        self.decode = decode_cost(deployment, model, max_sequences=seqs + 1)
        loaded = kernel_load(settings, traffic)
        self.load, count = loaded.load, traffic.num_requests
        self.limits = limits_of(settings)
        self.out: Outcome = outcome_of(count)
        self.pools = Blocks(*(_repeated(a, self.ranks) for a in blocks_of(settings, loaded)))
        self.engines = self._engines(loaded, count)
        self.together = self._together(loaded, count)
        work = _OneOf(model, self.cost)
        work.ranks = self.ranks
        self.fold = LogFold(model, self.cost, kv_blocks=settings.num_blocks * self.ranks - 1,
                            block_size=settings.block_size, expected_rows=4 * count + 1024)  # fmt: skip
        self.fold.work = work

    def _engines(self, loaded: KernelLoad, count: int) -> Engine:
        one = engine_of(self.settings, self.cost, [], count, run_rows=1, list_finished=True)
        shared: dict[str, Any] = {"known": one.known, "last_s": one.last_s}
        slots = Slots(*(_repeated(a, self.ranks) for a in one.slots))
        gaps = np.zeros((self.ranks, max(_ROWS, 4 * (3 * self.settings.seat_limit + 16))))
        rest: dict[str, Any] = {name: _repeated(getattr(one, name), self.ranks) for name in Engine._fields
                if name not in ("slots", "known", "last_s", "gaps", "runs")}  # fmt: skip
        runs = np.zeros((self.ranks, 0, one.runs.shape[1]))
        return Engine(**rest, **shared, slots=slots, gaps=gaps, runs=runs)

    def _together(self, loaded: KernelLoad, count: int) -> Together:
        again = loaded.load.roots.size > 0 or loaded.load.child.size > 0
        first = count - loaded.order.size if again and loaded.load.child.size else 0
        queue = engine_of(self.settings, self.cost, loaded.order, count, run_rows=1, first_place=first)
        ranks = self.ranks

        def counts() -> NDArray[np.int64]:
            return np.zeros(ranks, np.int64)

        n = np.zeros(NUM_COUNTS, np.int64)
        n[:] = queue.n
        return Together(
            n=n, t=np.zeros(2), order=queue.order, again=int(again), looked=counts(), scheduled=counts(),
            chunks=counts(), victims=counts(), short=counts(), line=np.zeros(ranks), rise=np.zeros(ranks),
            runs=np.zeros((_ROWS, queue.runs.shape[1])))  # fmt: skip

    @property
    def now_s(self) -> float:
        return float(self.together.t[NOW])

    @property
    def num_finished(self) -> int:
        return int(self.together.n[FINISHED])

    def advance(self, until_s: float = math.inf) -> bool:
        """Run on; True: nothing is left to do. Raises SpecError on a request that can never be scheduled or ends."""
        while True:
            status = advance_together(self.limits, self.load, self.cost, self.prompts, self.decode, self.pools,
                                      self.engines, self.together, self.out, float(until_s))  # fmt: skip
            if status == FULL:
                self.drain()
                continue
            if status in (STUCK, ENDLESS):
                raise SpecError(self._fault(status))
            return bool(status == ENDED)

    def drain(self) -> None:
        """Put the logs so far into `fold`."""
        n, runs = self.together.n, self.together.runs[: self.together.n[RUNS]]
        runs[:, RUN_FREE] += self.ranks - 1  # the null blocks of all ranks but one
        gaps = [self.engines.gaps[r, : self.engines.n[r, GAPS]] for r in range(self.ranks)]
        self.fold.fold(runs, np.concatenate(gaps))
        n[RUNS] = 0
        self.engines.n[:, GAPS] = 0

    def _fault(self, status: int) -> str:
        request, s = int(self.together.n[AT_FAULT]), self.settings
        tokens, room = int(self.load.prompt[request]), (s.num_blocks - 1) * s.block_size
        if status == ENDLESS:
            return (f"num_blocks: request {request} of {tokens} tokens outgrows the whole cache of a rank ({room} "
                    "tokens) and never ends; give the engine more blocks or a smaller max_model_len")  # fmt: skip
        return (f"request {request}: {tokens} tokens can never be scheduled with {s.num_blocks} blocks of "
                f"{s.block_size} ({room} tokens) a rank and {s.token_budget} tokens a step "
                "(max_num_batched_tokens)")  # fmt: skip


def run_lock_step(
    deployed: DeployedEngine, traffic: Traffic, until_s: float = math.inf, progress: Progress | None = None
) -> EngineRun:
    """Serve `traffic` on all ranks of `deployed`, to the end, to `until_s` or to an interrupt."""
    engine = LockStepEngine(deployed, traffic)
    compile_s = loaded(engine.advance)
    interrupted = run_sliced(engine, traffic, until_s, progress)
    engine.drain()
    out, settings = engine.out, deployed.settings
    asked = np.minimum(traffic.output_tokens, np.maximum(settings.max_model_len - traffic.input_tokens, 1))
    finished, begun = ~np.isnan(out.finish_s), ~np.isnan(out.first_token_s)
    return EngineRun(
        arrival_s=engine.load.arrival_s, scheduled_s=out.scheduled_s, first_token_s=out.first_token_s,
        finish_s=out.finish_s, made_tokens=np.where(finished, asked, begun), preemptions=out.preemptions,
        cached_tokens=out.cached_tokens, log=engine.fold.log(), interrupted=interrupted, implementation="kernel",
        compile_s=compile_s,
    )  # fmt: skip


def _repeated(array: NDArray[Any], times: int) -> NDArray[Any]:
    return np.repeat(array[np.newaxis], times, axis=0)
