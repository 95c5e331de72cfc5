"""`bstar simulate`: a load through a deployment, request by request, and what its users would feel."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.cluster import cluster_options, linked, take_cluster
from bstar.interfaces.cli.deploy import deploy_options, describe, take_deployment
from bstar.interfaces.cli.heartbeat import compiling_told
from bstar.interfaces.cli.load import slo_options, take_slo
from bstar.interfaces.cli.params import POSITIVE, apply, complete_models, json_option
from bstar.interfaces.cli.sections import SectionedCommand, section
from bstar.interfaces.cli.simulate_show import show_comparison, show_run
from bstar.interfaces.cli.traffic import (
    DEFAULT_REQUESTS,
    FEWER_REQUESTS,
    build_traffic,
    describe_traffic,
    take_traffic,
    traffic_options,
)
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.sim.replicate import Replications
    from bstar.sim.result import SimResult
    from bstar.sim.stepwise import Progress
    from bstar.specs.deployment import Deployment
    from bstar.specs.slo import Slo
    from bstar.traffic.load import Traffic

_EPILOG = """\b
Examples:
  bstar simulate llama-3.1-8b --gpu h100 --input 900 --output 200 --rate 6 --slo ttft=500ms,tpot=25ms
  bstar simulate llama-3.1-8b --gpu h100 --input lognormal:mean=900,cv=1.1 --output 200 --concurrency 64
  bstar simulate llama-3.1-8b --gpu h100 --trace AzureLLMInferenceTrace_conv.csv --requests-out requests.parquet
  bstar simulate llama-3.1-8b --gpu h100 --input 900 --output 200 --rate 6 --compare static,continuous
  bstar simulate llama-3.1-8b --gpu h100 --input 900 --output 200 --rate 6 --trace-out run.json   # ui.perfetto.dev
