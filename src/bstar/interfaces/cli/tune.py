"""`bstar tune`: which max_num_seqs to set, by measuring a running server or one that is started for each value."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import BstarError, SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.bench_options import named_by_options
from bstar.interfaces.cli.connection import connection_options, endpoint_at, take_connection
from bstar.interfaces.cli.deploy import deploy_options, take_optional_deployment
from bstar.interfaces.cli.load import slo_options, take_slo
from bstar.interfaces.cli.params import COUNT, POSITIVE, SECONDS, apply, complete_models, json_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.measure.run import Prepared
    from bstar.specs.deployment import Deployment
    from bstar.specs.slo import Slo
    from bstar.traffic.load import Traffic
    from bstar.tuning.advice import Reading
    from bstar.tuning.points import TunePoint
    from bstar.tuning.predicted import Predicted
    from bstar.tuning.state import TuneState

_EPILOG = """\b
Examples:
  bstar tune --url http://127.0.0.1:8000 --input 512 --output 128
  bstar tune llama-3.1-8b --gpu h100 --url http://127.0.0.1:8000 --input 512 --output 128 --slo tpot=40ms
  bstar tune --serve "vllm serve Qwen/Qwen3-8B --max-num-seqs {max_num_seqs}" --input 512 --output 128 --values 16..512
  bstar tune --serve "vllm serve M --max-num-seqs {max_num_seqs} --max-num-batched-tokens {max_num_batched_tokens}" \\
      --values 64,128 --budgets 2048,8192 --input 2000 --output 200 --rate 4 --slo ttft=1s,tpot=40ms

