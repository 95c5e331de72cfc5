"""`bstar bench`: a load to a real server, and what its users felt; the same load that `bstar simulate` takes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import BstarError, ConfigError, SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.bench_options import (
    LoadMaker,
    fresh_out,
    measuring_options,
    named_by_options,
    sending_options,
    server_options,
    take_body,
    take_dataset,
    take_endpoint,
    take_text,
    take_workers,
)
from bstar.interfaces.cli.bench_watch import watchers, watching_options
from bstar.interfaces.cli.load import slo_options, take_slo
from bstar.interfaces.cli.params import apply, json_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.interfaces.cli.traffic import traffic_options
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.measure.fleet import Progress
    from bstar.measure.repeats import Precision
    from bstar.measure.result import BenchRun
    from bstar.measure.run import Prepared, RunOptions

_EPILOG = """\b
Examples:
  bstar bench --url http://127.0.0.1:8000 --input 512 --output 128 --rate 4 --slo ttft=500ms,tpot=50ms
  bstar bench --url http://127.0.0.1:8000 --input 512 --output 128 --concurrency 32 --num-requests 320
  bstar bench --url http://127.0.0.1:8000 --input 512 --output 128 --sweep concurrency=auto --slo chat
  bstar bench --url http://127.0.0.1:8000 --api chat --dataset sharegpt.json --rate 2 --tokenizer tokenizer.json
  bstar bench --url http://127.0.0.1:8000 --trace azure.csv --num-requests 500 --until tpot_s=2%
The API key comes from the environment (BSTAR_API_KEY or OPENAI_API_KEY). Ctrl-C ends the run and keeps what was
measured. Exit codes: 0 measured · 1 no result of the server (the client was the limit, or too many requests failed)
· 2 bad input, no server, or the run could not be written · 130 interrupted.
"""


@click.command("bench", cls=SectionedCommand, epilog=_EPILOG)
@apply(server_options, traffic_options, sending_options, slo_options, measuring_options, watching_options,
       json_option)
def bench(as_json: bool, **options: Any) -> None:
    """Measure a real server: an open or closed loop of streaming requests, honest clocks, every failure counted."""
    from bstar.measure.result import Window
    from bstar.measure.run import RunOptions, prepare

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stopped container keeps its run too
    endpoint, body, text = take_endpoint(options), take_body(options), take_text(options)
    slo, window = take_slo(options), Window(warmup_s=options.pop("warmup"), cooldown_s=options.pop("cooldown"))
    allowed = options.pop("max_error_fraction")
    if not 0 <= allowed <= 1:
        raise SpecError(f"--max-error-fraction: is a share of the requests, between 0 and 1, is {allowed:g}")
    how = RunOptions(
        slo=slo, window=window, workers=take_workers(options), max_in_flight=options.pop("max_in_flight"),
        stop_after_s=options.pop("stop_after"), content_salt=options.pop("content_salt"),
        max_error_fraction=allowed,
        allow_client_limited=options.pop("allow_client_limited"),
    )  # fmt: skip
    watching = {key: options.pop(key) for key in ("metrics", "telemetry", "scrape_interval")}
    again, resumed = _take_runs(options), options["resume"]
    out, plan = fresh_out(options), options.pop("sweep")
    dataset = take_dataset(options, text)
    if dataset is not None:
        how = replace(how, settings={"dataset": dataset.to_dict()})
    axis = None
    if plan is not None:
        from bstar.measure.sweeps import parse_sweep

        plan = parse_sweep(plan)
        axis = plan.axis
    with named_by_options():
        loads = LoadMaker(options, dataset, sweeping=axis)
        first = loads.at(axis=axis, load=1.0 if axis else None)
    if how.max_in_flight is not None and first.concurrency is not None:
        raise SpecError("--max-in-flight: is for an open loop; a closed loop has at most --concurrency requests in "
                        "flight; leave it out")
    out = out if resumed and out is not None and out.is_dir() else _writable(out)
    try:
        server = prepare(endpoint, body=body, text=text, given=None if dataset is None else dataset.prompts)
        observers, counters = watchers(server, watching)
    except KeyboardInterrupt:
        raise NothingMeasuredError from None
    for note in server.facts.notes:
        output.warn(note)
    how = replace(how, observers=observers, counters=counters)
    if plan is not None:
        from bstar.interfaces.cli.bench_sweep import run_sweep

        code = run_sweep(server, loads, how, plan, slo, out, as_json, one_run)
    else:
        code = _run(server, loads, how, again, out, as_json)
    click.get_current_context().exit(code)


class NothingMeasuredError(BstarError):
    """Ctrl-C before the first answer."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted: nothing was measured, nothing is kept")


