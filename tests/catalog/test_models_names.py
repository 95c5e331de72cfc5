"""A model is found by any usual spelling of its name, and a storage suffix becomes a weight format."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.catalog.models import all_entries, entry_ids, get_entry, suggest
from bstar.catalog.models.names import find_key, key_of

NAMES_FILE = Path(__file__).parents[1] / "data/catalog/measured_model_names.txt"
MEASURED_NAMES = [n for n in NAMES_FILE.read_text(encoding="utf-8").splitlines() if n and not n.startswith("#")]

# Names of the measured files that no public config.json (or copy of one) describes.
WITHOUT_PUBLIC_CONFIG = {"Qwen3.8-Flash-Next", "qwen-agentworld-35b-a3b awq-int4"}


@pytest.mark.parametrize("name", MEASURED_NAMES)
def test_every_measured_model_is_known(name: str) -> None:
    assert (get_entry(name) is not None) == (name not in WITHOUT_PUBLIC_CONFIG)


@pytest.mark.parametrize(
    ("name", "entry_id", "weight_format"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", None),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", None),
        ("META_LLAMA/llama_3.1_8b", "llama-3.1-8b", None),
        ("llama3.1:8b", "llama-3.1-8b", None),
        ("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b", "w4a16"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b", "fp8_channel"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "llama-3.1-405b", "fp8"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b-instruct-fp8", None),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama-3.1-70b", "w4a16"),
        ("bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M", "llama-3.3-70b", "gguf:q4_k_m"),
        ("unsloth/Qwen3-8B-GGUF", "qwen3-8b", "gguf:"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b-base", None),
        ("Qwen/Qwen3-8B-Base-FP8", "qwen3-8b-base", "fp8_block"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral-3-8b", None),
        ("mistralai/Ministral-3-8B-Base-2512", "ministral-3-8b-base-2512", None),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b-instruct-v0.1", None),
        ("mlx-community/Qwen3-8B-4bit", "qwen3-8b", "w4a16"),
        ("lmstudio-community/Qwen3-8B-MLX-8bit", "qwen3-8b", "w8a16"),
        ("nvidia/DeepSeek-R1-0528-FP4", "deepseek-r1-nvfp4", None),
        ("nvidia/Qwen3-235B-A22B-FP4", "qwen3-235b-a22b-nvfp4", None),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b", "fp8_block"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b-fp8", None),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-2507", "fp8_block"),
        ("zai-org/GLM-4.6-FP8", "glm-4.6", "fp8_channel"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b", None),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b-instruct", "w4a16"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b-instruct", "w8a16"),
        ("openai/gpt-oss-20b-MXFP4", "gpt-oss-20b", None),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1", None),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", None),
        ("/workspace/DeepSeek-V3.2", "deepseek-v3.2", None),
        ("models--Qwen--Qwen3-32B", "qwen3-32b", None),
        ("CohereLabs/c4ai-command-r-plus", "command-r-plus", None),
        ("command-r+", "command-r-plus", None),
        ("google/gemma-3-27b-it", "gemma-3-27b", None),
    ],
)
def test_names_resolve(name: str, entry_id: str, weight_format: str | None) -> None:
    entry = get_entry(name)
    assert entry is not None
    assert (entry.id, entry.weight_format_hint) == (entry_id, weight_format)


@pytest.mark.parametrize("name", ["", "-", "/", "gpt-5", "llama", "fp8", "Llama-3.1-9B", "llama-3.18b", "instruct"])
def test_unknown_names_are_none(name: str) -> None:
    assert get_entry(name) is None


def test_what_one_source_says_is_a_note() -> None:
    from bstar.codec.resolve import resolve_model

    assert any("max_position_embeddings" in note for note in resolve_model("command-r7b").notes)
    assert not any("assumed" in note for note in resolve_model("llama-3.1-8b").notes)


@pytest.mark.parametrize("name", ["unsloth/Qwen3-8B-GGUF", "llama-3.1-8b-gguf-q4_k_m"])
def test_a_gguf_name_is_refused_with_its_remedy(name: str) -> None:
    from bstar.codec.resolve import resolve_model
    from bstar.errors import ConfigError

    with pytest.raises(ConfigError, match=r"path of the \.gguf file"):
        resolve_model(name)


def test_sizes_never_run_together() -> None:
    assert key_of("llama-3.1-8b") != key_of("llama-3-18b") != key_of("llama-31-8b")


def test_suggestions_are_ids() -> None:
    assert "llama-3.1-8b" in suggest("lama-3.1-8b-instruct")
    assert set(suggest("qwen3-33b")) <= set(entry_ids())
    assert suggest("zzzzzzzz") == ()


def test_every_name_of_an_entry_finds_it() -> None:
    for entry in all_entries():
        for name in (entry.id, entry.hub_id, *entry.aliases):
            found = get_entry(name)
            assert found is not None
            assert found.id == entry.id
            assert found.weight_format_hint is None


def test_a_lookup_is_fast() -> None:
    get_entry("llama-3.1-8b")
    start = time.perf_counter()
    for _ in range(20):
        get_entry("meta-llama/Llama-3.1-8B-Instruct-FP8-dynamic")
    assert (time.perf_counter() - start) / 20 < 0.005


@given(st.text(max_size=60))
def test_any_text_is_answered(text: str) -> None:
    key = key_of(text)
    assert key_of(key) == key
    found = find_key(text, {"qwen3-8b"})
    assert found is None or found[0] == "qwen3-8b"
