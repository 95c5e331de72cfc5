"""llama.cpp's metadata keys (gguf-py `constants.py`), written as the Hub's config keys.

One table row per GGUF architecture: the Hub's `model_type` and how its config spells the experts. An
architecture without a row is tried under its own name; `model_from_config` refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bstar.codec.gguf_file import GgufHeader
from bstar.codec.gguf_hybrids import delta_net, mamba_stack
from bstar.codec.gguf_keys import Keys
from bstar.codec.safe_json import shown
from bstar.errors import ConfigError, UnsupportedArchitectureError

# Config key of each expert fact, by the families' spellings.
_MIXTRAL = {"count": "num_local_experts", "used": "num_experts_per_tok", "width": "intermediate_size"}
_QWEN = {
    "count": "num_experts", "used": "num_experts_per_tok", "width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
}  # fmt: skip
_DEEPSEEK = {
    "count": "n_routed_experts", "used": "num_experts_per_tok", "width": "moe_intermediate_size",
    "shared": "n_shared_experts", "dense_first": "first_k_dense_replace", "groups": "n_group",
    "groups_used": "topk_group",
}  # fmt: skip
_NEMOTRON = _DEEPSEEK | {"shared_width": "moe_shared_expert_intermediate_size"}
_GRANITE = _MIXTRAL | {"shared_width": "shared_intermediate_size"}
_LLAMA4 = {"count": "num_local_experts", "used": "num_experts_per_tok", "width": "intermediate_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How the Hub's config of one GGUF architecture is written.

    window_pattern   every n-th layer attends to everything, the others to a window (0: as the config says)
    uses_window      False: the converter writes a window that the model does not use
    """

    model_type: str
    architecture: str
    experts: Mapping[str, str] = field(default_factory=lambda: _QWEN)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    window_pattern: int = 0
    uses_window: bool = True


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(model_type="llama", architecture="LlamaForCausalLM"),
    "llama4": _Family(model_type="llama4_text", architecture="Llama4ForCausalLM", experts=_LLAMA4),
    "mistral3": _Family(model_type="mistral", architecture="MistralForCausalLM"),
    "qwen2": _Family(model_type="qwen2", architecture="Qwen2ForCausalLM", uses_window=False),
    "qwen2vl": _Family(model_type="qwen2", architecture="Qwen2ForCausalLM", uses_window=False),
    "qwen2moe": _Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        uses_window=False,
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": _Family(model_type="qwen3", architecture="Qwen3ForCausalLM", uses_window=False),
    "qwen3vl": _Family(model_type="qwen3", architecture="Qwen3ForCausalLM", uses_window=False),
    "qwen3moe": _Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        uses_window=False,
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3vlmoe": _Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        uses_window=False,
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3next": _Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4},
    ),
    "qwen35": _Family(
        model_type="qwen3_5_text", architecture="Qwen3_5ForCausalLM", fixed={"full_attention_interval": 4}
    ),
    "qwen35moe": _Family(
        model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM", fixed={"full_attention_interval": 4}
    ),
    "gemma": _Family(model_type="gemma", architecture="GemmaForCausalLM"),
    "gemma2": _Family(model_type="gemma2", architecture="Gemma2ForCausalLM", window_pattern=2),
    "gemma3": _Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", window_pattern=6),
    "phi3": _Family(model_type="phi3", architecture="Phi3ForCausalLM"),
    "phimoe": _Family(model_type="phimoe", architecture="PhimoeForCausalLM", experts=_MIXTRAL),
    "deepseek2": _Family(
        model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", experts=_DEEPSEEK, fixed={"moe_layer_freq": 1}
    ),
    "glm4": _Family(model_type="glm4", architecture="Glm4ForCausalLM"),
    "glm4moe": _Family(model_type="glm4_moe", architecture="Glm4MoeForCausalLM", experts=_DEEPSEEK),
    "glm-dsa": _Family(model_type="glm_moe_dsa", architecture="GlmMoeDsaForCausalLM", experts=_DEEPSEEK),
    "gpt-oss": _Family(model_type="gpt_oss", architecture="GptOssForCausalLM", experts=_MIXTRAL, window_pattern=2),
    "command-r": _Family(model_type="cohere", architecture="CohereForCausalLM"),
    "cohere2": _Family(model_type="cohere2", architecture="Cohere2ForCausalLM", window_pattern=4),
    "olmo2": _Family(model_type="olmo2", architecture="Olmo2ForCausalLM"),
    "olmoe": _Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        experts={"count": "num_experts", "used": "num_experts_per_tok", "width": "intermediate_size"},
    ),
    "granite": _Family(model_type="granite", architecture="GraniteForCausalLM"),
    "granitemoe": _Family(model_type="granitemoe", architecture="GraniteMoeForCausalLM", experts=_MIXTRAL),
    "minimax-m2": _Family(model_type="minimax_m2", architecture="MiniMaxM2ForCausalLM", experts=_MIXTRAL),
    "stablelm": _Family(model_type="stablelm", architecture="StableLmForCausalLM"),
    "starcoder2": _Family(model_type="starcoder2", architecture="Starcoder2ForCausalLM"),
    "falcon": _Family(model_type="falcon", architecture="FalconForCausalLM"),
    "nemotron_h": _Family(model_type="nemotron_h", architecture="NemotronHForCausalLM", experts=_NEMOTRON),
    "nemotron_h_moe": _Family(model_type="nemotron_h", architecture="NemotronHForCausalLM", experts=_NEMOTRON),
    "granitehybrid": _Family(
        model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM", experts=_GRANITE
    ),
    "hunyuan-dense": _Family(model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM"),
    "dots1": _Family(model_type="dots1", architecture="Dots1ForCausalLM", experts=_DEEPSEEK),
}
_PLAIN = (
    ("hidden_size", "embedding_length"), ("intermediate_size", "feed_forward_length"),
    ("max_position_embeddings", "context_length"), ("num_attention_heads", "attention.head_count"),
    ("head_dim", "attention.key_length"),
)  # fmt: skip
_BIASES = (("attn_q.bias", "attention_bias"), ("attn_qkv.bias", "attention_bias"), ("ffn_up.bias", "mlp_bias"))


