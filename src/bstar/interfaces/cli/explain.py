"""`bstar explain`: the physics sheet, every number with its formula and what was put into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bstar.interfaces.cli import output
from bstar.interfaces.cli.deploy import (
    check_context,
    deploy_options,
    describe,
    headline,
    range_text,
    take_deployment,
)
from bstar.interfaces.cli.load import length_options, prefix_options, slo_options, take_slo, take_workload
from bstar.interfaces.cli.params import POSITIVE, apply, complete_models, json_option, units_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from bstar.planning.sheet import Sheet

_EPILOG = """\b
Examples:
  bstar explain llama-3.1-8b --gpu h100-sxm-80gb --context 8192
  bstar explain llama-3.1-70b --gpu h100 --tp 4 --input 2000 --output lognormal:mean=300,cv=1 --slo tpot=40ms
  bstar explain deepseek-r1 --gpu h200 --tp 8 --context 4096 --batch 64 --formulas
  bstar explain --gpu a100 --context 2048 --from-command "vllm serve Qwen/Qwen3-8B --max-num-seqs 512"
Exit code 1: no max_num_seqs fits the memory and the SLO (the sheet says which).
"""

_LANDMARKS = (
    ("b_star", "B*", "weights and KV cache cost the same: amortized time is twice its floor"),
    ("b_gemm", "B_gemm", "the weight GEMMs turn compute bound: nothing more is shared above it"),
    ("b_compute", "B_c", "the whole step's intensity crosses the ridge"),
    ("b_mem", "B_mem", "the KV space is full: beyond it requests wait or are preempted"),
    ("b_mem_full", "B_mem full", "… with every request at its full length"),
    ("b_slo", "B_slo", "largest batch inside the TPOT limit, prefill included"),
    ("b_tok", "B_tok", "what max_num_seqs and the token budget allow"),
)
_NO_PREFILL = "largest batch whose step is inside the TPOT limit (a bare context has no prefill)"


@click.command("explain", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_models)
@apply(
    deploy_options,
    click.option("--context", type=POSITIVE, metavar="N", help="Tokens of context that each sequence holds."),
    length_options,
    prefix_options,
    click.option("--batch", type=POSITIVE, metavar="B",
                 help="Sequences of the step that the times are for (default: the recommendation)."),
    slo_options,
    click.option("--formulas/--no-formulas", default=None, help="Show or hide the formulas (shown by default)."),
    units_option,
    json_option,
)
@click.pass_context
def explain(ctx: click.Context, /, model_name: str | None, context: int | None, batch: int | None,
            formulas: bool | None, units: str, as_json: bool, **options: Any) -> None:
    """The physics of a deployment: landmarks, step time, regions, and which max_num_seqs to set and why.

    At one --context, or under --input and --output (then B* uses the mean context that a decode step sees).
    """
    from bstar.errors import SpecError
    from bstar.planning.sheet import explain as explained

    slo = take_slo(options)
    workload = take_workload(options, required=False)
    if workload is None and context is None:
        raise SpecError("context: none given; say --context N, or --input DIST --output DIST")
    if workload is not None and context is not None:
        raise SpecError("--context: give either --context or --input and --output, not both")
    built = take_deployment(model_name, options)
    if context is not None:
        check_context(built, context)
    load = workload if workload is not None else float(context or 0)
    sheet = explained(built, load, batch=batch, slo=slo)
    if as_json:
        output.print_json(sheet.to_dict() | {"deployment": describe(built)})
    else:
        _show(sheet, units, formulas=formulas is not False, with_prefill=workload is not None)
    ctx.exit(0 if sheet.recommended_max_num_seqs.value is not None else 1)


def _show(sheet: Sheet, units: str, *, formulas: bool, with_prefill: bool) -> None:
    marks, built = sheet.landmarks, sheet.deployment
    given = [
        ("mean context", f"{marks.context_tokens:,.0f} tokens", "that a decode step sees"),
        ("weights streamed", output.size(marks.weight_bytes, units), "a step, per rank; at B*"),
        ("KV read", output.size(marks.kv_bytes_per_sequence, units), "a sequence and step, per rank"),
        ("KV space", output.size(marks.kv_pool_bytes, units), "per GPU (bstar memory shows the terms)"),
        ("ridge point", f"{marks.ridge_point:,.1f}", f"FLOP/byte: {format_rate(marks.peak_flops_per_s, 'FLOP/s')} "
         f"{marks.compute_dtype} over {format_rate(marks.bandwidth_bytes_per_s, 'B/s')} (datasheet)"),
    ]
    values: dict[str, float | None] = {name: getattr(marks, name, None) for name, _, _ in _LANDMARKS}
    values["b_slo"] = sheet.b_slo
    landmarks = [(label, _batch(values[name]), _NO_PREFILL if name == "b_slo" and not with_prefill else note)
                 for name, label, note in _LANDMARKS
                 if not (name == "b_mem_full" and values[name] == values["b_mem"])
                 and not (name == "b_slo" and values[name] is None)]
    times = [
        ("step time", _pair(sheet.step_time_s), "TPOT of each sequence, prefill apart"),
        *_range(sheet),
        ("amortized", _pair(sheet.time_per_output_token_amortized_s), "step time / batch = 1 / output throughput"),
        ("throughput", f"{sheet.batch / sheet.step_time_s.expected:,.0f} tok/s",
         f"{1 / sheet.step_time_s.expected:,.1f} tok/s for each user; "
         f"floor {sheet.batch / sheet.step_time_s.floor:,.0f} tok/s"),
        ("intensity", f"{sheet.arithmetic_intensity:,.1f}",
         f"FLOP/byte; at most {format_count(marks.arithmetic_intensity_limit)} at any batch, attention's FLOPs "
         "included"),
        ("bound by", sheet.bound_by.replace("_", " "), _shares(sheet.shares)),
    ]
    recommended = [("max_num_seqs", _setting(sheet.recommended_max_num_seqs), sheet.recommended_max_num_seqs.reason)]
    budget = sheet.recommended_max_num_batched_tokens
    recommended.append(("max_num_batched_tokens", _setting(budget), budget.reason))
    region = f", {sheet.region.replace('_', ' ')} region" if sheet.region else ""
    parts = [
        output.heading(built.model.name, headline(built)), output.facts(given), output.line(""),
        output.heading("landmarks", "sequences in one decode step"), output.facts(landmarks), _ruler(sheet),
        output.line(""),
        output.heading(f"one step at batch {sheet.batch:,.0f}", f"floor → expected ({sheet.provenance}){region}"),
        output.facts(times), output.line(""),
        output.heading("set"), output.facts(recommended),
    ]
    if formulas:
        parts += [output.line(""), output.heading("by hand"), *_formulas(sheet)]
    parts += [output.line("note: " + n, style="yellow") for n in sheet.notes]
    output.show(*parts)


def _setting(recommendation: Any) -> str:
    value = recommendation.value
    return "–" if value is None else f"{value:,}"


def _batch(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _range(sheet: Sheet) -> list[tuple[str, str, str]]:
    found = sheet.step_time_s.range
    return [] if found is None else [("80 % range", range_text(found), found.basis)]


def _pair(pair: Any) -> str:
    return f"{format_seconds(pair.floor)} → {format_seconds(pair.expected)}"


def _shares(shares: dict[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return " · ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in ordered if share >= 0.005)


def _ruler(sheet: Sheet) -> Any:
    """The batch regions on one line: "1 ─ weight bound ─ 29 ─ saturating ─ 238 …"."""
    parts: list[str] = []
    for name, start, stop in sheet.regions:
        if stop is not None and stop <= 1:
            continue  # no batch is in it
        parts.append(f"{_batch(max(start, 1))} ┄ {name.replace('_', ' ')} ┄")
        if stop is None:
            parts.append("∞")
    return output.line("  regions      " + " ".join(parts), style="dim")


def _formulas(sheet: Sheet) -> list[Any]:
    out: list[Any] = []
    for row in sheet.formulas:
        title = row.formula if "=" in row.formula.split("(")[0] else f"{row.name} = {row.formula}"
        out.append(output.line(f"  {title}"))
        out.append(output.line(f"      = {row.substituted} = {row.result}", style="dim"))
    return out
