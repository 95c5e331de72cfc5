"""Charts of `bstar validate` (predicted against measured, errors by regime and by clients), and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bstar.calibration.page import page_text
from bstar.calibration.summary import METRICS, Metric, Outcome, kind_of, label_of
from bstar.errors import ConfigError
from bstar.files import write_whole
from bstar.interfaces.report.axes import LogAxis, decimal_ticks
from bstar.interfaces.report.charts import FONT, SOFT_INK, require_extra
from bstar.interfaces.report.rendering import render

_ENGINES: Final = ("vllm", "sglang", "trtllm")
_TITLES: Final[dict[Metric, str]] = {"tpot": "TPOT", "ttft": "TTFT"}
_SIDE: Final = 250
_PNG_SCALE: Final = 1.2
_OTHER: Final = "static batches and other loads"


def draw(outcomes: Sequence[Outcome], folder: Path, *, small: bool = False) -> list[Path]:
    """Write a chart a file into `folder`, which is made where it is missing; the files written.

    small   charts of many points as coarse PNG instead of SVG

    Raises ConfigError where the extra is not installed or the folder cannot be written.
    """
    require_extra()
    specs = chart_specs(outcomes)
    if not specs:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plots: cannot make the folder {str(folder)!r} ({error.strerror})") from None
    written = []
    for name, spec in specs.items():
        suffix = ".png" if small and name in METRICS else ".svg"
        target = folder / f"{name}{suffix}"
        write_whole(target, render(spec, suffix, png_scale=_PNG_SCALE), what="plot")
        written.append(target)
    return written


def write_page(outcomes: Sequence[Outcome], page: Path, *, command: str) -> Path:
    """Write the validation page and, in a folder of its name beside it, its charts."""
    charts = draw(outcomes, page.with_suffix(""), small=True)
    images = {path.stem: f"{page.stem}/{path.name}" for path in charts}
    write_whole(page, page_text(outcomes, images=images, command=command), what="page")
    return page


def chart_specs(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by chart: tpot, ttft, regimes, clients; those without a row are left out."""
    charts: dict[str, dict[str, Any]] = {}
    for metric in METRICS:
        rows = _rows(outcomes, metric)
        if rows:
            charts[metric] = _scatter(rows, metric)
    rows = [row for metric in METRICS for row in _rows(outcomes, metric)]
    if rows:
        charts["regimes"] = _spread(rows, "regime", "what binds")
        charts["clients"] = _spread(rows, "clients", "clients (or batch)")
    return charts


def _rows(outcomes: Sequence[Outcome], metric: Metric) -> list[dict[str, Any]]:
    """What is drawn of the rows that count; seconds."""
    rows = []
    for o in outcomes:
        error = o.error(metric)
        measured = o.point.tpot_s if metric == "tpot" else o.point.ttft_s
        if error is None or measured is None or not o.counts:
            continue
        kind = kind_of(o.point)
        rows.append({
            "metric": _TITLES[metric], "kind": kind if kind.endswith("aggregated") else _OTHER,
            "engine": label_of(o, "engine"), "measured": _short(measured), "predicted": _short(measured * (1 + error)),
            "ratio": _short(1 + error), "regime": label_of(o, "regime"), "clients": _octave(o.point.concurrency),
        })  # fmt: skip
    return rows


def _short(value: float) -> float:
    """Four digits: enough for a pixel, and a small file."""
    return float(f"{value:.4g}")


def _octave(clients: int) -> str:
    """1, 2–3, 4–7, …: sorted by their text with leading blanks."""
    if clients < 1:
        return "–"
    low = 1 << (clients.bit_length() - 1)
    return f"{low:,}" if low == 1 else f"{low:,}–{2 * low - 1:,}"


