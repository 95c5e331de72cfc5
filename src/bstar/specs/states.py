"""Token mixers that keep a state of constant size per sequence: linear attention, Mamba, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bstar.specs.cache import CacheEntry
from bstar.specs.tensors import WeightTensor, vector


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention with a gated delta rule (Qwen3-Next, Qwen3.5): a matrix state per value head.

    conv_bits, state_bits   width of the cached convolution inputs and of the recurrent state
    """

    kind: ClassVar[str] = "gated_delta_net"
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int
    conv_bits: int = 16
    state_bits: int = 32

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p = hidden_size, "linear_attn."
        key, value = self.num_k_heads * self.k_head_dim, self.num_v_heads * self.v_head_dim
        return (
            WeightTensor(name=p + "in_proj_qkv", role="qkv", rows=2 * key + value, columns=h, shard="column"),
            WeightTensor(name=p + "in_proj_z", role="qkv", rows=value, columns=h, shard="column"),
            WeightTensor(name=p + "in_proj_b", role="qkv", rows=self.num_v_heads, columns=h, shard="column"),
            WeightTensor(name=p + "in_proj_a", role="qkv", rows=self.num_v_heads, columns=h, shard="column"),
            WeightTensor(name=p + "conv1d", role="mixer", rows=2 * key + value, columns=self.conv_kernel,
                         shard="column", matmul=False),
            vector(p + "dt_bias", "mixer", self.num_v_heads, shard="column"),
            vector(p + "A_log", "mixer", self.num_v_heads, shard="column"),
            vector(p + "norm", "norm", self.v_head_dim),
            WeightTensor(name=p + "out_proj", role="out", rows=h, columns=value, shard="row"),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        key, value = self.num_k_heads * self.k_head_dim, self.num_v_heads * self.v_head_dim
        return (
            CacheEntry(kind="state", heads=self.num_k_heads, bits=self.conv_bits, fp8_capable=False,
                       elements=(self.conv_kernel - 1) * (2 * key + value)),
            CacheEntry(kind="state", heads=self.num_v_heads, bits=self.state_bits, fp8_capable=False,
                       elements=self.num_v_heads * self.k_head_dim * self.v_head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """State-space mixer of Mamba 2 (Nemotron-H, Granite 4, Falcon-H1, Bamba): a state per head.

    gated_norm   a norm of the inner width after the scan (Falcon-H1 has none)
    proj_bias, out_bias   biases of the projections into and out of the state space
    """

    kind: ClassVar[str] = "mamba2"
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    gated_norm: bool = True
    conv_bits: int = 16
    state_bits: int = 32

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p, inner = hidden_size, "mixer.", self.inner_size
        rows = inner + self.conv_width + self.num_heads
        out = [
            WeightTensor(name=p + "in_proj", role="qkv", rows=rows, columns=h, shard="column"),
            WeightTensor(name=p + "conv1d", role="mixer", rows=self.conv_width, columns=self.conv_kernel,
                         shard="column", matmul=False),
            vector(p + "dt_bias", "mixer", self.num_heads, shard="column"),
            vector(p + "A_log", "mixer", self.num_heads, shard="column"),
            vector(p + "D", "mixer", self.num_heads, shard="column"),
            WeightTensor(name=p + "out_proj", role="out", rows=h, columns=inner, shard="row"),
        ]
        if self.gated_norm:
            out.append(vector(p + "norm", "norm", inner, shard="column"))
        if self.conv_bias:
            out.append(vector(p + "conv1d.bias", "mixer", self.conv_width, shard="column"))
        if self.proj_bias:
            out.append(vector(p + "in_proj.bias", "qkv", rows, shard="column"))
        if self.out_bias:
            out.append(vector(p + "out_proj.bias", "out", h))
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        steps = self.conv_kernel - 1
        return (
            CacheEntry(kind="state", heads=self.num_heads, bits=self.conv_bits, fp8_capable=False,
                       elements=steps * self.inner_size),
            # B and C of a group are needed by all its heads: replicated where TP exceeds the groups.
            CacheEntry(kind="state", heads=self.num_groups, bits=self.conv_bits, fp8_capable=False,
                       elements=steps * 2 * self.num_groups * self.state_size),
            CacheEntry(kind="state", heads=self.num_heads, bits=self.state_bits, fp8_capable=False,
                       elements=self.num_heads * self.head_dim * self.state_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """Selective state-space mixer of Mamba 1 (Mamba, Jamba, FalconMamba): a state per channel.

    inner_norms   norms on dt, B and C that have weights (Jamba)
    """

    kind: ClassVar[str] = "mamba1"
    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: bool = False
    conv_bits: int = 16
    state_bits: int = 16

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p, inner = hidden_size, "mixer.", self.inner_size
        out = [
            WeightTensor(name=p + "in_proj", role="qkv", rows=2 * inner, columns=h, shard="column"),
            WeightTensor(name=p + "conv1d", role="mixer", rows=inner, columns=self.conv_kernel, shard="column",
                         matmul=False),
            WeightTensor(name=p + "x_proj", role="mixer", rows=self.dt_rank + 2 * self.state_size, columns=inner,
                         shard="row"),
            WeightTensor(name=p + "dt_proj", role="mixer", rows=inner, columns=self.dt_rank, shard="column"),
            vector(p + "dt_proj.bias", "mixer", inner, shard="column"),
            WeightTensor(name=p + "A_log", role="mixer", rows=inner, columns=self.state_size, shard="column",
                         matmul=False),
            vector(p + "D", "mixer", inner, shard="column"),
            WeightTensor(name=p + "out_proj", role="out", rows=h, columns=inner, shard="row"),
        ]
        if self.conv_bias:
            out.append(vector(p + "conv1d.bias", "mixer", inner, shard="column"))
        if self.proj_bias:
            out += [vector(p + "in_proj.bias", "qkv", 2 * inner, shard="column"), vector(p + "out_proj.bias", "out", h)]
        if self.inner_norms:
            out += [
                vector(p + "dt_layernorm", "norm", self.dt_rank),
                vector(p + "b_layernorm", "norm", self.state_size),
                vector(p + "c_layernorm", "norm", self.state_size),
            ]
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        return (
            CacheEntry(kind="state", heads=self.inner_size, bits=self.conv_bits, fp8_capable=False,
                       elements=(self.conv_kernel - 1) * self.inner_size),
            CacheEntry(kind="state", heads=self.inner_size, bits=self.state_bits, fp8_capable=False,
                       elements=self.inner_size * self.state_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningAttention:
    """Linear attention with a fixed decay per head (MiniMax-Text-01): a head_dim × head_dim state per head."""

    kind: ClassVar[str] = "lightning"
    num_heads: int
    head_dim: int
    state_bits: int = 16

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p, inner = hidden_size, "self_attn.", self.num_heads * self.head_dim
        return (
            WeightTensor(name=p + "qkv_proj", role="qkv", rows=3 * inner, columns=h, shard="column"),
            WeightTensor(name=p + "output_gate", role="qkv", rows=inner, columns=h, shard="column"),
            vector(p + "norm", "norm", inner, shard="column"),
            WeightTensor(name=p + "out_proj", role="out", rows=h, columns=inner, shard="row"),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        return (CacheEntry(kind="state", heads=self.num_heads, bits=self.state_bits, fp8_capable=False,
                           elements=self.num_heads * self.head_dim * self.head_dim),)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaAttention:
    """Delta attention with a decay per channel (Kimi-Linear): a head_dim × head_dim state per head.

    gate_rank   width between the two matrices of the decay and of the output gate
    full_gate   the output gate is one full matrix (Kimi K3)
    """

    kind: ClassVar[str] = "kimi_delta"
    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_rank: int
    full_gate: bool = False
    conv_bits: int = 16
    state_bits: int = 32

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p, inner, rank = hidden_size, "self_attn.", self.num_heads * self.head_dim, self.gate_rank
        gate: tuple[WeightTensor, ...] = (
            WeightTensor(name=p + "g_a_proj", role="qkv", rows=rank, columns=h),
            WeightTensor(name=p + "g_b_proj", role="qkv", rows=inner, columns=rank, shard="column"),
        )
        if self.full_gate:
            gate = (WeightTensor(name=p + "g_proj", role="qkv", rows=inner, columns=h, shard="column"),)
        return (
            *(WeightTensor(name=f"{p}{n}_proj", role="qkv", rows=inner, columns=h, shard="column") for n in "qkv"),
            WeightTensor(name=p + "conv1d", role="mixer", rows=3 * inner, columns=self.conv_kernel, shard="column",
                         matmul=False),
            WeightTensor(name=p + "f_a_proj", role="qkv", rows=rank, columns=h),
            WeightTensor(name=p + "f_b_proj", role="qkv", rows=inner, columns=rank, shard="column"),
            WeightTensor(name=p + "b_proj", role="qkv", rows=self.num_heads, columns=h, shard="column"),
            *gate,
            vector(p + "dt_bias", "mixer", inner, shard="column"),
            vector(p + "A_log", "mixer", self.num_heads, shard="column"),
            vector(p + "o_norm", "norm", self.head_dim),
            WeightTensor(name=p + "o_proj", role="out", rows=h, columns=inner, shard="row"),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        inner = self.num_heads * self.head_dim
        return (
            CacheEntry(kind="state", heads=self.num_heads, bits=self.conv_bits, fp8_capable=False,
                       elements=(self.conv_kernel - 1) * 3 * inner),
            CacheEntry(kind="state", heads=self.num_heads, bits=self.state_bits, fp8_capable=False,
                       elements=inner * self.head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """Gated short convolution (LFM2): keeps the last kernel - 1 inputs of each channel."""

    kind: ClassVar[str] = "short_conv"
    width: int
    conv_kernel: int
    bias: bool = False
    conv_bits: int = 16

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p, w = hidden_size, "conv.", self.width
        out = [
            WeightTensor(name=p + "in_proj", role="qkv", rows=3 * w, columns=h, shard="column"),
            WeightTensor(name=p + "conv", role="mixer", rows=w, columns=self.conv_kernel, shard="column", matmul=False),
            WeightTensor(name=p + "out_proj", role="out", rows=h, columns=w, shard="row"),
        ]
        if self.bias:
            out += [vector(p + "in_proj.bias", "qkv", 3 * w, shard="column"), vector(p + "conv.bias", "mixer", w),
                    vector(p + "out_proj.bias", "out", h)]
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        return (CacheEntry(kind="state", heads=self.width, bits=self.conv_bits, fp8_capable=False,
                           elements=(self.conv_kernel - 1) * self.width),)
