"""`bstar plan`: which GPUs, how many, split how, with which flags, at what cost."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError, UnitError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.deploy import (
    listed,
    note_model,
    note_overridden,
    note_unknown,
    profile_option,
    range_text,
)
from bstar.interfaces.cli.heartbeat import compiling_told
from bstar.interfaces.cli.load import load_options, slo_options, take_slo, take_workload
from bstar.interfaces.cli.params import (
    BANDWIDTH,
    DEVICE_SIZE,
    ENGINE_INT,
    FLOAT,
    MODEL_LEN,
    POSITIVE,
    apply,
    by_hand_options,
    complete_gpus,
    complete_models,
    json_option,
    take_by_hand,
)
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_seconds, format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bstar.planning.results import Candidate, Percentiles, PlanResult, Simulated
    from bstar.specs.slo import Slo
    from bstar.specs.workload import Workload

_EPILOG = """\b
Examples:
  bstar plan llama-3.1-70b --gpu h100,h200,l40s --input 2000 --output 300 --rate 5 --slo ttft=1s,tpot=40ms
  bstar plan qwen3-32b --gpu h100 --weight-dtype auto,fp8 --input lognormal:mean=1500,cv=1 --output 400 \\
      --concurrency 100 --slo chat --attainment 0.95
  bstar plan llama-3.1-8b --gpu l40s --input 512 --output 128 --slo tpot=30ms      # what one replica carries
  bstar plan llama-3.3-70b --gpu h100 --input 2000 --output 500 --rate 6 --slo chat --simulate 3
  bstar plan deepseek-r1 --gpu h200 --trace requests.csv --max-gpus 32 --price h200=2.8 --json
