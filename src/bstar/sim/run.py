"""`simulate`: a load through a deployment."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.deployed import DeployedEngine, deployed_engine
from bstar.sim.kernel_run import MOST_LOGGED
from bstar.sim.result import SimResult, Timing, came_to
from bstar.sim.steps import merged
from bstar.sim.stepwise import Counts, EngineRun, Progress
from bstar.sim.ways import Implementation, Way, way_of
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo, as_slo
from bstar.traffic.load import Traffic, is_constant

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_COUNTS = ("made_tokens", "preemptions", "cached_tokens")


def simulate(
    deployment: Deployment, traffic: Traffic, *, seed: int = 0, slo: Slo | str | None = None, policy: str = "engine",
    engine: Implementation = "auto", until_s: float = math.inf, progress: Progress | None = None,
) -> SimResult:  # fmt: skip
    """Every request of `traffic` through `deployment`, in simulated time.

        d = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb")
        load = bstar.traffic.poisson(rate_per_s=5, input_tokens=512, output_tokens=128, num_requests=200, seed=0)
        bstar.simulate(d, load).summary.ttft_s.p95

    seed      of the run's own draws (a router's); the load has its own
    slo       what attainment and goodput are about; also as text, "ttft=1s,tpot=50ms"
    policy    "engine" (what the deployment's engine does), or another of `bstar.sim.ways.ways()`
    engine    "kernel" (compiled), "reference" (step by step, readable), "auto": the kernel where it has the policy
    until_s   stop there
    progress  called now and then with (requests finished, of how many, simulated seconds)
    An interrupt (Ctrl-C) ends the run; the result then says `interrupted` and holds what happened so far (of several
    engines those that had run to their end, where there are some). Before the first step it is raised.
    Raises InfeasibleError where the deployment does not start, SpecError where the load can never be served.
    """
    begun, slo = time.perf_counter(), as_slo(slo)
    way = way_of(policy, deployment.engine.name, deployment.parallel.attention_dp)
    deployed = deployed_engine(deployment)
    if way.covers_ranks:
        deployed = replace(deployed, replicas=deployment.parallel.dp)
    rejected = np.asarray(traffic.input_tokens >= deployed.settings.max_model_len)
    kept, index = _accepted(traffic, rejected, deployed.per_request_s, deployed.settings.max_model_len)
    notes = _notes(deployment, traffic, rejected, way, deployed.replicas)
    parts: list[tuple[Ints, EngineRun]] = []
    for replica in range(deployed.replicas):
        mine, where = _share(kept, replica, deployed.replicas)
        if mine is None:
            continue
        run = way.run(deployed, mine, until_s=until_s, progress=progress, implementation=engine)
        run = replace(run, log=replace(run.log, replica=np.full(len(run.log), replica, dtype=np.int32)))
        parts.append((index[where], run))
        if run.interrupted:
            notes = (*notes, *_stopped(len(parts), deployed.replicas))
            break
    interrupted, compile_s = parts[-1][1].interrupted, sum(run.compile_s for _, run in parts)
    if interrupted and len(parts) > 1:
        parts.pop()  # a part of an engine's run beside whole ones would look like an engine that answers fewer
    result = _gathered(traffic, rejected, parts, deployed, way.text, slo, notes)
    if interrupted:
        result = came_to(replace(result, interrupted=True))
    total = time.perf_counter() - begun
    return replace(result, timing=Timing(compile_s=compile_s, simulate_s=total - compile_s, total_s=total))


def _accepted(
    traffic: Traffic, rejected: NDArray[np.bool_], per_request_s: float, max_model_len: int
) -> tuple[Traffic, Ints]:
    """The requests that the engine takes, when its scheduler sees them, and their places in the traffic."""
    keep = ~rejected
    if traffic.has_sessions:  # a turn whose parent is refused is never sent
        parents = traffic.parent
        for r in range(traffic.num_requests):
            if parents[r] >= 0 and not keep[parents[r]]:
                keep[r] = False
    index = np.flatnonzero(keep)
    if index.size == 0:
        raise SpecError(
            f"max_model_len: every prompt is longer than the {max_model_len - 1:,} tokens that fit; "
            "raise --max-model-len or shorten the prompts")
    moved = traffic if index.size == traffic.num_requests else _taken(traffic, index)
    if traffic.concurrency is not None and not traffic.has_sessions:
        # A client whose request is refused sends the next one.
        moved = replace(moved, arrival_s=traffic.arrival_s[: index.size])
    think_s = moved.think_s[:1] if is_constant(moved.think_s) else moved.think_s
    return replace(moved, arrival_s=moved.arrival_s + per_request_s, think_s=think_s + per_request_s), index


def _taken(traffic: Traffic, index: Ints) -> Traffic:
    """Some requests of a traffic, sessions included (a turn only with its parent)."""
    place = np.full(traffic.num_requests + 1, -1, dtype=np.int64)
    place[index] = np.arange(index.size)
    bare = traffic
    if not is_constant(traffic.parent):  # without parents an open loop has to know its arrivals
        clients = 1 if np.isnan(traffic.arrival_s).any() else None
        bare = replace(traffic, parent=np.full(1, -1), concurrency=traffic.concurrency or clients)
    found = bare.take(index)
    warm = int((index < traffic.warmup_requests).sum())
    parent = traffic.parent[:1] if is_constant(traffic.parent) else place[traffic.parent[index]]
    return replace(found, parent=parent, concurrency=traffic.concurrency, warmup_requests=min(warm, index.size - 1))


def _share(load: Traffic, replica: int, replicas: int) -> tuple[Traffic | None, Ints]:
    """The requests of one of several equal replicas, in turn; a conversation stays where it began."""
    count = load.num_requests
    if replicas == 1:
        return load, np.arange(count)
    owner = np.arange(count) % replicas
    if load.has_sessions:
        roots = np.cumsum(load.parent < 0) - 1
        owner = roots % replicas
        for r in np.flatnonzero(load.parent >= 0):
            owner[r] = owner[load.parent[r]]
    where = np.flatnonzero(owner == replica)
    if where.size == 0:
        return None, where
    part = _taken(load, where)
    if load.concurrency is not None:
        clients = int(np.count_nonzero(~np.isnan(part.arrival_s)))
        part = replace(part, concurrency=max(clients, 1))
    return part, where


def _notes(
    deployment: Deployment, traffic: Traffic, rejected: NDArray[np.bool_], way: Way, replicas: int
) -> tuple[str, ...]:
    engine, notes = deployment.engine, []
    if engine.name != "vllm" and way.name == "continuous":
        notes.append(f"{engine.name} is scheduled as vLLM does")
    if traffic.has_prefixes:
        short = int(((traffic.prefix_tokens > 0) & (traffic.prefix_tokens >= traffic.input_tokens)).sum())
        if short:
            notes.append(f"{short:,} prompts are not longer than their shared prefix: all of them is shared text")
    if rejected.any():
        notes.append(f"{int(rejected.sum()):,} of {traffic.num_requests:,} prompts are not shorter than max_model_len "
                     f"({engine.max_model_len:,}) and are refused")
    longer = traffic.input_tokens + traffic.output_tokens > engine.max_model_len
    cut = int((longer & ~rejected).sum())
    if cut:
        notes.append(f"{cut:,} answers end early at max_model_len ({engine.max_model_len:,} tokens)")
    if engine.num_speculative_tokens and way.name != "speculative":
        notes.append("speculative decoding is not simulated: every step makes one token a sequence")
    if way.compiled and traffic.num_requests > MOST_LOGGED:
        notes.append(f"of more than {MOST_LOGGED:,} requests the steps are not kept: no ITL, KV use, MBU, MFU, series")
    if replicas > 1:
        notes.append(f"{replicas} engines take requests in turn")
    return tuple(notes)


def _stopped(begun: int, replicas: int) -> tuple[str, ...]:
    """Which engines are in an interrupted run; they are simulated one after another."""
    if replicas == 1:
        return ()
    if begun == 1:
        return (f"figures are of engine 0 of {replicas}, as far as it came",)
    return (f"figures are of {begun - 1} of {replicas} engines, which had run to their end",)


def _columns(
    count: int, parts: list[tuple[Ints, EngineRun]]
) -> tuple[dict[str, Floats], dict[str, Counts], Ints]:
    """Seconds, counts and engine of every request; a lone engine that took all of them is not copied."""
    names = ("arrival_s", "scheduled_s", "first_token_s", "finish_s")
    if len(parts) == 1 and parts[0][0].size == count:
        run = parts[0][1]
        return (
            {name: getattr(run, name) for name in names}, {name: getattr(run, name) for name in _COUNTS},
            np.broadcast_to(np.zeros(1, dtype=np.int64), (count,)),
        )  # fmt: skip
    seconds = {name: np.full(count, np.nan) for name in names}
    counts: dict[str, Counts] = {name: np.zeros(count, dtype=np.int64) for name in _COUNTS}
    replica = np.full(count, -1, dtype=np.int64)
    for number, (where, run) in enumerate(parts):
        for name, out in seconds.items():
            out[where] = getattr(run, name)
        for name, found in counts.items():
            found[where] = getattr(run, name)
        replica[where] = number
    return seconds, counts, replica


def _gathered(
    traffic: Traffic, rejected: NDArray[np.bool_], parts: list[tuple[Ints, EngineRun]], deployed: DeployedEngine,
    policy: str, slo: Slo | None, notes: tuple[str, ...],
) -> SimResult:  # fmt: skip
    """The runs of all replicas as one result, in the order of the traffic."""
    seconds, counts, replica = _columns(traffic.num_requests, parts)
    sent = seconds["arrival_s"] - deployed.per_request_s
    exact = np.abs(sent - traffic.arrival_s) <= 1e-9  # but for rounding
    seconds["arrival_s"] = np.where(exact, traffic.arrival_s, sent)
    measured = rejected | ~np.isnan(seconds["arrival_s"])
    measured[: traffic.warmup_requests] = False
    return SimResult(
        arrival_s=seconds["arrival_s"], scheduled_s=seconds["scheduled_s"], first_token_s=seconds["first_token_s"],
        finish_s=seconds["finish_s"], input_tokens=np.ascontiguousarray(traffic.input_tokens),
        output_tokens=counts["made_tokens"].astype(np.int64, copy=False), num_preemptions=counts["preemptions"],
        cached_tokens=counts["cached_tokens"], replica=replica, rejected=rejected, measured=measured,
        steps=merged([run.log for _, run in parts]), slo=slo, open_loop=traffic.is_open_loop,
        concurrency=traffic.concurrency, policy=policy, engine=parts[0][1].implementation,
        front_end_s=deployed.per_request_s, notes=notes,
    )  # fmt: skip
