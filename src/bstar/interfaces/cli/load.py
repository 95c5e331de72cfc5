"""The LOAD and SLO options, the same for every command, and the Workload and Slo that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.params import COUNT, FLOAT, POSITIVE, RATE, SECONDS, apply

if TYPE_CHECKING:
    from bstar.specs.slo import Slo
    from bstar.specs.workload import Workload

length_options = apply(
    click.option("--input", "input_lengths", metavar="DIST",
                 help="Prompt tokens: 512, uniform:100-900, lognormal:mean=512,cv=1.2, …"),
    click.option("--output", "output_lengths", metavar="DIST", help="Answer tokens, written the same way."),
    click.option("--trace", type=click.Path(path_type=Path), metavar="FILE",
                 help="Lengths (and rate) of a trace: Azure CSV, Mooncake JSONL, BurstGPT CSV, own CSV/JSONL/Parquet."),
)

prefix_options = apply(
    click.option("--prefix", metavar="N[,hit=F]",
                 help="A prompt prefix of N tokens shared between requests, found cached by the share F (1)."),
    click.option("--prefix-tokens", type=COUNT, metavar="N", hidden=True),
    click.option("--prefix-hit-fraction", "--prefix-hit", "prefix_hit_fraction", type=FLOAT, metavar="F", hidden=True),
)

MOST_CLIENTS = 10_000_000
_LEAST_PERCENTAGE = 50  # nobody asks for less of an SLO: 99 is meant as 99 %, 1.5 is a slip

# A load for a simulation has these too; closed forms look at the steady state.
_RUN_LENGTH = {"num_requests": "--num-requests", "duration": "--duration", "seed": "--seed"}
run_options = apply(
    click.option("--num-requests", type=POSITIVE, metavar="N", hidden=True),
    click.option("--duration", type=SECONDS, metavar="T", hidden=True),
    click.option("--seed", type=COUNT, metavar="N", hidden=True),
)

load_options = apply(
    length_options,
    click.option("--rate", type=RATE, metavar="R", help="Open loop: requests per second (10, 600/min)."),
    click.option("--burstiness", type=FLOAT, metavar="F", help="Gamma shape of the gaps: 1 Poisson, below 1 burstier."),
    click.option("--concurrency", type=POSITIVE, metavar="C", help="Closed loop: clients."),
    prefix_options,
    run_options,
)

slo_options = apply(
    click.option("--slo", metavar="SLO",
                 help="ttft=500ms,tpot=50ms,e2e=10s or a preset: chat, autocomplete, streaming, agent, batch."),
    click.option("--attainment", type=FLOAT, metavar="F", help="Share of requests that must meet every limit (0.99)."),
)


def take_slo(options: dict[str, Any]) -> Slo | None:
    """The Slo of the options (removed from `options`), None where none was given."""
    text, attainment = options.pop("slo", None), options.pop("attainment", None)
    if text is None:
        if attainment is not None:
            raise SpecError("--attainment: is the share of requests that meet an SLO; give --slo with it")
        return None
    if attainment is not None and _LEAST_PERCENTAGE <= attainment <= 100:
        raise SpecError(f"--attainment: is a share of the requests, not a percentage; say {attainment / 100:g}")
    if attainment is not None and not 0 < attainment <= 1:
        raise SpecError(f"--attainment: is a share of the requests, above 0 and at most 1 (0.99), is {attainment:g}")
    from bstar.specs.slo import parse_slo

    return parse_slo(text, attainment_fraction=attainment)


def take_workload(options: dict[str, Any], *, required: bool) -> Workload | None:
    """The Workload of the options (removed from `options`); None where no lengths are given and none are required."""
    unused = [flag for key, flag in _RUN_LENGTH.items() if options.pop(key, None) is not None]
    if unused:
        output.warn(f"{', '.join(unused)}: not needed, closed forms describe the steady state")
    lengths = {key: options.pop(key, None) for key in ("input_lengths", "output_lengths", "trace")}
    shape: dict[str, Any] = {}
    for name, key in (("rate", "rate_per_s"), ("concurrency", "concurrency"), ("burstiness", "burstiness"),
                      ("prefix_tokens", "prefix_tokens"), ("prefix_hit_fraction", "prefix_hit_fraction")):
        value = options.pop(name, None)
        if value is not None:
            shape[key] = value
    if shape.get("concurrency", 1) > MOST_CLIENTS:
        raise SpecError(f"--concurrency: {shape['concurrency']} clients are no load of a server; "
                        f"at most {MOST_CLIENTS}")
    shape |= _prefix(options.pop("prefix", None))
    if shape.get("prefix_tokens") and "prefix_hit_fraction" not in shape:
        shape["prefix_hit_fraction"] = 1.0
    trace = lengths["trace"]
    if trace is not None:
        if lengths["input_lengths"] not in (None, "trace") or lengths["output_lengths"] not in (None, "trace"):
            raise SpecError("--trace: the lengths come from the trace; leave --input and --output out")
        return _from_trace(trace, shape)
    if lengths["input_lengths"] is None and lengths["output_lengths"] is None:
        if required:
            raise SpecError("load: no lengths given; say --input DIST --output DIST (like --input 2000 --output 300) "
                            "or --trace FILE")
        return None
    for key, flag in (("input_lengths", "--input"), ("output_lengths", "--output")):
        if lengths[key] is None:
            raise SpecError(f"{flag}: a load needs both --input and --output; {flag} is missing")
    from bstar.specs.workload import Workload
    from bstar.traffic.lengths import parse_lengths

    return Workload(input_tokens=parse_lengths(lengths["input_lengths"], field="--input"),
                    output_tokens=parse_lengths(lengths["output_lengths"], field="--output"), **shape)


def _prefix(text: str | None) -> dict[str, Any]:
    """prefix_tokens and prefix_hit_fraction of "1000" or "1000,hit=0.8"."""
    if text is None:
        return {}
    from bstar.codec.engine_values import engine_float
    from bstar.units import parse_count

    tokens, comma, rest = text.partition(",")
    found: dict[str, Any] = {"prefix_tokens": parse_count(tokens.removeprefix("tokens="), field="--prefix")}
    if comma:
        if not rest.strip().startswith("hit="):
            raise SpecError(f"--prefix: {text!r} is not a prefix; write it like 1000 or 1000,hit=0.8")
        found["prefix_hit_fraction"] = engine_float(rest.strip().removeprefix("hit="), field="--prefix hit")
    return found


def _from_trace(path: Path, shape: dict[str, Any]) -> Workload:
    from dataclasses import replace

    from bstar.traffic.traces import read_trace

    workload = read_trace(path).workload()
    if "concurrency" in shape:
        shape["rate_per_s"] = None
    return replace(workload, **shape)
