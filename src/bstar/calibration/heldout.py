"""Errors on rows that the fit had not seen, as the fit's report says them (`latency/data/fit_report.json`)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


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
    rows = [item for item in report.get("heldout", []) if isinstance(item, dict)]
    if not rows:
        return ["\nThe fit's report has no held-out figures.\n"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]
    text = report.get("method", "Each group of GPU, engine and model was left out of the fit in turn.")
    return ["", str(text), "", *lines, ""]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if abs(value) < 10 else f"{value:,.4g}"
    return "–" if value is None else str(value)
