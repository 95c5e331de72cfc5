"""Real vLLM on this CPU against the simulator: calibrated on a sweep, then an unseen load predicted.

    BSTAR_VLLM_VENV=VENV python benchmarks/tiny_vllm.py [--quick]

VENV is of tools/setup_vllm.sh. Takes 5 to 6 minutes, --quick about 1½; needs the machine for itself.

A Llama-shaped model with random weights (292 M parameters, 0.58 GB: more than the caches hold) is served by real vLLM;
prompts are random token ids, lengths are exact (ignore_eos), prefix caching is off.

1. Sweep: closed loops of 1, 2, 4 and 8 clients, prompts of 8-96 tokens, answers of 8-32.
2. Calibration: the deployment on the device `cpu` (bandwidth and FLOP/s as bstar measures them here) gets five physical
   constants: factors on bandwidth and on compute (on the device, as in measured_requests.py), and seconds per step, per
   sequence and step, and per request outside the steps (in place of an engine's assumed overheads on a GPU). One core
   reads and multiplies in turn: compute and memory time add up (smoothing 1), where a GPU overlaps them. The constants
   are the least squares of log(simulated / measured) over each loop's throughput, mean TTFT of shorter and of longer
   prompts, and mean TPOT; the simulated figures come from simulating the loop, request by request, not from a formula.
3. Prediction: open loops (Poisson) of other lengths (24-160, 4-48) at 60 % and 90 % of the capacity that the calibrated
   simulator finds for them. Measured and predicted are means over the same requests at the same intended times. A
   figure's error is the median over the runs; ends with 1 where one is above 10 %.

"others" are the processors that everybody else on the machine took during a run: the simulator cannot know of them.
Where they are above a quarter of one in half the runs or more, in the sweep or after it, the verdict is 2: not quiet.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from real_vllm import Floats, Ints, Load, Measured, Server, run_load, server
from scipy.optimize import least_squares

import bstar
from bstar.catalog.devices import get_device
from bstar.sim.deployed import DeployedEngine, deployed_engine
from bstar.sim.ways import way_of
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic

CONFIG: dict[str, object] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
SEATS, BUDGET, LENGTH = 8, 512, 1024
FLAGS = (
    f"--max-num-seqs {SEATS} --max-num-batched-tokens {BUDGET} --max-model-len {LENGTH} "
    "--no-enable-prefix-caching --no-async-scheduling"
).split()
BAR = 0.10
QUIET = 0.25
FIGURES = ("throughput", "TTFT", "TPOT", "E2E")
# First guesses: bandwidth ×, compute ×, seconds per step, per sequence and step, per request.
FIRST = np.array([1.0, 4.0, 5e-3, 2e-4, 5e-3])
# Pull towards the first guesses, against errors of 1: weak, but for the bandwidth. Every step reads all weights, so one
# model hardly tells the time of reading them from a fixed time per step; the bandwidth measured here is a good guess.
PULL = np.array([0.1, 0.003, 0.003, 0.003, 0.003])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long what is measured, in seconds."""

    clients: tuple[int, ...]
    loop_s: float
    open_s: float
    repeats: int
    most_s: int


FULL = Plan(clients=(1, 2, 4, 8), loop_s=15.0, open_s=22.0, repeats=4, most_s=360)
QUICK = Plan(clients=(1, 2, 8), loop_s=6.0, open_s=8.0, repeats=1, most_s=150)


def lengths(
    rng: np.random.Generator, count: int, prompt: tuple[int, int], answer: tuple[int, int]
) -> tuple[Ints, Ints]:
    """Uniform lengths, bounds included."""
    return rng.integers(prompt[0], prompt[1] + 1, count), rng.integers(answer[0], answer[1] + 1, count)


def calibrated(deployment: Deployment, constants: Floats) -> DeployedEngine:
    """The engine with these five constants."""
    bandwidth, compute, per_step_s, per_sequence_s, per_request_s = (float(value) for value in constants)
    device = deployment.device
    changed = replace(
        device, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * bandwidth,
        peak_flops_per_s={dtype: value * compute for dtype, value in device.peak_flops_per_s.items()},
    )  # fmt: skip
    engine = deployed_engine(replace(deployment, device=changed))
    model = replace(engine.model, per_step_s=per_step_s, per_sequence_s=per_sequence_s, smoothing=1.0)
    return replace(engine, model=model, per_request_s=per_request_s)


