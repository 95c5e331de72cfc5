"""`bstar bench --sweep`: loads one after another, and where goodput is best, the SLO ends and the gain does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.interfaces.cli.bench_options import LoadMaker
    from bstar.measure.result import BenchRun
    from bstar.measure.run import Prepared, RunOptions
    from bstar.measure.sweeps import Landmark, Point, SweepPlan, SweepResult
    from bstar.specs.slo import Slo

OneRun = Callable[["Prepared", Any, "RunOptions", "Path | None", str], "BenchRun"]
SCHEMA = "bstar.bench-sweep/1"


def run_sweep(
    server: Prepared, loads: LoadMaker, how: RunOptions, plan: SweepPlan, slo: Slo | None, out: Path | None,
    as_json: bool, one_run: OneRun,
) -> int:  # fmt: skip
    """Measure the loads of `plan`, without those that an interrupted sweep in `out` has; returns the exit code."""
    from bstar.interfaces.cli.bench import write_sheet
    from bstar.measure.sweeps import SweepResult, sweep

    target = None if slo is None or slo.is_empty else slo.attainment_fraction
    sheet: dict[str, Any] = {
        "schema": SCHEMA, "axis": plan.axis, "target_fraction": target,
        "asked": {"model": server.facts.model, "api": server.endpoint.api, "load": loads.asked(plan.axis),
                  "slo": None if slo is None else [slo.ttft_s, slo.tpot_s, slo.e2e_s]},
    }  # fmt: skip
    seen = _known(out, sheet)
    if not seen:  # what --resume goes on with, also where the first load is interrupted
        write_sheet(out, "sweep.json", sheet | _points(seen))

    def measure(load: float) -> Point:
        name = f"{plan.axis}-{load:g}"
        place = None if out is None else _unused(out / name)
        run = one_run(server, loads.at(axis=plan.axis, load=load), how, place, f"{plan.axis} {load:g}")
        if run.holds_nothing:
            raise KeyboardInterrupt
        point = point_of(load, run, None if place is None else place.name)
        seen.append(point)
        write_sheet(out, "sweep.json", sheet | _points(seen))
        if run.stop_asked:
            raise KeyboardInterrupt
        return point

    try:
        result = sweep(measure, plan, target_fraction=target, known=tuple(seen))
    except KeyboardInterrupt:  # between two loads, or before the first answer of one
        whole = sorted((p for p in seen if not p.interrupted), key=lambda p: p.load)
        result = SweepResult(axis=plan.axis, points=tuple(whole), target_fraction=target, interrupted=True)
    sheet |= _points(seen) | landmarks_of(result)
    write_sheet(out, "sweep.json", sheet)
    if as_json:
        output.print_json(sheet | {"folder": None if out is None else str(out)})
    else:
        _show(server, result, None if out is None else str(out))
    if result.interrupted:
        return 130
    given_out = any(not p.valid for p in result.points) if plan.loads else not result.valid
    return 1 if given_out else 0


def point_of(load: float, run: BenchRun, folder: str | None) -> Point:
    """What a run says as a point of a sweep; `detail` is its JSON: figures, and under `run` the whole summary.

    All of its rates are of one time: while the load was on, or of the whole run where that is too short.
    """
    from bstar.measure.folder import plain
    from bstar.measure.sweeps import Point

    summary = run.loaded
    detail = {
        "load": load, "valid": run.accepted, "interrupted": run.interrupted,
        "output_tokens_per_s": summary.output_tokens_per_s, "requests_per_s": summary.requests_per_s,
        "goodput_requests_per_s": summary.goodput_requests_per_s,
        "slo_attainment_fraction": summary.slo_attainment_fraction,
        **{name: getattr(summary, name).to_dict() for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        "folder": folder, "run": run.to_dict(),
    }  # fmt: skip
    return Point(
        load=load, throughput_per_s=summary.output_tokens_per_s, goodput_per_s=summary.goodput_requests_per_s,
        attainment_fraction=summary.slo_attainment_fraction, valid=run.accepted, interrupted=run.interrupted,
        detail=plain(detail),
    )  # fmt: skip


def landmarks_of(result: SweepResult) -> dict[str, Any]:
    """What was sought, as JSON."""
    best = result.best if result.target_fraction is not None else None
    return {
        "best_goodput": None if best is None else {"load": best.load, "goodput_requests_per_s": best.goodput_per_s},
        "slo_boundary": result.boundary.to_dict(), "knee": result.knee.to_dict(), "notes": list(result.notes),
        "interrupted": result.interrupted,
    }  # fmt: skip


def _points(points: list[Point]) -> dict[str, Any]:
    return {"points": [p.detail for p in sorted(points, key=lambda p: p.load)]}


def _known(out: Path | None, sheet: dict[str, Any]) -> list[Point]:
    """The whole points of the sweep that `out` holds. Raises SpecError where it is another sweep."""
    from bstar.codec.safe_json import read_json
    from bstar.measure.folder import plain
    from bstar.measure.sweeps import Point

    file = None if out is None else out / "sweep.json"
    if file is None or not file.is_file():
        return []
    found = read_json(file, what="sweep")
    differ = differences(found, plain({key: sheet[key] for key in ("schema", "axis", "asked")}))
    if differ:
        raise SpecError(f"--resume: {out} holds a sweep with another {differ[0]}; give the options that it was begun "
                        "with, or another folder")
    return [
        Point(load=p["load"], throughput_per_s=p["output_tokens_per_s"], goodput_per_s=p["goodput_requests_per_s"],
              attainment_fraction=p["slo_attainment_fraction"], valid=p["valid"], detail=p)
        for p in found.get("points", []) if not p.get("interrupted")
    ]  # fmt: skip


def differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The settings that differ: "axis (rate, not concurrency)", "input_lengths (512, not 256)"."""
    out = []
    for key, now in asked.items():
        before = found.get(key)
        if isinstance(now, Mapping):
            out += differences(before if isinstance(before, Mapping) else {}, now)
        elif before != now:
            out.append(f"{key} ({before}, not {now})")
    return out


