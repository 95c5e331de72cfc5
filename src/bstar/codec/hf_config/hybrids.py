"""Decoders of linear attention, short convolutions or cross attention between softmax layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bstar.codec.hf_config.decoder import Decoder, LayerFfns, decoder, norm_vectors, table
from bstar.codec.hf_config.ffns import after_first, dense, moe, typed_or
from bstar.codec.hf_config.mixers import (
    gated_delta_net,
    gqa,
    head_count,
    head_width,
    kv_head_count,
    latent_attention,
    model_bits,
    per_head,
)
from bstar.codec.hf_config.reader import Reader
from bstar.specs.attention import CrossAttention, KimiDeltaAttention, LightningAttention, Mixer, ShortConvolution
from bstar.specs.ffn import DenseFfn, Ffn, MoeFfn
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
