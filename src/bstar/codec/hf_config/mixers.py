"""Attention and states from config keys: one builder per mechanism, shared by all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bstar.codec.hf_config.reader import Reader
from bstar.specs.attention import (
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    Mamba2,
    Mixer,
    QkNorm,
    SparseIndexer,
)

Switch = bool | str  # a constant, or the config key that decides
Windows = Sequence[tuple[int | None, bool]]  # (window, is a chunk) of each layer
WindowRule = Callable[[Reader, int], Windows]

_BITS = {"float32": 32, "fp32": 32, "bfloat16": 16, "float16": 16, "bf16": 16, "fp16": 16, "half": 16, "float": 32}


def switch(r: Reader, value: Switch, *, default: bool = False) -> bool:
    """A constant, or the flag that a config key holds."""
    return r.flag(value, default=default) if isinstance(value, str) else value


def dtype_bits(r: Reader, *keys: str, default: int) -> int:
    """Bits of a dtype key such as mamba_ssm_cache_dtype."""
    text = r.text(*keys, default="")
    if not text or text == "auto":
        return default
    if text not in _BITS:
        raise r.fail(keys[0], f"is {text[:40]!r}; known are {', '.join(sorted(_BITS))}")
    return _BITS[text]


def model_bits(r: Reader) -> int:
    """Bits of the dtype the engine computes in, which caches of inputs are kept in: 16, for float32 checkpoints too."""
    dtype_bits(r, "dtype", "torch_dtype", default=16)
    return 16


# -- windows ---------------------------------------------------------------------------------------


def full_attention(r: Reader, n: int) -> Windows:
    """Every layer sees everything."""
    return [(None, False)] * n


def window_size(r: Reader, *keys: str) -> int | None:
    """sliding_window, or None where it is off."""
    value = r.find(*(keys or ("sliding_window",)))
    if value is None or value is False or value == -1 or value == 0:
        return None
    return r.whole((keys or ("sliding_window",))[0], value, low=1, high=1 << 40)


def window_everywhere(r: Reader, n: int) -> Windows:
    """sliding_window in every layer, where it is set (Mistral, Phi-3); by layer_types where they are given."""
    if r.find("layer_types") is not None:
        return windows_of(r, attention_types(r, n, ()))
    return [(window_size(r), False)] * n


ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local")


def attention_types(r: Reader, n: int, default: Sequence[str]) -> list[str]:
    """layer_types, or the class's pattern."""
    return r.words("layer_types", length=n, allowed=ATTENTION_TYPES) or list(default)


def windows_of(r: Reader, types: Sequence[str]) -> Windows:
    """The window of each layer by its type."""
    window = window_size(r) if any(t in ("sliding_attention", "local") for t in types) else None
    chunk = r.size("attention_chunk_size") if "chunked_attention" in types else None
    kinds = {"sliding_attention": (window, False), "local": (window, False), "chunked_attention": (chunk, True)}
    return [kinds.get(t, (None, False)) for t in types]


def windows_by_pattern(period_key: str, period: int, *, first_full: bool = False) -> WindowRule:
    """Sliding layers with one full layer in each period: the last of it (or, first_full, the first)."""

    def rule(r: Reader, n: int) -> Windows:
        every = r.size(period_key, default=period) if period_key else period
        full = 1 if first_full else 0
        pattern = ["full_attention" if (i + 1) % every == full % every else "sliding_attention" for i in range(n)]
        return windows_of(r, attention_types(r, n, pattern))

    return rule


def windows_by_type(r: Reader, n: int) -> Windows:
    """layer_types where they are given; otherwise every layer is full."""
    return windows_of(r, attention_types(r, n, ["full_attention"] * n))


def windows_by_type_or_everywhere(r: Reader, n: int) -> Windows:
    """layer_types where they are given; otherwise sliding_window in every layer (Ministral)."""
    kind = "sliding_attention" if window_size(r) else "full_attention"
    return windows_of(r, attention_types(r, n, [kind] * n))


def windows_above(r: Reader, n: int) -> Windows:
    """Qwen 2 and 3: use_sliding_window turns the layers from max_window_layers on into sliding ones."""
    if not r.flag("use_sliding_window", default=False):
        r.find("sliding_window", "max_window_layers", "layer_types")
        return full_attention(r, n)
    start = r.size("max_window_layers", default=n, low=0)
    pattern = ["sliding_attention" if i >= start else "full_attention" for i in range(n)]
    return windows_of(r, attention_types(r, n, pattern))


