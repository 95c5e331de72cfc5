"""Runs as files: what is written is what was simulated."""

from __future__ import annotations

import builtins
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loads import deployed, loads, tight

from bstar.errors import ConfigError, SpecError
from bstar.sim.compare import compare
from bstar.sim.export import REQUEST_FORMATS, request_columns, write_requests, write_trace
from bstar.sim.result import SimResult
from bstar.sim.run import simulate
from bstar.traffic import poisson


@pytest.fixture(scope="module")
def result() -> SimResult:
    return simulate(tight(), loads()["bursty"])


def read(path: Path) -> dict[str, list[Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        found: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
        return found
    if path.suffix == ".csv":
        with path.open() as file:
            rows = list(csv.DictReader(file))
        return {k: [r[k] for r in rows] for k in rows[0]}
    rows = [json.loads(r) for r in path.read_text().splitlines()] if path.suffix == ".jsonl" else json.loads(
        path.read_text())
    return {k: [r[k] for r in rows] for k in rows[0]}


@pytest.mark.parametrize("suffix", REQUEST_FORMATS)
def test_every_format_has_every_request(result: SimResult, suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"requests{suffix}"
    write_requests(result, path)
    table = read(path)
    assert set(table) == set(request_columns(result))
    assert [float(v) for v in table["finish_s"]] == result.finish_s.tolist()
    assert [int(v) for v in table["num_preemptions"]] == result.num_preemptions.tolist()
    single = np.flatnonzero(result.output_tokens == 1)
    for r in single:  # no TPOT: nothing, not 0 and not NaN
        assert table["tpot_s"][r] in (None, "")


def test_parquet_without_pyarrow_says_what_to_do(
    result: SimResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(SpecError, match=r"pip install 'bstar\[parquet\]'"):
        write_requests(result, tmp_path / "r.parquet")


def test_paths_that_cannot_be_written(result: SimResult, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must end with"):
        write_requests(result, tmp_path / "r.xls")
    with pytest.raises(ConfigError, match="there is no folder"):
        write_requests(result, tmp_path / "none" / "r.csv")
    with pytest.raises(ConfigError):
        write_trace(result, tmp_path)


def test_the_trace_is_a_chrome_trace(result: SimResult, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(result, path)
    events = json.loads(path.read_text())["traceEvents"]
    steps = [e for e in events if e.get("cat") == "step"]
    assert sum(e["args"]["steps"] for e in steps) == result.steps.num_steps
    assert sum(e["dur"] for e in steps) / 1e6 == pytest.approx(result.steps.busy_s, rel=1e-4)
    assert sum(e["args"]["preempted"] for e in steps) == result.num_preemptions.sum()
    begins = [e for e in events if e["ph"] == "b" and e["name"].startswith("request")]
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e" and e["name"].startswith("request")}
    assert len(begins) == len(ends) == len(result)
    origin = float(result.arrival_s.min())
    for event in begins:
        r = event["id"]
        assert event["ts"] == pytest.approx((result.arrival_s[r] - origin) * 1e6, abs=0.01)
        assert ends[r] == pytest.approx((result.finish_s[r] - origin) * 1e6, abs=0.01)
    assert all(e["ph"] in "XCbeM" and e.get("ts", 0) >= 0 for e in events)


def test_a_comparison_is_on_the_same_requests() -> None:
    load = poisson(8.0, "lognormal:mean=600,cv=1", "lognormal:mean=200,cv=1.2", num_requests=300, seed=2)
    found = compare(deployed(), load, ["static", "continuous"])
    static, continuous = found.results
    assert (static.arrival_s == continuous.arrival_s).all()
    assert (static.output_tokens == continuous.output_tokens).all()
    gain = found.gain(1, "output_tokens_per_s")
    assert gain is not None
    assert gain > 1.5
    assert gain == pytest.approx(continuous.summary.output_tokens_per_s / static.summary.output_tokens_per_s)
    e2e = found.gain(1, "e2e_s.mean")
    assert e2e == pytest.approx(static.e2e_s.mean() / continuous.e2e_s.mean())
    assert set(found.to_dict()) == {"baseline", "runs", "gain", "interrupted", "left_out"}
    with pytest.raises(SpecError, match="two or more"):
        compare(deployed(), load, ["static"])
    with pytest.raises(SpecError, match="is not known"):
        compare(deployed(), load, ["static", "dynamic"])
