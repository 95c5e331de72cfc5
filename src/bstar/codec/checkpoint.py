"""What a model folder stores: exact weight bytes, by dtype and by part, from headers alone.

folder/model.safetensors.index.json   which files belong to the model (and their total, if they are absent)
folder/*.safetensors                  headers: every tensor's dtype, shape and bytes
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bstar.codec.gguf_model import read_gguf
from bstar.codec.safe_json import read_json, shown
from bstar.codec.safetensors_files import StoredTensor, read_header
from bstar.errors import ConfigError
from bstar.units import MIB

__all__ = ["PARTS", "CheckpointWeights", "part_of", "read_gguf", "read_safetensors_folder"]

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 128 * MIB
_MAX_FILES = 5000

# Which part of the model a tensor belongs to; the first pattern that matches its name decides.
PARTS = ("mtp", "vision", "audio", "lm_head", "embedding", "layers", "other")
_PATTERNS = (
    ("mtp", re.compile(r"(^|\.)(mtp|mtp_layers|nextn|nextn_predict_layers|shared_head|eh_proj|enorm|hnorm)(\.|$)")),
    ("vision", re.compile(
        r"(^|\.)(visual|vision\w*|image_\w+|patch_embed\w*|mm_projector|multi_modal_projector|mm_\w*projector|"
        r"embed_vision|vit\w*|patch_merger|pre_mm_projector_norm|vision_language_adapter)(\.|$)")),
    ("audio", re.compile(r"(^|\.)(audio\w*|embed_audio|speech\w*)(\.|$)")),
    ("lm_head", re.compile(r"(^|\.)(lm_head|output|head)\.(weight|bias|weight_scale|scales|qweight)(\w*)$")),
    ("embedding", re.compile(r"(^|\.)(embed_tokens\w*|wte|tok_embeddings|word_embeddings|embeddings|embed)\.")),
    ("layers", re.compile(r"(^|\.)(layers|h|blocks|transformer_blocks)\.\d+\.")),
)  # fmt: skip
_PART_NAME = re.compile(r"(.*)-(\d{1,5})-of-(\d{1,5})\.safetensors")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights that a model folder stores.

    total_bytes      all tensors
    loaded_bytes     what an engine loads to serve text: without MTP heads (only for speculative decoding), without the
                     copy of a tied head (Qwen3-0.6B stores one)
    bytes_by_dtype   by the file's own dtype names ("BF16", "F8_E4M3", …); empty where only an index was there
    bytes_by_part    by `PARTS`; empty where only an index was there
    stored_elements  elements as stored (packed 4-bit weights count their containers); None from an index
    num_tensors, num_files
    source           "headers", or "index" where the files themselves are absent
    """

    total_bytes: int
    loaded_bytes: int
    num_tensors: int
    num_files: int
    source: str
    stored_elements: int | None = None
    bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    bytes_by_part: Mapping[str, int] = field(default_factory=dict)


def part_of(name: str, *, num_layers: int | None = None) -> str:
    """The part of the model that the tensor called `name` belongs to.

    num_layers   decoder layers of the model: a layer beyond them is an MTP head (DeepSeek-V3: layer 61)
    """
    for part, pattern in _PATTERNS:
        if pattern.search(name):
            if part == "layers" and num_layers is not None:
                layer = _LAYER.search(name)
                if layer is not None and len(layer[1]) < 9 and int(layer[1]) >= num_layers:
                    return "mtp"
            return part
    return "other"


def read_safetensors_folder(
    folder: Path, *, num_layers: int | None = None, tied: bool | None = None
) -> CheckpointWeights:
    """The weights of a model folder, from its index and the headers of its files.

    num_layers   decoder layers, to tell MTP layers apart; None: as the folder's config.json says
    tied         whether the head is the embedding table; None: as the folder's config.json says
    Raises ConfigError where there are no weights, some of the files that the index names are missing, or
    one of them cannot be read.
    """
    if num_layers is None or tied is None:
        said_layers, said_tied = _from_config(folder)
        num_layers = said_layers if num_layers is None else num_layers
        tied = said_tied if tied is None else tied
    index_path = folder / _INDEX
    if index_path.is_file():
        index = read_json(index_path, what="weight index", max_bytes=_MAX_INDEX_BYTES)
        files = _indexed_files(index, index_path)
        missing = [f for f in files if not (folder / f).is_file()]
        if len(missing) == len(files):
            return _from_index(index, index_path, len(files))
        if missing:
            raise ConfigError(
                f"weight index: {shown(index_path)} names {len(files)} files and {len(missing)} of them are missing "
                f"({shown(missing[0])}); download the rest"
            )
    else:
        files = _folder_files(folder)
    tensors = [tensor for file in files for tensor in read_header(folder / file)]
    return _summary(tensors, len(files), num_layers, tied)


