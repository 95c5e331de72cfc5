"""Decoders of 2025 and 2026 that combine the shared mechanisms in their own ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bstar.codec.hf_config.decoder import FOUR_NORMS, POST_NORMS, TWO_NORMS, Decoder, Layer, decoder, norm_vectors
from bstar.codec.hf_config.ffns import MLP_TYPES, after_first, dense, experts_ffn, moe, typed_or
from bstar.codec.hf_config.hybrids import hybrid_types
from bstar.codec.hf_config.mixers import (
    Windows,
    attention_types,
    gated_delta_net,
    gqa,
    head_count,
    head_width,
    kv_head_count,
    mla,
    windows_by_pattern,
    windows_of,
)
from bstar.codec.hf_config.reader import MAX_EXPERTS, Reader
from bstar.specs.attention import GroupedQueryAttention, Mixer, NoMixer, SparseIndexer
from bstar.specs.ffn import DenseFfn, Ffn, MoeFfn, NoFfn
from bstar.specs.tensors import WeightTensor, vector

FIRST_FULL_OF_4 = windows_by_pattern("", 4, first_full=True)


def _with_correction(built: Decoder) -> Decoder:
    """The router's correction as a parameter of each sparse layer."""
    built.layers = [
        replace(x, extra=(*x.extra, vector("mlp.expert_bias", "router", x.ffn.num_experts)))
        if isinstance(x.ffn, MoeFfn) else x for x in built.layers]
    return built


def minimax_m3(r: Reader) -> Decoder:
    """MiniMax M3: block-sparse attention with an indexer, dense and sparse layers of their own widths."""
    inner = Reader(r.child("sparse_attention_config") or {}, "minimax_m3_sparse", path="sparse_attention_config.")

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        flags = inner.numbers("sparse_attention_freq", length=n)
        kinds = reader.words("layer_types", length=n, allowed=("full_attention", "minimax_m3_sparse"))
        sparse = ([k == "minimax_m3_sparse" for k in kinds] if kinds is not None
                  else [bool(x) for x in flags] if flags is not None else [False] * n)

        def size(old: str, new: str) -> int:
            return inner.size(old, default=reader.size(new))

        block = size("sparse_block_size", "index_block_size")
        indexer = SparseIndexer(
            num_heads=size("sparse_num_index_heads", "index_n_heads"),
            head_dim=size("sparse_index_dim", "index_head_dim"), block_size=block,
            top_k=block * size("sparse_topk_blocks", "index_topk_blocks"))
        plain = gqa(qk_norm="head")(reader, n)
        return [replace(m, indexer=indexer) if s and isinstance(m, GroupedQueryAttention) else m
                for m, s in zip(plain, sparse, strict=True)]

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        types = reader.words("mlp_layer_types", length=n, allowed=MLP_TYPES)
        flags = reader.numbers("moe_layer_freq", length=n)
        sparse = ([t == "sparse" for t in types] if types is not None
                  else [bool(x) for x in flags] if flags is not None else [True] * n)
        plain = DenseFfn(width=reader.size("dense_intermediate_size"))
        routed = experts_ffn(
            reader, count=reader.size("num_local_experts", high=MAX_EXPERTS), top_k=reader.size("num_experts_per_tok"),
            width=reader.size("intermediate_size"), shared_width=reader.size("shared_intermediate_size"))
        reader.find("n_shared_experts", "num_shared_experts")
        if reader.size("moe_intermediate_size", default=routed.width) != routed.width:
            raise reader.fail("moe_intermediate_size", f"is not intermediate_size {routed.width}; they must be equal")
        return [routed if s else plain for s in sparse]

    return decoder(r, mixers=mixers, ffns=ffns)


