"""`simulate_cluster`: a load through many replicas of a deployment."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.cluster.decode import DecodeReplica
from bstar.sim.cluster.fleet import Autoscaler, Drain, Failure, check_autoscaler, check_number, most_engines
from bstar.sim.cluster.ledger import Ledger
from bstar.sim.cluster.loop import GONE, Cluster, Fleet, MakeReplica, Progress
from bstar.sim.cluster.pools import FirstToken, SplitCluster
from bstar.sim.cluster.replica import Figures, Finished, Replica
from bstar.sim.cluster.routers import Router, can_run, checked
from bstar.sim.cluster.transfer import KvLink, Transfers, link_of
from bstar.sim.deployed import DeployedEngine, deployed_engine, step_figures
from bstar.sim.result import SimResult, Timing, came_to
from bstar.sim.steps import StepLog, merged
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo, as_slo
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EngineChoice = Literal["auto", "kernel", "reference"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterResult(SimResult):
    """A run of several replicas. `replica` is the one that finished a request (or had it last), -1: none.

    router            how requests were spread
    retries           per request: times its replica failed under it
    prefill_replica   per request: who computed its prompt, where pools are apart (else -1)
    moved_bytes       per request: KV cache sent to the decode pool
    moved_s           per request: from the end of its prefill to the cache's arrival there, nan where nothing was sent
    first_token_from  which pool showed users the first token
    states            (seconds, replica, "starting" | "ready" | "draining" | "gone"), in order of time
    replica_s         seconds that replicas were there, starting included, added up: what is paid for
    """

    router: str
    retries: Ints
    prefill_replica: Ints
    moved_bytes: Floats
    moved_s: Floats
    first_token_from: FirstToken
    states: tuple[tuple[float, int, str], ...]
    replica_s: float

    @property
    def placed_s(self) -> Floats:
        """As of one engine; with pools apart, when its cache has come to the decode pool."""
        apart = self.prefill_replica >= 0
        if not apart.any():
            return self.scheduled_s
        alone = ~np.isnan(self.finish_s) & np.isnan(self.moved_s)  # one token: nothing was sent
        shown = (self.retries == 0) & (self.first_token_from == "decode")  # the first token came with the cache
        later_s = self.first_token_s + np.where(shown, 0.0, self.moved_s)
        landed_s = np.where(alone, self.scheduled_s, later_s)
        return np.where(apart, landed_s, self.scheduled_s)


def simulate_cluster(
    deployment: Deployment, traffic: Traffic, *, replicas: int = 1, router: str = "round-robin", seed: int = 0,
    slo: Slo | str | None = None, startup_s: float = 0.0, autoscaler: Autoscaler | None = None,
    failures: Sequence[Failure] = (), drains: Sequence[Drain] = (), prefill_replicas: int = 0,
    decode_replicas: int = 0, decode_router: str = "least-outstanding", kv_link: KvLink | None = None,
    first_token_from: FirstToken = "decode", engine: EngineChoice = "auto", until_s: float = math.inf,
    progress: Progress | None = None,
) -> ClusterResult:  # fmt: skip
    """Every request of `traffic` through several replicas of `deployment`, in simulated time.

        d = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb")
        load = bstar.traffic.poisson(rate_per_s=40, input_tokens=512, output_tokens=128, num_requests=2000, seed=0)
        simulate_cluster(d, load, replicas=4, router="power-of-two").summary.ttft_s.p95

    replicas, router   how many, and one of `ROUTERS`; with an autoscaler the number at the start. Each is the whole
                       deployment: with `dp` so many engines, all of them behind the router
    seed               of the router's draws; the load has its own
    startup_s          until a replica that is started later takes its first request
    failures, drains   what happens to replicas; requests of a failed one are computed again elsewhere
    prefill_replicas, decode_replicas, decode_router, kv_link   separate pools (then `replicas` is not used):
                       replicas 0 … prefill_replicas − 1 compute prompts. The link is that between nodes unless given
    first_token_from   which pool shows a user the first token: "decode", when the cache has arrived (vLLM, SGLang), or
                       "prefill", at once
    engine             "reference": step by step; "kernel": compiled, where nothing has to be undone;
                       "auto": the kernel where it can
    An interrupt (Ctrl-C) ends the run with all replicas at one moment; the result then says `interrupted` and holds
    what happened so far. Before the first step it is raised.
    Raises InfeasibleError where the deployment does not start, SpecError where the load can never be served.
    """
    begun, slo = time.perf_counter(), as_slo(slo)
    checked(router)
    _check(replicas, startup_s, prefill_replicas, decode_replicas, autoscaler)
    _check_layout(deployment, replicas, prefill_replicas, autoscaler)
    copies = deployment.parallel.dp
    replicas, prefill_replicas, decode_replicas = (
        count * copies for count in (replicas, prefill_replicas, decode_replicas))
    deployed = deployed_engine(deployment)
    most = most_engines(deployed.settings.num_blocks, deployed.settings.enable_prefix_caching)
    check_number("prefill and decode replicas" if prefill_replicas else "replicas",
                 prefill_replicas + decode_replicas or replicas, most)
    if autoscaler is not None:
        check_autoscaler(autoscaler, most)
    rejected = np.asarray(traffic.input_tokens >= deployed.settings.max_model_len)
    if rejected.all():
        raise SpecError(
            f"max_model_len: every prompt is longer than the {deployed.settings.max_model_len - 1:,} tokens that fit; "
            "raise --max-model-len or shorten the prompts")
    late = deployed.per_request_s
    seen = replace(traffic, arrival_s=traffic.arrival_s + late, think_s=traffic.think_s + late)
    served = np.arange(traffic.num_requests)
    if rejected.any() and not traffic.has_sessions and traffic.concurrency is None:
        served = np.flatnonzero(~rejected)
        seen = seen.take(served)
    refused = rejected.tolist() if rejected.any() and served.size == rejected.size else ()
    entrance = Router(router, seen, seed=seed)
    fleet = Fleet(replicas=prefill_replicas + decode_replicas or replicas, startup_s=startup_s,
                  autoscaler=autoscaler, failures=failures, drains=drains, most=most)  # fmt: skip
    _check_events(fleet)
    compiled = not prefill_replicas and can_run(seen, fleet.fixed) and not refused
    if engine == "kernel" and not compiled:
        raise SpecError("engine: the kernel takes one pool and a load whose arrivals are given; use engine auto")
    if engine != "reference" and compiled:
        parts = _compiled(deployed, seen, entrance, fleet, until_s, progress)
    else:
        ledger, figures = Ledger.of(seen, deployed.settings.block_size), figures_of(deployed)
        if prefill_replicas:
            transfers = Transfers(kv_link if kv_link is not None else link_of(deployment), deployment)
            cluster: Cluster = _split(ledger, entrance, fleet, deployed, figures, refused, prefill_replicas,
                                      Router(decode_router, seen, seed=seed), transfers, first_token_from)  # fmt: skip
        else:
            cluster = Cluster(ledger, entrance, fleet, _maker(deployed, figures, ledger), refused)
        cluster.run(until_s=until_s, progress=progress)
        parts = _stepped(cluster)
    if parts.interrupted or until_s < math.inf:
        parts = replace(parts, left=())  # an engine may still come
    result = _gathered(traffic, rejected, served, parts, late, slo, router, first_token_from,
                       (*_of_copies(fleet.replicas, copies), *_notes(parts, fleet)))
    if parts.interrupted:
        result = came_to(result)
    total = time.perf_counter() - begun
    timing = Timing(compile_s=parts.compile_s, simulate_s=total - parts.compile_s, total_s=total)
    return replace(result, timing=timing)


def figures_of(deployed: DeployedEngine) -> Figures:
    """Step figures of a deployment's engine."""
    model = deployed.model
    return lambda shape: step_figures(model, shape)