def _scatter(rows: Sequence[dict[str, Any]], metric: Metric) -> dict[str, Any]:
    """Predicted against measured, a panel a kind; lines at equal and at 20 % more and less."""
    import altair as alt

    from bstar.interfaces.report.panels import PALETTE, inline

    colours = alt.Scale(domain=list(_ENGINES), range=list(PALETTE[: len(_ENGINES)]))
    panels = []
    for kind in ("aggregated", "disaggregated", _OTHER):
        part = [row for row in rows if row["kind"] == kind]
        if not part:
            continue
        low = min(min(r["measured"], r["predicted"]) for r in part) / 1.2
        high = max(max(r["measured"], r["predicted"]) for r in part) * 1.2
        scale = alt.Scale(type="log", domain=[low, high], nice=False)
        axis = alt.Axis(format="~g", values=decimal_ticks(LogAxis(low=low, high=high, length=_SIDE), spacing=34))
        points = alt.Chart(inline(part)).mark_circle(size=14, opacity=0.45).encode(
            x=alt.X("measured:Q", scale=scale, title=f"measured {_TITLES[metric]} (s)", axis=axis),
            y=alt.Y("predicted:Q", scale=scale, title=f"predicted {_TITLES[metric]} (s)", axis=axis),
            color=alt.Color("engine:N", scale=colours, title="engine"),
        )
        lines = [_line(low, high, factor, scale) for factor in (0.8, 1.0, 1.25)]
        panels.append(alt.layer(points, *lines).properties(
            width=_SIDE, height=_SIDE, title=f"{kind} ({len(part):,} rows)"))
    return _document(alt.hconcat(*panels, spacing=30), f"{_TITLES[metric]}: predicted against measured")


def _line(low: float, high: float, factor: float, scale: Any) -> Any:
    import altair as alt

    from bstar.interfaces.report.panels import inline

    ends = [{"x": low, "y": low * factor}, {"x": high, "y": high * factor}]
    return alt.Chart(inline(ends)).mark_line(
        color=SOFT_INK, strokeWidth=1, clip=True, strokeDash=[1, 0] if factor == 1.0 else [4, 3],
    ).encode(x=alt.X("x:Q", scale=scale), y=alt.Y("y:Q", scale=scale))  # fmt: skip


def _spread(rows: Sequence[dict[str, Any]], field: str, title: str) -> dict[str, Any]:
    """Quantiles of predicted / measured by `field`: 10–90 % a line, 25–75 % a bar, the median a tick."""
    import altair as alt

    from bstar.interfaces.report.panels import PALETTE, inline

    panels = []
    for metric in _TITLES.values():
        part = [row for row in rows if row["metric"] == metric]
        if not part:
            continue
        groups = _quantiles(part, field)
        base = alt.Chart(inline(groups)).encode(
            y=alt.Y("group:N", sort=[g["group"] for g in groups], title=title))
        axis = alt.Axis(format="~g", values=[0.1, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 10])
        ends = [min(g["p10"] for g in groups), max(g["p90"] for g in groups)]
        scale = alt.Scale(type="log", domain=[min(ends[0], 0.5), max(ends[1], 2.0)], nice=False)
        line = base.mark_rule(color=PALETTE[0]).encode(
            x=alt.X("p10:Q", scale=scale, axis=axis, title=f"predicted / measured {metric}"), x2="p90:Q")
        bar = base.mark_bar(color=PALETTE[0], height=9, opacity=0.6).encode(x=alt.X("p25:Q", scale=scale), x2="p75:Q")
        tick = base.mark_tick(color="black", thickness=2, height=13).encode(x=alt.X("p50:Q", scale=scale))
        one = alt.Chart(inline([{"x": 1}])).mark_rule(color=SOFT_INK, strokeDash=[4, 3]).encode(
            x=alt.X("x:Q", scale=scale))
        panels.append(alt.layer(one, line, bar, tick).properties(
            width=_SIDE, height=24 * len(groups), title=f"{metric} ({len(part):,} rows)"))
    return _document(alt.hconcat(*panels, spacing=30), f"Predicted / measured by {title}: median, 25–75 %, 10–90 %")


def _quantiles(rows: Sequence[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    import numpy as np

    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row["ratio"])
    out = []
    for name in sorted(groups, key=_place):
        at = np.quantile(groups[name], [0.1, 0.25, 0.5, 0.75, 0.9])
        out.append({"group": f"{name} ({len(groups[name]):,})"}
                   | {f"p{p}": _short(float(v)) for p, v in zip((10, 25, 50, 75, 90), at, strict=True)})
    return out


def _place(name: str) -> tuple[int, str]:
    """Ranges of numbers by their first, names by their letters."""
    first = name.split("–")[0].replace(",", "")
    return (int(first), "") if first.isdigit() else (1 << 40, name)


def _document(chart: Any, title: str) -> dict[str, Any]:
    heading = {"text": title, "fontSize": 14, "anchor": "start", "offset": 14}
    document = chart.properties(title=heading, background="white")
    styled = document.configure(font=FONT).configure_title(fontSize=12, fontWeight="normal", anchor="start")
    styled = styled.configure_axis(
        gridColor="#e8e8e8", domainColor="#888888", tickColor="#888888", titleFontWeight="normal")
    return dict(styled.configure_view(stroke="#bbbbbb").to_dict())
