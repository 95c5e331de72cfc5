"""Predictions of the sample are those in the repository; the diff that a change prints is readable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_predictions_are_as_they_were() -> None:
    command = [sys.executable, "tools/golden_summary.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_diff_names_rows_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import golden_summary  # type: ignore[import-not-found]

    before = {"summary": {"all": {"tpot_median_ape": 0.1}}, "rows": {"a": [0.1, 0.01, None], "b": [0.1, 0.02, None]}}
    after = {"summary": {"all": {"tpot_median_ape": 0.2}}, "rows": {"a": [0.1, 0.011, None], "b": [0.1, None, None]}}
    text = golden_summary.report(before, after)
    assert "2 of 2 rows" in text and "tpot_median_ape 10.0% → 20.0%" in text
    assert "a  tpot_s: 0.01 → 0.011 (+10.0%)" in text and "b  tpot_s: 0.02 → None" in text
    assert golden_summary.report(before, before) == ""
    slight = {**before, "rows": {"a": [0.10001, 0.01, None], "b": [0.1, 0.02, None]}}
    assert golden_summary.report(before, slight) == ""
