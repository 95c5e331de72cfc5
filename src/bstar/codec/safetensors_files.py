"""The header of a .safetensors file: names, dtypes, shapes and exact bytes, without the weights.

    ┌ 8 bytes ──────────────┬ N bytes ─────────────────────────────────┬ the rest ┐
    │ N, little-endian u64  │ JSON {name: {dtype, shape, data_offsets}} │ tensors  │
    └───────────────────────┴───────────────────────────────────────────┴──────────┘

Layout: safetensors format documentation (huggingface.co/docs/safetensors). Read by hand, because only the
header is wanted: a few kilobytes instead of a library that maps the file and a tensor framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bstar.codec.safe_json import open_regular, parse_json, shown
from bstar.errors import ConfigError
from bstar.units import format_bytes

# The format's own cap on the header.
MAX_HEADER_BYTES = 100_000_000
_WHAT = "safetensors"

# Bits of one element, safetensors 0.8 (rust crate `tensor.rs`).
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint file: `bytes` on disk, `elements` as stored (packed int4 counts its containers)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one .safetensors file.

    Raises ConfigError where the header is not one, an entry contradicts itself, tensors overlap or leave
    gaps, or the file is shorter than the header says (a download that stopped).
    """
    handle, size = open_regular(path, what=_WHAT)
    with handle:
        prefix = handle.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length < 2:
            raise ConfigError(f"{_WHAT}: {shown(path)} is not a safetensors file (no header); download it again")
        if length > MAX_HEADER_BYTES or length > size - 8:
            claimed = format_bytes(length, binary=False)
            raise ConfigError(
                f"{_WHAT}: {shown(path)} claims a header of {claimed} in a file of {format_bytes(size, binary=False)}; "
                "it is truncated or not a safetensors file (a Git LFS pointer?), download it again"
            )
        raw = parse_json(handle.read(length), what=_WHAT, where=path, max_depth=8)
    return tuple(_tensors(raw, path, size - 8 - length))


def _tensors(raw: dict[str, Any], path: Path, data_bytes: int) -> Iterator[StoredTensor]:
    spans: list[tuple[int, int, StoredTensor]] = []
    for name, entry in raw.items():
        if name != "__metadata__":
            begin, end, tensor = _entry(name, entry, path)
            spans.append((begin, end, tensor))
    spans.sort(key=lambda span: span[:2])
    expected = 0
    for begin, end, tensor in spans:
        if begin != expected:
            kind = "overlaps the tensor before it" if begin < expected else "leaves a gap before it"
            raise ConfigError(f"{_WHAT}: {shown(path)}: {shown(repr(tensor.name))} {kind}; download the file again")
        expected = end
    if expected > data_bytes:
        raise ConfigError(
            f"{_WHAT}: {shown(path)} is truncated: its header describes {format_bytes(expected, binary=False)} of "
            f"weights, the file holds {format_bytes(data_bytes, binary=False)}; download it again"
        )
    if expected < data_bytes:
        raise ConfigError(
            f"{_WHAT}: {shown(path)} holds {data_bytes - expected} bytes that its header does not describe; "
            "download it again"
        )
    for _, _, tensor in spans:
        yield tensor


def _entry(name: str, entry: Any, path: Path) -> tuple[int, int, StoredTensor]:
    def bad(problem: str) -> ConfigError:
        return ConfigError(f"{_WHAT}: {shown(path)}: {shown(repr(name))} {problem}; download the file again")

    if not isinstance(entry, dict):
        raise bad("is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise bad("has no dtype")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape) or len(shape) > 16:
        raise bad("has no shape of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise bad("has no pair of data_offsets")
    begin, end = offsets
    if end < begin:
        raise bad(f"ends before it begins (data_offsets {shown(offsets)})")
    tensor = StoredTensor(name, dtype, tuple(shape), end - begin)
    bits = DTYPE_BITS.get(dtype)
    # A dtype newer than this table is no error: its bytes are stated by the offsets.
    if bits is not None and -(-tensor.elements * bits // 8) != tensor.bytes:
        raise bad(f"says {shown(dtype)} × {shown(shape)} but takes {shown(tensor.bytes)} bytes")
    return begin, end, tensor


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
