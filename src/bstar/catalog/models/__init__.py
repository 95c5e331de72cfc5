"""Models as data files: what their config.json says, with its source.

`data/<id>.json` holds one entry; `data/_index.json` maps every key (see `names`) to an id, so that a
lookup reads the index and one entry. An entry's `variants` are checkpoints of other names that differ from it
in a few keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from bstar.catalog.models.names import find_key, key_of, stem_of

__all__ = ["ModelEntry", "all_entries", "entry_ids", "get_entry", "suggest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of the catalog.

    id, hub_id, aliases   its names: the catalog's, the Hub's, others that mean the same architecture
    config                as in config.json, without keys that describe no shape (token ids, labels, …)
    hf_quant_config       as in hf_quant_config.json where the checkpoint has one
    source, date          where the facts come from and when they were read there
    confirmed             what else says the same, each with what it says ("llmfit …: shape, max context")
    unconfirmed           keys of `config` that only `source` gives; never torch_dtype, since engines load 16 bits
                          whichever of the three float types a checkpoint states
    license               of the model, by name
    published_parameters  logical parameters, exact: the publisher's figure, or transformers' count of the
                          same config where the publisher counts otherwise (MTP heads, unused weights)
    published_parameters_rounded  the publisher's rounded figure, where no exact one is known
    weight_format_hint    storage named by a suffix of the asked name that this entry's checkpoint does not
                          have ("…-FP8" of a bf16 entry): a weight format of `bstar.specs.formats`, or
                          "gguf:<type>" ("gguf:" where the name says no type); None: store as `config` says
    """

    id: str
    hub_id: str
    aliases: tuple[str, ...]
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    source: str
    date: str
    license: str
    confirmed: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    published_parameters: int | None = None
    published_parameters_rounded: float | None = None
    weight_format_hint: str | None = None


def _read(file_name: str) -> Any:
    return json.loads((files(__name__) / "data" / file_name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _index() -> dict[str, str]:
    """Key -> id, for every id, Hub name and alias."""
    index: dict[str, str] = _read("_index.json")
    return index


def _own_formats(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Weight formats that a name may state of this checkpoint without saying anything new."""
    quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if not quantization and not hf_quant_config:
        return ("bf16",)
    method = str((quantization or {}).get("quant_method", ""))
    return {
        "fp8": ("fp8", "fp8_block"), "mxfp4": ("mxfp4",), "awq": ("w4a16",), "gptq": ("w4a16",),
        "compressed-tensors": ("w4a16",) if "pack-quantized" in str(quantization) else ("fp8", "fp8_channel"),
    }.get(method, ())  # fmt: skip


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, an object inside changed key by key."""
    return dict(config) | {
        k: _merged(config[k], v) if isinstance(v, Mapping) and isinstance(config.get(k), Mapping) else v
        for k, v in changes.items()}


def _as_variant(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """The entry as the checkpoint that `key` names: one of the entry's `variants` ("…-Base" with fewer positions)
    differs from it in a few keys of config."""
    for variant in raw.get("variants", ()):
        if key in {key_of(n) for n in variant["names"]}:
            hub_id, *aliases = variant["names"]
            return _merged(raw, {k: v for k, v in variant.items() if k != "names"}) | {
                "id": hub_id.rpartition("/")[2].lower(), "hub_id": hub_id, "aliases": aliases, "variants": ()}
    return raw


def _load(entry_id: str, weight_format_hint: str | None = None, *, key: str = "") -> ModelEntry:
    raw = _as_variant(_read(f"{entry_id}.json"), key)
    if weight_format_hint is not None:
        weight_format_hint = raw.get("suffix_formats", {}).get(weight_format_hint, weight_format_hint)
    if weight_format_hint in _own_formats(raw["config"], raw.get("hf_quant_config")):
        weight_format_hint = None
    return ModelEntry(
        id=raw["id"], hub_id=raw["hub_id"], aliases=tuple(raw["aliases"]), config=raw["config"],
        hf_quant_config=raw.get("hf_quant_config"), source=raw["source"], date=raw["date"], license=raw["license"],
        confirmed=tuple(raw.get("confirmed", ())), unconfirmed=tuple(raw.get("unconfirmed", ())),
        published_parameters=raw.get("published_parameters"),
        published_parameters_rounded=raw.get("published_parameters_rounded"), weight_format_hint=weight_format_hint,
    )  # fmt: skip


def get_entry(name: str) -> ModelEntry | None:
    """The entry that `name` means, or None.

    `name` is a catalog id, an alias, or a Hub id: its last path component decides; organisation, case and
    separators do not count. A suffix that names a storage the entry itself does not have sets
    `weight_format_hint`.
    """
    index = _index()
    found = find_key(name, index)
    if found is None:
        return None
    key, weight_format = found
    return _load(index[key], weight_format, key=key)


def entry_ids() -> tuple[str, ...]:
    """Every catalog id, sorted."""
    return tuple(sorted(set(_index().values())))


def all_entries() -> tuple[ModelEntry, ...]:
    """Every entry, by id; reads every file."""
    return tuple(_load(i) for i in entry_ids())


def suggest(name: str, *, count: int = 3) -> tuple[str, ...]:
    """Catalog ids whose names look like `name`, closest first."""
    from difflib import get_close_matches

    index = _index()
    stems: dict[str, str] = {}
    for key, entry_id in index.items():
        if len(entry_id) < len(stems.get(stem_of(key), entry_id + " ")):
            stems[stem_of(key)] = entry_id
    close = get_close_matches(stem_of(name), stems, n=count, cutoff=0.6)
    return tuple(dict.fromkeys(stems[k] for k in close))
