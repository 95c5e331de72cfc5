"""Configs that are wrong in every way one can think of, made by changing real ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"

# A base for each mechanism, and the keys whose value decides a size there (dots lead into nested configs).
BASES: dict[str, tuple[str, ...]] = {
    "meta-llama--Meta-Llama-3.1-8B": (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
        "num_key_value_heads"),
    "mistralai--Mixtral-8x7B-v0.1": ("hidden_size", "num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "Qwen--Qwen3-30B-A3B": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim", "vocab_size"),
    "deepseek-ai--DeepSeek-R1": (
        "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts",
        "moe_intermediate_size", "num_hidden_layers"),
    "deepseek-ai--DeepSeek-V3.2": ("index_n_heads", "index_head_dim", "index_topk"),
    "Qwen--Qwen3.5-35B-A3B": (
        "text_config.hidden_size", "text_config.linear_num_value_heads", "text_config.linear_key_head_dim",
        "text_config.linear_conv_kernel_dim", "text_config.num_experts"),
    "openai--gpt-oss-120b": ("sliding_window", "num_local_experts", "head_dim", "vocab_size"),
    "nvidia--Nemotron-H-56B-Base-8K": (
        "hidden_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": ("text_config.hidden_size", "text_config.num_local_experts"),
    "Qwen--Qwen3-VL-8B-Instruct": ("text_config.num_hidden_layers", "text_config.num_attention_heads"),
}  # fmt: skip

# None of these is a size; each is a value that JSON can hold.
NOT_SIZES: dict[str, Any] = {
    "text": "many", "digits as text": "4096x", "negative": -8, "zero": 0, "fraction": 4096.5, "NaN": float("nan"),
    "infinite": float("inf"), "huge": 10**30, "list": [4096], "object": {"n": 4096}, "true": True,
}  # fmt: skip


# 0 says "none" here: no rotary part, no window.
_MAY_BE_ZERO = ("qk_rope_head_dim", "sliding_window")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}_config.json").read_text())
    return found


def changed(config: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy with `value` at `dotted`; the value `...` deletes the key."""
    out = copy.deepcopy(config)
    *outer, last = dotted.split("\x1f" if "\x1f" in dotted else ".")
    place = out
    for key in outer:
        place = place[key]
    if value is ...:
        place.pop(last, None)
    else:
        place[last] = value
    return out


def wrong_sizes() -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is wrong, config): a size that is none, in every mechanism."""
    for name, keys in BASES.items():
        base = load(name)
        for key in keys:
            for label, value in NOT_SIZES.items():
                if label == "zero" and key in _MAY_BE_ZERO:
                    continue
                yield f"{name.split('--')[1]}: {key} is {label}", changed(base, key, value)


def missing_sizes() -> Iterator[tuple[str, dict[str, Any]]]:
    """The sizes that every published config states (only a nested text_config may rely on its class's default)."""
    for name in BASES:
        base = load(name)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            derived = key == "num_hidden_layers" and "hybrid_override_pattern" in base
            if key in base and "text_config" not in base and not derived:
                yield f"{name.split('--')[1]}: {key} is missing", changed(base, key, ...)
                yield f"{name.split('--')[1]}: {key} is null", changed(base, key, None)


def other_wrongs() -> Iterator[tuple[str, dict[str, Any]]]:
    llama, moe = load("meta-llama--Meta-Llama-3.1-8B"), load("Qwen--Qwen3-30B-A3B")
    hybrid = load("openai--gpt-oss-120b")
    yield "empty object", {}
    yield "only an architecture", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    yield "unknown architecture", llama | {"model_type": "hyena", "architectures": ["HyenaForCausalLM"]}
    yield "encoder", llama | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    yield "model_type is a number", llama | {"model_type": 7, "architectures": None}
    yield "architectures is text", llama | {"model_type": "", "architectures": "x\n\x1b[31m"}
    yield "no type at all", {k: v for k, v in llama.items() if k not in ("model_type", "architectures")}
    yield "heads do not divide", llama | {"num_attention_heads": 31, "head_dim": None}
    yield "more KV heads than heads", llama | {"num_key_value_heads": 64}
    yield "KV heads do not divide heads", llama | {"num_key_value_heads": 5}
    yield "top_k above the experts", moe | {"num_experts_per_tok": 1000}
    yield "layer_types too short", hybrid | {"layer_types": ["full_attention"]}
    yield "layer_types unknown", hybrid | {"layer_types": ["no_such_attention"] * 36}
    yield "layer_types is text", hybrid | {"layer_types": "full_attention"}
    yield "layer_types of numbers", hybrid | {"layer_types": [1] * 36}
    yield "dtype unknown", llama | {"torch_dtype": "posit16", "dtype": "posit16"}
    yield "dtype is a number", llama | {"torch_dtype": 16, "dtype": 16}
    yield "quantization unknown", llama | {"quantization_config": {"quant_method": "vq3000"}}
    yield "quantization is text", llama | {"quantization_config": "fp8"}
    yield "quantization without a method", llama | {"quantization_config": {"bits": 4}}
    yield "quantization of 0 bits", llama | {"quantization_config": {"quant_method": "gptq", "bits": 0}}
    yield "quantization of -4 bits", llama | {"quantization_config": {"quant_method": "gptq", "bits": -4}}
    yield "quantization bits as text", llama | {"quantization_config": {"quant_method": "awq", "bits": "four"}}
    yield "negative group", llama | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -7}}
    yield "text_config is a list", {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
                                    "text_config": [1]}  # fmt: skip
    yield "text_config is empty", {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
                                   "text_config": {}}  # fmt: skip
    yield "a hundred million layers", llama | {"num_hidden_layers": 10**8}
    yield "a million layers", llama | {"num_hidden_layers": 10**6}
    yield "negative context", llama | {"max_position_embeddings": -1}
    yield "text context", llama | {"max_position_embeddings": "long"}
    yield "tie is text", llama | {"tie_word_embeddings": "yes"}
    nemotron = load("nvidia--Nemotron-H-56B-Base-8K")
    yield "pattern unknown", nemotron | {"hybrid_override_pattern": "M?" * 59}
    yield "pattern too short", nemotron | {"hybrid_override_pattern": "M-"}
    yield "pattern is a number", nemotron | {"hybrid_override_pattern": 118}
    yield "pattern is huge", nemotron | {"hybrid_override_pattern": "M" * 10**6}


def code_references(marker: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configs that name Python code; running it would create `marker`."""
    llama = load("meta-llama--Meta-Llama-3.1-8B")
    auto = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    yield "auto_map only", {"auto_map": auto, "model_type": "evil", "architectures": ["EvilModel"]}
    yield "auto_map to a remote", {"auto_map": {"AutoConfig": "evil/repo--configuration_evil.EvilConfig"}}
    yield "python in a value", llama | {"hidden_size": f"__import__('pathlib').Path({str(marker)!r}).touch()"}
    yield "yaml tag in a value", llama | {"hidden_size": f"!!python/object/apply:os.system ['touch {marker}']"}
