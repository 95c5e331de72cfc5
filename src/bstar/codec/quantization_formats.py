"""One quantization scheme (bits, groups, activations) -> a TensorFormat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bstar.errors import ConfigError
from bstar.specs.formats import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8,
    MXFP4,
    MXFP4_W4A4,
    MXFP8,
    NVFP4,
    NVFP4_W4A16,
    W4A8,
    W4A16,
    W8A16,
    ComputeDtype,
    TensorFormat,
)

# Weights in MXFP4 (one 8-bit scale per 32), activations in 8-bit floats (DeepSeek V4's experts).
MXFP4_W4A8 = TensorFormat(name="mxfp4_w4a8", bits=4, compute_dtype="fp8", activation_bits=8, scale_bits=8,
                          scale_block=(1, 32))
W8A16_CHANNEL = W8A16
FP8_W8A16 = TensorFormat(name="fp8_w8a16", bits=8, compute_dtype="bf16", scale_bits=32, scale_block=(1, 0))

# Block fp8 of ModelOpt and compressed-tensors: engines do not cut the blocks of its experts.
WHOLE_BLOCK = replace(FP8_BLOCK, least_group=0)

MODELOPT: dict[str, TensorFormat] = {
    "FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL, "FP8_PB_WO": WHOLE_BLOCK, "FP8_PB_REAL": WHOLE_BLOCK,
    "FP8_BLOCK_SCALES": WHOLE_BLOCK, "MXFP8": MXFP8, "NVFP4": NVFP4, "NVFP4_AWQ": NVFP4, "NVFP4_SVDQUANT": NVFP4,
    "W4A16_NVFP4": NVFP4_W4A16, "NVFP4_W4A16": NVFP4_W4A16, "W4A8_NVFP4_FP8": replace(NVFP4, name="nvfp4_w4a8",
                                                                                      compute_dtype="fp8",
                                                                                      activation_bits=8),
    "MXFP4": MXFP4, "W4A8_MXFP4_FP8": MXFP4_W4A8, "W4A16_MXFP4": MXFP4, "W4A8_AWQ": W4A8, "W4A16_AWQ": W4A16,
    "INT4_AWQ": W4A16, "W4A16": W4A16, "INT8_SQ": INT8, "W8A8_SQ_PER_CHANNEL": INT8, "INT8": INT8,
    "W8A16": W8A16, "INT8_WO": W8A16,
}  # fmt: skip


def _whole(value: Any, key: str, *, low: int = 1, high: int = 1 << 20) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        shown = value if isinstance(value, (int, float)) and abs(value) < 1e12 else str(value)[:40]
        raise ConfigError(f"config.json: quantization_config.{key} is {shown!r}; it must be a whole number of "
                          f"{low} to {high}")
    return value


def fp8(config: Mapping[str, Any]) -> TensorFormat:
    """FP8 weights: by block where weight_block_size says so, else one scale per tensor."""
    block = config.get("weight_block_size")
    if block is None:
        return FP8
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise ConfigError("config.json: quantization_config.weight_block_size must be a pair like [128, 128]")
    rows, columns = (_whole(x, "weight_block_size") for x in block)
    return FP8_BLOCK if (rows, columns) == FP8_BLOCK.scale_block else replace(
        FP8_BLOCK, name=f"fp8_block_{rows}x{columns}", scale_block=(rows, columns))


def modelopt(algorithm: str, config: Mapping[str, Any]) -> TensorFormat:
    """A ModelOpt algorithm; group_size where it differs from the algorithm's own."""
    fmt = MODELOPT.get(algorithm.upper())
    if fmt is None:
        raise ConfigError(f"config.json: quantization_config.quant_algo {algorithm[:40]!r} is not known; known are "
                          f"{', '.join(sorted(MODELOPT))}, MIXED_PRECISION")
    group = config.get("group_size")
    if group is None or fmt.bits > 4 or fmt.scale_block[0] != 1:
        return fmt
    size = _whole(group, "group_size")
    return fmt if size == fmt.scale_block[1] else replace(fmt, name=f"{fmt.name}_g{size}", scale_block=(1, size))


