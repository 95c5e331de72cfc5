"""Parameter counts against transformers' own classes: real configs and several hundred variations.

parameter_counts.jsonl        real checkpoints' config.json files (tests/data/model_configs)
parameter_counts_extra.jsonl.gz   made by tools/make_parameter_counts.py with transformers 5.19
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from bstar.codec.hf_config import model_from_config
from bstar.physics.weights import parameter_counts

DATA = Path(__file__).resolve().parent.parent / "data"
REAL = [json.loads(line) for line in (DATA / "parameter_counts.jsonl").read_text().splitlines()]


def _extra() -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(DATA / "parameter_counts_extra.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            rows[row["model_type"]].append(row)
    return dict(rows)


EXTRA = _extra()


def load(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A real config and the hf_quant_config.json beside it."""
    beside = DATA / "model_configs" / name.replace("_config.json", "_hf_quant_config.json")
    quant = json.loads(beside.read_text()) if beside.exists() else None
    return json.loads((DATA / "model_configs" / name).read_text()), quant


@pytest.mark.parametrize("row", REAL, ids=[r["config"].removesuffix("_config.json") for r in REAL])
def test_real_config_counts_exactly(row: dict[str, Any]) -> None:
    raw, quant = load(row["config"])
    counts = parameter_counts(model_from_config(raw, name="m", hf_quant_config=quant))
    assert counts.total == row["total"]
    assert counts.experts == row["by_group"].get("experts", 0)
    assert counts.lm_head == row["by_group"].get("lm_head", 0)


@pytest.mark.parametrize("model_type", sorted(EXTRA))
def test_variations_of_a_type_count_exactly(model_type: str) -> None:
    wrong = []
    for row in EXTRA[model_type]:
        counts = parameter_counts(model_from_config(row["config"], name="m"))
        if (counts.total, counts.experts) != (row["total"], row.get("experts", 0)):
            wrong.append((row["label"], counts.total - row["total"], counts.experts - row.get("experts", 0)))
    assert not wrong


def test_there_are_hundreds_of_pairs() -> None:
    assert len(REAL) == 56
    assert sum(map(len, EXTRA.values())) >= 500
