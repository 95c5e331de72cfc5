"""Decoders of standard mechanisms whose layer patterns or switches need more than a row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bstar.codec.hf_config.decoder import TWO_NORMS, Decoder, decoder
from bstar.codec.hf_config.ffns import EXPERT_KEYS, dense, experts_ffn, moe
from bstar.codec.hf_config.mixers import (
    Windows,
    attention_types,
    gqa,
    head_count,
    head_width,
    kv_head_count,
    per_head,
    window_everywhere,
    window_size,
    windows_of,
)
from bstar.codec.hf_config.reader import MAX_EXPERTS, Reader
from bstar.specs.attention import GroupedQueryAttention, Mixer
from bstar.specs.ffn import DenseFfn, Ffn, MoeFfn
from bstar.specs.tensors import WeightTensor, vector

# -- window rules ----------------------------------------------------------------------------------


def exaone_windows(r: Reader, n: int) -> Windows:
    """EXAONE 4: sliding_window_pattern as a number ("LLLG" spells 4); null window: all layers are full."""
    pattern = r.find("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise r.fail("sliding_window_pattern", "must be a number or letters L (local) and G (global)")
        kinds = ["sliding_attention" if pattern[i % len(pattern)] == "L" else "full_attention" for i in range(n)]
    elif window_size(r) is None:
        kinds = ["full_attention"] * n
    else:
        every = r.size("sliding_window_pattern", default=4, low=0)
        kinds = ["sliding_attention" if every and (i + 1) % every else "full_attention" for i in range(n)]
    return windows_of(r, attention_types(r, n, kinds))


def smollm_windows(r: Reader, n: int) -> Windows:
    """SmolLM3: sliding layers, where they are used at all, are those without rope."""
    rope = r.numbers("no_rope_layers", length=n)
    every = r.size("no_rope_layer_interval", default=4)
    has_rope = rope if rope is not None else [int((i + 1) % every != 0) for i in range(n)]
    used = r.flag("use_sliding_window") and window_size(r) is not None
    kinds = ["sliding_attention" if used and not x else "full_attention" for x in has_rope]
    return windows_of(r, attention_types(r, n, kinds))


def qwen2_moe_windows(r: Reader, n: int) -> Windows:
    """Qwen 2 MoE: every other layer below max_window_layers, where use_sliding_window is on."""
    used, limit = r.flag("use_sliding_window"), r.size("max_window_layers", default=n, low=0)
    kinds = ["sliding_attention" if used and i % 2 == 0 and i < limit else "full_attention" for i in range(n)]
    r.find("sliding_window")
    return windows_of(r, attention_types(r, n, kinds)) if used else [(None, False)] * n


# -- dense -----------------------------------------------------------------------------------------


def stablelm(r: Reader) -> Decoder:
    """StableLM: LayerNorm, optional per-head q/k norms, one norm per layer when attention and FFN are parallel."""
    return decoder(r, mixers=gqa(qkv_bias="use_qkv_bias", qk_norm="full", qk_norm_if="qk_layernorm"), ffns=dense(),
                   norm="layer", norms=TWO_NORMS[:1] if r.flag("use_parallel_residual") else TWO_NORMS)


def phi(r: Reader) -> Decoder:
    """Phi 1 and 2: parallel attention and FFN, biases everywhere, the head included."""
    return decoder(
        r, mixers=gqa(bias=True, qk_norm="head", qk_norm_if="qk_layernorm", qk_norm_bias=True),
        ffns=dense(gated=False, bias=True), norm="layer", norms=TWO_NORMS[:1], head_bias=True)


def phimoe(r: Reader) -> Decoder:
    """Phi-3.5-MoE: LayerNorm, Mixtral's experts, biases by switches."""
    return decoder(
        r, mixers=gqa(bias="attention_bias", windows=window_everywhere), norm="layer",
        ffns=moe(width=("intermediate_size",)), head_bias=r.flag("lm_head_bias"))


