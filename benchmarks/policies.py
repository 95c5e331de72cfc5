"""Simulated requests per CPU second of the compiled policies: an 8B model on one GPU, Poisson arrivals.

    python benchmarks/policies.py [REQUESTS]
"""

from __future__ import annotations

import sys
import time

import numpy as np

import bstar
from bstar.sim.deployed import deployed_engine
from bstar.sim.kernel.policy_state import EVENTS
from bstar.sim.policies.fast import KernelOptions, policy_kernel
from bstar.sim.policies.sglang import SglangOptions
from bstar.sim.policies.swap import SwapOptions
from bstar.sim.policies.trtllm import TrtllmOptions
from bstar.sim.step_cost import step_cost
from bstar.traffic.load import Traffic

POLICIES: dict[str, KernelOptions] = {
    "sglang": SglangOptions(),
    "sglang, mixed": SglangOptions(mixed_chunk=True),
    "trtllm, no-evict": TrtllmOptions(),
    "trtllm, max-utilization": TrtllmOptions(capacity="max-utilization"),
    "swap": SwapOptions(block_bytes=2**21, link_bytes_per_s=63e9),
}


def main() -> None:
    """Print a line per policy; the first run of each is not counted (it may compile)."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    settings = deployed_engine(deployment := bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb")).settings
    cost = step_cost(deployment, max_tokens=settings.token_budget + 2048, max_sequences=4096)
    rng = np.random.default_rng(0)
    load = Traffic(
        arrival_s=np.cumsum(rng.exponential(1 / 6.45, n)),
        input_tokens=np.clip(rng.lognormal(6.5, 1.0, n), 1, 14_000).astype(np.int64),
        output_tokens=np.clip(rng.lognormal(5.0, 0.8, n), 1, 1_000).astype(np.int64),
    )
    begun = time.process_time()
    policy_kernel(settings, SglangOptions(), load, cost, keep_runs=False).advance(1.0)
    print(f"compiling or loading: {time.process_time() - begun:.1f} s")
    for name, options in POLICIES.items():
        kernel = policy_kernel(settings, options, load, cost, keep_runs=False)
        begun = time.process_time()
        kernel.advance()
        spent = time.process_time() - begun
        print(f"{name:24} {n / spent:12,.0f} requests/s, {kernel.state.n[EVENTS] / n:.2f} events a request")


if __name__ == "__main__":
    main()
