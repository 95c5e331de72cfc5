"""The data files: unique names, fresh index, sources stated, and parameter totals equal to the published ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from bstar.catalog.models import ModelEntry, all_entries, entry_ids, get_entry
from bstar.codec.hf_config import model_from_config
from bstar.physics.weights import parameter_counts

ROOT = Path(__file__).parents[2]

def _variants() -> list[tuple[ModelEntry, ModelEntry]]:
    """Every variant with the entry it varies."""
    found = []
    for entry in all_entries():
        raw = json.loads((ROOT / f"src/bstar/catalog/models/data/{entry.id}.json").read_text(encoding="utf-8"))
        for variant in raw.get("variants", ()):
            for name in variant["names"]:
                other = get_entry(name)
                assert other is not None
                assert other.hub_id == variant["names"][0]
                found.append((entry, other))
    return found


VARIANTS = _variants()
ENTRIES = (*all_entries(), *{variant.id: variant for _, variant in VARIANTS}.values())


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
def test_entry_says_what_confirms_it_and_what_does_not(entry: ModelEntry) -> None:
    assert entry.confirmed or entry.unconfirmed
    assert len(entry.unconfirmed) == len(set(entry.unconfirmed))
    if "recalled" in entry.source:  # written from memory, so more than one thing must speak for it
        assert entry.confirmed


def test_a_variant_differs_from_its_entry_in_what_it_says_only() -> None:
    for entry, variant in VARIANTS:
        assert variant.config != entry.config, variant.id
        assert variant.config["architectures"] == entry.config["architectures"]
        assert variant.license == entry.license


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_entry_becomes_a_model_of_the_published_size(entry: ModelEntry) -> None:
    model = model_from_config(entry.config, name=entry.id, hf_quant_config=entry.hf_quant_config)
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