def window_if_used(r: Reader, n: int) -> Windows:
    """Qwen 3 MoE: use_sliding_window makes every layer a sliding one."""
    if not r.flag("use_sliding_window", default=False):
        r.find("sliding_window", "max_window_layers", "layer_types")
        return full_attention(r, n)
    return window_everywhere(r, n)


# -- grouped-query attention -----------------------------------------------------------------------


def head_count(r: Reader) -> int:
    return r.size("num_attention_heads", "n_head", "n_heads", high=1 << 16)


def kv_head_count(r: Reader, heads: int, *keys: str) -> int:
    """num_key_value_heads; the number of heads where the class or the config says null."""
    kv = r.optional_size(*(keys or ("num_key_value_heads", "num_kv_heads")))
    return check_kv(r, heads, heads if kv is None else kv)


def check_kv(r: Reader, heads: int, kv: int) -> int:
    """KV heads that divide the query heads."""
    if heads % kv:
        raise r.fail("num_key_value_heads", f"is {kv}, which does not divide num_attention_heads {heads}")
    return kv


def head_width(r: Reader, heads: int, *keys: str, rounded: bool = False) -> int:
    """head_dim; hidden_size / heads where the class defines it so (rounded down where it allows that)."""
    given = r.optional_size(*(keys or ("head_dim",)))
    if given is not None:
        return given
    hidden = r.hidden_size()
    return hidden // heads if rounded and hidden > heads else per_head(r, hidden, heads)


def per_head(r: Reader, hidden: int, heads: int) -> int:
    """hidden / heads, which must be whole."""
    if hidden % heads:
        raise r.fail("hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}; give head_dim")
    return hidden // heads


def gqa(
    *, windows: WindowRule = full_attention, bias: Switch = False, qkv_bias: Switch = False, out_bias: Switch = False,
    qk_norm: QkNorm = "none", qk_norm_if: Switch = True, qk_norm_bias: bool = False, sinks: Switch = False,
    output_gate: Switch = False, kv_keys: tuple[str, ...] = (), derived_head_dim: bool = False, rounded: bool = False,
) -> Callable[[Reader, int], Sequence[Mixer]]:
    """A builder of softmax attention layers.

    bias               a switch for qkv_bias and out_bias both
    qk_norm_if         whether the norms exist, by a config flag
    derived_head_dim   the class ignores head_dim: it is always hidden_size / heads
    """

    def build(r: Reader, n: int) -> Sequence[Mixer]:
        heads = head_count(r)
        kv = kv_head_count(r, heads, *kv_keys)
        dim = per_head(r, r.hidden_size(), heads) if derived_head_dim else head_width(r, heads, rounded=rounded)
        norm: QkNorm = qk_norm if switch(r, qk_norm_if) else "none"
        shared = {
            "num_heads": heads, "num_kv_heads": kv, "head_dim": dim, "v_head_dim": dim,
            "qkv_bias": switch(r, bias or qkv_bias), "out_bias": switch(r, bias or out_bias), "sinks": switch(r, sinks),
            "output_gate": switch(r, output_gate, default=True),
            "qk_norm_bias": qk_norm_bias and norm != "none",
        }
        return [GroupedQueryAttention(**shared, qk_norm=norm, window=w, chunked=c)  # type: ignore[arg-type]
                for w, c in windows(r, n)]

    return build


# -- latent attention ------------------------------------------------------------------------------


MLA_TYPES = ("full_attention", "indexed_attention", "deepseek_sparse_attention", "attention")


def mla(*, bias: Switch = "attention_bias", indexers: Callable[[Reader, int], Sequence[SparseIndexer | None]]
        | None = None) -> Callable[[Reader, int], Sequence[Mixer]]:
    """A builder of MLA layers, with a sparse indexer where `indexers` gives one."""

    def build(r: Reader, n: int) -> Sequence[Mixer]:
        index = indexers(r, n) if indexers else [None] * n
        r.find("num_key_value_heads", "head_dim", "qk_head_dim")
        r.words("layer_types", length=n, allowed=MLA_TYPES)
        return [latent_attention(r, bias=switch(r, bias), indexer=x) for x in index]

    return build


