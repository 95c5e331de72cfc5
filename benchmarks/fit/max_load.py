"""Fit what changed in TensorRT-LLM's C++ runtime between its static sessions (0.9) and in-flight batching (0.10 …).

    PYTHONPATH=src python benchmarks/fit/max_load.py           fit, print, write latency/data/fitted_static_later.toml
    PYTHONPATH=src python benchmarks/fit/max_load.py --check   errors of models that the fit did not see

Rows: throughput of 0.17 at maximum load (trtllm-bench), simulated as they ran. Everything that the static batches
fixed stays (fitted_static.toml); four constants move, each for a reason that the releases name:

    attention_decode.*.compute   grouped-query decode attention on tensor cores (XQA) in place of CUDA cores
    attention_decode.*.memory    and how fast it reads the cache
    sequence_s                   batch management in the runtime, overlapped with the step
    moe_gemm.fp8.compute         grouped GEMMs of mixture-of-experts plug-ins, seen at thousands of tokens a step

Search: one constant after the other over a shrinking grid of its logarithm, twice; robust loss (soft-L1, 5 %).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bstar.calibration.bundled import LATENCY, bundled_points
from bstar.calibration.latency_points import LatencyPoint, latency_point
from bstar.calibration.latency_points_mapping import latency_deployment
from bstar.calibration.latency_points_replay import replay_latency_point
from bstar.latency.constant_values import resolved_values
from bstar.latency.constants import Constants, constant_key
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
OUT: Final = Path(__file__).parents[2] / "src" / "bstar" / "latency" / "data" / "fitted_static_later.toml"
SCALE: Final = 0.05
SINCE, UNTIL = "0.10", "1.0"
GENERATIONS: Final = ("ada", "ampere-server", "hopper")
# First guess and the widest factor tried either way.
START: Final = {"attention": (0.3, 3.0), "cache": (0.85, 1.15), "sequence_s": (4e-6, 4.0), "moe": (0.45, 2.0)}
NAMES: Final = {
    "attention": ("attention_decode.narrow.compute", "attention_decode.wide.compute"),
    "cache": ("attention_decode.narrow.memory", "attention_decode.wide.memory"),
    "sequence_s": ("sequence_s",), "moe": ("moe_gemm.fp8.compute",),
}  # fmt: skip
# Every third row in the search; all of them in what is printed.
EVERY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    point: LatencyPoint
    deployment: Deployment
    constants: Constants

    def log_ratio(self, values: dict[str, float]) -> float:
        """log(predicted / measured) of the output throughput."""
        named = {name: value for key, value in values.items() for name in NAMES[key]}
        found = replay_latency_point(self.point, self.deployment, self.constants.replace(named))
        if found.out_tokens_per_s is None or not self.point.out_tokens_per_s:
            return float("nan")
        return float(np.log(found.out_tokens_per_s / self.point.out_tokens_per_s))


def rows_of(points: Sequence[LatencyPoint]) -> list[Row]:
    out = []
    for p in points:
        if p.load != "max_load" or not p.out_tokens_per_s or "PyTorch" in p.engine:
            continue
        deployment = latency_deployment(p).deployment
        if deployment.engine.name == "trtllm" and (0, 10) <= deployment.engine.version_tuple < (1, 0):
            # What an earlier run of this fit found is left out; what the static batches gave is not.
            found = resolved_values(constant_key(deployment), without=(OUT.name,))
            out.append(Row(point=p, deployment=deployment, constants=Constants(found)))
    return out


def errors(rows: Sequence[Row], values: dict[str, float]) -> Floats:
    found = np.array([row.log_ratio(values) for row in rows])
    finite: Floats = found[np.isfinite(found)]
    return finite


def loss(rows: Sequence[Row], values: dict[str, float]) -> float:
    r = errors(rows, values)
    return float(np.mean(np.sqrt(1.0 + (r / SCALE) ** 2) - 1.0))


def fit(rows: Sequence[Row], *, told: Callable[[str], None] = lambda line: None) -> dict[str, float]:
    values = {key: start for key, (start, _) in START.items()}
    for shrink in (1.0, 0.35):
        for key, (_, widest) in START.items():
            mine = [r for r in rows if key != "moe" or r.deployment.model.is_moe]
            factors = np.exp(np.log(widest) * shrink * np.linspace(-1.0, 1.0, 5))
            tried = [values | {key: float(min(values[key] * f, 1.0))} for f in factors]
            scores = [loss(mine, v) for v in tried]
            values = tried[int(np.argmin(scores))]
            told(f"    {key:12s} {values[key]:.3g}   loss {min(scores):.4f}")
    return values


def show(title: str, r: Floats) -> None:
    e = np.abs(np.exp(r) - 1.0)
    print(f"{title}: {e.size} rows, throughput median {np.median(e):.1%} mean {e.mean():.1%}, bias {np.median(r):+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    rows = rows_of([latency_point(p.columns) for p in bundled_points(LATENCY)])
    show("before", errors(rows, {}))
    values = fit(rows[::EVERY], told=print)
    show("fitted", errors(rows, values))
    if options.check:
        unseen: list[Floats] = []
        for model in sorted({r.point.model for r in rows}):
            rest = [r for r in rows if r.point.model != model]
            found = fit(rest[::EVERY])
            unseen.append(errors([r for r in rows if r.point.model == model], found))
            show(f"held out {model}", unseen[-1])
        show("held out by model", np.concatenate(unseen))
    lines = ["# Written by benchmarks/fit/max_load.py; do not edit. TensorRT-LLM's C++ runtime, in-flight batching:",
             "# what differs from its static sessions (fitted_static.toml).", ""]
    for generation in GENERATIONS:
        for key, value in values.items():
            for name in NAMES[key]:
                lines += ["[[value]]", f'name = "{name}"', f"value = {value:.4g}", 'engine = "trtllm"',
                          f'since = "{SINCE}"', f'until = "{UNTIL}"', f'generation = "{generation}"',
                          f"rows = {len(rows)}", ""]
    OUT.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"{OUT} written")


if __name__ == "__main__":
    main()
