"""The LOAD options of commands that send requests one by one, and the Traffic that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli.params import COUNT, POSITIVE, RATE, SECONDS, apply

if TYPE_CHECKING:
    from bstar.traffic.load import Traffic
    from bstar.traffic.prefixes import PrefixGroups

DEFAULT_REQUESTS = 10_000
# Where every step is taken one by one.
FEWER_REQUESTS = 1_000

traffic_options = apply(
    click.option("--input", "input_lengths", metavar="DIST",
                 help="Prompt tokens: 512, uniform:100-900, lognormal:mean=512,cv=1.2, …"),
    click.option("--output", "output_lengths", metavar="DIST", help="Answer tokens, written the same way."),
    click.option("--trace", type=click.Path(path_type=Path), metavar="FILE",
                 help="Replay a trace: Azure CSV, Mooncake JSONL, BurstGPT CSV, own CSV/JSONL/Parquet."),
    click.option("--rate", type=RATE, metavar="R",
                 help="Open loop: requests per second (10, 600/min); with a trace its times are stretched to it."),
    click.option("--rate-curve", metavar="CURVE",
                 help="Open loop: diurnal:mean=5,peak=10, ramp:2-10,over=10min, step:0s=2,10min=8, spike:…"),
    click.option("--burstiness", type=float, metavar="F", help="Gamma shape of the gaps: 1 Poisson, below 1 burstier."),
    click.option("--concurrency", type=POSITIVE, metavar="C", help="Closed loop: clients."),
    click.option("--think", "think", metavar="T", help="Closed loop: seconds between an answer and the next request."),
    click.option("--num-requests", type=POSITIVE, metavar="N",
                 help=f"How many ({DEFAULT_REQUESTS:,}; 10 for each client; all of a trace)."),
    click.option("--duration", type=SECONDS, metavar="T", help="Open loop: send for so long."),
    click.option("--warmup-requests", type=COUNT, default=0, metavar="N", help="First requests, not measured."),
    click.option("--prefix", metavar="N[,hit=F]",
                 help="Prompts begin with one of some shared texts: 1000,hit=0.8,groups=50,zipf=1.1."),
    click.option("--prefix-tokens", type=COUNT, metavar="N", hidden=True),
    click.option("--prefix-hit-fraction", "--prefix-hit", "prefix_hit_fraction", type=float, metavar="F", hidden=True),
    click.option("--seed", type=COUNT, default=0, show_default=True, metavar="N", help="Of everything that is drawn."),
)

TRAFFIC_KEYS = ("input_lengths", "output_lengths", "trace", "rate", "rate_curve", "burstiness", "concurrency", "think",
         "num_requests", "duration", "warmup_requests", "prefix", "prefix_tokens", "prefix_hit_fraction", "seed")


def take_traffic(options: dict[str, Any], *, default_requests: int) -> tuple[Traffic, dict[str, Any]]:
    """The Traffic of the options (removed from `options`), and the values that it was made from.

    default_requests   of an open loop that says neither how many nor how long
    Raises SpecError where they describe none, or more than one.
    """
    given = {key: options.pop(key, None) for key in TRAFFIC_KEYS}
    open_loop = given["rate"] is not None or given["rate_curve"] is not None
    if open_loop and given["trace"] is None and given["num_requests"] is None and given["duration"] is None:
        given["num_requests"] = default_requests
    return build_traffic(given), given


def build_traffic(given: dict[str, Any], *, seed: int | None = None) -> Traffic:
    """The Traffic of option values, with another seed if one is given."""
    from bstar.traffic import closed_loop, gamma, poisson, varying

    given = given | {"seed": given["seed"] if seed is None else seed}
    _check(given)
    if given["trace"] is not None:
        return _from_trace(given)
    prefix = _prefix(given)
    common = {
        "input_tokens": given["input_lengths"], "output_tokens": given["output_lengths"],
        "num_requests": given["num_requests"], "seed": given["seed"], "prefix": prefix,
        "warmup_requests": given["warmup_requests"],
    }  # fmt: skip
    if given["concurrency"] is not None:
        return _fitting(closed_loop(given["concurrency"], **common, think_s=_think(given)), prefix)
    common["duration_s"] = given["duration"]
    if given["rate_curve"] is not None:
        return _fitting(varying(given["rate_curve"], **common), prefix)
    if given["burstiness"] is not None:
        return _fitting(gamma(given["rate"], given["burstiness"], **common), prefix)
    return _fitting(poisson(given["rate"], **common), prefix)


def _fitting(load: Traffic, prefix: PrefixGroups | None) -> Traffic:
    """The load, unless all prompts are shorter than the texts that they begin with: that is a slip."""
    if prefix is None or prefix.added:
        return load
    longest, mean = int(load.input_tokens.max()), prefix.tokens.mean
    if longest < mean and bool((load.prefix_tokens >= load.input_tokens)[load.prefix_group >= 0].all()):
        raise SpecError(
            f"--prefix: every prompt is shorter than its shared prefix ({longest:,} tokens against {mean:,.0f}); "
            "shorten the prefix, lengthen the prompts, or put it on top of them (,added)")
    return load


def _check(given: dict[str, Any]) -> None:
    loops = [flag for key, flag in (("rate", "--rate"), ("rate_curve", "--rate-curve"),
                                    ("concurrency", "--concurrency")) if given[key] is not None]
    if len(loops) > 1:
        raise SpecError(f"load: {' and '.join(loops)} contradict each other; give one")
    if given["trace"] is not None:
        for key, flag in (("input_lengths", "--input"), ("output_lengths", "--output")):
            if given[key] not in (None, "trace"):
                raise SpecError(f"{flag}: the lengths come from the trace; leave {flag} out")
        if given["rate_curve"] is not None:
            raise SpecError("--rate-curve: a trace has its own times; use --rate to speed it up")
        return
    for key, flag in (("input_lengths", "--input"), ("output_lengths", "--output")):
        if given[key] is None:
            raise SpecError(f"{flag}: a load needs lengths of prompts and answers; give {flag} DIST, or --trace FILE")
    if not loops:
        raise SpecError("load: nothing says how requests come; give --rate R, --concurrency C or --trace FILE")
    if given["concurrency"] is not None:
        if given["duration"] is not None:
            raise SpecError("--duration: a closed loop sends when a client is free; give --num-requests")
        if given["burstiness"] is not None:
            raise SpecError("--burstiness: a closed loop sends when a client is free; leave it out, or give --rate")
    elif given["duration"] is not None and given["num_requests"] is not None:
        raise SpecError("--duration: --num-requests also says where the load ends; give one of the two")
    elif given["think"] is not None:
        raise SpecError("--think: only clients of a closed loop think; give --concurrency")


def _from_trace(given: dict[str, Any]) -> Traffic:
    from bstar.traffic import from_trace

    return from_trace(
        given["trace"], rate_per_s=given["rate"], num_requests=given["num_requests"], end_s=given["duration"],
        start_s=None if given["duration"] is None else 0.0, concurrency=given["concurrency"], think_s=_think(given),
        burstiness=given["burstiness"], seed=given["seed"], warmup_requests=given["warmup_requests"],
    )  # fmt: skip


def _prefix(given: dict[str, Any]) -> PrefixGroups | None:
    from bstar.traffic.prefixes import parse_prefix_groups, prefix_groups

    if given["prefix"] is not None:
        return parse_prefix_groups(given["prefix"], field="--prefix")
    if given["prefix_tokens"]:
        fraction = given["prefix_hit_fraction"]
        return prefix_groups(given["prefix_tokens"], fraction=1.0 if fraction is None else fraction)
    return None


def _think(given: dict[str, Any]) -> Any:
    return 0.0 if given["think"] is None else given["think"]


def describe_traffic(load: Traffic) -> dict[str, Any]:
    """The load as JSON."""
    return {
        "name": load.name, "source": load.source or None, "num_requests": load.num_requests, "seed": load.seed,
        "mean_input_tokens": load.mean_input_tokens, "mean_output_tokens": load.mean_output_tokens,
        "rate_per_s": load.rate_per_s, "concurrency": load.concurrency,
    }  # fmt: skip