def _check(
    replicas: int, startup_s: float, prefill: int, decode: int, autoscaler: Autoscaler | None
) -> None:
    for name, value in (("replicas", replicas), ("prefill replicas", prefill), ("decode replicas", decode)):
        least = 1 if name == "replicas" or prefill or decode else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"{name}: must be a whole number of at least {least}, is {value!r}")
    if not 0 <= startup_s < math.inf:
        raise SpecError(f"startup: must be at least 0 seconds, is {startup_s}")
    if autoscaler is not None and prefill:
        raise SpecError("autoscale: separate pools have fixed sizes; leave --autoscale or the pools out")


def _check_layout(deployment: Deployment, replicas: int, prefill: int, autoscaler: Autoscaler | None) -> None:
    """Replicas that are simulated side by side are engines that step on their own."""
    ranks, copies = deployment.parallel.attention_dp, deployment.parallel.dp
    if ranks > 1:
        together = f"the {ranks} ranks of a deployment with attention data parallelism step together"
        if prefill:
            raise SpecError(f"prefill-replicas: {together}, which is not simulated in separate pools; simulate one "
                            "replica without them")
        if replicas > 1:
            raise SpecError(f"replicas: {together}, and several such deployments are not simulated side by side; "
                            f"simulate one replica at its share of the load (--rate R/{replicas}), without --replicas")
        raise SpecError(f"attention_dp: {together}, which is not simulated behind a router; leave --replicas, "
                        "--router, --autoscale, --fail and --drain out")
    if autoscaler is not None and copies > 1:
        raise SpecError(f"autoscale: starts and stops single engines, not deployments of --dp {copies}; leave --dp out")


