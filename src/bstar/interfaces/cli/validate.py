"""`bstar validate`: measured points replayed, and how far the predictions are from what was measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.params import POSITIVE, apply, json_option
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

Columns of a points file: engine, model, gpu, isl_tokens, osl_tokens, concurrency, and where known id, engine_version,
weight_dtype, num_gpus, attention_tp, attention_dp, expert_parallel, harness, ttft_ms, tpot_ms (or those of static
batches: isl, osl, load_kind, load_value, …); others are ignored.
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
    click.option("--worst", type=click.IntRange(min=0), default=10, show_default=True, metavar="N",
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
    wanted = tuple(dict.fromkeys(axis.strip().lower() for axis in axes.split(",") if axis.strip()))
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
    return found


def _sampled(points: list[Point], count: int | None) -> list[Point]:
    if count is None or count >= len(points):
        return points
    return [points[i * len(points) // count] for i in range(count)]


def _outcomes(points: list[Point], profile: Path | None, jobs: int | None) -> list[Outcome]:
    from bstar.calibration.profile import read_profile
    from bstar.calibration.validation import validate as replayed

    used = None if profile is None else read_profile(profile)
    with _progress() as report:
        return replayed(points, profile=used, jobs=jobs, progress=report)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A count on stderr in a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return

    def report(done: int, total: int) -> None:
        if done % 16 == 0 or done == total:
            click.echo(f"\r{done:,} of {total:,} points ", nl=False, err=True)

    try:
        yield report
    finally:
        click.echo("\r" + " " * 40 + "\r", nl=False, err=True)


