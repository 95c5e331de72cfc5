"""Decoders whose layers are not all softmax attention, or whose attention is of their own kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bstar.codec.hf_config.decoder import (
    FOUR_NORMS,
    NO_LIMIT,
    Decoder,
    Layer,
    LayerFfns,
    decoder,
    max_context,
    norm_vectors,
    table,
)
from bstar.codec.hf_config.ffns import EXPERT_KEYS, after_first, dense, experts_ffn, moe, typed_or
from bstar.codec.hf_config.mixers import (
    MLA_TYPES,
    attention_types,
    gated_delta_net,
    gqa,
    head_count,
    head_width,
    kv_head_count,
    latent_attention,
    mamba2,
    model_bits,
    per_head,
    sparse_indexers,
    window_size,
)
from bstar.codec.hf_config.reader import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, Reader
from bstar.specs.attention import (
    CompressedAttention,
    CrossAttention,
    GroupedQueryAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mixer,
    NoMixer,
    ParallelMixers,
    ShortConvolution,
    SparseIndexer,
)
from bstar.specs.ffn import DenseFfn, Ffn, MoeFfn, NoFfn
from bstar.specs.tensors import WeightTensor, vector

LINEAR = ("linear_attention", "mamba", "mamba2", "conv")
FULL = ("full_attention", "attention")


def hybrid_types(r: Reader, n: int, default: Sequence[str], *keys: str) -> list[bool]:
    """Which layers are full attention: layer_types (either spelling), else the class's pattern."""
    words = r.words(*(keys or ("layer_types", "layers_block_type")), length=n, allowed=LINEAR + FULL)
    return [w in FULL for w in (words or default)]