def latent_attention(r: Reader, *, bias: bool, indexer: SparseIndexer | None) -> LatentAttention:
    """One MLA layer from its keys."""
    return LatentAttention(
        num_heads=head_count(r), q_lora_rank=_rank(r, "q_lora_rank"), kv_lora_rank=r.size("kv_lora_rank"),
        qk_nope_head_dim=r.size("qk_nope_head_dim"), qk_rope_head_dim=r.size("qk_rope_head_dim", low=0),
        v_head_dim=r.optional_size("v_head_dim") or per_head(r, r.hidden_size(), head_count(r)), bias=bias,
        indexer=indexer)


def _rank(r: Reader, key: str) -> int | None:
    """A low rank; null and 0 mean none."""
    value = r.find(key)
    return None if value in (None, 0) and not isinstance(value, bool) else r.whole(key, value, low=1)


def sparse_indexers(r: Reader, n: int) -> Sequence[SparseIndexer | None]:
    """One indexer per layer; indexer_types "shared" layers (GLM-5.2) reuse an earlier one's picks."""
    kinds = r.words("indexer_types", length=n, allowed=("full", "shared"))
    if kinds is None:
        pattern = r.find("index_topk_pattern")
        frequency, offset = r.size("index_topk_freq", default=1), r.size("index_skip_topk_offset", default=2, low=0)
        if isinstance(pattern, str):
            if len(pattern) != n or set(pattern) - {"F", "S"}:
                raise r.fail("index_topk_pattern", f"must be one F (full) or S (shared) for each of the {n} layers")
            kinds = ["full" if c == "F" else "shared" for c in pattern]
        else:
            kinds = ["full" if max(i - offset + 1, 0) % frequency == 0 else "shared" for i in range(n)]
    heads, dim = r.size("index_n_heads"), r.size("index_head_dim")
    top = r.size("index_topk", high=1 << 40)
    return [SparseIndexer(num_heads=heads, head_dim=dim, top_k=top, shared=k == "shared") for k in kinds]


def plain_indexers(r: Reader, n: int) -> Sequence[SparseIndexer | None]:
    """The same indexer in every layer (DeepSeek V3.2)."""
    indexer = SparseIndexer(num_heads=r.size("index_n_heads"), head_dim=r.size("index_head_dim"),
                            top_k=r.size("index_topk", high=1 << 40))
    return [indexer] * n


# -- states ----------------------------------------------------------------------------------------


def gated_delta_net(r: Reader) -> GatedDeltaNet:
    """A gated-delta layer (Qwen3-Next, Qwen3.5)."""
    k, v = r.size("linear_num_key_heads"), r.size("linear_num_value_heads")
    if v % k:
        raise r.fail("linear_num_value_heads", f"is {v}, not a multiple of linear_num_key_heads {k}")
    bits = model_bits(r)
    return GatedDeltaNet(
        num_k_heads=k, num_v_heads=v, k_head_dim=r.size("linear_key_head_dim"),
        v_head_dim=r.size("linear_value_head_dim"), conv_kernel=r.size("linear_conv_kernel_dim"), conv_bits=bits,
        # vLLM: the config's mamba_ssm_dtype (Qwen3.5), else the model's dtype (Qwen3-Next).
        state_bits=dtype_bits(r, "mamba_ssm_dtype", "mamba_ssm_cache_dtype", default=bits))


def mamba2(r: Reader, *, heads: int, head_dim: int, state: int, groups: int, kernel: int, conv_bias: bool,
           proj_bias: bool, out_bias: bool, gated_norm: bool = True, default_bits: int | None = None) -> Mamba2:
    """A Mamba 2 layer whose heads fall into whole groups."""
    if heads % groups:
        raise r.fail("n_groups", f"is {groups}, which does not divide the {heads} Mamba heads")
    bits = model_bits(r)
    return Mamba2(
        num_heads=heads, head_dim=head_dim, state_size=state, num_groups=groups, conv_kernel=kernel,
        conv_bias=conv_bias, proj_bias=proj_bias, out_bias=out_bias, gated_norm=gated_norm, conv_bits=bits,
        state_bits=dtype_bits(r, "mamba_ssm_cache_dtype", default=default_bits or bits))