def _of_copies(engines: int, copies: int) -> tuple[str, ...]:
    """What a replica is, where it is not one engine."""
    return (f"a replica is {copies} engines (dp {copies}): {engines:,} behind the router",) if copies > 1 else ()


def _check_events(fleet: Fleet) -> None:
    """What happens to engines of a fixed number happens to one of them."""
    if fleet.autoscaler is not None:
        return  # engines that it starts get numbers of their own
    for field, events in (("fail", fleet.failures), ("drain", fleet.drains)):
        for event in events:
            if event.replica >= fleet.replicas:
                there = "is engine 0 only" if fleet.replicas == 1 else f"are engines 0 to {fleet.replicas - 1}"
                raise SpecError(f"{field}: engine {event.replica} does not exist; there {there}")


def _maker(deployed: DeployedEngine, figures: Figures, ledger: Ledger) -> MakeReplica:
    def make(number: int, ready_s: float, finished: Finished) -> Replica:
        return Replica(number, deployed.settings, figures, ledger, finished, ready_s=ready_s)

    return make


def _split(
    ledger: Ledger, router: Router, fleet: Fleet, deployed: DeployedEngine, figures: Figures,
    refused: Sequence[bool], prefill: int, decode_router: Router, transfers: Transfers, first_token_from: FirstToken,
) -> SplitCluster:  # fmt: skip
    settings = deployed.settings

    def make(number: int, ready_s: float, finished: Finished) -> Replica:
        if number < prefill:
            return Replica(number, settings, figures, ledger, finished, ready_s=ready_s, output=1)
        return DecodeReplica(
            number, settings, figures, ledger, finished, ready_s=ready_s,
            reserved=lambda rank, at_s, kept: cluster.reserved(number, rank, at_s, kept),
        )  # fmt: skip

    cluster = SplitCluster(ledger, router, fleet, make, refused, decode_router=decode_router, transfers=transfers,
                           max_model_len=settings.max_model_len, first_token_from=first_token_from)  # fmt: skip
    return cluster


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """A run by request served, and of the fleet."""

    seconds: dict[str, Floats]
    counts: dict[str, Ints]
    moved_bytes: Floats
    steps: StepLog
    states: tuple[tuple[float, int, str], ...]
    replica_s: float
    engine: str
    interrupted: bool
    left: tuple[int, ...]
    compile_s: float = 0.0


def _stepped(cluster: Cluster) -> _Parts:
    """Of the readable engines."""
    ledger, replicas = cluster.ledger, [m.replica for m in cluster.members if isinstance(m.replica, Replica)]
    steps = merged([
        r.rows.log(kv_blocks=r.settings.num_blocks - 1, block_size=r.settings.block_size, replica=r.number)
        for r in replicas])  # fmt: skip
    spans = [(m.started_s, m.gone_s) for m in cluster.members]
    return _Parts(
        seconds={"arrival_s": ledger.arrival_s, "scheduled_s": ledger.scheduled_s, "finish_s": ledger.finish_s,
                 "first_token_s": ledger.first_token_s, "moved_s": ledger.moved_s},
        counts={"output_tokens": ledger.made, "num_preemptions": ledger.preemptions, "retries": ledger.retries,
                "cached_tokens": ledger.cached_tokens, "replica": ledger.replica,
                "prefill_replica": ledger.prefill_replica},
        moved_bytes=ledger.moved_bytes, steps=steps, states=tuple(sorted(cluster.states, key=lambda s: s[0])),
        replica_s=_there_s(spans, steps), engine="reference", interrupted=cluster.interrupted,
        left=tuple(cluster.held),
    )  # fmt: skip