def simulated(engine: DeployedEngine, load: Measured | Load, clients: int) -> Measured:
    """The same requests in the simulator: those of a closed loop of `clients`, or (0) at their intended times."""
    count = len(load.input_tokens)
    intended = load.intended_s if isinstance(load, Measured) else load.arrival_s
    arrival = np.full(count, np.nan) if clients or intended is None else intended.copy()
    arrival[:clients] = 0.0
    outside = engine.per_request_s
    traffic = Traffic(
        arrival_s=arrival + outside, input_tokens=load.input_tokens, output_tokens=load.output_tokens,
        think_s=np.full(count, outside), concurrency=min(clients, count) or None,
    )  # fmt: skip
    run = way_of("continuous").run(engine, traffic, until_s=np.inf, progress=None, implementation="auto")
    sent = run.arrival_s - outside
    return Measured(
        input_tokens=load.input_tokens, output_tokens=load.output_tokens, intended_s=sent, sent_s=sent,
        first_s=run.first_token_s, last_s=run.finish_s,
    )  # fmt: skip


def tokens_per_s(run: Measured) -> float:
    """Output tokens per second of the whole run."""
    return float(run.output_tokens.sum() / (run.last_s.max() - run.intended_s.min()))


def figures(run: Measured) -> Floats:
    """Output tokens per second, mean TTFT, TPOT and E2E in seconds."""
    return np.array([tokens_per_s(run), run.ttft_s.mean(), run.tpot_s.mean(), run.e2e_s.mean()])


def traits(run: Measured, clients: int) -> Floats:
    """What is fitted of a closed loop: output tokens per second, mean TTFT of short and long prompts, mean TPOT.

    Without the burst of first requests, which real clients do not send in the same instant.
    """
    later = np.arange(len(run.input_tokens)) >= clients
    long = run.input_tokens > np.median(run.input_tokens)
    ttft = [run.ttft_s[later & part].mean() for part in (~long, long)]
    return np.array([tokens_per_s(run), *ttft, run.tpot_s[later].mean()])


def fit(deployment: Deployment, sweep: dict[int, Measured]) -> Floats:
    """The five constants for which the simulated sweep is closest to the measured one."""
    measured = {clients: traits(run, clients) for clients, run in sweep.items()}

    def residuals(x: Floats) -> Floats:
        engine = calibrated(deployment, FIRST * np.exp(x))
        found = [np.log(traits(simulated(engine, run, c), c) / measured[c]) for c, run in sweep.items()]
        return np.concatenate([*found, PULL * x])

    def slopes(x: Floats) -> Floats:
        # Steps of 1 %: much smaller ones see single requests change places.
        here = residuals(x)
        return np.stack([(residuals(x + 0.01 * unit) - here) / 0.01 for unit in np.eye(len(x))], axis=1)

    best = least_squares(residuals, np.zeros(len(FIRST)), jac=slopes, max_nfev=40)
    constants: Floats = FIRST * np.exp(best.x)
    return constants


def heading(name: str) -> None:
    columns = ("tokens/s", "TTFT ms", "TPOT ms", "E2E ms")
    print(f"\n{name:36}" + "".join(f"{column:>10}{'real':>8}{'error':>7}" for column in columns))


def show(name: str, found: Floats, real: Floats) -> Floats:
    """Predicted beside measured; returns the relative errors."""
    errors: Floats = found / real - 1.0
    cells = zip(found, real, errors, (1.0, 1e3, 1e3, 1e3), strict=True)
    print(f"{name:36}" + "".join(f"{f * unit:10.1f}{r * unit:8.1f}{e:+7.1%}" for f, r, e, unit in cells), flush=True)
    return errors


@dataclass(frozen=True, slots=True)
class Watched:
    """A measured load, and the processors that others took meanwhile."""

    run: Measured
    others: float

    @property
    def text(self) -> str:
        return f"{len(self.run.input_tokens):4} requests, others {self.others:.2f}"


def watched(vllm: Server, load: Load, seed: int) -> Watched:
    """`run_load`, with an eye on the rest of the machine."""
    begun, others = time.monotonic(), vllm.others_s()
    run = run_load(vllm.port, load, seed)
    return Watched(run, max((vllm.others_s() - others) / (time.monotonic() - begun), 0.0))


def measure_sweep(vllm: Server, plan: Plan) -> dict[int, Watched]:
    """The closed loops, after a warm-up."""
    sizes = lengths(np.random.default_rng(1), 2000, (8, 96), (8, 32))
    run_load(vllm.port, Load(*sizes, clients=SEATS, seconds=min(5.0, plan.loop_s / 2)), seed=0)
    loops = {clients: Load(*sizes, clients=clients, seconds=plan.loop_s) for clients in plan.clients}
    return {clients: watched(vllm, load, seed=clients) for clients, load in loops.items()}


