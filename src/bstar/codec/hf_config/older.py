"""Decoders of the GPT-2 generation, and decoders whose code ships with the checkpoint (no transformers class)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bstar.codec.hf_config.decoder import TWO_NORMS, Decoder, decoder, norm_vectors
from bstar.codec.hf_config.ffns import after_first, dense, experts_ffn, moe
from bstar.codec.hf_config.hybrids import minimax_lightning
from bstar.codec.hf_config.mixers import (
    Windows,
    gqa,
    head_count,
    head_width,
    mla,
    per_head,
    window_everywhere,
    window_size,
    windows_above,
)
from bstar.codec.hf_config.reader import MAX_EXPERTS, Reader
from bstar.specs.attention import GroupedQueryAttention, Mixer
from bstar.specs.ffn import DenseFfn, Ffn, MoeFfn
from bstar.specs.tensors import WeightTensor

_mha = partial(gqa, kv_keys=("_no_kv_heads",))  # no KV head key: as many as heads


def gpt2(r: Reader) -> Decoder:
    """GPT-2: learned positions, biases everywhere."""
    return decoder(r, mixers=_mha(bias=True), ffns=dense(width=("n_inner",), gated=False, bias=True, ratio=4),
                   norm="layer", positions=r.size("n_positions"))


def gpt_bigcode(r: Reader) -> Decoder:
    """StarCoder: GPT-2 with one KV head."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads = head_count(reader)
        dim = per_head(reader, reader.hidden_size(), heads)
        kv = 1 if reader.flag("multi_query", default=True) else heads
        return [GroupedQueryAttention(num_heads=heads, num_kv_heads=kv, head_dim=dim, v_head_dim=dim, qkv_bias=True,
                                      out_bias=True)] * n

    return decoder(r, mixers=mixers, ffns=dense(width=("n_inner",), gated=False, bias=True, ratio=4), norm="layer",
                   positions=r.size("n_positions"))


