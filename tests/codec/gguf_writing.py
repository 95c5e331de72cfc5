"""GGUF files made by hand: any metadata, any tensors, weights a hole in the file."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bstar.codec.gguf_file import GGML_TYPES

TYPE_NUMBER = {t.name: number for number, t in GGML_TYPES.items()}
Tensor = tuple[str, tuple[int, ...], str]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<IQ", 10, item) if item >= 0 else struct.pack("<Iq", 11, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    inner = list(item)
    if all(isinstance(i, bool) for i in inner):
        return struct.pack("<IIQ", 9, 7, len(inner)) + struct.pack(f"<{len(inner)}?", *inner)
    if all(isinstance(i, int) for i in inner):
        return struct.pack("<IIQ", 9, 5, len(inner)) + struct.pack(f"<{len(inner)}i", *inner)
    return struct.pack("<IIQ", 9, 8, len(inner)) + b"".join(text(i) for i in inner)


def header(metadata: Mapping[str, Any], tensors: Iterable[Tensor], *, version: int = 3) -> tuple[bytes, int]:
    """(header with its padding, bytes of weights)."""
    tensors = list(tensors)
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        out += text(key) + value(item)
    at = 0
    for name, shape, kind in tensors:
        number = TYPE_NUMBER[kind]
        stored = math.prod(shape) // GGML_TYPES[number].block * GGML_TYPES[number].bytes
        out += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        out += struct.pack("<IQ", number, at)
        at += -(-stored // 32) * 32
    return out + bytes(-len(out) % 32), at


def write(path: Path, metadata: Mapping[str, Any], tensors: Iterable[Tensor]) -> Path:
    head, weights = header(metadata, tensors)
    with path.open("wb") as handle:
        handle.write(head)
        handle.truncate(len(head) + weights)
    return path
