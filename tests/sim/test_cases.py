"""Decisions of vLLM 0.32's own scheduler, recorded: both implementations take every one of them.

tests/data/scheduler_cases holds the smallest recorded cases of each kind; where the shared folder is there, all 80.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bstar.errors import SpecError
from bstar.sim import replay_schedule
from bstar.sim.decisions import replay_with_kernel

ROOT = Path(__file__).parents[2]
OWN = sorted((ROOT / "tests" / "data" / "scheduler_cases").glob("*.json.gz"))
SHARED = [p for p in sorted((ROOT.parent / "shared" / "oracle" / "scheduler_cases").glob("*.json.gz"))
          if p.name not in {o.name for o in OWN}]  # fmt: skip
FIELDS = ("step", "scheduled", "preempted", "free_blocks")
Replay = Callable[[dict[str, Any]], list[dict[str, Any]]]


def case_of(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def check(replay: Replay, path: Path) -> None:
    case = case_of(path)
    want = [{k: row[k] for k in FIELDS} for row in case.pop("steps")]
    given = copy.deepcopy(case)
    got = [{k: row[k] for k in FIELDS} for row in replay(case)]
    for ours, theirs in zip(got, want, strict=False):
        assert ours == theirs
    assert len(got) == len(want)
    assert case == given, "a case is not changed by its replay"


@pytest.mark.parametrize("replay", [replay_schedule, replay_with_kernel])
@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name.partition(".")[0])
def test_recorded_case(path: Path, replay: Replay) -> None:
    check(replay, path)


@pytest.mark.slow
@pytest.mark.parametrize("replay", [replay_schedule, replay_with_kernel])
@pytest.mark.parametrize("path", SHARED, ids=lambda p: p.name.partition(".")[0])
def test_every_recorded_case(path: Path, replay: Replay) -> None:
    check(replay, path)


def test_other_fields_of_a_recorded_case() -> None:
    case = case_of(OWN[0])
    keys = ("finished_before", "running", "waiting")
    assert [{k: row[k] for k in keys} for row in replay_schedule(case)] == [
        {k: row[k] for k in keys} for row in case["steps"]
    ]


ENGINE = {"block_size": 4, "num_blocks": 9, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}


@pytest.mark.parametrize("replay", [replay_schedule, replay_with_kernel])
@pytest.mark.parametrize(
    ("engine", "request_", "word"),
    [
        ({}, {"prompt_tokens": 60, "output_tokens": 1}, "request"),  # 60 tokens, 32 fit
        ({"scheduler_reserve_full_isl": False}, {"prompt_tokens": 60, "output_tokens": 1}, "outgrows"),
        ({}, {"prompt_tokens": 20, "output_tokens": 40}, "outgrows|request"),
        ({"policy": "lifo"}, {"prompt_tokens": 1, "output_tokens": 1}, "policy"),
        ({"block_size": 0}, {"prompt_tokens": 1, "output_tokens": 1}, "block_size"),
        ({"speculative": 3}, {"prompt_tokens": 1, "output_tokens": 1}, "speculative"),
        ({}, {"prompt_tokens": 0, "output_tokens": 1}, "prompt_tokens"),
        ({}, {"prompt_tokens": 2, "output_tokens": 1, "prefix": [0, 3]}, "prefix"),
    ],
)
def test_a_case_that_cannot_be_is_one_line(
    replay: Replay, engine: dict[str, Any], request_: dict[str, Any], word: str
) -> None:
    case = {"engine": {**ENGINE, **engine}, "requests": [{"id": 0, "arrival_step": 0, **request_}]}
    with pytest.raises(SpecError, match=word) as error:
        replay(case)
    assert "\n" not in str(error.value)


def test_unknown_keys_of_a_case_are_ignored() -> None:
    request = {"id": 7, "arrival_step": 3, "prompt_tokens": 9, "output_tokens": 2, "colour": "red"}
    engine = {**ENGINE, "name": "small", "enable_lora": False}
    case = {"kind": "x", "note": 1, "engine": engine, "requests": [request]}
    rows = replay_schedule(case)
    assert [(r["step"], r["scheduled"]) for r in rows] == [(3, [[7, 8]]), (4, [[7, 1]]), (5, [[7, 1]])]
