"""`bstar validate`: measured points replayed, and how far the predictions are from what was measured."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.heartbeat import heartbeat
from bstar.interfaces.cli.params import COUNT, POSITIVE, apply, json_option
from bstar.interfaces.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from bstar.calibration.point import Point
    from bstar.calibration.summary import Outcome

_EPILOG = """\b
Examples:
  bstar validate --sample 200
  bstar validate --points my_points.csv --json
  bstar validate --by engine,regime --plots charts
  bstar validate --page docs/validation.md --jobs 2

Columns of a points file, in any order and case; others are ignored. Serving: engine, model, gpu, isl_tokens,
osl_tokens, concurrency, and where known id, engine_version, weight_dtype, kv_cache_dtype, num_gpus, attention_tp,
attention_dp, expert_parallel, harness, ttft_ms, tpot_ms (or ttft_s, tpot_s).

Disaggregated: those, mode (agg or disagg), and prefill_tp_size, decode_tp_size, prefill_num_workers,
decode_num_workers; of either side also _attention_dp_size, _pp_size, _moe_tp_size, _moe_ep_size.

Other loads: engine, model, gpu, isl, osl, load_kind (static_batch, all_at_once, closed, max_load, rate, trace),
load_value (sequences, clients or requests per second), and where known n_gpus, tp, pp, dp, ep, weight_dtype, kv_dtype,
max_concurrency, num_prompts, flags, ttft_ms, tpot_ms, itl_ms, e2e_ms, out_tok_s.
"""
_AXES = "engine,gpu,model,dtype,regime"


@click.command("validate", cls=SectionedCommand, epilog=_EPILOG)
@apply(
    click.option("--points", type=click.Path(path_type=Path), metavar="FILE.csv",
                 help="Measured points (CSV, also gzipped); without it those that ship with bstar."),
    click.option("--profile", type=click.Path(path_type=Path), metavar="FILE",
                 help="Predict rows of its model, GPU and engine with this calibration (bstar calibrate)."),
    click.option("--by", "axes", default=_AXES, show_default=True, metavar="A,B,…",
                 help="Break errors down by kind, engine, gpu, model, dtype, regime (what binds), harness."),
    click.option("--worst", type=COUNT, default="10", show_default=True, metavar="N",
                 help="Rows with the largest errors to print, each with the suspected reason."),
    click.option("--sample", type=POSITIVE, metavar="N", help="At most N rows, evenly spread over the file."),
    click.option("--plots", type=click.Path(path_type=Path), metavar="DIR",
                 help="Draw predicted against measured, and errors by regime, as SVG files."),
    click.option("--page", type=click.Path(path_type=Path), metavar="FILE.md",
                 help="Write the validation page, with its charts beside it."),
    click.option("--jobs", type=POSITIVE, metavar="N", help="Processes  [default: one for each processor]"),
    json_option,
)
def validate(
    points: Path | None, profile: Path | None, axes: str, worst: int, sample: int | None, plots: Path | None,
    page: Path | None, jobs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay measured points as their harness ran them, and print how far the predictions are off."""
    from bstar.calibration.summary import AXES, summaries_by, summary_of

    wanted = _wanted(axes, AXES)
    taken = _sampled(_taken(points), sample)
    outcomes = _outcomes(taken, profile, jobs)
    if plots is not None:
        from bstar.interfaces.report.validation import draw

        for path in draw(outcomes, plots):
            output.warn(f"drawn: {path}")
    if page is not None:
        from bstar.interfaces.report.validation import write_page

        output.warn(f"wrote {write_page(outcomes, page, command=_command())}")
    if as_json:
        from bstar.calibration.rows import outcome_row

        output.print_json({
            "summary": summary_of(outcomes), "by": {axis: summaries_by(outcomes, axis) for axis in wanted},
            "rows": [outcome_row(o) for o in outcomes],
        })
        return
    from bstar.interfaces.cli.validate_tables import validation_parts

    output.show(*validation_parts(outcomes, wanted, worst=worst))


def _command() -> str:
    return "bstar " + " ".join(sys.argv[1:])


def _wanted(axes: str, known: tuple[str, ...]) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(axis.strip().lower() for axis in axes.split(",")))
    for axis in wanted:
        if axis not in known:
            raise SpecError(f"--by: {axis[:40]!r} is not known; use some of {', '.join(known)}")
    return wanted


def _taken(points: Path | None) -> list[Point]:
    if points is None:
        from bstar.calibration.bundled import all_bundled_points

        return all_bundled_points()
    from bstar.calibration.points import read_points

    found = read_points(points)
    if not found:
        raise SpecError(f"--points: {points} has a header and no row")
    twice = [name for name, count in Counter(point.id for point in found).items() if count > 1]
    if twice:
        output.warn(f"--points: {len(twice):,} ids stand in several rows ({twice[0]!r} first); each row counts")
    return found


def _sampled(points: list[Point], count: int | None) -> list[Point]:
    if count is None or count >= len(points):
        return points
    return [points[i * len(points) // count] for i in range(count)]


def _outcomes(points: list[Point], profile: Path | None, jobs: int | None) -> list[Outcome]:
    from bstar.calibration.profile import read_profile
    from bstar.calibration.validation import validate as replayed

    used = None if profile is None else read_profile(profile)
    with heartbeat("points") as report:
        return replayed(points, profile=used, jobs=jobs, progress=report)
