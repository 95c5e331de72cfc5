"""Predictions of a fixed sample of measured rows, kept in the repository: a change that moves them shows the diff.

    python tools/golden_summary.py            compare; exit code 1 and a readable diff when predictions have moved
    python tools/golden_summary.py --update   take today's predictions, on purpose (CHANGELOG.md says why)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bstar.calibration.bundled import LATENCY, SERVING, bundled_points
from bstar.calibration.point import Point
from bstar.calibration.summary import ErrorFigures, Outcome, Summary, summaries_by, summary_of
from bstar.calibration.validation import validate

GOLDEN = Path(__file__).parents[1] / "tests" / "calibration" / "data" / "golden_summary.json"
# Predictions that move by less are equal: other processors round otherwise.
TOLERANCE = 1e-3
_SHOWN = 12
_FIGURES = ("ttft_s", "tpot_s", "output_tokens_per_s")


def sample() -> list[Point]:
    """Rows of every kind, engine and GPU, none of them slow to replay."""
    serving = bundled_points(SERVING)
    together = [p for p in serving if not p.is_disaggregated and p.concurrency <= 128]
    apart = [p for p in serving if p.is_disaggregated and p.concurrency <= 512]
    return [*together[::15], *apart[::25], *bundled_points(LATENCY)[::40]]


def golden_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is stored: each row's predictions, four digits, and the figures by kind and engine."""
    rows = {
        o.point.id: [None if (v := getattr(o.prediction, name)) is None else float(f"{v:.5g}") for name in _FIGURES]
        for o in outcomes
    }
    return {"summary": _summary(outcomes), "rows": rows}


def _summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    groups = {"all": summary_of(outcomes)}
    for axis in ("kind", "engine"):
        groups |= {f"{axis} {name}": s for name, s in summaries_by(outcomes, axis).items()}
    return {name: _figures(s) for name, s in groups.items()}


def _figures(summary: Summary) -> dict[str, float | None]:
    def short(figures: ErrorFigures, name: str) -> float | None:
        value = getattr(figures, name)
        return None if value is None else round(value, 4)

    return {
        "answered": summary.coverage_fraction, "tpot_median_ape": short(summary.tpot, "median_ape"),
        "tpot_mape": short(summary.tpot, "mape"), "ttft_median_ape": short(summary.ttft, "median_ape"),
        "ttft_mean_abs_log_ratio": short(summary.ttft, "mean_abs_log_ratio"),
    }  # fmt: skip


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[float, str, str]]:
    """(|ln(after / before)|, row, what) of figures that moved, the largest first."""
    found = []
    for row in dict.fromkeys((*before["rows"], *after["rows"])):
        old, new = before["rows"].get(row), after["rows"].get(row)
        if old is None or new is None:
            found.append((math.inf, row, "not in the sample any more" if new is None else "new in the sample"))
            continue
        for name, a, b in zip(_FIGURES, old, new, strict=True):
            if a is None or b is None:
                if a is not b:
                    found.append((math.inf, row, f"{name}: {a} → {b}"))
            elif abs(math.log(b / a)) > TOLERANCE:
                found.append((abs(math.log(b / a)), row, f"{name}: {a:.5g} → {b:.5g} ({b / a - 1:+.1%})"))
    return sorted(found, key=lambda item: (-item[0], item[1]))


def report(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The diff as text; empty where nothing moved."""
    changes = moved(before, after)
    if not changes:
        return ""
    rows = len({row for _, row, _ in changes})
    lines = [f"predictions have moved: {rows} of {len(after['rows'])} rows of the sample", ""]
    for group, new in after["summary"].items():
        old = before["summary"].get(group, {})
        cells = [f"{name} {_shown(name, old.get(name))} → {_shown(name, value)}" for name, value in new.items()
                 if old.get(name) != value]
        lines += [f"  {group}: " + ", ".join(cells)] if cells else []
    lines += ["", *(f"  {row}  {what}" for _, row, what in changes[:_SHOWN])]
    lines += [f"  … {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    return "\n".join([*lines, "", "on purpose? python tools/golden_summary.py --update, and a line in CHANGELOG.md"])


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if name.endswith("ratio") else f"{value:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    after = golden_of(validate(sample(), jobs=1))
    before = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {"summary": {}, "rows": {}}
    text = report(before, after)
    print(text or f"predictions are as they were ({len(after['rows'])} rows)")
    if not update:
        return 1 if text else 0
    if text:
        GOLDEN.parent.mkdir(exist_ok=True)
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(v)}" for name, v in after["rows"].items())
        head = json.dumps(after["summary"], indent=1, ensure_ascii=False)
        GOLDEN.write_text(f'{{"summary": {head},\n"rows": {{\n{rows}\n}}}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
