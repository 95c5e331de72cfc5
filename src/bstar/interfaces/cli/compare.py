"""`bstar compare`: runs side by side, measured, imported or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.interfaces.cli import output
from bstar.interfaces.cli.params import json_option
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.measure.comparison import ComparedFigure, RunComparison
    from bstar.metrics import Interval

_EPILOG = """\b
Examples:
  bstar compare runs/before runs/after
  bstar simulate llama-3.1-8b --gpu h100 --input 512 --output 128 --concurrency 32 --json > predicted.json
  bstar compare runs/bench-20261130-101500 predicted.json
  bstar compare runs/mine vllm_result.json guidellm.json

A RUN is a folder of bstar bench (of a sweep: its runs, one a load), what bstar simulate wrote (--json, or
--requests-out), or a result of vllm bench serve --save-result, GuideLLM, AIPerf or inference-perf.
"""
_LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "output_tokens_per_s": "output tok/s",
           "requests_per_s": "requests/s", "goodput_requests_per_s": "goodput /s",
           "slo_attainment_fraction": "SLO attainment"}  # fmt: skip


@click.command("compare", epilog=_EPILOG)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="RUN RUN…")
@json_option
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Lay runs side by side: every figure, its ratio to the first run's, and whether their intervals touch."""
    from bstar.measure.comparison import compare_runs, read_compared

    found = compare_runs([run for path in runs for run in read_compared(path)])
    if as_json:
        output.print_json(found.to_dict())
        return
    _show(found)


def _show(found: RunComparison) -> None:
    heads = ["", *(r.name for r in found.runs)]
    rows = [_cells(figure) for figure in found.figures]
    sources = [("", *(f"{r.source}" for r in found.runs)), ("", *(str(r.facts.get("load") or "") for r in found.runs))]
    if any(r.invalid for r in found.runs):
        sources.append(("", *("no result" if r.invalid else "" for r in found.runs)))
    parts: list[Any] = [output.table(tuple(heads), [*sources, *rows])]
    parts.append(output.line("± half of the 95 % interval (of a share its ends) from the run's requests, none where "
                             "they are too few; ratios are to the first run; * the intervals do not touch",
                             style="dim"))
    parts += [output.line("note: " + note, style="dim") for note in found.notes]
    output.show(*parts)


def _width(metric: str, interval: Interval | None) -> str:
    """Relative to the figure; of a share its ends, which lie unevenly around it."""
    if interval is None or interval.ends is None:
        return ""
    if metric == "slo_attainment_fraction":
        return " [{:.2g}, {:.2g}]".format(*interval.ends)
    width = interval.relative_half_width
    return "" if width is None else f" ±{width:.1%}"


def _cells(figure: ComparedFigure) -> tuple[str, ...]:
    metric, _, part = figure.name.partition(".")
    cells = [f"{_LABELS[metric]} {part}".strip()]
    for i, value in enumerate(figure.values):
        if value is None:
            cells.append("–")
            continue
        shown = format_seconds(value) if metric.endswith("_s") and "per_s" not in metric else f"{value:,.4g}"
        ratio = figure.ratios[i]
        text = shown + _width(metric, figure.intervals[i])
        if i and ratio is not None:
            text += f"  × {ratio:.3g}" + (" *" if figure.apart[i] else "")
        cells.append(text)
    return tuple(cells)