def gated_delta_hybrid(r: Reader, *, ffns: LayerFfns) -> Decoder:
    """Qwen3-Next, Qwen3.5: gated delta layers with a gated attention layer every full_attention_interval."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        every = reader.size("full_attention_interval", default=4)
        full = hybrid_types(reader, n, ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n)])
        attention = gqa(qk_norm="head", bias="attention_bias", output_gate="attn_output_gate")(reader, n)
        linear = gated_delta_net(reader)
        return [attention[i] if f else linear for i, f in enumerate(full)]

    return decoder(r, mixers=mixers, ffns=ffns)


def kimi_linear(r: Reader) -> Decoder:
    """Kimi-Linear, Kimi K3: Kimi delta layers and MLA layers, experts after the first layer."""
    inner = Reader(r.child("linear_attn_config") or {}, "kimi_linear_attention", path="linear_attn_config.")

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        full_at = inner.numbers("full_attn_layers", low=1)
        kda_at = inner.numbers("kda_layers", low=1)
        if full_at is not None and kda_at is not None:
            if sorted(full_at + kda_at) != list(range(1, n + 1)):
                raise inner.fail("full_attn_layers", f"and kda_layers must name each of the {n} layers once, from 1")
            default = ["full_attention" if i + 1 in set(full_at) else "linear_attention" for i in range(n)]
        else:
            default = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(n)]
        full = hybrid_types(reader, n, default)
        dim = inner.size("head_dim", default=reader.size("linear_head_dim", default=128))
        heads = inner.size("num_heads", default=reader.size("linear_num_heads", default=32))
        kernel = inner.size("short_conv_kernel_size", default=reader.size("linear_conv_kernel_dim", default=4))
        delta = KimiDeltaAttention(num_heads=heads, head_dim=dim, conv_kernel=kernel, gate_rank=dim,
                                   full_gate=inner.flag("use_full_rank_gate"), conv_bits=model_bits(reader))
        reader.find("num_key_value_heads", "head_dim")
        latent = replace(latent_attention(reader, bias=reader.flag("attention_bias"), indexer=None),
                         output_gate=reader.flag("mla_use_output_gate"))
        return [latent if f else delta for f in full]

    experts = moe(experts=("num_local_experts", "num_experts"), sparse=typed_or(after_first(1)),
                  shared_count=("n_shared_experts", "num_shared_experts"))
    width = r.optional_size("routed_expert_hidden_size")

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        return [replace(f, latent_size=width) if isinstance(f, MoeFfn) else f for f in experts(reader, n)]

    built = decoder(r, mixers=mixers, ffns=ffns, tied=False)
    h = built.hidden_size
    if width is not None and r.flag("latent_moe_use_norm"):
        norm = norm_vectors("mlp.routed_expert_norm", width, "rms")
        built.layers = [replace(x, extra=x.extra + norm) if x.ffn.kind == "moe" else x for x in built.layers]
    if r.find("attn_res_block_size") is not None:
        # Residuals that attend to the outputs of earlier blocks: a norm and a query for each sublayer.
        def residual(name: str) -> tuple[WeightTensor, ...]:
            return (*norm_vectors(f"{name}_res_norm", h, "rms"), vector(f"{name}_res_proj", "other", h))

        both = residual("self_attention") + residual("mlp")
        built.layers = [replace(x, extra=x.extra + both) for x in built.layers]
        built.head_tensors += residual("output_attn")
    return built


_RATIO_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_KIND_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def deepseek_v4(r: Reader) -> Decoder:
    """DeepSeek V4: compressed attention, hyper-connections around every sublayer, experts in every layer."""
    h, streams = r.hidden_size(), r.size("hc_mult", high=1024)

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        kinds = _v4_kinds(reader, n)
        heads, dim = head_count(reader), reader.size("head_dim")
        groups = reader.size("o_groups")
        if heads % groups:
            raise reader.fail("o_groups", f"is {groups}, which does not divide the {heads} heads")
        reader.find("num_key_value_heads")
        index = SparseIndexer(num_heads=reader.size("index_n_heads"), head_dim=reader.size("index_head_dim"),
                              top_k=reader.size("index_topk", high=MAX_CONTEXT))
        window = reader.size("sliding_window", high=MAX_CONTEXT)

        def one(kind: str) -> CompressedAttention:
            sparse = kind == "compressed_sparse_attention"
            return CompressedAttention(
                num_heads=heads, head_dim=dim, rope_head_dim=_v4_rope_width(reader, dim),
                q_lora_rank=reader.size("q_lora_rank"), o_groups=groups, o_lora_rank=reader.size("o_lora_rank"),
                window=window, compress_ratio=_v4_rates(reader).get(kind, 0), overlap=sparse,
                indexer=index if sparse else None)

        return [one(k) for k in kinds]

    built = decoder(r, mixers=mixers, ffns=moe(shared_count=("n_shared_experts",)))
    r.find("num_hash_layers", "mlp_layer_types", "hc_sinkhorn_iters", "compress_rope_theta", "intermediate_size")
    hyper = _hyper_connections(h, streams)
    built.layers = [replace(layer, extra=layer.extra + hyper) for layer in built.layers]
    built.head_tensors += (
        WeightTensor(name="hc_head.hc_fn", role="other", rows=streams, columns=streams * h),
        vector("hc_head.hc_base", "other", streams), vector("hc_head.hc_scale", "other", 1))
    kinds = r.numbers("compress_ratios") or []
    last = built.layers[-1]
    if len(kinds) > len(built.layers) and isinstance(last.mixer, CompressedAttention) and not kinds[len(built.layers)]:
        built.mtp_layer = replace(last, mixer=replace(last.mixer, compress_ratio=0, overlap=False, indexer=None))
    # vLLM 0.32 keeps V4's cache in its packed fp8 layout unless it is told bfloat16.
    built.kv_cache_dtype = "fp8"
    return built


def _hyper_connections(hidden_size: int, streams: int) -> tuple[WeightTensor, ...]:
    """The mixing of residual streams before and after each sublayer."""
    mix = streams * (2 + streams)
    return tuple(
        t for side in ("attn_hc", "ffn_hc") for t in (
            WeightTensor(name=f"{side}.fn", role="other", rows=mix, columns=streams * hidden_size),
            vector(f"{side}.base", "other", mix), vector(f"{side}.scale", "other", 3)))


def glm5_next(r: Reader) -> Decoder:
    """GLM5-Next: Kimi delta layers and sparse MLA layers over pooled index keys, hyper-connections around both."""
    inner = Reader(r.child("linear_attn_config") or {}, "glm5_next_linear", path="linear_attn_config.")

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        words = reader.words("layer_types", length=n, allowed=(*LINEAR, *FULL, *MLA_TYPES))
        linear = [w in LINEAR for w in words] if words is not None else [i % 4 != 3 for i in range(n)]
        dim = inner.size("head_dim", default=reader.size("linear_head_dim"))
        delta = KimiDeltaAttention(
            num_heads=inner.size("num_heads", default=reader.size("linear_num_heads")), head_dim=dim, gate_rank=dim,
            conv_kernel=inner.size("short_conv_kernel_size", default=reader.size("linear_conv_kernel_dim")),
            conv_bits=model_bits(reader))
        reader.find("num_key_value_heads", "head_dim")
        pool, bias = reader.size("index_kpool", high=1 << 16), reader.flag("attention_bias")
        indexers = [replace(x, pool=pool) if x is not None else None for x in sparse_indexers(reader, n)]
        return [delta if f else latent_attention(reader, bias=bias, indexer=x)
                for f, x in zip(linear, indexers, strict=True)]

    built = decoder(r, mixers=mixers, ffns=moe(sparse=typed_or(after_first(3)), shared_count=("n_shared_experts",)))
    hyper = _hyper_connections(built.hidden_size, r.size("hc_mult", high=1024))
    built.layers = [replace(layer, extra=layer.extra + hyper) for layer in built.layers]
    return built


def _v4_rope_width(r: Reader, head_dim: int) -> int:
    """qk_rope_head_dim, or the share of the head that partial_rotary_factor gives (the class: 64 of 512)."""
    given = r.optional_size("qk_rope_head_dim")
    width = given if given is not None else int(head_dim * r.number("partial_rotary_factor", default=64 / 512))
    if not 0 <= width <= head_dim:
        raise r.fail("qk_rope_head_dim", f"is {width}; it must be at most head_dim {head_dim}")
    return width


def _v4_rates(r: Reader) -> Mapping[str, int]:
    """Tokens per compressed entry, by layer kind."""
    given = r.child("compress_rates") or {}
    older = dict(zip(_KIND_RATIOS, ("compress_rate_csa", "compress_rate_hca"), strict=True))
    return {kind: r.whole(f"compress_rates.{kind}", given.get(kind, r.find(older[kind]) or ratio), low=1)
            for kind, ratio in _KIND_RATIOS.items()}


def _v4_kinds(r: Reader, n: int) -> list[str]:
    """The attention kind of each layer; entries beyond the layers belong to the MTP layers."""
    known = tuple(_RATIO_KINDS.values())
    words = r.words("layer_types", allowed=known)
    ratios = r.numbers("compress_ratios")
    if words is None and ratios is not None:
        unknown = next((x for x in ratios if x not in _RATIO_KINDS), None)
        if unknown is not None:
            raise r.fail("compress_ratios", f"holds {unknown}; known are 0, 4 and 128")
        words = [_RATIO_KINDS[x] for x in ratios]
    if words is None:
        words = ["heavily_compressed_attention"] * min(n, 2) + [
            "compressed_sparse_attention" if i % 2 else "heavily_compressed_attention" for i in range(max(n - 2, 0))]
    if len(words) < n:
        raise r.fail("layer_types", f"has {len(words)} entries; it must have one for each of the {n} layers")
    return words[:n]


# -- Mamba hybrids ---------------------------------------------------------------------------------

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCKS = {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "attention", "attention": "attention",
           "mlp": "mlp", "moe": "moe"}


def nemotron_h(r: Reader) -> Decoder:
    """Nemotron-H, Nemotron 3: each layer is one of Mamba 2, attention, FFN or experts, behind one norm."""
    h = r.hidden_size()
    kinds = _nemotron_kinds(r)
    mixers: dict[str, Mixer] = {"mlp": NoMixer(), "moe": NoMixer()}
    ffns: dict[str, Ffn] = {"mamba": NoFfn(), "attention": NoFfn()}
    if "attention" in kinds:
        heads = head_count(r)
        dim = head_width(r, heads, "head_dim", "attention_head_dim")
        r.find("attention_bias", "mamba_proj_bias")
        mixers["attention"] = GroupedQueryAttention(
            num_heads=heads, num_kv_heads=kv_head_count(r, heads), head_dim=dim, v_head_dim=dim,
            window=window_size(r))
    if "mamba" in kinds:
        mixers["mamba"] = mamba2(
            r, heads=r.size("mamba_num_heads"), head_dim=r.size("mamba_head_dim"), state=r.size("ssm_state_size"),
            groups=r.size("mamba_n_groups", "n_groups"), kernel=r.size("mamba_d_conv", "conv_kernel"),
            conv_bias=r.flag("mamba_conv_bias", "use_conv_bias"), proj_bias=r.flag("use_bias"),
            out_bias=r.flag("use_bias"), default_bits=32)
    if "mlp" in kinds:
        ffns["mlp"] = DenseFfn(width=r.size("intermediate_size"), gated=False, bias=r.flag("mlp_bias"))
    if "moe" in kinds:
        ffns["moe"] = experts_ffn(
            r, count=r.size(*EXPERT_KEYS, high=MAX_EXPERTS), top_k=r.size("num_experts_per_tok"),
            width=r.size("moe_intermediate_size"), gated=False, latent_size=r.optional_size("moe_latent_size"),
            shared_width=r.size("moe_shared_expert_intermediate_size"), shared_bias=r.flag("mlp_bias"))
        r.find("n_shared_experts")
    norm = norm_vectors("norm", h, "rms")
    layers = [Layer(mixer=mixers[k], ffn=ffns[k], extra=norm) for k in kinds]
    vocab = r.vocab_size()
    return Decoder(
        hidden_size=h, vocab_size=vocab, layers=layers, embedding=(table("embeddings", "embedding", vocab, h),),
        lm_head=(table("lm_head", "lm_head", vocab, h),), head_tensors=norm_vectors("norm_f", h, "rms"),
        tied=False, context=max_context(r))


def _nemotron_kinds(r: Reader) -> list[str]:
    pattern = r.find("hybrid_override_pattern")
    words = r.words("layers_block_type", "layer_types", allowed=tuple(_BLOCKS))
    if words is None and pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_PATTERN):
            raise r.fail("hybrid_override_pattern", "must be letters M (Mamba), * (attention), - (FFN) and E (experts)")
        words = [_PATTERN[c] for c in pattern]
    if words is None:
        words = ["mamba", "moe", "attention", "mlp"]
    if not 1 <= len(words) <= MAX_LAYERS:
        raise r.fail("layers_block_type", f"has {len(words)} entries; a model has 1 to {MAX_LAYERS} layers")
    count = r.find("num_hidden_layers")
    if count is not None and r.layer_count("num_hidden_layers") != len(words):
        raise r.fail("num_hidden_layers", f"is {count}, but the pattern of blocks has {len(words)} entries")
    r.find("expand")
    return [_BLOCKS[w] for w in words]


def _mamba2_d(r: Reader, *, inner: int, gated_norm: bool = True) -> Mamba2:
    """Mamba 2 with the mamba_* keys of Bamba, Granite 4 and Falcon-H1."""
    heads = r.size("mamba_n_heads")
    given = r.find("mamba_d_head")
    dim = per_head(r, inner, heads) if given in (None, "auto") else r.whole("mamba_d_head", given, low=1)
    if dim * heads != inner:
        raise r.fail("mamba_d_head", f"× mamba_n_heads is {dim * heads}; the Mamba width is {inner}")
    return mamba2(
        r, heads=heads, head_dim=dim, state=r.size("mamba_d_state"), groups=r.size("mamba_n_groups"),
        kernel=r.size("mamba_d_conv"), conv_bias=r.flag("mamba_conv_bias"), proj_bias=r.flag("mamba_proj_bias"),
        out_bias=r.flag("projectors_bias" if "projectors_bias" in r.defaults else "mamba_proj_bias"),
        gated_norm=gated_norm)


def bamba(r: Reader) -> Decoder:
    """Bamba: Mamba 2 layers with attention at attn_layer_indices, a dense FFN in each."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        at = set(reader.numbers("attn_layer_indices") or ())
        state = _mamba2_d(reader, inner=reader.size("mamba_expand") * reader.hidden_size())
        attention = gqa(bias="attention_bias")(reader, n)
        return [attention[i] if i in at else state for i in range(n)]

    return decoder(r, mixers=mixers, ffns=dense(bias="mlp_bias"))


