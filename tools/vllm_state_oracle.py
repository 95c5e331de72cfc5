"""Ask a real vLLM for the size of a hybrid model's recurrent state (run inside a vLLM environment).

    python tools/vllm_state_oracle.py OUT.json CONFIG.json…

For every config and TP 1, 2, 4, 8: bytes of one state page of one layer, from the model class's own
`get_mamba_state_shape_from_config` and `…_dtype_from_config`. Models whose module cannot be imported here are named.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def state_pages(path: Path) -> list[dict[str, Any]]:
    """One entry a TP degree; empty for a model without states."""
    import torch
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    raw = json.loads(path.read_text(encoding="utf-8"))
    text = raw.get("text_config", raw)
    if not any(key in text for key in ("linear_num_key_heads", "mamba_num_heads", "mamba_n_heads", "ssm_state_size")):
        return []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "config.json")
        config = AutoConfig.from_pretrained(folder)
    architecture = raw["architectures"][0]
    model = ModelRegistry.models[architecture].load_model_cls()
    inner = config.get_text_config()
    state_dtype = getattr(inner, "mamba_ssm_dtype", None) or getattr(inner, "mamba_ssm_cache_dtype", None)
    out = []
    for tp in (1, 2, 4, 8):
        settings = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=config, hf_text_config=inner, dtype=torch.bfloat16),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp),
            cache_config=SimpleNamespace(
                mamba_cache_dtype="auto", use_replayssm=False,
                mamba_ssm_cache_dtype=state_dtype or ("float32" if "Nemotron" in architecture else "auto")),
            speculative_config=None, num_speculative_tokens=0)
        page = MambaSpec(
            shapes=model.get_mamba_state_shape_from_config(settings),
            dtypes=model.get_mamba_state_dtype_from_config(settings), block_size=-1).page_size_bytes
        out.append({"config": path.name, "tp": tp, "page_bytes": page})
    return out


def main(argv: list[str]) -> None:
    states: list[dict[str, Any]] = []
    for name in argv[1:]:
        try:
            states += state_pages(Path(name))
        except Exception as error:  # an environment without a model's dependencies answers the others
            print(f"{name}: {error!r}")
    Path(argv[0]).write_text(json.dumps({"source": "vLLM", "states": states}, indent=0), encoding="utf-8")
    print(len(states), "answers")


if __name__ == "__main__":
    main(sys.argv[1:])