def one_run(server: Prepared, traffic: Any, how: RunOptions, out: Path | None, what: str) -> BenchRun:
    """A run with a bar on stderr."""
    from bstar.measure.fleet import uninterrupted
    from bstar.measure.run import bench as measure

    with progress(what) as report:
        run = measure(server, traffic, replace(how, on_progress=report), out=out)
    if out is None or run.write_error or run.holds_nothing:
        return run
    with uninterrupted() as pressed:  # the page belongs to the run; who measures more ends after it
        _write_page(out)
    return replace(run, stop_asked=True) if pressed else run


def _write_page(out: Path) -> None:
    """The run as a page in its folder. A page that cannot be written costs no run."""
    from bstar.interfaces.report.run_page import write_run_page

    try:
        write_run_page(out)
    except (BstarError, OSError) as error:
        output.warn(f"report.html was not written: {error}")


def _take_runs(options: dict[str, Any]) -> tuple[int, Precision | None]:
    """How often the load is measured, and until what is known how well."""
    from bstar.measure.repeats import parse_precision

    runs, until, most = options.pop("runs"), options.pop("until"), options.pop("max_runs")
    if options.get("sweep") is not None and (runs > 1 or until is not None):
        raise SpecError("--sweep: measures each load once; leave --runs and --until out")
    return runs, None if until is None else parse_precision(until, most_runs=most)


def _run(server: Prepared, loads: LoadMaker, how: RunOptions, again: tuple[int, Precision | None],
         out: Path | None, as_json: bool) -> int:
    from bstar.interfaces.cli.bench_show import show_repeated, show_run
    from bstar.measure.repeats import repeat

    runs, precision = again
    if runs == 1 and precision is None:
        try:
            run = one_run(server, loads.at(), how, out, "requests")
        except KeyboardInterrupt:
            raise NothingMeasuredError from None
        if run.holds_nothing:
            raise NothingMeasuredError
        if as_json:
            output.print_json(run.to_dict() | {"folder": _place(run, out)})
        else:
            show_run(server, run, _place(run, out))
        if run.write_error:
            click.echo(f"error: the run could not be written whole ({run.write_error}); what was measured is above",
                       err=True)
        return run.exit_code

    def once(number: int) -> BenchRun:
        place = None if out is None else out / f"run-{number + 1:02d}"
        return one_run(server, loads.at(seed=number), how, place, f"run {number + 1}")

    try:
        found = repeat(once, runs=runs, precision=precision)
    except KeyboardInterrupt:
        raise NothingMeasuredError from None
    sheet = {"schema": "bstar.bench-repeated/1", **found.to_dict(),
             "runs": [{"folder": None if out is None else f"run-{i + 1:02d}", **run.to_dict()}
                      for i, run in enumerate(found.runs)]}  # fmt: skip
    write_sheet(out, "repeated.json", sheet)
    if as_json:
        output.print_json(sheet | {"folder": None if out is None else str(out)})
    else:
        show_repeated(server, found, None if out is None else str(out))
    if found.interrupted:
        click.echo(f"interrupted: measured runs: {len(found.runs):,}", err=True)
        return 130
    code = max(run.exit_code for run in found.runs)
    return code if code or found.reached is not False else 1


def write_sheet(out: Path | None, name: str, sheet: dict[str, Any]) -> None:
    """The file of a group of runs, moved into place whole."""
    if out is None:
        return
    import json

    from bstar.files import write_whole
    from bstar.measure.folder import plain

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, json.dumps(plain(sheet), indent=2, allow_nan=False) + "\n", what="--out")
    except (OSError, ConfigError) as error:
        output.warn(f"the runs are written, their list is not: {error}")


def _place(run: BenchRun, out: Path | None) -> str | None:
    if out is None:
        return None
    from bstar.measure.folder import PARTIAL

    return str(out if out.is_dir() else out.with_name(out.name + PARTIAL))


def _writable(out: Path | None) -> Path | None:
    """`out`, refused before a load is spent on it where it cannot be made."""
    if out is None:
        return None
    if out.exists():
        raise SpecError(f"--out: {out} exists and is no folder; choose another name")
    above = next((p for p in out.absolute().parents if p.exists()), Path("/"))
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"--out: {above} is no folder that can be written to; choose another place, or --no-out")
    return out


@contextmanager
def progress(what: str) -> Iterator[Callable[[Progress], None] | None]:
    """A line on stderr in a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    shown = 0.0

    def report(now: Progress) -> None:
        nonlocal shown
        moment = time.monotonic()
        if moment - shown < 0.25:
            return
        shown = moment
        filled = round(30 * now.finished / max(now.total, 1))
        failed = f" · {now.failed:,} failed" if now.failed else ""
        click.echo(f"\r{what} [{'#' * filled}{'.' * (30 - filled)}] {now.finished:,} of {now.total:,} · "
                   f"{now.sent - now.finished:,} in flight{failed} · {format_seconds(max(now.elapsed_s, 0.0))} ",
                   nl=False, err=True)

    try:
        yield report
    finally:
        if shown:
            click.echo("\r" + " " * 110 + "\r", nl=False, err=True)
