"""The header of a GGUF file: metadata and tensor types, shapes and exact bytes, without the weights.

    "GGUF" · version u32 · tensors u64 · pairs u64
    pairs    × (key string · type u32 · value)                      string = length u64 + bytes
    tensors  × (name string · dims u32 · dim u64 … · type u32 · offset u64)
    padding to `general.alignment`, then the weights

Layout: ggml's docs/gguf.md, versions 2 and 3, either byte order. Read by hand rather than with the `gguf` library:
its reader needs the whole file, makes an array object per vocabulary entry, and walks as many entries as
a hostile header claims. Here nothing is read beyond a cap and no count is believed before its bytes are seen.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from bstar.codec.safe_json import open_regular, shown
from bstar.errors import ConfigError
from bstar.units import KIB, MIB, format_bytes

_WHAT = "gguf"
MAX_HEADER_BYTES = 512 * MIB
_MAX_TENSORS, _MAX_PAIRS, _MAX_STRINGS = 200_000, 20_000, 4_000_000
_MAX_NAME_BYTES, _MAX_KEPT_TEXT, _MAX_KEPT_ARRAY = 1024, 4 * KIB, 4096
_MAX_PARTS = 999

Scalar = int | float | bool | str
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A storage type of ggml: `block` elements of a row take `bytes` bytes."""

    name: str
    block: int
    bytes: int


