"""Multi-token-prediction layers that a checkpoint carries beside the model (never in `parameters.total`)."""

from __future__ import annotations

from dataclasses import replace

from bstar.codec.hf_config.decoder import Decoder, Layer
from bstar.codec.hf_config.reader import Reader
from bstar.codec.quantization import Quantization
from bstar.specs.attention import LatentAttention
from bstar.specs.formats import TensorFormat
from bstar.specs.model import ExtraBlock
from bstar.specs.tensors import WeightTensor, vector

KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "num_mtp_heads")


def mtp_layer_count(text: Reader, top: Reader) -> int:
    """The number of prediction layers the config names (0: none)."""
    for reader in (text, top):
        for key in KEYS:
            if reader.raw.get(key) is not None:
                return reader.size(key, low=0, high=64)
    return 0


def mtp_block(text: Reader, top: Reader, decoder: Decoder, quantization: Quantization, base: TensorFormat
              ) -> ExtraBlock | None:
    """The prediction layers: each one decoder layer (the last one's mechanisms), a projection of the
    hidden state beside the embedding, and three norms. Embedding and head are the model's own."""
    count = mtp_layer_count(text, top)
    if not count:
        return None
    h = decoder.hidden_size
    layers = [_alone(layer) for layer in _layers(decoder)]
    tensors = tuple(t for layer in layers for t in layer.mixer.tensors(h) + layer.ffn.tensors(h) + layer.extra)
    formats = quantization.prediction_formats(len(decoder.layers), tensors, base)
    tensors += (WeightTensor(name="eh_proj", role="mtp", rows=h, columns=2 * h), *(
        vector(name, "norm", h) for name in ("enorm", "hnorm", "shared_head.norm")))
    return ExtraBlock(
        name="mtp", role="mtp", parameters=count * sum(t.parameters for t in tensors), format=formats.default,
        in_total=False, loaded=False, tensors=tensors * count, formats=formats,
        mixers=tuple(layer.mixer for layer in layers) * count)


def _alone(layer: Layer) -> Layer:
    """A prediction layer picks its own tokens where the decoder's layers share an indexer (vLLM, deepseek_v2.py)."""
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None and mixer.indexer.shared:
        return replace(layer, mixer=replace(mixer, indexer=replace(mixer.indexer, shared=False)))
    return layer


def _layers(decoder: Decoder) -> list[Layer]:
    """The layers that make up one prediction step."""
    if decoder.mtp_layer is not None:
        return [decoder.mtp_layer]
    attention = [x for x in decoder.layers if x.mixer.kind in ("gqa", "mla", "compressed")]
    if any(x.ffn.kind == "none" for x in decoder.layers):
        sparse = [x for x in decoder.layers if x.ffn.kind == "moe"] or [
            x for x in decoder.layers if x.ffn.kind == "dense"]
        return [attention[-1], sparse[-1]] if attention and sparse else decoder.layers[-1:]
    if decoder.layers[-1].mixer.kind in ("gqa", "mla", "compressed") or not attention:
        return decoder.layers[-1:]
    return attention[-1:]
