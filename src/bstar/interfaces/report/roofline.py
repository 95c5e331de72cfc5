"""The roofline panel: attained FLOP/s of one GPU against arithmetic intensity, at several batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from bstar.interfaces.report.axes import LogAxis, batch_text, decimal_ticks, inside_memory, value_axis
from bstar.interfaces.report.panels import (
    FAINT,
    INK,
    KIND_SCALE,
    KINDS,
    LABEL_SIZE,
    NAME_SIZE,
    Layer,
    as_spec,
    heading_layer,
    inline,
    legend,
    subject_colour,
    value_y,
)
from bstar.interfaces.report.series import CurveSeries
from bstar.units import TERA, format_rate

_Y_TITLE = "TFLOP/s per GPU"
# Two batch numbers nearer than this would be written over each other.
_MIN_LABEL_DISTANCE_PX = 20.0


def roofline_axes(curves: Sequence[CurveSeries], *, width: float, height: float) -> tuple[LogAxis, LogAxis]:
    """(FLOP per byte, TFLOP/s) axes that hold the operating points and the ridges of all curves."""
    points = [p for c in curves for p in _points(c, "")]
    ridges = [c.ridge_point * 2 for c in curves if c.ridge_point is not None]
    peaks = [c.peak_flops_per_s / TERA for c in curves if c.peak_flops_per_s is not None]
    return (
        value_axis([p["intensity"] for p in points] + ridges, width, margin=1.5),
        value_axis([p["value"] for p in points] + peaks, height, margin=1.7),
    )


def roofline_panel(
    curves: Sequence[CurveSeries],
    subjects: Sequence[str],
    *,
    x: LogAxis,
    y: LogAxis,
    domain: Sequence[str],
    colour_title: str,
    title: str,
    title_above: float = 7,
) -> dict[str, Any]:
    """Operating points of `curves`, which share one roof (device and compute dtype), up to what fits in memory."""
    points = [p for c, s in zip(curves, subjects, strict=True) for p in _points(c, s)]
    if len(curves) == 1:
        _choose_labels(points, x, y)
    x_enc = _x(x)
    base = alt.Chart(inline(points))
    colour = subject_colour(domain, colour_title)
    layers: list[Layer] = [
        *_roof(curves[0], x, y, x_enc),
        base.mark_line(strokeWidth=1.6, clip=True).encode(
            x=x_enc, y=value_y(y, _Y_TITLE), color=colour, detail="series:N", order="order:Q",
            strokeDash=alt.StrokeDash("kind:N", scale=KIND_SCALE, legend=legend("time"))),
        base.transform_filter("datum.marked").mark_point(filled=True, size=42, opacity=1).encode(
            x=x_enc, y=value_y(y, _Y_TITLE), color=colour,
            tooltip=[alt.Tooltip("series:N"), alt.Tooltip("text:N", title="batch"),
                     alt.Tooltip("intensity:Q", title="FLOP per byte", format=",.3~g"),
                     alt.Tooltip("value:Q", title="TFLOP/s", format=",.3~g")]),
        base.transform_filter("datum.labelled").mark_text(
            align="left", dx=8, dy=9, fontSize=NAME_SIZE, color=INK
        ).encode(x=x_enc, y=value_y(y, _Y_TITLE), text="text:N"),
        heading_layer(title, above=title_above, width=x.length),
    ]  # fmt: skip
    return as_spec(alt.layer(*layers).properties(width=x.length, height=y.length))


def _x(axis: LogAxis) -> alt.X:
    return alt.X(
        "intensity:Q",
        title="arithmetic intensity (FLOP per byte)",
        scale=alt.Scale(type="log", domain=[axis.low, axis.high], nice=False),
        axis=alt.Axis(values=decimal_ticks(axis, spacing=30), format=",~g", gridOpacity=0.5),
    )


def _points(curve: CurveSeries, subject: str) -> list[dict[str, Any]]:
    shown = inside_memory(curve)
    last, points = shown - 1, []
    for kind, step_s in zip(KINDS, (curve.step_expected_s, curve.step_floor_s), strict=True):
        for i in range(shown):
            batch, flops = curve.batch[i], curve.step_flops[i]
            marked = kind == KINDS[0] and (i in (0, last) or _is_power_of_four(batch))
            points.append(
                {
                    "intensity": flops / curve.step_bytes[i],
                    "value": flops / step_s[i] / TERA,
                    "kind": kind,
                    "subject": subject,
                    "series": curve.label,
                    "order": i,
                    "marked": marked,
                    "labelled": False,
                    "text": batch_text(batch),
                }
            )
    return points


def _is_power_of_four(batch: float) -> bool:
    return abs(math.log(batch, 4) - round(math.log(batch, 4))) < 1e-6


def _choose_labels(points: Sequence[dict[str, Any]], x: LogAxis, y: LogAxis) -> None:
    taken: list[tuple[float, float]] = []
    for point in points:
        at = (x.pixel(point["intensity"]), y.pixel(point["value"]))
        if point["marked"] and all(math.dist(at, other) >= _MIN_LABEL_DISTANCE_PX for other in taken):
            point["labelled"] = True
            taken.append(at)


def _roof(curve: CurveSeries, x: LogAxis, y: LogAxis, x_enc: alt.X) -> list[Layer]:
    peak, bandwidth, ridge = curve.peak_flops_per_s, curve.bandwidth_bytes_per_s, curve.ridge_point
    assert peak is not None and bandwidth is not None and ridge is not None
    left = max(x.low, y.low * TERA / bandwidth)
    corners = [(left, left * bandwidth), (ridge, peak), (x.high, peak)]
    roof = inline([{"intensity": i, "value": f / TERA, "order": k} for k, (i, f) in enumerate(corners)])
    name = f"{format_rate(peak, 'FLOP/s')} {curve.compute_dtype}".strip()
    middle = math.sqrt(left * ridge)
    slope = math.degrees(math.atan2(y.length / math.log(y.high / y.low), x.length / math.log(x.high / x.low)))
    y_enc = value_y(y, _Y_TITLE)
    at_ridge = alt.Chart(inline([{"intensity": ridge, "text": f"ridge {ridge:,.0f}"}]))
    return [
        alt.Chart(roof).mark_line(color=INK, strokeWidth=2, clip=True).encode(x=x_enc, y=y_enc, order="order:Q"),
        at_ridge.mark_rule(color=FAINT, strokeDash=[2, 3]).encode(
            x=x_enc, y=alt.value(y.length - y.pixel(peak / TERA)), y2=alt.value(y.length)),
        at_ridge.mark_text(align="right", baseline="bottom", dx=-4, dy=-4, fontSize=NAME_SIZE, color=FAINT).encode(
            x=x_enc, y=alt.value(y.length), text="text:N"),
        alt.Chart(inline([{"intensity": x.high, "value": peak / TERA, "text": name}])).mark_text(
            align="right", baseline="bottom", dx=-4, dy=-4, fontSize=LABEL_SIZE, color=INK
        ).encode(x=x_enc, y=y_enc, text="text:N"),
        alt.Chart(inline([
            {"intensity": middle, "value": middle * bandwidth / TERA, "text": format_rate(bandwidth, "B/s")}
        ])).mark_text(angle=(360 - slope) % 360, baseline="bottom", dy=-5, fontSize=LABEL_SIZE, color=INK).encode(
            x=x_enc, y=y_enc, text="text:N"),
    ]  # fmt: skip
