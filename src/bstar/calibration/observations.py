"""Measured points of one deployment, in the many forms that they come in, and what is predicted for each.

    {"concurrency": 8, "input_tokens": 1024, "output_tokens": 256, "ttft_s": 0.08, "tpot_s": 0.0095}
    {"rate_per_s": 4, "input": "lognormal:mean=900,cv=1", "output": 200, "ttft_ms": 95, "output_tokens_per_s": 790}

Times may be given as `_s` or `_ms`. A row of a file of measured points (`bstar.calibration.points`) is one too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from bstar.calibration.point import Point
from bstar.errors import SpecError
from bstar.metrics.rates import whole_run
from bstar.sim.result import SimResult
from bstar.specs.deployment import Deployment
from bstar.specs.workload import LengthDistribution
from bstar.traffic import Traffic, closed_loop, gamma
from bstar.traffic.generators import as_lengths

# Figures of a run that a prediction is held against, and the relative error that is expected of model and measurement
# together (ln): means, medians, rates.
METRICS: Final[Mapping[str, float]] = MappingProxyType({
    "ttft_s": 0.05, "tpot_s": 0.03, "itl_s": 0.03, "e2e_s": 0.03, "ttft_p50_s": 0.07, "tpot_p50_s": 0.03,
    "output_tokens_per_s": 0.03, "requests_per_s": 0.03,
})  # fmt: skip
_ALIASES: Final = {
    "input": "input_tokens", "output": "output_tokens", "isl": "input_tokens", "osl": "output_tokens",
    "isl_tokens": "input_tokens", "osl_tokens": "output_tokens", "rate": "rate_per_s", "request_rate": "rate_per_s",
    "throughput": "output_tokens_per_s", "mean_ttft_s": "ttft_s", "mean_tpot_s": "tpot_s", "mean_itl_s": "itl_s",
    "mean_e2e_s": "e2e_s", "median_ttft_s": "ttft_p50_s", "median_tpot_s": "tpot_p50_s",
}  # fmt: skip
_LOAD_KEYS: Final = ("concurrency", "rate_per_s", "input_tokens", "output_tokens", "num_requests", "burstiness",
                     "start", "warmup_requests", "id", "measured_on")
_FEWEST_REQUESTS, _PER_CLIENT, _WARM_UP = 64, 10, 2
# What a point may ask to be simulated.
_MOST_CLIENTS, _MOST_REQUESTS = 100_000, 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A load and what was measured under it.

    point          the row that it is of; its harness then says how the load was made
    sent           the very requests, where they were recorded
    concurrency, rate_per_s   one of the two
    num_requests   None: 10 a client of a closed loop, of which the first 2 do not count
    start          "even": the clients of a closed loop begin spread over one request's time; "burst": all at once
    measured       metric (a key of METRICS) to value, SI
    served         names of the model that the server gave; empty: not known
    seats          most requests that ran while others waited with cache free: max_num_seqs, or less; None: not seen
    notes          what was left out of the file that it is of
    """

    id: str
    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    measured: Mapping[str, float]
    concurrency: int | None = None
    rate_per_s: float | None = None
    num_requests: int | None = None
    warmup_requests: int | None = None
    burstiness: float = 1.0
    start: str = "even"
    measured_on: str = ""
    point: Point | None = None
    sent: Traffic | None = None
    served: tuple[str, ...] = ()
    seats: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def load(self) -> tuple[str, float]:
        """("concurrency" or "rate_per_s", its value)."""
        if self.concurrency is not None:
            return "concurrency", float(self.concurrency)
        return "rate_per_s", float(self.rate_per_s or 0.0)

    def traffic(self, seed: int = 0) -> Traffic:
        """The requests of a load that is no row of a file."""
        if self.sent is not None:
            return self.sent
        if self.concurrency is None:
            assert self.rate_per_s is not None
            count = self.num_requests or max(_FEWEST_REQUESTS * 4, 1)
            return gamma(self.rate_per_s, self.burstiness, self.input_tokens, self.output_tokens, count, seed=seed,
                         warmup_requests=self.warmup_requests or 0)
        count = self.num_requests or max(_PER_CLIENT * self.concurrency, _FEWEST_REQUESTS)
        warm = self.warmup_requests
        if warm is None:
            warm = _WARM_UP * self.concurrency if self.num_requests is None and self.start == "even" else 0
        return closed_loop(
            self.concurrency, self.input_tokens, self.output_tokens, count, seed=seed,
            warmup_requests=min(warm, count - 1), start="even" if self.start == "even" else "burst",
            start_s=self._request_s() if self.start == "even" else 0.0)  # fmt: skip

    def _request_s(self) -> float:
        """Seconds of one request, about: what was measured says it."""
        m, answer = self.measured, self.output_tokens.mean
        if "e2e_s" in m:
            return m["e2e_s"]
        each = m.get("tpot_s") or m.get("itl_s") or m.get("tpot_p50_s")
        if each is None:
            rate = m.get("requests_per_s") or m.get("output_tokens_per_s", 0.0) / answer
            return (self.concurrency or 1) / rate if rate else 1.0
        return m.get("ttft_s", m.get("ttft_p50_s", 0.0)) + each * max(answer - 1.0, 0.0)


