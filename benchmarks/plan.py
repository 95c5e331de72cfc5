"""How long plans take: cold (a new process) and warm, over one GPU and ten, dense and mixture of experts.

    python benchmarks/plan.py

Goals: `bstar plan` and `bstar explain` under 1 s cold on one GPU, plan over ten GPUs and all layouts under 2 s.
"""

from __future__ import annotations

import subprocess
import sys
import time

TEN_GPUS = "h100-sxm-80gb,h200-sxm-141gb,b200-sxm-180gb,a100-sxm-80gb,l40s,l4,a10g,rtx-4090,mi300x,h20-sxm-96gb"
LOAD = ["--input", "lognormal:mean=1000,cv=1", "--output", "lognormal:mean=250,cv=1", "--slo", "chat", "--json"]
CASES = [
    ("explain, one GPU", ["explain", "llama-3.1-8b", "--gpu", "h100", "--context", "2000", "--json"], 1.0),
    ("plan, one GPU", ["plan", "llama-3.1-8b", "--gpu", "h100", "--rate", "10", *LOAD], 1.0),
    ("plan, one GPU, capacity", ["plan", "llama-3.1-70b", "--gpu", "h200", *LOAD], 1.0),
    ("plan, two GPUs, 500 clients", ["plan", "phi-4", "--gpu", "h20,rtx-4090", "--concurrency", "500", *LOAD], 2.0),
    ("plan, ten GPUs, 8B", ["plan", "llama-3.1-8b", "--gpu", TEN_GPUS, "--rate", "10", *LOAD], 2.0),
    ("plan, ten GPUs, 70B", ["plan", "llama-3.1-70b", "--gpu", TEN_GPUS, "--rate", "3", *LOAD], 2.0),
    ("plan, ten GPUs, Qwen3-30B-A3B", ["plan", "qwen3-30b-a3b", "--gpu", TEN_GPUS, "--rate", "10", *LOAD], 2.0),
    ("plan, ten GPUs, DeepSeek-R1", ["plan", "deepseek-r1", "--gpu", TEN_GPUS, "--rate", "3", *LOAD], 2.0),
]


def cold(arguments: list[str]) -> float:
    """Seconds of a command in a new process, start-up included."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "bstar.interfaces.cli", *arguments], capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - start


def main() -> None:
    print(f"{'':34}{'cold, best of 3':>16}{'goal':>8}")
    for name, arguments, goal in CASES:
        seconds = min(cold(arguments) for _ in range(3))
        print(f"{name:34}{seconds:14.2f} s{goal:6.1f} s{'' if seconds <= goal else '   over'}")

    import numpy as np

    from bstar.codec.build import build_deployment
    from bstar.planning.draws import request_draws
    from bstar.planning.outcomes import open_outcomes
    from bstar.planning.steps import replica_of
    from bstar.specs.workload import Workload
    from bstar.traffic.lengths import parse_lengths

    load = Workload(input_tokens=parse_lengths("lognormal:mean=1000,cv=1"), output_tokens=parse_lengths("250"))
    draws = request_draws(load)
    deployment = build_deployment("llama-3.1-8b", "h100-sxm-80gb", max_model_len=8192)
    replica = replica_of(deployment, draws, context=1125.0, room_sequences=300.0, largest_batch=256)
    rates, caps = np.linspace(1.0, 15.0, 8), np.full(8, 256)
    start, rounds = time.perf_counter(), 200
    for _ in range(rounds):
        open_outcomes(replica, draws, rates, caps)
    points = rounds * rates.size / (time.perf_counter() - start)
    print(f"closed forms: {points:,.0f} operating points/s, {draws.input_tokens.size} requests each")


if __name__ == "__main__":
    main()
