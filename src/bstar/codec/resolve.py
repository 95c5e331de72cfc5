"""From what a user calls a model to a ModelSpec: catalog name, Hub id, path, folder, GGUF, or the Hub itself.

    what was given                             where the description comes from
    ─────────────────────────────────────────  ───────────────────────────────────────────────
    ./x.json, /dir, ~/dir, x.gguf, org/dir     the file or folder, when it looks like a path or exists
    llama-3.1-8b, meta-llama/Llama-3.1-8B-FP8  the catalog (last path component, case and org ignored)
    org/name                                   the Hub, when the network is there
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bstar.codec import by_hand
from bstar.codec.safe_json import shown
from bstar.errors import ConfigError, NotInCatalogError, UnsupportedArchitectureError
from bstar.specs.formats import TensorFormat, tensor_format
from bstar.specs.model import ModelSpec

_REMEDY = "give a catalog name (bstar catalog models), a path to a config.json, or --layers, --hidden-size, …"


def resolve_model(
    text: str, *, weight_dtype: str | None = None, overrides: Mapping[str, int] | None = None,
    config_overrides: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """The model called `text`, its GEMM weights in `weight_dtype` where one is given.

    overrides         by-hand sizes (`layers`, `hidden_size`, `kv_heads`, …) that replace the config's, or
                      describe a model that no config describes
    config_overrides  keys of config.json that replace the config's own, as vLLM's --hf-overrides does
    A name that is not the catalog's own says so in the spec's notes (see `name_note`).
    Raises ConfigError, UnsupportedArchitectureError or NotInCatalogError, each with its remedy.
    """
    name = text.strip()
    if not name or "\0" in name:
        raise ConfigError(f"model: the name is empty or holds a zero byte; {_REMEDY}")
    path = _local_path(name)
    changes = Changes(sizes=overrides or {}, keys=config_overrides or {})
    model = _from_path(path, changes) if path is not None else _from_name(name, changes)
    if path is not None:
        served = path.parent if path.suffix.lower() in (".json", ".safetensors") else path
        model = replace(model, served_as=str(served))
    elif "/" in name:
        model = replace(model, served_as=name)
    return with_weight_dtype(model, weight_dtype) if weight_dtype is not None else model


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What replaces the config's own: sizes by hand (`by_hand.KEYS`) and keys as config.json spells them."""

    sizes: Mapping[str, int]
    keys: Mapping[str, Any]

    def __bool__(self) -> bool:
        return bool(self.sizes or self.keys)


def name_note(name: str) -> str | None:
    """One line where the catalog knows the checkpoint called `name` only by a part of its name, else None.

    Silent are the catalog's own names, with the publisher's organisation or none, and those with a suffix of
    tuning ("-Instruct") that changes no size. Another organisation's checkpoint of the same name, and a storage
    that only the name says ("…-AWQ"), are assumptions.
    """
    from bstar.catalog.models import get_entry
    from bstar.catalog.models.names import key_of

    entry = None if _local_path(name) is not None else get_entry(name)
    if entry is None:
        return None
    names = (entry.id, entry.hub_id, *entry.aliases)
    asked = key_of(name).split("-")
    extra = min(([t for t in asked if t not in key_of(n).split("-")] for n in names), key=len)
    *before, _last = name.strip().rstrip("/").rsplit("/", 1)
    organisations = {n.rpartition("/")[0].lower() for n in names if "/" in n}
    foreign = bool(before) and before[0].lower() not in organisations
    if not foreign and entry.weight_format_hint is None and all(_TUNED.fullmatch(token) for token in extra):
        return None
    stored = "" if entry.weight_format_hint is None else (
        f", stored as {entry.weight_format_hint} (read off the name, not off its config)")
    called = name if name.isprintable() and len(name) <= 120 else shown(name)
    return (f"{called} is not in the catalog: taken by its name for {entry.hub_id}{stored}; "
            "the path of its config.json is exact")


# Suffixes of tuning and of dates; the sizes stay.
_TUNED = re.compile(r"instruct|chat|it|pt|base|hf|thinking|(2[3-9]|0[1-9]|1[0-2])\d\d")


def with_weight_dtype(model: ModelSpec, weight_dtype: str) -> ModelSpec:
    """`model` with its GEMM weights stored as `weight_dtype`.

    A checkpoint that already is of that kind (same width, same compute dtype) keeps its own formats: a
    block-scaled fp8 checkpoint asked for as fp8 stays block-scaled, its unquantized layers unquantized.
    """
    wanted = tensor_format(weight_dtype)
    # "fp4" says a width: a checkpoint in any 4-bit float format (MXFP4, NVFP4) is one already.
    if weight_dtype.strip().lower() == "fp4" and any(g.formats.default.name in _FP4 for g in model.layers):
        return model
    if any(_same_kind(wanted, g.formats.default) for g in model.layers):
        return model
    changed = replace(model.with_weight_format(wanted), converted_from=model.converted_from or model.weight_dtype)
    if wanted.bits == 16 and wanted.name in ("bf16", "fp16"):
        changed = replace(changed, dtype=wanted.name)
    return changed


_FP4 = frozenset({"nvfp4", "nvfp4_w4a16", "mxfp4", "mxfp4_w4a4"})


def _same_kind(wanted: TensorFormat, found: TensorFormat) -> bool:
    if not wanted.is_quantized:
        return wanted.name == found.name
    return (wanted.bits, wanted.compute_dtype) == (found.bits, found.compute_dtype)