def observations(points: Any) -> tuple[Observation, ...]:
    """What `bstar.calibrate` takes: mappings, Points, Observations, files (`bstar.calibration.sources`), one or many.

    Raises SpecError or ConfigError naming the point, the key and the remedy.
    """
    if isinstance(points, Mapping | Point | Observation | str | Path):
        points = (points,)
    if not isinstance(points, Iterable):
        raise SpecError(f"points: must be a list of measured points or of files, is {type(points).__name__}")
    found: list[Observation] = []
    for number, one in enumerate(points, 1):
        if isinstance(one, str | Path):
            from bstar.calibration.sources import observations_in

            found += observations_in(Path(one))
        else:
            found.append(_one(one, number))
    if not found:
        raise SpecError("points: none given; give 2 to 6 measured points of the deployment")
    return tuple(found)


def of_point(point: Point) -> Observation:
    """The observation of a row. Raises SpecError where it has no figures."""
    if point.fault is not None:
        raise SpecError(f"point {point.id}: {point.fault}")
    figures = {"ttft_s": point.ttft_s, "tpot_s": point.tpot_s}
    return Observation(
        id=point.id, input_tokens=as_lengths(max(round(point.input_tokens), 1), "input_tokens"),
        output_tokens=as_lengths(max(round(point.output_tokens), 1), "output_tokens"),
        measured=_figures({k: v for k, v in figures.items() if v is not None}, point.id),
        concurrency=point.concurrency, measured_on=point.measured_on, point=point,
    )  # fmt: skip


def predicted(deployment: Deployment, one: Observation) -> dict[str, float]:
    """The metrics of METRICS that the simulation of the load has, SI."""
    if one.point is not None:
        from bstar.calibration.replay import replay

        found = replay(one.point, deployment)
        if found.reason is not None:
            raise SpecError(f"point {one.id}: {found.reason}")
        return {k: v for k, v in (("ttft_s", found.ttft_s), ("tpot_s", found.tpot_s)) if v is not None}
    from bstar.sim.run import simulate

    return figures_of(simulate(deployment, one.traffic()))


def figures_of(result: SimResult) -> dict[str, float]:
    """The metrics of METRICS that a run has; rates are of the measured requests alone over their time, as points have
    them."""
    summary, rates = result.summary, whole_run(result.records)
    found = {
        "ttft_s": summary.ttft_s.mean, "tpot_s": summary.tpot_s.mean, "itl_s": summary.itl_s.mean,
        "e2e_s": summary.e2e_s.mean, "ttft_p50_s": summary.ttft_s.p50, "tpot_p50_s": summary.tpot_s.p50,
        "output_tokens_per_s": rates.output_tokens_per_s, "requests_per_s": rates.requests_per_s,
    }  # fmt: skip
    return {key: float(value) for key, value in found.items() if value is not None and np.isfinite(value) and value > 0}


