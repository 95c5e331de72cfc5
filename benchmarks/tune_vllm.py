"""`bstar tune --serve` on real vLLM on this CPU: planted walls are found, and the recommended value beats the default.

    BSTAR_VLLM_VENV=VENV python benchmarks/tune_vllm.py [--quick] [--out FOLDER]

VENV is of tools/setup_vllm.sh; about 12 minutes (--quick: 6), most of it servers that start; needs the machine for
itself. With --out what was measured is kept, and an interrupted benchmark goes on.

The tiny model is served with a KV cache of 24 blocks of 128 tokens (one of them is vLLM's own). Prompts of 100 and
answers of 150 tokens grow into a second block, so a batch preempts when it is larger than 11; the default max_num_seqs
(128 or more) preempts all the time. Checked:

preemption   the sweep (doublings, and what tune adds between two of them) brackets the onset; servers at further values
             tell by vLLM's own counter, num_preemptions, where it is: within one step of the sweep
knee         of the sweep against that of sweep and finer values together: within one step of the finer values (their
             places among these differ by one at most)
recommended  measured against the default on servers of their own: throughput, p99 of TPOT and of E2E

Ends with 1 where the onset or the knee is elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from real_vllm import ROOT

BLOCKS, PROMPT, ANSWER, CLIENTS = 24, 100, 150, 32
SWEEP, FINE = (2, 4, 8, 16, 32), (6, 10, 11, 12, 14, 24)
QUICK, QUICK_FINE = (4, 8, 16), (10, 12)
FLAGS = (
    "--load-format dummy --enforce-eager --host 127.0.0.1 --max-model-len 1024 --no-enable-prefix-caching "
    f"--disable-uvicorn-access-log --served-model-name tiny --num-gpu-blocks-override {BLOCKS}"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served, and where results go."""

    python: Path
    model: Path
    out: Path
    requests: int
    port: int = 18761

    @property
    def template(self) -> str:
        words = "HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_COLOR=0"
        return (f"{words} {self.python} -m vllm.entrypoints.openai.api_server --model {self.model} {FLAGS} "
                f"--port {self.port} --max-num-seqs {{max_num_seqs}}")

    def tune(self, name: str, values: tuple[int, ...], *more: str) -> dict[str, Any]:
        """`bstar tune --serve` with these values; its JSON."""
        command = [
            sys.executable, "-m", "bstar", "tune", "--serve", self.template, "--values", ",".join(map(str, values)),
            "--input", str(PROMPT), "--output", str(ANSWER), "--concurrency", str(CLIENTS), "--num-requests",
            str(self.requests), "--out", str(self.out / name), "--allow-client-limited", "--json", *more,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"bstar tune ended with {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def show(points: list[dict[str, Any]]) -> None:
    print(f"\n{'max_num_seqs':>12}{'tok/s':>9}{'± 95 %':>8}{'TPOT p99':>11}{'E2E p99':>10}{'preempted':>11}{'KV':>6}")
    for p in points:
        figures, server = p["figures"], p["server"]
        width = (p["half_width"] or 0.0) / p["throughput_per_s"]
        print(f"{p['value']:>12}{p['throughput_per_s']:9.0f}{width:8.1%}{figures['tpot_s.p99'] * 1e3:8.1f} ms"
              f"{figures['e2e_s.p99']:8.2f} s{server['preemptions']:11.0f}{server['kv_usage_max']:6.0%}")


def first_preempting(points: list[dict[str, Any]]) -> int | None:
    """The smallest value at which vLLM's own counter moved."""
    return min((p["value"] for p in points if p["server"]["preemptions"] > 0), default=None)


def place_of(value: float, measured: list[int]) -> float:
    """Where a value lies among the measured ones, in steps."""
    return float(np.interp(value, measured, np.arange(len(measured))))


def knee_of_all(points: list[dict[str, Any]]) -> float | None:
    from bstar.measure.sweeps import Point, knee_of

    return knee_of([Point(load=p["value"], throughput_per_s=p["throughput_per_s"], goodput_per_s=0.0,
                          attainment_fraction=1.0) for p in points]).load


def compare(found: dict[str, Any]) -> None:
    pair = found["compared"]
    best, usual = pair["recommended"], pair["default"]
    print(f"\n{'':>12}{'tok/s':>9}{'TPOT p99':>12}{'E2E p99':>10}{'preempted':>11}")
    for name, p in pair.items():
        print(f"{name:>12}{p['throughput_per_s']:9.0f}{p['figures']['tpot_s.p99'] * 1e3:9.1f} ms"
              f"{p['figures']['e2e_s.p99']:8.2f} s{p['server']['preemptions']:11.0f}")
    print(f"recommended against the default: throughput × {best['throughput_per_s'] / usual['throughput_per_s']:.2f}, "
          f"p99 TPOT × {best['figures']['tpot_s.p99'] / usual['figures']['tpot_s.p99']:.2f}, "
          f"p99 E2E × {best['figures']['e2e_s.p99'] / usual['figures']['e2e_s.p99']:.2f}")


def benchmark(setup: Setup, sweep: tuple[int, ...], fine: tuple[int, ...]) -> bool:
    """Runs both sweeps and prints the tables; whether onset and knee are where the finer one has them."""
    found = setup.tune("sweep", sweep)
    finer = setup.tune("fine", fine, "--no-check", "--no-refine")
    every = sorted([*found["points"], *finer["points"]], key=lambda p: p["value"])
    show(every)
    compare(found)
    onset, advice = found["preemption"], found["recommended"]
    true = first_preempting(every)
    right = true is not None and onset["load"] is not None and (onset["low"] or 0) < true <= onset["high"]
    print(f"\npreemption onset: tune between {onset['low']:g} and {onset['high']:g}, vLLM's counter from {true} on: "
          f"{'within one step' if right else 'NOT within one step'}")
    knee, best = found["knee"]["load"], knee_of_all(every)
    close = (knee is None) == (best is None)
    if knee is not None and best is not None:
        values = sorted({p["value"] for p in every})
        close = abs(place_of(knee, values) - place_of(best, values)) <= 1.0
    shown = ["none" if k is None else f"{k:.3g}" for k in (knee, best)]
    print(f"5 % knee: tune {shown[0]} (90 %: {found['knee']['interval_90']}), with the finer values {shown[1]}: "
          f"{'within one step' if close else 'NOT within one step'}")
    print(f"recommended max_num_seqs {advice['value']}: {advice['reason']} ({advice['sure']})")
    print(f"load average {os.getloadavg()[0]:.1f}, vLLM's included")
    return right and close


def main() -> None:
    parser = argparse.ArgumentParser(description="bstar tune on real vLLM on this CPU")
    parser.add_argument("--quick", action="store_true", help="fewer values and requests")
    parser.add_argument("--out", type=Path, help="keep what was measured, or go on with it")
    given = parser.parse_args()
    python = Path(os.environ.get("BSTAR_VLLM_VENV") or ROOT / ".vllm") / "bin" / "python"
    if not python.exists():
        raise SystemExit("no environment with vLLM: make vllm, or set BSTAR_VLLM_VENV")
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch)
        model = out / "model"
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, ROOT / "tests/vllm/make_tiny_model.py", model], check=True, timeout=120)
        setup = Setup(python, model, out, 2 * CLIENTS if given.quick else 6 * CLIENTS)
        good = benchmark(setup, QUICK if given.quick else SWEEP, QUICK_FINE if given.quick else FINE)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
