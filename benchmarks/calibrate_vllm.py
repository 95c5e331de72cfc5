"""Closing the loop on real vLLM on this CPU: bench two loads, calibrate, predict three unseen ones.

    BSTAR_VLLM_VENV=VENV python benchmarks/calibrate_vllm.py [--quick]

VENV is of tools/setup_vllm.sh; about 5 minutes (--quick: 2); needs the machine for itself. The same steps by hand:

    bstar bench --url … --input uniform:8-96 --output uniform:8-32 --concurrency 1 --out low      (and 8: high)
    bstar calibrate low high --model FOLDER --gpu cpu … --out mine.json
    bstar simulate FOLDER --gpu cpu … --profile mine.json --concurrency 3 …

The unseen loads are a closed loop between the two, one of other lengths, and Poisson arrivals at 60 % of what the
calibrated simulator says that the server carries. Predicted and measured are means over the very same requests.

A shared machine is faster in one minute and slower in the next (the same load again: up to 18 % off), so all loads are
measured in turn, in three rounds (--quick: one): the profile is of the two loads of every round, the error of an unseen
load is that of its means over the rounds. The median error of throughput and of TPOT over the three is printed; ends
with 1 where one is above 10 %, with 2 where others took more than a quarter of a processor in half of the loads (see
tiny_vllm.py): the figures then say little.
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
from real_vllm import Server, server
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
ROUNDS = 3
RATE, SHARE = "RATE", 0.6
KNOWN = (
    ("1 client", 12, (*LENGTHS, "--concurrency", "1")),
    (f"{SEATS} clients", 40, (*LENGTHS, "--concurrency", str(SEATS))),
)
UNSEEN = (
    ("3 clients", 24, (*LENGTHS, "--concurrency", "3")),
    ("5 clients, longer", 24, (*OTHER, "--concurrency", "5")),
    (f"{SHARE:.0%} of capacity, longer", 20, (*OTHER, "--rate", RATE)),
)
Runs = dict[str, list[Observation]]


def bench(port: int, out: Path, *load: str) -> Observation:
    """`bstar bench` with this load; what it measured."""
    command = [sys.executable, "-m", "bstar", "bench", "--url", f"http://127.0.0.1:{port}", *load, "--out", str(out),
               "--allow-client-limited", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return of_run(out)


def show(name: str, runs: Sequence[Observation], deployment: Deployment) -> np.ndarray:
    """Predicted beside measured, over the very same requests of all rounds; returns relative errors of FIGURES."""
    found, real = [], []
    for one in runs:
        assert one.sent is not None
        found.append(figures_of(bstar.simulate(deployment, one.sent)))
        real.append(one.measured)
    means = [[float(np.mean([figures[key] for figures in those])) for _, key, _ in FIGURES] for those in (found, real)]
    errors = np.array(means[0]) / np.array(means[1]) - 1.0
    cells = [f"{ours * unit:10.1f}{theirs * unit:8.1f}{error:+7.1%}"
             for (_, _, unit), ours, theirs, error in zip(FIGURES, *means, errors, strict=True)]
    print(f"{name:34}" + "".join(cells), flush=True)
    return errors


def heading(title: str) -> None:
    print(f"\n{title:34}" + "".join(f"{name:>10}{'real':>8}{'error':>7}" for name, _, _ in FIGURES))


def capacity_per_s(deployment: Deployment) -> float:
    """Requests per second of OTHER lengths that the calibrated simulator says the server carries."""
    load = bstar.traffic.closed_loop(2 * SEATS, OTHER[1], OTHER[3], 20 * SEATS)
    return float(bstar.simulate(deployment, load).summary.requests_per_s or 1.0)


def measured(vllm: Server, folder: Path, deployment: Deployment, rounds: int) -> tuple[Runs, list[float]]:
    """The runs of every load, and how much of a processor others took during each."""
    runs: Runs = {}
    others: list[float] = []

    def run(title: str, count: int, load: Sequence[str], seed: int) -> None:
        begun, before = time.monotonic(), vllm.others_s()
        out = folder / f"run-{seed}"
        runs.setdefault(title, []).append(
            bench(vllm.port, out, *load, "--num-requests", str(count), "--seed", str(seed)))
        others.append((vllm.others_s() - before) / (time.monotonic() - begun))

    run("warm", 16, (*LENGTHS, "--concurrency", str(SEATS)), 0)
    rate = ""
    for number in range(rounds):
        for place, (title, count, load) in enumerate((*KNOWN, *UNSEEN)):
            if RATE in load and not rate:
                rate = f"{SHARE * capacity_per_s(calibrated(deployment, profile_of(deployment, runs))):.4f}"
            run(title, count, [rate if word is RATE else word for word in load], 10 * (number + 1) + place)
    return runs, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round")
    rounds = 1 if parser.parse_args().quick else ROUNDS
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
            runs, others = measured(vllm, folder, deployment, rounds)
        profile = profile_of(deployment, runs)
        describe(profile, folder)
    mine = calibrated(deployment, profile)
    heading("calibrated on")
    for title, *_ in KNOWN:
        show(title, runs[title], mine)
    heading("unseen")
    errors = np.array([show(title, runs[title], mine) for title, *_ in UNSEEN])
    median = np.median(np.abs(errors), axis=0)
    named = ", ".join(f"{title.split()[0]} {e:.1%}" for (title, _, _), e in zip(FIGURES, median, strict=True))
    print(f"\nmedian error of the unseen loads: {named} (bar {BAR:.0%} for throughput and TPOT); load average "
          f"{os.getloadavg()[0]:.1f}, vLLM's included")
    if np.median(others) > QUIET:
        print(f"the machine was not quiet: others took {np.median(others):.2f} processors; these figures say little")
        sys.exit(2)
    sys.exit(int(max(median[0], median[2]) > BAR))


def profile_of(deployment: Deployment, runs: Runs) -> Profile:
    """Of the two known loads, as often as they were measured."""
    return bstar.calibrate(deployment, [one for title, *_ in KNOWN for one in runs[title]], name="this machine")


def describe(profile: Profile, folder: Path) -> None:
    write_profile(profile, folder / "mine.json")
    size = len(json.dumps(profile.to_dict()))
    moved = ", ".join(f"{c.name} {c.prior:.3g} → {c.value:.3g}" for c in profile.constants)
    print(f"profile of {size:,} bytes: {moved}")
    for note in profile.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
