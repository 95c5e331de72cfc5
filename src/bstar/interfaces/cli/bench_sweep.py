"""`bstar bench --sweep`: loads one after another, and where goodput is best, the SLO ends and the gain does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bstar.interfaces.cli import output
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.interfaces.cli.bench_options import LoadMaker
    from bstar.measure.result import BenchRun
    from bstar.measure.run import Prepared, RunOptions
    from bstar.measure.sweeps import Landmark, Point, SweepPlan, SweepResult
    from bstar.specs.slo import Slo

OneRun = Callable[["Prepared", Any, "RunOptions", "Path | None", str], "BenchRun"]


def run_sweep(
    server: Prepared, loads: LoadMaker, how: RunOptions, plan: SweepPlan, slo: Slo | None, out: Path | None,
    as_json: bool, one_run: OneRun,
) -> int:  # fmt: skip
    """Measure the loads of `plan`; returns the exit code."""
    from bstar.interfaces.cli.bench import write_sheet
    from bstar.measure.sweeps import sweep

    target = None if slo is None or slo.is_empty else slo.attainment_fraction
    seen: list[Point] = []

    def measure(load: float) -> Point:
        place = None if out is None else out / f"{plan.axis}-{load:g}"
        run = one_run(server, loads.at(axis=plan.axis, load=load), how, place, f"{plan.axis} {load:g}")
        point = point_of(load, run)
        seen.append(point)
        write_sheet(out, "sweep.json", sheet_of(plan, seen, target))
        return point

    result = sweep(measure, plan, target_fraction=target)
    sheet = {**sheet_of(plan, seen, target), **landmarks_of(result)}
    write_sheet(out, "sweep.json", sheet)
    if as_json:
        output.print_json(sheet | {"folder": None if out is None else str(out)})
    else:
        _show(server, result, None if out is None else str(out))
    if result.interrupted:
        return 130
    given_out = any(not p.valid for p in result.points) if plan.loads else not result.valid
    return 1 if given_out else 0


def point_of(load: float, run: BenchRun) -> Point:
    """What a run says as a point of a sweep."""
    from bstar.measure.sweeps import Point

    summary = run.summary
    return Point(
        load=load, throughput_per_s=run.steady["output_tokens_per_s"] or summary.output_tokens_per_s,
        goodput_per_s=summary.goodput_requests_per_s, attainment_fraction=summary.slo_attainment_fraction,
        valid=run.verdict.valid, interrupted=run.interrupted, detail=run,
    )  # fmt: skip


def sheet_of(plan: SweepPlan, points: list[Point], target: float | None) -> dict[str, Any]:
    """The points so far as JSON."""
    return {
        "schema": "bstar.bench-sweep/1", "axis": plan.axis, "target_fraction": target,
        "points": [_point(plan, p) for p in sorted(points, key=lambda p: p.load)],
    }


def _point(plan: SweepPlan, point: Point) -> dict[str, Any]:
    """A point: its figures, and under `run` the whole summary."""
    summary = point.detail.summary
    return {
        "load": point.load, "valid": point.valid, "interrupted": point.interrupted,
        "output_tokens_per_s": point.throughput_per_s, "requests_per_s": summary.requests_per_s,
        "goodput_requests_per_s": point.goodput_per_s, "slo_attainment_fraction": point.attainment_fraction,
        **{name: getattr(summary, name).to_dict() for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        "folder": f"{plan.axis}-{point.load:g}", "run": point.detail.to_dict(),
    }  # fmt: skip


def landmarks_of(result: SweepResult) -> dict[str, Any]:
    """What was sought, as JSON."""
    best = result.best if result.target_fraction is not None else None
    return {
        "best_goodput": None if best is None else {"load": best.load, "goodput_requests_per_s": best.goodput_per_s},
        "slo_boundary": result.boundary.to_dict(), "knee": result.knee.to_dict(), "notes": list(result.notes),
        "interrupted": result.interrupted,
    }  # fmt: skip


def _show(server: Prepared, result: SweepResult, place: str | None) -> None:
    rows = []
    for point in result.points:
        summary = point.detail.summary
        rows.append((f"{point.load:g}", f"{point.throughput_per_s:,.0f}", f"{summary.requests_per_s:,.3g}",
                     format_seconds(summary.ttft_s.p50), format_seconds(summary.ttft_s.p99),
                     format_seconds(summary.tpot_s.p50), format_seconds(summary.tpot_s.p99),
                     f"{summary.goodput_requests_per_s:,.3g}", f"{point.attainment_fraction:.1%}",
                     "" if point.valid else "no result"))
    parts: list[Any] = [
        output.heading(server.facts.model, f"at {server.endpoint.url}, {result.axis} swept"),
        output.table((result.axis, "tok/s", "requests/s", "TTFT p50", "p99", "TPOT p50", "p99", "goodput", "in SLO",
                      ""), rows),
    ]
    best = result.best
    facts = []
    if result.target_fraction is not None and best is not None:
        facts.append(("best goodput", f"{best.goodput_per_s:,.3g} requests/s", f"at {result.axis} {best.load:g}"))
        facts.append(("SLO ends", *_said(result.boundary)))
    facts.append(("knee", *_said(result.knee, "; from there a doubling gains less than 5 % (not B*: see docs)")))
    parts.append(output.facts(facts))
    parts += [output.line("note: " + note, style="dim") for note in result.notes]
    for point in result.points:
        parts += [output.line(f"at {point.load:g}: {reason}", style="yellow")
                  for reason in point.detail.verdict.reasons]
    if place is not None:
        parts.append(output.line(f"written to {place}", style="dim"))
    output.show(*parts)


def _said(found: Landmark, more: str = "") -> tuple[str, str]:
    if found.edge == "above":
        return "–", "beyond the largest load measured"
    if found.edge == "below":
        return "–", "below the smallest load measured"
    if found.load is None:
        return "–", "not among these loads"
    low = "" if found.low is None else f"{found.low:g}"
    return f"{found.load:.4g}", (f"between {low} and {found.high:g}" if found.high is not None else "") + more