def apertus_extra(r: Reader, n: int) -> Sequence[tuple[WeightTensor, ...]]:
    """xIELU's two learned scalars per layer."""
    return [(vector("mlp.act_fn.alpha_p", "mlp", 1), vector("mlp.act_fn.alpha_n", "mlp", 1))] * n


# -- mixtures of experts ---------------------------------------------------------------------------


def ernie_sparse(r: Reader, n: int) -> Sequence[bool]:
    """ERNIE 4.5: layers from moe_layer_start_index to moe_layer_end_index, every moe_layer_interval-th."""
    first, last = (_one(r, "moe_layer_start_index", 1), _one(r, "moe_layer_end_index", -1))
    step = r.size("moe_layer_interval", default=1)
    end = n - 1 if last == -1 else last
    return [(i + 1) % step == 0 and first <= i <= end for i in range(n)]


def _one(r: Reader, key: str, default: int) -> int:
    """A layer index; -1 is the last. The multimodal checkpoints give one per modality: the text one is first."""
    value = r.find(key)
    if isinstance(value, list) and value:
        value = value[0]
    return default if value is None else r.whole(key, value, low=-1)


def ernie_moe(r: Reader) -> Decoder:
    """ERNIE 4.5 MoE: the router's correction is a parameter, shared experts of the routed width."""
    built = decoder(
        r, mixers=gqa(bias="use_bias"),
        ffns=moe(sparse=ernie_sparse, shared_count=("moe_num_shared_experts",), dense_bias="use_bias",
                 shared_bias="use_bias"), head_bias=r.flag("use_bias"))
    built.layers = [
        replace(layer, extra=(*layer.extra, vector("mlp.moe_statics", "router", layer.ffn.num_experts)))
        if isinstance(layer.ffn, MoeFfn) else layer for layer in built.layers]
    return built


def hunyuan_moe(r: Reader) -> Decoder:
    """Hunyuan MoE: experts of intermediate_size, one shared expert of the same width."""

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        def value(key: str, default: int, i: int) -> int:
            found = reader.find(key)
            item = found[i] if isinstance(found, list) and len(found) == n else found
            return default if item is None else reader.whole(key, item, low=1, high=1 << 24)

        width = reader.size("intermediate_size")
        if any(value("moe_intermediate_size", width, i) != width for i in range(n)):
            raise reader.fail("moe_intermediate_size", f"is not intermediate_size {width}; only equal is understood")
        reader.find("num_shared_expert")
        return [experts_ffn(reader, count=value("num_experts", 1, i), top_k=value("moe_topk", 1, i), width=width,
                            shared_width=width) for i in range(n)]

    return decoder(r, mixers=gqa(bias="attention_bias", qk_norm="head"), ffns=ffns)


def cohere2_moe(r: Reader) -> Decoder:
    """Command A MoE: experts of intermediate_size, dense prefix layers of their own width and window pattern."""

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        first = reader.size("first_k_dense_replace", default=0, low=0)
        types = reader.words("mlp_layer_types", length=n, allowed=("dense", "sparse"))
        kinds = types or ["dense" if i < first else "sparse" for i in range(n)]
        width = reader.size("intermediate_size")
        shared = reader.size("num_shared_experts", default=0, low=0) * width
        plain = DenseFfn(width=reader.size("prefix_dense_intermediate_size", default=width))
        routed = experts_ffn(reader, count=reader.size(*EXPERT_KEYS, high=MAX_EXPERTS),
                             top_k=reader.size("num_experts_per_tok"), width=width, shared_width=shared)
        return [plain if k == "dense" else routed for k in kinds]

    def windows(reader: Reader, n: int) -> Windows:
        first = reader.size("first_k_dense_replace", default=0, low=0)
        prefix = reader.size("prefix_dense_sliding_window_pattern", default=1)
        rest = reader.size("sliding_window_pattern", default=4)
        steps = [((i + 1) % prefix if i < first else (i - first + 1) % rest) for i in range(n)]
        return windows_of(reader, attention_types(
            reader, n, ["sliding_attention" if s else "full_attention" for s in steps]))

    return decoder(r, mixers=gqa(bias="attention_bias", windows=windows), ffns=ffns, norms=TWO_NORMS[:1])


