"""What the fit says of itself: held-out errors, what each constant is worth, the peer on the same rows, residuals."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from points import FitPoint

from bstar.calibration.bundled import SERVING, bundled_points
from bstar.calibration.peer import peer_prediction
from bstar.latency.constants import constant_specs
from fit import Fitted, held_out, shifts_of

Floats = NDArray[np.float64]
Held = dict[str, Floats]

NAMES = {
    "fit": "seen by the fit", "known": "other rows of the same GPU x engine x model seen",
    "group": "GPU x engine x model not seen", "family": "model not seen on any GPU or engine",
    "machine": "GPU x engine not seen",
}  # fmt: skip


def figures(errors: Floats) -> dict[str, float]:
    """Errors |predicted / measured - 1| as the issue counts them; errors are log(predicted / measured), (points, 2)."""
    tpot, ttft = errors[:, 0], errors[:, 1][np.isfinite(errors[:, 1])]
    return {
        "TPOT median": float(np.median(np.abs(np.expm1(tpot)))), "TPOT mean": float(np.abs(np.expm1(tpot)).mean()),
        "TTFT median": float(np.median(np.abs(np.expm1(ttft)))), "TTFT |log| mean": float(np.abs(ttft).mean()),
    }  # fmt: skip


def held_out_rows(fitted: Fitted, held: Held) -> list[dict[str, Any]]:
    """A table: all points by each way to hold out, then by engine."""
    engines = np.array([p.engine for p in fitted.points])
    rows = [{"rows": name, "n": len(engines)} | figures(held[key]) for key, name in NAMES.items()]
    rows += [{"rows": f"steady runs: {NAMES[key]}", "n": int(fitted.steady.sum())} | figures(held[key][fitted.steady])
             for key in ("known", "group", "family")]  # fmt: skip
    for engine in sorted(set(engines)):
        for key in ("known", "group", "family"):
            inside = engines == engine
            rows.append({"rows": f"{engine}: {NAMES[key]}", "n": int(inside.sum())} | figures(held[key][inside]))
    return rows


def beside_peer(fitted: Fitted, held: Held) -> list[dict[str, Any]]:
    """Held-out errors and the peer's, on the rows that the peer answers."""
    rows: list[dict[str, Any]] = []
    theirs = np.full((len(fitted.points), 2), np.nan)
    for i, p in enumerate(fitted.points):
        found = peer_prediction(p.point)
        if found is not None:
            for k, (value, measured) in enumerate(((found.tpot_s, p.point.tpot_s), (found.ttft_s, p.point.ttft_s))):
                if value and measured:
                    theirs[i, k] = np.log(value / measured)
    answered = np.isfinite(theirs[:, 0])
    rows.append({"rows": "peer", "n": int(answered.sum())} | figures(theirs[answered]))
    rows += [{"rows": NAMES[key], "n": int(answered.sum())} | figures(held[key][answered])
             for key in ("known", "group", "family")]  # fmt: skip
    return rows


def noise_floor() -> dict[str, float]:
    """Ratios of TPOT and TTFT of rows that differ in nothing but the date: no prediction can do better."""
    alike: dict[tuple[object, ...], list[Any]] = {}
    for p in bundled_points(SERVING):
        if not p.is_disaggregated and p.tpot_s and p.counts:
            key = (p.engine, p.engine_version, p.model, p.gpu, p.weight_dtype, p.input_tokens, p.output_tokens,
                   p.concurrency, p.num_gpus, p.attention_tp, p.attention_dp, p.expert_parallel)  # fmt: skip
            alike.setdefault(key, []).append(p)
    spread = [abs(np.log(a.tpot_s / b.tpot_s)) for same in alike.values() for a, b in pairwise(same)]
    if not spread:
        return {"pairs": 0.0}
    half = np.array(spread) / 2.0  # the best guess is between the two
    return {"pairs": float(len(spread)), "TPOT median": float(np.median(half)),
            "TPOT p90": float(np.quantile(half, 0.9)), "TPOT mean": float(half.mean())}  # fmt: skip


def ablation(fitted: Fitted, folds: dict[str, NDArray[np.int64]], held: Held) -> list[dict[str, Any]]:
    """What leaving each constant at its prior costs on held-out points of steady runs (errors without less with it)."""
    rows, steady = [], fitted.steady
    for parameter in fitted.parameters:
        chosen = np.array([t.parameter is not parameter for t in fitted.terms])
        row: dict[str, Any] = {"constant": parameter.name, "numbers": int((~chosen).sum())}
        cost = 0.0
        for key in ("known", "group", "family"):
            without, with_it = figures(held_out(fitted, folds[key], chosen)[steady]), figures(held[key][steady])
            for name in ("TPOT median", "TPOT mean", "TTFT median"):
                row[f"{key} {name}"] = without[name] - with_it[name]
            cost += row[f"{key} TPOT median"] + 0.4 * row[f"{key} TPOT mean"] + 0.25 * row[f"{key} TTFT median"]
        rows.append(row | {"cost": cost})
    return rows


def values(fitted: Fitted, errors: Floats) -> list[dict[str, Any]]:
    """Terms with their standard errors."""
    return [{"constant": t.parameter.name, "level": t.level, "where": "|".join(t.where), "value": float(v),
             "standard_error": float(e), "width": t.width}
            for t, v, e in zip(fitted.terms, fitted.values, errors, strict=True)]  # fmt: skip


def write_residuals(points: Sequence[FitPoint], held: Held, path: Path) -> None:
    """ln(measured / predicted) of held-out rows as JSON lines: fields of bstar.calibration.residuals.Residual."""
    lines = []
    for key, distance in (("known", "combination"), ("group", "engine_gpu"), ("machine", "unknown")):
        for p, error in zip(points, held[key], strict=True):
            for k, metric in enumerate(("tpot", "ttft")):
                if np.isfinite(error[k]):
                    lines.append(json.dumps({
                        "id": p.point.id, "metric": metric, "distance": distance, "engine": p.engine,
                        "gpu": p.deployment.device.id, "model": p.deployment.model.name, "bound_by": "",
                        "value": round(-float(error[k]), 5)}))  # fmt: skip
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_rows(points: Sequence[FitPoint], held: Held, path: Path) -> None:
    """Errors of every point, to look at."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["id", "group", "unsteady", *(f"{k}_{m}" for k in held for m in ("tpot", "ttft"))])
        for i, p in enumerate(points):
            out.writerow([p.point.id, p.group, p.unsteady or "",
                          *(f"{held[k][i, m]:.4f}" for k in held for m in (0, 1))])  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return f"{value:.1%}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(key, "")) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def constants_table(fitted: Fitted, errors: Floats) -> str:
    """What was fitted, by name: meaning, range of the values over cells, of their standard errors."""
    cells = sorted({p.cell for p in fitted.points})
    shifts = shifts_of(fitted.terms, fitted.values, cells)
    lines = ["| constant | meaning | fitted where | shift (s, or 1/(1 + shift)) | standard error |", "| --- " * 5 + "|"]
    for parameter in fitted.parameters:
        inside = [k for k, t in enumerate(fitted.terms) if t.parameter is parameter]
        moved = [shifts[c].get(parameter.name, 0.0) for c in cells]
        lines.append(f"| `{parameter.name}` | {constant_specs()[parameter.name].meaning} | "
                     f"{', '.join(parameter.widths)} | {_span(moved)} | {_span([errors[k] for k in inside])} |")
    return "\n".join(lines)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"



