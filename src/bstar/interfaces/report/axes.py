"""Where things go on a chart: axis ranges, ticks, regions and labels that do not overlap. No drawing here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bstar.interfaces.report.series import LANDMARK_LABELS, CurveSeries
from bstar.units import format_count

REGIONS = ("weight-bound", "saturating", "diminishing", "over memory")
# Mean glyph width of the chart font over its size; labels are placed by it.
_GLYPH = 0.58


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAxis:
    """A logarithmic axis from `low` to `high`, `length` pixels long."""

    low: float
    high: float
    length: float

    def pixel(self, value: float) -> float:
        """Pixels from the low end; outside the axis below 0 or above `length`."""
        return self.length * math.log(value / self.low) / math.log(self.high / self.low)

    def value(self, pixel: float) -> float:
        """The value that stands `pixel` pixels from the low end."""
        return self.low * math.exp(math.log(self.high / self.low) * pixel / self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLabel:
    """A landmark to draw at `batch`, its text centred at `text_batch` so that no two texts overlap.

    beyond   -1 or 1 where the landmark lies outside the axis and is named at that end, else 0
    row      0 is the row of texts nearest to the plot
    """

    name: str
    text: str
    batch: float
    text_batch: float
    row: int
    beyond: int


def batch_axis(curves: Iterable[CurveSeries], length: float) -> LogAxis:
    """One axis for all curves."""
    curves = list(curves)
    return LogAxis(low=min(c.batch[0] for c in curves), high=max(c.batch[-1] for c in curves), length=length)


def value_axis(values: Iterable[float], length: float, *, margin: float = 1.15, free_px: float = 0.0) -> LogAxis:
    """An axis that holds all values with a margin (a factor) at both ends, and `free_px` more at the low end."""
    values = list(values)
    low, high = min(values) / margin, max(values) * margin
    low /= math.exp(math.log(high / low) * free_px / (length - free_px))
    return LogAxis(low=low, high=high, length=length)


def powers_of_two(axis: LogAxis, *, spacing: float = 34.0) -> list[float]:
    """Powers of two inside the axis, every second or third one where they would stand closer than `spacing` pixels."""
    octaves = math.log2(axis.high / axis.low)
    step = max(1, math.ceil(spacing * octaves / axis.length))
    first = math.ceil(math.log2(axis.low) - 1e-9)
    return [2.0**e for e in range(first, math.floor(math.log2(axis.high) + 1e-9) + 1) if (e - first) % step == 0]


def decimal_ticks(axis: LogAxis, *, spacing: float = 18.0) -> list[float]:
    """1, 2, 5 per decade inside the axis; fewer where they would stand closer than `spacing` pixels."""
    decades = math.log10(axis.high / axis.low)
    per_decade = axis.length / decades if decades else axis.length
    steps = (1, 2, 5) if per_decade * math.log10(2) >= spacing else (1, 3) if per_decade * 0.47 >= spacing else (1,)
    exponents = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    ticks = [s * 10.0**e for e in exponents for s in steps if axis.low <= s * 10.0**e <= axis.high]
    if ticks:
        return ticks
    return [float(f"{math.sqrt(axis.low * axis.high):.2g}")]


def region_edges(curve: CurveSeries, axis: LogAxis) -> list[tuple[str, float, float]]:
    """The regions of the batch curve that show on `axis`, as (name, from, to), in order.

    Weight-bound up to B*/8, saturating to B*, diminishing to B_mem, over memory beyond; a B_mem below B* ends the
    regions there, and without a B* (nothing grows with the context) everything up to B_mem is weight-bound.
    """
    star, mem = curve.landmark("b_star"), curve.landmark("b_mem")
    top = math.inf if mem is None else mem
    bounds = (math.inf, math.inf, math.inf) if star is None else (star / 8, star, math.inf)
    ends = [min(b, top) for b in bounds] + [math.inf]
    found, start = [], 0.0
    for name, end in zip(REGIONS, ends, strict=True):
        low, high = max(start, axis.low), min(end, axis.high)
        if high > low:
            found.append((name, low, high))
        start = max(start, end)
    return found


def text_width(text: str, size: float) -> float:
    """Pixels that `text` takes at a font size, roughly."""
    return len(text) * size * _GLYPH


def landmark_labels(
    curve: CurveSeries, axis: LogAxis, *, size: float, names: Sequence[str] = tuple(LANDMARK_LABELS)
) -> list[PlacedLabel]:
    """The landmarks called `names`, with places for their texts above the plot."""
    wanted = sorted(
        (value, name) for name in names if (value := curve.landmark(name)) is not None and 0 < value < math.inf
    )  # fmt: skip
    texts, targets = [], []
    for value, name in wanted:
        text = f"{LANDMARK_LABELS[name]} {batch_text(value)}"
        texts.append(f"← {text}" if value < axis.low else f"{text} →" if value > axis.high else text)
        targets.append(axis.pixel(min(max(value, axis.low), axis.high)))
    widths = [text_width(t, size) + 12 for t in texts]
    num_rows = max(1, math.ceil(sum(widths) / axis.length))
    places = [0.0] * len(wanted)
    for row in range(num_rows):
        members = range(row, len(wanted), num_rows)
        centres = spread_apart([targets[i] for i in members], [widths[i] for i in members], axis.length)
        for i, centre in zip(members, centres, strict=True):
            places[i] = centre
    return [
        PlacedLabel(
            name=name,
            text=texts[i],
            batch=axis.value(targets[i]),
            text_batch=axis.value(places[i]),
            row=i % num_rows,
            beyond=-1 if value < axis.low else 1 if value > axis.high else 0,
        )
        for i, (value, name) in enumerate(wanted)
    ]


def spread_apart(targets: Sequence[float], widths: Sequence[float], length: float) -> list[float]:
    """Centres of texts of `widths`, as near to their ascending `targets` as they can be without overlap.

    The least-squares answer: neighbours that would collide are pooled around the mean of their targets, and
    all stay inside [0, length] where they fit.
    """
    offsets, at = [], 0.0
    for i, width in enumerate(widths):
        at += (widths[i - 1] + width) / 2 if i else 0.0
        offsets.append(at)
    pools: list[tuple[float, int]] = []  # (sum of wanted shifts, members), means ascending
    for target, offset in zip(targets, offsets, strict=True):
        pools.append((target - offset, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [(a + b, n + m)]
    shifts = [total / n for total, n in pools for _ in range(n)]
    if not shifts:
        return []
    low, high = widths[0] / 2, length - offsets[-1] - widths[-1] / 2
    return [max(low, min(high, s)) + o for s, o in zip(shifts, offsets, strict=True)]


def batch_text(value: float) -> str:
    return f"{value:.2g}" if value < 10 else format_count(round(value))


def spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` indices spread evenly over range(count), both ends included."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(i * (count - 1) / (wanted - 1)) for i in range(wanted)})


def unique(values: Iterable[str]) -> list[str]:
    """In order of first appearance."""
    return list(dict.fromkeys(values))


def best_time_unit(values: Iterable[float]) -> tuple[float, str]:
    """(seconds per unit, name) for an axis of `values` in seconds: ms unless all are much smaller or larger."""
    top = max(values)
    return (1.0, "s") if top >= 30 else (1e-3, "ms") if top >= 1e-3 else (1e-6, "µs")


def widest_gap(low: float, high: float, marks: Iterable[float]) -> tuple[float, float]:
    """The widest part of [low, high] that no mark divides, in pixels."""
    edges = [low, *sorted(m for m in marks if low < m < high), high]
    return max(pairwise(edges), key=lambda gap: gap[1] - gap[0])


def inside_memory(curve: CurveSeries) -> int:
    """How many of the curve's batches fit in memory; at least two."""
    top = curve.landmark("b_mem")
    return len(curve.batch) if top is None else max(2, sum(b <= top for b in curve.batch))
