"""How long it takes to draw ten million requests, and to read traces; processor time on one core.

python benchmarks/traffic.py [--requests 10000000]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bstar import traffic
from bstar.traffic import Traffic

LENGTHS = ("lognormal:mean=900,cv=1.2", "lognormal:mean=200,cv=0.8")


def cases(n: int) -> dict[str, Callable[[], Traffic]]:
    """Loads of n requests."""
    groups = traffic.prefix_groups(100, 50, popularity=1.0)
    return {
        "Poisson, lognormal lengths": lambda: traffic.poisson(6.45, *LENGTHS, n),
        "gamma, uniform and Zipf lengths": lambda: traffic.gamma(
            6.45, 0.5, "uniform:100-900", "zipf:alpha=1.1,max=8192", n
        ),
        "joint lengths (copula)": lambda: traffic.poisson(
            6.45, num_requests=n, lengths=traffic.correlated(*LENGTHS, 0.3)
        ),
        "50 shared prefixes": lambda: traffic.poisson(6.45, "uniform:100-900", 5, n, prefix=groups),
        "step rate": lambda: traffic.varying("step:0s=2,10min=8", 512, 128, n),
        "diurnal rate": lambda: traffic.varying("diurnal:mean=5,peak=10", 512, 128, n),
        "closed loop, thinking": lambda: traffic.closed_loop(64, 512, 200, n, think_s="exponential:mean=5s"),
        "sessions of 4 turns": lambda: traffic.sessions(5.0, 4, 100, 50, n // 4),
    }


def main() -> None:
    """Print one line a case."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=10_000_000)
    n = options.parse_args().requests
    for name, draw in cases(n).items():
        report(name, draw)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.csv"
        traffic.write_trace(traffic.poisson(6.45, *LENGTHS, n // 40), file)
        report("reading a CSV trace", lambda: traffic.from_trace(file))


def report(name: str, draw: Callable[[], Traffic]) -> None:
    """Time one case; the peak is that of the process so far."""
    start = time.process_time()
    load = draw()
    seconds = time.process_time() - start
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"{name:34} {load.num_requests:>12,} requests {seconds:7.2f} s  {peak_gb:5.2f} GB at most so far")


if __name__ == "__main__":
    main()
