"""What `bstar plan` says of its best candidates, against the simulator on the very deployments that it launches.

    python benchmarks/plan_simulated.py [--questions 40] [--seed 0] [--simulate]

Random questions (models, GPUs, lengths, rates, SLOs); of each the three best candidates are simulated under Poisson
arrivals at the rate of one replica, which is what the plan assumes of the router. Printed: predicted / simulated − 1 of
mean TPOT and TTFT, by kind of layout; the share of candidates whose simulated attainment is more than a hundredth below
what was asked, and of those with several replicas the share that would do with one less.
The rows that are furthest apart come last. The closed forms are checked, not the step times: both have the same.

With --simulate the plan simulates these candidates itself (`bstar plan --simulate 3`); they are then checked with other
requests than the plan had.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import numpy as np

import bstar
from bstar.metrics.summary import RunSummary
from bstar.planning.results import Candidate
from bstar.specs.slo import Slo
from bstar.traffic import poisson

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "llama-3.3-70b", "deepseek-v2-lite", "qwen3-235b-a22b",
          "gpt-oss-120b", "deepseek-r1", "mixtral-8x7b")  # fmt: skip
GPUS = ("a100-sxm-80gb", "h100-sxm-80gb", "l40s", "h200-sxm-141gb", "b200-sxm-180gb")
LENGTHS = (("lognormal:mean=1500,cv=1", 64), (2000, 200), ("lognormal:mean=800,cv=1", "lognormal:mean=300,cv=1"),
           (200, 600), (4000, 1000), (1000, "uniform:50-500"))  # fmt: skip
SLOS = ("ttft=5s,tpot=50ms", "ttft=2s,tpot=50ms", "chat", "tpot=25ms", "ttft=1s", "e2e=30s")
REQUESTS, SHOWN = 3000, 3
LONG = 30_000  # what is just too much shows in a long run only


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate: predicted over simulated − 1, and attainment of both; `fewer`: with one replica less."""

    name: str
    kind: str
    tpot: float
    ttft: float
    planned: float
    simulated: float
    asked: float
    fewer: float


def kind_of(candidate: Candidate) -> str:
    layout = candidate.layout
    if layout.attention_dp > 1:
        return "data-parallel attention"
    return "pipeline" if layout.pp > 1 else "expert parallel" if layout.ep > 1 else "tensor parallel"


def row_of(name: str, candidate: Candidate, load: tuple[int | str, int | str], rate: float, slo: Slo) -> Row:
    def simulated(replicas: int, count: int = REQUESTS) -> RunSummary:
        traffic = poisson(rate / replicas, *load, count, seed=1, warmup_requests=count // 6)
        return bstar.simulate(candidate.deployment, traffic, slo=slo).summary

    seen, said = simulated(candidate.replicas), candidate.expected
    more = candidate.replicas > 1
    return Row(
        name=f"{name} {candidate.deployment.device.id} {candidate.layout} × {candidate.replicas}",
        kind=kind_of(candidate), tpot=(said.tpot_s.mean or 0.0) / (seen.tpot_s.mean or np.nan) - 1.0,
        ttft=(said.ttft_s.mean or 0.0) / (seen.ttft_s.mean or np.nan) - 1.0,
        planned=candidate.slo_attainment_fraction, simulated=seen.slo_attainment_fraction,
        asked=slo.attainment_fraction,
        fewer=simulated(candidate.replicas - 1, LONG).slo_attainment_fraction if more else float("nan"),
    )  # fmt: skip


def rows_of(draw: random.Random, simulate: int) -> list[Row]:
    """The rows of one question; none where nothing is feasible."""
    model, gpus, load = draw.choice(MODELS), draw.sample(GPUS, 2), draw.choice(LENGTHS)
    rate, slo = draw.choice((1.0, 4.0, 12.0, 40.0)), draw.choice(SLOS)
    found = bstar.plan(model, gpus, input_tokens=load[0], output_tokens=load[1], rate_per_s=rate, slo=slo,
                       simulate=simulate)  # fmt: skip
    name = f"{model} {load[0]}/{load[1]} {rate:g}/s {slo}"
    return [row_of(name, candidate, load, rate, found.slo) for candidate in found.candidates[:SHOWN]]


def show(rows: list[Row]) -> None:
    heads = zip(("rows", "TPOT median", "|TPOT| p90", "TTFT median", "|TTFT| p90", "too optimistic",
                 "too cautious"), (6, 13, 12, 13, 12, 16, 14), strict=True)
    print(" " * 26 + "".join(f"{head:>{width}}" for head, width in heads))
    for kind in (*sorted({r.kind for r in rows}), "all"):
        mine = [r for r in rows if kind in (r.kind, "all")]
        tpot, ttft = (np.array([getattr(r, name) for r in mine]) for name in ("tpot", "ttft"))
        short = np.mean([r.simulated < r.asked - 0.01 for r in mine])
        many = [r for r in mine if not np.isnan(r.fewer)]
        cautious = np.mean([r.fewer >= r.asked for r in many]) if many else np.nan
        print(f"{kind:26}{len(mine):6}{np.nanmedian(tpot):+13.1%}{np.nanquantile(np.abs(tpot), 0.9):12.1%}"
              f"{np.nanmedian(ttft):+13.1%}{np.nanquantile(np.abs(ttft), 0.9):12.1%}{short:16.1%}{cautious:14.1%}")
    print("\nfurthest apart in TPOT")
    for r in sorted(rows, key=lambda r: -abs(np.nan_to_num(r.tpot)))[:12]:
        print(f"TPOT {r.tpot:+6.1%}  TTFT {r.ttft:+7.1%}  attained {r.planned:.3f} planned, {r.simulated:.3f} "
              f"simulated  {r.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="plans against the simulator")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulate", action="store_true", help="the plan simulates its best candidates")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    rows = [row for _ in range(given.questions) for row in rows_of(draw, SHOWN if given.simulate else 0)]
    show(rows)


if __name__ == "__main__":
    main()