# By the number in the file. Source: ggml's type table (ggml.h, and gguf.constants of gguf 0.19).
GGML_TYPES: Mapping[int, GgmlType] = MappingProxyType({
    number: GgmlType(name, block, size)
    for number, name, block, size in (
        (0, "f32", 1, 4), (1, "f16", 1, 2), (2, "q4_0", 32, 18), (3, "q4_1", 32, 20), (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24), (8, "q8_0", 32, 34), (9, "q8_1", 32, 40), (10, "q2_k", 256, 84), (11, "q3_k", 256, 110),
        (12, "q4_k", 256, 144), (13, "q5_k", 256, 176), (14, "q6_k", 256, 210), (15, "q8_k", 256, 292),
        (16, "iq2_xxs", 256, 66), (17, "iq2_xs", 256, 74), (18, "iq3_xxs", 256, 98), (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18), (21, "iq3_s", 256, 110), (22, "iq2_s", 256, 82), (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1), (25, "i16", 1, 2), (26, "i32", 1, 4), (27, "i64", 1, 8), (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56), (30, "bf16", 1, 2), (34, "tq1_0", 256, 54), (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17), (40, "nvfp4", 64, 36), (41, "q1_0", 128, 18),
    )
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; `shape` has the row length first, as in the file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements // self.type.block * self.type.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """metadata: scalars, strings up to 4 KiB and number arrays up to 4,096; array_lengths: of every array."""

    metadata: Mapping[str, Scalar | tuple[Scalar, ...]]
    array_lengths: Mapping[str, int]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Sequential reads that fetch the file in pieces and refuse to pass its end or the header cap."""

    def __init__(self, handle: BinaryIO, size: int, path: Path) -> None:
        self._handle, self._size, self._path = handle, size, path
        self._data, self._at, self.position = b"", 0, 0
        self.order = "<"

    def take(self, count: int) -> bytes:
        self._need(count)
        piece = self._data[self._at : self._at + count]
        self._at += count
        self.position += count
        return piece

    def _need(self, count: int) -> None:
        if count > self._size - self.position:
            raise self.bad("ends in the middle of its header; it is truncated, download it again")
        if self.position + count > MAX_HEADER_BYTES:
            raise self.bad(f"has a header of more than {format_bytes(MAX_HEADER_BYTES)}; is it the right file?")
        if self._at + count > len(self._data):
            rest = self._data[self._at :]
            self._data = rest + self._handle.read(max(count - len(rest), 4 * MIB))
            self._at = 0
            if len(self._data) < count:
                raise self.bad("became shorter while it was read; try again")

    def number(self, code: str) -> int | float | bool:
        kind = self.order + code
        (value,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return value  # type: ignore[no-any-return]

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def text(self, limit: int) -> str:
        length = self.count()
        if length > limit:
            raise self.bad(f"has a name of {length} bytes in its header; it is damaged, download it again")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.bad("has a name that is not UTF-8 in its header; it is damaged, download it again") from None

    def skip_strings(self, count: int) -> None:
        unpack = struct.Struct(self.order + "Q").unpack_from
        for _ in range(count):
            # A vocabulary is hundreds of thousands of short strings: inside the buffer only the place moves.
            if self._at + 8 > len(self._data):
                self._need(8)
            (length,) = unpack(self._data, self._at)
            step = 8 + length
            if self._at + step > len(self._data):
                self.take(step)
            else:
                self._at += step
                self.position += step

    def bad(self, problem: str) -> ConfigError:
        return ConfigError(f"{_WHAT}: {shown(self._path)} {problem}")


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a GGUF file, and of all its parts where it is split (`…-00001-of-00003.gguf`).

    Raises ConfigError where it is not GGUF, is damaged or truncated, or a part is missing.
    """
    header = _read_one(path)
    parts = header.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return header
    named = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name, re.IGNORECASE)
    if named is None or int(named[3]) != parts or parts > _MAX_PARTS:
        raise ConfigError(
            f"{_WHAT}: {shown(path)} is one of {shown(parts)} parts, but its name does not end like "
            "-00001-of-00003.gguf; restore the name"
        )
    every = [path.with_name(f"{named[1]}-{i:05d}-of-{named[3]}{named[4]}") for i in range(1, parts + 1)]
    headers = [header if p == path else _read_one(p) for p in every]
    tensors = tuple(t for h in headers for t in h.tensors)
    if len({t.name for t in tensors}) != len(tensors):
        raise ConfigError(f"{_WHAT}: {shown(path)}: two parts hold the same tensor; download them again")
    return GgufHeader(metadata=headers[0].metadata, array_lengths=headers[0].array_lengths, tensors=tensors)


def _read_one(path: Path) -> GgufHeader:
    handle, size = open_regular(path, what=_WHAT)
    with handle:
        cursor = _Cursor(handle, size, path)
        if size < 24 or cursor.take(4) != b"GGUF":
            raise ConfigError(f"{_WHAT}: {shown(path)} is not a GGUF file (a Git LFS pointer?); download it again")
        raw_version = cursor.take(4)
        version = int.from_bytes(raw_version, "little")
        if version & 0xFFFF == 0:
            cursor.order, version = ">", int.from_bytes(raw_version, "big")
        if version not in (2, 3):
            raise cursor.bad(f"is GGUF version {version}; versions 2 and 3 are read, convert it with llama.cpp")
        num_tensors, num_pairs = cursor.count(), cursor.count()
        if num_tensors > _MAX_TENSORS or num_pairs > _MAX_PAIRS:
            raise cursor.bad(f"claims {num_tensors} tensors and {num_pairs} metadata keys; it is damaged")
        metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
        lengths: dict[str, int] = {}
        for _ in range(num_pairs):
            key = cursor.text(_MAX_NAME_BYTES)
            if key in metadata or key in lengths:
                raise cursor.bad(f"gives {shown(repr(key))} twice; it is damaged")
            _pair(cursor, key, metadata, lengths)
        tensors = _tensors(cursor, num_tensors, metadata, size)
    return GgufHeader(metadata=metadata, array_lengths=lengths, tensors=tensors)


def _pair(cursor: _Cursor, key: str, metadata: dict[str, Scalar | tuple[Scalar, ...]], lengths: dict[str, int]) -> None:
    kind = cursor.count("I")
    if kind in _SCALAR_CODES:
        metadata[key] = cursor.number(_SCALAR_CODES[kind])
    elif kind == _STRING:
        data = cursor.take(cursor.count())
        metadata[key] = data.decode(errors="replace") if len(data) <= _MAX_KEPT_TEXT else ""
    elif kind == _ARRAY:
        inner, count = cursor.count("I"), cursor.count()
        lengths[key] = count
        if inner == _STRING:
            if count > _MAX_STRINGS:
                raise cursor.bad(f"claims {count} strings in {shown(repr(key))}; it is damaged")
            cursor.skip_strings(count)
        elif inner in _SCALAR_CODES:
            code = _SCALAR_CODES[inner]
            data = cursor.take(count * struct.calcsize("=" + code))
            if count <= _MAX_KEPT_ARRAY:
                metadata[key] = struct.unpack(f"{cursor.order}{count}{code}", data)
        else:
            raise cursor.bad(f"has an array of type {inner} in {shown(repr(key))}, which is not known")
    else:
        raise cursor.bad(f"has a value of type {kind} in {shown(repr(key))}, which is not known")


def _tensors(
    cursor: _Cursor, count: int, metadata: Mapping[str, Scalar | tuple[Scalar, ...]], size: int
) -> tuple[GgufTensor, ...]:
    found: list[GgufTensor] = []
    names: set[str] = set()
    end = 0
    for _ in range(count):
        name = cursor.text(_MAX_NAME_BYTES)
        dims = cursor.count("I")
        if not 1 <= dims <= 4:
            raise cursor.bad(f"gives tensor {shown(repr(name))} {dims} dimensions; it is damaged")
        shape = tuple(cursor.count() for _ in range(dims))
        number, offset = cursor.count("I"), cursor.count()
        kind = GGML_TYPES.get(number)
        if kind is None:
            raise cursor.bad(f"stores tensor {shown(repr(name))} in ggml type {number}, whose size is not known here")
        tensor = GgufTensor(name, kind, shape)
        if name in names or tensor.elements == 0 or tensor.elements >= 1 << 62 or shape[0] % kind.block:
            raise cursor.bad(f"describes {shown(repr(name))} wrongly ({kind.name}, {shown(shape)}); it is damaged")
        names.add(name)
        found.append(tensor)
        end = max(end, offset + tensor.bytes)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment > MIB or alignment & (alignment - 1):
        raise cursor.bad(f"has general.alignment {shown(alignment)}, which is not a power of two; it is damaged")
    start = -(-cursor.position // alignment) * alignment
    if count and start + end > size:
        raise cursor.bad(
            f"is truncated: its header describes {format_bytes(start + end, binary=False)}, the file holds "
            f"{format_bytes(size, binary=False)}; download it again"
        )
    return tuple(found)