def afmoe(r: Reader) -> Decoder:
    """AFMoE (Trinity): a gate per channel on the attention output, dense first layers, a learned expert bias."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        windows = windows_by_pattern("global_attn_every_n_layers", 4)
        plain = gqa(qk_norm="head", bias="attention_bias", windows=windows)(reader, n)
        return [replace(m, full_gate=True) for m in plain if isinstance(m, GroupedQueryAttention)]

    def sparse(reader: Reader, n: int) -> Sequence[bool]:
        first = reader.size("num_dense_layers", low=0)
        return [i >= first for i in range(n)]

    return _with_correction(decoder(
        r, mixers=mixers, ffns=moe(sparse=sparse, shared_count=("num_shared_experts",)), norms=FOUR_NORMS))


def laguna(r: Reader) -> Decoder:
    """Laguna: query heads by layer, a gate per head or channel, one shared expert, a learned correction."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        given = reader.numbers("num_attention_heads_per_layer", length=n, low=1)
        heads = given or [head_count(reader)] * n
        gating: Any = reader.find("gating")
        if not isinstance(gating, (bool, str)) and gating is not None:
            raise reader.fail("gating", "must be true, per-head or per-channel")
        per_head = gating is True or gating == "per-head"
        bias, dim = reader.flag("attention_bias"), head_width(reader, head_count(reader))
        windows = windows_of(reader, attention_types(reader, n, ["full_attention"] * n))
        return [GroupedQueryAttention(
            num_heads=q, num_kv_heads=kv_head_count(reader, q), head_dim=dim, v_head_dim=dim, qk_norm="head",
            head_gate=per_head, full_gate=not per_head, qkv_bias=bias, out_bias=bias, window=w, chunked=c)
            for q, (w, c) in zip(heads, windows, strict=True)]

    return _with_correction(decoder(r, mixers=mixers, ffns=moe(
        sparse=typed_or(lambda _, n: [i > 0 for i in range(n)]), shared_width=("shared_expert_intermediate_size",))))


def axk1(r: Reader) -> Decoder:
    """A.X K1: DeepSeek V3's mechanisms with a norm after the sparse FFN."""
    built = decoder(r, mixers=mla(), ffns=moe(sparse=after_first(), shared_count=("n_shared_experts",)))
    norm = norm_vectors("mlp.post_mlp_layernorm", built.hidden_size, "rms")
    built.layers = [replace(x, extra=x.extra + norm) if x.ffn.kind == "moe" else x for x in built.layers]
    return built


def longcat_flash(r: Reader) -> Decoder:
    """LongCat-Flash: a block is two layers of MLA and a dense FFN; experts run beside the first one's FFN.

    Some of the experts that a token is routed to do nothing ("zero experts"): of moe_topk picks among all of them
    the mean number of real ones counts.
    """
    width = r.size("ffn_hidden_size")
    count, zero = r.size("n_routed_experts", high=MAX_EXPERTS), r.size("zero_expert_num", default=0, low=0)
    picks = r.size("moe_topk", high=MAX_EXPERTS)
    real = max(1, round(picks * count / (count + zero)))
    routed = experts_ffn(r, count=count, top_k=real, width=r.size("expert_ffn_hidden_size"), parallel_dense_width=width)
    blocks = decoder(r, mixers=mla(), ffns=lambda _, n: [routed] * n, layer_keys=("num_layers",))
    h = blocks.hidden_size
    router = [WeightTensor(name="gate.zero_experts", role="router", rows=zero, columns=h)] if zero else []
    if r.flag("router_bias"):
        router.append(vector("gate.bias", "router", count + zero))
    blocks.layers = [layer for x in blocks.layers
                     for layer in (replace(x, extra=(*x.extra, *router)), replace(x, ffn=DenseFfn(width=width)))]
    blocks.notes += (f"each of the {len(blocks.layers) // 2} blocks counts as two layers",)
    if real != picks:
        blocks.notes += (f"of the {picks} experts of a token {real} compute something on average: "
                         f"{zero} of {count + zero} are zero experts",)
    return blocks


def olmo_hybrid(r: Reader) -> Decoder:
    """OLMo Hybrid: gated delta layers (norms before) and full attention layers (norms after)."""
    heads, h = head_count(r), r.hidden_size()
    k = r.optional_size("linear_num_key_heads") or heads
    dim = r.optional_size("linear_key_head_dim") or int(0.75 * h / k)
    sizes = {
        "linear_num_key_heads": k, "linear_num_value_heads": r.optional_size("linear_num_value_heads") or heads,
        "linear_key_head_dim": dim, "linear_value_head_dim": r.optional_size("linear_value_head_dim") or 2 * dim}

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        default = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n)]
        if "full_attention" not in default:
            default[-1] = "full_attention"
        full = hybrid_types(reader, n, default, "layer_types")
        linear = gated_delta_net(Reader({**reader.raw, **sizes}, reader.model_type, path=reader.path))
        attention = gqa(qk_norm="full", bias="attention_bias")(reader, n)
        return [attention[i] if f else linear for i, f in enumerate(full)]

    built = decoder(r, mixers=mixers, ffns=dense(), norms=())
    before = tuple(t for name in TWO_NORMS for t in norm_vectors(name, h, "rms"))
    after = tuple(t for name in POST_NORMS for t in norm_vectors(name, h, "rms"))
    built.layers = [replace(x, extra=after if x.mixer.kind == "gqa" else before) for x in built.layers]
    return built