def unseen(rng: np.random.Generator, rate_per_s: float, seconds: float) -> Load:
    """A Poisson load of lengths that the sweep did not have."""
    count = max(round(rate_per_s * seconds), 4)
    sizes = lengths(rng, count, (24, 160), (4, 48))
    return Load(*sizes, arrival_s=np.cumsum(rng.exponential(1.0 / rate_per_s, count)))


def capacity_per_s(engine: DeployedEngine) -> float:
    """Requests per second that the engine serves when there always are some waiting."""
    load = unseen(np.random.default_rng(7), 100.0, 4.0)
    run = simulated(engine, replace(load, arrival_s=np.zeros(len(load.input_tokens))), 0)
    return float(len(load.input_tokens) / run.last_s.max())


def predict(vllm: Server, engine: DeployedEngine, plan: Plan, end: float) -> tuple[Floats, list[float]]:
    """Measure and predict the unseen loads as often as there is time before `end`: (runs, figures) errors; others."""
    capacity = capacity_per_s(engine)
    heading(f"unseen, capacity {capacity:.2f} requests/s")
    rows, others = [], []
    for repeat in range(plan.repeats):
        if repeat and time.monotonic() + 2.6 * plan.open_s > end:
            break
        for share in (0.6, 0.9):
            load = unseen(np.random.default_rng([repeat, round(100 * share)]), share * capacity, plan.open_s)
            real = watched(vllm, load, seed=100 + repeat)
            found = figures(simulated(engine, real.run, 0))
            rows.append(np.abs(show(f"{share:.0%} {real.text}", found, figures(real.run))))
            others.append(real.others)
    return np.array(rows), others


def benchmark(vllm: Server, folder: Path, plan: Plan, end: float) -> int:
    """Sweep, calibration, prediction; 0: every median error is within the bar, 1: not, 2: the machine was not quiet."""
    before = os.getloadavg()[0]
    sweep = measure_sweep(vllm, plan)
    deployment = bstar.deployment(
        model=str(folder), gpu=get_device("cpu"), max_num_seqs=SEATS, max_num_batched_tokens=BUDGET,
        max_model_len=LENGTH, enforce_eager=True, enable_prefix_caching=False, async_scheduling=False,
        num_gpu_blocks_override=512,
    )  # fmt: skip
    constants = fit(deployment, {clients: real.run for clients, real in sweep.items()})
    engine = calibrated(deployment, constants)
    device = engine.deployment.device
    print(
        f"calibrated: bandwidth {device.bandwidth_bytes_per_s / 1e9:.1f} GB/s (measured × {constants[0]:.2f}), "
        f"bf16 {device.peak('bf16') / 1e9:.0f} GFLOP/s (× {constants[1]:.2f}),\n            "
        f"{constants[2] * 1e3:.2f} ms a step, {constants[3] * 1e3:.2f} ms a sequence and step, "
        f"{constants[4] * 1e3:.1f} ms a request"
    )
    heading("sweep, fitted")
    for clients, real in sweep.items():
        show(f"{clients} clients {real.text}", figures(simulated(engine, real.run, clients)), figures(real.run))
    errors, others = predict(vllm, engine, plan, end)
    median = np.median(errors, axis=0)
    named = ", ".join(f"{name} {error:.1%}" for name, error in zip(FIGURES, median, strict=True))
    print(f"\nmedian error of {len(errors)} runs: {named}; of all {np.median(errors):.1%} (bar {BAR:.0%})")
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after (vLLM's included)")
    if max(np.median(others), np.median([real.others for real in sweep.values()])) > QUIET:
        print("the machine was not quiet: these figures say little")
        return 2
    return int((median > BAR).any())


def out_of_time(*_: object) -> None:
    raise SystemExit("ended: out of time, or asked to")


def main() -> None:
    parser = argparse.ArgumentParser(description="the simulator against real vLLM on this CPU")
    parser.add_argument("--quick", action="store_true", help="a short sweep and one run at each load")
    plan = QUICK if parser.parse_args().quick else FULL
    for number in (signal.SIGTERM, signal.SIGALRM):  # the server is ended on the way out
        signal.signal(number, out_of_time)
    signal.alarm(plan.most_s)
    begun = time.monotonic()
    get_device("cpu")  # measured before the server is there
    # The kernel is compiled now.
    bstar.simulate(bstar.deployment(model="llama-3.1-8b", gpu="h100"), bstar.traffic.closed_loop(1, 20, 2, 2))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        with server(model, CONFIG, FLAGS) as vllm:
            print(f"vLLM is ready after {time.monotonic() - begun:.0f} s")
            verdict = benchmark(vllm, model, plan, begun + plan.most_s - 15)
    sys.exit(verdict)


if __name__ == "__main__":
    main()
