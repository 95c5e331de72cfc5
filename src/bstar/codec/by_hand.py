"""A model described by flags (`--layers 32 --hidden-size 4096 …`) instead of by a config that is understood.

The flags are the sizes that a config.json gives; they replace the config's own values, or, for an
architecture that is not understood, describe a decoder of standard mechanisms: grouped-query attention
or MLA (with `kv_lora_rank`), a dense gated FFN or a mixture of experts (with `experts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bstar.errors import SpecError

# flag -> the keys that config.json files use for it; the first is the one that is added.
KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "sliding_window": ("sliding_window",),
    "max_context": ("max_position_embeddings", "max_sequence_length", "n_positions"),
    "tie_embeddings": ("tie_word_embeddings",),
}

MAX_LAYERS = 10_000

REQUIRED = ("layers", "hidden_size", "heads", "vocab_size", "max_context")
_PER_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")


def flag_name(key: str) -> str:
    """The command-line spelling of a by-hand key."""
    return "--" + key.replace("_", "-")


def describes_a_model(sizes: Mapping[str, int]) -> bool:
    """Whether the flags mean to describe a model that is not understood; `described` says which are missing."""
    return "layers" in sizes or "hidden_size" in sizes


def replaced(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with keys of config.json replaced as vLLM's --hf-overrides does it.

    An object inside that is a config of its own ("text_config") is changed key by key, any other value is
    replaced. The two names of the rotary settings mean the same, and a key of the language model given at the
    top of a multimodal config reaches it.
    """
    changed = dict(config)
    nested = next((k for k in _LANGUAGE_CONFIGS if isinstance(changed.get(k), Mapping)), None)
    for key, value in changes.items():
        if key.endswith("_config") and isinstance(value, Mapping) and isinstance(changed.get(key), Mapping):
            changed[key] = replaced(changed[key], value) if key in _LANGUAGE_CONFIGS else {**changed[key], **value}
        elif nested is not None and key not in config and (key in _ROTARY or key in config[nested]):
            changed[nested] = replaced(changed[nested], {key: value})
        elif key in _ROTARY_OBJECTS and isinstance(value, Mapping):
            present = next((k for k in _ROTARY_OBJECTS if isinstance(changed.get(k), Mapping)), key)
            theta = {k: v for k, v in (changed.get(present) or {}).items() if k == "rope_theta"}
            changed[present] = theta | dict(value)
        else:
            changed[key] = value
    return changed


_LANGUAGE_CONFIGS = ("text_config", "llm_config", "language_config")
_ROTARY_OBJECTS = ("rope_parameters", "rope_scaling")
_ROTARY = (*_ROTARY_OBJECTS, "rope_theta", "max_position_embeddings")


def overridden(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """`config` with the sizes of `sizes` in place of its own (inside text_config where there is one)."""
    changed = dict(config)
    nested = next((k for k in _LANGUAGE_CONFIGS if isinstance(changed.get(k), Mapping)), None)
    if nested is not None:
        return {**changed, nested: overridden(changed[nested], sizes)}
    if sizes.get("layers", 1) > MAX_LAYERS:
        raise SpecError(f"--layers: {sizes['layers']} layers are more than any model has ({MAX_LAYERS})")
    for flag, value in sizes.items():
        keys = _keys(flag)
        present = next((k for k in keys if k in changed), keys[0])
        changed[present] = bool(value) if flag == "tie_embeddings" else value
    if "layers" in sizes:
        for key in _PER_LAYER_LISTS:
            pattern = changed.get(key)
            if isinstance(pattern, list) and pattern:
                changed[key] = [pattern[i % len(pattern)] for i in range(sizes["layers"])]
    return changed


def described(sizes: Mapping[str, int]) -> dict[str, Any]:
    """A config.json of standard mechanisms from sizes alone. Raises SpecError naming the flags that miss."""
    for flag in sizes:
        _keys(flag)
    is_moe, is_mla = "experts" in sizes, "kv_lora_rank" in sizes
    needed = list(REQUIRED)
    needed += ["experts_per_token", "moe_intermediate_size"] if is_moe else ["intermediate_size"]
    if is_mla:
        needed += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    missing = [flag_name(f) for f in needed if f not in sizes]
    if missing:
        raise SpecError(f"model by hand: {', '.join(missing)} missing; describe the model with all of "
                        f"{', '.join(flag_name(f) for f in needed)}")
    base: dict[str, Any] = {
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    if is_moe and (is_mla or sizes.get("shared_experts") or sizes.get("dense_layers")):
        base |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None,
                 "n_shared_experts": 0, "first_k_dense_replace": 0, "moe_layer_freq": 1,
                 "n_routed_experts": sizes["experts"]}
        if not is_mla:
            base |= {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": False,
                     "attention_bias": False}
        base["intermediate_size"] = sizes.get("intermediate_size", sizes["moe_intermediate_size"])
    elif is_moe:
        base |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
                 "num_local_experts": sizes["experts"], "intermediate_size": sizes["moe_intermediate_size"]}
        sizes = {k: v for k, v in sizes.items() if k not in ("intermediate_size", "moe_intermediate_size")}
    elif is_mla:
        base |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None,
                 "n_routed_experts": None, "n_shared_experts": None, "first_k_dense_replace": sizes["layers"]}
    elif "sliding_window" in sizes:
        base |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    else:
        base |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    base.setdefault("num_key_value_heads", sizes["heads"])
    if "head_dim" not in sizes and not is_mla:
        if sizes["hidden_size"] % sizes["heads"]:
            raise SpecError(f"model by hand: --hidden-size {sizes['hidden_size']} is not a multiple of --heads "
                            f"{sizes['heads']}; give --head-dim")
        base["head_dim"] = sizes["hidden_size"] // sizes["heads"]
    return overridden(base, sizes)


def _keys(flag: str) -> tuple[str, ...]:
    found = KEYS.get(flag)
    if found is None:
        raise SpecError(f"model by hand: {flag!r} is not a size; use {', '.join(flag_name(f) for f in KEYS)}")
    return found
