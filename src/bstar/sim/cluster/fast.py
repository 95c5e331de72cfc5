"""Many compiled engines: blind routers split the load among threads, seeing ones run in `compiled.route`."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.sim.arrays import KernelLoad, blocks_of, engine_of, kernel_load, outcome_of
from bstar.sim.cluster.compiled import CODES, Desk, engine_at, pool_at, route
from bstar.sim.cluster.routers import BLIND, Router
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.state import GAPS, PAUSED, RUNS, Blocks, Engine, Outcome, Slots
from bstar.sim.settings import SchedulerSettings
from bstar.sim.stepwise import Progress
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROWS = 1 << 12  # of the run log of one engine, before it is put aside
_LARGE = 1 << 16
_SLICES = 100  # looks at the progress bar and at Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FastRun:
    """What the engines did; arrays by request."""

    out: Outcome
    arrival_s: Floats
    output: Ints
    replica: Ints
    engines: list[KernelEngine]
    interrupted: bool


def run_fast(
    settings: SchedulerSettings, cost: StepCost, traffic: Traffic, router: Router, replicas: int, *,
    until_s: float = math.inf, progress: Progress | None = None, keep_runs: bool = True, threads: int | None = None,
) -> FastRun:  # fmt: skip
    """Serve `traffic` (for which `can_run`) by `replicas` engines. Raises SpecError as `KernelEngine.advance` does.

    threads   of a blind router's engines; None: one per processor
    """
    loaded, out = kernel_load(settings, traffic), outcome_of(traffic.num_requests)
    if router.name in BLIND or replicas == 1:
        owner = router.split(replicas) if replicas > 1 else np.zeros(traffic.num_requests, dtype=np.int64)
        assert owner is not None
        engines = [
            KernelEngine(settings, cost, replace(loaded, order=loaded.order[owner[loaded.order] == k]), out=out,
                         keep_runs=keep_runs)
            for k in range(replicas)
        ]  # fmt: skip
        interrupted = _apart(engines, traffic, until_s, progress, threads)
    else:
        stack = _Stack(settings, cost, loaded, out, replicas, keep_runs)
        engines = [*stack.engines]
        owner, interrupted = _together(stack, loaded, out, router, until_s, progress)
    return FastRun(out=out, arrival_s=loaded.load.arrival_s, output=loaded.load.output.astype(np.int64),
                   replica=owner, engines=engines, interrupted=interrupted)  # fmt: skip


def _apart(
    engines: list[KernelEngine], traffic: Traffic, until_s: float, progress: Progress | None, threads: int | None
) -> bool:
    """Engines that know nothing of each other, in threads. Returns whether it was interrupted."""
    workers = min(threads or os.cpu_count() or 1, len(engines))
    stop = [False]

    def serve(engine: KernelEngine) -> None:
        step_s = max(traffic.span_s / _SLICES, 1.0)
        at, done = 0.0, False
        while not (done or stop[0] or at >= until_s):
            at = min(at + step_s, until_s)
            step_s *= 1.25
            done = engine.advance(at)
            if progress is not None and workers == 1:
                progress(sum(e.num_finished for e in engines), traffic.num_requests, engine.now_s)

    if workers == 1:
        try:
            for engine in engines:
                serve(engine)
        except KeyboardInterrupt:
            return True
        return False
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(serve, engine) for engine in engines]
        try:
            for job in jobs:
                job.result()
                if progress is not None:
                    progress(sum(e.num_finished for e in engines), traffic.num_requests, engines[0].now_s)
        except KeyboardInterrupt:
            stop[0] = True
            return True
        except BaseException:
            stop[0] = True
            raise
    return False


class _Row(KernelEngine):
    """An engine whose state lies in a stack, and must stay there."""

    def _drain(self) -> None:
        s = self.state
        self._runs.append(s.runs[: s.n[RUNS]].copy())
        self._gaps.append(s.gaps[: s.n[GAPS]].copy())
        s.n[RUNS] = s.n[GAPS] = 0


class _Stack:
    """Engines side by side in the same arrays, for `compiled.route`; what is by request number they share."""

    def __init__(
        self, settings: SchedulerSettings, cost: StepCost, loaded: KernelLoad, out: Outcome, replicas: int,
        keep_runs: bool,
    ) -> None:  # fmt: skip
        one = engine_of(settings, cost, [], len(loaded.load.prompt), run_rows=_ROWS if keep_runs else 0)
        slots = Slots(*(_repeated(array, replicas) for array in one.slots))
        stacked = {name: _repeated(getattr(one, name), replicas) for name in Engine._fields
                   if name not in ("slots", "known", "last_s")}  # fmt: skip
        self.states = Engine(**stacked, slots=slots, known=one.known, last_s=one.last_s)
        self.pools = Blocks(*(_repeated(array, replicas) for array in blocks_of(settings, loaded)))
        self.engines: list[KernelEngine] = []
        few = replace(loaded, load=loaded.load._replace(prompt=loaded.load.prompt[:1]))
        for k in range(replicas):
            engine = _Row(settings, cost, few, out=out, feedback=False, expects_order=False)
            engine.load = loaded.load
            engine.state = engine_at.py_func(self.states, k)
            engine.blocks = pool_at.py_func(self.pools, k)
            self.engines.append(engine)


def _repeated(array: NDArray[Any], times: int) -> NDArray[Any]:
    """`times` copies in one array; memory that is zero is not touched."""
    if array.size > _LARGE and not array.any():
        return np.zeros((times, *array.shape), array.dtype)
    return np.repeat(array[np.newaxis], times, axis=0)


def _together(
    stack: _Stack, loaded: KernelLoad, out: Outcome, router: Router, until_s: float,
    progress: Progress | None,
) -> tuple[Ints, bool]:  # fmt: skip
    """A router that looks. Returns who got each request, and whether it was interrupted."""
    engines, arrivals, count = stack.engines, loaded.order, len(stack.engines)
    coming = int(np.searchsorted(loaded.load.arrival_s[arrivals], until_s))
    desk = Desk(
        arrivals=arrivals, draws=router.draws, replica=np.full(len(arrivals), -1, dtype=np.int64),
        next=np.zeros(2, np.int64), sent=np.zeros(count, np.int64), finished=np.zeros(count, np.int64),
        quiet_s=np.zeros(count))  # fmt: skip
    try:
        while desk.next[0] < coming:
            last = min(int(desk.next[0]) + max(coming // _SLICES, 1000), coming)
            status = PAUSED + 1
            while status != PAUSED:
                status = route(engines[0].limits, loaded.load, engines[0].cost, out, stack.pools, stack.states, desk,
                               CODES[router.name], last)  # fmt: skip
                if status != PAUSED:  # a full log, or a request that can never be served: the engine itself says so
                    k = int(desk.next[1])
                    at = float(loaded.load.arrival_s[arrivals[desk.next[0]]])
                    engines[k].advance(at)
            if progress is not None:
                progress(sum(e.num_finished for e in engines), len(arrivals), engines[0].now_s)
        for engine in engines:
            engine.advance(until_s)
    except KeyboardInterrupt:
        return desk.replica, True
    return desk.replica, False
