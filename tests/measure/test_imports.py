"""Results of other load generators.

The files in data/imports were written here by vLLM 0.32, GuideLLM 0.8.1 and AIPerf 0.13.0, 24 requests over 4 clients
each against benchmarks/null_server.py (texts and machine names removed). inference-perf does not install here: its
files are made from its documented format.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bstar.errors import ConfigError
from bstar.measure.imports import is_foreign_result, read_results

DATA = Path(__file__).parent / "data" / "imports"
FILES = ("vllm_detailed.json", "guidellm.json", "aiperf")


@pytest.mark.parametrize("name", FILES)
def test_files_that_tools_wrote_give_their_own_figures(name: str) -> None:
    (run,) = read_results(DATA / name)
    assert (run.concurrency, run.rate_per_s, run.failed) == (4, None, 0)
    assert run.records is not None
    assert len(run.records) == 24
    summary = run.summary()
    assert summary is not None
    assert summary.ttft_s is not None
    assert summary.ttft_s.mean == pytest.approx(run.figures["ttft_s.mean"], rel=1e-4)
    if name != "aiperf":  # its own figure there counts tokens with a tokenizer that is not the server's
        assert summary.tpot_s is not None
        assert summary.tpot_s.mean == pytest.approx(run.figures["tpot_s.mean"], rel=1e-4)
    # Their clocks run from the first to the last event of the client; ours to the last token.
    assert summary.requests_per_s == pytest.approx(run.figures["requests_per_s"], rel=0.03)
    assert np.all(run.records.output_tokens == 20)
    assert np.all(run.records.input_tokens == 8)


def test_a_file_without_requests_has_figures_only() -> None:
    (run,) = read_results(DATA / "vllm_plain.json")
    assert run.records is None
    assert run.summary() is None
    assert run.figure("tpot_s.mean") == pytest.approx(0.0096, rel=0.02)
    assert run.figure("ttft_s.p99") is not None
    assert run.figure("output_tokens.mean") == 20.0
    assert run.figure("tpot_s.p12345") is None
    assert "--save-detailed" in run.notes[0]


def test_rate_and_burstiness(tmp_path: Path) -> None:
    content = json.loads((DATA / "vllm_plain.json").read_text())
    content.update(request_rate=5.0, burstiness=0.5, max_concurrency=None)
    (tmp_path / "r.json").write_text(json.dumps(content))
    (run,) = read_results(tmp_path / "r.json")
    assert (run.concurrency, run.rate_per_s, run.burstiness) == (None, 5.0, 0.5)


def test_appended_results_are_several_runs(tmp_path: Path) -> None:
    text = json.dumps(json.loads((DATA / "vllm_plain.json").read_text()))
    (tmp_path / "r.json").write_text(f"{text}\n{text}\n")
    assert [r.name for r in read_results(tmp_path / "r.json")] == ["r.json:1", "r.json:2"]


def test_failed_requests_are_counted_and_have_no_times(tmp_path: Path) -> None:
    content = json.loads((DATA / "vllm_detailed.json").read_text())
    content["errors"][3] = "Connection reset"
    (tmp_path / "r.json").write_text(json.dumps(content))
    (run,) = read_results(tmp_path / "r.json")
    assert run.failed == 1
    assert run.records is not None
    assert int(run.records.finished.sum()) == 23


def inference_perf_requests() -> list[dict[str, Any]]:
    return [
        {"start_time": 100.0 + i, "end_time": 101.0 + i, "error": None, "request": "{}", "response": "",
         "info": {"input_tokens": 50, "output_tokens": 5,
                  "output_token_times": [100.2 + i + 0.1 * k for k in range(5)]}}
        for i in range(3)
    ] + [{"start_time": 103.5, "end_time": 104.0, "error": {"error_type": "Timeout"}, "info": {"input_tokens": 9}}]


def test_inference_perf_requests(tmp_path: Path) -> None:
    (tmp_path / "per_request_lifecycle_metrics.json").write_text(json.dumps(inference_perf_requests()))
    (run,) = read_results(tmp_path)
    summary = run.summary()
    assert summary is not None
    assert (run.tool, run.failed) == ("inference-perf", 1)
    assert summary.ttft_s is not None
    assert summary.ttft_s.mean == pytest.approx(0.2)
    assert summary.tpot_s is not None
    assert summary.tpot_s.mean == pytest.approx(0.1)


def test_inference_perf_summary(tmp_path: Path) -> None:
    content = {
        "load_summary": {"count": 480, "requested_rate": 1.0, "achieved_rate": 1.02},
        "successes": {
            "count": 477, "prompt_len": {"mean": 512.0}, "output_len": {"mean": 64.0},
            "latency": {"request_latency": {"mean": 3.31, "median": 2.11, "p90": 5.94},
                        "time_to_first_token": {"mean": 0.8, "median": 0.2},
                        "time_per_output_token": {"mean": 0.03, "percentiles": {"p99": 0.05}}},
            "throughput": {"requests_per_sec": 1.02, "output_tokens_per_sec": 65.0},
        },
        "failures": {"count": 3},
    }  # fmt: skip
    (tmp_path / "stage_0_lifecycle_metrics.json").write_text(json.dumps(content))
    (run,) = read_results(tmp_path / "stage_0_lifecycle_metrics.json")
    assert (run.rate_per_s, run.failed) == (1.0, 3)
    expected = {"ttft_s.p50": 0.2, "tpot_s.p99": 0.05, "e2e_s.p90": 5.94, "output_tokens_per_s": 65.0,
                "input_tokens.mean": 512.0}  # fmt: skip
    assert {name: run.figure(name) for name in expected} == expected


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, 2]", '{"a": ', '{"benchmarks": [1]}', "\x00"])
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert not is_foreign_result(path)
    with pytest.raises(ConfigError) as error:
        read_results(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*FILES, "vllm_plain.json"])
def test_a_file_that_was_cut_or_changed_is_refused_or_read(tmp_path: Path, name: str) -> None:
    """Every key in turn is made null: no traceback."""
    source = DATA / name
    path = tmp_path / "result.json"
    if source.is_dir():
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "profile_export_aiperf.json"
        source = source / path.name
    content = json.loads(source.read_text())
    for key in list(content):
        path.write_text(json.dumps({**content, key: None}))
        try:
            read_results(path)
        except ConfigError as error:
            assert "\n" not in str(error)


def test_nothing_there() -> None:
    with pytest.raises(ConfigError, match="no result is here"):
        read_results("does/not/exist")
