"""How much processor time a prediction of a measured row takes, warm: python benchmarks/validate.py [--whole]

    rows of up to 256 clients           median and slowest, by engine and number of clients (target: 20 ms)
    rows of more                        nanoseconds a simulated request (target: 1,000)
    --whole                             all bundled points on all processors (target: 5 minutes on two)
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict

import numpy as np

from bstar.calibration.bundled import SERVING, all_bundled_points, bundled_points
from bstar.calibration.point_deployments import engine_name
from bstar.calibration.replay import replay
from bstar.calibration.validation import validate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--every", type=int, default=10, help="take every N-th row")
    arguments = parser.parse_args()
    rows = [p for p in bundled_points(SERVING) if not p.is_disaggregated]
    for engine in ("vllm", "sglang", "trtllm"):  # compiled code is loaded
        replay(next(p for p in rows if p.engine == engine))
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    each: list[float] = []
    for point in rows[:: arguments.every]:
        took = min(_timed(point) for _ in range(2))
        if point.concurrency > 256:
            each.append(took / (10 * point.concurrency))
            continue
        size = "1–16" if point.concurrency <= 16 else "17–64" if point.concurrency <= 64 else "65–256"
        seconds[engine_name(point.engine)[0], size].append(took)
    print(f"{'engine':8} {'clients':>8} {'rows':>5} {'median ms':>10} {'slowest ms':>11}")
    for (engine, size), found in sorted(seconds.items()):
        print(f"{engine:8} {size:>8} {len(found):5} {1e3 * np.median(found):10.1f} {1e3 * max(found):11.1f}")
    if each:
        print(f"more than 256 clients: {1e9 * np.median(each):,.0f} ns a request (median of {len(each)} rows)")
    if arguments.whole:
        points, begun = all_bundled_points(), time.perf_counter()
        outcomes = validate(points)
        took = time.perf_counter() - begun
        answered = sum(o.answered for o in outcomes)
        print(f"{len(points):,} points, {answered:,} answered, on {os.cpu_count()} processors: {took:.0f} s")


def _timed(point: object) -> float:
    begun = time.process_time()  # of this process: other work on the machine does not count
    replay(point)  # type: ignore[arg-type]
    return time.process_time() - begun


if __name__ == "__main__":
    main()
