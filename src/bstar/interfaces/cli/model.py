"""`bstar model`: what a model is, counted from its mechanisms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bstar.interfaces.cli import output
from bstar.interfaces.cli.deploy import note_model
from bstar.interfaces.cli.mechanisms import ffn_text, mixer_kind, mixer_text, positions
from bstar.interfaces.cli.params import (
    POSITIVE,
    apply,
    by_hand_options,
    complete_models,
    dtype_options,
    json_option,
    take_by_hand,
    units_option,
)
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import format_bytes, format_count

if TYPE_CHECKING:
    from bstar.specs.model import ModelSpec

_EPILOG = """\b
Examples:
  bstar model llama-3.1-8b
  bstar model deepseek-ai/DeepSeek-R1 --tp 8 --context 32768
  bstar model ./my-model/config.json --weight-dtype fp8 --kv-cache-dtype fp8 --json
  bstar model my-idea --layers 48 --hidden-size 5120 --heads 40 --kv-heads 8 --intermediate-size 17408 \\
      --vocab-size 152064 --max-context 32768
"""


@click.command("model", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="MODEL", shell_complete=complete_models)
@apply(
    dtype_options,
    click.option("--context", type=POSITIVE, metavar="N",
                 help="Tokens of context for KV bytes per sequence (default: the model's longest)."),
    click.option("--tp", type=POSITIVE, default=1, metavar="N", help="Per GPU at this tensor parallelism."),
    click.option("--pp", type=POSITIVE, default=1, metavar="N", help="… pipeline parallelism."),
    click.option("--ep", type=POSITIVE, default=1, metavar="N", help="… expert parallelism."),
    click.option("--attention-dp", type=POSITIVE, default=1, metavar="N", help="… data-parallel attention."),
    click.option("--batch", type=POSITIVE, metavar="B",
                 help="Tokens of the decode step that streamed weight bytes are for (MoE: default all experts)."),
    by_hand_options(hidden=False),
    units_option,
    json_option,
)
def model(model_name: str, as_json: bool, units: str, **options: Any) -> None:
    """What MODEL is: parameters, weight bytes, KV cache per token and sequence, layers by kind.

    MODEL: a catalog name, a Hub id, a path to a config.json, a model folder or a .gguf file. Sizes given by hand
    replace the config's, or describe a model that no config describes.
    """
    from bstar.codec.resolve import resolve_model

    overrides = take_by_hand(options)
    spec = resolve_model(model_name, weight_dtype=options.pop("weight_dtype"), overrides=overrides)
    note_model(spec, model_name)
    sheet = model_sheet(spec, **options)
    if as_json:
        output.print_json(sheet)
    else:
        _show(sheet, units)


def model_sheet(
    spec: ModelSpec, *, kv_cache_dtype: str | None = None, context: int | None = None, tp: int = 1, pp: int = 1,
    ep: int = 1, attention_dp: int = 1, batch: int | None = None,
) -> dict[str, Any]:
    """Everything `bstar model` prints; bytes are per GPU of the given layout (the whole model at tp = pp = 1)."""
    from bstar.errors import SpecError
    from bstar.physics import kv_cache, weights
    from bstar.physics.partition import check_parallel
    from bstar.specs.formats import kv_format
    from bstar.specs.parallel import ParallelSpec

    parallel = ParallelSpec(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp)
    reasons = check_parallel(spec, parallel)
    if reasons:
        raise SpecError(reasons[0])
    kv_name = kv_cache_dtype if kv_cache_dtype not in (None, "auto") else spec.kv_cache_dtype or "auto"
    kv = kv_format(kv_name, model_dtype=spec.dtype)
    counts = weights.parameter_counts(spec)
    tokens = context if context is not None else spec.max_context_tokens
    per_sequence = float(kv_cache.kv_bytes_per_sequence(spec, kv, tokens, parallel))
    return {
        "model": spec.name,
        "architecture": spec.architecture,
        "parameters": {name: getattr(counts, name) for name in (
            "total", "active", "embedding", "lm_head", "experts", "vision", "mtp")},
        "parameters_by_role": dict(counts.by_role),
        "weight_dtype": spec.weight_dtype,
        "dtype": spec.dtype,
        "weight_bytes": weights.weight_bytes(spec, parallel),
        "streamed_weight_bytes": _whole(weights.streamed_weight_bytes(spec, parallel, tokens=batch)),
        "kv_cache_dtype": kv.name,
        "kv_bytes_per_token": _whole(kv_cache.kv_bytes_per_token(spec, kv, parallel)),
        "context_tokens": tokens,
        "kv_bytes_per_sequence": _whole(per_sequence),
        "state_bytes_per_sequence": kv_cache.state_bytes_per_sequence(spec, parallel),
        "layers": _layer_kinds(spec),
        "ffn_layers": _ffn_kinds(spec),
        "num_layers": spec.num_layers,
        "layer_groups": [_group(spec, g, kv, tp) for g in spec.layers],
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_context": spec.max_context_tokens,
        "tied_embeddings": spec.tied,
        "parallel": {"tp": tp, "pp": pp, "ep": ep, "attention_dp": attention_dp},
        "source": spec.source,
        "notes": list(spec.notes),
    }


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def _layer_kinds(spec: ModelSpec) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in spec.layers:
        kind = mixer_kind(group.mixer)
        found[kind] = found.get(kind, 0) + group.count
    return found


def _ffn_kinds(spec: ModelSpec) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in spec.layers:
        found[group.ffn.kind] = found.get(group.ffn.kind, 0) + group.count
    return found


def _group(spec: ModelSpec, group: Any, kv: Any, tp: int) -> dict[str, Any]:
    from bstar.physics.kv_cache import entry_bytes

    tensors = group.tensors(spec.hidden_size)
    cached = [e for e in group.mixer.cache() if e.kind != "state"]
    return {
        "count": group.count,
        "indices": list(group.indices),
        "mixer": mixer_kind(group.mixer),
        "mixer_detail": mixer_text(group.mixer),
        "ffn": group.ffn.kind,
        "ffn_detail": ffn_text(group.ffn),
        "weight_format": group.formats.default.name,
        "parameters_per_layer": sum(t.parameters for t in tensors),
        "kv_bytes_per_token_per_layer": sum(entry_bytes(e, kv, tp) / e.tokens_per_entry for e in cached),
        "window": getattr(group.mixer, "window", None),
    }


def _show(sheet: dict[str, Any], units: str) -> None:
    p, parallel = sheet["parameters"], sheet["parallel"]
    per_gpu = any(v > 1 for v in parallel.values())
    scope = "per GPU at " + ", ".join(f"{k} {v}" for k, v in parallel.items() if v > 1) if per_gpu else ""
    parts = [f"embedding {format_count(p['embedding'])}"]
    parts += ["head tied to it" if sheet["tied_embeddings"] else f"head {format_count(p['lm_head'])}"]
    parts += [f"{label} {format_count(p[key])}" for key, label in (
        ("experts", "experts"), ("vision", "towers"), ("mtp", "MTP (not in the total)")) if p[key]]
    rows = [("parameters", format_count(p["total"], digits=4), f"{p['total']:,}: " + " · ".join(parts))]
    if p["active"] != p["total"]:
        rows.append(("active a token", format_count(p["active"], digits=4), f"{p['active']:,}"))
    rows += [
        ("weights", output.size(sheet["weight_bytes"], units), f"{sheet['weight_dtype']}, as loaded {scope}".rstrip()),
        ("streamed a step", output.size(sheet["streamed_weight_bytes"], units),
         "what one decode step reads (no embedding table, towers or idle MTP)"),
        ("KV cache a token", _small(sheet["kv_bytes_per_token"]),
         f"{sheet['kv_bytes_per_token']:,} B in {sheet['kv_cache_dtype']} {scope}".rstrip()),
        ("KV cache a sequence", output.size(sheet["kv_bytes_per_sequence"], units),
         f"at {sheet['context_tokens']:,} tokens"),
    ]
    if sheet["state_bytes_per_sequence"]:
        rows.append(("state a sequence", output.size(sheet["state_bytes_per_sequence"], units),
                     "recurrent state, the same at any context"))
    rows.append(("longest context", f"{sheet['max_context']:,}", "tokens"))
    groups = output.table(
        ("layers", "where", "mixer", "", "FFN", "", "weights", "KV B/token"),
        [(str(g["count"]), positions(g["indices"]), g["mixer"].replace("_", " "), g["mixer_detail"], g["ffn"],
          g["ffn_detail"], g["weight_format"], _per_token(g["kv_bytes_per_token_per_layer"]))
         for g in sheet["layer_groups"]],
        left=(1, 2, 3, 4, 5, 6), fold=(1, 3, 5))
    about = f"{sheet['architecture']} · {sheet['num_layers']} layers × {sheet['hidden_size']:,}"
    output.show(output.heading(sheet["model"], about), output.facts(rows), output.line(""), groups,
                *[output.line("note: " + n, style="dim") for n in sheet["notes"] if not output.was_said(n)],
                output.line(f"source: {sheet['source'] or 'unknown'}", style="dim"))


def _per_token(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _small(value: float) -> str:
    return format_bytes(value, digits=1) if value >= 1024 else f"{value:,.6g} B"
