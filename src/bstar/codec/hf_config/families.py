"""The table of model types: how each one's decoder is made of the shared mechanisms.

A new model of known mechanisms is a row here. Facts come from transformers' configuration and modelling
classes (5.19) and, for models that ship their own code, from vLLM 0.32's model files and the model cards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bstar.codec.hf_config import deepseek_v4, gemma, hybrids, mamba_hybrids, older, recent, sparse
from bstar.codec.hf_config.decoder import FOUR_NORMS, POST_NORMS, Decoder, decoder
from bstar.codec.hf_config.ffns import after_first, dense, every_layer, moe, stepped, typed_or
from bstar.codec.hf_config.mixers import (
    gqa,
    mla,
    plain_indexers,
    sparse_indexers,
    window_everywhere,
    window_if_used,
    windows_above,
    windows_by_pattern,
    windows_by_type,
    windows_by_type_or_everywhere,
)
from bstar.codec.hf_config.reader import Reader

Family = Callable[[Reader], Decoder]

_llama = partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(bias="mlp_bias"))
_deepseek_experts = partial(moe, shared_count=("n_shared_experts",))
_qwen_experts = partial(moe, sparse=stepped)

FAMILIES: dict[str, Family] = {
    # Llama-shaped, dense
    "llama": _llama,
    "mistral": partial(decoder, mixers=gqa(windows=window_everywhere), ffns=dense()),
    "ministral": partial(decoder, mixers=gqa(windows=windows_by_type_or_everywhere), ffns=dense()),
    "ministral3": partial(decoder, mixers=gqa(windows=window_everywhere), ffns=dense()),
    "qwen2": partial(decoder, mixers=gqa(qkv_bias=True, windows=windows_above), ffns=dense()),
    "qwen3": partial(decoder, mixers=gqa(qk_norm="head", windows=windows_above, bias="attention_bias"),
                     ffns=dense()),
    "gemma": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense()),
    "gemma2": partial(decoder, mixers=gqa(windows=windows_by_pattern("", 2), bias="attention_bias"),
                      ffns=dense(), norms=FOUR_NORMS),
    "gemma3_text": partial(
        decoder, ffns=dense(), norms=FOUR_NORMS,
        mixers=gqa(qk_norm="head", windows=windows_by_pattern("sliding_window_pattern", 6),
                   bias="attention_bias")),
    "phi3": partial(decoder, mixers=gqa(windows=window_everywhere), ffns=dense()),
    "glm": partial(decoder, mixers=gqa(qkv_bias="attention_bias"), ffns=dense()),
    "glm4": partial(decoder, mixers=gqa(qkv_bias="attention_bias"), ffns=dense(), norms=FOUR_NORMS),
    "granite": _llama,
    "olmo": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(), norm="none"),
    "olmo2": partial(decoder, mixers=gqa(qk_norm="full", bias="attention_bias"), ffns=dense(),
                     norms=POST_NORMS),
    "olmo3": partial(
        decoder, ffns=dense(), norms=POST_NORMS,
        mixers=gqa(qk_norm="full", windows=windows_by_pattern("", 4), bias="attention_bias")),
    "cohere": partial(
        decoder, ffns=dense(), norms=("input_layernorm",),
        mixers=gqa(qk_norm="full", qk_norm_if="use_qk_norm", bias="attention_bias")),
    "cohere2": partial(
        decoder, ffns=dense(), norms=("input_layernorm",),
        mixers=gqa(windows=windows_by_pattern("sliding_window_pattern", 4), derived_head_dim=True,
                   bias="attention_bias")),
    "exaone4": partial(
        decoder, ffns=dense(), norms=POST_NORMS,
        mixers=gqa(qk_norm="head", windows=sparse.exaone_windows)),
    "hunyuan_v1_dense": partial(decoder, mixers=gqa(qk_norm="head", bias="attention_bias"), ffns=dense()),
    "ernie4_5": partial(decoder, mixers=gqa(bias="use_bias"), ffns=dense(bias="use_bias")),
    "seed_oss": partial(decoder, mixers=gqa(qkv_bias="attention_bias", out_bias="attention_out_bias"),
                        ffns=dense(bias="mlp_bias")),
    "smollm3": partial(decoder, mixers=gqa(windows=sparse.smollm_windows, bias="attention_bias"),
                       ffns=dense(bias="mlp_bias")),
    "apertus": partial(
        decoder, mixers=gqa(qk_norm="head", bias="attention_bias"), layer_extra=sparse.apertus_extra,
        ffns=dense(gated=False)),
    "arcee": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(gated=False, bias="mlp_bias")),
    "nemotron": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(gated=False, bias="mlp_bias"),
                        norm="layer"),
    "starcoder2": partial(
        decoder, mixers=gqa(bias="use_bias", windows=window_everywhere),
        ffns=dense(gated=False, bias="use_bias"), norm="layer"),
    "stablelm": sparse.stablelm,
    "jais2": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=dense(gated=False, bias="mlp_bias"),
                     norm="layer"),
    "helium": partial(decoder, mixers=gqa(qkv_bias="attention_bias"), ffns=dense(bias="mlp_bias")),
    "cwm": partial(decoder, mixers=gqa(windows=recent.FIRST_FULL_OF_4), ffns=dense(bias="mlp_bias")),
    "hyperclovax": recent.hyperclovax,
    "granite_swa": partial(
        decoder, mixers=gqa(bias="attention_bias", sinks=True, windows=recent.granite_swa_windows),
        ffns=dense(bias="mlp_bias")),
    "olmo_hybrid": recent.olmo_hybrid,
    "nemotron-nas": recent.nemotron_nas,
    "phi": sparse.phi,
    # Mixtures of experts
    "mixtral": partial(decoder, mixers=gqa(windows=window_everywhere), ffns=moe(width=("intermediate_size",))),
    "qwen2_moe": partial(
        decoder, mixers=gqa(qkv_bias="qkv_bias", windows=sparse.qwen2_moe_windows),
        ffns=_qwen_experts(shared_width=("shared_expert_intermediate_size",), shared_gate=True)),
    "qwen3_moe": partial(decoder, mixers=gqa(qk_norm="head", windows=window_if_used, bias="attention_bias"),
                         ffns=_qwen_experts()),
    "phimoe": sparse.phimoe,
    "granitemoe": partial(decoder, mixers=gqa(bias="attention_bias"), ffns=moe(width=("intermediate_size",))),
    "granitemoeshared": partial(
        decoder, mixers=gqa(bias="attention_bias"),
        ffns=moe(width=("intermediate_size",), shared_width=("shared_intermediate_size",))),
    "olmoe": partial(decoder, mixers=gqa(qk_norm="full", bias="attention_bias"),
                     ffns=moe(width=("intermediate_size",))),
    "gpt_oss": partial(
        decoder, mixers=gqa(sinks=True, windows=windows_by_pattern("", 2), bias="attention_bias"),
        ffns=moe(width=("intermediate_size",), router_bias=True, expert_bias=True)),
    "minimax_m2": partial(decoder, mixers=gqa(qk_norm="full"),
                          ffns=moe(width=("intermediate_size",))),
    "glm4_moe": partial(
        decoder, mixers=gqa(qkv_bias="attention_bias", qk_norm="head", qk_norm_if="use_qk_norm", rounded=True),
        ffns=_deepseek_experts(sparse=typed_or(after_first()))),
    "dots1": partial(
        decoder, mixers=gqa(qk_norm="head", windows=windows_above, bias="attention_bias"),
        ffns=_deepseek_experts(sparse=typed_or(after_first()))),
    "exaone_moe": partial(
        decoder, mixers=gqa(qk_norm="head", windows=sparse.exaone_windows),
        ffns=moe(sparse=typed_or(after_first(1)), shared_count=("num_shared_experts",))),
    "hunyuan_v1_moe": sparse.hunyuan_moe,
    "ernie4_5_moe": sparse.ernie_moe,
    "cohere2_moe": sparse.cohere2_moe,
    "llama4_text": sparse.llama4,
    "mimo_v2_flash": sparse.mimo_v2,
    "step3p5": sparse.step3p5,
    "dbrx": sparse.dbrx,
    "minimax_m3_vl_text": recent.minimax_m3,
    "minimax_m3": recent.minimax_m3,
    "afmoe": recent.afmoe,
    "laguna": recent.laguna,
    "mellum": partial(decoder, mixers=gqa(qk_norm="head", windows=windows_by_type, bias="attention_bias"),
                      ffns=moe(sparse=typed_or(every_layer))),
    "hy_v3": partial(
        decoder, mixers=gqa(qk_norm="head", bias="attention_bias"),
        ffns=moe(sparse=typed_or(after_first(1)), shared_count=("num_shared_experts",))),
    "solar_open": partial(decoder, mixers=gqa(qkv_bias="attention_bias"), ffns=_deepseek_experts()),
    "flex_olmo": partial(decoder, mixers=gqa(qk_norm="full", bias="attention_bias"), norms=POST_NORMS,
                         ffns=moe(width=("intermediate_size",))),
    "granitemoe_swa": partial(
        decoder, mixers=gqa(bias="attention_bias", sinks=True, windows=recent.granite_swa_windows),
        ffns=moe(width=("intermediate_size",))),
    # Latent attention
    "axk1": recent.axk1,
    "hy_v4": deepseek_v4.hy_v4,
    "longcat_flash": recent.longcat_flash,
    "youtu": partial(decoder, mixers=mla(), ffns=dense()),
    "minicpm3": partial(decoder, mixers=mla(), ffns=dense(bias="mlp_bias")),
    "deepseek_v2": partial(decoder, mixers=mla(), ffns=_deepseek_experts(sparse=typed_or(after_first()))),
    "deepseek_v3": partial(decoder, mixers=mla(), ffns=_deepseek_experts(sparse=typed_or(after_first()))),
    "deepseek_v32": partial(decoder, mixers=mla(indexers=plain_indexers),
                            ffns=_deepseek_experts(sparse=typed_or(after_first(3)))),
    "glm_moe_dsa": partial(decoder, mixers=mla(indexers=sparse_indexers),
                           ffns=_deepseek_experts(sparse=typed_or(after_first(3)))),
    "glm4_moe_lite": partial(decoder, mixers=mla(), ffns=_deepseek_experts(sparse=typed_or(after_first(1)))),
    "mistral4": partial(decoder, mixers=mla(), ffns=_deepseek_experts(sparse=typed_or(after_first()))),
    "deepseek_v4": deepseek_v4.deepseek_v4,
    "kimi_linear": hybrids.kimi_linear,
    "glm5_next_text": deepseek_v4.glm5_next,
    # States and hybrids
    "qwen3_next": partial(hybrids.gated_delta_hybrid,
                          ffns=_qwen_experts(shared_width=("shared_expert_intermediate_size",), shared_gate=True)),
    "qwen3_5_text": partial(hybrids.gated_delta_hybrid, ffns=dense()),
    "qwen3_5_moe_text": partial(
        hybrids.gated_delta_hybrid,
        ffns=moe(shared_width=("shared_expert_intermediate_size",), shared_gate=True)),
    "nemotron_h": mamba_hybrids.nemotron_h,
    "granitemoehybrid": mamba_hybrids.granite_hybrid,
    "bamba": mamba_hybrids.bamba,
    "falcon_h1": mamba_hybrids.falcon_h1,
    "jamba": mamba_hybrids.jamba,
    "mamba": mamba_hybrids.mamba1_model,
    "falcon_mamba": mamba_hybrids.mamba1_model,
    "mamba2": mamba_hybrids.mamba2_model,
    "minimax": hybrids.minimax_lightning,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "mllama_text_model": hybrids.mllama,
    # Earlier decoders
    "gpt2": older.gpt2,
    "gpt_bigcode": older.gpt_bigcode,
    "gpt_neo": older.gpt_neo,
    "gpt_neox": older.gpt_neox,
    "gptj": older.gptj,
    "codegen": older.gptj,
    "opt": older.opt,
    "bloom": older.bloom,
    "mpt": older.mpt,
    "falcon": older.falcon,
}

# Text models that transformers knows only inside a multimodal one, under another row's mechanisms.
FAMILIES |= older.OWN_CODE_FAMILIES
FAMILIES |= {
    "qwen2_vl_text": FAMILIES["qwen2"],
    "qwen2_5_vl_text": FAMILIES["qwen2"],
    "qwen2_5_omni_text": FAMILIES["qwen2"],
    "qwen3_vl_text": FAMILIES["qwen3"],
    "qwen3_vl_moe_text": FAMILIES["qwen3_moe"],
    "qwen3_omni_moe_text": partial(
        decoder, mixers=gqa(qk_norm="head", windows=window_if_used, bias="attention_bias", rounded=True),
        ffns=_qwen_experts()),
    "glm4v_text": partial(decoder, mixers=gqa(qkv_bias=True), ffns=dense(), norms=FOUR_NORMS),
    "glm4v_moe_text": partial(decoder, mixers=gqa(qkv_bias="attention_bias", rounded=True),
                              ffns=_deepseek_experts(sparse=typed_or(after_first()))),
    "phi4_multimodal": FAMILIES["phi3"],
}


def described_model_types() -> set[str]:
    """Every model type that a row (here or among the multimodal ones) describes."""
    from bstar.codec.hf_config.multimodal import WRAPPERS

    nested = {name for w in WRAPPERS.values() for name in (w.text_type, w.vision_type, w.audio_type) if name}
    return set(FAMILIES) | set(WRAPPERS) | nested | set(older.CLASS_OF.values())
