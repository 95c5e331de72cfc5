"""What SGLang's and TensorRT-LLM's flags mean together, once each has been read (`engine_settings`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bstar.codec.engine_settings import Settings
from bstar.errors import SpecError


def finish_sglang(settings: Settings, unmodelled: list[str]) -> None:
    """SGLang's own meanings: --tp counts every rank, of which attention takes tp / dp with --enable-dp-attention."""
    dp_attention = settings.pop("enable_dp_attention", False)
    dp, tp = settings.get("dp", 1), settings.get("tp", 1)
    if dp_attention and dp > 1:
        if tp % dp:
            raise SpecError(f"--dp-size: {dp} does not divide --tp-size {tp}; with --enable-dp-attention it must")
        settings |= {"tp": tp // dp, "attention_dp": settings.pop("dp")}
    if settings.get("max_num_batched_tokens", 1) < 1:  # -1: prompts are not cut
        settings.pop("max_num_batched_tokens")
        settings["enable_chunked_prefill"] = False
    tokens = settings.pop("max_total_tokens", None)
    if tokens is not None:
        page = settings.get("block_size", 1)
        settings["num_gpu_blocks_override"] = tokens // page
        settings["block_size"] = page


def trtllm_options(options: Mapping[str, Any], settings: Settings, unmodelled: list[str]) -> None:
    """The keys of trtllm-serve's options file (--config, --extra_llm_api_options), which win over the flags."""
    plain = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "moe_expert_parallel_size": "ep",
             "max_batch_size": "max_num_seqs", "max_num_tokens": "max_num_batched_tokens",
             "max_seq_len": "max_model_len", "enable_chunked_prefill": "enable_chunked_prefill",
             "stream_interval": "stream_interval", "batch_wait_timeout_iters": "batch_wait_timeout_iters",
             "batch_wait_max_tokens_ratio": "batch_wait_max_tokens_ratio"}
    for key, value in options.items():
        if key in plain:
            settings[plain[key]] = value
        elif key == "kv_cache_config" and isinstance(value, Mapping):
            _trtllm_kv(value, settings, unmodelled)
        elif key == "cuda_graph_config" and (value is None or isinstance(value, Mapping)):
            sizes = (value or {}).get("batch_sizes")
            largest = (value or {}).get("max_batch_size") or (max(sizes) if sizes else None)
            settings["cudagraph_max_size"] = 0 if value is None else largest
        elif key == "attention_dp_config" and (value is None or isinstance(value, Mapping)):
            settings["attention_dp_config"] = dict(value or {})
        elif key == "enable_attention_dp":
            settings["enable_attention_dp"] = bool(value)
        elif key == "disable_overlap_scheduler":
            settings["async_scheduling"] = not value
        else:
            unmodelled.append(f"{key}: {json.dumps(value, default=str)}")


def _trtllm_kv(value: Mapping[str, Any], settings: Settings, unmodelled: list[str]) -> None:
    names = {"dtype": "kv_cache_dtype", "free_gpu_memory_fraction": "gpu_memory_utilization",
             "enable_block_reuse": "enable_prefix_caching", "tokens_per_block": "block_size"}
    for key, inner in value.items():
        if key in names:
            settings[names[key]] = inner
        else:
            unmodelled.append(f"kv_cache_config.{key}: {json.dumps(inner, default=str)}")


def finish_trtllm(settings: Settings) -> None:
    """TensorRT-LLM's --tp_size counts every rank; with attention DP each rank has its own attention.

    attention_dp_config.enable_balance keeps a prompt until every rank has one, or timeout_iters steps. Ranks are not
    followed one by one: each of its prompts waits for half of that.
    """
    balance = settings.pop("attention_dp_config", {})
    if not settings.pop("enable_attention_dp", False):
        return
    settings["attention_dp"] = settings.pop("tp", 1)
    settings["tp"] = 1
    if balance.get("enable_balance") and settings["attention_dp"] > 1 and "batch_wait_timeout_iters" not in settings:
        settings["batch_wait_timeout_iters"] = int(balance.get("timeout_iters", 50)) // 2
        settings["batch_wait_max_tokens_ratio"] = 1.0