Exit code 1: nothing feasible (the reasons are printed).
"""

# What of a launch command the plan keeps; the layout is the plan's to choose.
_KEPT = ("engine", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization", "block_size",
         "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enforce_eager")


@click.command("plan", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_models)
@apply(
    click.option("--gpu", "gpus", metavar="G[,G…]", multiple=True, shell_complete=complete_gpus,
                 help="Device ids or aliases to choose from."),
    load_options,
    slo_options,
    click.option("--max-gpus", type=POSITIVE, metavar="N", help="GPUs of all replicas together, at most."),
    click.option("--price", "prices", metavar="G=USD", multiple=True, help="USD per GPU and hour, over the catalog's."),
    click.option("--weight-dtype", metavar="D[,D…]", help="Weight dtypes to try (default: auto, the checkpoint's)."),
    click.option("--kv-cache-dtype", "--kv-dtype", "kv_cache_dtype", metavar="D[,D…]", help="KV cache dtypes to try."),
    click.option("--peak-factor", type=FLOAT, default=1.0, metavar="F",
                 help="Size for rate × F; cost at the mean rate."),
    click.option("--headroom", type=FLOAT, default=0.0, metavar="F",
                 help="Share of the capacity to keep free (0–1)."),
    click.option("--top", type=POSITIVE, default=10, show_default=True, metavar="N", help="Candidates to print."),
    click.option("--simulate", type=POSITIVE, metavar="N",
                 help="Simulate the N best candidates request by request; their capacity, replicas, cost and order are "
                 "then those of the simulation."),
    click.option("--fast", is_flag=True, help="Closed forms only (the default)."),
    click.option("--executor", metavar="local|ray[://…]", default="local", help="Where candidates are evaluated."),
    click.option("--engine", metavar="NAME[@VERSION]", help="vllm, sglang or trtllm."),
    click.option("--max-num-seqs", type=ENGINE_INT, metavar="N",
                 help="Sequences in one step: fixes what the plan would choose."),
    click.option("--max-num-batched-tokens", type=ENGINE_INT, metavar="N", help="Token budget of one step."),
    click.option("--max-model-len", type=MODEL_LEN, metavar="N", help="Default: what the load needs."),
    click.option("--gpu-memory-utilization", type=FLOAT, metavar="F"),
    click.option("--block-size", type=ENGINE_INT, metavar="N", hidden=True),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None),
    click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=None),
    click.option("--async-scheduling/--no-async-scheduling", default=None),
    click.option("--enforce-eager", is_flag=True, default=None),
    click.option("--from-command", metavar='"vllm serve …"', help="Take model and engine flags from a launch command."),
    click.option("--allow-unknown-flags", is_flag=True,
                 help="Go on where the command holds a flag that its engine does not have."),
    click.option("--gpu-memory", "gpu_memory_bytes", type=DEVICE_SIZE, metavar="SIZE",
                 help="Instead of the catalog's: 80GB, 80GiB."),
    click.option("--bandwidth", "bandwidth_bytes_per_s", type=BANDWIDTH, metavar="SIZE/s",
                 help="Instead of the catalog's."),
    by_hand_options(hidden=True),
    profile_option,
    json_option,
)
@click.pass_context
def plan(ctx: click.Context, /, model_name: str | None, gpus: tuple[str, ...], prices: tuple[str, ...], top: int,
         as_json: bool, **options: Any) -> None:
    """Candidates for a load and an SLO, best first: GPUs, replicas, layout, flags, latency, cost, launch command.

    Without --rate or --concurrency: what one replica carries inside the SLO.
    """
    from bstar.codec.resolve import resolve_model
    from bstar.planning.plan import plan as planned

    executor = options.pop("executor")
    if options.pop("fast") and options["simulate"]:
        raise SpecError("--simulate: asks for more than --fast; leave one out")
    if executor != "local":
        raise SpecError(f"--executor: {executor[:40]!r} is not available in this version; use local")
    workload = take_workload(options, required=True)
    slo = take_slo(options)
    keywords = _engine_keywords(options)
    said = keywords.pop("model", None)
    name = model_name or said
    if said is not None:
        note_overridden({"model": said}, {"model": name})
    if name is None:
        raise SpecError("model: none given; say MODEL or --from-command")
    overrides = take_by_hand(options)
    keywords |= {"weight_dtypes": options["weight_dtype"] or keywords.pop("weight_dtype", None),
                 "kv_cache_dtypes": options["kv_cache_dtype"] or keywords.pop("kv_cache_dtype", None)}
    devices = _devices(gpus, options["gpu_memory_bytes"], options["bandwidth_bytes_per_s"])
    model = resolve_model(name, overrides=overrides, config_overrides=keywords.pop("hf_overrides", None))
    note_model(model, name)
    with compiling_told() if options["simulate"] else nullcontext():
        result = planned(
            model, devices, workload, slo, max_gpus=options["max_gpus"],
            prices=_prices(prices, devices), peak_factor=options["peak_factor"], headroom_fraction=options["headroom"],
            most_candidates=max(top, 20), profile=options["profile"], simulate=options["simulate"] or 0, **keywords)
    if as_json:
        output.print_json(result)
    else:
        assert workload is not None
        _show(result, workload, slo, top)
    ctx.exit(0 if result.feasible else 1)


def _engine_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Engine flags of the command and of the options; a layout in the command is named and left to the plan."""
    keywords: dict[str, Any] = {}
    command, allow_unknown = options.pop("from_command"), bool(options.pop("allow_unknown_flags"))
    if command is not None:
        from bstar.codec.engine_command import parse_command

        parsed = parse_command(command)
        kept = (*_KEPT, "weight_dtype", "kv_cache_dtype", "hf_overrides")
        keywords = {k: v for k, v in parsed.settings.items() if k in kept}
        keywords["engine"] = parsed.engine_at_version
        if parsed.model is not None:
            keywords["model"] = parsed.model
        left = [f"{k} {v}" for k, v in parsed.settings.items() if k not in keywords]
        left += [flag for flag in parsed.unmodelled if flag not in parsed.without_effect]
        if left:
            output.warn(f"left to the plan or not modelled: {listed(left)}")
        note_unknown(parsed, allow=allow_unknown)
    flags = {key: value for key in _KEPT if (value := options.pop(key)) is not None}
    note_overridden(keywords, flags)
    keywords |= flags
    if keywords.get("max_model_len") == -1:
        keywords.pop("max_model_len")  # the plan takes the length that the load needs
    return keywords


def _devices(gpus: tuple[str, ...], memory: int | None, bandwidth: float | None) -> list[Any]:
    from bstar.catalog.devices import get_device, with_overrides
    from bstar.codec.engine_limits import check_figures

    check_figures(memory, bandwidth)
    names = [g.strip() for text in gpus for g in text.split(",") if g.strip()]
    if not names:
        raise SpecError("gpu: none given; say --gpu G[,G…] (bstar catalog devices lists them)")
    return [with_overrides(get_device(g), memory_bytes=memory, bandwidth_bytes_per_s=bandwidth) for g in names]