def _integer(bits: int, group: int, *, scale_bits: int, zero_point_bits: int, compute: ComputeDtype = "bf16",
             activation_bits: int = 16, name: str = "") -> TensorFormat:
    """Integer weights with one scale (and zero point) per `group` inputs; group 0: per output channel."""
    label = name or f"w{bits}a{activation_bits}"
    tail = f"_g{group}" if group and (group, bits) != (128, 4) else "_channel" if not group and bits != 8 else ""
    sym = "" if zero_point_bits or bits != 4 else "_sym"
    return TensorFormat(name=f"{label}{tail}{sym}", bits=bits, compute_dtype=compute, activation_bits=activation_bits,
                        scale_bits=scale_bits, scale_block=(1, group), zero_point_bits=zero_point_bits)


def integer_groups(config: Mapping[str, Any], *, bits_keys: Sequence[str], zero_points: bool) -> TensorFormat:
    """Weight-only integers of GPTQ, AWQ and AutoRound: 16-bit scales, `bits`-wide zero points per group."""
    bits = _whole(next((config[k] for k in bits_keys if config.get(k) is not None), 4), bits_keys[0], low=1, high=8)
    group = next((config[k] for k in ("group_size", "q_group_size") if config.get(k) is not None), 128)
    size = 0 if group == -1 else _whole(group, "group_size")
    fmt = _integer(bits, size, scale_bits=16, zero_point_bits=bits if zero_points else 0)
    return replace(fmt, least_group=32) if size else fmt


def bitsandbytes(config: Mapping[str, Any]) -> TensorFormat:
    """NF4/FP4 in blocks of 64 (fp32 maxima, or 8-bit ones when quantized twice), or LLM.int8 rows."""
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return replace(INT8, name="bnb_int8")
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        double = bool(config.get("bnb_4bit_use_double_quant"))
        return TensorFormat(name="bnb_4bit", bits=4, compute_dtype="bf16", scale_bits=8 if double else 32,
                            scale_block=(1, 64))
    raise ConfigError("config.json: quantization_config sets neither load_in_4bit nor load_in_8bit; set one")


