"""Whatever stands in a config.json, the answer is a ModelSpec or one clear line (a BstarError)."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bstar.codec.hf_config import known_model_types, model_from_config
from bstar.errors import BstarError, ConfigError, UnsupportedArchitectureError
from bstar.specs.model import ModelSpec

DATA = Path(__file__).resolve().parent.parent / "data" / "model_configs"
CONFIGS = [json.loads(p.read_text()) for p in sorted(DATA.glob("*_config.json")) if "hf_quant" not in p.name]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}

HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=20),
    st.lists(st.one_of(st.none(), st.integers(-5, 10**9), st.text(max_size=5), st.floats()), max_size=8),
    st.dictionaries(st.text(max_size=6), st.integers(), max_size=3),
    st.sampled_from(["auto", "full_attention", "moe", "linear_attention", "re:(a+)+$", "*" * 30, math.nan, math.inf]),
)  # fmt: skip
JSONISH = st.recursive(HOSTILE, lambda x: st.one_of(
    st.lists(x, max_size=4), st.dictionaries(st.text(max_size=8), x, max_size=5)), max_leaves=12)


def answer(raw: Any, quant: Any = None) -> str:
    """"ok", or the message of the error; anything else that is raised fails the test."""
    try:
        model = model_from_config(raw, name="m", hf_quant_config=quant)
    except BstarError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 1500
        return message
    assert isinstance(model, ModelSpec)
    return "ok"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_mutations_of_real_configs(data: st.DataObject) -> None:
    raw = copy.deepcopy(data.draw(st.sampled_from(CONFIGS)))
    for _ in range(data.draw(st.integers(1, 3))):
        target = raw
        nested = [k for k, v in raw.items() if isinstance(v, dict)]
        if nested and data.draw(st.booleans()):
            target = raw[data.draw(st.sampled_from(sorted(nested)))]
        key = data.draw(st.sampled_from([*sorted(target), "layer_types", "kv_lora_rank", "new"])) if target else "new"
        if data.draw(st.integers(0, 4)) == 0:
            target.pop(key, None)
        else:
            target[key] = data.draw(HOSTILE)
    answer(raw)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(known_model_types()), st.dictionaries(st.sampled_from(
    sorted({k for c in CONFIGS for k in c} | {k for c in CONFIGS for k in c.get("text_config", {})})), HOSTILE,
    max_size=6))
def test_hostile_values_under_every_type(model_type: str, values: dict[str, Any]) -> None:
    answer({**values, "model_type": model_type})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(JSONISH, JSONISH)
def test_arbitrary_json(raw: Any, quant: Any) -> None:
    answer(raw)
    answer({**LLAMA, "quantization_config": quant})
    answer(LLAMA, quant if isinstance(quant, dict) else None)


@pytest.mark.parametrize("key", [k for k, v in LLAMA.items() if isinstance(v, int)])
@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, 10**30, "12", [12], {}, True, None])
def test_a_bad_size_is_named(key: str, value: Any) -> None:
    if value is None and key == "num_key_value_heads":
        pytest.skip("null means as many as heads")
    message = answer({**LLAMA, key: value})
    assert key in message and message.startswith("config.json: ")


@pytest.mark.parametrize("key", ["kv_lora_rank", "num_local_experts", "ssm_state_size", "index_topk", "hc_mult",
                                 "layers_block_type", "cross_attention_layers", "block_configs"])
def test_a_mechanism_that_the_type_lacks_is_refused(key: str) -> None:
    value: Any = ["mamba"] * 4 if key == "layers_block_type" else [1] if key == "cross_attention_layers" else 64
    with pytest.raises(UnsupportedArchitectureError) as caught:
        model_from_config({**LLAMA, key: value}, name="m")
    assert caught.value.keys == (key,)
    assert "--layers" in str(caught.value)


@pytest.mark.parametrize("model_type", ["bert", "t5", "", "Llama", "../../etc/passwd", "x" * 500])
def test_an_unknown_type_names_itself_and_the_flags(model_type: str) -> None:
    for architectures in (None, [], ["NewForCausalLM"], ["LlamaForCausalLM", "Other"], "LlamaForCausalLM"):
        with pytest.raises(UnsupportedArchitectureError, match="model_type") as caught:
            model_from_config({**LLAMA, "model_type": model_type, "architectures": architectures}, name="m")
        assert "--layers" in str(caught.value)


def test_a_known_architecture_under_an_unknown_type_is_described_and_says_so() -> None:
    model = model_from_config({**LLAMA, "model_type": "my_llama"}, name="m")
    assert model.layers == model_from_config(LLAMA, name="m").layers
    assert any("my_llama" in note for note in model.notes)
    # Sizes are never the class's defaults then, and further mechanisms are refused.
    without = {k: v for k, v in LLAMA.items() if k not in ("model_type", "hidden_size")}
    assert "hidden_size is missing" in answer(without)
    assert "ssm_state_size" in answer({**LLAMA, "model_type": "my_llama", "ssm_state_size": 16})


def test_auto_map_is_never_followed() -> None:
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "os.system"}
    assert answer({**LLAMA, "auto_map": code}) == "ok"


def test_lists_of_the_wrong_length_and_unknown_kinds() -> None:
    base = {**LLAMA, "model_type": "gemma2", "head_dim": 64}
    assert "layer_types has 3 entries" in answer({**base, "layer_types": ["full_attention"] * 3})
    assert "known kinds" in answer({**base, "layer_types": ["full_attention"] * 3 + ["quantum_attention"]})


def test_not_an_object() -> None:
    for raw in ([], "x", 3, None):
        with pytest.raises(ConfigError):
            model_from_config(raw, name="m")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["4096", float("nan"), None, -1, 3.5, [1]])
@pytest.mark.parametrize(("family", "keys"), [
    ("llama", ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")),
    ("gpt2", ("n_embd", "n_layer", "n_head", "vocab_size")), ("bloom", ("n_embed", "n_layer", "n_head")),
    ("falcon", ("hidden_size", "num_hidden_layers")), ("falcon", ("n_embed", "n_layer")),
    ("mpt", ("d_model", "n_layers", "n_heads")), ("qwen2_moe", ("num_experts", "moe_intermediate_size")),
])
def test_errors_name_the_key_that_the_file_has(family: str, keys: tuple[str, ...], value: object) -> None:
    config = {"model_type": family, "vocab_size": 1000, "max_position_embeddings": 2048, "intermediate_size": 1024,
              "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
              "shared_expert_intermediate_size": 64, "torch_dtype": "bfloat16"}
    for names in (("hidden_size", "n_embd", "n_embed", "d_model"), ("num_hidden_layers", "n_layer", "n_layers"),
                  ("num_attention_heads", "n_head", "n_heads")):
        used = next((n for n in names if n in keys), names[0])
        config[used] = {"hidden_size": 256}.get(names[0], 4)
    for key in keys:
        with pytest.raises(ConfigError) as error:
            model_from_config(config | {key: value}, name="x")
        assert key in str(error.value).split()[1], str(error.value)
