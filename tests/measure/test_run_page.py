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


def test_every_figure_has_its_unit() -> None:
    page = run_page(recorded(
        output_tokens_per_s=12288.4, total_tokens_per_s=24576.0, requests_per_s=7.39,
        health={"client_limited": False, "cpu_fraction": 0.03, "dispatch_delay_s": {"p99": 0.0007}},
        server={"gauges": {"running": {"mean": 3.25, "max": 4.0}, "kv_usage_fraction": {"mean": 0.00562, "max": 0.5}},
                "counters": {"prompt_tokens": 240000.0, "preemptions": 2.0},
                "in_flight": {"requests": 3.9, "waiting": None},
                "histograms": {"queue_s": {"count": 8.0, "mean": 17e-6, "p50": None, "p95": None, "p99": None},
                               "ttft_s": {"count": 8.0, "mean": 0.2, "p50": None, "p95": 0.35, "p99": None,
                                          "buckets": {"p50": [0.0, 0.3], "p95": [0.3, 0.4], "p99": [0.4, None]}}}},
        gpu={"source": "nvml", "gpu_busy_fraction": {"mean": 0.97, "max": 1.0},
             "power_w": {"mean": 512.2, "max": 600.0}, "sm_clock_hz": {"mean": 1.98e9, "max": 1.98e9},
             "memory_used_bytes": {"mean": 2.0**36, "max": 2.0**36}},
    ))  # fmt: skip
    for text in (
        "12,288 tokens/s", "24,576 tokens/s", "7.390 requests/s", "CPU share of a core</td><td>3%",
        "running</td><td>3.250 requests</td><td>4 requests", "kv usage</td><td>0.562%</td><td>50%",
        "in the server, by latencies</td><td>3.900 requests", "prompt tokens</td><td>240,000 tokens",
        "queue</td><td>8</td><td>17.0 µs</td><td>–</td>", "ttft</td><td>8</td><td>200 ms</td><td>0 s – 300 ms</td>"
        "<td>350 ms</td><td>&gt; 400 ms", "gpu busy</td><td>97% (max 100%)", "power</td><td>512.2 W",
        "sm clock</td><td>1.98 GHz", "memory used</td><td>64.00 GiB",
    ):  # fmt: skip
        assert text in page, text
    assert "e+0" not in page


def test_the_slo_is_stated() -> None:
    run = recorded(slo_attainment_fraction=1 / 12, meets_slo=False, goodput_requests_per_s=0.5)
    assert "<h2>SLO</h2>" not in run_page(run)
    run.config["slo"] = {"ttft_s": 0.5, "tpot_s": 0.05, "e2e_s": None, "attainment_fraction": 0.9}
    page = run_page(run)
    for text in ("TTFT ≤ 500 ms, TPOT ≤ 50.0 ms for 90% of the requests", "8.33%: missed", "0.5000 requests/s"):
        assert text in page, text


def test_the_wall_stands_at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    from bstar.measure.server.snapshot import Window
    from bstar.tuning import recorded as module
    from bstar.tuning.evidence import Evidence

    eight, empty = np.full(10, 8.0), np.zeros(0)
    seen = Evidence(engine="vllm", duration_s=10.0, running=eight, waiting=eight, kv_usage=empty, seen=Window(
        duration_s=10.0, engine="vllm", restarted=False, counters={"generated_tokens": 5e3}, histograms={}))
    assert "wall:" not in run_page(recorded())
    monkeypatch.setattr(module, "evidence_of_recorded", lambda run: seen)
    page = run_page(recorded())
    assert "wall: <b>max_num_seqs</b>" in page
    assert "8 of 8 seats" in page


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
