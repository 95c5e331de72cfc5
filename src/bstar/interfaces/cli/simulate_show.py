"""What `bstar simulate` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bstar.interfaces.cli import output
from bstar.interfaces.cli.deploy import headline, range_text
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.calibration.intervals import Range
    from bstar.metrics.distribution import Distribution
    from bstar.sim.compare import Comparison
    from bstar.sim.replicate import Replications
    from bstar.sim.result import SimResult
    from bstar.specs.deployment import Deployment
    from bstar.traffic.load import Traffic

# Loading the compiled kernel from its cache takes less.
_COMPILED_S = 3.0
# Label and figure beside a picture.
_MARGINS = 21


def show_run(built: Deployment, load: Traffic, result: SimResult, several: Replications) -> None:
    from bstar.calibration.ranges import run_ranges

    steady, summary = result.steadiness, result.summary
    parts: list[Any] = [
        output.heading(built.model.name, headline(built)),
        output.line(f"  {load.name}: {summary.num_finished:,} of {summary.num_requests:,} requests{_refused(result)}, "
                    f"{load.mean_input_tokens:,.0f} in / {load.mean_output_tokens:,.0f} out, "
                    f"{format_seconds(summary.duration_s)} simulated in {format_seconds(result.timing.simulate_s)}"
                    + (f" after compiling for {format_seconds(result.timing.compile_s)}, once on this machine"
                       if result.timing.compile_s > _COMPILED_S else "")
                    + (f", {result.steps.replicas} engines" if result.steps.replicas > 1 else "")),
    ]
    if several.interrupted:
        whole = 0 if result.interrupted else len(several.results)
        so_far = f"{whole:,} of {several.asked:,} runs were whole" if whole else "what happened so far"
        parts.append(output.line(f"interrupted: {so_far}", style="yellow"))
    if steady.message is not None:
        grave = steady.overload_fraction or result.left.size
        parts.append(output.line(steady.message, style="bold red" if grave else "yellow"))
    ranges = run_ranges(built, result)
    rows = _latency_rows(result, several, ranges)
    columns = ("", "mean", "p50", "p95", "p99", "max", "± of mean", "80 % of means")[: 8 if ranges else 7]
    parts += [output.table(columns, [row[: len(columns)] for row in rows]),
              output.facts(_facts(result)), output.line("")]
    parts += _pictures(result)
    if ranges:
        parts.append(output.line("ranges: " + next(iter(ranges.values())).basis, style="dim"))
    parts += [output.line("note: " + n, style="dim") for n in result.remarks]
    output.show(*parts)


def _refused(result: SimResult) -> str:
    count = int(result.rejected.sum())
    return f" ({count:,} refused)" if count else ""


def _latency_rows(
    result: SimResult, several: Replications, ranges: Mapping[str, Range]
) -> list[tuple[str, ...]]:
    """A row for each latency; then the half width of a 95 % interval of the mean (what more requests would narrow),
    and where held-out measurements say that the mean lies (what the model cannot know better)."""
    summary, intervals = result.summary, result.steadiness.intervals
    if several.asked > 1:
        intervals = several.intervals
    rows = []
    for label, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s")):
        values: Distribution = getattr(summary, name)
        interval = intervals.get(f"{name}.mean")
        width = None if interval is None else interval.relative_half_width
        rows.append((label, *(format_seconds(v) for v in (values.mean, values.p50, values.p95, values.p99, values.max)),
                     "" if width is None else f"{width:.1%}", range_text(ranges.get(name))))
    return rows


def _facts(result: SimResult) -> list[tuple[str, ...]]:
    summary, steps = result.summary, result.steps
    facts: list[tuple[str, ...]] = [
        ("output", f"{summary.output_tokens_per_s:,.0f} tok/s",
         f"{summary.requests_per_s:,.3g} requests/s, {summary.total_tokens_per_s:,.0f} tok/s with prompts"),
    ]
    if summary.slo is not None and not summary.slo.is_empty:
        verdict = "met" if summary.meets_slo else "missed"
        facts.append(("SLO", f"{summary.slo_attainment_fraction:.2%}",
                      f"{verdict} ({summary.slo.attainment_fraction:.4g} asked); goodput "
                      f"{summary.goodput_requests_per_s:,.3g} requests/s"))
    if not len(steps) and summary.num_finished:
        return [*facts, ("in flight", f"{result.mean_in_flight:,.1f}", "mean; steps are not kept"),
                ("preemptions", f"{int(result.num_preemptions.sum()):,}", "")]
    facts += [
        ("in flight", f"{result.mean_in_flight:,.1f}", f"mean; {steps.num_steps:,} steps, "
         f"{format_seconds(steps.busy_s / max(steps.num_steps, 1))} each"),
        ("KV cache", output.percent(result.kv_usage, 1), f"mean in use, {steps.max_kv_usage():.1%} at most; "
         f"{int(result.num_preemptions.sum()):,} preemptions, {int(result.cached_tokens.sum()):,} prompt tokens found "
         "cached"),
        ("MBU, MFU", f"{output.percent(steps.mbu, 1)}, {output.percent(steps.mfu, 1)}",
         "of bandwidth and of peak FLOP/s, while busy"),
    ]
    return facts


def _pictures(result: SimResult) -> list[Any]:
    """What ran, waited and was held over time, a character an interval."""
    if not len(result.steps):
        return []
    series = result.series(min(72, max(output.console().width - _MARGINS, 10)))
    rows = (("running", series.running, _count), ("waiting", series.waiting, _count),
            ("KV in use", series.kv_usage, output.percent), ("tok/s", series.output_tokens_per_s, _count))
    span_s = result.span_s[1] - result.span_s[0]
    lines = [output.line(f"  {label:<10}{_sparkline(values)}  {form(float(values.max()))}", style="dim")
             for label, values, form in rows if values.max() > 0]
    if lines:
        lines.append(output.line(f"  {'':<10}a character is the mean of {format_seconds(span_s / len(series))}; "
                                 "on the right the highest of them", style="dim"))
    return lines


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _sparkline(values: Any) -> str:
    most = float(values.max())
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(8 * float(v) / most))] if most > 0 else " " for v in values)


def show_comparison(built: Deployment, load: Traffic, comparison: Comparison) -> None:
    from bstar.metrics.definitions import METRICS

    rows = []
    plain = all(r.slo is None or r.slo.is_empty for r in comparison.results)
    for name in comparison.rows:
        if plain and name in ("goodput_requests_per_s", "slo_attainment_fraction"):
            continue
        metric, _, part = name.partition(".")
        found = METRICS[metric]
        cells = []
        for i in range(len(comparison.names)):
            value = comparison.figure(i, name)
            cells.append(_figure(value, found.unit))
            if i:
                gain = comparison.gain(i, name)
                cells.append("" if gain is None else f"{gain:,.0f}×" if gain >= 100 else f"{gain:,.3g}×")
        rows.append((f"{found.label} {part}".strip(), *cells))
    columns = ["", comparison.names[0]]
    for name in comparison.names[1:]:
        columns += [name, "better"]
    parts: list[Any] = [
        output.heading(built.model.name, headline(built)),
        output.line(f"  {load.name}: the same {load.num_requests:,} requests, {load.mean_input_tokens:,.0f} in / "
                    f"{load.mean_output_tokens:,.0f} out"),
        output.table(columns, rows),
    ]
    if comparison.interrupted:
        parts.append(output.line(f"interrupted: without {', '.join(comparison.left_out)}, which did not serve them "
                                 "all", style="yellow"))
    if len(comparison.names) > 1:
        parts.append(output.line(f"better: times as good as {comparison.names[0]} (more per second, or less time)",
                                 style="dim"))
    for name, result in zip(comparison.names, comparison.results, strict=True):
        if result.steadiness.message is not None:
            parts.append(output.line(f"{name}: {result.steadiness.message}", style="yellow"))
    output.show(*parts)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return format_seconds(value)
    return f"{value:.2%}" if unit == "" else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
