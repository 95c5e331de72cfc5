"""Cold starts: what a user waits for, process start included.

    python benchmarks/startup.py [--runs 5]

Every command runs in a fresh interpreter, the files of the installation warm in the page cache as on a second use;
the best and the median of the runs are printed beside what is asked for. Ends with 1 where the best misses it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPUS = "h100-sxm-80gb,a100-sxm-80gb,h200-sxm-141gb,b200-sxm-180gb,l40s,l4,rtx-4090,rtx-5090,mi300x,a10"
LOAD = ("--input", "2000", "--output", "300", "--rate", "5", "--slo", "ttft=1s,tpot=50ms")
# (name, arguments of bstar or Python code, seconds that are asked for or None)
CASES: tuple[tuple[str, tuple[str, ...] | str, float | None], ...] = (
    ("python -c pass", "pass", None),
    ("import bstar", "import bstar", 0.3),
    ("import bstar; bstar.deployment(…)",
     "import bstar; bstar.deployment(model='llama-3.1-8b', gpu='h100-sxm-80gb')", None),
    ("bstar --version", ("--version",), None),
    ("bstar --help", ("--help",), None),
    ("bstar model llama-3.1-8b", ("model", "llama-3.1-8b"), 1.0),
    ("bstar model deepseek-r1 --json", ("model", "deepseek-r1", "--json"), 1.0),
    ("bstar memory llama-3.1-70b --tp 4", ("memory", "llama-3.1-70b", "--gpu", "h100-sxm-80gb", "--tp", "4"), 1.0),
    ("bstar explain llama-3.1-8b", ("explain", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--context", "2048"), 1.0),
    ("bstar explain deepseek-r1 --tp 8",
     ("explain", "deepseek-r1", "--gpu", "h200-sxm-141gb", "--tp", "8", "--context", "8192"), 1.0),
    ("bstar curve llama-3.1-8b", ("curve", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--context", "2048"), 1.0),
    ("bstar plan llama-3.1-70b, 1 GPU kind", ("plan", "llama-3.1-70b", "--gpu", "h100-sxm-80gb", *LOAD), 1.0),
    ("bstar plan llama-3.1-70b, 10 GPU kinds", ("plan", "llama-3.1-70b", "--gpu", GPUS, *LOAD), 2.0),
    ("bstar plan deepseek-r1, 10 GPU kinds", ("plan", "deepseek-r1", "--gpu", GPUS, *LOAD), 2.0),
    ("bstar catalog models", ("catalog", "models"), None),
)  # fmt: skip


def seconds(what: tuple[str, ...] | str, runs: int) -> tuple[list[float], int]:
    """(wall seconds of each run, exit code of the last)."""
    code = ["-c", what] if isinstance(what, str) else ["-m", "bstar.interfaces.cli", *what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "COLUMNS": "110"}
    found, status = [], 0
    for _ in range(runs + 1):
        started = time.perf_counter()
        status = subprocess.run([sys.executable, *code], env=environment, capture_output=True).returncode
        found.append(time.perf_counter() - started)
    return found[1:], status  # the first run warms the page cache and writes byte code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'cold start':<44}{'best':>10}{'median':>10}{'asked':>9}")
    missed = 0
    for name, what, limit in CASES:
        times, status = seconds(what, arguments.runs)
        best, middle = min(times), statistics.median(times)
        verdict = "" if limit is None else f"< {limit:g} s"
        late = limit is not None and best > limit
        missed += late
        note = "  MISSED" if late else f"  exit code {status}" if status not in (0, 1) else ""
        print(f"{name:<44}{best * 1e3:>7.0f} ms{middle * 1e3:>7.0f} ms{verdict:>9}{note}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
