"""How fast clusters are simulated: requests a second through 64 replicas, the Mooncake trace on 16, prefill and decode
pools, and ranks that step together.

    python benchmarks/cluster.py [REQUESTS] [MOONCAKE.jsonl.gz]

The load is that of the single-replica benchmark: an 8B model, lengths like Azure's conversations, Poisson arrivals at
6.45 a second per replica, prefix caching off. Mooncake's conversations (12,031 requests, hash ids) with caching on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import bstar
from bstar.sim.cluster import simulate_cluster
from bstar.sim.cluster.fast import run_fast
from bstar.sim.cluster.loop import Fleet
from bstar.sim.cluster.pool_cost import decode_cost, prompt_cost
from bstar.sim.cluster.pool_run import DecodePool, PoolRequests, PromptPool, run_pools
from bstar.sim.cluster.routers import Router
from bstar.sim.deployed import deployed_engine
from bstar.sim.step_cost import step_cost
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic

LENGTHS = {"input_tokens": "lognormal:mean=1155,cv=1.0", "output_tokens": "lognormal:mean=211,cv=0.8"}


def measure(deployment: Deployment, load: Traffic, replicas: int, router: str, threads: int | None = None) -> float:
    """Wall seconds of the engines alone, the better of two."""
    deployed = deployed_engine(deployment)
    s = deployed.settings
    cost = step_cost(deployment, max_tokens=s.max_num_batched_tokens, max_sequences=s.max_num_seqs)
    spent = []
    for _ in range(2):
        begun = time.perf_counter()
        run_fast(s, cost, load, Router(router, load), Fleet(replicas=replicas), keep_runs=False, threads=threads)
        spent.append(time.perf_counter() - begun)
    return min(spent)


def measure_pools(clients: int) -> float:
    """Wall seconds of a closed loop of `clients` over 4 prefill and 1 decode worker (DeepSeek-R1), best of three."""
    prefill = bstar.deployment(model="deepseek-r1", gpu="gb200", engine="sglang", attention_dp=4, ep=4)
    decode = bstar.deployment(model="deepseek-r1", gpu="gb200", engine="sglang", attention_dp=32, ep=32)
    rng, count = np.random.default_rng(0), 10 * clients
    prompt, output = rng.integers(819, 1025, count), rng.integers(819, 1025, count)
    requests = PoolRequests.of(prompt, output - 1, np.full(count, 5e-3), clients=clients, front_s=0.01)
    prompts = prompt_cost(prefill, max_tokens=16384, max_prompts=64)
    steps = decode_cost(decode, max_sequences=min(clients, 512))
    first = PromptPool(workers=4, ranks=4, tokens=16384, prompts=64, chunked=True, shared=False)
    then = DecodePool(workers=1, ranks=32, seats=512, room=1 << 40, shared=False)
    spent = []
    for _ in range(3):
        begun = time.perf_counter()
        run_pools(requests, first, then, prompts, steps)
        spent.append(time.perf_counter() - begun)
    return min(spent)


def measure_lock_step() -> float:
    """Wall seconds of 5,000 requests on 8 ranks that step together, the better of two."""
    d = bstar.deployment(model="deepseek-r1", gpu="h200-sxm-141gb", engine="sglang", attention_dp=8, ep=8)
    load = bstar.traffic.closed_loop(concurrency=256, num_requests=5_000, seed=0, input_tokens=1024, output_tokens=256)
    spent = []
    for _ in range(2):
        begun = time.perf_counter()
        bstar.simulate(d, load)
        spent.append(time.perf_counter() - begun)
    return min(spent)


def main() -> None:
    for clients in (64, 256, 1024, 8192):
        print(f"pools, {clients:,} clients, {10 * clients:,} requests: {1e3 * measure_pools(clients):.1f} ms")
    print(f"lock step, 8 ranks, 5,000 requests: {measure_lock_step():.2f} s")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    d = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", enable_prefix_caching=False)
    for replicas in (16, 64):
        load = bstar.traffic.poisson(rate_per_s=6.45 * replicas, num_requests=count, seed=0, **LENGTHS)
        for router in ("round-robin", "power-of-two", "least-outstanding"):
            spent = measure(d, load, replicas, router)
            print(f"{replicas} replicas, {router}: {count / spent:,.0f} requests/s")
        few = load.head(count // 10)
        spent = measure(d, few, replicas, "least-kv")
        print(f"{replicas} replicas, least-kv: {few.num_requests / spent:,.0f} requests/s")
    load = bstar.traffic.poisson(rate_per_s=6.45 * 2, num_requests=count, seed=0, **LENGTHS)
    one, two = (measure(d, load, 2, "round-robin", threads=t) for t in (1, 2))
    print(f"two threads: {one / two:.2f} times as fast as one")
    if len(sys.argv) > 2:
        caching = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", enable_prefix_caching=True)
        trace = bstar.traffic.from_trace(Path(sys.argv[2]))
        for router in ("round-robin", "prefix-hash", "least-outstanding", "prefix-affinity"):
            run = simulate_cluster(caching, trace, replicas=16, router=router)
            hit = run.cached_tokens.sum() / run.input_tokens.sum()
            print(f"Mooncake, 16 replicas, {router}: {run.timing.total_s:.2f} s for {trace.num_requests:,} requests, "
                  f"{measure(caching, trace, 16, router):.2f} s of them engines; {hit:.1%} of prompt tokens cached, "
                  f"TTFT p95 {run.summary.ttft_s.p95:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