def compressed(group: Mapping[str, Any], layout: str) -> TensorFormat:
    """One config group of compressed-tensors."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ConfigError("config.json: config_groups.*.weights is missing; it must say num_bits, type and strategy")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ConfigError("config.json: config_groups.*.input_activations must be an object or null")
    bits = _whole(weights.get("num_bits", 8), "config_groups.weights.num_bits", low=1, high=8)
    kind = str(weights.get("type", "int")).lower()
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")).lower()
    group_size = weights.get("group_size")
    input_bits = 16
    if inputs:
        input_bits = _whole(inputs.get("num_bits", 8), "config_groups.input_activations.num_bits", high=16)
    input_kind = str(inputs.get("type", "int")).lower() if inputs else ""
    if kind == "float":
        return _float(bits, strategy, group_size, weights.get("block_structure"), input_bits, layout)
    if kind != "int":
        raise ConfigError(f"config.json: config_groups.weights.type {kind[:20]!r} is not known; known are int, float")
    size = _whole(group_size, "group_size") if strategy == "group" and group_size not in (None, -1) else 0
    zero = 0 if weights.get("symmetric", True) is not False else bits
    if input_bits == 16:
        return _integer(bits, size, scale_bits=16, zero_point_bits=zero)
    compute: ComputeDtype = "fp8" if input_kind == "float" else "int8"
    if bits == 8 and not size:
        return INT8 if compute == "int8" else replace(INT8, name="int8_fp8", compute_dtype="fp8")
    return _integer(bits, size, scale_bits=16, zero_point_bits=zero, compute=compute, activation_bits=input_bits)


def _float(bits: int, strategy: str, group_size: Any, block: Any, input_bits: int, layout: str) -> TensorFormat:
    if bits == 8:
        if strategy == "block":
            return replace(fp8({"weight_block_size": block or [128, 128]}), least_group=0)
        if strategy == "group" and group_size == 32:
            return MXFP8
        if input_bits == 16:
            return FP8_W8A16 if strategy == "channel" else replace(FP8_W8A16, name="fp8_w8a16_tensor",
                                                                   scale_block=(0, 0))
        return FP8_CHANNEL if strategy == "channel" else FP8
    if bits == 4:
        size = _whole(group_size or 16, "group_size")
        micro = "mxfp4" in layout or size == 32
        if micro:
            return MXFP4 if input_bits == 16 else MXFP4_W4A4 if input_bits == 4 else MXFP4_W4A8
        fmt = NVFP4_W4A16 if input_bits == 16 else NVFP4
        return fmt if size == 16 else replace(fmt, name=f"{fmt.name}_g{size}", scale_block=(1, size))
    raise ConfigError(f"config.json: config_groups.weights: {bits}-bit floats are not known; known are 8 and 4 bits")


def quark(spec: Any) -> TensorFormat | None:
    """One Quark config: weight dtype, scheme and group; None where weights are not quantized."""
    if not isinstance(spec, Mapping):
        raise ConfigError("config.json: quantization_config.global_quant_config must be an object")
    weight, inputs = spec.get("weight"), spec.get("input_tensors")
    if isinstance(weight, list):
        weight = weight[-1] if weight else None
    if isinstance(inputs, list):
        inputs = inputs[-1] if inputs else None
    if weight is None:
        return None
    if not isinstance(weight, Mapping):
        raise ConfigError("config.json: quantization_config.global_quant_config.weight must be an object")
    kind, scheme = str(weight.get("dtype", "")).lower(), str(weight.get("qscheme", "")).lower()
    input_kind = str(inputs.get("dtype", "")).lower() if isinstance(inputs, Mapping) else ""
    if kind.startswith("fp8"):
        return FP8_CHANNEL if "channel" in scheme else FP8_BLOCK if "block" in scheme else FP8
    if kind in ("fp4", "mx", "mxfp4", "fp4_e2m1"):
        return MXFP4_W4A4 if "fp4" in input_kind else MXFP4_W4A8 if input_kind else MXFP4
    if kind == "int8":
        return INT8 if input_kind else W8A16
    if kind in ("int4", "uint4"):
        group = weight.get("group_size") or 0
        size = 0 if group in (0, -1) else _whole(group, "group_size")
        if input_kind.startswith("fp8"):
            return replace(W4A8, scale_block=(1, size))
        return _integer(4, size, scale_bits=16, zero_point_bits=0 if weight.get("symmetric") else 4)
    raise ConfigError(f"config.json: Quark weight dtype {kind[:30]!r} is not known; known are fp8_e4m3, fp4, int8, "
                      "int4")


def torchao(config: Mapping[str, Any]) -> TensorFormat:
    """TorchAO by the name of its config class or of its short form."""
    kind: Any = config.get("quant_type")
    if isinstance(kind, Mapping):
        inner = kind.get("default", kind)
        data = inner.get("_data", {}) if isinstance(inner, Mapping) else {}
        group = data.get("group_size") if isinstance(data, Mapping) else None
        kind = inner.get("_type", "") if isinstance(inner, Mapping) else ""
    else:
        arguments = config.get("quant_type_kwargs")
        group = arguments.get("group_size") if isinstance(arguments, Mapping) else None
    text = str(kind).lower().replace("_", "").removesuffix("config")
    size = 0 if group in (None, -1) else _whole(group, "group_size")
    known = {
        "float8dynamicactivationfloat8weight": FP8_CHANNEL, "float8weightonly": FP8_W8A16, "int8weightonly": W8A16,
        "int8dynamicactivationint8weight": INT8,
    }
    if text in known:
        return known[text]
    if text == "int4weightonly":
        return _integer(4, size or 128, scale_bits=16, zero_point_bits=16)
    if text == "int8dynamicactivationint4weight":
        return _integer(4, size or 32, scale_bits=32, zero_point_bits=0, compute="int8", activation_bits=8)
    raise ConfigError(f"config.json: TorchAO quant_type {str(kind)[:40]!r} is not known; known are "
                      f"{', '.join(sorted([*known, 'int4weightonly', 'int8dynamicactivationint4weight']))}")
