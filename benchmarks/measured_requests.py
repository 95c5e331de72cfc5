"""Two real vLLM 0.19 runs, request by request, against the simulator.

    python benchmarks/measured_requests.py [--calibrate]

300 ShareGPT-like requests at 10 per second on one GPU each (tests/data/measured_requests, from LLMServingSim): the RTX
4090 is deep in overload and preempts, the RTX PRO 6000 is saturated. The arrivals, the lengths and the engine's flags
are those of the run; the step times come from the catalog, nothing is fitted. The PRO 6000's file names no edition:
the Server Edition is taken.

--calibrate fits two numbers for each run, the share of bandwidth and of compute that the catalog's step times are off
by, to the mean TTFT and the mean TPOT of the first 100 requests, and compares the other 200.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from bstar.codec.build import build_deployment
from bstar.sim.result import SimResult
from bstar.sim.run import simulate
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "measured_requests"
RUNS = {"rtx4090_llama-3.1-8b": "rtx-4090", "rtxpro6000_llama-3.1-8b": "rtx-pro-6000-server"}
CALIBRATION_REQUESTS = 100
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run in order of arrival; latencies in seconds."""

    deployment: Deployment
    traffic: Traffic
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


def read(name: str, gpu: str) -> Run:
    """The run called `name` and the deployment that its .json states."""
    facts = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    flags, cache = facts["engine_kwargs"], facts["kv_cache"] or {}
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["queued_s"]))
    column = {key: np.array([float(row[key]) for row in rows]) for key in rows[0] if key != "request"}
    deployment = build_deployment(
        "llama-3.1-8b",
        gpu,
        engine="vllm@" + facts["engine"].split()[-1],
        max_num_seqs=flags["max_num_seqs"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        max_model_len=flags["max_model_len"],
        gpu_memory_utilization=cache.get("gpu_memory_utilization", 0.9),
        num_gpu_blocks_override=cache.get("num_gpu_blocks"),
    )
    arrival, output = column["queued_s"], column["output_tokens"]
    return Run(
        deployment=deployment,
        traffic=Traffic(
            arrival_s=arrival,
            input_tokens=column["input_tokens"].astype(np.int64),
            output_tokens=output.astype(np.int64),
        ),
        ttft_s=column["first_token_s"] - arrival,
        tpot_s=(column["last_token_s"] - column["first_token_s"]) / np.maximum(output - 1, 1),
        e2e_s=column["last_token_s"] - arrival,
    )


def scaled(deployment: Deployment, bandwidth: float, compute: float) -> Deployment:
    """The deployment on a device with this much more bandwidth and compute."""
    device = deployment.device
    peaks = {dtype: value * compute for dtype, value in device.peak_flops_per_s.items()}
    changed = replace(
        device, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * bandwidth, peak_flops_per_s=peaks, unverified=()
    )
    return replace(deployment, device=changed)


def simulated(run: Run, deployment: Deployment) -> dict[str, Floats]:
    """TTFT, TPOT and E2E of every request."""
    result: SimResult = simulate(deployment, run.traffic)
    output = np.maximum(run.traffic.output_tokens - 1, 1)
    return {
        "ttft": result.first_token_s - result.arrival_s,
        "tpot": (result.finish_s - result.first_token_s) / output,
        "e2e": result.finish_s - result.arrival_s,
    }


def errors(run: Run, found: dict[str, Floats], part: slice) -> dict[str, tuple[float, float]]:
    """Relative errors of (mean, p95) of each metric over the requests of `part`."""
    out = {}
    for name, real in (("ttft", run.ttft_s), ("tpot", run.tpot_s), ("e2e", run.e2e_s)):
        a, b = found[name][part], real[part]
        out[name] = (float(a.mean() / b.mean() - 1), float(np.percentile(a, 95) / np.percentile(b, 95) - 1))
    return out


def calibrated(run: Run) -> tuple[float, float]:
    """Factors on bandwidth and compute that bring the first requests' mean TTFT and TPOT closest."""
    part = slice(0, CALIBRATION_REQUESTS)

    def loss(x: Floats) -> float:
        found = errors(run, simulated(run, scaled(run.deployment, *np.exp(x))), part)
        return float(sum(np.log1p(found[name][0]) ** 2 for name in ("ttft", "tpot")))

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-7, "maxiter": 120})
    bandwidth, compute = np.exp(best.x)
    return float(bandwidth), float(compute)


def show(name: str, found: dict[str, tuple[float, float]]) -> None:
    """One line a run."""
    print(f"{name:42}" + "".join(f"  {k} {m:+6.1%} {p:+6.1%}" for k, (m, p) in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="simulated against measured requests: errors of the mean and the p95")
    parser.add_argument("--calibrate", action="store_true")
    arguments = parser.parse_args()
    for name, gpu in RUNS.items():
        run = read(name, gpu)
        show(f"{gpu}, catalog", errors(run, simulated(run, run.deployment), slice(None)))
        if arguments.calibrate:
            bandwidth, compute = calibrated(run)
            found = simulated(run, scaled(run.deployment, bandwidth, compute))
            show(f"  bandwidth × {bandwidth:.3f}, compute × {compute:.3f}", errors(run, found, slice(100, None)))


if __name__ == "__main__":
    main()
