"""`bstar diagnose`: which wall a running server stands at, with the evidence and what would move it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.connection import connection_options, metrics_at, take_connection
from bstar.interfaces.cli.deploy import deploy_options, take_optional_deployment
from bstar.interfaces.cli.params import POSITIVE, SECONDS, apply, complete_models, json_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from bstar.measure.server.snapshot import Snapshot
    from bstar.measure.telemetry.table import Telemetry
    from bstar.tuning.diagnosis import Diagnosis

_EPILOG = """\b
Examples:
  bstar diagnose --url http://127.0.0.1:8000
  bstar diagnose llama-3.1-8b --gpu h100 --max-num-seqs 64 --url http://127.0.0.1:8000 --window 60s
  bstar diagnose --from-command "vllm serve Qwen/Qwen3-8B --max-num-seqs 64" --gpu h100 --url http://gpu-7:8000
  bstar diagnose --url http://127.0.0.1:8000 --telemetry dmon.log
  bstar diagnose --url http://127.0.0.1:8000 --watch
  bstar diagnose --run runs/bench-20261130-101500

Counters alone tell idle, KV capacity, max_num_seqs and the token budget. What a step is bound by, and what each knob
would do, needs the model and GPU that are served (MODEL and --gpu, or --from-command); --profile makes the
predictions those of this server. It only reads /metrics: no load of its own. Whether the client is the limit, a server
cannot tell: --run, the run of bstar bench, can.
"""


@click.command("diagnose", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_models)
@apply(
    click.option("--url", metavar="URL", help="The server, or its metrics."),
    click.option("--run", "folder", type=click.Path(path_type=Path), metavar="DIR",
                 help="Instead of a running server: a run of bstar bench, and how its client did."),
    click.option("--window", type=SECONDS, default="30s", show_default=True, metavar="T", help="How long to look."),
    click.option("--interval", type=SECONDS, default="1s", show_default=True, metavar="T", help="Between scrapes."),
    click.option("--telemetry", metavar="FILE|nvml|URL",
                 help="GPU counters: a log of nvidia-smi, this machine's NVML, or a DCGM exporter."),
    click.option("--mean-input", type=POSITIVE, metavar="N", help="Prompt tokens, where the server shows none."),
    click.option("--mean-output", type=POSITIVE, metavar="N", help="Answer tokens, likewise."),
    click.option("--watch", "watching", is_flag=True, help="Look again and again, in place (Ctrl-C ends it)."),
    connection_options, deploy_options, json_option,
)
def diagnose(
    model_name: str | None, url: str | None, folder: Path | None, window: float, interval: float, telemetry: str | None,
    mean_input: int | None, mean_output: int | None, watching: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Name the wall that a running server stands at, from its own counters, and what would move it."""
    from bstar.tuning.diagnosis import diagnose as diagnosed
    from bstar.tuning.diagnosis import diagnose_evidence, watch

    if (url is None) == (folder is None):
        raise SpecError("--url: give a running server, or --run with a folder of bstar bench (one of the two)")
    if folder is not None:
        _refuse_live_options(watching=watching, telemetry=telemetry)
    if watching and as_json:
        raise SpecError("--watch: shows a live view; leave --json out")
    if interval >= window:
        raise SpecError(f"--interval: {format_seconds(interval)} between scrapes leave none inside a window of "
                        f"{format_seconds(window)}; give a shorter --interval or a longer --window")
    connection = take_connection(options)
    seats, budget = options.get("max_num_seqs"), options.get("max_num_batched_tokens")
    built = take_optional_deployment(model_name, options)
    if folder is not None:
        from bstar.tuning.recorded import evidence_in

        seen = evidence_in(folder, max_num_seqs=seats, max_num_batched_tokens=budget)
        _print(diagnose_evidence(seen, built, input_tokens=mean_input, output_tokens=mean_output), as_json)
        return
    assert url is not None
    source = metrics_at(url, connection)
    logged = _log(telemetry) is not None  # what is no log is an error now, not at the end

    def look(on_scrape: Any = None) -> Diagnosis:
        started_s = time.time()
        with _Gpus(None if logged else telemetry, interval) as gpus:
            seen = watch(source, window_s=window, interval_s=interval, on_scrape=on_scrape)
        log = _log(telemetry)  # it may have grown meanwhile
        found = gpus.seen if log is None else log.inside(started_s, time.time())
        return diagnosed(seen, built, telemetry=found, max_num_seqs=seats,
                         max_num_batched_tokens=budget, input_tokens=mean_input, output_tokens=mean_output)

    if watching:
        _watch(look)
        return
    _print(look(), as_json)


def _refuse_live_options(*, watching: bool, telemetry: str | None) -> None:
    """A run holds its own window and samples."""
    context = click.get_current_context()
    given = [f"--{name}" for name in ("window", "interval")
             if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE]
    given += ["--watch"] if watching else []
    given += ["--telemetry"] if telemetry is not None else []
    if given:
        raise SpecError(f"{given[0]}: is for a running server; a run holds its own")


def _print(found: Diagnosis, as_json: bool) -> None:
    if as_json:
        output.print_json(found.to_dict())
    else:
        output.show(*_parts(found))


def _log(telemetry: str | None) -> Telemetry | None:
    """The telemetry of a file; None for a live source."""
    if telemetry is None or telemetry == "nvml" or "://" in telemetry:
        return None
    from bstar.measure.telemetry.smi_log import read_smi_log

    return read_smi_log(Path(telemetry))


