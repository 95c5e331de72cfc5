"""The panels of the batch curve as Altair layers: amortized time with regions and landmarks, and step time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from bstar.interfaces.report.axes import (
    REGIONS,
    LogAxis,
    PlacedLabel,
    decimal_ticks,
    landmark_labels,
    powers_of_two,
    region_edges,
    text_width,
    widest_gap,
)
from bstar.interfaces.report.series import LANDMARK_LABELS, CurveSeries
from bstar.units import format_seconds

# Okabe and Ito's palette, then four of Tol's: told apart with the common colour blindnesses.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#117733", "#882255", "#666666",
)  # fmt: skip
REGION_COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#D55E00")
INK, SOFT, FAINT = "#222222", "#555555", "#777777"
LABEL_SIZE, NAME_SIZE = 11.0, 10.0
ROW_HEIGHT, LEADER_HEIGHT = 14, 11
KINDS = ("expected", "floor (speed of light)")
KIND_SCALE = alt.Scale(domain=list(KINDS), range=[[1, 0], [5, 3]])
BATCH_TITLE = "batch (sequences per decode step)"

# Pixels kept for the numbers of every y axis, so that the columns of a grid stand under each other.
Y_EXTENT = 40
_LEGEND_WIDTH = 700
# Pixels under the curves for the names of the regions.
NAMES_HEIGHT = 22

Layer = alt.Chart | alt.LayerChart
Panel = alt.LayerChart | alt.FacetChart


def inline(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Rows as data, written as text: Altair copies data at every step of building a chart, and `as_spec` unpacks it."""
    return alt.InlineData(values=json.dumps(list(rows)), format=alt.JsonDataFormat(type="json"))


def as_spec(panel: Panel) -> dict[str, Any]:
    """The panel as a Vega-Lite dictionary whose data is plain rows under "datasets"."""
    spec: dict[str, Any] = panel.to_dict()
    spec["datasets"] = {name: json.loads(rows) for name, rows in spec.get("datasets", {}).items()}
    return spec


def legend(title: str, *, symbol_size: float = 400, columns: int = 8) -> alt.Legend:
    return alt.Legend(
        title=title, orient="bottom", symbolSize=symbol_size, labelLimit=500, titleLimit=500, columns=columns
    )


