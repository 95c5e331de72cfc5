"""The longest context of a config with a RoPE scaling, as vLLM derives it.

The expected lengths are what vLLM 0.32's own `_get_and_verify_max_len` returned for these files (and 0.28.0's and
0.29.0's rule for YaRN: original_max_position_embeddings · factor).
"""

from __future__ import annotations

from typing import Any

import pytest

from bstar.codec.hf_config import model_from_config
from bstar.errors import ConfigError
from bstar.specs.model import ModelSpec

QWEN72 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def described(**keys: Any) -> ModelSpec:
    return model_from_config(QWEN72 | keys, name="x")


@pytest.mark.parametrize(("rope", "longest", "scaled", "rows"), [
    (None, 32768, None, None),
    # The recipe of every Qwen2.5 and Qwen3 card.
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072, 131072),
    ({"rope_type": "yarn", "factor": 4.0}, 32768, 131072, 131072),
    # Already extended: DeepSeek-V3, gpt-oss and Kimi state the product.
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}, 32768, None, None),
    ({"rope_type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096}, 32768, None, 163840),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768, None, None),
    ({"rope_type": "linear", "factor": 4.0}, 131072, None, 131072),
    ({"type": "dynamic", "factor": 2.0}, 65536, None, None),
    ({"rope_type": "default"}, 32768, None, None),
    ({"type": "mrope", "mrope_section": [16, 24, 24]}, 32768, None, None),
    ({"rope_type": "dynamic", "factor": None}, 32768, None, None),
])
def test_scalings(rope: dict[str, Any] | None, longest: int, scaled: int | None, rows: int | None) -> None:
    model = described(rope_scaling=rope)
    assert model.max_context_tokens == longest
    assert model.scaled_context_tokens == scaled
    assert (model.rotary_positions or longest) == (rows or longest)


def test_the_newer_spelling_and_layer_kinds_are_read() -> None:
    assert described(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
                     ).max_context_tokens == 65536
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert described(rope_parameters=nested).max_context_tokens == 262144


def test_gemma3_states_the_scaled_length() -> None:
    gemma = {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208,
        "max_position_embeddings": 131072, "sliding_window": 1024, "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    model = model_from_config(gemma, name="x")
    assert model.max_context_tokens == 131072 and model.rotary_positions == 8 * 131072


def test_longrope_starts_at_the_original_length() -> None:
    factors = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    model = described(max_position_embeddings=131072, original_max_position_embeddings=4096, rope_scaling=factors)
    assert (model.max_context_tokens, model.engine_context_tokens) == (131072, 4096)


@pytest.mark.parametrize("factor", [0, -4, "4", True, 1e9, float("nan")])
def test_a_factor_that_is_none_is_refused(factor: Any) -> None:
    with pytest.raises(ConfigError, match="factor"):
        described(rope_scaling={"type": "yarn", "factor": factor, "original_max_position_embeddings": 32768})
