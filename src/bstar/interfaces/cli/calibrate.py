"""`bstar calibrate`: from measured runs of a deployment to a profile that every other command predicts with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.files import check_writable
from bstar.interfaces.cli import output
from bstar.interfaces.cli.connection import connection_options, metrics_at, take_connection
from bstar.interfaces.cli.deploy import deploy_options, describe, headline, take_deployment
from bstar.interfaces.cli.params import SECONDS, apply, complete_models, json_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.calibration.observations import Observation
    from bstar.calibration.profile import Profile, ProfileConstant, ProfilePoint
    from bstar.measure.server.scraper import MetricsSource

_EPILOG = """\b
Examples:
  bstar calibrate runs/low runs/high --model llama-3.1-8b --gpu h100 --out mine.json
  bstar calibrate points.json --from-command "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 256" --gpu h100 \\
      --out mine.toml
  bstar simulate llama-3.1-8b --gpu h100 --profile mine.json --input 900 --output 200 --rate 6
RUNS are folders of bstar bench (of a sweep: a point for each load), results of vllm bench serve, GuideLLM, AIPerf or
inference-perf, files of measured points (.csv as for bstar validate), or .json, .toml, .yaml with
points: [{concurrency: 8, input_tokens: 512, output_tokens: 128, ttft_ms: 61, tpot_ms: 8.1}, …].
The lowest and the highest load say most; two to six runs are enough. --url takes what a running server shows of its
own load (no load is sent): one more point, over --window.
"""
_SCRAPE_INTERVAL_S = 1.0
_LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "ttft_p50_s": "TTFT p50",
           "tpot_p50_s": "TPOT p50", "output_tokens_per_s": "tok/s", "requests_per_s": "req/s"}


@click.command("calibrate", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("runs", metavar="RUNS…", nargs=-1, type=click.Path(path_type=Path))
@apply(
    click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the profile: .json or .toml."),
    click.option("--model", "model_name", metavar="MODEL", shell_complete=complete_models,
                 help="What was served (a name, a path, a Hub id)."),
    click.option("--url", "urls", metavar="URL", multiple=True,
                 help="A running server: what its /metrics show in --window is a point."),
    click.option("--window", "window_s", type=SECONDS, default="60s", show_default=True, metavar="TIME",
                 help="How long to look."),
    click.option("--name", metavar="NAME", help="Of the profile (default: that of the file)."),
    connection_options, deploy_options, json_option,
)
def calibrate(
    runs: tuple[Path, ...], out: Path | None, model_name: str | None, urls: tuple[str, ...], window_s: float,
    name: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Fit the step-time constants of one deployment to what was measured on it; --profile elsewhere uses them."""
    from bstar.calibration.few_points import calibrate as calibrated
    from bstar.calibration.observations import observations
    from bstar.calibration.profile import write_profile

    if options.get("profile") is not None:
        raise SpecError("--profile: a calibration starts from the fitted constants; leave it out")
    if out is not None and out.suffix.lower() not in (".json", ".toml"):
        raise SpecError(f"--out: {out.name} must end in .json or .toml")
    if not runs and not urls:
        raise SpecError("RUNS: none given; name runs of bstar bench, a file of points, or a server with --url")
    if urls and window_s <= _SCRAPE_INTERVAL_S:
        raise SpecError(f"--window: {format_seconds(window_s)} leaves no time between scrapes, one every "
                        f"{format_seconds(_SCRAPE_INTERVAL_S)}; give a longer one (--window 60s)")
    if out is not None:
        check_writable(out, what="--out")
    if model_name is None and options.get("from_command") is None and options.get("spec_file") is None:
        raise SpecError("model: none given; say it with --model, --from-command or --file")
    connection = take_connection(options)
    sources = [metrics_at(url, connection) for url in urls]
    built = take_deployment(model_name, options)
    points: list[Observation] = list(observations(runs)) if runs else []
    points += [_watched(source, window_s) for source in sources]
    profile = calibrated(built, points, name=name or (out.stem if out is not None else "calibrated"))
    if out is not None:
        write_profile(profile, out)
    if as_json:
        path = None if out is None else str(out)
        output.print_json(profile.to_dict() | {"deployment": describe(built), "path": path})
        return
    _show(profile, headline(built))
    if out is not None:
        output.warn(f"wrote {out}")


def _watched(source: MetricsSource, window_s: float) -> Observation:
    """What a server shows of the load that it has, over `window_s` seconds."""
    from bstar.calibration.sources import of_window
    from bstar.measure.server.snapshot import window
    from bstar.tuning.diagnosis import watch

    source.read()  # a server that shows nothing is an error now
    output.warn(f"watching {source.url} for {format_seconds(window_s)}")
    # Scrapes in between show a restart that the last one, far above the first again, does not.
    return of_window(window(watch(source, window_s=window_s, interval_s=_SCRAPE_INTERVAL_S)), name=source.url)


def _show(profile: Profile, detail: str) -> None:
    from bstar.calibration.profile import BANDWIDTH, PEAK, limits_of
    from bstar.latency.constants import constant_specs

    meanings = {name: spec.meaning for name, spec in constant_specs().items()}
    meanings |= {PEAK: "what the device computes at most over bstar's own guess of it",
                 BANDWIDTH: "what its memory moves at most over bstar's own guess of it"}
    points = [row for point in profile.points for row in _figures(point)]
    moved = [(c.name, _value(c.prior, limits_of(c.name)[2]), _value(c.value, limits_of(c.name)[2]), _error(c),
              meanings[c.name]) for c in profile.constants]
    parts: list[Any] = [
        output.heading(profile.scope.model, detail), output.line(""),
        output.heading("measured and predicted", "means of a run; off: calibrated prediction / measured − 1"),
        output.table(("load", "tokens", "", "measured", "fitted", "calibrated", "off"), points, left=(0, 1, 2)),
        output.line("  clients of a closed loop begin spread over one request's time, which does not count, unless a "
                    "point says start: burst or brings its requests; bstar simulate --start even is that load",
                    style="dim")
        if any(point.load == "concurrency" for point in profile.points) else output.line(""),
        output.line(""),
    ]
    if moved:
        parts += [output.heading("constants", "from the points and how far deployments scatter"),
                  output.table(("", "fitted", "calibrated", "± 1 sd", "meaning"), moved, left=(0, 4), fold=(4,))]
    else:
        parts.append(output.line("no constant moved: none brings the predictions nearer to the points"))
    parts += [output.line("note: " + note, style="yellow") for note in profile.notes]
    output.show(*parts)


def _figures(point: ProfilePoint) -> list[tuple[str, ...]]:
    load = f"{point.load_value:g} clients" if point.load == "concurrency" else f"{point.load_value:g} req/s"
    lengths = f"{point.input_tokens:,.0f} in / {point.output_tokens:,.0f} out"
    rows = []
    for number, (metric, after) in enumerate(point.after.items()):
        measured, before = point.measured[metric], point.before[metric]
        rows.append((load if not number else "", lengths if not number else "", _LABELS.get(metric, metric),
                     *(_figure(metric, v) for v in (measured, before, after)), f"{after / measured - 1:+.1%}"))
    return rows


def _figure(metric: str, value: float) -> str:
    return format_seconds(value) if not metric.endswith("_per_s") else f"{value:,.4g}"


def _value(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else f"{value:.3g}"


def _error(constant: ProfileConstant) -> str:
    return f"{constant.standard_error / constant.value:.0%}" if constant.value else "–"
