"""How fast clusters are simulated: requests a second through 64 replicas, and the Mooncake trace on 16.

    python benchmarks/cluster.py [REQUESTS] [MOONCAKE.jsonl.gz]

The load is that of the single-replica benchmark: an 8B model, lengths like Azure's conversations, Poisson arrivals at
6.45 a second per replica, prefix caching off. Mooncake's conversations (12,031 requests, hash ids) with caching on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import bstar
from bstar.sim.cluster import simulate_cluster
from bstar.sim.cluster.fast import run_fast
from bstar.sim.cluster.loop import Fleet
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


def main() -> None:
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
