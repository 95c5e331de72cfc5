"""The rows with the largest errors, and by rule why they may be so far off: the label, the noise, or the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from bstar.calibration.point import Point, Pool
from bstar.calibration.point_deployments import model_of
from bstar.calibration.summary import METRICS, Metric, Outcome, kind_of
from bstar.catalog.models.names import key_of
from bstar.errors import BstarError

# Repeats of one label that differ by more are noise; residuals beside both neighbours by more are out of line.
_NOISE = 0.15
_STEP = 0.25
# A measured TPOT within this factor of the floor has no room for an engine's overheads.
_AT_FLOOR = 1.3
_FEWEST = 4
# Rows that took e times this longer than predicted waited for something that no model of the engine has.
_STALL = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """A row far off: which figure, by how much, and why by rule."""

    outcome: Outcome
    metric: Metric
    error: float
    label: str
    reason: str


def worst_rows(outcomes: Sequence[Outcome], count: int, *, metric: Metric | None = None) -> list[Worst]:
    """The `count` counted rows with the largest |ln(predicted / measured)| of `metric` (None: of TPOT, then TTFT)."""
    context = _Context(outcomes)
    found: list[tuple[float, Outcome, Metric]] = []
    for outcome in outcomes:
        for name in METRICS if metric is None else (metric,):
            error = outcome.error(name)
            if error is not None and outcome.counts:
                found.append((abs(math.log1p(error)), outcome, name))
    if metric is None:  # a TPOT weighs more: TTFTs behind a queue can be anything
        found = [f for f in found if f[2] == "tpot"]
    found.sort(key=lambda f: (-f[0], f[1].point.id))
    return [
        Worst(outcome=o, metric=m, error=o.error(m) or 0.0, label=label(o.point), reason=context.reason(o, m))
        for _, o, m in found[:count]
    ]


def label(point: Point) -> str:
    """What the row is about, in a few words."""
    layout = f"{point.num_gpus or ''}×{point.gpu.lower()}".removeprefix("×")
    if point.prefill is not None and point.decode is not None:
        layout = f"{_pool(point.prefill)}+{_pool(point.decode)}×{point.gpu.lower()}"
    dtype = f" {point.weight_dtype}" if point.weight_dtype else ""
    load = f"{point.columns.get('load_kind', '')} {point.columns.get('load_value', '')}"
    return (f"{point.engine.split(' ')[0].lower()} {key_of(point.model)}{dtype} {layout} {point.input_tokens:g}/"
            f"{point.output_tokens:g} " + (load.strip() if point.schema == "latency" else f"C={point.concurrency}"))


def _pool(pool: Pool) -> str:
    """3·8: three workers of eight GPUs."""
    return f"{pool.workers}·{pool.gpus}" if pool.workers else f"{pool.gpus}"


_GROUPS: Final[tuple[tuple[str, Callable[[Point], Any]], ...]] = (
    ("model, engine and GPU", lambda p: (p.group, kind_of(p))),
    ("model and engine", lambda p: (p.group[1:], kind_of(p))),
    ("engine and kind of load", lambda p: (p.group[1], kind_of(p), p.engine_version)),
)


def _percent(log: float) -> str:
    return f"{math.expm1(log):+.0%}".replace("-", "−")


class _Context:
    """What the other rows say about one."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.repeats: Mapping[Any, list[Outcome]] = _grouped(outcomes, _same)
        self.curves: Mapping[Any, list[Outcome]] = _grouped(outcomes, _curve)
        # From the rows that are most alike to those that share engine and load alone.
        self.groups: tuple[tuple[str, Callable[[Point], Any], Mapping[Any, list[Outcome]]], ...] = tuple(
            (name, key, _grouped(outcomes, key)) for name, key in _GROUPS)

    def reason(self, outcome: Outcome, metric: Metric) -> str:
        """The first rule that applies; nothing for an error within the noise of repeats."""
        if abs(outcome.error(metric) or 0.0) < _NOISE:
            return ""
        rules = (self._label, self._floor, self._repeated, self._out_of_line, self._queue, self._group, self._assumed,
                 self._stall, self._experts)
        found = (rule(outcome, metric) for rule in rules)
        return next((reason for reason in found if reason), "no rule applies")

    def _label(self, outcome: Outcome, _metric: Metric) -> str | None:
        return outcome.point.label_note or (outcome.point.layout_note if not outcome.point.counts else None)

    def _floor(self, outcome: Outcome, metric: Metric) -> str | None:
        floor, measured = outcome.prediction.floor_s, outcome.point.tpot_s
        if metric != "tpot" or floor is None or measured is None:
            return None
        if measured < floor:
            return "measured below the physical floor: the label or the layout is wrong"
        if measured < _AT_FLOOR * floor:
            return "measured at the physical floor: speculative decoding or a wrong layout suspected"
        return None

    def _repeated(self, outcome: Outcome, metric: Metric) -> str | None:
        same = [o for o in self.repeats[_same(outcome.point)] if o.measured(metric)]
        values = [o.measured(metric) or 0.0 for o in same]
        if len(values) < 2 or max(values) / min(values) < 1 + _NOISE:
            return None
        return f"noise: {len(values)} rows with these labels differ by {max(values) / min(values) - 1:.0%}"

    def _out_of_line(self, outcome: Outcome, metric: Metric) -> str | None:
        curve = sorted(
            ((o.point.concurrency, _log(o, metric)) for o in self.curves[_curve(outcome.point)]
             if o is not outcome and _log(o, metric) is not None), key=lambda pair: pair[0])
        own = _log(outcome, metric)
        below = [r for c, r in curve if c < outcome.point.concurrency and r is not None][-1:]
        above = [r for c, r in curve if c > outcome.point.concurrency and r is not None][:1]
        if own is None or not (below and above):
            return None
        steps = [own - other for other in (*below, *above)]
        if all(s > _STEP for s in steps) or all(s < -_STEP for s in steps):
            return "out of line with fewer and with more clients: the measurement or its label suspected"
        return None

    def _queue(self, outcome: Outcome, metric: Metric) -> str | None:
        regime = outcome.prediction.regime
        if regime is None or regime.waiting_fraction is None or regime.waiting_fraction < 0.05:
            return None
        return (f"a queue at capacity ({regime.bound_by}, {regime.waiting_fraction:.0%} of the clients wait): blocks "
                "and seats decide it, and the flags are not known")

    def _group(self, outcome: Outcome, metric: Metric) -> str | None:
        own = _log(outcome, metric)
        for name, key, groups in self.groups:
            known = [r for o in groups[key(outcome.point)] if (r := _log(o, metric)) is not None]
            if own is not None and len(known) >= _FEWEST and own * median(known) >= 0.4 * own * own:
                return f"all {len(known)} rows of this {name} are off by {_percent(median(known))} in the median"
        return None

    def _assumed(self, outcome: Outcome, _metric: Metric) -> str | None:
        found = [n for n in outcome.prediction.notes if n.startswith(("layout", "memory", "engine", "weight dtype"))]
        return f"assumed: {found[0]}" if found else None

    def _stall(self, outcome: Outcome, metric: Metric) -> str | None:
        own = _log(outcome, metric)
        if own is None or own > -_STALL:
            return None
        return ("far slower than this load explains: a stall (kernels compiled at first use, swapping), or another "
                "load than its label's")

    def _experts(self, outcome: Outcome, _metric: Metric) -> str | None:
        try:
            moe = model_of(outcome.point).is_moe
        except BstarError:
            return None
        batch = outcome.prediction.regime.batch if outcome.prediction.regime else outcome.point.concurrency
        return "a small batch over many experts: launches and which experts are touched decide" if (
            moe and batch <= 16) else None


def _grouped(outcomes: Sequence[Outcome], key: Any) -> Mapping[Any, list[Outcome]]:
    found: dict[Any, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[key(outcome.point)].append(outcome)
    return found


def _curve(p: Point) -> tuple[Any, ...]:
    """All labels but the concurrency."""
    return (
        p.schema, p.mode, p.harness, p.engine, p.engine_version, p.model, p.gpu, p.weight_dtype, p.moe_dtype,
        p.kv_dtype, p.input_tokens, p.output_tokens, p.num_gpus, p.attention_tp, p.attention_dp, p.expert_parallel,
        p.prefill, p.decode, p.measured_on,
    )  # fmt: skip


def _same(p: Point) -> tuple[Any, ...]:
    return (*_curve(p)[:-1], p.concurrency)


def _log(outcome: Outcome, metric: Metric) -> float | None:
    error = outcome.error(metric)
    return None if error is None else math.log1p(error)