def _one(value: Any, number: int) -> Observation:
    if isinstance(value, Observation):
        return value
    if isinstance(value, Point):
        return of_point(value)
    if not isinstance(value, Mapping):
        raise SpecError(f"points[{number}]: must be a mapping like {{'concurrency': 8, 'input_tokens': 1024, "
                        f"'output_tokens': 256, 'ttft_s': 0.08, 'tpot_s': 0.01}}, is {type(value).__name__}")
    return of_mapping(value, f"points[{number}]")


def of_mapping(raw: Mapping[str, Any], where: str) -> Observation:
    """The observation of a mapping; `where` names it in errors."""
    loads, figures = _sorted(raw, where)
    concurrency, rate = loads.get("concurrency"), loads.get("rate_per_s")
    if (concurrency is None) == (rate is None):
        raise SpecError(f"{where}: needs concurrency or rate_per_s, one of the two")
    for key in ("input_tokens", "output_tokens"):
        if key not in loads:
            raise SpecError(f"{where}: has no {key}; give the mean length or a distribution")
    if loads.get("start", "even") not in ("even", "burst"):
        raise SpecError(f"{where}: start must be even or burst, is {str(loads['start'])[:40]!r}")
    return Observation(
        id=str(loads.get("id") or where), concurrency=_count(concurrency, f"{where}: concurrency", _MOST_CLIENTS),
        rate_per_s=None if rate is None else _positive(rate, f"{where}: rate_per_s"),
        input_tokens=_lengths(loads["input_tokens"], f"{where}: input_tokens"),
        output_tokens=_lengths(loads["output_tokens"], f"{where}: output_tokens"),
        num_requests=_count(loads.get("num_requests"), f"{where}: num_requests", _MOST_REQUESTS),
        warmup_requests=_count(loads.get("warmup_requests") or None, f"{where}: warmup_requests"),
        burstiness=_positive(loads.get("burstiness", 1.0), f"{where}: burstiness"), start=loads.get("start", "even"),
        measured=_figures(figures, where), measured_on=str(loads.get("measured_on") or ""),
    )  # fmt: skip


def _sorted(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what says the load, what was measured): by the keys' own names, in seconds."""
    loads: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in raw.items():
        if value is None:
            continue
        scale = 1.0
        name = str(key)
        if name.endswith("_ms"):
            name, scale = name[:-3] + "_s", 1e-3
        name = _ALIASES.get(name, name)
        if name in spelt:
            raise SpecError(f"{where}: {name} is given twice, as {spelt[name]} and as {str(key)[:60]}; leave one out")
        spelt[name] = str(key)[:60]
        if name in METRICS:
            figures[name] = _positive(value, f"{where}: {key}") * scale
        elif name in _LOAD_KEYS:
            loads[name] = value
        else:
            raise SpecError(f"{where}: unknown key {str(key)[:60]!r}; a point has {', '.join((*_LOAD_KEYS, *METRICS))}")
    return loads, figures


def _figures(found: Mapping[str, Any], where: str) -> Mapping[str, float]:
    if not found:
        raise SpecError(f"{where}: nothing was measured; give ttft_s and tpot_s")
    return MappingProxyType({key: _positive(value, f"{where}: {key}") for key, value in found.items()})


def _lengths(value: Any, where: str) -> LengthDistribution:
    if isinstance(value, float):
        if not 1 <= value < 1e9:
            raise SpecError(f"{where}: must be at least 1 token, is {value}")
        value = round(value)
    return as_lengths(value, where)


def _count(value: Any, where: str, most: int = _MOST_REQUESTS) -> int | None:
    if value is None:
        return None
    number = _positive(value, where)
    if number != int(number) or number < 1:
        raise SpecError(f"{where}: must be a whole number of at least 1, is {value}")
    if number > most:
        raise SpecError(f"{where}: must be at most {most:,}, is {value}; that many cannot be simulated")
    return int(number)


def _positive(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise SpecError(f"{where}: must be a number above 0, is {str(value)[:40]!r}")
    return number


def spread_of(metrics: Iterable[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Relative errors expected of metrics, ln."""
    return np.array([METRICS[name] for name in metrics])
