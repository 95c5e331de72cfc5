"""Closing the loop on real vLLM on this CPU: bench two loads, calibrate, predict three unseen ones.

    BSTAR_VLLM_VENV=VENV python benchmarks/calibrate_vllm.py [--quick]

VENV is of tools/setup_vllm.sh; about 3 minutes (--quick: 1½); needs the machine for itself. The same steps by hand:

    bstar bench --url … --input uniform:8-96 --output uniform:8-32 --concurrency 1 --out low      (and 8: high)
    bstar calibrate low high --model FOLDER --gpu cpu … --out mine.json
    bstar simulate FOLDER --gpu cpu … --profile mine.json --concurrency 3 …

The unseen loads are a closed loop between the two, one of other lengths, and Poisson arrivals at 60 % of what the
calibrated simulator says that the server carries. Predicted and measured are means over the very same requests. The
median error of throughput and of TPOT over the three is printed; ends with 1 where one is above 10 %, with 2 where
others took more than a quarter of a processor in half of the loads (see tiny_vllm.py): the figures then say little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from real_vllm import server
from tiny_vllm import BUDGET, CONFIG, FLAGS, LENGTH, QUIET, SEATS

import bstar
from bstar.calibration.observations import Observation, figures_of
from bstar.calibration.profile import Profile, calibrated, write_profile
from bstar.calibration.sources import of_run
from bstar.catalog.devices import get_device
from bstar.specs.deployment import Deployment

BAR = 0.10
FIGURES = (("tokens/s", "output_tokens_per_s", 1.0), ("TTFT ms", "ttft_s", 1e3), ("TPOT ms", "tpot_s", 1e3),
           ("E2E ms", "e2e_s", 1e3))
LENGTHS = ("--input", "uniform:8-96", "--output", "uniform:8-32")
OTHER = ("--input", "uniform:24-160", "--output", "uniform:4-48")


def bench(port: int, out: Path, *load: str) -> Observation:
    """`bstar bench` with this load; what it measured."""
    command = [sys.executable, "-m", "bstar", "bench", "--url", f"http://127.0.0.1:{port}", *load, "--out", str(out),
               "--allow-client-limited", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return of_run(out)


def show(name: str, measured: Observation, deployment: Deployment) -> np.ndarray:
    """Predicted beside measured, over the very same requests; returns relative errors of FIGURES."""
    assert measured.sent is not None
    found = figures_of(bstar.simulate(deployment, measured.sent))
    errors = np.array([found[key] / measured.measured[key] - 1.0 for _, key, _ in FIGURES])
    cells = [f"{found[key] * unit:10.1f}{measured.measured[key] * unit:8.1f}{error:+7.1%}"
             for (_, key, unit), error in zip(FIGURES, errors, strict=True)]
    print(f"{name:34}" + "".join(cells), flush=True)
    return errors


def heading(title: str) -> None:
    print(f"\n{title:34}" + "".join(f"{name:>10}{'real':>8}{'error':>7}" for name, _, _ in FIGURES))


def capacity_per_s(deployment: Deployment) -> float:
    """Requests per second of OTHER lengths that the calibrated simulator says the server carries."""
    load = bstar.traffic.closed_loop(2 * SEATS, OTHER[1], OTHER[3], 20 * SEATS)
    return float(bstar.simulate(deployment, load).summary.requests_per_s or 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    scale = 1 if parser.parse_args().quick else 3
    others: list[float] = []
    get_device("cpu")  # measured before the server is there
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny"
        with server(model, CONFIG, FLAGS) as vllm:
            deployment = bstar.deployment(
                model=str(model), gpu=get_device("cpu"), max_num_seqs=SEATS, max_num_batched_tokens=BUDGET,
                max_model_len=LENGTH, enforce_eager=True, enable_prefix_caching=False, async_scheduling=False,
                num_gpu_blocks_override=512,
            )  # fmt: skip

            def run(out: str, count: int, *load: str) -> Observation:
                begun, before = time.monotonic(), vllm.others_s()
                found = bench(vllm.port, folder / out, *load, "--num-requests", str(count * scale))
                others.append((vllm.others_s() - before) / (time.monotonic() - begun))
                return found

            run("warm", 16, *LENGTHS, "--concurrency", str(SEATS))
            low = run("low", 12, *LENGTHS, "--concurrency", "1", "--seed", "1")
            high = run("high", 40, *LENGTHS, "--concurrency", str(SEATS), "--seed", "2")
            profile = bstar.calibrate(deployment, [low, high], name="this machine")
            mine = calibrated(deployment, profile)
            describe(profile, folder)
            heading("calibrated on")
            for title, one in (("1 client", low), (f"{SEATS} clients", high)):
                show(title, one, mine)
            heading("unseen")
            rate = 0.6 * capacity_per_s(mine)
            loads: Sequence[tuple[str, str, int, tuple[str, ...]]] = (
                ("3 clients", "three", 24, (*LENGTHS, "--concurrency", "3", "--seed", "3")),
                ("5 clients, longer", "five", 24, (*OTHER, "--concurrency", "5", "--seed", "4")),
                (f"{rate:.2f} requests/s, longer", "open", 20, (*OTHER, "--rate", f"{rate:.4f}", "--seed", "5")),
            )
            errors = np.array([show(title, run(out, count, *load), mine) for title, out, count, load in loads])
    median = np.median(np.abs(errors), axis=0)
    named = ", ".join(f"{title.split()[0]} {e:.1%}" for (title, _, _), e in zip(FIGURES, median, strict=True))
    print(f"\nmedian error of the unseen loads: {named} (bar {BAR:.0%} for throughput and TPOT); load average "
          f"{os.getloadavg()[0]:.1f}, vLLM's included")
    if np.median(others) > QUIET:
        print(f"the machine was not quiet: others took {np.median(others):.2f} processors; these figures say little")
        sys.exit(2)
    sys.exit(int(max(median[0], median[2]) > BAR))


def describe(profile: Profile, folder: Path) -> None:
    write_profile(profile, folder / "mine.json")
    size = len(json.dumps(profile.to_dict()))
    moved = ", ".join(f"{c.name} {c.prior:.3g} → {c.value:.3g}" for c in profile.constants)
    print(f"profile of {size:,} bytes: {moved}")
    for note in profile.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
