"""Deployments and loads that the tests of results share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import bstar
from bstar.specs.deployment import Deployment
from bstar.traffic import closed_loop, gamma, poisson, sessions
from bstar.traffic.load import Traffic


@lru_cache(maxsize=32)
def deployed(**flags: Any) -> Deployment:
    """An 8B model on one H100."""
    return bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", **flags)


def tight(**flags: Any) -> Deployment:
    """The same with a small cache, so that requests are preempted."""
    return deployed(num_gpu_blocks_override=300, max_model_len=4096, max_num_seqs=64, **flags)


def loads() -> dict[str, Traffic]:
    """A load of every kind."""
    lengths: dict[str, Any] = {"input_tokens": "lognormal:mean=500,cv=1,max=2000", "output_tokens": "uniform:1-120"}
    return {
        "poisson": poisson(8.0, num_requests=120, seed=1, **lengths),
        "bursty": gamma(20.0, 0.3, num_requests=120, seed=2, **lengths),
        "closed": closed_loop(12, num_requests=100, think_s="exponential:mean=200ms", seed=3, **lengths),
        "warm": closed_loop(6, num_requests=60, warmup_requests=12, seed=4, **lengths),
        "sessions": sessions(2.0, num_sessions=15, turns="uniform:1-4", seed=5, **lengths),
    }
