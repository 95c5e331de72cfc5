"""Gemma 3n and 4: per-layer embeddings, shared caches, wide global heads, experts beside the FFN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bstar.codec.hf_config.decoder import FOUR_NORMS, Decoder, decoder
from bstar.codec.hf_config.ffns import experts_ffn
from bstar.codec.hf_config.mixers import attention_types, head_count, head_width, kv_head_count, window_size
from bstar.codec.hf_config.reader import MAX_EXPERTS, Reader
from bstar.specs.attention import GroupedQueryAttention, Mixer
from bstar.specs.ffn import DenseFfn, Ffn
from bstar.specs.tensors import WeightTensor, vector


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
