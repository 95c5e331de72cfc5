"""Error figures of predictions: over all rows, by what the rows are, and beside a peer's on the same rows.

Errors are predicted / measured − 1. Rows with an uncertain layout or a label_note are predicted and listed, and do not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from bstar.calibration.peer import PeerPrediction
from bstar.calibration.point import Point
from bstar.calibration.point_deployments import engine_name
from bstar.calibration.replay import Prediction
from bstar.catalog.devices import get_device
from bstar.catalog.models.names import key_of
from bstar.errors import BstarError

Metric = Literal["tpot", "ttft", "throughput"]
METRICS: Final[tuple[Metric, ...]] = ("tpot", "ttft")  # what users feel; throughput is of rows that have nothing else
_KINDS: Final = ("aggregated", "disaggregated", "static_batch")
AXES: Final = ("kind", "engine", "gpu", "model", "dtype", "regime", "harness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A point, what is predicted for it, and what the peer predicts."""

    point: Point
    prediction: Prediction
    peer: PeerPrediction | None = None

    @property
    def answered(self) -> bool:
        found = self.prediction
        return any(v is not None for v in (found.tpot_s, found.ttft_s, found.output_tokens_per_s))

    @property
    def counts(self) -> bool:
        """Whether the row is in the error figures: answered, with labels and assumptions that are certain."""
        return self.answered and self.point.counts and self.prediction.counts

    def measured(self, metric: Metric) -> float | None:
        """Seconds, or tokens per second."""
        return _figure(self.point, metric)

    def error(self, metric: Metric, *, peer: bool = False) -> float | None:
        """Predicted / measured − 1; None where either is missing."""
        measured = self.measured(metric)
        source = self.peer if peer else self.prediction
        predicted = None if source is None else _figure(source, metric)
        return None if not measured or predicted is None else predicted / measured - 1.0


def _figure(source: Point | Prediction | PeerPrediction, metric: Metric) -> float | None:
    if metric == "throughput":
        return None if isinstance(source, PeerPrediction) else source.output_tokens_per_s
    return source.tpot_s if metric == "tpot" else source.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigures:
    """Of `count` rows that have both figures; fractions, None where there is no row.

    mape                 mean of |error|
    median_ape, p90_ape  its median and 90th percentile
    bias                 mean of error
    median_error         median of error
    mean_abs_log_ratio   mean of |ln(predicted / measured)|
    """

    count: int
    mape: float | None = None
    median_ape: float | None = None
    p90_ape: float | None = None
    bias: float | None = None
    median_error: float | None = None
    mean_abs_log_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of some rows.

    rows               all of them
    counted            those that count in errors
    coverage_fraction  share of all rows that are answered
    in_range_fraction  share of counted measurements inside their prediction's range (80 %), by metric
    throughput         output tokens per second, of rows that were measured at a load without a TPOT
    peer               the peer's figures on the rows that it answers too, and ours on those; None: it answers none
    """

    rows: int
    counted: int
    coverage_fraction: float | None
    tpot: ErrorFigures
    ttft: ErrorFigures
    throughput: ErrorFigures
    in_range_fraction: Mapping[str, float | None]
    peer: Mapping[str, Any] | None = None


def error_figures(errors: Iterable[float]) -> ErrorFigures:
    """Figures of errors (predicted / measured − 1)."""
    e = np.fromiter(errors, dtype=float)
    if not e.size:
        return ErrorFigures(count=0)
    size = np.abs(e)
    return ErrorFigures(
        count=int(e.size), mape=float(size.mean()), median_ape=float(np.median(size)),
        p90_ape=float(np.quantile(size, 0.9)), bias=float(e.mean()), median_error=float(np.median(e)),
        mean_abs_log_ratio=float(np.abs(np.log1p(e)).mean()),
    )  # fmt: skip


def summary_of(outcomes: Sequence[Outcome]) -> Summary:
    """The figures of `outcomes`."""
    counted = [o for o in outcomes if o.counts]
    ours = {metric: error_figures(_errors(counted, metric)) for metric in METRICS}
    answered = sum(o.answered for o in outcomes)
    return Summary(
        rows=len(outcomes), counted=len(counted),
        coverage_fraction=answered / len(outcomes) if outcomes else None,
        tpot=ours["tpot"], ttft=ours["ttft"],
        throughput=error_figures(_errors([o for o in counted if o.point.tpot_s is None], "throughput")),
        in_range_fraction={metric: _in_range(counted, metric) for metric in METRICS}, peer=_beside_peer(counted),
    )  # fmt: skip


def summaries_by(outcomes: Sequence[Outcome], axis: str) -> dict[str, Summary]:
    """Summaries by `axis` (one of AXES), most rows first; kinds in the order of interest."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(label_of(outcome, axis), []).append(outcome)
    first = _KINDS if axis == "kind" else ()
    order = sorted(groups, key=lambda g: (first.index(g) if g in first else len(first), -len(groups[g]), g))
    return {name: summary_of(groups[name]) for name in order}


def label_of(outcome: Outcome, axis: str) -> str:
    """Where `outcome` stands on `axis`."""
    return _LABELS[axis](outcome)


def kind_of(point: Point) -> str:
    """aggregated, disaggregated, or a latency row's load."""
    if point.schema == "latency":
        return point.mode
    return "disaggregated" if point.is_disaggregated else "aggregated"


def _gpu(outcome: Outcome) -> str:
    try:
        return get_device(outcome.point.gpu).id
    except BstarError:
        return outcome.point.gpu.lower()


def _regime(outcome: Outcome) -> str:
    regime = outcome.prediction.regime
    return "–" if regime is None else regime.bound_by


_LABELS: Final[dict[str, Callable[[Outcome], str]]] = {
    "kind": lambda o: kind_of(o.point),
    "engine": lambda o: engine_name(o.point.engine)[0],
    "gpu": _gpu,
    "model": lambda o: key_of(o.point.model),
    "dtype": lambda o: (o.point.weight_dtype or "checkpoint").lower(),
    "regime": _regime,
    "harness": lambda o: o.point.harness or "–",
}


def _errors(outcomes: Iterable[Outcome], metric: Metric, *, peer: bool = False) -> list[float]:
    found = (o.error(metric, peer=peer) for o in outcomes)
    return [e for e in found if e is not None]


def _in_range(counted: Sequence[Outcome], metric: Metric) -> float | None:
    inside = []
    for outcome in counted:
        found = outcome.prediction.tpot_range_s if metric == "tpot" else outcome.prediction.ttft_range_s
        measured = outcome.measured(metric)
        if found is not None and measured is not None:
            inside.append(found[0] <= measured <= found[1])
    return sum(inside) / len(inside) if inside else None


def _beside_peer(counted: Sequence[Outcome]) -> dict[str, Any] | None:
    if not any(o.peer is not None for o in counted):
        return None
    out: dict[str, Any] = {"answered": sum(o.peer is not None for o in counted)}
    for metric in METRICS:
        both = [o for o in counted if o.error(metric, peer=True) is not None and o.error(metric) is not None]
        out[metric] = {"peer": error_figures(_errors(both, metric, peer=True)),
                       "bstar": error_figures(_errors(both, metric))}  # fmt: skip
    return out
