"""`bstar catalog`: the models, devices and engines that are known, each with its source."""

from __future__ import annotations

from typing import Any

import click

from bstar.interfaces.cli import output
from bstar.interfaces.cli.params import json_option
from bstar.units import format_count, format_rate, format_seconds, format_usd

_EPILOG = """\b
Examples:
  bstar catalog                       # what there is
  bstar catalog devices               # every device: memory, bandwidth, peaks
  bstar catalog devices h100-sxm-80gb # one device in full, with sources
  bstar catalog models qwen           # models whose names hold "qwen"
  bstar catalog engines vllm@0.19     # the defaults of one engine version
"""


@click.command("catalog", epilog=_EPILOG)
@click.argument("kind", type=click.Choice(["models", "devices", "engines"]), required=False)
@click.argument("name", required=False)
@click.option("--gpu", metavar="G", default="h100-sxm-80gb", show_default=True,
              help="The device that engine defaults are shown for.")
@json_option
def catalog(kind: str | None, name: str | None, gpu: str, as_json: bool) -> None:
    """List what the catalog holds, or one entry in full.

    A NAME that is no entry of its own filters the list by the text in it.
    """
    if kind is None:
        _overview(as_json)
    elif kind == "devices":
        _devices(name, as_json)
    elif kind == "models":
        _models(name, as_json)
    else:
        _engines(name, gpu, as_json)


def _overview(as_json: bool) -> None:
    from bstar.catalog.devices import device_ids
    from bstar.catalog.engines import ENGINES
    from bstar.catalog.models import entry_ids

    found = {"models": list(entry_ids()), "devices": list(device_ids()), "engines": list(ENGINES)}
    if as_json:
        output.print_json(found)
        return
    output.show(output.facts([(kind, str(len(names)), f"bstar catalog {kind}") for kind, names in found.items()]))


def _devices(name: str | None, as_json: bool) -> None:
    from bstar.catalog.devices import all_devices, get_device
    from bstar.errors import NotInCatalogError

    if name is not None:
        try:
            _one_device(get_device(name), as_json)
            return
        except NotInCatalogError:
            chosen = [d for d in all_devices() if name.lower() in f"{d.id} {d.name} {d.vendor} {d.generation}".lower()]
            if not chosen:
                raise
    else:
        chosen = list(all_devices())
    if as_json:
        output.print_json([_device_row(d) for d in chosen])
        return
    rows = [(d.id, f"{d.memory_bytes / 1e9:,.0f} GB", f"{d.bandwidth_bytes_per_s / 1e12:.2f} TB/s",
             *(_peak(d, t) for t in ("bf16", "fp8", "fp4")), _ridge(d),
             format_usd(d.price.usd_per_hour) if d.price else "–", ", ".join(d.unverified)) for d in chosen]
    output.show(output.table(
        ("device", "memory", "bandwidth", "bf16", "fp8", "fp4", "ridge", "$/h", "assumed"), rows,
        left=(0, 8), fold=(8,), spare=(8,)),
        output.line("dense TFLOP/s; ridge: FLOP per byte in bf16 (fp16 where there is no bf16); assumed: what no "
                    "second source confirms; prices are on demand, see the detail view for source and date",
                    style="dim"))


def _peak(device: Any, dtype: str) -> str:
    value = device.peak_flops_per_s.get(dtype)
    return "–" if value is None else f"{value / 1e12:,.0f}"


def _ridge(device: Any) -> str:
    value = device.peak_flops_per_s.get("bf16") or device.peak_flops_per_s.get("fp16")
    return "–" if value is None else f"{value / device.bandwidth_bytes_per_s:,.0f}"


def _device_row(device: Any) -> dict[str, Any]:
    row = output.jsonable(device)
    row["reported_memory_bytes"] = device.reported_memory_bytes
    return dict(row)


def _one_device(device: Any, as_json: bool) -> None:
    if as_json:
        output.print_json(_device_row(device))
        return
    rows = [
        ("memory", output.size(device.memory_bytes), "as the vendor states it"),
        ("reported", output.size(device.reported_memory_bytes),
         "as the driver reports it" if device.usable_memory_bytes else "the driver's figure is not known"),
        ("bandwidth", format_rate(device.bandwidth_bytes_per_s, "B/s"), ""),
    ]
    rows += [(f"peak {dtype}", format_rate(peak, "FLOP/s", digits=4),
              f"dense; ridge point {peak / device.bandwidth_bytes_per_s:,.0f} FLOP/byte")
             for dtype, peak in sorted(device.peak_flops_per_s.items())]
    for label, link in (("link", device.link), ("PCIe", device.pcie), ("between nodes", device.inter_node)):
        if link is not None:
            rows.append((label, format_rate(link.bandwidth_bytes_per_s, "B/s"),
                         f"{link.kind}, one way per device; latency {format_seconds(link.latency_s)} "
                         f"({link.provenance})"))
    rows.append(("devices a node", str(device.devices_per_node), ""))
    if device.price is not None:
        rows.append(("price", f"{format_usd(device.price.usd_per_hour)}/h",
                     f"{device.price.source}, {device.price.date}"))
    rows.append(("source", "", f"{device.source} {device.date}".strip()))
    notes = [output.line("assumed (not confirmed by two sources): " + ", ".join(device.unverified), style="yellow")
             ] if device.unverified else []
    output.show(output.heading(device.id, f"{device.name} · {device.vendor} {device.generation}"), output.facts(rows),
                *notes, *[output.line("note: " + n, style="dim") for n in device.notes],
                output.line("also called: " + ", ".join(device.aliases), style="dim"))


