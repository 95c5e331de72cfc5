"""The configs that make_parameter_counts.py builds: each model type's default and what real configs change."""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any]]

_SMALL = {"num_hidden_layers": 6, "hidden_size": 768, "vocab_size": 32003}


def _dense(*, mlp_bias: bool = True, bias: bool = True, head_dim: bool = True, kv: bool = True, tied: bool = True,
           width: str = "intermediate_size", **more: dict[str, Any]) -> list[Case]:
    """A dense decoder's usual switches."""
    base = {**_SMALL, "num_attention_heads": 12, width: 2000}
    if kv:
        base["num_key_value_heads"] = 4
    cases: list[Case] = [("default", {}), ("sizes", base), ("tied", {**base, "tie_word_embeddings": True}),
                         ("untied", {**base, "tie_word_embeddings": False})]
    if kv:
        cases.append(("mha", {**base, "num_key_value_heads": 12}))
        cases.append(("mqa", {**base, "num_key_value_heads": 1}))
    if head_dim:
        cases.append(("head_dim", {**base, "head_dim": 80}))
    if bias:
        cases.append(("bias", {**base, "attention_bias": True}))
        cases.append(("no bias", {**base, "attention_bias": False}))
    if mlp_bias:
        cases.append(("mlp bias", {**base, "mlp_bias": True}))
    cases += [(label.replace("_", " "), {**base, **change}) for label, change in more.items()]
    return cases if tied else [c for c in cases if c[0] not in ("tied", "untied")]


def _moe(experts: str = "num_experts", top: str = "num_experts_per_tok", *, num_kv: int = 4, head_dim: bool = True,
         **more: dict[str, Any]) -> list[Case]:
    """A mixture's usual switches."""
    base = {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": num_kv, "intermediate_size": 1100,
            experts: 10, top: 3}
    cases: list[Case] = [("default", {"num_hidden_layers": 5}), ("sizes", base),
                         ("tied", {**base, "tie_word_embeddings": True}),
                         ("bias", {**base, "attention_bias": True}), ("head_dim", {**base, "head_dim": 48})]
    cases = cases if head_dim else cases[:-1]
    return cases + [(label.replace("_", " "), {**base, **change}) for label, change in more.items()]


def _mla(experts: str = "n_routed_experts", **more: dict[str, Any]) -> list[Case]:
    base = {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 1100,
            "moe_intermediate_size": 300, experts: 12, "num_experts_per_tok": 3, "n_group": 1,
            "topk_group": 1, "q_lora_rank": 200, "kv_lora_rank": 96, "qk_nope_head_dim": 40, "qk_rope_head_dim": 24,
            "v_head_dim": 56, "n_shared_experts": 2}
    cases: list[Case] = [("default", {"num_hidden_layers": 6}), ("sizes", base),
                         ("no q rank", {**base, "q_lora_rank": None}), ("bias", {**base, "attention_bias": True}),
                         ("tied", {**base, "tie_word_embeddings": True})]
    return cases + [(label.replace("_", " "), {**base, **change}) for label, change in more.items()]


def _padded(cases: list[Case]) -> list[Case]:
    """Cases whose class's padding token lies beyond a small vocabulary."""
    return [(label, {"pad_token_id": 0, **raw}) for label, raw in cases]


def _without_experts(cases: list[Case]) -> list[Case]:
    """The cases of a latent-attention model whose FFNs are dense."""
    keys = {"moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
            "n_shared_experts"}
    return [(label, {k: v for k, v in raw.items() if k not in keys}) for label, raw in cases]


_FIRST = {"first_k_dense_replace": 2}
_TYPES6 = ["full_attention", "sliding_attention"] * 3
_QWEN_MOE = {"moe_intermediate_size": 200, "decoder_sparse_step": 1}
_GDN = {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 24,
        "linear_value_head_dim": 40, "linear_conv_kernel_dim": 3}
_HYBRID6 = ["linear_attention", "linear_attention", "full_attention"] * 2
_MLP6 = ["dense", "sparse", "dense", "sparse", "sparse", "dense"]

_SIGLIP = {"hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3, "num_attention_heads": 4,
           "image_size": 56, "patch_size": 14, "model_type": "siglip_vision_model"}
