"""Writes the ranges of predictions, `src/bstar/calibration/data/residuals.toml`, from residuals of held-out rows.

    python benchmarks/fit … (writes benchmarks/fit/residuals.jsonl: rows that the constants had not seen)
    python benchmarks/calibration.py --residuals benchmarks/fit/residuals_calibrated.jsonl
    python benchmarks/residuals.py [--check]

What a row was bound by comes from a replay where the record does not say it. --check prints coverage only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bstar.calibration.bundled import SERVING, bundled_points
from bstar.calibration.replay import replay
from bstar.calibration.residuals import Residual, coverage, group_tails, read_records, residual_table

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "bstar" / "calibration" / "data" / "residuals.toml"
FOLDER = ROOT / "benchmarks" / "fit"
SOURCES = ("residuals.jsonl", "residuals_calibrated.jsonl")


def records() -> list[Residual]:
    """All held-out residuals, with what each row was bound by."""
    lines = [text for name in SOURCES for text in (FOLDER / name).read_text(encoding="utf-8").splitlines() if text]
    raw = [json.loads(text) for text in lines]
    points = {p.id: p for p in bundled_points(SERVING)}
    bounds: dict[str, str] = {}
    for one in raw:
        if not one["bound_by"]:
            if one["id"] not in bounds:
                regime = replay(points[one["id"]]).regime
                bounds[one["id"]] = regime.bound_by if regime is not None else "weight_bandwidth"
            one["bound_by"] = bounds[one["id"]]
    return read_records(json.dumps(one) for one in raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="print coverage only")
    arguments = parser.parse_args()
    found = records()
    for key, (share, n) in coverage(found, group_tails(found)).items():
        print(f"{key:40} {share:6.1%} of {n}")
    if not arguments.check:
        TARGET.write_text(residual_table(found, source="cross-validation by GPU, engine and model; "
                                         "benchmarks/fit, benchmarks/calibration.py"), encoding="utf-8")


if __name__ == "__main__":
    main()
