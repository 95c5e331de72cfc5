"""A run's folder as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bstar.interfaces.report.run_page import chart_specs, run_page
from bstar.metrics.records import RequestRecords


def recorded(**summary: Any) -> Any:
    sent = np.arange(50) * 0.1
    records = RequestRecords(sent_s=sent, first_token_s=sent + 0.05, finish_s=sent + 0.95,
                             input_tokens=np.full(50, 8), output_tokens=np.full(50, 10))
    chunks = (sent[:, None] + 0.05 + np.arange(10) * 0.1).ravel()
    table = SimpleNamespace(records=lambda: records, sent_s=sent, end_s=sent + 0.95, chunk_s=chunks,
                            chunk_tokens=np.ones(500))
    base = {"num_sent": 50, "num_finished": 49, "duration_s": 5.85, "ttft_s": {"mean": 0.05, "p99": None},
            "load": {"name": "<b>4 clients</b>"}, "verdict": {"valid": False, "reasons": ["<i>late</i>"], "notes": []},
            "errors": {"reset": {"count": 1, "example": "<script>alert(1)</script>"}},
            "intervals": {"ttft_s": {"mean": 0.05, "half_width": 0.001}},
            "server": {"gauges": {"running": {"mean": 3.0, "max": 4.0}}, "counters": {"preemptions": 2.0}}}  # fmt: skip
    return SimpleNamespace(path=Path("run"), table=table, summary={**base, **summary}, config={"url": "http://x"},
                           environment={"server": {"model": "tiny", "engine": "vllm", "version": "0.32.0"}})


def test_page_holds_everything_and_escapes_what_servers_say() -> None:
    page = run_page(recorded())
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    for text in ("tiny", "vllm 0.32.0", "no result of the server: &lt;i&gt;late", "50.0 ms", "2.0%", "preemptions"):
        assert text in page
    assert "src=" not in page
    assert "href=" not in page.replace('xlink:href="#', "")


def test_charts_show_all_requests_of_a_small_run() -> None:
    specs = chart_specs(recorded())
    assert [s["encoding"]["y"]["title"] for s in specs] == [
        "TTFT, s", "share of requests", "TPOT, s", "share of requests", "output tokens/s", "requests in flight"]
    assert len(specs[0]["data"]["values"]) == 50
    assert sum(v["y"] for v in specs[4]["data"]["values"]) == 500
    assert specs[1]["data"]["values"][-1]["y"] == 1.0


def test_without_the_extra_there_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    page = run_page(recorded())
    assert "no charts:" in page
    assert "<svg" not in page


def test_an_empty_run_has_a_page() -> None:
    nothing = np.zeros(0)
    table = SimpleNamespace(
        records=lambda: RequestRecords(sent_s=nothing, first_token_s=nothing, finish_s=nothing,
                                       input_tokens=nothing.astype(int), output_tokens=nothing.astype(int)),
        sent_s=nothing, end_s=nothing, chunk_s=nothing, chunk_tokens=nothing)  # fmt: skip
    run = SimpleNamespace(path=Path("run"), table=table, summary={}, config={}, environment={})
    assert "</html>" in run_page(run)  # type: ignore[arg-type]