def gpt_neo(r: Reader) -> Decoder:
    """GPT-Neo: alternating global and local attention, no bias on q, k, v."""

    def windows(reader: Reader, n: int) -> Windows:
        kinds: list[str] = []
        given = reader.items("attention_types") or [[["global", "local"], -(-n // 2)]]
        for item in given:
            if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
                raise reader.fail("attention_types", "must be a list of [kinds, repeats]")
            repeats = reader.whole("attention_types", item[1], low=1, high=4096)
            kinds += [str(k) for k in item[0][:8]] * repeats
            if len(kinds) > 1 << 16:
                raise reader.fail("attention_types", "describes more layers than any model has")
        kinds = kinds[:n] + ["global"] * (n - len(kinds))
        window = window_size(reader, "window_size")
        return [(window if k == "local" else None, False) for k in kinds]

    return decoder(r, mixers=_mha(windows=windows, out_bias=True), norm="layer",
                   ffns=dense(gated=False, bias=True, ratio=4), positions=r.size("max_position_embeddings"))


def gpt_neox(r: Reader) -> Decoder:
    """GPT-NeoX, Pythia."""
    return decoder(r, mixers=_mha(bias="attention_bias"), ffns=dense(gated=False, bias=True), norm="layer")


def gptj(r: Reader) -> Decoder:
    """GPT-J: parallel attention and FFN behind one norm, a bias on the head."""
    return decoder(r, mixers=_mha(), ffns=dense(width=("n_inner",), gated=False, bias=True, ratio=4), norm="layer",
                   norms=TWO_NORMS[:1], head_bias=True)


def opt(r: Reader) -> Decoder:
    """OPT: learned positions with an offset of two; a narrower embedding in the 350M model."""
    bias = r.flag("enable_bias", default=True)
    affine = "layer" if r.flag("layer_norm_elementwise_affine", default=True) else "none"
    before = r.flag("do_layer_norm_before", default=True)
    built = decoder(
        r, mixers=_mha(bias=bias), ffns=dense(width=("ffn_dim",), gated=False, bias=bias), norm=affine,
        positions=r.size("max_position_embeddings") + 2,
        final_norm=before and not r.flag("_remove_final_layer_norm", default=False))
    width = r.size("word_embed_proj_dim", default=built.hidden_size)
    if width != built.hidden_size:
        h = built.hidden_size
        built.embedding = tuple(replace(t, columns=width) if t.name == "embed_tokens" else t for t in built.embedding)
        built.lm_head = tuple(replace(t, columns=width) for t in built.lm_head)
        built.head_tensors += (WeightTensor(name="project_in", role="other", rows=h, columns=width),
                               WeightTensor(name="project_out", role="other", rows=width, columns=h))
    return built


def bloom(r: Reader) -> Decoder:
    """BLOOM: ALiBi, a norm after the embedding."""

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        return [DenseFfn(width=4 * reader.hidden_size(), gated=False, bias=True)] * n

    # ALiBi has no table of positions; engines take 2048 where the config is silent.
    built = decoder(r, mixers=_mha(bias=True), ffns=ffns, norm="layer", context_default=2048)
    built.head_tensors += norm_vectors("word_embeddings_layernorm", built.hidden_size, "layer")
    return built


def mpt(r: Reader) -> Decoder:
    """MPT: ALiBi, LayerNorm without bias, no biases."""
    attention = Reader(r.child("attn_config") or {}, "mpt_attention", path="attn_config.")
    if attention.text("attn_type", default="multihead_attention") != "multihead_attention":
        raise attention.fail("attn_type", "must be multihead_attention")
    if not r.flag("no_bias", default=True):
        raise r.fail("no_bias", "is false; only MPT without biases is understood")
    if attention.flag("qk_ln"):
        raise attention.fail("qk_ln", "is true; only MPT without query and key norms is understood")

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        width = int(reader.number("expansion_ratio", default=4) * reader.hidden_size())
        return [DenseFfn(width=reader.whole("expansion_ratio", width, low=1), gated=False)] * n

    return decoder(r, mixers=_mha(), ffns=ffns)


def falcon(r: Reader) -> Decoder:
    """Falcon 7B (multi-query), 40B and 180B (grouped, two norms), and the early RW models (ALiBi)."""
    new = r.flag("new_decoder_architecture", default=False)
    parallel = r.flag("parallel_attn", default=True)

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads = head_count(reader)
        dim = per_head(reader, reader.hidden_size(), heads)
        given = reader.optional_size("num_kv_heads", "n_head_kv")
        multi_query = reader.flag("multi_query", default=True)
        kv = (given if given is not None else heads) if new else 1 if multi_query else heads
        if heads % kv:
            raise reader.fail("num_kv_heads", f"is {kv}, which does not divide num_attention_heads {heads}")
        bias = reader.flag("bias")
        return [GroupedQueryAttention(num_heads=heads, num_kv_heads=kv, head_dim=dim, v_head_dim=dim, qkv_bias=bias,
                                      out_bias=bias)] * n

    count = r.optional_size("num_ln_in_parallel_attn")
    two = not parallel or (count if count is not None else 2 if new else 1) == 2
    built = decoder(r, mixers=mixers, ffns=dense(width=("ffn_hidden_size",), gated=False, bias="bias", ratio=4),
                    norm="layer", norms=TWO_NORMS if two else TWO_NORMS[:1])
    # vLLM falcon.py and TensorRT-LLM: side by side, attention and FFN are added up before the all-reduce.
    built.layers = [replace(layer, one_reduction=new or parallel) for layer in built.layers]
    return built


# -- decoders that ship their own code -------------------------------------------------------------


def _arctic_ffns(r: Reader, n: int) -> Sequence[Ffn]:
    """Snowflake Arctic: experts every moe_layer_frequency layers, with a residual dense FFN beside them."""
    step, count = r.size("moe_layer_frequency", default=2), r.size("num_local_experts", high=MAX_EXPERTS)
    width, h = r.size("intermediate_size"), r.hidden_size()
    residual = r.flag("parallel_attn_mlp_res", default=False)
    routed = experts_ffn(r, count=count, top_k=r.size("num_experts_per_tok"), width=width,
                         parallel_dense_width=h if residual else 0)
    plain = DenseFfn(width=width)
    return [routed if (i + 1) % step == 0 and count > 1 else plain for i in range(n)]


def arctic(r: Reader) -> Decoder:
    """Snowflake Arctic."""
    built = decoder(r, mixers=gqa(windows=window_everywhere), ffns=_arctic_ffns)
    extra = norm_vectors("residual_layernorm", built.hidden_size, "rms")
    built.layers = [replace(x, extra=x.extra + extra) if isinstance(x.ffn, MoeFfn) and x.ffn.parallel_dense_width
                    else x for x in built.layers]
    return built


def bailing_moe(r: Reader) -> Decoder:
    """Ling and Ring: fused QKV, shared experts of the routed width, dense first layers."""
    shared = "moe_shared_expert_intermediate_size"
    one = r.size(shared, default=r.size("moe_intermediate_size"))
    total = one * r.size("num_shared_experts", default=0, low=0)
    experts = moe(sparse=after_first(0))

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        return [replace(f, shared_width=total) if isinstance(f, MoeFfn) else f for f in experts(reader, n)]

    attention = gqa(qkv_bias="use_qkv_bias", out_bias="use_bias", qk_norm="head", qk_norm_if="use_qk_norm")
    return decoder(r, mixers=attention, ffns=ffns)


def chatglm(r: Reader) -> Decoder:
    """ChatGLM 2/3 and GLM-4-9B in their first form: multi-query groups, fused gate and up."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads = head_count(reader)
        dim = reader.size("kv_channels")
        kv = reader.size("multi_query_group_num") if reader.flag("multi_query_attention") else heads
        if heads % kv:
            raise reader.fail("multi_query_group_num", f"is {kv}, which does not divide the {heads} heads")
        bias = reader.flag("add_bias_linear")
        return [GroupedQueryAttention(num_heads=heads, num_kv_heads=kv, head_dim=dim, v_head_dim=dim, out_bias=bias,
                                      qkv_bias=bias or reader.flag("add_qkv_bias"))] * n

    built = decoder(r, mixers=mixers, ffns=dense(width=("ffn_hidden_size",), bias="add_bias_linear"),
                    layer_keys=("num_layers", "num_hidden_layers"))
    padded = r.size("padded_vocab_size", "vocab_size")
    built.vocab_size = padded
    built.embedding = tuple(replace(t, rows=padded) for t in built.embedding)
    built.lm_head = tuple(replace(t, rows=padded) for t in built.lm_head)
    return built


def qwen1(r: Reader) -> Decoder:
    """Qwen 1: MHA with biases on q, k, v; intermediate_size counts gate and up together."""

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        both = reader.size("intermediate_size", low=2)
        if both % 2:
            raise reader.fail("intermediate_size", f"is {both}; Qwen 1 gives gate and up together: it must be even")
        return [DenseFfn(width=both // 2)] * n

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads = head_count(reader)
        dim = reader.size("kv_channels", default=per_head(reader, reader.hidden_size(), heads))
        return [GroupedQueryAttention(num_heads=heads, num_kv_heads=heads, head_dim=dim, v_head_dim=dim,
                                      qkv_bias=True)] * n

    return decoder(r, mixers=mixers, ffns=ffns)


def step3(r: Reader) -> Decoder:
    """Step-3: multi-matrix factorized attention: a low-rank query, one shared KV head."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads, dim = head_count(reader), head_width(reader, head_count(reader))
        groups = reader.size("num_attention_groups")
        if heads % groups:
            raise reader.fail("num_attention_groups", f"is {groups}, which does not divide the {heads} heads")
        rank = reader.size("share_q_dim")
        return [GroupedQueryAttention(num_heads=heads, num_kv_heads=groups, head_dim=dim, v_head_dim=dim,
                                      q_rank=rank)] * n

    def sparse(reader: Reader, n: int) -> Sequence[bool]:
        chosen: Any = reader.find("moe_layers_enum")
        if chosen is None:
            return [i > 0 for i in range(n)]
        parts = chosen.split(",") if isinstance(chosen, str) else chosen
        if not isinstance(parts, list) or not all(str(x).strip().lstrip("-").isdigit() for x in parts):
            raise reader.fail("moe_layers_enum", "must be layer numbers separated by commas")
        positions = {int(x) for x in parts}
        return [i in positions for i in range(n)]

    return decoder(r, mixers=mixers, ffns=moe(
        experts=("moe_num_experts",), top_k=("moe_top_k",), sparse=sparse, shared_width=("share_expert_dim",)))


def exaone3(r: Reader) -> Decoder:
    """EXAONE 3 and 3.5: Llama's mechanisms under other names."""
    return decoder(r, mixers=gqa(), ffns=dense(), layer_keys=("num_layers", "num_hidden_layers"))


CLASS_OF: dict[str, str] = {
    "kimi_k2": "deepseek_v3", "Yi": "llama", "aquila": "llama", "minimax_text_01": "minimax", "minimax_m1": "minimax",
    "MiniMaxText01": "minimax", "MiniMaxM1": "minimax", "RefinedWebModel": "falcon", "RefinedWeb": "falcon",
    "kanana": "llama", "starcoder": "gpt_bigcode", "minimax_m3": "minimax_m3_vl_text", "mimo": "qwen2",
    "deepseek": "deepseek_v2",
}  # fmt: skip

# Classes of the same, by which engines know them whatever model_type says.
OWN_CLASSES: dict[str, str] = {
    "InternLMForCausalLM": "internlm", "InternLM2ForCausalLM": "internlm2", "InternLM3ForCausalLM": "internlm3",
    "BaichuanForCausalLM": "baichuan", "BaiChuanForCausalLM": "baichuan", "ExaoneForCausalLM": "exaone",
    "QWenLMHeadModel": "qwen", "ArcticForCausalLM": "arctic", "BailingMoeForCausalLM": "bailing_moe",
    "BailingMoeV2ForCausalLM": "bailing_moe_v2", "DeciLMForCausalLM": "nemotron-nas", "MiMoForCausalLM": "mimo",
    "MiniMaxText01ForCausalLM": "minimax_text_01", "MiniMaxM1ForCausalLM": "minimax_m1",
    "Step3TextForCausalLM": "step3_text", "MiniMaxM3ForCausalLM": "minimax_m3",
    "MiniMaxM3SparseForCausalLM": "minimax_m3", "DeepseekForCausalLM": "deepseek", "YiForCausalLM": "Yi",
    "AquilaForCausalLM": "aquila", "RWForCausalLM": "RefinedWeb",
}  # fmt: skip

OWN_CODE_FAMILIES: dict[str, Callable[[Reader], Decoder]] = {
    "kimi_k2": partial(decoder, mixers=mla(), ffns=moe(sparse=after_first(), shared_count=("n_shared_experts",))),
    "Yi": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(bias="mlp_bias")),
    "aquila": partial(decoder, mixers=gqa(), ffns=dense()),
    "kanana": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(bias="mlp_bias")),
    "mimo": partial(decoder, mixers=gqa(qkv_bias="attention_bias", windows=windows_above), ffns=dense()),
    "internlm2": partial(decoder, mixers=gqa(bias="bias"), ffns=dense()),
    "internlm3": partial(decoder, mixers=gqa(qkv_bias="qkv_bias", out_bias="bias"), ffns=dense(bias="bias")),
    "internlm": partial(decoder, mixers=gqa(bias="bias"), ffns=dense()),
    "baichuan": partial(decoder, mixers=_mha(), ffns=dense()),
    "exaone": exaone3,
    "minimax_text_01": minimax_lightning,
    "MiniMaxText01": minimax_lightning,
    "minimax_m1": minimax_lightning,
    "MiniMaxM1": minimax_lightning,
    "arctic": arctic,
    "bailing_moe": bailing_moe,
    "bailing_moe_v2": bailing_moe,
    "chatglm": chatglm,
    "qwen": qwen1,
    "step3_text": step3,
    "RefinedWebModel": falcon,
    "RefinedWeb": falcon,
    "starcoder": gpt_bigcode,
    "solar": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(bias="mlp_bias")),
    "deepseek": partial(decoder, mixers=gqa(bias="attention_bias"),
                        ffns=moe(sparse=after_first(), shared_count=("n_shared_experts",))),
}

