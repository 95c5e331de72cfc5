"""Write tests/data/parameter_counts_extra.jsonl.gz: (config, exact counts) pairs from transformers' own classes.

python tools/make_parameter_counts.py [MODEL_TYPE …]      (in the virtual environment that has transformers)

For each model type: the class's default config and variations of it (tied or not, biases, head_dim, KV heads,
experts, layer types, towers), reduced to the keys a config.json would hold, built on the meta device and
counted. Needs no network and no memory for weights.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from variations import VARIATIONS

transformers.logging.set_verbosity_error()
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/data/parameter_counts_extra.jsonl.gz"


def build(raw: dict[str, Any]) -> torch.nn.Module:
    """The model that transformers makes of a config.json, on the meta device."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = AutoConfig.from_pretrained(folder)
    problem: Exception | None = None
    with torch.device("meta"):
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
            try:
                return auto.from_config(config)
            except (ValueError, KeyError) as error:
                problem = error
    assert problem is not None
    raise problem


STATED = ("hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
          "num_attention_heads", "n_head", "n_heads", "num_heads", "vocab_size", "intermediate_size", "ffn_dim")


def stated(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the sizes that every real file states, where the case leaves them to the class."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = AutoConfig.from_pretrained(folder)
    inner = "text_config" if "text_config" in type(config).sub_configs and "hidden_size" not in raw else None
    source = getattr(config, inner) if inner else config
    target = dict(raw.get(inner) or {}) if inner else dict(raw)
    fields = {f.name: f.default for f in dataclasses.fields(source)}
    spelled = {field: other for other, field in type(source).attribute_map.items()}
    for key in STATED:
        needed = not inner or key in ("hidden_size", "num_hidden_layers")
        if needed and isinstance(fields.get(key), int) and key not in target and spelled.get(key) not in target:
            target[key] = getattr(source, key)
    return {**raw, inner: target} if inner else target


def count(raw: dict[str, Any]) -> dict[str, int]:
    """Total, and the groups that the codec names too."""
    groups: collections.Counter[str] = collections.Counter()
    for name, parameter in build(raw).named_parameters():
        groups["total"] += parameter.numel()
        if ".experts." in name or name.endswith(".experts"):
            groups["experts"] += parameter.numel()
    return dict(groups)


def main() -> None:
    wanted = set(sys.argv[1:])
    kept: list[dict[str, Any]] = []
    if wanted and OUT.exists():
        with gzip.open(OUT, "rt") as lines:
            kept = [x for x in map(json.loads, lines) if x["model_type"] not in wanted]
    failed = 0
    for model_type, cases in VARIATIONS.items():
        if wanted and model_type not in wanted:
            continue
        for label, raw in cases:
            full = {"model_type": model_type, **raw}
            try:
                if label != "flat" or model_type != "step3p7":
                    full = stated(full)
                counts = count(full)
            except Exception as error:
                failed += 1
                print(f"{model_type} {label}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
                continue
            kept.append({"model_type": model_type, "label": label, "config": full, **counts})
    kept.sort(key=lambda x: (x["model_type"], x["label"]))
    with gzip.GzipFile(OUT, "wb", mtime=0) as out:
        for row in kept:
            out.write((json.dumps(row, sort_keys=True) + "\n").encode())
    print(f"{len(kept)} pairs, {failed} could not be built, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
