"""Write a catalog entry from a config.json, and rebuild the catalog's index.

    python tools/add_model.py CONFIG.json --id llama-3.1-8b --hub-id meta-llama/Llama-3.1-8B \
        --source "config.json of meta-llama/Llama-3.1-8B" --license llama3.1 [--alias NAME]… \
        [--hf-quant-config FILE] [--published N | --published-rounded N] [--date YYYY-MM-DD] \
        [--confirmed "WHAT: WHICH FIELDS"]… [--unconfirmed KEY]…
    python tools/add_model.py --reindex

Keys that describe no shape and no storage (token ids, labels, generation defaults) are dropped; everything
else stays as the file has it. An entry that is no copy of a published file names what else says the same
(--confirmed) and the keys that nothing else says (--unconfirmed).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from bstar.catalog.models.names import key_of  # noqa: E402

DATA = ROOT / "src/bstar/catalog/models/data"

_NOISE = frozenset(  # one word each, kept as text: a list would take seventy lines
    """
    _name_or_path _attn_implementation add_cross_attention attention_dropout attn_pdrop auto_map bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout id2label initializer_factor initializer_range is_decoder is_encoder_decoder label2id
    length_penalty masked_softmax_fusion max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise router_z_loss_coef summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)


def significant(value: Any) -> Any:
    """`value` without noise keys, at every depth but inside quantization settings."""
    if isinstance(value, list):
        return [significant(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        k: collapse_experts(v) if "quantization" in k else significant(v)
        for k, v in value.items()
        if k not in _NOISE and not (k.endswith(("token_id", "token_index", "_token_ids")) or k in ("boi", "eoi"))
    }


def collapse_experts(quantization: Any) -> Any:
    """`quantized_layers` with "experts.0.…", "experts.1.…" as one "experts.*.…" where all experts agree."""
    if not isinstance(quantization, dict):
        return quantization
    layers = quantization.get("quantized_layers")
    if not isinstance(layers, dict):
        return {k: collapse_experts(v) for k, v in quantization.items()}
    groups: dict[str, list[Any]] = {}
    for name, value in layers.items():
        groups.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", name), []).append(value)
    if all(value == values[0] for values in groups.values() for value in values):
        layers = {name: values[0] for name, values in groups.items()}
    return {**quantization, "quantized_layers": layers}


def write_entry(
    config: dict[str, Any], *, entry_id: str, hub_id: str, source: str, license_name: str,
    aliases: tuple[str, ...] = (), hf_quant_config: dict[str, Any] | None = None, date: str = "",
    published: int | None = None, published_rounded: float | None = None,
    confirmed: tuple[str, ...] = (), unconfirmed: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """Write `data/<entry_id>.json` and return its path; the index is rebuilt by `reindex`."""
    entry: dict[str, Any] = {
        "id": entry_id, "hub_id": hub_id, "aliases": list(aliases), "source": source,
        "date": date or datetime.datetime.now(datetime.UTC).date().isoformat(), "license": license_name,
        "confirmed": list(confirmed) if confirmed or unconfirmed else ["source is a copy of the file"],
        "unconfirmed": list(unconfirmed),
    }  # fmt: skip
    if published is not None:
        entry["published_parameters"] = published
    if published_rounded is not None:
        entry["published_parameters_rounded"] = published_rounded
    entry["config"] = significant(config)
    if hf_quant_config is not None:
        entry["hf_quant_config"] = collapse_experts(hf_quant_config)
    path = DATA / f"{entry_id}.json"
    text = json.dumps(entry, indent=1, ensure_ascii=False)
    if len(text) > 60_000:  # long quantization lists: one line
        text = json.dumps(entry, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def build_index() -> dict[str, str]:
    """Key -> id over every entry; a key that two entries claim is an error."""
    index: dict[str, str] = {}
    for path in sorted(DATA.glob("*.json")):
        if path.name.startswith("_"):
            continue
        entry = json.loads(path.read_text(encoding="utf-8"))
        variants = [name for variant in entry.get("variants", ()) for name in variant["names"]]
        for name in (entry["id"], entry["hub_id"], *entry["aliases"], *variants):
            owner = index.setdefault(key_of(name), entry["id"])
            if owner != entry["id"]:
                raise SystemExit(f"{name!r} is claimed by {owner} and {entry['id']}")
    return dict(sorted(index.items()))


def reindex() -> None:
    (DATA / "_index.json").write_text(json.dumps(build_index(), indent=0) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--reindex", action="store_true")
    for flag in ("--id", "--hub-id", "--source", "--license", "--date"):
        parser.add_argument(flag, default="")
    for flag in ("--alias", "--confirmed", "--unconfirmed"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("--hf-quant-config", type=Path)
    parser.add_argument("--published", type=int)
    parser.add_argument("--published-rounded", type=float)
    args = parser.parse_args()
    if args.config is not None:
        if not (args.id and args.hub_id and args.source and args.license):
            parser.error("--id, --hub-id, --source and --license are needed")
        quant = json.loads(args.hf_quant_config.read_text()) if args.hf_quant_config else None
        path = write_entry(
            json.loads(args.config.read_text()), entry_id=args.id, hub_id=args.hub_id, source=args.source,
            license_name=args.license, aliases=tuple(args.alias), hf_quant_config=quant, date=args.date,
            published=args.published, published_rounded=args.published_rounded,
            confirmed=tuple(args.confirmed), unconfirmed=tuple(args.unconfirmed))  # fmt: skip
        print(path)
    reindex()


if __name__ == "__main__":
    main()