_QWEN_TEXT = {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 1000}
_QWEN3_VIT = {"depth": 3, "hidden_size": 96, "intermediate_size": 250, "num_heads": 4, "out_hidden_size": 768,
              "num_position_embeddings": 100, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "deepstack_visual_indexes": [0, 2]}

VARIATIONS: dict[str, list[Case]] = {
    "llama": _dense(),
    "mistral": _dense(mlp_bias=False, bias=False, window={"sliding_window": 100}),
    "ministral": [(n, {"head_dim": 64, **c})
                  for n, c in _dense(mlp_bias=False, bias=False, types={"layer_types": _TYPES6})],
    "ministral3": _dense(mlp_bias=False, bias=False),
    "qwen2": _dense(mlp_bias=False, bias=False, head_dim=False,
                    window={"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64}),
    "qwen3": _dense(mlp_bias=False, types={"layer_types": _TYPES6, "use_sliding_window": True, "sliding_window": 64}),
    "gemma": _dense(mlp_bias=False),
    "gemma2": _dense(mlp_bias=False, types={"layer_types": _TYPES6}),
    "gemma3_text": _dense(mlp_bias=False, types={"layer_types": _TYPES6}),
    "phi3": [(n, {"pad_token_id": 0, **c}) for n, c in _dense(mlp_bias=False, bias=False, head_dim=False)],
    "phi": [(n, c) for n, c in _dense(mlp_bias=False, bias=False, head_dim=False,
                                      norms={"qk_layernorm": True})],
    "glm": [(n, {"pad_token_id": 0, **c}) for n, c in _dense(mlp_bias=False)],
    "glm4": [(n, {"pad_token_id": 0, **c}) for n, c in _dense(mlp_bias=False)],
    "granite": _dense(head_dim=False),
    "olmo": _dense(mlp_bias=False, head_dim=False),
    "olmo2": [(n, {"pad_token_id": 0, **c}) for n, c in _dense(mlp_bias=False, head_dim=False)],
    "olmo3": [(n, {"pad_token_id": 0, **c}) for n, c in _dense(mlp_bias=False, head_dim=False,
                                                               types={"layer_types": _TYPES6})],
    "cohere": _dense(mlp_bias=False, head_dim=False, norms={"use_qk_norm": True}),
    "cohere2": _dense(mlp_bias=False, head_dim=False, types={"layer_types": _TYPES6}),
    "exaone4": _dense(mlp_bias=False, bias=False, types={"layer_types": _TYPES6}),
    "hunyuan_v1_dense": [(n, {"head_dim": 64, **c})
                         for n, c in _dense(mlp_bias=False)],
    "ernie4_5": _dense(mlp_bias=False, bias=False, biases={"use_bias": True}),
    "seed_oss": _dense(out={"attention_out_bias": True, "attention_bias": False}),
    "smollm3": [(n, {"pad_token_id": 0, **c}) for n, c in _dense(
        head_dim=False, window={"use_sliding_window": True, "sliding_window": 32})],
    "apertus": [(n, {"pad_token_id": 0, **c}) for n, c in _dense()],
    "arcee": _dense(),
    "nemotron": [(n, {"num_key_value_heads": 4, "num_attention_heads": 12, "hidden_size": 768, "head_dim": 64, **c})
                 for n, c in _dense()],
    "starcoder2": _dense(mlp_bias=False, bias=False, head_dim=False, biases={"use_bias": False}),
    "stablelm": _dense(mlp_bias=False, bias=False, head_dim=False, qkv={"use_qkv_bias": True},
                       norms={"qk_layernorm": True}, parallel={"use_parallel_residual": True}),
    "mixtral": _moe("num_local_experts"),
    "qwen2_moe": _moe(a=_QWEN_MOE, step={**_QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
                      shared={**_QWEN_MOE, "shared_expert_intermediate_size": 432}, plain={"qkv_bias": False}),
    "qwen3_moe": _moe(a=_QWEN_MOE, step={**_QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "phimoe": _moe("num_local_experts", head={"lm_head_bias": True}),
    "granitemoe": _moe("num_local_experts"),
    "granitemoeshared": _moe("num_local_experts", shared={"shared_intermediate_size": 640}),
    "olmoe": _moe(head_dim=False),
    "gpt_oss": _moe("num_local_experts", plain={"attention_bias": False}),
    "minimax_m2": _moe("num_local_experts", norm={"use_qk_norm": True}),
    "glm4_moe": _moe("n_routed_experts", a={**_FIRST, "moe_intermediate_size": 200, "n_shared_experts": 2},
                     norm={"use_qk_norm": True}),
    "dots1": [(n, {"n_shared_experts": 2, "n_routed_experts": 10, "num_experts_per_tok": 3, **c})
              for n, c in _moe("n_routed_experts", a={**_FIRST, "moe_intermediate_size": 200})],
    "exaone_moe": _moe(a={**_FIRST, "moe_intermediate_size": 200, "num_shared_experts": 2},
                       types={"mlp_layer_types": _MLP6}),
    "hunyuan_v1_moe": [(n, {"head_dim": 64, **c})
                       for n, c in _moe(top="moe_topk")],
    "ernie4_5_moe": _moe("moe_num_experts", "moe_k", a={
        "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2, "moe_intermediate_size": 200,
        "moe_num_shared_experts": 2}, biases={"use_bias": True}, none={"moe_num_shared_experts": 0}),
    "cohere2_moe": _moe(a={**_FIRST, "prefix_dense_intermediate_size": 2222, "num_shared_experts": 2},
                        types={"mlp_layer_types": _MLP6, "prefix_dense_intermediate_size": 777}),
    "mimo_v2_flash": _moe("n_routed_experts", num_kv=3,
                          a={"moe_intermediate_size": 200, "v_head_dim": 40, "head_dim": 48},
                          types={"mlp_layer_types": _MLP6, "layer_types": _TYPES6}),
    "deepseek_v2": [(n, {"num_experts_per_tok": 6, **c}) for n, c in _mla(first=_FIRST)],
    "deepseek_v3": _mla(first=_FIRST),
    "deepseek_v32": _mla(first=_FIRST, index={"index_n_heads": 4, "index_head_dim": 48},
                         types={"mlp_layer_types": _MLP6}),
    "glm_moe_dsa": _mla(first=_FIRST, index={"index_n_heads": 4, "index_head_dim": 48},
                        shared={"indexer_types": ["full", "shared", "shared"] * 2},
                        freq={"index_topk_freq": 4, "index_skip_topk_offset": 3}),
    "glm4_moe_lite": _mla(types={"mlp_layer_types": _MLP6}),
    "mistral4": _mla(first=_FIRST),
    "kimi_linear": _padded(_mla("num_experts", first={"first_k_dense_replace": 1}, linear={"linear_attn_config": {
        "full_attn_layers": [2, 5], "kda_layers": [1, 3, 4, 6], "head_dim": 40, "num_heads": 5,
        "short_conv_kernel_size": 3}})),
    "deepseek_v4": [
        ("default", {"num_hidden_layers": 6}),
        ("ratios", {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0]}),
        ("sizes", {**_SMALL, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 96, "q_lora_rank": 100,
                   "o_groups": 4, "o_lora_rank": 50, "index_n_heads": 3, "index_head_dim": 40, "hc_mult": 2,
                   "n_routed_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 111,
                   "n_shared_experts": 1}),
        ("types", {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "compressed_sparse_attention",
                                                           "heavily_compressed_attention"]}),
    ],
    "llama4_text": [
        ("default", {"num_hidden_layers": 4}),
        ("interleaved", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
                         "interleave_moe_layer_step": 2, "intermediate_size": 300, "intermediate_size_mlp": 700,
                         "num_local_experts": 5, "use_qk_norm": False}),
        ("chosen", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
                    "moe_layers": [1, 2, 5], "attention_bias": True, "tie_word_embeddings": True}),
    ],
    "dbrx": [
        ("sizes", {"d_model": 768, "n_heads": 12, "n_layers": 4, "vocab_size": 32003,
                   "attn_config": {"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 1e4},
                   "ffn_config": {"ffn_hidden_size": 300, "moe_num_experts": 6, "moe_top_k": 2}}),
    ],
    "qwen3_next": _moe(a={**_QWEN_MOE, **_GDN, "shared_expert_intermediate_size": 300},
                       types={**_QWEN_MOE, **_GDN, "layer_types": _HYBRID6}, every={"full_attention_interval": 3},
                       only={"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "qwen3_5_text": _dense(mlp_bias=False, a=_GDN, types={**_GDN, "layer_types": _HYBRID6},
                           every={"full_attention_interval": 3}),
    "qwen3_5_moe_text": _moe(a={**_GDN, "moe_intermediate_size": 200, "shared_expert_intermediate_size": 300},
                             types={"layer_types": _HYBRID6}),
    "nemotron_h": [
        ("default", {}),
        ("pattern", {**_SMALL, "hybrid_override_pattern": "M-M*ME-", "num_hidden_layers": 7, "num_attention_heads": 12,
                     "num_key_value_heads": 4, "mamba_num_heads": 24, "mamba_head_dim": 40, "ssm_state_size": 24,
                     "n_groups": 4, "conv_kernel": 3, "intermediate_size": 999}),
        ("latent", {"hidden_size": 768, "vocab_size": 32003,
                    "layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_latent_size": 128,
                    "n_routed_experts": 12, "moe_intermediate_size": 77, "moe_shared_expert_intermediate_size": 201,
                    "tie_word_embeddings": True}),
        ("biases", {"hybrid_override_pattern": "M*-E", "use_bias": True, "mamba_proj_bias": True, "mlp_bias": True,
                    "attention_bias": True, "use_conv_bias": False}),
        ("no shared", {"hybrid_override_pattern": "ME", "n_shared_experts": 0}),
    ],
    "granitemoehybrid": [
        ("default", {"num_hidden_layers": 4}),
        ("hybrid", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 24,
                    "mamba_d_state": 40, "mamba_n_groups": 2, "layer_types": _HYBRID6, "num_local_experts": 5,
                    "intermediate_size": 200, "shared_intermediate_size": 333, "tie_word_embeddings": True}),
        ("dense", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 24,
                   "layers_block_type": ["mamba", "attention"] * 3, "num_local_experts": 0,
                   "shared_intermediate_size": 333, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    ],
    "bamba": [
        ("default", {"num_hidden_layers": 4}),
        ("attention", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "attn_layer_indices": [1, 4],
                       "mamba_n_heads": 24, "mamba_d_state": 40, "mamba_n_groups": 2, "intermediate_size": 500}),
    ],
    "falcon_h1": [
        ("default", {"num_hidden_layers": 4}),
        ("norm", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_d_ssm": 600,
                  "mamba_n_heads": 12, "mamba_rms_norm": True, "mamba_d_state": 40, "intermediate_size": 500}),
        ("biases", {"num_hidden_layers": 2, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True,
                    "mlp_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True}),
        ("expand", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_d_ssm": None,
                    "mamba_n_heads": 24, "intermediate_size": 500}),
    ],
    "jamba": [
        ("default", {"num_hidden_layers": 9}),
        ("sizes", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 500,
                   "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8,
                   "mamba_dt_rank": 20, "mamba_proj_bias": True, "tie_word_embeddings": True}),
        ("one expert", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "num_experts": 1,
                        "num_experts_per_tok": 1, "mamba_conv_bias": False}),
    ],
    "mamba": [("default", {}), ("sizes", {"hidden_size": 640, "state_size": 24, "conv_kernel": 3, "expand": 3,
                                          "num_hidden_layers": 5, "time_step_rank": 33, "use_bias": True,
                                          "vocab_size": 777, "tie_word_embeddings": False})],
    "falcon_mamba": [("default", {}), ("sizes", {"hidden_size": 640, "state_size": 24, "num_hidden_layers": 5,
                                                 "tie_word_embeddings": False, "use_conv_bias": False})],
    "mamba2": [("default", {"num_hidden_layers": 4}),
               ("sizes", {"hidden_size": 640, "num_heads": 20, "head_dim": 64, "state_size": 24, "n_groups": 2,
                          "num_hidden_layers": 5, "use_bias": True, "tie_word_embeddings": True})],
    "minimax": _moe("num_local_experts", types={"layer_types": _HYBRID6}),
    "lfm2": [
        ("default", {"num_hidden_layers": 4}),
        ("hybrid", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "full_attn_idxs": [2, 5],
                    "intermediate_size": 2000, "conv_L_cache": 4, "tie_word_embeddings": False}),
        ("adjusted", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "block_ff_dim": 3000,
                      "layer_types": ["conv", "conv", "full_attention"] * 2, "block_multiple_of": 100,
                      "block_ffn_dim_multiplier": 1.3, "conv_bias": True}),
        ("plain", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "block_auto_adjust_ff_dim": False,
                   "intermediate_size": 1234}),
    ],
    "lfm2_moe": [
        ("hybrid", {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "num_experts": 6,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 200, "intermediate_size": 700,
                    "layer_types": ["conv", "conv", "full_attention"] * 2, "num_dense_layers": 1}),
    ],
    "gemma3n_text": [
        ("default", {}),
        ("sizes", {"num_hidden_layers": 10, "hidden_size": 768, "vocab_size": 3000, "vocab_size_per_layer_input": 2000,
                   "hidden_size_per_layer_input": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
                   "head_dim": 64, "intermediate_size": 900, "num_kv_shared_layers": 4, "laurel_rank": 24,
                   "altup_num_inputs": 3}),
        ("widths", {"num_hidden_layers": 4, "intermediate_size": [500, 600, 700, 800], "num_kv_shared_layers": 0,
                    "vocab_size": 3000, "tie_word_embeddings": False}),
    ],
    "gemma4_text": [
        ("default", {"num_hidden_layers": 8}),
        ("moe", {"num_hidden_layers": 6, "enable_moe_block": True, "num_experts": 12, "top_k_experts": 3,
                 "moe_intermediate_size": 200, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                 "num_global_key_value_heads": 2}),
        ("shared", {"num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": True,
                    "global_head_dim": 384, "hidden_size": 768, "intermediate_size": 500, "attention_bias": True}),
        ("untied", {"num_hidden_layers": 6, "tie_word_embeddings": False, "num_global_key_value_heads": 2}),
    ],
    "gpt2": [("default", {}), ("sizes", {"n_embd": 600, "n_head": 10, "n_layer": 3, "n_inner": 1111,
                                         "n_positions": 333, "vocab_size": 999, "tie_word_embeddings": False})],
    "gpt_bigcode": [("default", {}), ("mha", {"multi_query": False, "n_layer": 3, "n_inner": 999})],
    "gpt_neo": [("default", {}), ("sizes", {"hidden_size": 640, "num_heads": 10, "num_layers": 4,
                                            "attention_types": [[["global", "local"], 2]], "intermediate_size": 999})],
    "gpt_neox": [("default", {}), ("pythia", {**_SMALL, "num_attention_heads": 12, "intermediate_size": 2000}),
                 ("no bias", {**_SMALL, "num_attention_heads": 12, "attention_bias": False,
                              "tie_word_embeddings": True})],
    "gptj": [("default", {}), ("sizes", {"n_embd": 640, "n_head": 10, "n_layer": 3, "n_inner": 999})],
    "codegen": [("default", {}), ("sizes", {"n_embd": 640, "n_head": 16, "n_layer": 3})],
    "opt": [("default", {}), ("350m", {"hidden_size": 1024, "word_embed_proj_dim": 512, "num_hidden_layers": 4,
                                       "num_attention_heads": 16, "ffn_dim": 4096, "do_layer_norm_before": False}),
            ("no bias", {"enable_bias": False, "layer_norm_elementwise_affine": False})],
    "bloom": [("default", {}), ("7b1", {"hidden_size": 4096, "n_layer": 4, "n_head": 32})],
    "mpt": [("default", {}), ("7b", {"d_model": 4096, "n_heads": 32, "n_layers": 4})],
    "falcon": [
        ("7b", {"num_hidden_layers": 4}),
        ("40b", {"hidden_size": 1024, "num_attention_heads": 16, "num_kv_heads": 8, "num_hidden_layers": 4,
                 "new_decoder_architecture": True}),
        ("11b", {"hidden_size": 1024, "num_attention_heads": 16, "num_kv_heads": 8, "num_hidden_layers": 4,
                 "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 3000}),
        ("rw", {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 4, "multi_query": False,
                "parallel_attn": False, "bias": True, "alibi": True, "tie_word_embeddings": False}),
    ],
    "jais2": _dense(),
    "helium": [(n, {"head_dim": 64, **c}) for n, c in _dense(head_dim=False)[1:]],
    "cwm": _padded(_dense(bias=False, types={"layer_types": _TYPES6})),
    "hyperclovax": _dense(plain={"use_post_norm": False}),
    "granite_swa": _dense(head_dim=False, types={"layer_types": _TYPES6}),
    "granitemoe_swa": _moe("num_local_experts"),
    "flex_olmo": _padded(_moe(head_dim=False)),
    "solar_open": [(n, {"n_routed_experts": 10, "moe_intermediate_size": 200, **c})
                   for n, c in _moe("n_routed_experts", two={"n_shared_experts": 2})],
    "hy_v3": _moe(a={"moe_intermediate_size": 200, "num_shared_experts": 2}, types={"mlp_layer_types": _MLP6}),
    "mellum": _moe("num_local_experts", a={"moe_intermediate_size": 200}, types={"mlp_layer_types": _MLP6,
                                                                                 "layer_types": _TYPES6}),
    "afmoe": _moe(a={"moe_intermediate_size": 200, "num_dense_layers": 2, "num_shared_experts": 1},
                  types={"layer_types": _TYPES6}),
    "laguna": _moe(a={"moe_intermediate_size": 200, "shared_expert_intermediate_size": 300},
                   heads={"num_attention_heads_per_layer": [12, 8, 8, 12, 4, 4]},
                   types={"mlp_layer_types": _MLP6, "layer_types": _TYPES6}, gate={"gating": "per-element"}),
    "youtu": _without_experts(_mla()),
    "minicpm3": _without_experts(_mla()),
    "axk1": _mla(first=_FIRST),
    "olmo_hybrid": _padded(_dense(mlp_bias=False, head_dim=False, types={"layer_types": _HYBRID6},
                                  sizes_of_states=_GDN)),
    # Multimodal wrappers
    "minimax_m3_vl": [
        ("default", {"text_config": {"num_hidden_layers": 4}}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "head_dim": 48, "num_local_experts": 6, "num_experts_per_tok": 2,
                                   "dense_intermediate_size": 900, "shared_intermediate_size": 120,
                                   "moe_layer_freq": [0, 0, 1, 1, 1, 1], "sparse_attention_config": {
                                       "sparse_attention_freq": [0, 1, 0, 1, 1, 1], "sparse_num_index_heads": 2,
                                       "sparse_index_dim": 32, "sparse_block_size": 64, "sparse_topk_blocks": 4}},
                   "vision_config": {"hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3,
                                     "num_attention_heads": 4, "patch_size": 14}}),
    ],
    "cohere2_vision": [
        ("sizes", {"text_config": {"model_type": "cohere2", **_QWEN_TEXT}, "vision_config": _SIGLIP,
                   "downsample_factor": 2, "alignment_intermediate_size": 400}),
        ("tower", {"text_config": {"model_type": "cohere2", **_QWEN_TEXT}}),
    ],
    "exaone4_5": [
        ("default", {"text_config": {"num_hidden_layers": 4}}),
        ("sizes", {"text_config": _QWEN_TEXT, "vision_config": {
            "depth": 3, "hidden_size": 96, "intermediate_size": 250, "num_heads": 4, "num_key_value_heads": 2,
            "out_hidden_size": 768}}),
    ],
    "llama4": [("default", {"text_config": {"num_hidden_layers": 4}})],
    "mllama": [
        ("default", {}),
        ("sizes", {"text_config": {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "pad_token_id": 0,
                                   "intermediate_size": 1000, "cross_attention_layers": [1, 4]}}),
        ("tied", {"text_config": {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "pad_token_id": 0,
                                  "intermediate_size": 1000, "cross_attention_layers": [2],
                                  "tie_word_embeddings": True}}),
    ],
    "mistral3": [
        ("sizes", {"text_config": {"model_type": "mistral", **_SMALL, "num_attention_heads": 12, "head_dim": 64,
                                   "num_key_value_heads": 4, "intermediate_size": 1000},
                   "vision_config": {"model_type": "pixtral", "hidden_size": 96, "intermediate_size": 250,
                                     "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 14},
                   "spatial_merge_size": 3, "multimodal_projector_bias": True}),
        ("ministral3", {"text_config": {"model_type": "ministral3", **_SMALL, "num_attention_heads": 12,
                                        "num_key_value_heads": 4, "intermediate_size": 1000,
                                        "tie_word_embeddings": True}}),
        ("untied", {"text_config": {"model_type": "mistral", "num_hidden_layers": 2}, "tie_word_embeddings": False}),
    ],
    "gemma3": [
        ("default", {}),
        ("sizes", {"text_config": {**_SMALL, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
                                   "intermediate_size": 1000}, "vision_config": _SIGLIP, "mm_tokens_per_image": 4}),
        ("no head", {"text_config": {"num_hidden_layers": 2}, "vision_config": {**_SIGLIP, "vision_use_head": False},
                     "mm_tokens_per_image": 4}),
    ],
    "gemma4": [
        ("default", {}),
        ("vision", {"text_config": {"num_hidden_layers": 6}, "vision_config": {"num_hidden_layers": 2}}),
        ("audio", {"text_config": {"num_hidden_layers": 6}, "vision_config": {"use_clipped_linears": True},
                   "audio_config": {"num_hidden_layers": 3}}),
        ("audio sizes", {"text_config": {"num_hidden_layers": 6}, "audio_config": {
            "num_hidden_layers": 2, "hidden_size": 512, "subsampling_conv_channels": [64, 16], "output_proj_dims": 700,
            "conv_kernel_size": 3, "num_attention_heads": 4}}),
        ("vision sizes", {"text_config": {"num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
                          "vision_config": {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 250,
                                            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24,
                                            "patch_size": 14, "position_embedding_size": 333}}),
    ],
    "qwen2_vl": [
        ("default", {}),
        ("sizes", {"text_config": _QWEN_TEXT, "vision_config": {"depth": 3, "embed_dim": 96, "hidden_size": 768,
                                                                "num_heads": 4, "mlp_ratio": 3}}),
        ("flat", {**_QWEN_TEXT, "vision_config": {"depth": 2, "embed_dim": 96, "hidden_size": 768, "num_heads": 4}}),
        ("tied", {"text_config": _QWEN_TEXT, "tie_word_embeddings": True}),
    ],
    "qwen2_5_vl": [
        ("default", {}),
        ("sizes", {"text_config": _QWEN_TEXT, "vision_config": {
            "depth": 3, "hidden_size": 96, "intermediate_size": 250, "num_heads": 4, "out_hidden_size": 768}}),
        ("flat", {**_QWEN_TEXT, "tie_word_embeddings": True, "vision_config": {
            "depth": 2, "hidden_size": 96, "num_heads": 4, "out_hidden_size": 768}}),
    ],
    "qwen3_vl": [
        ("default", {}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "head_dim": 48}, "vision_config": _QWEN3_VIT}),
        ("tied", {"text_config": {**_QWEN_TEXT, "tie_word_embeddings": True}, "vision_config": _QWEN3_VIT,
                  "tie_word_embeddings": True}),
        ("text tied", {"text_config": {**_QWEN_TEXT, "tie_word_embeddings": True}, "vision_config": _QWEN3_VIT}),
    ],
    "qwen3_vl_moe": [
        ("default", {"text_config": {"num_hidden_layers": 3}}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "num_experts": 6, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 100, "mlp_only_layers": [1]},
                   "vision_config": _QWEN3_VIT}),
    ],
    "qwen3_5": [("default", {}), ("sizes", {"text_config": {**_QWEN_TEXT, **_GDN}, "vision_config": _QWEN3_VIT}),
                ("tied", {"text_config": {**_QWEN_TEXT, **_GDN, "tie_word_embeddings": True},
                          "tie_word_embeddings": True})],
    "qwen3_5_moe": [("default", {}), ("sizes", {"text_config": {**_QWEN_TEXT, **_GDN, "num_experts": 6,
                                                                "num_experts_per_tok": 2}})],
    "glm4v": [
        ("default", {}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "pad_token_id": 0}, "vision_config": {
            "depth": 3, "hidden_size": 96, "num_heads": 4, "out_hidden_size": 768, "intermediate_size": 300,
            "image_size": 56, "patch_size": 14, "attention_bias": True}}),
    ],
    "glm4v_moe": [
        ("default", {"text_config": {"num_hidden_layers": 3}}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "pad_token_id": 0, "n_routed_experts": 6, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 100}, "tie_word_embeddings": True}),
    ],
    "glm5_next": [
        ("default", {"text_config": {"num_hidden_layers": 9}}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "num_key_value_heads": 12, "q_lora_rank": 100, "kv_lora_rank": 80,
                                   "qk_nope_head_dim": 40, "v_head_dim": 56, "n_routed_experts": 6, "hc_mult": 2,
                                   "num_experts_per_tok": 2, "moe_intermediate_size": 90, "index_kpool": 8,
                                   "index_n_heads": 3, "index_head_dim": 40, "linear_head_dim": 32,
                                   "linear_num_heads": 5, "pad_token_id": 0, "mlp_layer_types": _MLP6,
                                   "layer_types": _HYBRID6},
                   "vision_config": {"depth": 2, "hidden_size": 96, "num_heads": 4, "intermediate_size": 250,
                                     "attention_bias": False, "out_hidden_size": 768,
                                     "projection_intermediate_size": 300}}),
    ],
    "kimi_k25": [
        ("default", {"text_config": {"num_hidden_layers": 4}}),
        ("sizes", {"text_config": {"model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 768,
                                   "num_attention_heads": 12},
                   "vision_config": {"hidden_size": 96, "intermediate_size": 250, "num_attention_heads": 4,
                                     "num_hidden_layers": 3, "pos_emb_height": 10, "pos_emb_width": 12,
                                     "merge_kernel_size": [2, 2], "patch_size": 14, "text_hidden_size": 768}}),
    ],
    "step3p7": [
        ("default", {"text_config": {"num_hidden_layers": 5}}),
        ("sizes", {"text_config": {**_SMALL, "num_hidden_layers": 5, "num_attention_heads": 12, "head_dim": 48,
                                   "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2,
                                   "moe_intermediate_size": 99, "share_expert_dim": 123, "intermediate_size": 400,
                                   "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
                                   "num_sliding_attention_heads": 16, "moe_layers_enum": "1,3",
                                   "pad_token_id": 0, "sliding_window": 64},
                   "vision_config": {"width": 96, "layers": 3, "heads": 4, "image_size": 56, "patch_size": 14}}),
        ("flat", {"num_hidden_layers": 45, "hidden_size": 4096, "vocab_size": 128896}),
    ],
    "phi4_multimodal": [
        ("default", {}),
        ("sizes", {**_QWEN_TEXT, "pad_token_id": 0, "vision_config": {
            "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3,
                                                   "num_attention_heads": 4},
                   "audio_config": {"hidden_size": 64, "intermediate_size": 90, "num_blocks": 2, "input_size": 40,
                                    "num_attention_heads": 4, "nemo_conv_channels": 32, "bias_max_distance": 50,
                                    "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64}}),
    ],
    "qwen2_5_omni_thinker": [
        ("default", {}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "pad_token_id": 0}, "audio_config": {
            "d_model": 96, "encoder_layers": 2, "encoder_ffn_dim": 200, "encoder_attention_heads": 4, "output_dim": 768,
            "num_mel_bins": 64}, "vision_config": {"depth": 2, "hidden_size": 96, "intermediate_size": 250,
                                                   "num_heads": 4, "out_hidden_size": 768}}),
    ],
    "qwen3_omni_moe_thinker": [
        ("default", {}),
        ("sizes", {"text_config": {**_QWEN_TEXT, "num_experts": 6, "num_experts_per_tok": 2}, "audio_config": {
            "d_model": 96, "encoder_layers": 2, "encoder_ffn_dim": 200, "encoder_attention_heads": 4, "output_dim": 768,
            "num_mel_bins": 64, "downsample_hidden_size": 40}, "vision_config": _QWEN3_VIT}),
    ],
    "llava": [
        ("default", {}),
        ("sizes", {"text_config": {"model_type": "qwen2", **_QWEN_TEXT}, "vision_config": _SIGLIP,
                   "multimodal_projector_bias": False}),
        ("clip", {"text_config": {"model_type": "mistral", **_QWEN_TEXT}, "vision_feature_layer": [-2, -1],
                  "vision_config": {"model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 250,
                                    "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56,
                                    "patch_size": 14}}),
    ],
    "llava_next": [("default", {}), ("sizes", {"text_config": {"model_type": "llama", **_QWEN_TEXT}})],
    "lfm2_vl": [("default", {}), ("sizes", {"text_config": {**_SMALL, "num_attention_heads": 12, "model_type": "lfm2",
                                                            "num_key_value_heads": 4, "intermediate_size": 900},
                                            "projector_hidden_size": 500, "projector_bias": False})],
    "internvl": [
        ("default", {}),
        ("sizes", {"text_config": {"model_type": "qwen3", **_QWEN_TEXT}, "vision_config": {
            "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}}),
        ("qk norm", {"text_config": {"model_type": "qwen2", **_QWEN_TEXT}, "vision_config": {
            "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 2, "num_attention_heads": 4,
            "use_qk_norm": True, "use_mean_pooling": False}}),
    ],
}
