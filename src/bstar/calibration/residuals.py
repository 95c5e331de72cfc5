"""How far held-out predictions were off: quantiles of residuals of like rows, made from a cross-validation.

    table = residual_table(records)              what `data/residuals.toml` holds
    coverage(records)                            how many held-out rows the ranges cover, a group left out at a time

A residual is ln(measured / predicted) of a row that the constants had not seen. Rows are alike in metric, distance,
engine and regime; a cell with too few rows is that of its engine, then of its distance.

    distance   "combination"   other rows of its engine, GPU and model were seen
               "engine_gpu"    its engine and GPU were, not the model on it
               "unknown"       neither
               "calibrated"    two points of the very deployment were, with the same lengths
               "calibrated_lengths"   the same, with other lengths
    regime     "overhead" · "bandwidth" (compute too) · "waiting" (a queue before the engine)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

Metric = Literal["tpot", "ttft"]
Distance = Literal["combination", "engine_gpu", "unknown", "calibrated", "calibrated_lengths"]
Cells = dict[str, tuple[float, float, int]]

LEVEL: Final = 0.8
_FEWEST: Final = 40
_TAILS: Final = (0.1, 0.11, 0.12, 0.13, 0.14, 0.095, 0.09, 0.085, 0.08, 0.075, 0.07, 0.065, 0.06, 0.055, 0.05)
_DISTANCES: Final = ("combination", "engine_gpu", "unknown", "calibrated", "calibrated_lengths")
_WAITING: Final = frozenset({"kv_capacity", "max_num_seqs", "queueing", "token_budget"})
_OVERHEAD: Final = frozenset({"overhead", "communication"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One metric of one held-out row.

    engine, gpu, model   bstar's own names of what was predicted
    bound_by             of `bstar.calibration.regimes`
    value                ln(measured / predicted)
    """

    id: str
    metric: Metric
    distance: Distance
    engine: str
    gpu: str
    model: str
    bound_by: str
    value: float

    @property
    def group(self) -> tuple[str, str, str]:
        """What cross-validation leaves out together."""
        return self.engine, self.gpu, self.model

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells that the row counts in, the narrowest first."""
        return cells_of(self.metric, self.distance, self.engine, self.bound_by)


def regime_of_bound(bound_by: str) -> str:
    """The regime, of what a step is bound by."""
    return "waiting" if bound_by in _WAITING else "overhead" if bound_by in _OVERHEAD else "bandwidth"


def cells_of(metric: str, distance: str, engine: str, bound_by: str) -> tuple[str, ...]:
    """Names of the cells that a prediction may take its range from, the narrowest first."""
    return (f"{metric}.{distance}.{engine}.{regime_of_bound(bound_by)}", f"{metric}.{distance}.{engine}",
            f"{metric}.{distance}")


def quantiles(records: Iterable[Residual], tails: Mapping[str, float] | None = None) -> Cells:
    """(low, high, rows) of each cell with enough rows: residuals are between them for a share LEVEL of rows.

    Conformal: the k-th of n values, so that the next like row is inside with at least that share. A range holds its
    prediction: low is at most 0, high at least.
    tails   share outside on each side, by metric, distance and engine, or by metric and distance; (1 - LEVEL) / 2
            where there is none
    """
    found: dict[str, list[float]] = defaultdict(list)
    for one in records:
        for cell in one.cells:
            found[cell].append(one.value)
    out: Cells = {}
    for cell, values in sorted(found.items()):
        widest = cell.count(".") == 1
        if len(values) < _FEWEST and not (widest and len(values) > 1):
            continue
        ordered, n = np.sort(values), len(values)
        tail = _tail_of(cell, tails or {})
        low = ordered[max(int(np.floor(tail * (n + 1))) - 1, 0)]
        high = ordered[min(int(np.ceil((1.0 - tail) * (n + 1))) - 1, n - 1)]
        out[cell] = min(float(low), 0.0), max(float(high), 0.0), n
    return out


def _tail_of(cell: str, tails: Mapping[str, float]) -> float:
    parts = cell.split(".")
    return tails.get(".".join(parts[:3]), tails.get(".".join(parts[:2]), (1.0 - LEVEL) / 2.0))


def found_cell(cells: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The narrowest of `names` that there is."""
    return next((name for name in names if name in cells), None)


def group_tails(records: Sequence[Residual]) -> dict[str, float]:
    """Tails with which a share LEVEL of the rows of groups that were left out is inside: by cell without regime.

    Rows of a group are off together, so that a group that was not seen is a little less often inside than a row.
    """
    found: dict[str, float] = {}
    best: dict[str, float] = {}
    for tail in _TAILS:
        for key, (share, _) in coverage(records, tail=tail).items():
            if key.count(".") >= 1 and key.split(".")[1] in _DISTANCES:
                off = abs(share - LEVEL)
                if off < best.get(key, 1.0) - 1e-9:
                    best[key], found[key] = off, tail
    return found


def coverage(
    records: Sequence[Residual], tails: Mapping[str, float] | None = None, *, tail: float | None = None
) -> dict[str, tuple[float, int]]:
    """(share of rows inside their range, rows), a group left out at a time; of all, by metric, distance and engine.

    tails, tail   of `quantiles`: by cell, or one for all
    """
    if tail is not None:
        tails = {one.cells[-1]: tail for one in records}
    inside: dict[str, list[bool]] = defaultdict(list)
    groups = defaultdict(list)
    for one in records:
        groups[one.group].append(one)
    for group, held_out in groups.items():
        cells = quantiles((one for one in records if one.group != group), tails)
        for one in held_out:
            name = found_cell(cells, one.cells)
            if name is None:
                continue
            low, high, _ = cells[name]
            hit = low <= one.value <= high
            for key in ("all", one.metric, f"{one.metric}.{one.distance}", f"{one.metric}.{one.engine}",
                        f"{one.metric}.{one.distance}.{one.engine}"):
                inside[key].append(hit)
    return {key: (float(np.mean(hits)), len(hits)) for key, hits in sorted(inside.items())}


def residual_table(records: Sequence[Residual], *, source: str) -> str:
    """The text of `data/residuals.toml`: what was seen, the cells, and the coverage that was found."""
    tails = group_tails(records)
    seen = sorted({one.group for one in records if not one.distance.startswith("calibrated")})
    lines = [
        "# Residuals ln(measured / predicted) of rows that the constants had not seen: 80 % of a cell's rows are",
        "# between low and high. Cells: metric.distance[.engine[.regime]] (bstar.calibration.residuals).",
        f"source = {json.dumps(source)}", "", "# Engine, GPU and model of measured rows.", "combinations = [",
        *(f"  {json.dumps(list(group))}," for group in seen), "]", "", "[cells]",
        *(f"{json.dumps(cell)} = {{ low = {low:.4f}, high = {high:.4f}, rows = {n} }}"
          for cell, (low, high, n) in quantiles(records, tails).items()),
        "", "# Share of rows inside the range that the rows of other groups (engine, GPU, model) give.", "[coverage]",
        *(f"{json.dumps(key)} = {{ share = {share:.3f}, rows = {n} }}"
          for key, (share, n) in coverage(records, tails).items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def read_records(lines: Iterable[str]) -> list[Residual]:
    """Records of JSON lines with the fields of `Residual`. Raises ValueError on a line that is none."""
    return [Residual(**json.loads(line)) for line in lines if line.strip()]