def nemotron_nas(r: Reader) -> Decoder:
    """Llama-Nemotron (DeciLM): each block's KV groups and FFN width by block_configs; blocks may lack either."""
    n, h = r.layer_count(), r.hidden_size()
    blocks = r.items("block_configs", length=n)
    if blocks is None:
        raise r.fail("block_configs", "is missing; it must hold one block for each layer")
    heads = head_count(r)
    dim, bias = head_width(r, heads), r.flag("attention_bias")
    layers = [_nas_layer(r, i, block, heads, dim, bias) for i, block in enumerate(blocks)]
    r.find("num_key_value_heads", "intermediate_size")
    plain = decoder(r, mixers=lambda _, count: [NoMixer()] * count, ffns=lambda _, count: [NoFfn()] * count, norms=())
    plain.layers = layers
    plain.hidden_size = h
    return plain


def _nas_layer(r: Reader, index: int, block: Any, heads: int, dim: int, bias: bool) -> Layer:
    where = f"block_configs[{index}]"
    if not isinstance(block, Mapping):
        raise r.fail(where, "must be an object with attention and ffn")
    attention, ffn = block.get("attention"), block.get("ffn")
    if not isinstance(attention, Mapping) or not isinstance(ffn, Mapping):
        raise r.fail(where, "must hold the objects attention and ffn")
    for part, name in ((attention, "attention"), (ffn, "ffn")):
        for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
            if part.get(key):
                raise r.fail(f"{where}.{name}.{key}", "is set; only no_op, KV groups and FFN widths are understood")
    h = r.hidden_size()
    extra: list[WeightTensor] = []
    mixer: Mixer = NoMixer()
    network: Ffn = NoFfn()
    if not attention.get("no_op"):
        group = r.whole(f"{where}.attention.n_heads_in_group", attention.get("n_heads_in_group"), low=1)
        if heads % group:
            raise r.fail(f"{where}.attention.n_heads_in_group", f"is {group}, which does not divide {heads} heads")
        mixer = GroupedQueryAttention(num_heads=heads, num_kv_heads=heads // group, head_dim=dim, v_head_dim=dim,
                                      qkv_bias=bias, out_bias=bias)
        extra += norm_vectors("input_layernorm", h, "rms")
    if not ffn.get("no_op"):
        network = DenseFfn(width=_nas_width(r, where, ffn, h), bias=r.flag("mlp_bias"))
        extra += norm_vectors("post_attention_layernorm", h, "rms")
    return Layer(mixer=mixer, ffn=network, extra=tuple(extra))


def _nas_width(r: Reader, where: str, ffn: Mapping[str, Any], hidden: int) -> int:
    """ffn_mult · 2/3 · hidden, rounded up to 256; or the width itself."""
    multiple = ffn.get("ffn_mult")
    if multiple is None:
        return r.whole(f"{where}.ffn.intermediate_size", ffn.get("intermediate_size"), low=1)
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)) or not 0 < multiple < 1000:
        raise r.fail(f"{where}.ffn.ffn_mult", "must be a positive number")
    return 256 * -(-int(2 * multiple * hidden / 3) // 256)


def hyperclovax(r: Reader) -> Decoder:
    """HyperCLOVA X: Llama with optional norms after attention and FFN."""
    return decoder(r, mixers=gqa(bias="attention_bias"), ffns=dense(bias="mlp_bias"),
                   norms=FOUR_NORMS if r.flag("use_post_norm") else TWO_NORMS)


def granite_swa_windows(r: Reader, n: int) -> Windows:
    """A full layer, then three sliding ones."""
    return windows_of(r, attention_types(r, n, ["sliding_attention" if i % 4 else "full_attention" for i in range(n)]))

