"""`simulate_cluster`: a load through many replicas of a deployment."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.cluster.decode import DecodeReplica
from bstar.sim.cluster.fleet import Autoscaler, Drain, Failure
from bstar.sim.cluster.ledger import Ledger
from bstar.sim.cluster.loop import Cluster, Fleet, Progress
from bstar.sim.cluster.pools import SplitCluster
from bstar.sim.cluster.replica import Figures, Finished, Replica
from bstar.sim.cluster.routers import Router, checked
from bstar.sim.cluster.transfer import KvLink, Transfers, link_of
from bstar.sim.deployed import DeployedEngine, deployed_engine, step_figures
from bstar.sim.result import SimResult, Timing
from bstar.sim.steps import merged
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo
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
    moved_s           per request: from the first token to the cache's arrival there, nan where nothing was sent
    states            (seconds, replica, "starting" | "ready" | "draining" | "gone"), in order of time
    replica_s         seconds that replicas were there, starting included, added up: what is paid for
    """

    router: str
    retries: Ints
    prefill_replica: Ints
    moved_bytes: Floats
    moved_s: Floats
    states: tuple[tuple[float, int, str], ...]
    replica_s: float


def simulate_cluster(
    deployment: Deployment, traffic: Traffic, *, replicas: int = 1, router: str = "round-robin", seed: int = 0,
    slo: Slo | None = None, startup_s: float = 0.0, autoscaler: Autoscaler | None = None,
    failures: Sequence[Failure] = (), drains: Sequence[Drain] = (), prefill_replicas: int = 0,
    decode_replicas: int = 0, decode_router: str = "least-outstanding", kv_link: KvLink | None = None,
    engine: EngineChoice = "auto", until_s: float = math.inf, progress: Progress | None = None,
) -> ClusterResult:  # fmt: skip
    """Every request of `traffic` through several replicas of `deployment`, in simulated time.

        d = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb")
        load = bstar.traffic.poisson(rate_per_s=40, input_tokens=512, output_tokens=128, num_requests=2000, seed=0)
        simulate_cluster(d, load, replicas=4, router="power-of-two").summary.ttft_s.p95

    replicas, router   how many, and one of `ROUTERS`; with an autoscaler the number at the start
    seed               of the router's draws; the load has its own
    startup_s          until a replica that is started later takes its first request
    failures, drains   what happens to replicas; requests of a failed one are computed again elsewhere
    prefill_replicas, decode_replicas, decode_router, kv_link   separate pools (then `replicas` is not used):
                       replicas 0 … prefill_replicas − 1 compute prompts. The link is that between nodes unless given
    engine             "reference": step by step; "kernel": compiled, where nothing has to be undone;
                       "auto": the kernel where it can
    Raises InfeasibleError where the deployment does not start, SpecError where the load can never be served.
    """
    begun = time.perf_counter()
    checked(router)
    split = bool(prefill_replicas or decode_replicas)
    _check(replicas, startup_s, prefill_replicas, decode_replicas, autoscaler)
    deployed = deployed_engine(deployment)
    figures = figures_of(deployed)
    rejected = np.asarray(traffic.input_tokens >= deployed.settings.max_model_len)
    if rejected.all():
        raise SpecError(
            f"max_model_len: every prompt is longer than the {deployed.settings.max_model_len - 1:,} tokens that fit; "
            "raise --max-model-len or shorten the prompts")
    late = deployed.per_request_s
    seen = replace(traffic, arrival_s=traffic.arrival_s + late, think_s=traffic.think_s + late)
    ledger = Ledger.of(seen, deployed.settings.block_size)
    fleet = Fleet(replicas=prefill_replicas + decode_replicas if split else replicas, startup_s=startup_s,
                  autoscaler=autoscaler, failures=failures, drains=drains)  # fmt: skip
    entrance = Router(router, seen, seed=seed)
    refused = rejected.tolist() if rejected.any() else ()
    if split:
        transfers = Transfers(kv_link if kv_link is not None else link_of(deployment), deployment)
        cluster: Cluster = _split(ledger, entrance, fleet, deployed, figures, refused, prefill_replicas,
                                  Router(decode_router, seen, seed=seed), transfers)  # fmt: skip
    else:
        def make(number: int, ready_s: float, finished: Finished) -> Replica:
            return Replica(number, deployed.settings, figures, ledger, finished, ready_s=ready_s)

        cluster = Cluster(ledger, entrance, fleet, make, refused)
    cluster.run(until_s=until_s, progress=progress)
    result = _gathered(traffic, rejected, cluster, late, slo, router)
    spent = time.perf_counter() - begun
    return replace(result, timing=Timing(simulate_s=spent, total_s=spent))


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


def _split(
    ledger: Ledger, router: Router, fleet: Fleet, deployed: DeployedEngine, figures: Figures,
    refused: Sequence[bool], prefill: int, decode_router: Router, transfers: Transfers,
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
                           max_model_len=settings.max_model_len)  # fmt: skip
    return cluster


def _gathered(
    traffic: Traffic, rejected: NDArray[np.bool_], cluster: Cluster, late_s: float, slo: Slo | None, router: str
) -> ClusterResult:
    """The ledger as a result."""
    ledger = cluster.ledger
    arrival_s = ledger.arrival_s - late_s
    given = ~np.isnan(traffic.arrival_s)
    arrival_s[given] = traffic.arrival_s[given]
    measured = ~rejected & ~np.isnan(arrival_s)
    measured[: traffic.warmup_requests] = False
    logs = [
        m.replica.rows.log(kv_blocks=m.replica.settings.num_blocks - 1, block_size=m.replica.settings.block_size,
                           replica=m.replica.number)
        for m in cluster.members
    ]  # fmt: skip
    end_s = max((float(log.end_s.max(initial=0.0)) for log in logs), default=0.0)
    there_s = sum((m.gone_s if not math.isnan(m.gone_s) else max(end_s, m.started_s)) - m.started_s
                  for m in cluster.members)  # fmt: skip
    notes = []
    if cluster.held:
        notes.append(f"{len(cluster.held):,} requests found no replica")
    return ClusterResult(
        arrival_s=arrival_s, scheduled_s=ledger.scheduled_s, first_token_s=ledger.first_token_s,
        finish_s=ledger.finish_s, input_tokens=np.ascontiguousarray(traffic.input_tokens), output_tokens=ledger.made,
        num_preemptions=ledger.preemptions, cached_tokens=ledger.cached_tokens, replica=ledger.replica,
        rejected=rejected, measured=measured, steps=merged(logs), slo=slo, open_loop=traffic.is_open_loop,
        concurrency=traffic.concurrency, interrupted=cluster.interrupted, notes=tuple(notes), router=router,
        retries=ledger.retries, prefill_replica=ledger.prefill_replica, moved_bytes=ledger.moved_bytes,
        moved_s=ledger.moved_s, states=tuple(cluster.states), replica_s=float(there_s),
    )  # fmt: skip