class _Gpus:
    """GPU samples taken while a window is watched; `seen` is None without a source."""

    def __init__(self, place: str | None, interval_s: float) -> None:
        self.place, self.interval_s = place, interval_s
        self.seen: Telemetry | None = None

    def __enter__(self) -> _Gpus:
        from bstar.measure.telemetry.watch import DcgmExporter, GpuObserver, Nvml

        self._observer = None
        if self.place is not None:
            source = Nvml() if self.place == "nvml" else DcgmExporter(self.place)
            source.read()  # a source that shows nothing is an error now, not at the end
            self._observer = GpuObserver(source, interval_s=self.interval_s)
            self._observer.start(0.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            self._observer.stop()
            self.seen = self._observer.telemetry


def _watch(look: Any) -> None:
    """A live view: the last diagnosis, and the gauges of the window under way."""
    from rich.console import Group
    from rich.live import Live

    parts: list[Any] = [output.line("looking …", style="dim")]
    with Live(Group(*parts), console=output.console(), auto_refresh=False, screen=False) as live:

        def on_scrape(snapshot: Snapshot) -> None:
            live.update(Group(*parts, output.line(_gauges(snapshot), style="dim")), refresh=True)

        while True:
            found = look(on_scrape)
            parts = _parts(found)
            live.update(Group(*parts), refresh=True)


def _gauges(snapshot: Snapshot) -> str:
    shown = [f"{name} {snapshot.gauges[name]:,.4g}" for name in ("running", "waiting", "kv_usage_fraction")
             if name in snapshot.gauges]  # fmt: skip
    return "now: " + ", ".join(shown)


def _parts(found: Diagnosis) -> list[Any]:
    seen = found.evidence
    parts: list[Any] = [output.heading(found.finding.title, f"{seen.engine}, {format_seconds(seen.duration_s)} seen, "
                                       f"{seen.scrapes} scrapes")]
    parts += [output.line("  " + text) for text in found.finding.because]
    if found.finding.also:
        parts.append(output.line("  beside it: " + ", ".join(w.replace("_", "-") for w in found.finding.also)))
    parts += [output.line(""), output.facts(_facts(found))]
    if found.effects:
        rows = [(e.change, _times(e.throughput), _times(e.ttft), _times(e.tpot), e.failed or e.reason)
                for e in found.effects]
        parts += [output.line(""), output.table(("what would move it", "tok/s", "TTFT", "TPOT", ""), rows)]
        if found.best is not None:
            parts.append(output.line(f"{found.best.change}:"))
            parts.append(output.verbatim(found.best.command))
        elif any(e.throughput is not None for e in found.effects):
            suffers = "TTFT" if found.requests_wait else "throughput"
            parts.append(output.line(f"none of them is predicted to better {suffers}"))
    parts += [output.line("note: " + note, style="dim") for note in found.notes]
    return parts


def _times(value: float | None) -> str:
    return "–" if value is None else f"× {value:.2f}"


def _facts(found: Diagnosis) -> list[tuple[str, ...]]:
    seen, use = found.evidence, found.use
    seats = "" if seen.seats is None else f"{'more than the' if seen.outrun else 'of'} {seen.seats:,} seats"
    if "max_num_seqs" in seen.assumed:
        seats += " (the engine's default, not told)"
    facts: list[tuple[str, ...]] = [
        ("running", output.number(seen.mean_running), seats), ("waiting", output.number(seen.mean_waiting), ""),
        ("KV use", output.percent(seen.kv_usage.mean() if seen.kv_usage.size else None),
         f"{output.number(seen.preemptions)} preemptions"),
        ("output", f"{output.number(seen.seen.rate('generated_tokens'))} tok/s",
         f"{output.number(seen.seen.rate('prompt_tokens'))} prompt tok/s"),
        ("step", format_seconds(seen.step_s), f"{output.number(seen.step_tokens)} tokens"),
    ]  # fmt: skip
    for label, name in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("queue", "queue_s")):
        value = seen.mean_of(name)
        if value == value:
            facts.append((label, format_seconds(value), "mean, as the server says"))
    if use is not None:
        facts.append(("MBU / MFU", f"{use.mbu:.0%} / {use.mfu:.0%}", use.basis))
        facts.append(("predicted step", format_seconds(use.predicted_s),
                      f"the measured one is × {use.step_s / use.predicted_s:.2f}"))
    if seen.telemetry is not None:
        facts += _gpu_facts(seen.telemetry)
    return facts


def _gpu_facts(telemetry: Telemetry) -> list[tuple[str, ...]]:
    """What the source shows, means over samples and GPUs."""
    shown = {name: telemetry.mean(name) for name in (
        "gpu_busy_fraction", "memory_busy_fraction", "dram_active_fraction", "tensor_active_fraction", "power_w",
        "memory_used_bytes", "memory_total_bytes")}  # fmt: skip
    count = len({s.gpu for s in telemetry.samples})
    of_each = f"on average of {count} GPUs" if count > 1 else ""
    facts: list[tuple[str, ...]] = [("GPU samples", f"{len(telemetry.samples):,}", telemetry.source)]
    for label, name, note in (
        ("GPU busy", "gpu_busy_fraction", "of the time"),
        ("memory busy", "memory_busy_fraction", "of the time: no share of the bandwidth"),
        ("bandwidth used", "dram_active_fraction", "of the memory's"),
        ("tensor cores", "tensor_active_fraction", "of the time"),
    ):
        if shown[name] is not None:
            facts.append((label, output.percent(shown[name]), note))
    if shown["power_w"] is not None:
        facts.append(("power", f"{output.number(shown['power_w'])} W", of_each))
    used, total = shown["memory_used_bytes"], shown["memory_total_bytes"]
    if used is not None:
        facts.append(("GPU memory", format_bytes(used), of_each if total is None else f"of {format_bytes(total)}"))
    return facts