def llama4(r: Reader) -> Decoder:
    """Llama 4: chunked attention where rope is on, one shared expert, sparse layers by a step."""

    def windows(reader: Reader, n: int) -> Windows:
        rope = reader.numbers("no_rope_layers")
        every = reader.size("no_rope_layer_interval", default=4)
        if rope and len(rope) != n:
            raise reader.fail("no_rope_layers", f"has {len(rope)} entries; it must have one for each of the {n} layers")
        flags = rope or [int((i + 1) % every != 0) for i in range(n)]
        return windows_of(reader, attention_types(
            reader, n, ["chunked_attention" if x else "full_attention" for x in flags]))

    def sparse(reader: Reader, n: int) -> Sequence[bool]:
        chosen = reader.numbers("moe_layers")
        step = reader.size("interleave_moe_layer_step", default=1)
        positions = set(chosen) if chosen is not None else set(range(step - 1, n, step))
        return [i in positions for i in range(n)]

    r.find("use_qk_norm")  # a norm without weights
    return decoder(
        r, mixers=gqa(bias="attention_bias", windows=windows),
        ffns=moe(width=("intermediate_size",), sparse=sparse, dense_width=("intermediate_size_mlp",),
                 shared_width=("intermediate_size",)))


def mimo_v2(r: Reader) -> Decoder:
    """MiMo V2: sliding layers with twice the KV heads (or their own head counts) and attention sinks."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        pattern = reader.numbers("hybrid_layer_pattern", length=n)
        kinds = (["sliding_attention" if x else "full_attention" for x in pattern] if pattern is not None else
                 ["full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in range(n)])
        kinds = attention_types(reader, n, kinds)
        heads = head_count(reader)
        kv = kv_head_count(reader, heads)
        dim, v_dim = head_width(reader, heads), reader.size("v_head_dim")
        bias = reader.flag("attention_bias")
        full = GroupedQueryAttention(num_heads=heads, num_kv_heads=kv, head_dim=dim, v_head_dim=v_dim, qkv_bias=bias,
                                     sinks=reader.flag("add_full_attention_sink_bias", default=False))
        swa_heads = reader.size("swa_num_attention_heads", default=heads)
        swa = GroupedQueryAttention(
            num_heads=swa_heads, num_kv_heads=kv_head_count_of(reader, "swa_num_key_value_heads", swa_heads, 2 * kv),
            head_dim=reader.size("swa_head_dim", default=dim), v_head_dim=reader.size("swa_v_head_dim", default=v_dim),
            qkv_bias=bias, sinks=reader.flag("add_swa_attention_sink_bias", default=True),
            window=window_size(reader, "sliding_window", "sliding_window_size"))
        reader.find("attention_chunk_size", "swa_rope_theta", "attention_value_scale")
        return [swa if k == "sliding_attention" else full for k in kinds]

    def sparse(reader: Reader, n: int) -> Sequence[bool]:
        types = reader.words("mlp_layer_types", length=n, allowed=("dense", "sparse"))
        flags = reader.numbers("moe_layer_freq", length=n) if types is None else None
        if types is not None:
            return [t == "sparse" for t in types]
        return [bool(x) for x in flags] if flags is not None else [i > 0 for i in range(n)]

    return decoder(r, mixers=mixers, ffns=moe(sparse=sparse, shared_count=("n_shared_experts",)))


def kv_head_count_of(r: Reader, key: str, heads: int, default: int) -> int:
    """A KV head count under another key, which must divide its heads."""
    kv = r.size(key, default=min(default, heads))
    if heads % kv:
        raise r.fail(key, f"is {kv}, which does not divide the {heads} query heads")
    return kv


def step3p5(r: Reader) -> Decoder:
    """Step 3.5 and 3.7: a gate per head, more heads in sliding layers, shared expert of its own width."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        mtp = reader.size("num_nextn_predict_layers", default=0, low=0)
        kinds = _trimmed(reader, "layer_types", n, mtp) or ["full_attention"] * n
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise reader.fail("layer_types", f"holds {kind[:40]!r}; known are full_attention, sliding_attention")
        heads = head_count(reader)
        other = reader.child("attention_other_setting") or {}
        swa = reader.optional_size("num_sliding_attention_heads")
        if swa is None:
            swa = reader.whole("attention_other_setting.num_attention_heads",
                               other.get("num_attention_heads", heads), low=1)
        kv = kv_head_count(reader, heads, "num_key_value_heads", "num_attention_groups")
        dim, bias = head_width(reader, heads), reader.flag("attention_bias")
        shared = {"head_dim": dim, "v_head_dim": dim, "qk_norm": "head", "head_gate": True, "qkv_bias": bias,
                  "out_bias": bias, "num_kv_heads": kv}
        if swa % kv:
            raise reader.fail("num_sliding_attention_heads", f"is {swa}, not a multiple of the {kv} KV heads")
        window = window_size(reader)
        full = GroupedQueryAttention(num_heads=heads, **shared)  # type: ignore[arg-type]
        sliding = GroupedQueryAttention(num_heads=swa, window=window, **shared)  # type: ignore[arg-type]
        return [sliding if k == "sliding_attention" else full for k in kinds]

    def sparse(reader: Reader, n: int) -> Sequence[bool]:
        mtp = reader.size("num_nextn_predict_layers", default=0, low=0)
        types = _trimmed(reader, "mlp_layer_types", n, mtp)
        if types is not None:
            return [t == "sparse" for t in types]
        chosen = reader.find("moe_layers_enum")
        if chosen is None:
            return [i >= 3 for i in range(n)]
        parts = chosen.split(",") if isinstance(chosen, str) else chosen
        if not isinstance(parts, list) or len(parts) > 8192:
            raise reader.fail("moe_layers_enum", "must be layer numbers separated by commas")
        try:
            positions = {int(x) for x in parts if str(x).strip()}
        except (TypeError, ValueError):
            raise reader.fail("moe_layers_enum", "must be layer numbers separated by commas") from None
        return [i in positions for i in range(n)]

    built = decoder(r, mixers=mixers, ffns=moe(sparse=sparse, shared_width=("share_expert_dim",)))
    # The prediction layers lie beyond the sparse ones: dense FFNs.
    built.mtp_layer = replace(built.layers[-1], ffn=DenseFfn(width=r.size("intermediate_size")))
    return built