def _prices(texts: tuple[str, ...], devices: list[Any]) -> dict[str, float]:
    """USD per GPU and hour by name. Raises for a GPU that is not planned with: a price that counts for nothing."""
    from bstar.catalog.devices import get_device

    found: dict[str, float] = {}
    for part in (p for text in texts for p in text.split(",") if p.strip()):
        name, sign, usd = part.partition("=")
        try:
            value = float(usd.strip().removeprefix("$"))
        except ValueError:
            value = -1.0
        if not sign or not 0 <= value < float("inf"):
            raise UnitError(f"--price: {part!r} is not a price; write it like h100=2.49 (USD per GPU and hour)")
        if get_device(name.strip()).id not in {d.id for d in devices}:
            raise SpecError(f"--price: {name.strip()} is not among --gpu {','.join(d.id for d in devices)}; "
                            "give the price of one of these")
        found[name.strip()] = value
    return found


def _show(result: PlanResult, workload: Workload, slo: Slo | None, top: int) -> None:
    parts: list[Any] = [output.heading(result.model, f"{_load(workload)} · {_limits(slo)}")]
    if not result.feasible:
        parts.append(output.line("nothing is feasible:", style="bold red"))
        parts += [output.line(f"  {summary}") for summary in result.rejected_summary()]
        output.show(*parts)
        return
    parts.append(_table(result.candidates[:top], fixed_load=workload.rate_per_s is not None))
    source = _source(result.candidates[:top])
    parts += [output.line(f"TTFT and TPOT: p95, expected by {source}, not measured; req/s: what all replicas carry "
                          "inside the SLO; * no other is both cheaper and faster", style="dim"), output.line("")]
    parts += _best(result.best)
    parts += [output.line(f"rejected: {summary}", style="dim") for summary in result.rejected_summary()]
    parts += [output.line("note: " + n, style="yellow") for n in result.notes]
    output.show(*parts)


def _source(shown: Sequence[Candidate]) -> str:
    if not any(c.simulated for c in shown):
        return "closed forms"
    return "simulation" if all(c.simulated for c in shown) else "simulation (~ closed forms)"


def _load(w: Workload) -> str:
    lengths = f"{w.input_tokens.mean:,.0f} in / {w.output_tokens.mean:,.0f} out"
    if w.rate_per_s is not None:
        return f"{lengths} at {w.rate_per_s:,.4g} req/s"
    if w.concurrency is not None:
        return f"{lengths} from {w.concurrency:,} client{'' if w.concurrency == 1 else 's'}"
    return f"{lengths}, as much as one replica carries"


