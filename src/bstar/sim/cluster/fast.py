"""Clusters of compiled engines: what needs no look at the replicas runs in threads, the rest in `rows`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstar.sim.arrays import kernel_load, outcome_of
from bstar.sim.cluster.ledger import Ledger
from bstar.sim.cluster.loop import Fleet, Progress
from bstar.sim.cluster.routers import BLIND, Router
from bstar.sim.cluster.rows import FastCluster
from bstar.sim.cluster.stack import Stack
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.state import Outcome
from bstar.sim.settings import SchedulerSettings
from bstar.sim.slices import in_slices, loaded
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FastRun:
    """What the engines did; arrays by request.

    logs     run log and irregular gaps of each replica
    states   (seconds, replica, state), in order of time
    spans    from when to when each replica was there; nan: to the end
    held     numbers of the requests that found no replica
    compile_s  spent on loading compiled code before the first step
    """

    out: Outcome
    arrival_s: Floats
    output: Ints
    replica: Ints
    retries: Ints
    logs: list[tuple[Floats, Floats]]
    states: list[tuple[float, int, str]]
    spans: list[tuple[float, float]]
    held: Sequence[int]
    interrupted: bool
    compile_s: float


def run_fast(
    settings: SchedulerSettings, cost: StepCost, traffic: Traffic, router: Router, fleet: Fleet, *,
    until_s: float = math.inf, progress: Progress | None = None, keep_runs: bool = True, threads: int | None = None,
) -> FastRun:  # fmt: skip
    """Serve `traffic` (for which `can_run`). Raises SpecError as `KernelEngine.advance` does.

    threads   of a blind router's engines; None: one per processor
    """
    requests, out, n = kernel_load(settings, traffic), outcome_of(traffic.num_requests), traffic.num_requests
    output = requests.load.output.astype(np.int64)
    alone = traffic.is_open_loop or (traffic.concurrency is None and router.name == "session-affinity")
    if fleet.fixed and (fleet.replicas == 1 or (alone and router.name in BLIND)):
        owner = router.split(fleet.replicas)
        assert owner is not None
        engines = [
            KernelEngine(settings, cost, replace(requests, order=requests.order[owner[requests.order] == k]), out=out,
                         keep_runs=keep_runs)
            for k in range(fleet.replicas)
        ]  # fmt: skip
        compile_s = loaded(engines[0].advance)
        interrupted = _apart(engines, traffic, until_s, progress, threads)
        return FastRun(
            out=out, arrival_s=requests.load.arrival_s, output=output, replica=owner, interrupted=interrupted, held=(),
            retries=np.zeros(n, dtype=np.int64), logs=[(e.runs, e.gaps_s) for e in engines],
            states=[(0.0, k, state) for k in range(fleet.replicas) for state in ("starting", "ready")],
            spans=[(0.0, math.nan)] * fleet.replicas, compile_s=compile_s,
        )  # fmt: skip
    stack = Stack(settings, cost, requests, out, router.draws, fleet.replicas, keep_runs,
                  not traffic.is_open_loop)  # fmt: skip
    cluster = FastCluster(
        Ledger.bare(traffic), router, fleet, lambda number, ready_s, finished: cluster.make_row(number, ready_s),
        stack=stack, replica=np.full(n, -1, dtype=np.int64))  # fmt: skip
    compile_s = loaded(cluster.load_kernels)
    cluster.run(until_s=until_s, progress=progress)
    return FastRun(
        out=out, arrival_s=requests.load.arrival_s, output=output, replica=cluster.replica,
        retries=cluster.ledger.retries, logs=[cluster.logs_of(m) for m in cluster.members],
        states=sorted(cluster.states, key=lambda s: s[0]), spans=[(m.started_s, m.gone_s) for m in cluster.members],
        held=tuple(cluster.held), interrupted=cluster.interrupted, compile_s=compile_s,
    )  # fmt: skip


def _apart(
    engines: list[KernelEngine], traffic: Traffic, until_s: float, progress: Progress | None, threads: int | None
) -> bool:
    """Engines that know nothing of each other, in threads, slice by slice. Returns whether it was interrupted."""
    with ThreadPoolExecutor(min(threads or os.cpu_count() or 1, len(engines))) as pool:

        def advance(horizon_s: float) -> bool:
            done = _together(pool, engines, horizon_s)
            if progress is not None:
                progress(sum(e.num_finished for e in engines), traffic.num_requests, max(e.now_s for e in engines))
            return done

        return in_slices(advance, from_s=float(traffic.arrival_s[0]), span_s=traffic.span_s, until_s=until_s)


def _together(pool: ThreadPoolExecutor, engines: list[KernelEngine], horizon_s: float) -> bool:
    """Advance all engines; True: nothing is left to do. None of them runs any more, however this ends."""
    jobs: list[Future[bool]] = []
    try:
        jobs.extend(pool.submit(engine.advance, horizon_s) for engine in engines)
        done = [job.result() for job in jobs]
        return all(done)
    finally:
        wait(jobs)
