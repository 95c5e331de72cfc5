"""Stub; being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bstar.specs.formats import TensorFormat
from bstar.specs.model import WeightFormats
from bstar.specs.tensors import WeightTensor


@dataclass
class Quantization:
    default: TensorFormat | None = None
    kv_cache_dtype: str | None = None
    notes: list[str] = field(default_factory=list)

    def layer_formats(self, index: int, tensors: Sequence[WeightTensor], base: TensorFormat) -> WeightFormats:
        return WeightFormats(base=base, default=self.default or base)

    def outer_formats(self, tensors: Sequence[WeightTensor], base: TensorFormat) -> WeightFormats:
        return WeightFormats(base=base, default=base)


def quantization_of(raw: Mapping[str, Any], text: Mapping[str, Any], hf: Mapping[str, Any] | None, *, base: TensorFormat
                    ) -> Quantization:
    return Quantization()
