"""Layers to groups: equal mechanism and equal storage formats fall together."""

from __future__ import annotations

from bstar.codec.hf_config.decoder import Decoder, Layer
from bstar.codec.quantization import Quantization
from bstar.specs.formats import TensorFormat
from bstar.specs.model import LayerGroup, WeightFormats
from bstar.specs.tensors import WeightTensor


def grouped(decoder: Decoder, quantization: Quantization, base: TensorFormat
            ) -> tuple[tuple[LayerGroup, ...], WeightFormats]:
    """The layer groups, in the order of their first layers, and the formats outside the layers."""
    members: dict[tuple[Layer, WeightFormats], list[int]] = {}
    tensors_of: dict[Layer, tuple[WeightTensor, ...]] = {}
    for index, layer in enumerate(decoder.layers):
        if layer not in tensors_of:
            h = decoder.hidden_size
            tensors_of[layer] = layer.mixer.tensors(h) + layer.ffn.tensors(h) + layer.extra
        formats = quantization.layer_formats(index, tensors_of[layer], base)
        members.setdefault((layer, formats), []).append(index)
    groups = tuple(
        LayerGroup(indices=tuple(indices), mixer=layer.mixer, ffn=layer.ffn, extra=layer.extra, formats=formats,
                   one_reduction=layer.one_reduction)
        for (layer, formats), indices in members.items())
    outside = decoder.embedding + decoder.lm_head + decoder.head_tensors
    return groups, quantization.outer_formats(outside, base)


def dominant_format(groups: tuple[LayerGroup, ...], hidden_size: int) -> TensorFormat:
    """The format that stores most of the layers' parameters."""
    weight: dict[TensorFormat, int] = {}
    for group in groups:
        for tensor in group.tensors(hidden_size):
            fmt = group.formats.of(tensor)
            weight[fmt] = weight.get(fmt, 0) + tensor.parameters * group.count
    return max(weight, key=lambda f: weight[f])
