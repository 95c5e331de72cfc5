"""How far the step time of `bstar.latency` is from measured TPOT, by a quick formula and without simulation.

    python benchmarks/step_times.py [--worst N]

Each aggregated row of data/measured_serving_points.csv is a closed loop of C clients. Its TPOT is compared with the
step that solves

    step = decode(C, mean context) + prefill of the I/O prompt tokens that each output token brings along, C times

which leaves out queueing, the initial burst and the scheduler's order. Rows with an uncertain layout or a label_note
are left out. Some constants of latency/data were chosen with these rows in view (see there): this is no held-out error.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from bstar.codec.build import build_deployment
from bstar.errors import BstarError
from bstar.latency import decode_step_time, prefill_time
from bstar.specs.deployment import Deployment

DATA = Path(__file__).parent / "data" / "measured_serving_points.csv"


def deployment_of(row: dict[str, str]) -> Deployment:
    """The deployment that a row labels; sizes are floats in the file."""

    def whole(key: str) -> int:
        return int(float(row[key] or 1))

    return build_deployment(
        row["model"],
        row["gpu"],
        tp=whole("attention_tp"),
        attention_dp=whole("attention_dp"),
        ep=whole("expert_parallel"),
        weight_dtype=row["weight_dtype"],
        engine=f"{row['engine']}@{row['engine_version']}" if row["engine_version"] else row["engine"],
        strict_version=False,
    )


def predicted_tpot_s(deployment: Deployment, row: dict[str, str]) -> float:
    """The decode step of all clients plus their share of prefill, seconds."""
    prompt, output, clients = float(row["isl_tokens"]), float(row["osl_tokens"]), float(row["concurrency"])
    if row["harness"] == "inferencex":  # lengths are uniform in [0.8·L, L]
        prompt, output = 0.9 * prompt, 0.9 * output
    step = decode_step_time(deployment, clients, prompt + output / 2).expected_s
    # Prompts of one rank are prefilled one after another; ranks of a data-parallel group at the same time.
    return step + clients / deployment.parallel.attention_dp * prefill_time(deployment, prompt).expected_s / output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--worst", type=int, default=0, help="rows to print")
    arguments = parser.parse_args()
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    refused: dict[str, int] = defaultdict(int)
    worst: list[tuple[float, str]] = []
    with DATA.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["mode"] != "agg" or row["label_note"] or row["layout_note"] or not row["tpot_ms"]:
                continue
            try:
                deployment = deployment_of(row)
                predicted = predicted_tpot_s(deployment, row)
            except BstarError as error:
                refused[str(error)] += 1
                continue
            error = predicted / (float(row["tpot_ms"]) / 1000) - 1
            kind = "moe" if deployment.model.is_moe else "dense"
            for group in (("all", "all"), (row["engine"], "all"), ("all", kind), (row["engine"], kind)):
                errors[group].append(error)
            worst.append((abs(error), f"{row['id']} {row['engine']} {row['model']} {row['gpu']} {error:+.0%}"))
    print(f"{'engine':8} {'models':8} {'rows':>6} {'median':>8} {'mean':>8} {'bias':>8}")
    for (engine, kind), values in sorted(errors.items()):
        e = np.array(values)
        print(
            f"{engine:8} {kind:8} {e.size:6} {np.median(np.abs(e)):8.1%} {np.mean(np.abs(e)):8.1%} {np.median(e):+8.1%}"
        )
    for reason, count in sorted(refused.items(), key=lambda item: -item[1]):
        print(f"refused {count:4}  {reason}")
    for _, text in sorted(worst, reverse=True)[: arguments.worst]:
        print(text)


if __name__ == "__main__":
    main()