With --url the clients of a closed loop stand for the batch. With --serve the server is started, checked, measured and
stopped for each value, and the recommended one is measured against the engine's default. The same command with the
same --out goes on where it was interrupted. MODEL and --gpu lay the prediction beside what was measured (--gpu alone,
where --serve names the model).
"""
_ROUNDS, _FEWEST = 6, 48


@click.command("tune", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_models)
@apply(
    click.option("--url", metavar="URL", help="A running server, or where --serve will listen."),
    click.option("--serve", metavar="CMD", help="Start this for each value; it has {max_num_seqs} in it."),
    click.option("--values", metavar="LIST", help="max_num_seqs to try: 16,32,64 or 16..512  [default: 4..256]"),
    click.option("--budgets", metavar="LIST", help="max_num_batched_tokens to try, likewise."),
    click.option("--clients", metavar="LIST", help="With --url: clients to try  [default: doublings, then a search]"),
    click.option("--served-model", metavar="NAME", help="As the server calls it (default: the first that it serves)."),
    click.option("--input", "input_lengths", metavar="DIST", help="Prompt tokens: 512, lognormal:mean=512,cv=1.2, …"),
    click.option("--output", "output_lengths", metavar="DIST", help="Answer tokens, written the same way."),
    click.option("--rate", type=float, metavar="R", help="With --serve: requests per second."),
    click.option("--concurrency", type=POSITIVE, metavar="C",
                 help="With --serve: clients of a closed loop  [default: twice the largest value]"),
    click.option("--num-requests", type=POSITIVE, metavar="N",
                 help=f"Of each point  [default: {_ROUNDS} for each client, {_FEWEST} at least]"),
    click.option("--seed", type=COUNT, default=0, show_default=True, metavar="N"),
    click.option("--ready-timeout", type=SECONDS, default="600s", show_default=True, metavar="T",
                 help="With --serve: until the server answers."),
    click.option("--refine/--no-refine", default=True, show_default=True,
                 help="Measure up to three more values between those that the recommended one lies between."),
    click.option("--no-check", is_flag=True, help="With --serve: leave out the recommended value against the default."),
    click.option("--allow-client-limited", is_flag=True, help="Take points where the client was the limit as well."),
    click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where it is written (runs/tune-TIME)."),
    slo_options, connection_options, deploy_options, json_option,
)
def tune(model_name: str | None, as_json: bool, **options: Any) -> None:
    """Find max_num_seqs by measuring: the knee of your own mix, the walls, the SLO; the rule that binds is named."""
    from bstar.tuning.state import InterruptedTuningError, open_state
    from bstar.tuning.tune import summary_of

    mine = {name: options.pop(name) for name in (
        "url", "serve", "values", "budgets", "clients", "served_model", "input_lengths", "output_lengths", "rate",
        "concurrency", "num_requests", "seed", "ready_timeout", "refine", "no_check", "allow_client_limited",
        "out")}  # fmt: skip
    slo, mine["connection"] = take_slo(options), take_connection(options)
    _check(mine)
    _check_load(mine)
    if mine["serve"] and model_name is None and options.get("gpu") is not None:
        _take_served(mine["serve"], options)
    built = take_optional_deployment(model_name, options)
    state = open_state(_folder(mine["out"]), _settings(mine, slo))
    try:
        reading, loads = (_serve if mine["serve"] else _running)(mine, slo, state)
    except (KeyboardInterrupt, InterruptedTuningError):
        raise InterruptedTuningError(_interrupted(state)) from None
    except BaseException:
        _drop_empty(state)
        raise
    predicted = None if built is None else _predicted(built, reading, loads, slo, swept=bool(mine["serve"]))
    sheet = summary_of(reading, state, predicted)
    state.save({"result": sheet})
    if as_json:
        output.print_json(sheet)
    else:
        output.show(*_parts(reading, state, predicted, "max_num_seqs" if mine["serve"] else "clients"))


def _check(mine: dict[str, Any]) -> None:
    if not mine["url"] and not mine["serve"]:
        raise SpecError("--url: give the server, or --serve with the command that starts it")
    if not mine["input_lengths"] or not mine["output_lengths"]:
        raise SpecError("--input, --output: say what requests are like; the knee is that of your own mix")
    if mine["serve"]:
        from bstar.tuning.serve import check_template

        check_template(mine["serve"])
        if mine["clients"]:
            raise SpecError("--clients: is for a running server; with --serve give --values and a load")
        if mine["rate"] is not None and mine["concurrency"] is not None:
            raise SpecError("--rate, --concurrency: are two loads; give one")
        if "{max_num_batched_tokens}" in mine["serve"] and not mine["budgets"]:
            raise SpecError("--serve: {max_num_batched_tokens} needs --budgets")
        if mine["budgets"] and "{max_num_batched_tokens}" not in mine["serve"]:
            raise SpecError("--budgets: the command of --serve has no {max_num_batched_tokens}")
        return
    for name in ("values", "budgets", "rate", "concurrency"):
        if mine[name] is not None:
            raise SpecError(f"--{name}: is for --serve; a running server keeps its settings, --clients sets its batch")


def _check_load(mine: dict[str, Any]) -> None:
    """Refuse a load that cannot be made, by the names of its options, before a folder is made or a server started."""
    with named_by_options():
        if mine["rate"] is not None:
            _open(mine)
        else:
            _closed(mine, 1)


def _folder(out: Path | None) -> Path:
    if out is not None:
        return out
    from bstar.measure.folder import run_name

    return Path("runs") / run_name().replace("bench-", "tune-")


def _drop_empty(state: TuneState) -> bool:
    """What never began leaves nothing; whether it is gone."""
    gone = state.drop_if_empty()
    if gone and state.folder.parent == Path("runs"):
        with suppress(OSError):
            state.folder.parent.rmdir()
    return gone


def _interrupted(state: TuneState) -> str:
    if _drop_empty(state):
        return "interrupted: nothing was measured, nothing is kept"
    count = len(state.points)
    measured = f"{count} {'value is' if count == 1 else 'values are'} measured" if count else "no value is measured yet"
    return f"interrupted: {measured}; go on with the same options and --out {state.folder}"


def _settings(mine: dict[str, Any], slo: Slo | None) -> dict[str, Any]:
    """What makes points comparable."""
    names = ("url", "serve", "served_model", "input_lengths", "output_lengths", "rate", "concurrency", "num_requests",
             "seed")  # fmt: skip
    return {name: mine[name] for name in names} | {"slo": None if slo is None else str(slo)}


def _closed(mine: dict[str, Any], clients: int) -> Traffic:
    from bstar.traffic import closed_loop

    count = mine["num_requests"] or max(_ROUNDS * clients, _FEWEST)
    return closed_loop(clients, mine["input_lengths"], mine["output_lengths"], count, seed=mine["seed"],
                       warmup_requests=min(clients, count // 4))


def _take_served(template: str, options: dict[str, Any]) -> None:
    """What --serve starts is what is served, where a GPU is named and nothing else says it."""
    import shlex

    from bstar.codec.engine_command import parse_command
    from bstar.tuning.serve import default_command

    if options.get("from_command") is not None or options.get("spec_file") is not None:
        return
    command = shlex.join(default_command(template))
    with suppress(BstarError):  # a script of the user's own: then MODEL is asked for
        if parse_command(command).model is not None:
            options["from_command"] = command


def _prepare(mine: dict[str, Any], url: str) -> Prepared:
    from bstar.measure.run import prepare

    try:
        return prepare(endpoint_at(url, mine["connection"], model=mine["served_model"] or ""))
    except BstarError as error:  # which knows the option by its name in `bstar bench`
        raise type(error)(str(error).replace("--model", "--served-model")) from None


def _report(text: str) -> None:
    click.echo(f"measuring {text}", err=True)


def _running(mine: dict[str, Any], slo: Slo | None, state: TuneState) -> tuple[Reading, dict[int, Traffic]]:
    from bstar.measure.run import RunOptions
    from bstar.measure.sweeps import SweepPlan
    from bstar.tuning.tune import Probe, parse_values, tune_running

    loads = tuple(map(float, parse_values(mine["clients"], "--clients"))) if mine["clients"] else ()
    plan = SweepPlan(axis="concurrency", loads=loads, search=not loads, relative=0.25)
    probe = Probe(load=lambda c: _closed(mine, c),
                  options=RunOptions(slo=slo, allow_client_limited=mine["allow_client_limited"]))
    reading = tune_running(_prepare(mine, mine["url"]), probe, state, plan, slo=slo, report=_report,
                           refine=mine["refine"])
    return reading, {p.value: _closed(mine, p.value) for p in reading.points}


def _serve(mine: dict[str, Any], slo: Slo | None, state: TuneState) -> tuple[Reading, dict[int, Traffic]]:
    from bstar.measure.run import RunOptions
    from bstar.tuning.serve import url_of
    from bstar.tuning.tune import Probe, Served, default_values, parse_values, tune_served

    values = parse_values(mine["values"]) if mine["values"] else default_values()
    budgets = parse_values(mine["budgets"], "--budgets") if mine["budgets"] else ()
    load = _open(mine) if mine["rate"] is not None else _closed(mine, mine["concurrency"] or 2 * max(values))
    url = mine["url"] or url_of(mine["serve"])
    server = Served(template=mine["serve"], url=url, prepare=lambda: _prepare(mine, url), ready_s=mine["ready_timeout"],
                    say=lambda text: click.echo(text, err=True))
    probe = Probe(load=lambda _: load,
                  options=RunOptions(slo=slo, allow_client_limited=mine["allow_client_limited"]))
    reading = tune_served(server, probe, state, values, budgets, slo=slo, report=_report, check=not mine["no_check"],
                          refine=mine["refine"])
    return reading, {p.value: load for p in reading.points}


def _open(mine: dict[str, Any]) -> Traffic:
    from bstar.traffic import poisson

    count = mine["num_requests"] or max(int(60 * mine["rate"]), _FEWEST)
    return poisson(mine["rate"], mine["input_lengths"], mine["output_lengths"], count, seed=mine["seed"])


def _predicted(built: Deployment, reading: Reading, loads: dict[int, Traffic], slo: Slo | None, *,
               swept: bool) -> Predicted | None:
    from dataclasses import replace

    from bstar.tuning.predicted import mean_context, predict

    if not loads:
        return None

    def deployed(value: int) -> Deployment:
        return replace(built, engine=replace(built.engine, max_num_seqs=value)) if swept else built

    pairs = {value: (deployed(value), load) for value, load in loads.items()}
    decode = None if reading.decode is None else (reading.decode.a_s, reading.decode.b_s)
    return predict(built, pairs, mean_context(next(iter(loads.values()))), decode=decode, slo=slo)


# printing --------------------------------------------------------------------------------------------------


def drift(reading: Reading, again: TunePoint | None) -> float | None:
    """Throughput of the recommended value measured again over that of the sweep, where they differ by more than their
    95 % intervals allow; else None."""
    from math import hypot

    from bstar.tuning.tune import throughput_at

    found = None if again is None else throughput_at(reading.points, again.value)
    if again is None or found is None or again.half_width is None:
        return None
    rate, width = found
    apart = abs(again.throughput_per_s - rate) > hypot(width, again.half_width)
    return again.throughput_per_s / rate if apart else None


def _parts(reading: Reading, state: TuneState, predicted: Predicted | None, what: str) -> list[Any]:
    heads = [what, "tok/s", "± 95 %", "per token", "TTFT p99", "TPOT mean", "waiting", "preempted", "KV"]
    heads += ["predicted tok/s"] if predicted is not None else []
    rows = []
    for p in reading.points:
        row = [f"{p.value:,}", f"{p.throughput_per_s:,.4g}", _width(p), format_seconds(p.amortized_s),
               format_seconds(p.figures.get("ttft_s.p99")), format_seconds(p.figures.get("tpot_s.mean")),
               output.percent(p.server.get("waiting_share")), output.number(p.server.get("preemptions")),
               output.percent(p.server.get("kv_usage_max"))]  # fmt: skip
        if predicted is not None:
            row.append(output.number(predicted.throughput_per_s.get(p.value)))
        rows.append(tuple(row))
    parts: list[Any] = [output.table(tuple(heads), rows), output.line("")]
    parts.append(output.facts(_facts(reading, predicted, what)))
    advice = reading.advice
    if advice is not None:
        parts += [output.line(""), output.heading(f"{what} {advice.value:,}", f"{advice.reason} ({advice.sure}: "
                                                  f"{advice.range_text})")]
    if state.compared:
        parts += _compared(state)
        moved = drift(reading, state.compared.get("recommended"))
        if moved is not None:
            parts.append(output.line(f"note: measured again, the recommended value gives {moved - 1.0:+.0%} of "
                                     "throughput: the machine was not the same all the time", style="yellow"))
    parts += [output.line(f"{key} did not start: {why}", style="yellow") for key, why in state.failed.items()]
    parts += [output.line(f"{what} {p.value:,} is left out, no result of the server: {'; '.join(p.reasons)}",
                          style="yellow") for p in state.points if not p.valid]
    parts.append(output.line(f"written to {state.folder}", style="dim"))
    return parts


def _facts(reading: Reading, predicted: Predicted | None, what: str) -> list[tuple[str, ...]]:
    facts: list[tuple[str, ...]] = []
    if reading.knee.load is not None:
        interval = reading.knee_90
        below = "at most " if reading.knee.edge == "below" else ""
        facts.append(("5 % knee", f"{below}{reading.knee.load:.3g}", "of this mix" + (
            "" if interval is None else f"; 90 %: {interval[0]:.3g} to {interval[1]:.3g}")))
    fit = reading.decode
    if fit is not None:
        facts.append(("B* measured", f"{fit.b_star:.3g}",
                      f"step(B) = {format_seconds(fit.a_s)} + B · {format_seconds(fit.b_s)}; 90 %: {fit.low:.3g} to "
                      f"{fit.high:.3g}; another number than the knee"))
    for label, mark in (("waiting from", reading.waiting), ("preemption from", reading.preemption)):
        # Where max_num_seqs is swept under one load, that requests wait for a seat is meant.
        if mark.load is not None and not (mark is reading.waiting and what == "max_num_seqs"):
            facts.append((label, f"{mark.load:g}", "" if mark.low is None else f"not yet at {mark.low:g}"))
    if reading.slo.edge == "below":
        facts.append(("SLO met up to", "–", "not even at the smallest measured"))
    elif reading.slo.load is not None:
        open_end = reading.slo.edge == "above"
        facts.append(("SLO met up to", f"{'at least ' if open_end else ''}{reading.slo.load:g}",
                      "the largest measured" if open_end else f"not at {reading.slo.high:g}"))
    if reading.regions:
        facts.append(("regions", "", "; ".join(f"{n} {a:.3g}–{b:.3g}" for n, a, b in reading.regions)))
    if predicted is not None:
        marks = ", ".join(f"{n} {v:,.3g}" for n, v in predicted.landmarks.items() if v is not None)
        facts.append(("predicted", output.number(predicted.recommended), f"by rule {predicted.rule}; {marks}"))
        if predicted.bandwidth_fraction is not None:
            facts.append(("bandwidth", f"{predicted.bandwidth_fraction:.0%}",
                          "of the datasheet's, reached by reading one more cache"))
    return facts


def _compared(state: TuneState) -> list[Any]:
    """The recommended value and the engine's default side by side, and the gain in one line."""
    tails = ("ttft_s.p99", "tpot_s.p99", "e2e_s.p99")
    rows = [(name, f"{p.throughput_per_s:,.4g}", _width(p), *(format_seconds(p.figures.get(tail)) for tail in tails),
             output.number(p.server.get("preemptions"))) for name, p in state.compared.items()]
    parts = [output.line(""), output.table(
        ("measured again", "tok/s", "± 95 %", "TTFT p99", "TPOT p99", "E2E p99", "preempted"), rows)]
    best, usual = state.compared.get("recommended"), state.compared.get("default")
    if best is not None and usual is not None and usual.throughput_per_s:
        gains = [f"tok/s × {best.throughput_per_s / usual.throughput_per_s:.2f}"]
        for tail, label in zip(tails, ("TTFT p99", "TPOT p99", "E2E p99"), strict=True):
            one, other = best.figures.get(tail), usual.figures.get(tail)
            if one is not None and other:
                gains.append(f"{label} × {one / other:.2f}")
        parts.append(output.line("recommended against the default: " + ", ".join(gains)))
    return parts


def _width(point: TunePoint) -> str:
    """The 95 % interval of a point's throughput, as a share of it."""
    known = point.half_width is not None and point.throughput_per_s
    return f"{(point.half_width or 0.0) / point.throughput_per_s:.1%}" if known else "–"
