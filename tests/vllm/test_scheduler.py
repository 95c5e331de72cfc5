"""New scheduler cases in every run, answered by vLLM's own scheduler and by ours: the same decisions, all of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT

from bstar.sim import replay_schedule
from bstar.sim.decisions import replay_with_kernel

sys.path.insert(0, str(ROOT / "tools"))
from make_scheduler_cases import draw_cases

pytestmark = pytest.mark.vllm

FIELDS = ("step", "scheduled", "preempted", "free_blocks")
# Cases differ from run to run; a failure names the seed that draws them again.
SEED = int(os.environ.get("BSTAR_CASE_SEED") or random.SystemRandom().randrange(10**6))


def answers_of(python: Path, model: Path, folder: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    questions, answers = folder / "cases.json", folder / "answers.json"
    questions.write_text(json.dumps(cases))
    done = subprocess.run(
        [python, ROOT / "tools" / "vllm_schedule_oracle.py", model, questions, answers], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": "", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[dict[str, Any]]] = json.loads(answers.read_text())
    return found


def check(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], seed: int, number: int) -> None:
    got = [{k: row[k] for k in FIELDS} for row in ours]
    for a, b in zip(got, theirs, strict=False):
        assert a == b, f"case {number} of seed {seed} (BSTAR_CASE_SEED={seed})"
    assert len(got) == len(theirs), f"case {number} of seed {seed}"


def test_synchronous_decisions(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    cases = draw_cases(SEED, 24)
    for i, (case, want) in enumerate(zip(cases, answers_of(vllm_python, tiny_model, tmp_path, cases), strict=True)):
        check(replay_schedule(case), want, SEED, i)
        check(replay_with_kernel(case), want, SEED, i)


def test_asynchronous_decisions(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    cases = draw_cases(SEED + 1, 24, pipelined=True)
    for i, (case, want) in enumerate(zip(cases, answers_of(vllm_python, tiny_model, tmp_path, cases), strict=True)):
        check(replay_schedule(case), want, SEED + 1, i)
