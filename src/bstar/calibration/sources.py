"""Measured points in files: what `bstar calibrate` reads.

    a folder of bstar bench       its very requests are simulated again
    FILE.csv (or .csv.gz)         measured points with the columns of `bstar validate`
    FILE.json, .toml, .yaml       {"points": [{"concurrency": 8, "input_tokens": 512, …}, …]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bstar.calibration.observations import Observation, of_mapping, of_point
from bstar.errors import ConfigError
from bstar.specs.workload import LengthDistribution
from bstar.traffic.load import Traffic


def observations_in(path: Path) -> list[Observation]:
    """The observations of a file or folder. Raises ConfigError naming it and the remedy."""
    if path.is_dir():
        return [of_run(path)]
    if path.name.endswith((".csv", ".csv.gz")):
        from bstar.calibration.points import read_points

        found = [of_point(p) for p in read_points(path) if p.fault is None and (p.ttft_s or p.tpot_s)]
    else:
        from bstar.codec.spec_files import read_mapping

        raw = read_mapping(path, what="points")
        listed = raw.get("points")
        if set(raw) != {"points"} or not isinstance(listed, list) or not all(isinstance(p, Mapping) for p in listed):
            raise ConfigError(f"points {str(path)!r}: must hold one key, points, with a list of measured points")
        found = [of_mapping(one, f"{path.name} points[{number}]") for number, one in enumerate(listed, 1)]
    if not found:
        raise ConfigError(f"points {str(path)!r}: has no row with ttft or tpot; measure some with bstar bench")
    return found


def of_run(path: Path) -> Observation:
    """The observation of a run's folder (`bstar bench --out`). Raises ConfigError where the run is no result."""
    from bstar.measure.folder import read_run

    run = read_run(path)
    verdict = run.summary.get("verdict") or {}
    if verdict.get("valid") is False:
        reasons = "; ".join(str(r) for r in verdict.get("reasons", ())) or "see its summary.json"
        raise ConfigError(f"run {str(path)!r}: is no result of the server ({reasons}); measure again")
    sent = _as_answered(run.traffic, run.table)
    kept = run.measured & (run.table.error == "")
    if not kept.any():
        raise ConfigError(f"run {str(path)!r}: no request of it was answered; measure again")
    rate = None if sent.concurrency is not None else sent.rate_per_s
    return Observation(
        id=path.name, sent=sent, concurrency=sent.concurrency, rate_per_s=rate, measured=figures_in(run.summary),
        input_tokens=_mean_length(run.table.input_tokens[kept]),
        output_tokens=_mean_length(run.table.output_tokens[kept]),
    )  # fmt: skip


def figures_in(summary: Mapping[str, Any]) -> dict[str, float]:
    """Means and rates of a summary of `bstar bench` or `bstar simulate`."""
    out: dict[str, float] = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        mean = (summary.get(name) or {}).get("mean")
        if mean:
            out[name] = float(mean)
    rate = summary.get("output_tokens_per_s")
    return out | ({"output_tokens_per_s": float(rate)} if rate else {})


def _as_answered(traffic: Traffic, table: Any) -> Traffic:
    """The requests with the lengths that the server counted: answers may have ended early."""
    inputs, outputs = (np.array(np.broadcast_to(a, (traffic.num_requests,))) for a in
                       (traffic.input_tokens, traffic.output_tokens))
    whole = np.asarray(table.error == "") & (table.output_tokens > 0) & (table.input_tokens > 0)
    inputs[table.index[whole]] = table.input_tokens[whole]
    outputs[table.index[whole]] = table.output_tokens[whole]
    return replace(traffic, input_tokens=inputs, output_tokens=outputs)


def _mean_length(tokens: Any) -> LengthDistribution:
    mean = float(np.mean(tokens))
    return LengthDistribution(kind="fixed", mean=max(mean, 1.0))
