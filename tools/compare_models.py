"""Compare the catalog's models with llmfit's list, which is read from the Hub.

    pip download --no-deps llmfit && unzip llmfit-*.whl
    python tools/compare_models.py llmfit-*.data/scripts/llmfit

Prints each Hub name of both whose shape, longest context or parameter count differ. llmfit multiplies the
context of some rope scalings in, guesses 4096 where it could not read a file, and counts all that a checkpoint
stores (MTP layers, router biases, a tied head stored twice): a line is a question, not an error.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from bstar.catalog.models import ModelEntry, all_entries, get_entry  # noqa: E402
from bstar.codec.hf_config import model_from_config  # noqa: E402
from bstar.physics.weights import parameter_counts  # noqa: E402

_PAIRS = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "hidden_size": ("hidden_size", "n_embd"),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions"),
}


def listed(executable: Path) -> list[dict[str, Any]]:
    """The longest JSON array of models that the executable holds."""
    data = executable.read_bytes()
    for start in (m.start() for m in re.finditer(rb'\[\s*\{\s*"name"', data)):
        try:
            found, _ = json.JSONDecoder().raw_decode(data[start:].decode("utf-8", "ignore"))
        except ValueError:
            continue
        if len(found) > 500:
            return [r for r in found if r.get("num_hidden_layers")]
    raise SystemExit(f"{executable}: no list of models in it")


def differences(entry: ModelEntry, row: dict[str, Any]) -> list[str]:
    """What the two say differently, in words."""
    text = {**entry.config, **entry.config.get("text_config", {})}
    found = []
    for theirs, keys in _PAIRS.items():
        ours = next((text[k] for k in keys if text.get(k) is not None), None)
        if ours is not None and row.get(theirs) not in (None, ours):
            found.append(f"{theirs} {ours} here, {row[theirs]} there")
    counts = parameter_counts(model_from_config(entry.config, name=entry.id, hf_quant_config=entry.hf_quant_config))
    total = counts.total + counts.mtp
    if abs(row["parameters_raw"] - total) > 0.001 * total and row["parameters_raw"] != total + counts.vision:
        found.append(f"{total:,} parameters here, {row['parameters_raw']:,} there")
    return found


def main() -> None:
    rows = listed(Path(sys.argv[1]))
    names = {name.lower() for e in all_entries() for name in (e.hub_id, *e.aliases)}
    for row in sorted(rows, key=lambda r: str(r["name"]).lower()):
        if row["name"].lower() in names and (entry := get_entry(row["name"])) is not None:
            for line in differences(entry, row):
                print(f"{row['name']} ({entry.id}): {line}")


if __name__ == "__main__":
    main()