def subject_colour(domain: Sequence[str], title: str) -> alt.Color:
    """Colour by model or GPU; no legend where there is only one."""
    # Long names wrap into rows, so that the legend is not wider than the panels above it.
    columns = max(1, int(_LEGEND_WIDTH // (text_width(max(domain, key=len), LABEL_SIZE) + 40)))
    scale = alt.Scale(domain=list(domain), range=[PALETTE[i % len(PALETTE)] for i in range(len(domain))])
    return alt.Color(
        "subject:N", scale=scale, legend=legend(title, symbol_size=120, columns=columns) if len(domain) > 1 else None
    )


def heading_layer(text: str, *, above: float, width: float) -> alt.Chart:
    """A panel's title, drawn at a fixed place: Vega would move it by whatever sticks out of the panel."""
    layer: alt.Chart = alt.Chart(inline([{"text": text}])).mark_text(
        align="left", baseline="bottom", fontSize=12.5, fontWeight="bold", color=INK, limit=width + Y_EXTENT
    ).encode(x=alt.value(0), y=alt.value(-above), text="text:N")  # fmt: skip
    return layer


def value_y(axis: LogAxis, title: str) -> alt.Y:
    return alt.Y(
        "value:Q",
        title=title,
        scale=alt.Scale(type="log", domain=[axis.low, axis.high], nice=False),
        axis=alt.Axis(values=decimal_ticks(axis), format=",~g", gridOpacity=0.5, minExtent=Y_EXTENT),
    )


def _x(axis: LogAxis, field: str = "batch") -> alt.X:
    return alt.X(
        f"{field}:Q",
        title=BATCH_TITLE,
        scale=alt.Scale(type="log", base=2, domain=[axis.low, axis.high], nice=False),
        axis=alt.Axis(values=powers_of_two(axis), format=",~g", grid=False, labelFlush=False),
    )


def _rows(curve: CurveSeries, unit_s: float, *, amortized: bool, subject: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind, step_s in zip(KINDS, (curve.step_expected_s, curve.step_floor_s), strict=True):
        values = curve.amortized_s(step_s) if amortized else step_s
        rows += [{"batch": b, "value": v / unit_s, "kind": kind, "subject": subject, "series": curve.label}
                 for b, v in zip(curve.batch, values, strict=True)]  # fmt: skip
    return rows


def _tooltip(unit: str) -> list[alt.Tooltip]:
    return [alt.Tooltip("series:N", title="series"), alt.Tooltip("kind:N", title="time"),
            alt.Tooltip("batch:Q", format=",~g"), alt.Tooltip("value:Q", format=",.3~g", title=unit)]  # fmt: skip


def amortized_panel(
    curve: CurveSeries,
    *,
    x: LogAxis,
    y: LogAxis,
    unit: tuple[float, str],
    title: str,
    y_title: str,
    names: Sequence[str] = tuple(LANDMARK_LABELS),
    label_rows: int | None = None,
) -> dict[str, Any]:
    """Amortized time per output token against batch, with its regions and landmarks.

    names       landmarks to draw
    label_rows  rows kept free for their texts, so that the panels of a grid are equally high; None: what it needs
    """
    labels = landmark_labels(curve, x, size=LABEL_SIZE, names=names)
    rows = 1 + max((p.row for p in labels), default=0) if label_rows is None else label_rows
    line = alt.Chart(inline(_rows(curve, unit[0], amortized=True, subject=curve.model))).mark_line(
        strokeWidth=2.4, color=PALETTE[0], clip=True, interpolate="monotone"
    ).encode(
        x=_x(x), y=value_y(y, y_title), tooltip=_tooltip(unit[1]),
        strokeDash=alt.StrokeDash("kind:N", scale=KIND_SCALE, legend=legend("time")),
    )  # fmt: skip
    layers: list[Layer] = [
        *_region_layers(curve, x, y.length, [x.pixel(p.batch) for p in labels]),
        *_landmark_layers(labels, x, y.length), line, *_recommended(curve, unit[0], x, y, y_title),
        heading_layer(title, above=labels_height(rows), width=x.length),
    ]  # fmt: skip
    return as_spec(alt.layer(*layers).properties(width=x.length, height=y.length))


def labels_height(rows: int) -> int:
    """Pixels above a panel up to its title."""
    return LEADER_HEIGHT + ROW_HEIGHT * rows + 8


def label_rows(curves: Sequence[CurveSeries], x: LogAxis, names: Sequence[str]) -> int:
    """Rows of landmark texts that the fullest of the panels needs."""
    return 1 + max((p.row for c in curves for p in landmark_labels(c, x, size=LABEL_SIZE, names=names)), default=0)


def _region_layers(curve: CurveSeries, x: LogAxis, height: float, rules: Sequence[float]) -> list[Layer]:
    edges = region_edges(curve, x)
    fill = alt.Fill(
        "region:N", scale=alt.Scale(domain=list(REGIONS), range=list(REGION_COLOURS)),
        legend=alt.Legend(title="region of the batch curve", orient="bottom", symbolType="square", symbolOpacity=0.4,
                          symbolStrokeWidth=0, symbolSize=150, titleLimit=500),
    )  # fmt: skip
    tint = alt.Chart(inline([{"region": name, "batch": low, "to": high} for name, low, high in edges])).mark_rect(
        opacity=0.15
    ).encode(x=_x(x), x2="to:Q", y=alt.value(0), y2=alt.value(height), fill=fill)  # fmt: skip
    names = []
    for name, low, high in edges:
        left, right = widest_gap(x.pixel(low), x.pixel(high), rules)
        if right - left > text_width(name, NAME_SIZE) + 2:
            names.append({"batch": x.value((left + right) / 2), "region": name})
    return [tint, alt.Chart(inline(names)).mark_text(
        fontSize=NAME_SIZE, color=FAINT, baseline="bottom", fontStyle="italic"
    ).encode(x=_x(x), y=alt.value(height - 4), text="region:N")]  # fmt: skip


def _landmark_layers(labels: Sequence[PlacedLabel], x: LogAxis, height: float) -> list[Layer]:
    layers: list[Layer] = []
    for strong in (True, False):
        chosen = [p for p in labels if (p.name == "b_star") == strong]
        if not chosen:
            continue
        colour, width, dash = (INK, 1.7, [1, 0]) if strong else (SOFT, 1.1, [5, 3])
        inside = inline([{"batch": p.batch} for p in chosen if not p.beyond])
        layers.append(
            alt.Chart(inside)
            .mark_rule(color=colour, strokeWidth=width, strokeDash=dash)
            .encode(x=_x(x), y=alt.value(0), y2=alt.value(height))
        )
        for row in sorted({p.row for p in chosen}):
            top = -LEADER_HEIGHT - ROW_HEIGHT * row
            data = inline([{"batch": p.batch, "text_batch": p.text_batch, "text": p.text, "leads": not p.beyond}
                           for p in chosen if p.row == row])  # fmt: skip
            layers.append(
                alt.Chart(data)
                .transform_filter("datum.leads")
                .mark_rule(color=colour, strokeWidth=width * 0.7)
                .encode(x=_x(x), x2="text_batch:Q", y=alt.value(0), y2=alt.value(top + 1))
            )
            # A white halo keeps the leader of an upper row from striking through the text.
            for halo in (True, False):
                style: dict[str, Any] = {"stroke": "white", "strokeWidth": 3} if halo else {}
                layers.append(alt.Chart(data).mark_text(
                    baseline="bottom", fontSize=LABEL_SIZE, color=colour,
                    fontWeight="bold" if strong else "normal", **style,
                ).encode(x=_x(x, "text_batch"), y=alt.value(top), text="text:N"))  # fmt: skip
    return layers


def _recommended(curve: CurveSeries, unit_s: float, x: LogAxis, y: LogAxis, y_title: str) -> list[Layer]:
    if curve.recommended is None or not x.low <= curve.recommended <= x.high:
        return []
    value = _interpolate(curve.batch, curve.amortized_s(curve.step_expected_s), float(curve.recommended)) / unit_s
    data = inline([{"batch": curve.recommended, "value": value, "text": f"set {curve.recommended:,}"}])
    encoding: dict[str, Any] = {"x": _x(x), "y": value_y(y, y_title)}
    halo: dict[str, Any] = {"stroke": "white", "strokeWidth": 3, "strokeOpacity": 0.8}
    return [
        alt.Chart(data).mark_point(filled=True, size=90, color=INK, opacity=1, shape="diamond").encode(**encoding),
        *(
            alt.Chart(data).mark_text(
                align="left", baseline="bottom", dx=7, dy=-4, fontSize=LABEL_SIZE, fontWeight="bold", color=INK, **style
            ).encode(**encoding, text="text:N")
            for style in (halo, {})
        ),
    ]  # fmt: skip


def _interpolate(xs: Sequence[float], ys: Sequence[float], at: float) -> float:
    """Log-log linear interpolation, clamped at the ends."""
    if at <= xs[0]:
        return ys[0]
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if at <= x1:
            return math.exp(math.log(y0) + math.log(at / x0) / math.log(x1 / x0) * math.log(y1 / y0))
    return ys[-1]


def step_panel(
    curves: Sequence[CurveSeries],
    subjects: Sequence[str],
    *,
    x: LogAxis,
    y: LogAxis,
    unit: tuple[float, str],
    domain: Sequence[str],
    colour_title: str,
    title: str,
    y_title: str,
) -> dict[str, Any]:
    """Step time (what a user feels as TPOT once admitted) against batch, one colour per subject of `domain`."""
    rows = [r for c, s in zip(curves, subjects, strict=True) for r in _rows(c, unit[0], amortized=False, subject=s)]
    layers: list[Layer] = [
        alt.Chart(inline(rows))
        .mark_line(strokeWidth=2.2, clip=True, interpolate="monotone")
        .encode(
            x=_x(x),
            y=value_y(y, y_title),
            tooltip=_tooltip(unit[1]),
            detail="series:N",
            color=subject_colour(domain, colour_title),
            strokeDash=alt.StrokeDash("kind:N", scale=KIND_SCALE, legend=legend("time")),
        )
    ]
    for limit_s in sorted({c.tpot_slo_s for c in curves if c.tpot_slo_s is not None}):
        if y.low <= limit_s / unit[0] <= y.high:
            data = inline([{"value": limit_s / unit[0], "text": f"TPOT SLO {format_seconds(limit_s)}"}])
            layers += [
                alt.Chart(data).mark_rule(color=INK, strokeDash=[2, 3], strokeWidth=1.3).encode(y=value_y(y, y_title)),
                alt.Chart(data)
                .mark_text(align="left", dx=5, dy=-7, fontSize=LABEL_SIZE, color=INK)
                .encode(x=alt.value(0), y=value_y(y, y_title), text="text:N"),
            ]
    layers.append(heading_layer(title, above=7, width=x.length))
    return as_spec(alt.layer(*layers).properties(width=x.length, height=y.length))
