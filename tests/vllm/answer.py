"""What real vLLM and transformers say about models (run inside the vLLM environment).

    VENV/bin/python answer.py QUESTIONS.json ANSWERS.json

Questions: {name: {"config": {…}, "tp": [1, …], "steps": [[[new, after, is_prefill], …], …], "block_size": n}}.
Answers, by name: parameters (transformers, meta device), pages (bytes of a KV block of each layer, by vLLM's own
specs), steps (FLOPs and bytes by component, vllm/v1/metrics/perf.py), by TP degree.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics


def parameters(folder: str) -> int:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def pages(folder: str, block_size: int, tp: int) -> list[int]:
    """Bytes of one block of each layer on one of `tp` ranks, at bf16."""
    config = AutoConfig.from_pretrained(folder)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):
        width = config.kv_lora_rank + config.qk_rope_head_dim
        spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=width, dtype=torch.bfloat16)
        return [spec.page_size_bytes] * config.num_hidden_layers
    heads = max(1, config.num_key_value_heads // tp)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": heads,
        "head_size": size,
        "dtype": torch.bfloat16,
    }
    full = FullAttentionSpec(**shape)
    return [
        (SlidingWindowSpec(**shape, sliding_window=config.sliding_window) if k == "sliding_attention" else full)
        .page_size_bytes for k in kinds
    ]  # fmt: skip


def steps(folder: str, tp: int, batches: list[Any]) -> list[dict[str, Any]]:
    model = ModelConfig(
        model=folder, tokenizer=folder, dtype="bfloat16", seed=0, max_model_len=8192, skip_tokenizer_init=True
    )
    scheduler = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, is_encoder_decoder=False
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=32),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(),
        scheduler_config=scheduler,
    )
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = tp
    metrics = ModelMetrics(config)
    found = []
    for batch in batches:
        context = ExecutionContext()
        for new, after, prefill in batch:
            context.add(new, after, prefill)
        found.append(
            {
                "flops": metrics.get_num_flops_breakdown(context),
                "read_bytes": metrics.get_read_bytes_breakdown(context),
                "write_bytes": metrics.get_write_bytes_breakdown(context),
            }
        )
    return found


def main(questions: str, answers: str) -> None:
    transformers.logging.set_verbosity_error()
    out: dict[str, Any] = {}
    for name, question in json.loads(Path(questions).read_text()).items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(question["config"]))
            out[name] = {
                "parameters": parameters(folder),
                "pages": {tp: pages(folder, question["block_size"], tp) for tp in question["tp"]},
                "steps": {tp: steps(folder, tp, question["steps"]) for tp in question["tp"] if question["steps"]},
            }
    Path(answers).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:3])
