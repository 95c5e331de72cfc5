"""Number formats: how a tensor is stored, and in which dtype the engine multiplies it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from bstar.errors import SpecError

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFormat:
    """Storage and arithmetic of one group of tensors.

    bits              bits of one stored element
    scale_bits        bits of one scale, 0 where there is none
    scale_block       (rows, columns) that share one scale; 0 stands for the whole extent of that
                      axis: (1, 0) is one scale per output channel, (0, 0) one per tensor
    zero_point_bits   bits of one zero point per scale block (asymmetric int4/int8)
    compute_dtype     dtype that the GEMM computes in, the key of the device's peak
    least_group       smallest size that an engine cuts the groups or blocks of experts to where a rank's share of
                      them is no whole number (AWQ, GPTQ, block fp8); 0: they stay whole
    activation_bits   bits of one activation element as the GEMM reads it
    """

    name: str
    bits: int
    compute_dtype: ComputeDtype
    activation_bits: int = 16
    scale_bits: int = 0
    scale_block: tuple[int, int] = (0, 0)
    zero_point_bits: int = 0
    least_group: int = 0

    def __post_init__(self) -> None:
        if self.bits <= 0 or self.scale_bits < 0 or self.zero_point_bits < 0:
            raise SpecError(f"format {self.name!r}: bits must be positive, scale and zero-point bits not negative")

    def bytes_of(self, rows: int, columns: int) -> int:
        """Exact stored bytes of a rows × columns tensor (rows = output features), scales included."""
        payload = ceil(rows * columns * self.bits / 8)
        per_block = self.scale_bits + self.zero_point_bits
        if not per_block:
            return payload
        block_rows = self.scale_block[0] or max(rows, 1)
        block_columns = self.scale_block[1] or max(columns, 1)
        blocks = ceil(rows / block_rows) * ceil(columns / block_columns)
        return payload + ceil(blocks * per_block / 8)

    @property
    def is_quantized(self) -> bool:
        """True where a kernel has to read scales or narrower elements than the activations'."""
        return self.bits < 16


FP32 = TensorFormat(name="fp32", bits=32, compute_dtype="fp32", activation_bits=32)
BF16 = TensorFormat(name="bf16", bits=16, compute_dtype="bf16")
FP16 = TensorFormat(name="fp16", bits=16, compute_dtype="fp16")
FP8 = TensorFormat(name="fp8", bits=8, compute_dtype="fp8", activation_bits=8, scale_bits=32)
FP8_CHANNEL = TensorFormat(
    name="fp8_channel", bits=8, compute_dtype="fp8", activation_bits=8, scale_bits=32, scale_block=(1, 0)
)
FP8_BLOCK = TensorFormat(
    name="fp8_block", bits=8, compute_dtype="fp8", activation_bits=8, scale_bits=32, scale_block=(128, 128),
    least_group=32,
)
MXFP8 = TensorFormat(name="mxfp8", bits=8, compute_dtype="fp8", activation_bits=8, scale_bits=8, scale_block=(1, 32))
W8A16 = TensorFormat(name="w8a16", bits=8, compute_dtype="bf16", scale_bits=16, scale_block=(1, 0))
INT8 = TensorFormat(name="int8", bits=8, compute_dtype="int8", activation_bits=8, scale_bits=32, scale_block=(1, 0))
NVFP4 = TensorFormat(name="nvfp4", bits=4, compute_dtype="fp4", activation_bits=4, scale_bits=8, scale_block=(1, 16))
NVFP4_W4A16 = TensorFormat(name="nvfp4_w4a16", bits=4, compute_dtype="bf16", scale_bits=8, scale_block=(1, 16))
MXFP4 = TensorFormat(name="mxfp4", bits=4, compute_dtype="bf16", scale_bits=8, scale_block=(1, 32))
MXFP4_W4A4 = TensorFormat(
    name="mxfp4_w4a4", bits=4, compute_dtype="fp4", activation_bits=4, scale_bits=8, scale_block=(1, 32)
)
W4A16 = TensorFormat(
    name="w4a16", bits=4, compute_dtype="bf16", scale_bits=16, scale_block=(1, 128), zero_point_bits=4, least_group=32
)
W4A8 = TensorFormat(
    name="w4a8", bits=4, compute_dtype="fp8", activation_bits=8, scale_bits=16, scale_block=(1, 128)
)

FORMATS: dict[str, TensorFormat] = {
    f.name: f
    for f in (
        FP32, BF16, FP16, FP8, FP8_CHANNEL, FP8_BLOCK, MXFP8, W8A16, INT8, NVFP4, NVFP4_W4A16, MXFP4, MXFP4_W4A4,
        W4A16, W4A8,
    )
}  # fmt: skip

_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "fp8_e4m3": "fp8", "e4m3": "fp8", "float8": "fp8", "w8a8_fp8": "fp8", "fp8_per_tensor": "fp8",
    "w8a8": "int8", "w8a8_int8": "int8", "int8_wo": "w8a16",
    "fp4": "nvfp4", "w4a4": "nvfp4",
    "int4": "w4a16", "awq": "w4a16", "gptq": "w4a16", "w4": "w4a16", "int4_wo": "w4a16",
}  # fmt: skip


def tensor_format(name: str) -> TensorFormat:
    """The weight format called `name` (aliases included). Raises SpecError on an unknown name."""
    key = name.strip().lower().replace("-", "_")
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise SpecError(f"weight dtype: {name!r} is not known; use one of {', '.join(sorted(FORMATS))}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """How the KV cache stores one element.

    bits            bits of one element
    scale_bits      bits of one scale, stored beside the cache
    scale_block     elements of one head (or of the latent) that share a scale; 0: one static scale
                    per tensor, which takes no cache space
    """

    name: str
    bits: int
    scale_bits: int = 0
    scale_block: int = 0

    def bytes_of(self, elements: int) -> int:
        """Exact bytes of `elements` cached values of one head, scales included."""
        payload = ceil(elements * self.bits / 8)
        if not self.scale_bits:
            return payload
        block = self.scale_block or elements
        return payload + ceil(ceil(elements / block) * self.scale_bits / 8)


KV_FORMATS: dict[str, KvFormat] = {
    "bf16": KvFormat(name="bf16", bits=16),
    "fp16": KvFormat(name="fp16", bits=16),
    "fp32": KvFormat(name="fp32", bits=32),
    "fp8": KvFormat(name="fp8", bits=8),
    "int8": KvFormat(name="int8", bits=8),
    "int8_per_token_head": KvFormat(name="int8_per_token_head", bits=8, scale_bits=32),
    "fp8_per_token_head": KvFormat(name="fp8_per_token_head", bits=8, scale_bits=32),
    "nvfp4": KvFormat(name="nvfp4", bits=4, scale_bits=8, scale_block=16),
}

_KV_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_inc": "fp8", "fp8_ds_mla": "fp8", "fp4": "nvfp4",
}  # fmt: skip


def kv_format(name: str, *, model_dtype: str = "bf16") -> KvFormat:
    """The KV cache format called `name`; `auto` is the model's dtype. Raises SpecError on an unknown name."""
    key = name.strip().lower().replace("-", "_")
    if key == "auto":
        key = model_dtype
    found = KV_FORMATS.get(_KV_ALIASES.get(key, key))
    if found is None:
        raise SpecError(f"kv cache dtype: {name!r} is not known; use auto or one of {', '.join(sorted(KV_FORMATS))}")
    return found
