"""Charts in files: the batch curve with its regions and landmarks, the step time, the roofline.

Drawn with Altair and rendered by vl-convert without a browser or a network; both come with the extra `charts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bstar.errors import ConfigError, SpecError
from bstar.files import write_whole
from bstar.interfaces.report.axes import LogAxis, batch_axis, best_time_unit, unique, value_axis
from bstar.interfaces.report.rendering import SUFFIXES, render
from bstar.interfaces.report.series import LANDMARK_LABELS, CurveSeries

MAX_SERIES, MAX_SUBJECTS, MAX_CONTEXTS = 40, 10, 6
SOFT_INK = "#555555"
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"


def curve_chart(curves: Sequence[CurveSeries], path: Path | str, *, title: str | None = None) -> None:
    """Draw `curves` into `path`, by its suffix: .png .svg .html .pdf or .json (the Vega-Lite specification).

    One curve: its amortized time with regions and landmarks, its step time and its roofline. Several: one panel for
    each model and device (rows) and context (columns), step times by context, and a roofline for each device.
    The file is written beside its place and renamed, so that it is whole or absent. Raises SpecError (too many
    curves, unknown suffix), ConfigError (the extra is not installed, the file cannot be written).
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"plot: {str(target)!r} ends in {suffix or 'nothing'!r}; use one of {', '.join(SUFFIXES)}")
    write_whole(target, render(curve_spec(curves, title=title), suffix), what="plot")


def curve_spec(curves: Sequence[CurveSeries], *, title: str | None = None) -> dict[str, Any]:
    """The Vega-Lite specification of `curve_chart`."""
    _check(curves)
    require_extra()
    body = _single(curves[0]) if len(curves) == 1 else _grid(curves)
    return _document(body, title or _heading(curves), curves)


def _check(curves: Sequence[CurveSeries]) -> None:
    if not curves:
        raise SpecError("plot: there are no curves to draw")
    if len(curves) > MAX_SERIES:
        raise SpecError(f"plot: {len(curves)} curves do not fit in one chart; draw at most {MAX_SERIES}")
    if len({_subject(c) for c in curves}) > MAX_SUBJECTS:
        raise SpecError(f"plot: more than {MAX_SUBJECTS} models and GPUs do not fit in one chart; draw fewer")
    if len({c.context_tokens for c in curves}) > MAX_CONTEXTS:
        raise SpecError(f"plot: more than {MAX_CONTEXTS} contexts do not fit in one chart; draw fewer")


def require_extra() -> None:
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"plot: {error.name} is not installed; pip install 'bstar[charts]'") from None


def _subject(curve: CurveSeries) -> str:
    return f"{curve.model} · {curve.device}"


def _short_subjects(curves: Sequence[CurveSeries]) -> tuple[list[str], str]:
    """What tells the curves apart besides their context, and what that is called."""
    models, devices = {c.model for c in curves}, {c.device for c in curves}
    if len(devices) == 1:
        return [c.model for c in curves], "model"
    if len(models) == 1:
        return [c.device for c in curves], "GPU"
    return [_subject(c) for c in curves], "model and GPU"


def _single(curve: CurveSeries) -> dict[str, Any]:
    from bstar.interfaces.report.panels import (
        NAMES_HEIGHT,
        amortized_panel,
        label_rows,
        labels_height,
        step_panel,
    )
    from bstar.interfaces.report.roofline import roofline_axes, roofline_panel

    x = batch_axis([curve], 560)
    amortized = (*curve.amortized_s(curve.step_expected_s), *curve.amortized_s(curve.step_floor_s))
    per_token, per_step = best_time_unit(amortized), best_time_unit(curve.step_expected_s)
    subjects = [curve.model]
    first = amortized_panel(
        curve,
        x=x,
        y=value_axis([a / per_token[0] for a in amortized], 270, free_px=NAMES_HEIGHT),
        unit=per_token,
        title="Amortized time per output token: step time / batch",
        y_title=f"time per output token ({per_token[1]})",
    )
    second = step_panel(
        [curve],
        subjects,
        x=x,
        y=_step_axis([curve], per_step[0], 200),
        unit=per_step,
        domain=subjects,
        colour_title="model",
        title="Step time: the TPOT that each user feels",
        y_title=f"step time ({per_step[1]})",
    )
    columns: list[Any] = [{"vconcat": [first, second], "spacing": 40}]
    if curve.has_roofline:
        roof_x, roof_y = roofline_axes([curve], width=470, height=530)
        columns.append(
            roofline_panel(
                [curve],
                subjects,
                x=roof_x,
                y=roof_y,
                domain=subjects,
                colour_title="model",
                title="Roofline: points are batch sizes that fit in memory",
                title_above=labels_height(label_rows([curve], x, tuple(LANDMARK_LABELS))),
            )
        )
    return {"hconcat": columns, "spacing": 45}


