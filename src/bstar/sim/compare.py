"""The same requests served in two or more ways, and what the difference is as a number."""

from __future__ import annotations

from collections.abc import Sequence
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
# Other words for a policy, as people compare them.
_ALIASES: Final = {"chunked": "engine", "mixed": "engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs of the same requests by name; gains are against the first."""

    names: tuple[str, ...]
    results: tuple[SimResult, ...]

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
        """{"runs": {name: result}, "gain": {name: {figure: times better than the first}}}."""
        others = range(1, len(self.names))
        return {
            "baseline": self.names[0],
            "runs": {name: result.to_dict() for name, result in zip(self.names, self.results, strict=True)},
            "gain": {self.names[i]: {row: self.gain(i, row) for row in self.rows} for i in others},
        }  # fmt: skip


def wanted_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of a comparison, checked. Raises SpecError where one is not known or there are fewer than two."""
    wanted = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    if len(wanted) < 2:
        raise SpecError("compare: needs two or more ways to serve, like static,continuous")
    for name in wanted:
        way_of(_ALIASES.get(name, name))
    return wanted


def serve_as(
    deployment: Deployment, traffic: Traffic, name: str, *, seed: int = 0, slo: Slo | None = None,
    progress: Progress | None = None,
) -> SimResult:  # fmt: skip
    """Serve `traffic` in the way called `name`: a policy, or "chunked" and "mixed" for the engine's own."""
    return simulate(deployment, traffic, seed=seed, slo=slo, policy=_ALIASES.get(name, name), progress=progress)


def compare(
    deployment: Deployment, traffic: Traffic, names: Sequence[str], *, seed: int = 0, slo: Slo | None = None
) -> Comparison:
    """Serve the same requests once for each name. Raises SpecError where a name is not known."""
    wanted = wanted_names(names)
    return Comparison(
        names=wanted, results=tuple(serve_as(deployment, traffic, name, seed=seed, slo=slo) for name in wanted))
