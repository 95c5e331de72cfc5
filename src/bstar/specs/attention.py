"""Token mixers: one frozen spec per kind of attention or state, so that a hybrid model is a list of specs.

Each kind answers two questions and no others here: which weight tensors it holds (`tensors`), and what
it keeps per sequence (`cache`). FLOPs and bytes of a step are counted in `bstar.physics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from bstar.specs.tensors import WeightTensor, vector

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """What one layer keeps in the cache.

    kind            "kv" (K and V per head) · "latent" (one vector per token, no heads) ·
                    "index" (sparse-attention key cache) · "state" (constant per sequence)
    heads           KV heads (1 for a latent): what tensor parallelism can split
    elements        elements per token and head (d_k + d_v, or the latent's width); for a state the
                    elements of the whole state of one sequence
    window          tokens after which the entry stops growing (sliding window or chunk), or None
    chunked         the window is a chunk that restarts, not a sliding one
    tokens_per_entry  tokens that share one entry (compressed attention), 1 otherwise
    bits            fixed element width where the KV dtype does not apply (states, packed caches), or None
    packed_fp8_bytes  bytes per token of the engine's packed fp8 layout where it has one (sparse MLA:
                    656), or None: elements × the KV format's bits
    fp8_capable     False where the engine keeps this entry at its own width even with an fp8 KV cache
    needs_encoder   filled from an encoder (cross attention): empty when the request is text only

    A state (and every entry with `bits`) has its own dtype; `heads` is what tensor parallelism splits it
    by, replicated beyond, exactly as K and V heads are.
    """

    kind: Literal["kv", "latent", "index", "state"]
    heads: int
    elements: int
    window: int | None = None
    chunked: bool = False
    tokens_per_entry: int = 1
    bits: int | None = None
    packed_fp8_bytes: int | None = None
    fp8_capable: bool = True
    needs_encoder: bool = False


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
