"""How fast the physics is: landmark evaluations, step times, decode curves. Prints one line a figure.

    python benchmarks/landmarks.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import bstar
from bstar.latency import decode_curve, decode_step_time
from bstar.physics import landmarks as lm
from bstar.physics.landmarks import landmarks_of
from bstar.physics.step_costs import step_cost

POINTS = 100_000


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Best of five means."""
    call()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def all_landmarks(weights: np.ndarray, kv: np.ndarray, pool: np.ndarray, ridge: np.ndarray) -> None:
    """B*, B_gemm, B_c, B_mem, the intensity limit and the amortized time at B* for every point."""
    star = lm.b_star(weights, kv)
    lm.b_gemm(ridge, weights, weights / 2)
    lm.b_compute(ridge, weights, weights / 2, kv)
    lm.b_mem(pool, kv)
    lm.arithmetic_intensity_limit(weights / 2, kv)
    lm.amortized_time_s(star, weights, kv, 3.35e12)


def moe_fixed_points(kv: np.ndarray) -> None:
    """B* of a 128-expert model at every context: W(B) = B·kv, solved together."""
    lm.b_star_fixed_point(lambda b: 2e9 + 4e8 * np.asarray(lm.expected_distinct_experts(128.0, 8.0, b)), kv, 53.2e9)


def main() -> None:
    rng = np.random.default_rng(0)
    weights, kv = rng.uniform(1e9, 1e12, POINTS), rng.uniform(1e6, 1e10, POINTS)
    pool, ridge = rng.uniform(1e9, 1e12, POINTS), rng.uniform(50, 600, POINTS)
    plain = seconds(lambda: all_landmarks(weights, kv, pool, ridge), 3)
    fixed = seconds(lambda: moe_fixed_points(kv[:20_000]), 1)
    dense = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb")
    moe = bstar.deployment(model="deepseek-r1", gpu="h200-sxm-141gb", tp=8)
    batches = np.arange(1.0, 10_001.0)
    print(f"landmarks (six formulas), vectorised     {POINTS / plain:14,.0f} /s")
    print(f"MoE B* fixed points, vectorised          {20_000 / fixed:14,.0f} /s")
    for label, deployment in (("dense", dense), ("MoE", moe)):
        print(f"landmarks_of(deployment, context), {label:6}"
              f"{seconds(lambda d=deployment: landmarks_of(d, 4096.0), 50) * 1e6:14,.0f} µs")
    print(f"decode_step_time, dense                  "
          f"{seconds(lambda: decode_step_time(dense, 64, 4096), 500) * 1e6:14,.1f} µs")
    print(f"decode_step_time, MoE with MLA           "
          f"{seconds(lambda: decode_step_time(moe, 64, 4096), 500) * 1e6:14,.1f} µs")
    print(f"decode_curve of 10,000 batches, dense    "
          f"{seconds(lambda: decode_curve(dense, batches, 4096), 5) * 1e3:14,.2f} ms")
    print(f"decode_curve of 10,000 batches, MoE      "
          f"{seconds(lambda: decode_curve(moe, batches, 4096), 5) * 1e3:14,.2f} ms")
    batch = [(1, 4096, False)] * 64 + [(2048, 2048, True)]
    print(f"step_cost of 65 sequences, dense         "
          f"{seconds(lambda: step_cost(dense.model, dense.parallel, batch), 100) * 1e6:14,.0f} µs")


if __name__ == "__main__":
    main()
