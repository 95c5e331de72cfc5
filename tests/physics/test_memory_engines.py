"""What sets the engines' pools apart."""

from __future__ import annotations

import bstar
from bstar.physics.kv_cache import kv_bytes_per_token
from bstar.physics.memory import memory_budget


def test_tensorrt_llm_keeps_whole_sequences_of_windowed_layers() -> None:
    """Half of gpt-oss's layers see 128 tokens; without max_attention_window the pool holds all of them all the same."""
    d = bstar.deployment(model="gpt-oss-120b", gpu="h200", engine="trtllm@1.2.0", max_model_len=9416)
    budget = memory_budget(d)
    per_token = kv_bytes_per_token(d.model, d.kv_format, d.parallel)
    assert abs(budget.kv_cache_bytes - budget.kv_cache_tokens * per_token) < 9416 * per_token
    sglang = memory_budget(bstar.deployment(model="gpt-oss-120b", gpu="h200", engine="sglang", max_model_len=9416))
    assert sglang.kv_cache_bytes < sglang.kv_cache_tokens * per_token
