"""`bstar curve`: step time and throughput against batch, for several models, GPUs and contexts."""

from __future__ import annotations

from math import floor, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.interfaces.cli import output
from bstar.interfaces.cli.deploy import (
    check_context,
    deploy_options,
    describe,
    headline,
    note_deployment,
    note_profile,
    take_keywords,
)
from bstar.interfaces.cli.load import slo_options, take_slo
from bstar.interfaces.cli.params import COUNTS, apply, complete_models, json_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.interfaces.report.series import CurveSeries
    from bstar.specs.deployment import Deployment

_EPILOG = """\b
Examples:
  bstar curve llama-3.1-8b --gpu h100-sxm-80gb --context 8192
  bstar curve llama-2-7b llama-2-13b llama-2-70b --gpu a100-sxm-80gb --tp 4 --context 512,2048,8192 --plot out.svg
  bstar curve qwen3-32b --gpu h100,h200,b200 --tp 2 --context 4096 --slo tpot=30ms --json
"""

_NAMES = ("b_star", "b_gemm", "b_compute", "b_mem", "b_slo", "b_tok")


@click.command("curve", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_names", metavar="[MODEL…]", nargs=-1, shell_complete=complete_models)
@apply(
    deploy_options,
    click.option("--context", type=COUNTS, metavar="N[,N…]", required=True, help="Tokens of context, one or several."),
    click.option("--batch", "batches", type=COUNTS, metavar="B[,B…]",
                 help="Batches of the table (default: powers of two and the landmarks)."),
    slo_options,
    click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
                 help="Draw it: .png .svg .html .pdf, or .json for the chart's specification."),
    json_option,
)
def curve(model_names: tuple[str, ...], context: tuple[int, ...], batches: tuple[int, ...] | None, plot: Path | None,
          as_json: bool, **options: Any) -> None:
    """The batch curve with its regions: what each doubling of the batch costs a user and gives the system.

    Several models, several GPUs (--gpu G,G) and several contexts are set side by side.
    """
    slo = take_slo(options)
    deployments = _deployments(model_names, options, context)
    series = [_series(d, c, slo, batches) for d in deployments for c in context]
    if plot is not None:
        from bstar.interfaces.report.charts import curve_chart

        curve_chart([s for s, _ in series], plot)
        output.warn(f"drawn: {plot}")
    if as_json:
        output.print_json({"curves": [_as_dict(s, extra) for s, extra in series]})
    else:
        _show(series)


def _deployments(model_names: tuple[str, ...], options: dict[str, Any], context: tuple[int, ...]) -> list[Deployment]:
    from bstar.errors import SpecError
    from bstar.interfaces.deployments import deployment

    keywords = take_keywords(None, options)
    profile = keywords.pop("profile", None)
    models = list(model_names) or [m for m in (keywords.get("model"),) if m]
    gpus = [g for g in str(keywords.get("gpu") or "").split(",") if g.strip()]
    for found, key, what in ((models, "model", "MODEL"), (gpus, "gpu", "--gpu G[,G…]")):
        if not found:
            raise SpecError(f"{key}: none given; say it with {what}")
    built: list[Deployment] = []
    for name in models:
        for gpu in gpus:
            built.append(deployment(**(keywords | {"model": name, "gpu": gpu})))
            note_deployment(built[-1], name)
            check_context(built[-1], max(context))
    return built if profile is None else _calibrated(built, profile)


def _calibrated(built: list[Deployment], profile: str) -> list[Deployment]:
    """The deployments that the profile is of with it; the others as they are, with a note."""
    from bstar.calibration.profile import calibrated, holds_for, read_profile

    found = read_profile(profile)
    mine = [holds_for(found, one) for one in built]
    if not any(mine):
        return [calibrated(one, found) for one in built]  # says why not
    out = []
    for one, is_mine in zip(built, mine, strict=True):
        if not is_mine:
            output.warn(f"profile {found.name} is not of {one.model.name} on {one.device.id}: that curve is as fitted")
        else:
            note_profile(one, profile)
        out.append(calibrated(one, found) if is_mine else one)
    return out


