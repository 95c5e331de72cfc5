"""Save a tiny model with transformers and safetensors, in shards with an index (run inside the vLLM environment).

VENV/bin/python save_model.py FOLDER CONFIG_JSON          prints {"parameters": n, "bytes": n}
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

with tempfile.TemporaryDirectory() as place:
    (Path(place) / "config.json").write_text(sys.argv[2])
    config = AutoConfig.from_pretrained(place)
model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
model.save_pretrained(sys.argv[1], max_shard_size="200KB")
parameters = list(model.parameters())
print(
    json.dumps(
        {
            "parameters": sum(p.numel() for p in parameters),
            "bytes": sum(p.numel() * p.element_size() for p in parameters),
        }
    )
)