def _trimmed(r: Reader, key: str, n: int, mtp: int) -> list[str] | None:
    """A per-layer list that may carry entries for the MTP layers at its end."""
    values = r.items(key)
    if values is None:
        return None
    if len(values) not in (n, n + mtp):
        raise r.fail(key, f"has {len(values)} entries; it must have one for each of the {n} layers")
    return [str(v) for v in values[:n]]


def dbrx(r: Reader) -> Decoder:
    """DBRX: fused QKV with KV heads in attn_config, experts in ffn_config, LayerNorm without bias."""
    attention, ffn = r.child("attn_config") or {}, r.child("ffn_config") or {}
    inner = Reader(attention, "dbrx_attention", path="attn_config.", defaults={"kv_n_heads": 1})
    experts = Reader(ffn, "dbrx_ffn", path="ffn_config.",
                     defaults={"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1})

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads = head_count(reader)
        dim = per_head(reader, reader.hidden_size(), heads)
        kv = kv_head_count_of(inner, "kv_n_heads", heads, 1)
        return [GroupedQueryAttention(num_heads=heads, num_kv_heads=kv, head_dim=dim, v_head_dim=dim)] * n

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        return [experts_ffn(experts, count=experts.size("moe_num_experts", high=MAX_EXPERTS),
                            top_k=experts.size("moe_top_k"), width=experts.size("ffn_hidden_size"))] * n

    return decoder(r, mixers=mixers, ffns=ffns)