def _limits(slo: Slo | None) -> str:
    if slo is None or slo.is_empty:
        return "no SLO: throughput"
    limits = ", ".join(f"{label} ≤ {format_seconds(value)}" for label, value in (
        ("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s)) if value is not None)
    return f"{limits} for {100 * slo.attainment_fraction:.4g}% of requests"


def _table(shown: tuple[Candidate, ...], *, fixed_load: bool) -> Any:
    """A row a candidate; a column that says the same in every row is left out."""
    mixed = any(c.simulated for c in shown)

    def p95(c: Candidate, name: str) -> str:
        found: Percentiles = getattr(c.expected, name)
        return "~" * (mixed and c.simulated is None) + format_seconds(found.p95)

    columns: list[tuple[str, list[str]]] = [
        ("", [f"{i}{'*' if c.pareto else ''}" for i, c in enumerate(shown, 1)]),
        ("GPUs", [f"{c.num_gpus} × {c.deployment.device.id}" for c in shown]),
        ("replica", [_replica(c) for c in shown]),
    ]
    for name, formats in (("weights", [c.deployment.model.weight_dtype for c in shown]),
                          ("KV", [c.deployment.kv_format.name for c in shown])):
        if len(set(formats)) > 1:
            columns.append((name, formats))
    left = range(1, len(columns))
    columns += [
        ("seqs", [f"{c.deployment.engine.max_num_seqs:,}" for c in shown]),
        ("TTFT", [p95(c, "ttft_s") for c in shown]),
        ("TPOT", [p95(c, "tpot_s") for c in shown]),
        ("req/s", [f"{c.capacity_requests_per_s:,.3g}" for c in shown]),
    ]
    if not fixed_load:
        columns.append(("tok/s", [f"{c.output_tokens_per_s:,.0f}" for c in shown]))
    columns += [
        ("$/h", [format_usd(c.cost.usd_per_hour) for c in shown]),
        ("$/Mtok", [format_usd(c.cost.usd_per_million_output_tokens) for c in shown]),
        ("bound by", [_BOUNDS.get(c.bound_by, c.bound_by) for c in shown]),
    ]
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    names = [name for name, _ in columns]
    return output.table(names, rows, left=(*left, len(columns) - 1),
                        spare=[names.index(name) for name in ("bound by", "$/Mtok")])


def _replica(c: Candidate) -> str:
    """ "2 × TP4·EP4": replicas and the layout of one; DPA is data-parallel attention."""
    layout = str(c.layout).replace("DP-attention", "DPA")
    return f"{c.replicas} × {layout}" if c.replicas > 1 else layout


_BOUNDS = {"weight_bandwidth": "weights", "kv_bandwidth": "KV reads", "kv_capacity": "KV space", "max_num_seqs": "seqs",
           "token_budget": "budget", "communication": "links"}


def _best(c: Candidate) -> list[Any]:
    p, seen, marks = c.predicted, c.expected, c.landmarks
    percentiles = [
        (label, *(format_seconds(v) for v in (x.mean, x.p50, x.p95, x.p99)), range_text(seen.ranges.get(name)))
        for label, name, x in (
            ("TTFT", "ttft_s", seen.ttft_s), ("TPOT", "tpot_s", seen.tpot_s), ("E2E", "e2e_s", seen.e2e_s))]
    known = [f"ranges: {one.basis}" for one in list(seen.ranges.values())[:1]]
    walls = " · ".join(f"{label} {marks[name]:,.0f}" for name, label in (
        ("b_star", "B*"), ("b_gemm", "B_gemm"), ("b_mem", "B_mem"), ("b_slo", "B_slo")) if marks.get(name) is not None)
    facts = [
        ("meets the SLO", f"{c.slo_attainment_fraction:.2%}", f"goodput {c.goodput_requests_per_s:,.4g} requests/s of "
         f"{c.requests_per_s:,.4g}; headroom {c.headroom_fraction:+.0%}"),
        ("in flight", f"{p.in_flight:,.1f}", f"a replica, of {walls}"),
        ("prefill", f"{p.prefill_fraction:.0%}", f"of a replica's time; step {format_seconds(p.step_s)}; "
         f"{p.queued_fraction:.1%} of requests queue"),
    ]
    if c.simulated is not None:
        facts.append(("simulated", f"{c.simulated.num_requests:,} requests", _simulated(c, c.simulated)))
    return [
        output.heading("best", f"{c.num_gpus} × {c.deployment.device.name}, {c.replicas} × {c.layout}, "
                       f"{c.deployment.model.weight_dtype} weights, {c.deployment.kv_format.name} KV"),
        output.table(("", "mean", "p50", "p95", "p99", "80 % of means"), percentiles), output.facts(facts),
        *[output.line("  " + text, style="dim") for text in known],
        *[output.line("  note: " + n, style="dim") for n in c.notes],
        output.line(""), output.verbatim("  " + c.launch_command),
    ]


def _simulated(c: Candidate, seen: Simulated) -> str:
    """How sure the share inside the SLO is, and what closed forms had said."""
    parts = ["of one replica"]
    low, high = seen.attainment_low, seen.attainment_high
    if low is not None and high is not None:
        parts.append(f"95 % interval of the share inside the SLO {low:.2%} to {high:.2%}")
    if seen.num_preemptions:
        parts.append(f"{seen.num_preemptions:,} preemptions")
    parts.append(f"closed forms said {seen.closed_form_replicas} "
                 f"replica{'' if seen.closed_form_replicas == 1 else 's'}, "
                 f"{seen.closed_form_capacity_requests_per_s:,.4g} requests/s")
    return "; ".join(parts)
