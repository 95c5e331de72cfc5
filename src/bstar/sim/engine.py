"""One engine in the compiled kernel: run it on, hand it requests, read what it did."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.arrays import KernelLoad, blocks_of, engine_of, limits_of, outcome_of
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.loop import advance
from bstar.sim.kernel.state import (
    ADMITTED,
    ARRIVED,
    AT_FAULT,
    ENDED,
    ENDLESS,
    EVENTS,
    EXPECTED,
    FINISHED,
    FINISHING,
    FREE,
    FRONT,
    FULL,
    GAPS,
    LEAST_FREE,
    LOGGED,
    NOW,
    RUNNING,
    RUNS,
    STEPS,
    STUCK,
    Engine,
    Outcome,
)
from bstar.sim.settings import SchedulerSettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]

_FIRST_ROWS = 1 << 14
_MOST_ROWS = 1 << 18


class KernelEngine:
    """An engine with its load. `out` has the results per request; the load's arrays are changed by the run.

    keep_runs       keep the run log and the irregular gaps
    keep_decisions  keep the decision log (slow: a row per request and step with prompts)
    feedback        answers make further requests arrive (closed loops, sessions); False: only `submit` does
    expects_order   False: the queue starts empty, requests come by `submit`
    """

    def __init__(
        self, settings: SchedulerSettings, cost: StepCost, loaded: KernelLoad, *, keep_runs: bool = False,
        keep_decisions: bool = False, feedback: bool = True, expects_order: bool = True, out: Outcome | None = None,
        list_finished: bool = False, empty_step_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.settings, self.cost, self.load = settings, cost, loaded.load
        count = len(loaded.load.prompt)
        again = feedback and (loaded.load.roots.size > 0 or loaded.load.child.size > 0)
        self.limits = limits_of(settings, feedback=again, empty_step_s=empty_step_s)
        self.blocks = blocks_of(settings, loaded)
        self.out = outcome_of(count) if out is None else out
        rows = max(_FIRST_ROWS, 4 * (3 * settings.seat_limit + 16))
        self.state: Engine = engine_of(
            settings, cost, loaded.order if expects_order else [], count, list_finished=list_finished,
            log_rows=rows if keep_decisions else 0, run_rows=rows if keep_runs else 0,
            # Later turns come between arrivals that are given: those before them move up.
            first_place=count - loaded.order.size if again and loaded.load.child.size else 0,
        )  # fmt: skip
        # Where full run logs go (rows, irregular gaps) instead of being kept; both are overwritten afterwards.
        self.sink: Callable[[Floats, Floats], None] | None = None
        self._runs: list[Floats] = []
        self._gaps: list[Floats] = []
        self._log: list[Ints] = []
        self._log_s: list[Floats] = []

    def advance(self, until_s: float = math.inf) -> bool:
        """Run on; True: nothing is left to do. Nothing that an arrival at `until_s` could change is decided.

        Raises SpecError on a request that can never be scheduled or never ends.
        """
        while True:
            status = advance(self.limits, self.load, self.cost, self.blocks, self.state, self.out, float(until_s))
            if status == FULL:
                self._drain()
                continue
            if status in (STUCK, ENDLESS):
                raise SpecError(self._fault(status))
            return bool(status == ENDED)

    def submit(self, request: int, arrival_s: float) -> None:
        """Request number `request` arrives at `arrival_s`: not before an earlier arrival, nor before `until_s`."""
        n = self.state.n
        self.load.arrival_s[request] = arrival_s
        self.state.order[n[EXPECTED]] = request
        n[EXPECTED] += 1

    @property
    def now_s(self) -> float:
        return float(self.state.t[NOW])

    @property
    def running(self) -> int:
        """Requests that hold a seat and still make tokens."""
        return int(self.state.n[RUNNING] - self.state.n[FINISHING])

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        n = self.state.n
        return int(n[FRONT] if self.limits.by_priority else n[FRONT] + n[ARRIVED] - n[ADMITTED])

    @property
    def free_blocks(self) -> int:
        return int(self.state.n[FREE])

    @property
    def least_free_blocks(self) -> int:
        return int(self.state.n[LEAST_FREE])

    @property
    def steps(self) -> int:
        return int(self.state.n[STEPS])

    @property
    def events(self) -> int:
        """Planning points that were visited."""
        return int(self.state.n[EVENTS])

    @property
    def num_finished(self) -> int:
        return int(self.state.n[FINISHED])

    @property
    def finished(self) -> SmallInts:
        """Requests in the order of finishing (`list_finished`)."""
        return self.state.finished[: self.num_finished]

    @property
    def runs(self) -> Floats:
        """The run log (`keep_runs`), columns as in `kernel.state.RUN_START_S` …"""
        return np.concatenate([*self._runs, self.state.runs[: self.state.n[RUNS]]])

    @property
    def gaps_s(self) -> Floats:
        """Gaps between tokens of a request that are no single step: after a preemption, or passed over."""
        return np.concatenate([*self._gaps, self.state.gaps[: self.state.n[GAPS]]])

    @property
    def decisions(self) -> tuple[Ints, Floats]:
        """The decision log (`keep_decisions`): rows and their times; see `bstar.sim.decisions.unfold`."""
        used = self.state.n[LOGGED]
        return np.concatenate([*self._log, self.state.log[:used]]), np.concatenate(
            [*self._log_s, self.state.log_s[:used]]
        )

    def _drain(self) -> None:
        """Put full logs aside, and make room that grows with them."""
        s = self.state
        if self.sink is not None:
            self.sink(s.runs[: s.n[RUNS]], s.gaps[: s.n[GAPS]])
            s.n[RUNS] = s.n[GAPS] = 0
            return
        if s.runs.shape[0]:
            self._runs.append(s.runs[: s.n[RUNS]].copy())
            self._gaps.append(s.gaps[: s.n[GAPS]].copy())
        if s.log.shape[0]:
            self._log.append(s.log[: s.n[LOGGED]].copy())
            self._log_s.append(s.log_s[: s.n[LOGGED]].copy())
        s.n[RUNS] = s.n[GAPS] = s.n[LOGGED] = 0
        rows = min(2 * s.runs.shape[0], max(_MOST_ROWS, s.runs.shape[0]))
        if rows > s.runs.shape[0]:
            self.state = s._replace(runs=np.zeros((rows, s.runs.shape[1])), gaps=np.zeros(max(rows, s.gaps.size)))

    def _fault(self, status: int) -> str:
        request, s = int(self.state.n[AT_FAULT]), self.settings
        tokens = int(max(self.state.known[request], self.load.prompt[request]))
        room = (s.num_blocks - 1) * s.block_size
        if status == ENDLESS:
            return (f"num_blocks: request {request} of {tokens} tokens outgrows the whole cache ({room} tokens) and "
                    "never ends; give the engine more blocks or a smaller max_model_len")  # fmt: skip
        return (
            f"request {request}: {tokens} tokens can never be scheduled with {s.num_blocks} blocks of "
            f"{s.block_size} ({room} tokens) and {s.token_budget} tokens a step (max_num_batched_tokens)"
        )