def _unused(place: Path) -> Path:
    """`place`, numbered where an interrupted run took the name."""
    from bstar.measure.folder import PARTIAL

    number, found = 1, place
    while found.exists() or found.with_name(found.name + PARTIAL).exists():
        number += 1
        found = place.with_name(f"{place.name}-again-{number}")
    return found


def _show(server: Prepared, result: SweepResult, place: str | None) -> None:
    slo = result.target_fraction is not None
    rows = []
    for point in result.points:
        p = point.detail
        rows.append((f"{point.load:g}", f"{point.throughput_per_s:,.0f}", f"{p['requests_per_s']:,.3g}",
                     *(format_seconds(p[name][part]) for name in ("ttft_s", "tpot_s") for part in ("p50", "p99")),
                     *((f"{point.goodput_per_s:,.3g}", f"{point.attainment_fraction:.1%}") if slo else ()),
                     "" if point.valid else "no result"))
    parts: list[Any] = [
        output.heading(server.facts.model, f"at {server.endpoint.url}, {result.axis} swept"),
        output.table((result.axis, "tok/s", "requests/s", "TTFT p50", "p99", "TPOT p50", "p99",
                      *(("goodput", "in SLO") if slo else ()), ""), rows),
    ]
    best = result.best
    facts = []
    if slo and best is not None:
        facts.append(("best goodput", f"{best.goodput_per_s:,.3g} requests/s", f"at {result.axis} {best.load:g}"))
        facts.append(("SLO ends", *_said(result.boundary)))
    facts.append(("knee", *_said(result.knee, "; from there a doubling gains less than 5 % (not B*: see docs)")))
    parts.append(output.facts(facts))
    if result.interrupted:
        again = "" if place is None else f"; go on with the same options, --out {place} and --resume"
        said = "these loads were whole" if result.points else "no load was whole"
        parts.append(output.line(f"interrupted: {said}{again}", style="yellow"))
    parts += [output.line("note: " + note, style="dim") for note in result.notes]
    for point in result.points:
        parts += [output.line(f"at {point.load:g}: {reason}", style="yellow")
                  for reason in point.detail["run"]["verdict"]["reasons"]]
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