def _from_config(folder: Path) -> tuple[int | None, bool]:
    """(decoder layers, whether the head is tied) as the folder's config.json states them."""
    path = folder / "config.json"
    if not path.is_file():
        return None, False
    config = read_json(path, what="config.json")
    text = config.get("text_config")
    layers: int | None = None
    sources = (text if isinstance(text, dict) else {}, config)
    for source in sources:
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            value = source.get(key)
            if layers is None and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                layers = value
    return layers, any(source.get("tie_word_embeddings") is True for source in sources)


def _indexed_files(index: dict[str, Any], path: Path) -> tuple[str, ...]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"weight index: {shown(path)} has no weight_map; download it again")
    files: dict[str, None] = {}
    for file in weight_map.values():
        # A name with a separator could point out of the folder.
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise ConfigError(f"weight index: {shown(path)} names {shown(repr(file))}, not a .safetensors file here")
        files[file] = None
    if len(files) > _MAX_FILES:
        raise ConfigError(f"weight index: {shown(path)} names {len(files)} files; at most {_MAX_FILES} are read")
    return tuple(files)


def _from_index(index: dict[str, Any], path: Path, num_files: int) -> CheckpointWeights:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer() and abs(total) < 2**53:
        total = int(total)  # some writers store 1.4e10
    if not isinstance(total, int) or isinstance(total, bool) or not 0 < total < 1 << 62:
        raise ConfigError(
            f"weight index: {shown(path)} has no usable metadata.total_size and its files are absent; download them"
        )
    return CheckpointWeights(
        total_bytes=total, loaded_bytes=total, num_tensors=len(index["weight_map"]), num_files=num_files, source="index"
    )


def _folder_files(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(p.name for p in folder.glob("*.safetensors") if p.is_file())
    except OSError as error:
        raise ConfigError(f"checkpoint: {shown(folder)} cannot be listed ({error.strerror}); check the path") from None
    # Mistral's folders hold the same weights twice, in its own and in the Hub's layout; adapters are no model.
    plain = [n for n in names if not n.startswith(("adapter_", "consolidated"))]
    files = plain or [n for n in names if n.startswith("consolidated")]
    if not files:
        raise ConfigError(f"checkpoint: {shown(folder)} has no .safetensors files; give its config.json")
    if len(files) > _MAX_FILES:
        raise ConfigError(f"checkpoint: {shown(folder)} has {len(files)} files; at most {_MAX_FILES} are read")
    _complete(files, folder)
    return tuple(files)


def _complete(files: Iterable[str], folder: Path) -> None:
    """Without an index only the names tell that parts are missing ("model-00001-of-00004.safetensors")."""
    found: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_PART_NAME.fullmatch, files)):
        found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in found.items():
        missing = count - len(numbers & set(range(1, count + 1)))
        if missing:
            raise ConfigError(
                f"checkpoint: {shown(folder)} lacks {missing} of the {count} parts of {shown(stem)}; download the rest"
            )


def _summary(tensors: Iterable[StoredTensor], num_files: int, num_layers: int | None, tied: bool) -> CheckpointWeights:
    by_dtype: Counter[str] = Counter()
    by_part: Counter[str] = Counter()
    elements = count = 0
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ConfigError(f"checkpoint: {shown(repr(tensor.name))} is in two files; remove one or add an index")
        seen.add(tensor.name)
        by_dtype[tensor.dtype] += tensor.bytes
        by_part[part_of(tensor.name, num_layers=num_layers)] += tensor.bytes
        elements += tensor.elements
        count += 1
    total = by_dtype.total()
    if total == 0:
        raise ConfigError("checkpoint: the .safetensors files hold no weights; download them again")
    copied_head = by_part["lm_head"] if tied and by_part["embedding"] else 0
    return CheckpointWeights(
        total_bytes=total,
        loaded_bytes=total - by_part["mtp"] - copied_head,
        num_tensors=count,
        num_files=num_files,
        source="headers",
        stored_elements=elements,
        bytes_by_dtype=MappingProxyType(dict(by_dtype)),
        bytes_by_part=MappingProxyType({p: by_part[p] for p in PARTS if by_part[p]}),
    )