Ctrl-C ends the run and prints what happened so far.
"""

section("Load", "rate_curve", "think", "num_requests", "duration", "warmup_requests", "seed")

# A bar appears where the run takes longer than this.
_SILENT_S = 1.0
_INTERRUPTED = 130
# In the context of the command: whether a run has begun.
_BEGUN = "bstar.simulate.begun"


@click.command("simulate", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_models)
@apply(
    deploy_options, traffic_options, slo_options, cluster_options,
    click.option("--policy", default="engine", show_default=True, metavar="NAME[:K=V,…]",
                 help="How requests are batched: engine (its own way), continuous (vLLM's), unchunked, static, sglang, "
                      "sglang-mixed, trtllm-no-evict, trtllm-max-utilization, swap, speculative, lock-step."),
    click.option("--compare", metavar="A,B[,…]",
                 help="Serve the same requests in several ways and print the gain: static,continuous; "
                      "unchunked,chunked; mixed,disaggregated; or any policies."),
    click.option("--start", type=click.Choice(["burst", "even"]), default="burst", show_default=True,
                 help="Closed loop: all clients begin at once, or spread over one request's time (not measured)."),
    click.option("--replications", type=POSITIVE, default=1, show_default=True, metavar="N",
                 help="Independent runs with seeds N apart, for confidence intervals."),
    click.option("--requests-out", type=click.Path(path_type=Path), metavar="FILE",
                 help="Every request as .parquet, .csv, .jsonl or .json."),
    click.option("--trace-out", type=click.Path(path_type=Path), metavar="FILE",
                 help="Every step and request as a Chrome trace (.json), for ui.perfetto.dev."),
    click.option("--series-points", type=POSITIVE, metavar="N",
                 help="With --json: the run in time, as N intervals (key series)."),
    json_option,
)
def simulate(model_name: str | None, policy: str, compare: str | None, start: str, replications: int,
             requests_out: Path | None,
             trace_out: Path | None, series_points: int | None, as_json: bool, **options: Any) -> None:
    """Simulate an engine's scheduler, step by step, under a load: latencies, throughput, goodput, preemptions."""
    with _interruptible():
        _check_outputs(requests_out, trace_out)
        if series_points is not None and not as_json:
            raise SpecError("--series-points: is a part of the JSON; add --json, or leave it out")
        built = take_deployment(model_name, options)
        slo, cluster = take_slo(options), take_cluster(options)
        if cluster is not None:
            cluster = linked(cluster, built)
            if policy != "engine":
                raise SpecError("--policy: several engines all serve in the engine's own way; leave --policy out")
        if compare is not None and (requests_out or trace_out or series_points or replications > 1):
            raise SpecError("--compare: leave --requests-out, --trace-out, --series-points and --replications out, it "
                            "prints the gain")
        load, given = take_traffic(
            options, default_requests=FEWER_REQUESTS if _takes_every_step(built, policy) else DEFAULT_REQUESTS)
        if start == "even":
            load = _spread(built, load)
        _warn_of(built, load, start)
        if compare is not None:
            _compare(built, load, slo, compare, cluster, as_json)
            return
        several = _run(built, load, given, slo, cluster, policy=policy, even=start == "even", count=replications)
        result = several.results[0]
        _write(result, requests_out, trace_out)
        if as_json:
            _print_sheet(built, load, several, cluster, series_points)
        else:
            show_run(built, load, result, several)
            for path in (requests_out, trace_out):
                if path is not None:
                    output.warn(f"wrote {path}")
    if several.interrupted:
        click.get_current_context().exit(_INTERRUPTED)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C where a run does not take it, and a second one: a line that says so, and the exit code."""
    context = click.get_current_context()
    try:
        yield
    except KeyboardInterrupt:
        begun = context.meta.get(_BEGUN, False)
        click.echo(f"interrupted before {'all was written' if begun else 'the first step'}", err=True)
        context.exit(_INTERRUPTED)


def _check_outputs(requests_out: Path | None, trace_out: Path | None) -> None:
    """Raises an error where a file cannot be written, before a run is spent on it."""
    from bstar.sim.export import check_request_path, check_trace_path

    if requests_out is not None:
        check_request_path(requests_out)
    if trace_out is not None:
        check_trace_path(trace_out)
    for flag, path in (("--requests-out", requests_out), ("--trace-out", trace_out)):
        if path is not None and _is_stdout(path):
            raise SpecError(f"{flag}: {str(path)!r} is where the report goes; give a file")
    if requests_out is not None and trace_out is not None and requests_out.resolve() == trace_out.resolve():
        raise SpecError(f"--trace-out: {str(trace_out)!r} is also that of --requests-out; give each a file of its own")


def _is_stdout(path: Path) -> bool:
    """Whether what is written to `path` comes out with the report."""
    try:
        return path.resolve() != Path(os.devnull) and os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # no such file yet, or no descriptor behind stdout
        return False


def _warn_of(built: Deployment, load: Traffic, start: str) -> None:
    """What a user may not expect of this load on this deployment."""
    if start == "burst" and built.calibration is not None and load.concurrency is not None and _alike(load):
        output.warn("clients that begin at once and get answers of one length stay in step; --start even spreads them, "
                    "as bstar calibrate takes points without start: burst")
    if load.has_prefixes and not built.engine.enable_prefix_caching:
        output.warn("prefix caching is off: text that prompts share is computed anew for each request")


def _run(
    built: Deployment, load: Traffic, given: dict[str, Any], slo: Slo | None, cluster: dict[str, Any] | None, *,
    policy: str, even: bool, count: int,
) -> Replications:  # fmt: skip
    """The load once, or `count` times with other seeds."""
    from bstar.sim.replicate import replicate
    from bstar.sim.run import simulate as simulated

    def run(number: int) -> SimResult:
        seed = given["seed"] + number
        sent = load if number == 0 else build_traffic(given, seed=seed)
        if number and even:
            sent = _spread(built, sent)
        with _progress(f"run {number + 1} of {count}" if count > 1 else "requests") as report:
            if cluster is not None:
                from bstar.sim.cluster import simulate_cluster

                return simulate_cluster(built, sent, seed=seed, slo=slo, progress=report, **cluster)
            return simulated(built, sent, seed=seed, slo=slo, policy=policy, progress=report)

    return replicate(run, count)


def _write(result: SimResult, requests_out: Path | None, trace_out: Path | None) -> None:
    from bstar.sim.export import write_requests, write_trace

    if requests_out is not None:
        write_requests(result, requests_out)
    if trace_out is not None:
        write_trace(result, trace_out)


def _print_sheet(
    built: Deployment, load: Traffic, several: Replications, cluster: dict[str, Any] | None, series_points: int | None
) -> None:
    from bstar.calibration.ranges import run_ranges, with_ranges

    result = several.results[0]
    sheet: dict[str, Any] = with_ranges(result.to_dict(), run_ranges(built, result))
    sheet |= {"load": describe_traffic(load), "deployment": describe(built), "interrupted": several.interrupted}
    if cluster is not None:
        sheet["cluster"] = _cluster_sheet(result)
    if several.asked > 1:
        sheet["replications"] = several.to_dict()
    if series_points is not None:
        sheet["series"] = result.series(series_points).to_dict()
    output.print_json(sheet)


def _alike(load: Traffic) -> bool:
    """Whether all answers are as long."""
    return int(load.output_tokens.min()) == int(load.output_tokens.max())


def _spread(built: Deployment, load: Traffic) -> Traffic:
    """The closed loop with clients that begin spread over the time of one request, which does not count."""
    from dataclasses import replace

    import numpy as np

    from bstar.sim.run import simulate as simulated

    if load.concurrency is None or load.has_sessions:
        raise SpecError("--start: is for --concurrency; an open loop has its own times")
    arrival = np.array(load.arrival_s, dtype=float)
    first = np.flatnonzero(~np.isnan(arrival))
    first_look = simulated(built, load)
    if first_look.interrupted:
        raise KeyboardInterrupt
    request_s = first_look.summary.e2e_s.mean or 0.0
    arrival[first] = np.arange(first.size) * (request_s / max(first.size, 1))
    warm = load.warmup_requests or min(2 * load.concurrency, load.num_requests - 1)
    return replace(load, arrival_s=arrival, warmup_requests=warm)


def _cluster_sheet(result: Any) -> dict[str, Any]:
    """What only a run of several engines has."""
    return {
        "router": result.router, "replicas": result.steps.replicas, "retries": int(result.retries.sum()),
        "moved_bytes": float(result.moved_bytes.sum()), "replica_s": result.replica_s,
        "requests_by_replica": {int(i): int((result.replica == i).sum()) for i in sorted(set(result.replica.tolist()))},
    }  # fmt: skip


def _takes_every_step(built: Deployment, policy: str) -> bool:
    """Whether no compiled version serves this: a run then takes milliseconds a request."""
    from bstar.sim.ways import way_of

    return way_of(policy, built.engine.name, built.parallel.attention_dp).name in ("swap", "speculative")


def _compare(built: Deployment, load: Traffic, slo: Slo | None, names: str, cluster: dict[str, Any] | None,
             as_json: bool) -> None:
    from bstar.sim.compare import DISAGGREGATED, compared, serve_as, wanted_names

    wanted = wanted_names(names.split(","), built.engine.name)
    if DISAGGREGATED in wanted and cluster is None:
        cluster = {}

    def serve(name: str) -> SimResult:
        with _progress(name) as report:
            return serve_as(built, load, name, cluster=cluster, slo=slo, progress=report)

    comparison = compared(wanted, serve)
    if as_json:
        output.print_json(
            comparison.to_dict() | {"load": describe_traffic(load), "deployment": describe(built)})
    elif comparison.results:
        show_comparison(built, load, comparison)
    else:
        click.echo(f"interrupted before {wanted[0]} had served all requests: nothing to compare", err=True)
    if comparison.interrupted:
        click.get_current_context().exit(_INTERRUPTED)


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar on stderr in a terminal, once the run has taken a while. Compiling is told anywhere."""
    with compiling_told(), _bar(what) as bar:
        meta, terminal = click.get_current_context().meta, sys.stderr.isatty()

        def report(done: int, total: int, clock_s: float) -> None:
            meta[_BEGUN] = True
            if terminal:
                bar(done, total, clock_s)

        yield report
        meta[_BEGUN] = True


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    begun, shown = time.perf_counter(), 0.0

    def report(done: int, total: int, clock_s: float) -> None:
        nonlocal shown
        now = time.perf_counter()
        if now - begun < _SILENT_S or now - shown < 0.1:
            return
        shown = now
        filled = round(30 * done / max(total, 1))
        click.echo(f"\r{what} [{'#' * filled}{'.' * (30 - filled)}] {done:,} of {total:,} · "
                   f"{format_seconds(clock_s)} simulated ", nl=False, err=True)

    try:
        yield report
    finally:
        if shown:
            click.echo("\r" + " " * 100 + "\r", nl=False, err=True)
