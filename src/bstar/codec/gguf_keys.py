"""Metadata of a GGUF file by short key, checked to be what a config needs."""

from __future__ import annotations

import re
from typing import Any

from bstar.codec.gguf_file import GgufHeader, GgufTensor
from bstar.codec.safe_json import shown
from bstar.errors import ConfigError, UnsupportedArchitectureError

_MTP_TENSOR = re.compile(r"blk\.(\d{1,6})\.nextn\.")


class Keys:
    """Metadata of one architecture by short key, checked to be what the config needs."""

    def __init__(self, header: GgufHeader, architecture: str, source: str) -> None:
        self.metadata, self.architecture, self.source = header.metadata, architecture, source
        self.tensors: dict[str, GgufTensor] = {t.name: t for t in header.tensors}

    def raw(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, *, required: bool = False) -> int | None:
        """The whole number under `key`: one for all layers, or for those that have the part (0 elsewhere)."""
        value = self.raw(key)
        if isinstance(value, tuple):
            kinds = set(value) - {0} or {0}
            if len(kinds) != 1:
                raise UnsupportedArchitectureError(
                    f"gguf: {shown(self.source)}: {self.architecture}.{key} differs from layer to layer, which is not "
                    "understood here; give the model's config.json",
                    keys=(f"{self.architecture}.{key}",),
                )
            (value,) = kinds
        if value is None and not required:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            problem = "is missing" if value is None else f"is {shown(repr(value))}, not a whole number of at least 0"
            name = f"{shown(self.architecture)}.{key}"
            raise ConfigError(f"gguf: {shown(self.source)}: {name} {problem}; convert the model again")
        return value

    def tensor(self, name: str) -> GgufTensor:
        found = self.tensors.get(name)
        if found is None:
            raise ConfigError(f"gguf: {shown(self.source)} has no {name}; is it a language model?")
        return found

    def layers(self) -> int:
        """Decoder layers: the blocks without those that hold an MTP head."""
        blocks = self.number("block_count", required=True) or 0
        heads = {match[1] for n in self.tensors if (match := _MTP_TENSOR.match(n)) is not None}
        if not 0 < blocks - len(heads) < 100_000:
            raise ConfigError(f"gguf: {shown(self.source)}: block_count {blocks} is no number of layers; convert again")
        return blocks - len(heads)
