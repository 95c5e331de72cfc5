"""Two real vLLM runs, request by request: the simulator with the catalog's step times, nothing fitted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from measured_requests import RUNS, errors, read, simulated


@pytest.mark.parametrize(("name", "gpu"), RUNS.items())
def test_means_within_10_percent_and_p95_within_15(name: str, gpu: str) -> None:
    run = read(name, gpu)
    for metric, (mean, p95) in errors(run, simulated(run, run.deployment), slice(None)).items():
        assert abs(mean) < 0.10, metric
        assert abs(p95) < 0.15, metric