def _models(name: str | None, as_json: bool) -> None:
    from bstar.catalog.models import all_entries, get_entry
    from bstar.errors import NotInCatalogError

    if name is not None:
        entry = get_entry(name)
        if entry is not None:
            _one_model(entry, as_json)
            return
    entries = list(all_entries())
    if name is not None:
        entries = [e for e in entries if name.lower() in f"{e.id} {e.hub_id} {' '.join(e.aliases)}".lower()]
        if not entries:
            from bstar.catalog.models import suggest

            raise NotInCatalogError("model", name, suggestions=suggest(name), remedy="bstar catalog models lists them")
    rows = [_model_row(e) for e in entries]
    if as_json:
        output.print_json(rows)
        return
    output.show(output.table(
        ("model", "Hub id", "parameters", "active", "weights", "KV B/token", "context"),
        [(r["id"], r["hub_id"], format_count(r["parameters"]), format_count(r["active_parameters"]),
          r["weight_dtype"] or "–", f"{r['kv_bytes_per_token']:,.0f}" if r["kv_bytes_per_token"] is not None else "–",
          f"{r['max_context']:,}" if r["max_context"] else "–") for r in rows], left=(0, 1), fold=(1,), spare=(1,)))


def _model_row(entry: Any) -> dict[str, Any]:
    from bstar.codec.hf_config import model_from_config
    from bstar.errors import BstarError
    from bstar.physics.kv_cache import kv_bytes_per_token
    from bstar.physics.weights import parameter_counts
    from bstar.specs.formats import kv_format

    row: dict[str, Any] = {"id": entry.id, "hub_id": entry.hub_id, "license": entry.license, "parameters": None,
                           "active_parameters": None, "weight_dtype": None, "kv_bytes_per_token": None,
                           "max_context": None, "source": entry.source, "date": entry.date}
    try:
        spec = model_from_config(entry.config, name=entry.id, source=entry.source,
                                 hf_quant_config=entry.hf_quant_config)
        counts = parameter_counts(spec)
        kv = kv_format(spec.kv_cache_dtype or "auto", model_dtype=spec.dtype)
        row |= {"parameters": counts.total, "active_parameters": counts.active, "weight_dtype": spec.weight_dtype,
                "kv_bytes_per_token": kv_bytes_per_token(spec, kv), "max_context": spec.max_context_tokens}
    except BstarError as error:
        row["error"] = str(error)
    return row


def _one_model(entry: Any, as_json: bool) -> None:
    if as_json:
        output.print_json(_model_row(entry) | {
            "aliases": list(entry.aliases), "confirmed": list(entry.confirmed),
            "unconfirmed": list(entry.unconfirmed), "config": entry.config,
            "hf_quant_config": entry.hf_quant_config})
        return
    row = _model_row(entry)
    assumed = [output.line("assumed (only one source says it): " + ", ".join(entry.unconfirmed), style="yellow")
               ] if entry.unconfirmed else []
    output.show(
        output.heading(entry.id, entry.hub_id),
        output.facts([
            ("parameters", format_count(row["parameters"], digits=4),
             f"active {format_count(row['active_parameters'])}"),
            ("weights", str(row["weight_dtype"]), "as the checkpoint stores them"),
            ("longest context", f"{row['max_context']:,}" if row["max_context"] else "–", "tokens"),
            ("license", "", str(entry.license)),
            ("also called", "", ", ".join(entry.aliases)),
            ("source", "", f"{entry.source} {entry.date}".strip()),
            *(("confirmed by" if n == 0 else "", "", text) for n, text in enumerate(entry.confirmed))]),
        *assumed,
        output.line(f"everything else: bstar model {entry.id}", style="dim"))


# So many columns of defaults fit in a line.
_SIDE_BY_SIDE = 3


def _engines(name: str | None, gpu: str, as_json: bool) -> None:
    from bstar.catalog.devices import get_device
    from bstar.catalog.engines import ENGINES, engine_defaults

    device = get_device(gpu)
    if name is None:
        found = [engine_defaults(e, None, device) for e in ENGINES]
    else:
        engine, _, version = name.partition("@")
        found = [engine_defaults(engine, version or None, device)]
    if as_json:
        rows = [output.jsonable(d) for d in found]
        output.print_json(rows if name is None else rows[0])
        return
    keys = ("version", "known_version", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
            "memory_rule", "block_size", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling",
            "cudagraph_memory_subtracted", "cudagraph_cap")
    output.show(
        output.heading("engine defaults", f"on {device.name}, no flags given"),
        *[output.table(("", *(d.engine for d in part)),
                       [(key.replace("_", " "), *(str(getattr(d, key)) for d in part)) for key in keys])
          for part in (found[i : i + _SIDE_BY_SIDE] for i in range(0, len(found), _SIDE_BY_SIDE))],
        *[output.line(f"source ({d.engine}): {d.source}", style="dim") for d in found],
        *[output.line(f"note: {d.note}", style="dim") for d in found if d.note])
