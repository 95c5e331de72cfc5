"""Keys that mean a mechanism: if one is set and nothing read it, the model is not what its type says."""

from __future__ import annotations

from typing import Any

from bstar.codec.hf_config.reader import Reader

SIGNALS: frozenset[str] = frozenset({
    # latent and sparse attention
    "kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_topk", "index_n_heads", "compress_ratios", "compress_rates",
    "sparse_attention_config", "index_head_dim", "share_q_dim",
    # experts
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "n_shared_experts",
    "num_shared_experts", "shared_expert_intermediate_size", "moe_intermediate_size", "moe_latent_size",
    "zero_expert_num", "moe_layers", "moe_layers_enum", "num_zero_experts",
    # states
    "ssm_state_size", "mamba_d_state", "mamba_num_heads", "mamba_n_heads", "linear_num_key_heads",
    "linear_num_value_heads", "linear_attn_config", "conv_L_cache", "hybrid_override_pattern", "layers_block_type",
    "attn_layer_period", "attn_layer_indices", "lru_width", "attn_type_list", "hybrid_layer_pattern",
    # other structure
    "layer_types", "mlp_layer_types", "cross_attention_layers", "num_kv_shared_layers",
    "hidden_size_per_layer_input", "altup_num_inputs", "hc_mult", "block_configs", "per_layer_config",
    "num_mem_blocks", "laurel_rank", "engram_layers", "global_head_dim", "num_global_key_value_heads",
    "swa_num_attention_heads", "swa_num_key_value_heads", "attention_other_setting", "use_double_wide_mlp",
    "num_sliding_attention_heads", "ple_hidden_size", "mla_config", "residual_mlp", "num_nested_layers",
    "use_shared_attention_adapter", "cla_share_factor", "use_cla", "sparse_topk",
    "num_attention_heads_per_layer", "routed_expert_hidden_size", "attn_res_block_size", "mla_use_output_gate",
    "num_loops", "n_loops",
})  # fmt: skip

# Values of a signal key that mean "not used".
_OFF: tuple[Any, ...] = (None, False, 0, [], {}, "")


def unread_signals(r: Reader) -> list[str]:
    """Signal keys that the config sets and that no builder asked for."""
    found = []
    for key in sorted(SIGNALS & set(map(str, r.raw))):
        value = r.raw.get(key)
        if key in r.touched or any(value is off or (type(value) is type(off) and value == off) for off in _OFF):
            continue
        if key in ("num_experts", "num_local_experts", "moe_num_experts") and value == 1:
            continue
        if key in ("layer_types", "layers_block_type") and isinstance(value, list) and all(
                v in ("full_attention", "attention") for v in value):
            continue
        if key == "attn_type_list" and isinstance(value, list) and all(v == 1 for v in value):
            continue  # MiniMax: 1 is softmax attention
        found.append(key)
    return found
