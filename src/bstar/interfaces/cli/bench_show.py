"""What `bstar bench` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bstar.interfaces.cli import output
from bstar.measure.verdict import omits
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.measure.repeats import Repeated
    from bstar.measure.result import BenchRun
    from bstar.measure.run import Prepared

_LOADED = ", from the first request to the last one sent"
LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))


def show_run(server: Prepared, run: BenchRun, place: str | None) -> None:
    """A run as tables."""
    summary = run.summary
    prompt, answer = run.mean_tokens
    parts: list[Any] = [_heading(server), output.line(
        f"  {run.traffic.name}: {summary.num_finished:,} of {run.traffic.num_requests:,} requests in "
        f"{format_seconds(summary.duration_s)}, {prompt:,.0f} in / {answer:,.0f} out"
        + (f"; {len(run.table) - len(run.measured):,} outside the window" if len(run.measured) < len(run.table) else "")
    )]  # fmt: skip
    parts += [output.line(f"no result of the server: {reason}", style="bold red") for reason in run.verdict.reasons]
    parts += [output.table(("", "mean", "p50", "p95", "p99", "max", "± of mean"), latency_rows(run)),
              output.facts(_facts(run)), output.line("")]
    parts += [output.line("note: " + note, style="dim") for note in run.verdict.notes]
    if place is not None:
        parts.append(output.line(f"written to {place}", style="dim"))
    output.show(*parts)


def show_repeated(server: Prepared, found: Repeated, place: str | None) -> None:
    """Several runs: the figures with their intervals."""
    rows = []
    for name, facts in found.to_dict()["figures"].items():
        mean, half = facts["mean"], facts["half_width"]
        if mean is None:
            continue
        shown = format_seconds if "_s" in name and "per_s" not in name else output.number
        rows.append((name, shown(mean), "–" if half is None else f"± {half / mean:.1%}" if mean else "–",
                     shown(min(v for v in facts["values"] if v is not None)),
                     shown(max(v for v in facts["values"] if v is not None))))
    parts: list[Any] = [_heading(server), output.line(f"  {len(found.runs)} runs of {found.runs[0].traffic.name}"),
                        output.table(("", "mean", "95 %", "least", "most"), rows)]
    if found.precision is not None:
        said = "reached" if found.reached else "not reached"
        parts.append(output.line(f"{found.precision.figure} within {found.precision.relative:.1%}: {said}",
                                 style="" if found.reached else "yellow"))
    parts += [output.line(f"no result of the server: {reason}", style="bold red")
              for reason in found.reasons]
    parts += [output.line("note: " + note, style="dim")
              for note in dict.fromkeys(n for run in found.runs for n in run.verdict.notes)]
    if place is not None:
        parts.append(output.line(f"written to {place}", style="dim"))
    output.show(*parts)


def latency_rows(run: BenchRun) -> list[tuple[str, ...]]:
    """A row for each latency, and one from the intended moment where it differs."""
    rows = []
    for label, name in LATENCIES:
        values = getattr(run.summary, name)
        width = None if name == "itl_s" else run.interval(name).relative_half_width
        rows.append((label, *_cells(values), "" if width is None else f"{width:.1%}"))
    if omits(run):
        rows.insert(1, ("TTFT from intended", *_cells(run.from_intended.ttft_s), ""))
    return rows


def _cells(values: Any) -> tuple[str, ...]:
    return tuple(format_seconds(v) for v in (values.mean, values.p50, values.p95, values.p99, values.max))


def _facts(run: BenchRun) -> list[tuple[str, ...]]:
    summary, health = run.summary, run.health
    windowed, steady = len(run.measured) < len(run.table), run.steady["output_tokens_per_s"]
    facts: list[tuple[str, ...]] = [
        ("output", f"{summary.output_tokens_per_s:,.0f} tok/s",
         f"{summary.requests_per_s:,.3g} requests/s, {summary.total_tokens_per_s:,.0f} tok/s with prompts"
         + (_LOADED if windowed and steady is not None else ""))]
    whole = summary.output_tokens_per_s
    if not windowed and steady is not None and whole and abs(steady / whole - 1.0) > 0.02:
        facts.append(("while loaded", f"{steady:,.0f} tok/s", f"{run.loaded.requests_per_s:,.3g} requests/s{_LOADED}"))
    if summary.slo is not None and not summary.slo.is_empty:
        facts.append(("SLO", f"{summary.slo_attainment_fraction:.2%}",
                      f"{'met' if summary.meets_slo else 'missed'} ({summary.slo.attainment_fraction:.4g} asked); "
                      f"goodput {summary.goodput_requests_per_s:,.3g} requests/s"))
    failed = len(run.table) - int(run.table.succeeded.sum())
    facts.append(("failed", f"{failed:,}", f"of {len(run.table):,} sent"))
    if run.prefix_hit_fraction is not None:
        facts.append(("prefix cache", f"{run.prefix_hit_fraction:.1%}",
                      f"of prompt tokens found; the load shares {run.expected_hit_fraction:.1%}"))
    facts += _wall(run)
    delay, lag, cpu = health.dispatch_delay_s.p99, health.loop_lag_s.p99, health.cpu_fraction
    facts.append(("client", "ok" if not health.client_limited else "limited",
                  f"sent {format_seconds(delay)} late, loop {format_seconds(lag)} late (p99), "
                  f"{'–' if cpu is None else f'{cpu:.0%}'} of a core"))
    return facts


def _wall(run: BenchRun) -> list[tuple[str, ...]]:
    """The wall that the server stood at, where its own counters tell it."""
    from bstar.tuning.recorded import evidence_of_run
    from bstar.tuning.walls import find_wall

    seen = evidence_of_run(run)
    found = None if seen is None else find_wall(seen)
    if found is None or found.wall in ("unknown", "client_limited"):
        return []
    return [("wall", found.title, f"{found.because[0]} (more: bstar diagnose --run)")]


def _heading(server: Prepared) -> Any:
    facts = server.facts
    engine = f"{facts.engine} {facts.version}".strip()
    return output.heading(facts.model, f"at {server.endpoint.url}" + (f", {engine}" if engine else "")
                          + f", {server.endpoint.api}")
