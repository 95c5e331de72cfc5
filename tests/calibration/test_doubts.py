"""Rows that contradict themselves, or that nothing can have run: a note and out of the errors, or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bstar.calibration import replay as replay_module
from bstar.calibration.bundled import all_bundled_points
from bstar.calibration.points import Point, read_rows
from bstar.calibration.replay import Prediction, replay
from bstar.calibration.summary import Outcome
from bstar.calibration.validation import validate
from bstar.errors import ConfigError

SERVED = {"id": "a", "engine": "vllm", "model": "llama-3.1-8b", "gpu": "h100", "weight_dtype": "bf16",
          "isl_tokens": "512", "osl_tokens": "32", "concurrency": "4", "ttft_ms": "50", "tpot_ms": "8"}  # fmt: skip
STATIC = {"id": "s", "engine": "vllm", "model": "llama-3.1-8b", "gpu": "h100", "weight_dtype": "bf16", "n_gpus": "1",
          "tp": "1", "pp": "1", "isl": "512", "osl": "128", "load_kind": "static_batch", "load_value": "8",
          "tpot_ms": "8"}  # fmt: skip
APART = SERVED | {"mode": "disagg", "prefill_num_workers": "1", "prefill_tp_size": "1", "decode_num_workers": "1",
                  "decode_tp_size": "1"}  # fmt: skip


def point(cells: dict[str, str], **changes: str) -> Point:
    row = cells | changes
    return read_rows(",".join(row) + "\n" + ",".join(row.values()) + "\n")[0]


def outcome(cells: dict[str, str], **changes: str) -> Outcome:
    found = point(cells, **changes)
    return Outcome(point=found, prediction=replay(found))


def test_no_bundled_row_contradicts_itself() -> None:
    assert not [p.id for p in all_bundled_points() if p.doubts or p.fault]


@pytest.mark.parametrize(
    ("cells", "changes", "said"),
    [
        (SERVED, {"num_gpus": "1", "attention_tp": "8"}, "num_gpus 1 is not attention_tp 8"),
        (SERVED, {"num_gpus": "8", "attention_tp": "2", "attention_dp": "2"}, "4 GPUs are taken"),
        (SERVED, {"attention_tp": "3"}, "layout taken as"),
        (SERVED, {"engine": "TGI"}, "engine 'TGI' is not known"),
        (SERVED, {"weight_dtype": "int5_magic"}, "weight dtype 'int5_magic' is not known"),
        (SERVED | APART, {"mode": "agg"}, "prefill_* and decode_* columns are not used"),
        (APART, {"prefill_tp_size": ""}, "prefill_tp_size is empty"),
        (APART, {"num_gpus": "9"}, "num_gpus 9 is not the 2 GPUs"),
        (STATIC, {"tp": "2"}, "n_gpus 1 is not tp 2 times pp 1"),
        (STATIC, {"tp": "3", "n_gpus": "3"}, "layout doubtful"),
        (STATIC, {"load_value": "4096"}, "memory not limited"),
    ],
)  # fmt: skip
def test_a_contradiction_is_noted_and_counts_in_no_error(
    cells: dict[str, str], changes: dict[str, str], said: str
) -> None:
    sane, found = outcome(cells), outcome(cells, **changes)
    assert sane.counts or changes == {"mode": "agg"}
    assert found.answered and not found.counts
    assert any(said in note for note in found.prediction.notes), found.prediction.notes


@pytest.mark.parametrize(
    ("cells", "changes", "said"),
    [
        (SERVED, {"concurrency": "1000000000"}, "concurrency: must be a whole number of at most 100,000"),
        (SERVED, {"attention_tp": "1e9"}, "attention_tp: must be a whole number of at most"),
        (SERVED, {"concurrency": "0"}, "concurrency: must be a whole number of at least 1, is '0'"),
        (SERVED, {"isl_tokens": ""}, "isl_tokens: is empty"),
        (SERVED, {"isl_tokens": "1e9"}, "isl_tokens: must be a number of tokens of at most 100,000,000"),
        (SERVED, {"tpot_ms": "1e308"}, "tpot_ms: '1e308' is no time"),
        (SERVED, {"mode": "prefill-decode"}, "mode: 'prefill-decode' is not known; use agg, or disagg"),
        (APART, {"prefill_tp_size": "", "prefill_num_workers": ""}, "needs prefill_tp_size and decode_tp_size"),
        (APART, {"prefill_num_workers": "1000000"}, "prefill_num_workers: must be a whole number of at most"),
        (STATIC, {"load_value": "1e12"}, "load_value: must be a whole number from 1 to"),
        (STATIC, {"load_value": "2.5"}, "load_value: must be a whole number"),
        (STATIC, {"load_value": "1000000"}, "nothing can have run so"),
        (STATIC, {"pp": "0"}, "pp: must be a whole number of at least 1"),
        (STATIC, {"load_kind": "rate", "load_value": "0"}, "load_value: a rate must be above 0"),
        (STATIC, {"load_kind": "bogus"}, "load_kind 'bogus' is not known"),
    ],
)  # fmt: skip
def test_what_nothing_can_have_run_has_a_reason(cells: dict[str, str], changes: dict[str, str], said: str) -> None:
    found = outcome(cells, **changes)
    assert not found.answered and not found.counts
    reason = found.prediction.reason or ""
    assert said in reason and not reason.startswith(("a:", "s:")), reason


def test_requests_longer_than_the_models_context_are_noted() -> None:
    for cells, changes in ((SERVED, {"isl_tokens": "140000", "concurrency": "1"}),
                           (APART, {"isl_tokens": "140000", "concurrency": "1"}),
                           (STATIC, {"isl": "140000", "load_value": "1"})):  # fmt: skip
        notes = outcome(cells, **changes).prediction.notes
        assert any("on a model of 131072" in note for note in notes), notes


def test_a_worker_that_cannot_hold_its_model_is_noted() -> None:
    found = outcome(APART, model="llama-3.1-70b")
    assert any(note.startswith("memory of a prefill worker not limited") for note in found.prediction.notes)


def test_a_row_of_both_sides_without_a_mode_is_disaggregated() -> None:
    assert point(APART, mode="").is_disaggregated
    assert not point(SERVED | {"mode": ""}).is_disaggregated


def test_the_harness_flags_are_in_the_notes() -> None:
    notes = outcome(SERVED, harness="inferencex", engine="sglang").prediction.notes
    assert any(note.startswith("flags of the harness's runs: ") for note in notes)


def test_too_little_memory_is_the_rows_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> Prediction:
        raise MemoryError("Unable to allocate 74.5 GiB")

    monkeypatch.setattr(replay_module, "_predicted", full)
    reason = validate([point(SERVED)], jobs=1)[0].prediction.reason or ""
    assert reason.startswith("concurrency: ") and "bug" not in reason


def test_headers_may_differ_in_case_and_seconds_are_milliseconds() -> None:
    head = "Engine, Model ,GPU,ISL tokens,OSL_tokens,Concurrency,TTFT_s,tpot_s"
    found = read_rows(f"{head}\nvllm,llama-3.1-8b,h100,512,32,4,0.05,0.008\n")[0]
    assert found.ttft_s == pytest.approx(0.05) and found.tpot_s == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"), ("engine;model;gpu;isl_tokens\nvllm;x;y;1\n", "semicolons"), ("engine\tmodel\n", "tabs"),
        ("vllm,llama-3.1-8b,h100,512,32,4\n", "no header"), ("a,b\n1,2\n", "lacks the column engine"),
        ("engine,model,gpu,isl_tokens,osl_tokens,concurrency,ttft_ms,ttft_s\n", "ttft_ms and ttft_s"),
    ],
)  # fmt: skip
def test_files_that_are_no_table_say_why(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_rows(text)


def test_weights_that_no_gpu_holds_are_noted() -> None:
    found = outcome(STATIC, model="deepseek-r1", weight_dtype="fp8")
    assert found.answered and not found.counts
    assert any("the weights are" in note for note in found.prediction.notes)