def granite_hybrid(r: Reader) -> Decoder:
    """Granite 4: Mamba 2 and attention layers, each with a shared FFN and, where there are any, experts."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        full = hybrid_types(reader, n, ["mamba"] * n)
        attention = gqa(bias="attention_bias")(reader, n)
        state: Mixer = NoMixer() if all(full) else _mamba2_d(
            reader, inner=reader.size("mamba_expand") * reader.hidden_size())
        return [attention[i] if f else state for i, f in enumerate(full)]

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        count = reader.size("num_local_experts", "num_experts", default=0, low=0, high=MAX_EXPERTS)
        shared = reader.size("shared_intermediate_size")
        if not count:
            return [DenseFfn(width=shared)] * n
        return [experts_ffn(reader, count=count, top_k=reader.size("num_experts_per_tok"),
                            width=reader.size("intermediate_size"), shared_width=shared)] * n

    return decoder(r, mixers=mixers, ffns=ffns)


def falcon_h1(r: Reader) -> Decoder:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        inner = reader.optional_size("mamba_d_ssm") or reader.size("mamba_expand") * reader.hidden_size()
        state = _mamba2_d(reader, inner=inner, gated_norm=reader.flag("mamba_rms_norm"))
        attention = gqa(bias="attention_bias")(reader, n)
        return [ParallelMixers(branches=(a, state)) for a in attention if isinstance(a, GroupedQueryAttention)]

    return decoder(r, mixers=mixers, ffns=dense(bias="mlp_bias"))


def _mamba1(r: Reader, *, prefix: str, inner_norms: bool) -> Mamba1:
    """Mamba 1 with keys spelled `prefix`… (Jamba: mamba_) or as in Mamba's own config."""
    keys = {name: (f"{prefix}{name}",) for name in ("d_state", "d_conv", "expand", "dt_rank")} if prefix else {
        "d_state": ("state_size",), "d_conv": ("conv_kernel",), "expand": ("expand",), "dt_rank": ("time_step_rank",)}
    h = r.hidden_size()
    rank = r.find(*keys["dt_rank"])
    given = r.optional_size("intermediate_size") if not prefix else None
    bits = model_bits(r)
    return Mamba1(
        inner_size=given or r.size(*keys["expand"]) * h, state_size=r.size(*keys["d_state"]),
        dt_rank=-(-h // 16) if rank in (None, "auto") else r.whole(keys["dt_rank"][0], rank, low=1),
        conv_kernel=r.size(*keys["d_conv"]), inner_norms=inner_norms, conv_bits=bits, state_bits=bits,
        conv_bias=r.flag(f"{prefix}conv_bias" if prefix else "use_conv_bias"),
        proj_bias=r.flag(f"{prefix}proj_bias" if prefix else "use_bias"))


def jamba(r: Reader) -> Decoder:
    """Jamba: Mamba 1 with an attention layer per attn_layer_period, experts per expert_layer_period."""

    def positions(reader: Reader, name: str, n: int) -> list[bool]:
        period, offset = reader.size(f"{name}_period"), reader.size(f"{name}_offset", low=0)
        if offset >= period:
            raise reader.fail(f"{name}_offset", f"is {offset}; it must be below {name}_period {period}")
        return [i % period == offset for i in range(n)]

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        state = _mamba1(reader, prefix="mamba_", inner_norms=True)
        attention = gqa(derived_head_dim=True)(reader, n)
        return [attention[i] if f else state for i, f in enumerate(positions(reader, "attn_layer", n))]

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        width = reader.size("intermediate_size")
        count = reader.size(*EXPERT_KEYS, high=MAX_EXPERTS)
        plain = DenseFfn(width=width)
        if count == 1:
            return [plain] * n
        routed = experts_ffn(reader, count=count, top_k=reader.size("num_experts_per_tok"), width=width)
        return [routed if f else plain for f in positions(reader, "expert_layer", n)]

    return decoder(r, mixers=mixers, ffns=ffns)


def mamba1_model(r: Reader) -> Decoder:
    """Mamba, FalconMamba: Mamba 1 layers behind one norm, nothing else."""
    return decoder(r, mixers=lambda x, n: [_mamba1(x, prefix="", inner_norms=False)] * n,
                   ffns=lambda _, n: [NoFfn()] * n, norms=("norm",), context_default=NO_LIMIT)


def mamba2_model(r: Reader) -> Decoder:
    """Mamba 2 layers behind one norm."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads, dim = reader.size("num_heads"), reader.size("head_dim")
        inner = reader.size("expand") * reader.hidden_size()
        if heads * dim != inner:
            raise reader.fail("num_heads", f"× head_dim is {heads * dim}; expand × hidden_size is {inner}")
        return [mamba2(reader, heads=heads, head_dim=dim, state=reader.size("state_size"),
                       groups=reader.size("n_groups"), kernel=reader.size("conv_kernel"),
                       conv_bias=reader.flag("use_conv_bias"), proj_bias=reader.flag("use_bias"),
                       out_bias=reader.flag("use_bias"))] * n

    return decoder(r, mixers=mixers, ffns=lambda _, n: [NoFfn()] * n, norms=("norm",), context_default=NO_LIMIT)


# -- other hybrids ---------------------------------------------------------------------------------


def minimax_lightning(r: Reader) -> Decoder:
    """MiniMax-Text-01, MiniMax-M1: lightning attention with softmax layers between, experts in every layer."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        default = ["full_attention" if (i + 1) % 2 else "linear_attention" for i in range(n)]
        flags = reader.numbers("attn_type_list", length=n)
        if flags is not None:
            default = ["full_attention" if x == 1 else "linear_attention" for x in flags]
        full = hybrid_types(reader, n, default)
        attention = gqa()(reader, n)
        heads = head_count(reader)
        linear = LightningAttention(num_heads=heads, head_dim=head_width(reader, heads), state_bits=model_bits(reader))
        return [attention[i] if f else linear for i, f in enumerate(full)]

    return decoder(r, mixers=mixers, ffns=moe(width=("intermediate_size",)))


def lfm2(r: Reader) -> Decoder:
    """LFM2: short convolutions and attention layers; dense, or experts after the first num_dense_layers."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        at = reader.numbers("full_attn_idxs")
        default = ["full_attention" if at is None or i in set(at) else "conv" for i in range(n)]
        full = hybrid_types(reader, n, default, "layer_types")
        attention = gqa(qk_norm="head")(reader, n)
        conv = ShortConvolution(
            width=reader.size("conv_dim", default=reader.hidden_size()), bias=reader.flag("conv_bias"),
            conv_kernel=reader.size("conv_L_cache"), conv_bits=model_bits(reader))
        return [attention[i] if f else conv for i, f in enumerate(full)]

    def width(reader: Reader) -> int:
        size = reader.size("block_ff_dim", "intermediate_size")
        if reader.flag("block_auto_adjust_ff_dim"):
            size = 2 * size // 3
            if reader.find("block_ffn_dim_multiplier") is not None:
                multiple = reader.size("block_multiple_of")
                size = int(reader.number("block_ffn_dim_multiplier", default=1.0) * size)
                size = multiple * -(-size // multiple)
        if not 1 <= size <= 1 << 25:
            raise reader.fail("block_ffn_dim_multiplier", f"makes the FFN {size} wide; it must be positive")
        return size

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        if reader.model_type != "lfm2_moe":
            return [DenseFfn(width=width(reader))] * n
        first = reader.size("num_dense_layers", low=0)
        plain = DenseFfn(width=reader.size("intermediate_size"))
        routed = moe()(reader, 1)[0]
        return [plain if i < first else routed for i in range(n)]

    tied = r.flag("tie_embedding", "tie_word_embeddings")
    return decoder(r, mixers=mixers, ffns=ffns, tied=tied)


def mllama(r: Reader) -> Decoder:
    """Llama 3.2 Vision's text model: cross-attention layers at cross_attention_layers."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        chosen = reader.numbers("cross_attention_layers")
        cross = set(chosen if chosen is not None else (3, 8, 13, 18, 23, 28, 33, 38))
        own = gqa(derived_head_dim=True)(reader, n)
        heads = head_count(reader)
        other = CrossAttention(num_heads=heads, num_kv_heads=kv_head_count(reader, heads),
                               head_dim=per_head(reader, reader.hidden_size(), heads))
        return [other if i in cross else own[i] for i in range(n)]

    built = decoder(r, mixers=mixers, ffns=dense(), tied=False)  # the embedding has rows the head lacks
    gates = (vector("cross_attn_attn_gate", "attn", 1), vector("cross_attn_mlp_gate", "mlp", 1))
    built.layers = [replace(x, extra=x.extra + gates) if x.mixer.kind == "cross" else x for x in built.layers]
    # Eight more rows for the image tokens, which are looked up and never predicted.
    built.embedding = (table("embed_tokens", "embedding", built.vocab_size + 8, built.hidden_size),)
    return built


# -- Gemma 3n and 4 --------------------------------------------------------------------------------


def _per_layer_inputs(r: Reader, h: int, n: int) -> tuple[tuple[WeightTensor, ...], ...]:
    """Per-layer embeddings: (tensors of each layer, the table, tensors outside the layers)."""
    width = r.size("hidden_size_per_layer_input", default=0, low=0)
    if not width:
        return (), (), ()
    rows = r.size("vocab_size_per_layer_input")
    layer = (
        WeightTensor(name="per_layer_input_gate", role="mlp", rows=width, columns=h),
        WeightTensor(name="per_layer_projection", role="mlp", rows=h, columns=width),
        vector("post_per_layer_input_norm", "norm", h))
    tables = (WeightTensor(name="embed_tokens_per_layer", role="embedding", rows=rows, columns=n * width,
                           shard="vocab", matmul=False),)
    outside = (
        WeightTensor(name="per_layer_model_projection", role="other", rows=n * width, columns=h),
        vector("per_layer_projection_norm", "norm", width))
    return layer, tables, outside


def _kv_shared_from(r: Reader, n: int) -> int:
    """The first layer that reads an earlier layer's cache (n: none)."""
    shared = r.size("num_kv_shared_layers", default=0, low=0)
    if shared >= n:
        raise r.fail("num_kv_shared_layers", f"is {shared}; it must be below num_hidden_layers {n}")
    return n - shared


def gemma3n(r: Reader) -> Decoder:
    """Gemma 3n: per-layer embeddings, AltUp streams, LAuReL, and layers that share an earlier cache."""
    n, h = r.layer_count(), r.hidden_size()
    per_layer, tables, outside = _per_layer_inputs(r, h, n)
    streams, rank = r.size("altup_num_inputs", high=1024), r.size("laurel_rank")

    def mixers(reader: Reader, count: int) -> Sequence[Mixer]:
        kinds = attention_types(reader, count, ["full_attention" if (i + 1) % 5 == 0 else "sliding_attention"
                                                for i in range(count)])
        heads = head_count(reader)
        kv, dim = kv_head_count(reader, heads), head_width(reader, heads)
        window, first = window_size(reader), _kv_shared_from(reader, count)
        bias = reader.flag("attention_bias")
        return [GroupedQueryAttention(
            num_heads=heads, num_kv_heads=kv, head_dim=dim, v_head_dim=dim, qk_norm="head", qkv_bias=bias,
            out_bias=bias, window=window if kind == "sliding_attention" else None, shares_kv=i >= first)
            for i, kind in enumerate(kinds)]

    def ffns(reader: Reader, count: int) -> Sequence[Ffn]:
        given: Any = reader.find("intermediate_size")
        widths = reader.numbers("intermediate_size", length=count, low=1) if isinstance(given, list) else None
        return [DenseFfn(width=w) for w in (widths or [reader.size("intermediate_size")] * count)]

    altup: tuple[WeightTensor, ...] = (
        WeightTensor(name="altup.correction_coefs", role="other", rows=streams, columns=streams),
        WeightTensor(name="altup.prediction_coefs", role="other", rows=streams * streams, columns=streams),
        WeightTensor(name="altup.modality_router", role="other", rows=streams, columns=h),
        vector("altup.router_norm", "norm", h),
        WeightTensor(name="laurel.linear_left", role="other", rows=rank, columns=h),
        WeightTensor(name="laurel.linear_right", role="other", rows=h, columns=rank),
        vector("laurel.post_laurel_norm", "norm", h))
    if r.flag("altup_correct_scale"):
        altup = (vector("altup.correct_output_scale", "other", h), *altup)
    r.find("activation_sparsity_pattern", "altup_active_idx")
    built = decoder(r, mixers=mixers, ffns=ffns, norms=FOUR_NORMS)
    built.layers = [replace(layer, extra=layer.extra + altup + per_layer) for layer in built.layers]
    built.embedding += tables
    if streams > 1:
        outside += tuple(
            WeightTensor(name=name, role="other", rows=h, columns=h, copies=streams - 1)
            for name in ("altup_projections", "altup_unembed_projections"))
    built.head_tensors += outside
    return built


def gemma4(r: Reader) -> Decoder:
    """Gemma 4: wider heads in full layers, K = V there, per-layer embeddings, experts beside the dense FFN."""
    n, h = r.layer_count(), r.hidden_size()
    per_layer, tables, outside = _per_layer_inputs(r, h, n)
    first = _kv_shared_from(r, n)

    def mixers(reader: Reader, count: int) -> Sequence[Mixer]:
        kinds = attention_types(reader, count, ["sliding_attention" if (i + 1) % 6 else "full_attention"
                                                for i in range(count)])
        kinds[-1] = "full_attention"
        heads, bias = head_count(reader), reader.flag("attention_bias")
        kv, dim = kv_head_count(reader, heads), head_width(reader, heads)
        k_eq_v = reader.flag("attention_k_eq_v")
        global_kv = reader.optional_size("num_global_key_value_heads")
        full_kv = global_kv if global_kv is not None and k_eq_v else kv
        if heads % full_kv:
            raise reader.fail("num_global_key_value_heads", f"is {full_kv}, which does not divide {heads} heads")
        full_dim, window = reader.size("global_head_dim", default=512), window_size(reader)

        def one(i: int, full: bool) -> Mixer:
            d = full_dim if full else dim
            return GroupedQueryAttention(
                num_heads=heads, num_kv_heads=full_kv if full else kv, head_dim=d, v_head_dim=d, qk_norm="head",
                qkv_bias=bias, out_bias=bias, window=None if full else window, k_eq_v=full and k_eq_v,
                shares_kv=i >= first)

        return [one(i, k == "full_attention") for i, k in enumerate(kinds)]

    def ffns(reader: Reader, count: int) -> Sequence[Ffn]:
        width = reader.size("intermediate_size")
        double = 2 * width if reader.flag("use_double_wide_mlp") else width
        if not reader.flag("enable_moe_block"):
            return [DenseFfn(width=double if i >= first else width) for i in range(count)]
        return [experts_ffn(reader, count=reader.size("num_experts", high=MAX_EXPERTS), top_k=reader.size(
            "top_k_experts", "num_experts_per_tok"), width=reader.size("moe_intermediate_size"),
            parallel_dense_width=double if i >= first else width) for i in range(count)]

    built = decoder(r, mixers=mixers, ffns=ffns, norms=FOUR_NORMS)
    extra = per_layer
    if r.flag("enable_moe_block"):
        extra += tuple(vector(f"{x}", "norm", h) for x in (
            "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"))
        extra += (vector("router.scale", "router", h),
                  vector("router.per_expert_scale", "router", r.size("num_experts", high=MAX_EXPERTS)))
    built.layers = [replace(layer, extra=layer.extra + extra) for layer in built.layers]
    built.embedding += tables
    built.head_tensors += outside
    return built

