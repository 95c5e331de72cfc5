"""The text of `bstar validate`: error tables and the worst rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bstar.calibration.peer import PEER_NAME
from bstar.calibration.summary import ErrorFigures, Outcome, Summary, kind_of, summaries_by, summary_of
from bstar.calibration.suspects import label, worst_rows
from bstar.interfaces.cli import output
from bstar.units import format_seconds

_COLUMNS = ("", "rows", "counted", "answered", "TPOT med", "mean", "bias", "TTFT med", "|ln|", "tok/s med",
            "peer TPOT", "ours", "peer TTFT", "ours")
_MOST_GROUPS = 24
# Files of so few rows are printed row by row.
_FEW = 24


def validation_parts(outcomes: Sequence[Outcome], axes: Sequence[str], *, worst: int) -> list[Any]:
    """Renderables: a table of kinds and of each axis, the worst rows, what is not answered."""
    whole = summary_of(outcomes)
    parts: list[Any] = [
        output.heading("validation", f"{whole.rows:,} row{'s' if whole.rows != 1 else ''}, {whole.counted:,} counted, "
                       f"{percent(whole.coverage_fraction)} answered"),
    ]
    kinds = summaries_by(outcomes, "kind")
    parts.append(_table(kinds | ({"all": whole} if len(kinds) > 1 else {}), "kind"))
    for axis in axes:
        if axis != "kind":
            parts += [output.line(""), _table(summaries_by(outcomes, axis), axis)]
    parts.append(output.line(
        "errors are |predicted / measured − 1| (bias: its signed mean, |ln|: mean of |ln predicted / measured|) over "
        f"rows that count; peer: {PEER_NAME}, medians on the rows that it answers", style="dim"))
    profiled = sum(o.prediction.profiled for o in outcomes)
    if profiled:
        parts.append(output.line(f"{profiled:,} of {whole.rows:,} rows are predicted with the profile", style="dim"))
    if len(outcomes) <= _FEW:
        parts += _all_rows(outcomes)
    elif worst:
        parts += _worst(outcomes, worst)
    return parts + _unanswered(outcomes)


def _table(groups: dict[str, Summary], axis: str) -> Any:
    rows = [_cells(name, summary) for name, summary in list(groups.items())[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        rows.append((f"… {len(groups) - _MOST_GROUPS} more (--json)", *[""] * (len(_COLUMNS) - 1)))
    used = [i for i in range(len(_COLUMNS)) if i < 9 or any(row[i] not in ("", "–") for row in rows)]
    return output.table([axis if i == 0 else _COLUMNS[i] for i in used], [[row[i] for i in used] for row in rows],
                        spare=[i for i in (2, 6) if i < len(used)])


def _cells(name: str, summary: Summary) -> tuple[str, ...]:
    tpot, ttft = summary.tpot, summary.ttft
    ratio = "–" if ttft.mean_abs_log_ratio is None else f"{ttft.mean_abs_log_ratio:.2f}"
    return (
        name, f"{summary.rows:,}", f"{summary.counted:,}", percent(summary.coverage_fraction), percent(tpot.median_ape),
        percent(tpot.mape), signed(tpot.bias), percent(ttft.median_ape), ratio,
        percent(summary.throughput.median_ape), *_peer(summary),
    )  # fmt: skip


def _peer(summary: Summary) -> tuple[str, ...]:
    if summary.peer is None:
        return "–", "–", "–", "–"
    figures: list[ErrorFigures] = [summary.peer[m][who] for m in ("tpot", "ttft") for who in ("peer", "bstar")]
    return tuple(percent(f.median_ape) for f in figures)


def _all_rows(outcomes: Sequence[Outcome]) -> list[Any]:
    """Predicted and measured, row by row; the range holds four of five measurements that no fit has seen."""
    rows = []
    for o in outcomes:
        found = o.prediction
        rows.append((
            o.point.id, label(o.point), format_seconds(found.ttft_s), _range(found.ttft_range_s),
            format_seconds(o.point.ttft_s),
            signed(o.error("ttft")), format_seconds(found.tpot_s), _range(found.tpot_range_s),
            format_seconds(o.point.tpot_s),
            signed(o.error("tpot")),
        ))  # fmt: skip
    columns = ("row", "what", "TTFT", "range", "measured", "error", "TPOT", "range", "measured", "error")
    return [output.line(""), output.table(columns, rows, left=(0, 1), fold=(1,))]


def _range(found: tuple[float, float] | None) -> str:
    """The two ends in the unit of the first."""
    return "–" if found is None else f"{format_seconds(found[0])} – {format_seconds(found[1])}"


def _worst(outcomes: Sequence[Outcome], count: int) -> list[Any]:
    rows = [
        (w.outcome.point.id, kind_of(w.outcome.point), w.label, w.metric.upper(), signed(w.error), w.reason)
        for w in worst_rows(outcomes, count)
    ]
    if not rows:
        return []
    columns = ("worst rows", "kind", "what", "of", "error", "suspected")
    return [output.line(""), output.table(columns, rows, left=(0, 1, 2, 3, 5), fold=(2, 5))]


def _unanswered(outcomes: Sequence[Outcome]) -> list[Any]:
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        if not outcome.answered:
            reason = outcome.prediction.reason or "no figure"
            reasons[reason] = reasons.get(reason, 0) + 1
    found = sorted(reasons.items(), key=lambda item: -item[1])
    lines = [output.line(f"no answer ({count:,}): {reason}", style="yellow") for reason, count in found[:12]]
    if len(found) > 12:
        lines.append(output.line(f"… {len(found) - 12} more reasons (--json)", style="yellow"))
    return lines


def percent(value: float | None) -> str:
    """0.123 as 12.3%."""
    return "–" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """-0.123 as −12.3%."""
    return "–" if value is None else f"{value:+.1%}".replace("-", "−")
