"""The same requests served in two or more ways, and what the difference is as a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bstar.errors import SpecError
from bstar.metrics.definitions import METRICS
from bstar.sim.result import SimResult
from bstar.sim.run import simulate
from bstar.sim.stepwise import Progress
from bstar.sim.ways import way_of
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo
from bstar.traffic.load import Traffic

# What a comparison shows, in this order; distributions by mean and p95.
_SCALARS: Final = ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "slo_attainment_fraction")
_DISTRIBUTIONS: Final = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
DISAGGREGATED: Final = "disaggregated"
# Other words for a policy, as people compare them.
_ALIASES: Final = {"chunked": "engine", "mixed": "engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs of the same requests by name; gains are against the first.

    left_out   ways that did not come to serve all of them before an interrupt
    """

    names: tuple[str, ...]
    results: tuple[SimResult, ...]
    left_out: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        return bool(self.left_out)

    def figure(self, index: int, name: str) -> float | None:
        """A figure of one run: "output_tokens_per_s", or "ttft_s.p95"."""
        metric, _, part = name.partition(".")
        value = getattr(self.results[index].summary, metric)
        found = getattr(value, part) if part else value
        return None if found is None else float(found)

    def gain(self, index: int, name: str) -> float | None:
        """How many times better run `index` is than the first one (2: twice the throughput, or half the time)."""
        base, value = self.figure(0, name), self.figure(index, name)
        if base is None or value is None or base <= 0 or value <= 0:
            return None
        lower = METRICS[name.partition(".")[0]].better == "lower"
        return base / value if lower else value / base

    @property
    def rows(self) -> tuple[str, ...]:
        """The figures that are compared."""
        return (*_SCALARS, *(f"{name}.{part}" for name in _DISTRIBUTIONS for part in ("mean", "p95")))

    def to_dict(self) -> dict[str, Any]:
        """{"runs": {name: result}, "gain": {name: {figure: times better than the first}}, …}."""
        others = range(1, len(self.names))
        return {
            "baseline": self.names[0] if self.names else None,
            "runs": {name: result.to_dict() for name, result in zip(self.names, self.results, strict=True)},
            "gain": {self.names[i]: {row: self.gain(i, row) for row in self.rows} for i in others},
            "interrupted": self.interrupted, "left_out": list(self.left_out),
        }  # fmt: skip


def wanted_names(names: Sequence[str], engine: str = "vllm") -> tuple[str, ...]:
    """The names of a comparison, checked. Raises SpecError where one is not known or there are fewer than two."""
    wanted = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    if len(wanted) < 2:
        raise SpecError("compare: needs two or more ways to serve, like static,continuous")
    for name in wanted:
        if name != DISAGGREGATED:
            way_of(_ALIASES.get(name, name), engine)
    if DISAGGREGATED in wanted and set(wanted) - {DISAGGREGATED, "mixed"}:
        raise SpecError("compare: separate pools are compared with mixed ones; write mixed,disaggregated")
    return wanted


def serve_as(
    deployment: Deployment, traffic: Traffic, name: str, *, cluster: dict[str, Any] | None = None, seed: int = 0,
    slo: Slo | None = None, progress: Progress | None = None,
) -> SimResult:  # fmt: skip
    """Serve `traffic` in the way called `name`: a policy, or a word for one.

    chunked, mixed   the engine's own way
    disaggregated    prompts and answers in pools of their own
    cluster          keywords of `simulate_cluster`: how many engines, which router. Mixed engines are as many as
                     those of both pools together
    """
    if cluster is None:
        return simulate(deployment, traffic, seed=seed, slo=slo, policy=_ALIASES.get(name, name), progress=progress)
    if name not in (DISAGGREGATED, "mixed"):
        raise SpecError(f"compare: {name} is for one engine; leave the replicas out")
    from bstar.sim.cluster import simulate_cluster

    pools = {key: cluster.get(key, 1) for key in ("prefill_replicas", "decode_replicas")}
    rest = {key: value for key, value in cluster.items() if key not in (*pools, "replicas")}
    if name == "mixed":
        for key in ("kv_link", "decode_router"):
            rest.pop(key, None)
        return simulate_cluster(
            deployment, traffic, replicas=sum(pools.values()), seed=seed, slo=slo, progress=progress, **rest)
    return simulate_cluster(deployment, traffic, seed=seed, slo=slo, progress=progress, **pools, **rest)


def compare(
    deployment: Deployment, traffic: Traffic, names: Sequence[str], *, cluster: dict[str, Any] | None = None,
    seed: int = 0, slo: Slo | None = None,
) -> Comparison:  # fmt: skip
    """Serve the same requests once for each name, up to an interrupt. Raises SpecError where a name is not known."""
    wanted = wanted_names(names, deployment.engine.name)
    if DISAGGREGATED in wanted and cluster is None:
        cluster = {}
    return compared(wanted, lambda name: serve_as(deployment, traffic, name, cluster=cluster, seed=seed, slo=slo))


def compared(wanted: tuple[str, ...], serve: Callable[[str], SimResult]) -> Comparison:
    """Serve in one way after the other; one that is interrupted ends it, and is not comparable: it is left out."""
    results: list[SimResult] = []
    for name in wanted:
        try:
            found = serve(name)
        except KeyboardInterrupt:
            break
        if found.interrupted:
            break
        results.append(found)
    done = len(results)
    return Comparison(names=wanted[:done], results=tuple(results), left_out=wanted[done:])
