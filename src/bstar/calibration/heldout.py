"""Errors on rows that the fit had not seen, as the fit's report says them (`latency/data/fit_report.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

# Tables of the report, and what stands above each.
_TABLES: Final = {
    "heldout": "",
    "peer": "\nOn the rows that the peer answers:\n",
    "ablation": "\nWhat leaving each constant at its prior would cost (differences of errors; positive: worse):\n",
}
_ABLATION: Final = ("constant", "numbers", "group TPOT median", "group TPOT mean", "group TTFT median",
                    "family TPOT median")  # fmt: skip


def fit_report() -> dict[str, Any] | None:
    """The report of the last fit; None where there is none."""
    file = files("bstar.latency") / "data" / "fit_report.json"
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def heldout_lines() -> list[str]:
    """The report's cross-validated figures as Markdown."""
    report = fit_report()
    if report is None:
        return ["\nNo report of a cross-validated fit is in this version.\n"]
    lines = ["\n" + str(report.get("method", "")) + "\n"]
    for key, head in _TABLES.items():
        rows = [row for row in report.get(key, []) if isinstance(row, Mapping)]
        if rows:
            lines += [head, *_table(rows, _ABLATION if key == "ablation" else None)]
    noise = report.get("noise")
    if isinstance(noise, Mapping) and noise.get("pairs"):
        lines.append(
            f"\nNoise: {noise['pairs']:,.0f} pairs of rows differ in nothing but the date; half of their difference, "
            f"below which no prediction can be, is {_cell(noise.get('TPOT median'))} in the median and "
            f"{_cell(noise.get('TPOT p90'))} at the 90th percentile of TPOT.\n")
    return lines


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> list[str]:
    names = [c for c in columns or dict.fromkeys(key for row in rows for key in row) if c in rows[0]]
    lines = ["| " + " | ".join(name.replace("|", "\\|") for name in names) + " |",
             "| " + " | ".join("---" for _ in names) + " |"]  # fmt: skip
    return lines + ["| " + " | ".join(_cell(row.get(name), name) for name in names) + " |" for row in rows]


def _cell(value: Any, column: str = "") -> str:
    """Shares as percentages, logarithms and counts as they are."""
    if isinstance(value, float):
        return f"{value:.2f}" if "log" in column else f"{value:.1%}"
    return "–" if value is None else str(value)