def _compiled(
    deployed: DeployedEngine, traffic: Traffic, router: Router, fleet: Fleet, until_s: float,
    progress: Progress | None,
) -> _Parts:  # fmt: skip
    """Of the compiled engines."""
    from bstar.sim.cluster.fast import run_fast
    from bstar.sim.kernel_run import step_log
    from bstar.sim.step_cost import step_cost

    s = deployed.settings
    cost = step_cost(deployed.deployment, max_tokens=s.max_num_batched_tokens, max_sequences=s.max_num_seqs,
                     model=deployed.model)
    run = run_fast(s, cost, traffic, router, fleet, until_s=until_s, progress=progress)
    out, n = run.out, traffic.num_requests
    steps = merged([step_log(runs, gaps_s, deployed, cost, replica=k) for k, (runs, gaps_s) in enumerate(run.logs)])
    finished, begun = ~np.isnan(out.finish_s), ~np.isnan(out.first_token_s)
    return _Parts(
        seconds={"arrival_s": run.arrival_s, "scheduled_s": out.scheduled_s, "finish_s": out.finish_s,
                 "first_token_s": out.first_token_s, "moved_s": np.full(n, np.nan)},
        counts={"output_tokens": np.where(finished, run.output, begun.astype(np.int64)),
                "num_preemptions": out.preemptions.astype(np.int64),
                "cached_tokens": out.cached_tokens.astype(np.int64), "replica": run.replica,
                "retries": run.retries, "prefill_replica": np.full(n, -1, dtype=np.int64)},
        moved_bytes=np.zeros(n), steps=steps,
        states=tuple(run.states), replica_s=_there_s(run.spans, steps), engine="kernel", interrupted=run.interrupted,
        left=tuple(run.held), compile_s=run.compile_s,
    )  # fmt: skip


def _there_s(spans: list[tuple[float, float]], steps: StepLog) -> float:
    """Seconds that replicas were there, added up."""
    end_s = float(steps.end_s.max(initial=0.0))
    return float(sum((max(end_s, start) if math.isnan(gone) else gone) - start for start, gone in spans))


def _notes(parts: _Parts, fleet: Fleet) -> tuple[str, ...]:
    """What was left without an engine, and what befell engines that were not there."""
    notes = [f"{len(parts.left):,} requests found no replica"] if parts.left else []
    events = [("fail", f.replica, f.at_s) for f in fleet.failures]
    events += [("drain", d.replica, d.at_s) for d in fleet.drains]
    for word, number, at_s in events:
        before = [state for moment, i, state in parts.states if i == number and moment < at_s]
        if not before and at_s > 0:
            notes.append(f"{word} {number}@{at_s:g}: engine {number} was not there yet, nothing happened")
        elif before and before[-1] == GONE:
            notes.append(f"{word} {number}@{at_s:g}: engine {number} was gone already, nothing happened")
    return tuple(notes)


def _gathered(
    traffic: Traffic, rejected: NDArray[np.bool_], served: Ints, parts: _Parts, late_s: float, slo: Slo | None,
    router: str, first_token_from: FirstToken, notes: tuple[str, ...],
) -> ClusterResult:  # fmt: skip
    """The parts as a result, in the order of the traffic."""
    n = traffic.num_requests
    arrays: dict[str, Any] = {name: _spread(n, served, values, np.nan) for name, values in parts.seconds.items()}
    for name, values in parts.counts.items():
        arrays[name] = _spread(n, served, values, -1 if name.endswith("replica") else 0)
    arrays["arrival_s"] -= late_s
    given = ~np.isnan(traffic.arrival_s)
    arrays["arrival_s"][given] = traffic.arrival_s[given]
    measured = rejected | ~np.isnan(arrays["arrival_s"])
    measured[: traffic.warmup_requests] = False
    return ClusterResult(
        **arrays, moved_bytes=_spread(n, served, parts.moved_bytes, 0.0), steps=parts.steps, slo=slo,
        input_tokens=np.ascontiguousarray(traffic.input_tokens), rejected=rejected, measured=measured,
        open_loop=traffic.is_open_loop, concurrency=traffic.concurrency, interrupted=parts.interrupted,
        front_end_s=late_s,
        left=served[list(parts.left)], notes=notes, router=router, first_token_from=first_token_from,
        states=parts.states, replica_s=parts.replica_s, engine=parts.engine,
    )  # fmt: skip


def _spread(count: int, served: Ints, values: NDArray[Any], missing: float) -> NDArray[Any]:
    """Values of the requests that were served, in an array of all."""
    if served.size == count:
        return values
    out = np.full(count, missing, dtype=values.dtype)
    out[served] = values
    return out
