"""A GGUF file as a ModelSpec: its metadata becomes a config, its tensor types become weight formats.

The metadata keys are llama.cpp's (gguf-py `constants.py`), written as the Hub's config keys and parsed by
`model_from_config` like any other model. What comes out is then held against the tensors themselves: if the
described model has other weights than the file stores, the description is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bstar.codec.gguf_config import config_of
from bstar.codec.gguf_file import GgmlType, GgufHeader, GgufTensor, read_gguf_header
from bstar.codec.safe_json import shown
from bstar.errors import ConfigError, UnsupportedArchitectureError
from bstar.specs.formats import BF16, FP16, FP32, TensorFormat
from bstar.specs.model import LayerGroup, ModelSpec, WeightFormats
from bstar.specs.tensors import WeightTensor
from bstar.units import format_count

# Which stored tensors hold one of ours, best first. Fused or split tensors appear under both names.
_STORED_AS: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("attn_q", "attn_qkv"), "self_attn.k_proj": ("attn_k", "attn_qkv"),
    "self_attn.v_proj": ("attn_v", "attn_qkv"), "self_attn.o_proj": ("attn_output",),
    "self_attn.q_a_proj": ("attn_q_a",), "self_attn.q_b_proj": ("attn_q_b",),
    "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa",), "self_attn.kv_b_proj": ("attn_kv_b", "attn_v_b", "attn_k_b"),
    "self_attn.g_proj": ("attn_gate",), "self_attn.indexer.wq_b": ("indexer.attn_q_b",),
    "self_attn.indexer.wk": ("indexer.attn_k",), "self_attn.indexer.weights_proj": ("indexer.proj",),
    "mlp.gate_proj": ("ffn_gate", "ffn_up"), "mlp.up_proj": ("ffn_up",), "mlp.down_proj": ("ffn_down",),
    "mlp.gate": ("ffn_gate_inp",),
    "mlp.experts.gate_up_proj": ("ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up"),
    "mlp.experts.down_proj": ("ffn_down_exps", "ffn_down"),
    "mlp.shared_experts.gate_proj": ("ffn_gate_shexp",), "mlp.shared_experts.up_proj": ("ffn_up_shexp",),
    "mlp.shared_experts.down_proj": ("ffn_down_shexp",), "mlp.shared_expert_gate": ("ffn_gate_inp_shexp",),
    "linear_attn.in_proj_qkv": ("attn_qkv", "ssm_in"), "linear_attn.in_proj_z": ("attn_gate", "ssm_in"),
    "linear_attn.in_proj_b": ("ssm_beta", "ssm_ba"), "linear_attn.in_proj_a": ("ssm_alpha", "ssm_ba"),
    "linear_attn.conv1d": ("ssm_conv1d",), "linear_attn.out_proj": ("ssm_out",),
    "mlp.fc1_latent_proj": ("ffn_latent_down",), "mlp.fc2_latent_proj": ("ffn_latent_up",),
    "mixer.in_proj": ("ssm_in",), "mixer.conv1d": ("ssm_conv1d",), "mixer.out_proj": ("ssm_out",),
}  # fmt: skip
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,6})\.(.+?)(?:\.\d{1,5})?(?:\.(weight|bias))?")
# Tables that are computed from the config, not learned.
_COMPUTED = re.compile(r"(^|\.)(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)(\.|$)")
# Refuse where the description and the file differ by more than padding and per-layer scalars can explain.
_MAX_DIFFERENCE_FRACTION = 0.005


def read_gguf(path: Path) -> ModelSpec:
    """The model in a GGUF file (of several parts, give any); weights by the exact bytes of their types.

    Raises ConfigError for a file that cannot be read, UnsupportedArchitectureError for a model that is not
    understood.
    """
    header = read_gguf_header(path)
    return model_from_gguf(header, name=_model_name(path), source=str(path))


def model_from_gguf(header: GgufHeader, *, name: str, source: str = "") -> ModelSpec:
    """The ModelSpec that a GGUF header describes; see `read_gguf`."""
    from bstar.codec.hf_config import model_from_config

    tensors = {t.name: t for t in header.tensors}
    config = config_of(header, source or name)
    try:
        model = model_from_config(config, name=name, source=source)
    except UnsupportedArchitectureError as error:
        architecture = header.metadata.get("general.architecture", "?")
        raise UnsupportedArchitectureError(
            f"gguf architecture {shown(repr(architecture))}: {error}", keys=("general.architecture", *error.keys)
        ) from None
    decoder = {n: t for n, t in tensors.items() if not _is_mtp(n, model.num_layers) and not _COMPUTED.search(n)}
    _hold_against_file(model, decoder, source or name)
    return _with_formats(model, decoder)


def ggml_format(kind: GgmlType) -> TensorFormat:
    """A ggml type as a TensorFormat with exactly its bytes per block.

    The payload is the whole bits per element, the rest of the block (scales, minima, high bits) its scale.
    Kernels dequantize to 16 bits, so a quantized GEMM computes at the fp16 peak.
    """
    plain = {"f32": FP32, "f16": FP16, "bf16": BF16}.get(kind.name)
    if plain is not None:
        return plain
    bits = kind.bytes * 8 // kind.block
    return TensorFormat(
        name=kind.name, bits=bits, compute_dtype="fp16", scale_bits=kind.bytes * 8 - bits * kind.block,
        scale_block=(1, kind.block),
    )  # fmt: skip


def _model_name(path: Path) -> str:
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return stem or path.resolve().parent.name or "model"


def _is_mtp(name: str, num_layers: int) -> bool:
    match = _LAYER_TENSOR.fullmatch(name)
    return match is not None and int(match[1]) >= num_layers


def _hold_against_file(model: ModelSpec, tensors: Mapping[str, GgufTensor], source: str) -> None:
    described = sum(t.parameters for g in model.layers for t in g.tensors(model.hidden_size) for _ in g.indices)
    described += sum(t.parameters for t in (*model.embedding, *model.head_tensors))
    described += 0 if model.tied else sum(t.parameters for t in model.lm_head)
    # Files with MLA's up-projection in both forms (kv_b, and k_b with v_b) store it twice.
    twice = any(n.endswith(".attn_kv_b.weight") for n in tensors)
    stored = sum(
        t.elements for n, t in tensors.items()
        if not (twice and n.endswith((".attn_k_b.weight", ".attn_v_b.weight")))
    )  # fmt: skip
    if abs(described - stored) > _MAX_DIFFERENCE_FRACTION * stored:
        raise UnsupportedArchitectureError(
            f"gguf: {shown(source)}: its metadata describes {format_count(described)} parameters as understood here, "
            f"its tensors hold {format_count(stored)}; give the model's config.json instead",
            keys=("general.architecture",),
        )


def _with_formats(model: ModelSpec, tensors: Mapping[str, GgufTensor]) -> ModelSpec:
    by_layer: dict[int, dict[str, GgmlType]] = {}
    size_of: Counter[str] = Counter()
    for name, tensor in tensors.items():
        size_of[tensor.type.name] += tensor.elements
        match = _LAYER_TENSOR.fullmatch(name)
        if match is not None and match[3] != "bias":
            by_layer.setdefault(int(match[1]), {})[match[2]] = tensor.type
    main = max(tensors.values(), key=lambda t: size_of[t.type.name]).type
    default = ggml_format(main)
    groups: list[LayerGroup] = []
    for group in model.layers:
        alike: dict[WeightFormats, list[int]] = {}
        own = group.tensors(model.hidden_size)
        for index in group.indices:
            formats = _layer_formats(own, by_layer.get(index, {}), default)
            alike.setdefault(formats, []).append(index)
        groups += [replace(group, indices=tuple(i), formats=f) for f, i in alike.items()]
    groups.sort(key=lambda g: g.indices[0])
    dtype = "bf16" if size_of["bf16"] and not size_of["f16"] and default is BF16 else "fp16"
    return replace(
        model, layers=tuple(groups), outer_formats=_outer_formats(model, tensors, default), dtype=dtype,
        weight_dtype=default.name, checkpoint_weight_bytes=sum(t.bytes for t in tensors.values()),
    )  # fmt: skip


def _layer_formats(
    own: tuple[WeightTensor, ...], stored: Mapping[str, GgmlType], default: TensorFormat
) -> WeightFormats:
    overrides: list[tuple[str, TensorFormat]] = []
    for tensor in own:
        kind = next((stored[s] for s in _STORED_AS.get(tensor.name, ()) if s in stored), None)
        if kind is not None:
            overrides.append((tensor.name, ggml_format(kind)))
    # Norms, biases and other vectors stay fp32 in GGUF.
    return WeightFormats(base=FP32, default=default, overrides=tuple(overrides))


def _outer_formats(model: ModelSpec, tensors: Mapping[str, GgufTensor], default: TensorFormat) -> WeightFormats:
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ConfigError(f"gguf: {shown(model.source)} has no token_embd.weight; is it a language model?")
    head = tensors.get("output.weight", table)
    overrides = [(t.name, ggml_format(table.type)) for t in model.embedding if t.rows > 1]
    overrides += [(t.name, ggml_format(head.type)) for t in model.lm_head if t.rows > 1]
    return WeightFormats(base=FP32, default=default, overrides=tuple(overrides))