def config_of(header: GgufHeader, source: str) -> dict[str, Any]:
    """The Hub-style config of a GGUF header. Raises ConfigError or UnsupportedArchitectureError."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ConfigError(f"gguf: {shown(source)} names no general.architecture; is it a language model?")
    if architecture == "clip" or header.metadata.get("general.type") in ("mmproj", "adapter", "imatrix", "vocab"):
        raise UnsupportedArchitectureError(
            f"gguf: {shown(source)} is a projector, adapter or calibration file; give the language model's file",
            keys=("general.type",),
        )
    reader = Keys(header, architecture, source)
    family = _family(reader, architecture)
    config: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture], **family.fixed}
    for key, gguf_key in _PLAIN:
        value = reader.number(gguf_key, required=key not in ("head_dim", "intermediate_size"))
        if value is not None:
            config[key] = value
    _head_dim(config, reader)
    config["num_hidden_layers"] = reader.layers()
    config["num_key_value_heads"] = reader.number("attention.head_count_kv") or config["num_attention_heads"]
    config["vocab_size"] = reader.tensor("token_embd.weight").shape[-1]
    config["tie_word_embeddings"] = "output.weight" not in reader.tensors
    config["torch_dtype"] = "bfloat16" if any(t.type.name == "bf16" for t in reader.tensors.values()) else "float16"
    for suffix, key in _BIASES:
        if f"blk.0.{suffix}" in reader.tensors:
            config[key] = True
    if "output.bias" in reader.tensors:
        config["lm_head_bias"] = True
    _window(config, reader, family)
    _experts(config, reader, family)
    _latent_attention(config, reader)
    delta_net(config, reader)
    mamba_stack(config, reader)
    if family.model_type == "falcon":
        kv_heads = config["num_key_value_heads"]
        config.update(
            new_decoder_architecture="blk.0.attn_norm_2.weight" in reader.tensors,
            num_kv_heads=kv_heads,
            multi_query=kv_heads == 1,
            ffn_hidden_size=config.get("intermediate_size"),
        )
    return config


def _head_dim(config: dict[str, Any], reader: Keys) -> None:
    """The head width by the tensors where no key states it: the class's default may be another."""
    heads, stored = config["num_attention_heads"], reader.tensors.get("blk.0.attn_output.weight")
    if "head_dim" not in config and stored is not None and heads and stored.shape[0] % heads == 0:
        config["head_dim"] = stored.shape[0] // heads


