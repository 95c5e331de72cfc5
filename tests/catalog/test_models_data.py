"""The data files: unique names, fresh index, sources stated, and parameter totals equal to the published ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from bstar.catalog.models import ModelEntry, all_entries, entry_ids
from bstar.codec.hf_config import model_from_config
from bstar.errors import UnsupportedArchitectureError
from bstar.physics.weights import parameter_counts

# Entries whose mechanism the codec does not understand (yet); it says so instead of guessing.
REFUSED = {"kimi-k3": "model_type kimi_k3"}

ROOT = Path(__file__).parents[2]
ENTRIES = all_entries()


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("add_model", ROOT / "tools/add_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_is_fresh_and_names_are_unique() -> None:
    tool = _tool()
    assert json.loads((tool.DATA / "_index.json").read_text(encoding="utf-8")) == tool.build_index()


def test_there_are_enough_models() -> None:
    assert len(entry_ids()) >= 100


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_entry_says_where_it_comes_from(entry: ModelEntry) -> None:
    assert entry.source
    assert entry.license
    assert len(entry.date) == 10
    assert entry.hub_id.count("/") == 1
    assert entry.config["architectures"]
    assert entry.config["model_type"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_entry_becomes_a_model_of_the_published_size(entry: ModelEntry) -> None:
    try:
        model = model_from_config(entry.config, name=entry.id, hf_quant_config=entry.hf_quant_config)
    except UnsupportedArchitectureError:
        if entry.id not in REFUSED:
            raise
        pytest.xfail(REFUSED[entry.id])
    total = parameter_counts(model).total
    if entry.published_parameters is not None:
        assert total == entry.published_parameters
    if entry.published_parameters_rounded is not None:
        assert total == pytest.approx(entry.published_parameters_rounded, rel=0.02)


def test_data_files_are_small() -> None:
    for path in (ROOT / "src/bstar/catalog/models/data").glob("*.json"):
        assert path.stat().st_size < 150_000, path.name


def test_add_model_drops_noise_and_collapses_experts() -> None:
    tool = _tool()
    config = {"hidden_size": 8, "eos_token_id": 2, "id2label": {}, "text_config": {"use_cache": True, "num_layers": 2},
              "quantization_config": {"quantized_layers": {
                  "a.experts.0.up": {"quant_algo": "FP8"}, "a.experts.1.up": {"quant_algo": "FP8"}}}}
    assert tool.significant(config) == {
        "hidden_size": 8, "text_config": {"num_layers": 2},
        "quantization_config": {"quantized_layers": {"a.experts.*.up": {"quant_algo": "FP8"}}},
    }