def _series(built: Deployment, context: int, slo: Any, batches: tuple[int, ...] | None
            ) -> tuple[CurveSeries, dict[str, Any]]:
    """The curve of one deployment at one context, and what the chart does not need."""
    import numpy as np

    from bstar.interfaces.report.series import CurveSeries
    from bstar.latency import decode_curve
    from bstar.physics.landmarks import arithmetic_intensity
    from bstar.physics.operators import compiled_step
    from bstar.planning.sheet import explain

    sheet = explain(built, context, slo=slo)
    marks = sheet.landmarks
    landmarks: dict[str, float | None] = {name: getattr(marks, name, None) for name in _NAMES} | {"b_slo": sheet.b_slo}
    grid = np.array(batches if batches is not None else _grid(landmarks), dtype=float)
    found = decode_curve(built, grid, float(context))
    per_rank = grid / marks.sequences_per_rank
    compiled = compiled_step(built.model, built.parallel, built.kv_format, "all")
    weights = compiled.touched_weights(per_rank * built.parallel.attention_dp).sum(axis=0)
    moved = weights + per_rank * marks.kv_bytes_per_sequence
    flops = moved * arithmetic_intensity(per_rank, marks.parameters, weights, marks.kv_bytes_per_sequence,
                                         marks.attention_flops_per_sequence)
    n = built.parallel.num_devices
    device = built.device.name if n == 1 else f"{n} × {built.device.name}"
    tpot = slo.tpot_s if slo is not None else None
    series = CurveSeries(
        label=f"{built.model.name} · {device} · {context:,} tokens", model=built.model.name, device=device,
        context_tokens=context, batch=tuple(map(float, grid)), step_floor_s=tuple(map(float, found.floor_s)),
        step_expected_s=tuple(map(float, found.expected_s)), landmarks=landmarks,
        step_flops=tuple(map(float, flops)), step_bytes=tuple(map(float, moved)),
        peak_flops_per_s=marks.peak_flops_per_s, bandwidth_bytes_per_s=marks.bandwidth_bytes_per_s,
        compute_dtype=marks.compute_dtype, recommended=sheet.recommended_max_num_seqs.value, tpot_slo_s=tpot,
        note=headline(built))
    extra = {"bound_by": list(found.bound_by), "region": [_region(b, landmarks) for b in grid],
             "deployment": describe(built), "regions": [
                 {"name": name, "from": start, "to": stop} for name, start, stop in sheet.regions],
             "recommended_max_num_seqs": sheet.recommended_max_num_seqs.to_dict()}
    return series, extra


def _region(batch: float, landmarks: dict[str, float | None]) -> str:
    from math import inf

    from bstar.physics.landmarks import region

    b_star, b_mem = landmarks["b_star"], landmarks["b_mem"]
    return str(region(float(batch), inf if b_star is None else b_star, inf if b_mem is None else b_mem))


def _grid(landmarks: dict[str, float | None]) -> list[float]:
    """Powers of two to beyond the last wall, and the landmarks between them as whole batches."""
    marks = [v for v in landmarks.values() if v is not None and v >= 1]
    walls = [v for name in ("b_star", "b_mem", "b_slo") if (v := landmarks.get(name)) is not None and v >= 1]
    top = min(max([2 * v for v in walls] or [1024.0]), 65536.0)
    found = {1.0}
    power = 2.0
    while power <= max(top, 8):
        found.add(power)
        power *= 2
    found |= {float(floor(v)) for v in marks if floor(v) <= top}
    return sorted(found)


def _as_dict(series: CurveSeries, extra: dict[str, Any]) -> dict[str, Any]:
    expected, floor = series.step_expected_s, series.step_floor_s
    return {
        "label": series.label, "model": series.model, "gpu": extra["deployment"]["gpu"],
        "num_gpus": extra["deployment"]["num_gpus"], "context_tokens": series.context_tokens,
        "batch": list(series.batch),
        "step_time_s": {"floor": list(floor), "expected": list(expected)},
        "time_per_output_token_amortized_s": {
            "floor": list(series.amortized_s(floor)), "expected": list(series.amortized_s(expected))},
        "output_tokens_per_s": [b / s for b, s in zip(series.batch, expected, strict=True)],
        "arithmetic_intensity": [f / b for f, b in zip(series.step_flops, series.step_bytes, strict=True)],
        "ridge_point": series.ridge_point, "landmarks": dict(series.landmarks), "region": extra["region"],
        "regions": extra["regions"], "bound_by": extra["bound_by"],
        "recommended_max_num_seqs": extra["recommended_max_num_seqs"], "deployment": extra["deployment"],
    }  # fmt: skip