def _family(reader: Keys, architecture: str) -> _Family:
    moe = bool(reader.number("expert_count"))
    if architecture == "llama" and moe:
        return _Family(model_type="mixtral", architecture="MixtralForCausalLM", experts=_MIXTRAL)
    if architecture == "deepseek2" and any(".exp_probs_b" in n for n in reader.tensors):
        # V3's router has a correction per expert that V2's has not.
        return _Family(model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM", experts=_DEEPSEEK)
    found = _FAMILIES.get(architecture)
    if found is not None:
        return found
    name = architecture.replace("-", "_")
    return _Family(model_type=name, architecture="".join(p.capitalize() for p in name.split("_")) + "ForCausalLM")


def _window(config: dict[str, Any], reader: Keys, family: _Family) -> None:
    window = reader.number("attention.sliding_window")
    if not window or not family.uses_window:
        return
    config["sliding_window"] = window
    pattern = reader.raw("attention.sliding_window_pattern")
    layers = config["num_hidden_layers"]
    every = family.window_pattern
    if isinstance(pattern, tuple) and len(pattern) >= layers:
        windowed = [bool(p) for p in pattern[:layers]]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        windowed = [(i + 1) % pattern != 0 for i in range(layers)]
    elif every:
        windowed = [(i + 1) % every != 0 for i in range(layers)]
    else:
        return
    config["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windowed]


def _experts(config: dict[str, Any], reader: Keys, family: _Family) -> None:
    count = reader.number("expert_count")
    if not count:
        return
    keys = family.experts
    config[keys["count"]] = count
    config[keys["used"]] = reader.number("expert_used_count", required=True)
    width = reader.number("expert_feed_forward_length")
    if width is None:
        stored = next((t for n, t in reader.tensors.items() if n.endswith(".ffn_up_exps.weight")), None)
        width = stored.shape[1] if stored is not None and len(stored.shape) == 3 else config.get("intermediate_size")
    if family.model_type == "llama4_text":
        config["intermediate_size_mlp"] = config.get("intermediate_size")
        config["interleave_moe_layer_step"] = reader.number("interleave_moe_layer_step") or 1
    if width is not None:
        config[keys["width"]] = width
    for fact, gguf_key in (
        ("shared", "expert_shared_count"),
        ("dense_first", "leading_dense_block_count"),
        ("groups", "expert_group_count"),
        ("groups_used", "expert_group_used_count"),
    ):
        value = reader.number(gguf_key)
        if fact in keys and value is not None:
            config[keys[fact]] = value
    if "shared_width" in keys:
        shared = next((t for n, t in reader.tensors.items() if n.endswith(".ffn_up_shexp.weight")), None)
        if shared is not None:
            config[keys["shared_width"]] = shared.shape[1]
    if family.model_type == "glm4_moe":
        config["use_qk_norm"] = any(n.endswith(".attn_q_norm.weight") for n in reader.tensors)


def _latent_attention(config: dict[str, Any], reader: Keys) -> None:
    latent = reader.number("attention.kv_lora_rank")
    if not latent:
        return
    rope = reader.number("rope.dimension_count", required=True) or 0
    key = reader.number("attention.key_length_mla") or reader.number("attention.key_length", required=True) or 0
    value = reader.number("attention.value_length_mla") or reader.number("attention.value_length", required=True)
    config.pop("head_dim", None)
    config.update(
        kv_lora_rank=latent, q_lora_rank=reader.number("attention.q_lora_rank"), qk_rope_head_dim=rope,
        qk_nope_head_dim=key - rope, v_head_dim=value,
    )  # fmt: skip
    # Newer files describe the absorbed form (one KV head); the projections are those of all heads.
    config["num_key_value_heads"] = config["num_attention_heads"]
    index_heads = reader.number("attention.indexer.head_count")
    if index_heads:
        config.update(
            index_n_heads=index_heads, index_head_dim=reader.number("attention.indexer.key_length", required=True),
            index_topk=reader.number("attention.indexer.top_k", required=True),
        )  # fmt: skip
