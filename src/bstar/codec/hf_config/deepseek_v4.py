"""Compressed and pooled sparse attention with hyper-connections: DeepSeek V4, GLM5-Next, HY V4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bstar.codec.hf_config.decoder import Decoder, decoder
from bstar.codec.hf_config.ffns import after_first, moe, typed_or
from bstar.codec.hf_config.hybrids import FULL, LINEAR
from bstar.codec.hf_config.mixers import MLA_TYPES, head_count, latent_attention, mla, model_bits, sparse_indexers
from bstar.codec.hf_config.reader import MAX_CONTEXT, Reader
from bstar.specs.attention import CompressedAttention, KimiDeltaAttention, LatentAttention, Mixer, SparseIndexer
from bstar.specs.tensors import WeightTensor, vector

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
    built.head_tensors += _hyper_head(h, streams)
    kinds = r.numbers("compress_ratios") or []
    last = built.layers[-1]
    if len(kinds) > len(built.layers) and isinstance(last.mixer, CompressedAttention) and not kinds[len(built.layers)]:
        built.mtp_layer = replace(last, mixer=replace(last.mixer, compress_ratio=0, overlap=False, indexer=None))
    # vLLM 0.32 keeps V4's cache in its packed fp8 layout unless it is told bfloat16.
    built.kv_cache_dtype = "fp8"
    return built


def _hyper_head(hidden_size: int, streams: int) -> tuple[WeightTensor, ...]:
    """The collapse of the residual streams before the final norm."""
    return (WeightTensor(name="hc_head.hc_fn", role="other", rows=streams, columns=streams * hidden_size),
            vector("hc_head.hc_base", "other", streams), vector("hc_head.hc_scale", "other", 1))


def _hyper_connections(hidden_size: int, streams: int, *, mixes: int | None = None, scales: int = 3
                       ) -> tuple[WeightTensor, ...]:
    """The mixing of residual streams before and after each sublayer."""
    mix = streams * (2 + streams) if mixes is None else mixes
    return tuple(
        t for side in ("attn_hc", "ffn_hc") for t in (
            WeightTensor(name=f"{side}.fn", role="other", rows=mix, columns=streams * hidden_size),
            vector(f"{side}.base", "other", mix), vector(f"{side}.scale", "other", scales)))


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


def hy_v4(r: Reader) -> Decoder:
    """HY V4 (Hunyuan): gated sparse MLA with sinks, most layers reusing an indexer, independent hyper-connections."""

    def indexers(reader: Reader, n: int) -> Sequence[SparseIndexer | None]:
        kinds = reader.words("indexer_types", length=n, allowed=("full", "shared")) or [
            "full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(n)]
        return [SparseIndexer(num_heads=reader.size("index_n_heads"), head_dim=reader.size("index_head_dim"),
                              top_k=reader.size("index_topk", high=MAX_CONTEXT), shared=k == "shared") for k in kinds]

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        return [replace(m, output_gate=True) for m in mla(indexers=indexers)(reader, n)
                if isinstance(m, LatentAttention)]

    built = decoder(r, mixers=mixers, ffns=moe(sparse=typed_or(after_first(1)), shared_count=("n_shared_experts",)))
    h, streams = built.hidden_size, r.size("hc_mult", high=1024)
    extra = (vector("self_attn.sinks", "attn", head_count(r), shard="column"),
             *_hyper_connections(h, streams, mixes=2 * streams, scales=2))
    built.layers = [replace(layer, extra=layer.extra + extra) for layer in built.layers]
    built.head_tensors += _hyper_head(h, streams)
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