def _compare(series: list[tuple[CurveSeries, dict[str, Any]]]) -> None:
    """Several curves in one table, a row a curve: the walls, and the step at the recommended batch."""
    import numpy as np

    rows = []
    for s, extra in series:
        setting = extra["recommended_max_num_seqs"]
        batch = float(setting["value"] or 1) * extra["deployment"]["attention_dp"]
        floor_s, expected_s = (float(np.interp(batch, s.batch, t)) for t in (s.step_floor_s, s.step_expected_s))
        marks = [_whole(s.landmarks.get(name)) for name in ("b_star", "b_gemm", "b_compute", "b_mem", "b_slo")]
        gpus = f"{extra['deployment']['num_gpus']} × {extra['deployment']['gpu']}"
        rows.append((s.model, gpus, f"{s.context_tokens:,}", *marks,
                     _whole(setting["value"]), format_seconds(floor_s), format_seconds(expected_s),
                     f"{batch / expected_s:,.0f}"))
    columns = ("model", "GPUs", "context", "B*", "B_gemm", "B_c", "B_mem", "B_slo", "set", "floor", "expected", "tok/s")
    output.show(
        output.table(columns, rows, left=(0, 1), fold=(0, 1), spare=[columns.index("B_c"), columns.index("floor")]),
        output.line("set: recommended max_num_seqs; floor, expected and tok/s: one decode step at that batch. "
                    "One model, GPU and context at a time shows the whole curve; --plot draws all.", style="dim"),
        *[output.line(f"{s.model}, {s.device}, {s.context_tokens:,} tokens: {setting['reason']}", style="yellow")
          for s, extra in series if (setting := extra["recommended_max_num_seqs"])["value"] is None])


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{floor(value):,}"


def _show(series: list[tuple[CurveSeries, dict[str, Any]]]) -> None:
    if len(series) > 2:
        _compare(series)
        return
    parts: list[Any] = []
    for index, (s, extra) in enumerate(series):
        marks = " · ".join(
            f"{label} {s.landmarks[name]:,.0f}" for name, label in (
                ("b_star", "B*"), ("b_gemm", "B_gemm"), ("b_compute", "B_c"), ("b_mem", "B_mem"), ("b_slo", "B_slo"))
            if s.landmarks.get(name) is not None)
        rows: list[tuple[str, ...]] = []
        best = max(b / t for b, t in zip(s.batch, s.step_expected_s, strict=True))
        for i, b in enumerate(s.batch):
            rate = b / s.step_expected_s[i]
            gain = _gain(s, i)
            rows.append((f"{b:,.0f}", format_seconds(s.step_floor_s[i]), format_seconds(s.step_expected_s[i]),
                         format_seconds(s.step_expected_s[i] / b), f"{rate:,.0f}", gain,
                         "▇" * max(1, round(16 * rate / best)), extra["region"][i].replace("_", " "), _marks_at(s, b)))
        if index:
            parts.append(output.line(""))
        parts += [
            output.heading(f"{s.model} · {s.context_tokens:,} tokens", s.note), output.line(f"  {marks}", style="dim"),
            output.table(("batch", "floor", "expected", "amortized", "tok/s", "per ×2", "", "region", ""), rows,
                         left=(6, 7, 8), spare=(6,))]
    parts.append(output.line(
        "floor and expected: one decode step, what each user feels (TPOT); amortized: step / batch = 1 / throughput; "
        "per ×2: throughput gained by a doubling",
        style="dim"))
    output.show(*parts)


def _gain(series: CurveSeries, index: int) -> str:
    """Throughput gained per doubling of the batch since the row above."""
    if index == 0:
        return ""
    batch, step = series.batch, series.step_expected_s
    ratio = (batch[index] / step[index]) / (batch[index - 1] / step[index - 1])
    return f"{ratio ** (log(2) / log(batch[index] / batch[index - 1])) - 1:+.0%}"


def _marks_at(series: CurveSeries, batch: float) -> str:
    from bstar.interfaces.report.series import LANDMARK_LABELS

    labels = LANDMARK_LABELS
    here = [labels[n] for n, v in series.landmarks.items() if v is not None and floor(v) == round(batch)]
    if series.recommended is not None and series.recommended == round(batch):
        here.append("recommended")
    return "← " + ", ".join(here) if here else ""