def _local_path(name: str) -> Path | None:
    """The path that `name` means, or None where it is a catalog name or Hub id."""
    path = _expanded(name)
    if name.startswith(("/", "./", "../", "~")) or name in (".", "..") or path.is_absolute():
        return path
    if name.lower().endswith((".json", ".gguf", ".safetensors")):
        return path
    # Like the engines: a folder that exists wins over a Hub id of the same spelling, a bare word does not.
    separators = "/" if os.sep == "/" else "/" + os.sep
    try:
        if any(s in name for s in separators) and path.exists():
            return path
        if path.is_dir() and (path / "config.json").is_file() and not _in_catalog(name):
            return path
    except OSError as error:
        raise ConfigError(f"model: {shown(name)} is neither a name nor a path ({error.strerror}); {_REMEDY}") from None
    return None


def _expanded(name: str) -> Path:
    """The path with ~ replaced. Raises ConfigError where there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(f"model: {shown(name)} names the home of an unknown user; give the whole path") from None


def _in_catalog(name: str) -> bool:
    from bstar.catalog.models import get_entry

    return get_entry(name) is not None


def _from_path(path: Path, changes: Changes) -> ModelSpec:
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise ConfigError(f"model: {shown(path)} cannot be read ({error.strerror})") from None
    if path.suffix.lower() == ".gguf":
        from bstar.codec.checkpoint import read_gguf

        return read_gguf(path)
    if path.suffix.lower() == ".safetensors":
        return _from_path(path.parent, changes)
    config_path = path / "config.json" if is_folder else path
    if is_folder and not _exists(config_path):
        single = sorted(path.glob("*.gguf"))
        if single:
            return _from_path(single[0], changes)
        raise ConfigError(f"model: the folder {shown(path)} has no config.json and no .gguf file; {_REMEDY}")
    from bstar.codec.safe_json import read_json

    config = read_json(config_path, what="config.json")
    quant_path = config_path.with_name(config_path.name.replace("config.json", "hf_quant_config.json"))
    quant = (
        read_json(quant_path, what="hf_quant_config.json")
        if quant_path != config_path and _exists(quant_path) else None
    )
    name = path.resolve().name if is_folder else _name_of(config_path)
    model = _parse(config, quant, name=name, source=str(config_path), changes=changes)
    return _with_checkpoint(model, path) if is_folder and not changes else model


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _name_of(path: Path) -> str:
    """A folder's name for …/x/config.json, the stem's for org--name_config.json."""
    stem = path.stem.removesuffix("config").rstrip("_-.")
    return stem.rpartition("--")[2] or path.resolve().parent.name or "model"


def _with_checkpoint(model: ModelSpec, folder: Path) -> ModelSpec:
    """The exact bytes of the folder's safetensors files, where it has them."""
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.safetensors.index.json")):
        return model
    from bstar.codec.checkpoint import read_safetensors_folder

    stored = read_safetensors_folder(folder, num_layers=model.num_layers, tied=model.tied)
    return replace(model, checkpoint_weight_bytes=stored.loaded_bytes)


def _from_name(name: str, changes: Changes) -> ModelSpec:
    from bstar.catalog.models import get_entry

    entry = get_entry(name)
    if entry is not None:
        hint = entry.weight_format_hint
        model = _parse(entry.config, entry.hf_quant_config, name=entry.id if hint is None else name,
                       source=entry.source, changes=changes)
        notes = [f"assumed (only one source says it): {', '.join(entry.unconfirmed)}"] if entry.unconfirmed else []
        note = name_note(name)
        model = replace(model, notes=(*model.notes, *notes, *((note,) if note else ())))
        return model if hint is None else _hinted(model, hint)
    from bstar.codec.hub import HUB_ID, fetch_config

    if by_hand.describes_a_model(changes.sizes):
        return _by_hand(name, changes.sizes)
    if HUB_ID.match(name):
        config, quant, address = fetch_config(name)
        return _parse(config, quant, name=name, source=address, changes=changes)
    from bstar.catalog.models import suggest

    raise NotInCatalogError("model", name[:120], suggestions=suggest(name), remedy=_REMEDY)


def _hinted(model: ModelSpec, hint: str) -> ModelSpec:
    """The model stored as a suffix of its name says ("…-FP8"): a checkpoint of its own, nothing to convert."""
    if hint.startswith("gguf:"):
        raise ConfigError(f"model: {model.name!r} is a GGUF quantization, whose tensors differ in type; "
                          "give the path of the .gguf file, or the model's name with --weight-dtype")
    return replace(with_weight_dtype(model, hint), converted_from=None)


def _parse(
    config: Mapping[str, Any], quant: Mapping[str, Any] | None, *, name: str, source: str, changes: Changes,
) -> ModelSpec:
    from bstar.codec.hf_config import model_from_config

    changed = by_hand.replaced(config, changes.keys) if changes.keys else config
    if changes.sizes:
        changed = by_hand.overridden(changed, changes.sizes)
    try:
        return model_from_config(changed, name=name, source=source, hf_quant_config=quant)
    except UnsupportedArchitectureError:
        if not by_hand.describes_a_model(changes.sizes):
            raise
        return _by_hand(name, changes.sizes)


def _by_hand(name: str, sizes: Mapping[str, int]) -> ModelSpec:
    from bstar.codec.hf_config import model_from_config

    return model_from_config(by_hand.described(sizes), name=name, source="described by hand")
