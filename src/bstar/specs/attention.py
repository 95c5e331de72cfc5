"""Token mixers: one frozen spec per kind of attention or state, so that a hybrid model is a list of specs.

Each kind answers two questions and no others here: which weight tensors it holds (`tensors`), and what
it keeps per sequence (`cache`). FLOPs and bytes of a step are counted in `bstar.physics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from bstar.specs.cache import CacheEntry
from bstar.specs.states import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from bstar.specs.tensors import WeightTensor, vector

__all__ = [
    "CacheEntry",
    "CompressedAttention",
    "CrossAttention",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "KimiDeltaAttention",
    "LatentAttention",
    "LightningAttention",
    "Mamba1",
    "Mamba2",
    "Mixer",
    "NoMixer",
    "ParallelMixers",
    "QkNorm",
    "ShortConvolution",
    "SparseIndexer",
]

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexer:
    """The lightning indexer of sparse attention: picks `top_k` cached tokens for each query.

    shared   no indexer of its own: the layer reuses an earlier layer's picks (GLM-5.2)
    pool         tokens whose index keys are pooled into one (GLM5-Next: 16)
    block_size   tokens that are picked together (MiniMax M3: blocks of 128; top_k counts tokens)
    """

    num_heads: int
    head_dim: int
    top_k: int
    shared: bool = False
    block_size: int = 1
    pool: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Softmax attention with K and V per head: MHA, GQA and MQA; full, sliding-window or chunked.

    window       tokens a query sees at most (None: all)
    chunked      the window is a chunk [i·window, (i+1)·window) instead of the last `window` tokens
    output_gate  q_proj also makes a gate of the same width (Qwen3-Next, Qwen3.5)
    k_eq_v       no v_proj: V is K before its norm (Gemma 4 global layers); both are cached
    shares_kv    no k/v projections and no cache of its own: reads an earlier layer's
    sinks        one learned logit per query head
    head_gate    g_proj: one gate per query head (Step-3.5)
    full_gate    g_proj: one gate per query channel (AFMoE)
    indexer      block-sparse attention: a query sees the blocks that the indexer picks (MiniMax M3)
    q_rank       the query comes from a low-rank input that q_proj makes: wq widens it (Step-3)
    qk_norm      "head": one weight of head_dim, shared by the heads; "full": one weight per channel
    """

    kind: ClassVar[str] = "gqa"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunked: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = "none"
    output_gate: bool = False
    head_gate: bool = False
    k_eq_v: bool = False
    shares_kv: bool = False
    sinks: bool = False
    full_gate: bool = False
    q_rank: int | None = None
    indexer: SparseIndexer | None = None
    qk_norm_bias: bool = False

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h = hidden_size
        q_rows = self.num_heads * self.head_dim * (2 if self.output_gate else 1)
        k_rows, v_rows = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim
        p = "self_attn."
        if self.q_rank is None:
            out = [WeightTensor(name=p + "q_proj", role="qkv", rows=q_rows, columns=h, shard="column")]
        else:
            out = [
                WeightTensor(name=p + "q_proj", role="qkv", rows=self.q_rank, columns=h),
                vector(p + "inter_norm", "norm", self.q_rank),
                WeightTensor(name=p + "wq", role="qkv", rows=q_rows, columns=self.q_rank, shard="column"),
            ]
        if not self.shares_kv:
            out.append(WeightTensor(
                name=p + "k_proj", role="qkv", rows=k_rows, columns=h, shard="kv", heads=self.num_kv_heads))
            if not self.k_eq_v:
                out.append(WeightTensor(
                    name=p + "v_proj", role="qkv", rows=v_rows, columns=h, shard="kv", heads=self.num_kv_heads))
        out.append(WeightTensor(
            name=p + "o_proj", role="out", rows=h, columns=self.num_heads * self.v_head_dim, shard="row"))
        if self.qkv_bias:
            out.append(vector(p + "q_proj.bias", "qkv", q_rows, shard="column"))
            if not self.shares_kv:
                out.append(vector(p + "k_proj.bias", "qkv", k_rows))
                if not self.k_eq_v:
                    out.append(vector(p + "v_proj.bias", "qkv", v_rows))
        if self.out_bias:
            out.append(vector(p + "o_proj.bias", "out", h))
        if self.head_gate or self.full_gate:
            gate_rows = self.num_heads * (self.v_head_dim if self.full_gate else 1)
            out.append(WeightTensor(name=p + "g_proj", role="qkv", rows=gate_rows, columns=h, shard="column"))
        if self.sinks:
            out.append(vector(p + "sinks", "attn", self.num_heads, shard="column"))
        if self.qk_norm != "none":
            per_head = self.qk_norm == "head"
            lengths = {"q_norm": self.head_dim if per_head else self.num_heads * self.head_dim}
            if not self.shares_kv:
                lengths["k_norm"] = self.head_dim if per_head else k_rows
            for name, length in lengths.items():
                out.append(vector(p + name, "norm", length))
                if self.qk_norm_bias:
                    out.append(vector(f"{p}{name}.bias", "norm", length))
        ix = self.indexer
        if ix is not None:
            q = p + "indexer."
            out += [
                WeightTensor(name=q + "q_proj", role="indexer", rows=ix.num_heads * ix.head_dim, columns=h),
                WeightTensor(name=q + "k_proj", role="indexer", rows=ix.head_dim, columns=h),
                vector(q + "q_norm", "norm", ix.head_dim),
                vector(q + "k_norm", "norm", ix.head_dim),
            ]
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        if self.shares_kv:
            return ()
        kv = CacheEntry(kind="kv", heads=self.num_kv_heads, elements=self.head_dim + self.v_head_dim,
                        window=self.window, chunked=self.chunked)
        if self.indexer is None:
            return (kv,)
        # vLLM keeps one index key per token at the model's own width beside the KV cache.
        return (kv, CacheEntry(kind="index", heads=1, elements=self.indexer.head_dim, bits=16, fp8_capable=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one latent of kv_lora_rank + qk_rope_head_dim per token.

    q_lora_rank   None: one full q_proj
    indexer       sparse attention over the latent cache (DeepSeek V3.2, GLM-5)
    output_gate   g_proj gates the attention's output, per channel (Kimi K3)
    """

    kind: ClassVar[str] = "mla"
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: SparseIndexer | None = None
    bias: bool = False
    output_gate: bool = False

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p = hidden_size, "self_attn."
        qk = self.qk_nope_head_dim + self.qk_rope_head_dim
        out: list[WeightTensor] = []
        if self.q_lora_rank is None:
            out.append(WeightTensor(
                name=p + "q_proj", role="qkv", rows=self.num_heads * qk, columns=h, shard="column"))
        else:
            out += [
                WeightTensor(name=p + "q_a_proj", role="qkv", rows=self.q_lora_rank, columns=h),
                vector(p + "q_a_layernorm", "norm", self.q_lora_rank),
                WeightTensor(name=p + "q_b_proj", role="qkv", rows=self.num_heads * qk, columns=self.q_lora_rank,
                             shard="column"),
            ]
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        out += [
            WeightTensor(name=p + "kv_a_proj_with_mqa", role="qkv", rows=latent, columns=h),
            vector(p + "kv_a_layernorm", "norm", self.kv_lora_rank),
            WeightTensor(name=p + "kv_b_proj", role="qkv", columns=self.kv_lora_rank, shard="column",
                         rows=self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)),
            WeightTensor(name=p + "o_proj", role="out", rows=h, columns=self.num_heads * self.v_head_dim, shard="row"),
        ]
        if self.output_gate:
            out.append(WeightTensor(name=p + "g_proj", role="qkv", rows=self.num_heads * self.v_head_dim, columns=h,
                                    shard="column"))
        if self.bias:
            if self.q_lora_rank is not None:
                out.append(vector(p + "q_a_proj.bias", "qkv", self.q_lora_rank))
            out += [vector(p + "kv_a_proj_with_mqa.bias", "qkv", latent), vector(p + "o_proj.bias", "out", h)]
        ix = self.indexer
        if ix is not None and not ix.shared:
            source = self.q_lora_rank or h
            out += [
                WeightTensor(name=p + "indexer.wq_b", role="indexer", rows=ix.num_heads * ix.head_dim, columns=source),
                WeightTensor(name=p + "indexer.wk", role="indexer", rows=ix.head_dim, columns=h),
                WeightTensor(name=p + "indexer.weights_proj", role="indexer", rows=ix.num_heads, columns=h),
                vector(p + "indexer.k_norm", "norm", ix.head_dim),
                vector(p + "indexer.k_norm.bias", "norm", ix.head_dim),
            ]
            if ix.pool > 1:
                out += [
                    WeightTensor(name=p + "indexer.kpool_ape", role="indexer", rows=ix.pool, columns=ix.head_dim,
                                 matmul=False),
                    WeightTensor(name=p + "indexer.kpool_gate", role="indexer", rows=ix.head_dim, columns=h),
                ]
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        sparse = self.indexer is not None
        latent = CacheEntry(
            kind="latent", heads=1, elements=self.kv_lora_rank + self.qk_rope_head_dim,
            # vLLM's fp8_ds_mla: the latent in fp8, one fp32 scale per 128 of it, the rope part at 16 bits.
            packed_fp8_bytes=(
                self.kv_lora_rank + 4 * -(-self.kv_lora_rank // 128) + 2 * self.qk_rope_head_dim if sparse else None
            ))
        if self.indexer is None or self.indexer.shared:
            return (latent,)
        # The index keys are always fp8 with one fp32 scale per 128 elements.
        d = self.indexer.head_dim
        return (latent, CacheEntry(
            kind="index", heads=1, elements=d + 4 * -(-d // 128), bits=8, tokens_per_entry=self.indexer.pool,
            fp8_capable=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention:
    """Attention from text to encoder tokens (Llama 3.2 Vision): its K and V exist only with an image."""

    kind: ClassVar[str] = "cross"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: QkNorm = "head"

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, d, kv = hidden_size, self.head_dim, self.num_kv_heads
        p = "cross_attn."
        out = [
            WeightTensor(name=p + "q_proj", role="qkv", rows=self.num_heads * d, columns=h, shard="column"),
            WeightTensor(name=p + "k_proj", role="qkv", rows=kv * d, columns=h, shard="kv", heads=kv),
            WeightTensor(name=p + "v_proj", role="qkv", rows=kv * d, columns=h, shard="kv", heads=kv),
            WeightTensor(name=p + "o_proj", role="out", rows=h, columns=self.num_heads * d, shard="row"),
        ]
        if self.qk_norm == "head":
            out += [vector(p + "q_norm", "norm", d), vector(p + "k_norm", "norm", d)]
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        return (CacheEntry(kind="kv", heads=self.num_kv_heads, elements=2 * self.head_dim, needs_encoder=True),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """DeepSeek V4's attention: one shared K=V vector per token, compressed beyond a short window.

    Every layer attends to the last `window` tokens. With compress_ratio > 1 it also attends to one
    compressed vector per `compress_ratio` tokens; with an indexer only to the `top_k` best of them
    (compressed tokens, ratio 4), without one to all of them (ratio 128).

    q_lora_rank    the query's low rank; o_groups × o_lora_rank: the grouped low-rank output
    compress_ratio 0: window only
    overlap        the compressor looks at two neighbouring groups (twice the width)
    """

    kind: ClassVar[str] = "compressed"
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    compress_ratio: int = 0
    overlap: bool = False
    indexer: SparseIndexer | None = None

    @property
    def compressor_width(self) -> int:
        """Channels of one compressor projection."""
        return self.head_dim * (2 if self.overlap else 1)

    def _compressor(self, prefix: str, hidden_size: int, width: int, head_dim: int) -> list[WeightTensor]:
        return [
            WeightTensor(name=prefix + "position_bias", role="attn", rows=self.compress_ratio, columns=width,
                         matmul=False),
            WeightTensor(name=prefix + "kv_proj", role="indexer", rows=width, columns=hidden_size),
            WeightTensor(name=prefix + "gate_proj", role="indexer", rows=width, columns=hidden_size),
            vector(prefix + "kv_norm", "norm", head_dim),
        ]

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, p, q_width = hidden_size, "self_attn.", self.num_heads * self.head_dim
        out = [
            vector(p + "sinks", "attn", self.num_heads, shard="column"),
            WeightTensor(name=p + "q_a_proj", role="qkv", rows=self.q_lora_rank, columns=h),
            vector(p + "q_a_norm", "norm", self.q_lora_rank),
            WeightTensor(name=p + "q_b_proj", role="qkv", rows=q_width, columns=self.q_lora_rank, shard="column"),
            WeightTensor(name=p + "kv_proj", role="qkv", rows=self.head_dim, columns=h),
            vector(p + "kv_norm", "norm", self.head_dim),
            WeightTensor(name=p + "o_a_proj", role="out", rows=self.o_groups * self.o_lora_rank,
                         columns=q_width // self.o_groups, shard="column"),
            WeightTensor(name=p + "o_b_proj", role="out", rows=h, columns=self.o_groups * self.o_lora_rank,
                         shard="row"),
        ]
        if self.compress_ratio:
            out += self._compressor(p + "compressor.", h, self.compressor_width, self.head_dim)
        ix = self.indexer
        if ix is not None:
            q = p + "compressor.indexer."
            out += self._compressor(q, h, ix.head_dim * (2 if self.overlap else 1), ix.head_dim)
            out += [
                WeightTensor(name=q + "q_b_proj", role="indexer", rows=ix.num_heads * ix.head_dim,
                             columns=self.q_lora_rank),
                WeightTensor(name=q + "weights_proj", role="indexer", rows=ix.num_heads, columns=h),
            ]
        return tuple(out)

    def cache(self) -> tuple[CacheEntry, ...]:
        # vLLM's packed layout: the part without rope in fp8 with one byte of scale per 64 (and one of
        # padding), the rope part at 16 bits: 448 + 128 + 8 = 584 bytes.
        nope = self.head_dim - self.rope_head_dim
        packed = nope + 2 * self.rope_head_dim + -(-nope // 64) + 1
        entries = [CacheEntry(kind="latent", heads=1, elements=self.head_dim, window=self.window,
                              packed_fp8_bytes=packed)]
        if self.compress_ratio:
            entries.append(CacheEntry(kind="latent", heads=1, elements=self.head_dim,
                                      tokens_per_entry=self.compress_ratio, packed_fp8_bytes=packed))
            entries.append(self._pending(self.compressor_width))
        if self.indexer is not None:
            d = self.indexer.head_dim
            entries.append(CacheEntry(kind="index", heads=1, elements=d + 4 * -(-d // 128), bits=8,
                                      tokens_per_entry=self.compress_ratio, fp8_capable=False))
            entries.append(self._pending(d * (2 if self.overlap else 1)))
        return tuple(entries)

    def _pending(self, width: int) -> CacheEntry:
        """The compressor's inputs and scores (fp32) of the tokens that are not compressed yet."""
        span = self.compress_ratio * (2 if self.overlap else 1)
        return CacheEntry(kind="latent", heads=1, elements=2 * width, window=span, bits=32, fp8_capable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMixers:
    """Two mixers on the same input whose outputs are added (Falcon-H1: attention and Mamba 2)."""

    kind: ClassVar[str] = "parallel"
    branches: tuple[GroupedQueryAttention | Mamba2, ...]

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        return tuple(t for branch in self.branches for t in branch.tensors(hidden_size))

    def cache(self) -> tuple[CacheEntry, ...]:
        return tuple(e for branch in self.branches for e in branch.cache())


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMixer:
    """A layer without a token mixer (the FFN-only layers of Nemotron-H)."""

    kind: ClassVar[str] = "none"

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        return ()

    def cache(self) -> tuple[CacheEntry, ...]:
        return ()


Mixer = (
    GroupedQueryAttention | LatentAttention | CompressedAttention | CrossAttention | GatedDeltaNet
    | KimiDeltaAttention | LightningAttention | Mamba1 | Mamba2 | ShortConvolution | ParallelMixers | NoMixer
)
