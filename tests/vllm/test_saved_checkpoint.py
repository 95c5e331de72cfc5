"""Checkpoints that transformers and safetensors wrote: their bytes are the model's, shard by shard."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from servers import HERE

from bstar.codec.checkpoint import read_safetensors_folder
from bstar.interfaces.cli.main import cli

pytestmark = pytest.mark.vllm

SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 352, "vocab_size": 1024, "max_position_embeddings": 512, "head_dim": 32,
         "torch_dtype": "bfloat16"}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen3, tied": SMALL | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_stored_bytes_are_the_models(name: str, vllm_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    done = subprocess.run(
        [vllm_python, HERE / "save_model.py", folder, json.dumps(CONFIGS[name])], check=True, timeout=180,
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
    told = json.loads(done.stdout.strip().split("\n")[-1])
    found = read_safetensors_folder(folder)
    assert found.num_files > 1 and found.source == "headers"
    assert (found.loaded_bytes, found.stored_elements) == (told["bytes"], told["parameters"])
    assert set(found.bytes_by_dtype) == {"BF16"}
    assert set(found.bytes_by_part) <= {"embedding", "lm_head", "layers", "other"}
    sheet = json.loads(CliRunner().invoke(cli, ["model", str(folder), "--json"]).stdout)
    assert (sheet["weight_bytes"], sheet["parameters"]["total"]) == (told["bytes"], told["parameters"])
