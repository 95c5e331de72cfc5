"""Fit the constants of the step-time model to measured serving points, and say how good they are on unseen ones.

    PYTHONPATH=src python benchmarks/fit [--rounds N] [--every N] [--no-ablation] [--out FOLDER]

Everything comes from data in the repository; the seed is fixed. About 4 minutes on one core. Written:

    src/bstar/latency/data/fitted.toml        the constants, by engine and GPU generation, with standard errors and rows
    src/bstar/latency/data/fit_report.json    held-out errors, ablation, the peer on the same rows
    benchmarks/fit/REPORT.md                  the same to read
    benchmarks/fit/residuals.jsonl            residuals of held-out rows, for the ranges (benchmarks/residuals.py)

Method: each row is simulated as its harness ran it (closed loop, initial burst, random lengths) with the constants of
the round before; its steps are kept as 48 weighted bins, so that its mean TPOT and TTFT are known as functions of the
constants. log(predicted / measured) is then regressed (soft L1, TTFT at half weight) on the constants, each pulled to
its prior, and the rows are simulated again. Rows of runs that no steady state explains (`points.py`) are not fitted
but count in every error. With --out nothing in the repository is touched.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from parameters import PARAMETERS  # noqa: E402
from points import fit_points, folds  # noqa: E402
from sensitivity import forget_fitted  # noqa: E402
from solve import standard_errors  # noqa: E402
from write import write_constants  # noqa: E402

import report  # noqa: E402
from fit import fit, held_out, summary  # noqa: E402

DATA = HERE.parents[1] / "src" / "bstar" / "latency" / "data"
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2, help="times to simulate (default 2)")
    parser.add_argument("--every", type=int, default=1, help="every N-th row only")
    parser.add_argument("--no-ablation", action="store_true")
    parser.add_argument("--out", type=Path, help="write everything into this folder instead of into the repository")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    forget_fitted()
    points = fit_points(every=arguments.every)
    fitted = fit(points, PARAMETERS, rounds=arguments.rounds)
    ways = folds(points, SEED)
    held = {"fit": fitted.problem.errors(fitted.values)} | {key: held_out(fitted, fold) for key, fold in ways.items()}
    for key, errors in held.items():
        print(f"{report.NAMES[key]:50} {summary(errors)}")
    errors = standard_errors(fitted.problem, fitted.steady, fitted.values, ways["group"])
    found = {
        "method": "Rows are held out of the fit in four ways (benchmarks/fit): a random fifth of every GPU x engine x "
                  "model; a GPU x engine x model; a model; a GPU x engine. Rows of unsteady runs count.",
        "heldout": report.held_out_rows(fitted, held), "peer": report.beside_peer(fitted, held),
        "noise": report.noise_floor(), "values": report.values(fitted, errors),
        "unsteady": sorted({f"{p.group}: {p.unsteady}" for p in points if p.unsteady}),
    }  # fmt: skip
    if not arguments.no_ablation:
        found["ablation"] = report.ablation(fitted, ways, held)
    data, here = (DATA, HERE) if arguments.out is None else (arguments.out, arguments.out)
    here.mkdir(parents=True, exist_ok=True)
    write_constants(fitted, errors, data / "fitted.toml")
    (data / "fit_report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    parts = ["# The fit of the step-time constants", found["method"], "## Held out", report.table(found["heldout"]),
             "## The peer (AIConfigurator 0.12) on the rows that it answers", report.table(found["peer"]),
             "## Constants", report.constants_table(fitted, errors),
             "## What each constant is worth (errors without it, less errors with it)",
             report.table(found.get("ablation", [{"constant": "not done"}])),
             "## Rows that are not fitted", "\n".join(f"- {text}" for text in found["unsteady"])]  # fmt: skip
    (here / "REPORT.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    report.write_residuals(points, held, here / "residuals.jsonl")
    if arguments.out is not None:
        report.write_rows(points, held, here / "rows.csv")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