def _grid(curves: Sequence[CurveSeries]) -> dict[str, Any]:
    """Rows of panels: one row for each model and GPU, one column for each context; then steps and roofs."""
    from bstar.interfaces.report.panels import NAMES_HEIGHT, amortized_panel, label_rows, step_panel

    subjects, kind = _short_subjects(curves)
    domain, contexts = unique(subjects), sorted({c.context_tokens for c in curves})
    ordered = sorted(
        zip(curves, subjects, strict=True), key=lambda pair: (domain.index(pair[1]), pair[0].context_tokens)
    )
    across = min(4, len(contexts) if len(contexts) > 1 else len(domain))
    x = batch_axis(curves, {1: 560.0, 2: 440.0, 3: 350.0}.get(across, 300.0))
    amortized = [v for c in curves for s in (c.step_expected_s, c.step_floor_s) for v in c.amortized_s(s)]
    unit, names = best_time_unit(amortized), ("b_star", "b_gemm", "b_compute", "b_mem", "b_slo")
    y = value_axis([v / unit[0] for v in amortized], 200, free_px=NAMES_HEIGHT)
    rows = label_rows(curves, x, names)
    batch_panels = [
        amortized_panel(
            c,
            x=x,
            y=y,
            unit=unit,
            names=names,
            label_rows=rows,
            y_title=f"per output token ({unit[1]})",
            title=f"{s} · {c.context_tokens:,} tokens",
        )
        for c, s in ordered
    ]
    step_unit = best_time_unit(v for c in curves for v in c.step_expected_s)
    step_y = _step_axis(curves, step_unit[0], 200)
    other_panels: list[Any] = []
    for context in contexts:
        here = [(c, s) for c, s in ordered if c.context_tokens == context]
        other_panels.append(
            step_panel(
                [c for c, _ in here],
                [s for _, s in here],
                x=x,
                y=step_y,
                unit=step_unit,
                domain=domain,
                colour_title=kind,
                title=f"Step time (TPOT) · {context:,} tokens",
                y_title=f"step time ({step_unit[1]})",
            )
        )
    other_panels += _rooflines(ordered, domain, kind, width=x.length)
    return {"spacing": 40, "vconcat": [
        {"concat": panels, "columns": across, "spacing": 26} for panels in (batch_panels, other_panels)
    ]}  # fmt: skip


def _step_axis(curves: Sequence[CurveSeries], unit_s: float, length: float) -> LogAxis:
    steps = [s / unit_s for c in curves for s in (*c.step_floor_s, *c.step_expected_s)]
    limits = [c.tpot_slo_s / unit_s for c in curves if c.tpot_slo_s is not None]
    # A limit far off the curves would flatten them.
    steps += [v for v in limits if min(steps) / 4 < v < 4 * max(steps)]
    return value_axis(steps, length)


def _rooflines(
    ordered: Sequence[tuple[CurveSeries, str]], domain: Sequence[str], kind: str, *, width: float
) -> list[Any]:
    """One panel for each roof and context, all with the same axes."""
    from bstar.interfaces.report.roofline import roofline_axes, roofline_panel

    by_roof: dict[tuple[Any, ...], list[tuple[CurveSeries, str]]] = {}
    for curve, subject in ordered:
        if curve.has_roofline:
            roof = (curve.peak_flops_per_s, curve.bandwidth_bytes_per_s, curve.compute_dtype)
            by_roof.setdefault((*roof, curve.context_tokens), []).append((curve, subject))
    if not by_roof:
        return []
    x, y = roofline_axes([c for members in by_roof.values() for c, _ in members], width=width, height=260)
    return [
        roofline_panel(
            [c for c, _ in members],
            [s for _, s in members],
            x=x,
            y=y,
            domain=domain,
            colour_title=kind,
            title=f"Roofline · {' · '.join(unique(_gpu(c.device) for c, _ in members))} · {key[-1]:,} tokens",
        )
        for key, members in by_roof.items()
    ]


def _gpu(device: str) -> str:
    """ "4 × H100 SXM" → "H100 SXM": a roof is that of one GPU."""
    return device.split(" × ", 1)[-1]


def _heading(curves: Sequence[CurveSeries]) -> str:
    if len(curves) == 1:
        return f"{_subject(curves[0])} · {curves[0].context_tokens:,} tokens of context"
    models, devices = unique(c.model for c in curves), unique(c.device for c in curves)
    contexts = ", ".join(f"{c:,}" for c in sorted({c.context_tokens for c in curves}))
    return f"{' · '.join(models)} on {' · '.join(devices)}, {contexts} tokens of context"


def _document(body: dict[str, Any], heading: str, curves: Sequence[CurveSeries]) -> dict[str, Any]:
    """The whole specification: heading, styles, the panels, and their data in one place."""
    import altair as alt

    notes = unique(part for c in curves if c.note for part in c.note.split(" · "))
    if any(c.recommended is not None for c in curves):
        notes.append("diamond: recommended max_num_seqs")
    title = {
        "text": heading,
        "subtitle": " · ".join(notes),
        "anchor": "start",
        "fontSize": 17,
        "subtitleFontSize": 12,
        "subtitleColor": SOFT_INK,
        "subtitleFont": FONT,
        "color": "#111111",
        "offset": 18,
        "limit": 1400,
    }
    axis = {
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelColor": "#333333",
        "titleColor": "#333333",
        "domainColor": "#888888",
        "tickColor": "#888888",
        "gridColor": "#e3e3e3",
    }
    config = {
        "font": FONT,
        "axis": axis,
        "view": {"stroke": "#bbbbbb"},
        "legend": {"labelFontSize": 12, "titleFontSize": 12, "titleColor": "#333333"},
    }
    datasets: dict[str, Any] = {}
    _hoist(body, datasets)
    return {
        "$schema": alt.SCHEMA_URL,
        "title": title,
        "background": "white",
        "padding": 16,
        "config": config,
        "vconcat": [body],
        "datasets": datasets,
    }


def _hoist(node: dict[str, Any], datasets: dict[str, Any]) -> None:
    """Move the data of every panel to the top of the document."""
    datasets.update(node.pop("datasets", {}))
    for key in ("$schema", "config"):
        node.pop(key, None)
    for key in ("vconcat", "hconcat", "concat"):
        for child in node.get(key, ()):
            _hoist(child, datasets)
