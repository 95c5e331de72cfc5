"""The package's front: the names of `__all__` exist, lazily, and do what the command line does."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import bstar
from bstar.errors import SpecError
from bstar.specs.slo import parse_slo


def test_every_public_name_exists() -> None:
    for name in bstar.__all__:
        value = getattr(bstar, name)
        assert value is not None, name
    assert set(bstar.__all__) <= set(dir(bstar))
    assert isinstance(bstar.physics, ModuleType)
    with pytest.raises(AttributeError):
        bstar.no_such_name  # noqa: B018


def test_plan_and_explain_are_functions() -> None:
    assert callable(bstar.plan)
    assert callable(bstar.explain)
    assert callable(bstar.deployment)


def test_the_contract_call() -> None:
    found = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", tp=1, max_num_seqs=256)
    assert isinstance(found, bstar.Deployment)
    assert (found.engine.max_num_seqs, found.parallel.tp) == (256, 1)


def test_the_library_says_what_the_command_line_says(bstar_json: Callable[..., Any]) -> None:
    found = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb")
    budget = bstar.memory(found)
    sheet = bstar_json("memory", "llama-3.1-8b", "--gpu", "h100-sxm-80gb")
    assert sheet["kv_cache_tokens"] == budget.kv_cache_tokens
    explained = json.loads(json.dumps(bstar.explain(found, 8192).to_dict()))
    printed = bstar_json("explain", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--context", "8192")
    assert printed["landmarks"] == explained["landmarks"]


def test_a_layout_that_the_engine_refuses_is_refused() -> None:
    with pytest.raises(SpecError, match="tp"):
        bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", tp=3)
    auto = bstar.deployment(model="llama-3.1-8b", gpu="rtx-4090", max_model_len="auto")
    assert bstar.memory(auto).fits


def test_an_slo_may_be_written_as_text_everywhere() -> None:
    deployment = bstar.deployment(model="llama-3.1-8b", gpu="h100")
    load = bstar.traffic.poisson(2, 100, 50, 40, seed=1)
    text, limits = "ttft=1s,tpot=20ms", parse_slo("ttft=1s,tpot=20ms")
    assert bstar.explain(deployment, 512.0, slo=text).b_slo == bstar.explain(deployment, 512.0, slo=limits).b_slo
    assert bstar.simulate(deployment, load, slo=text).summary.to_dict() == bstar.simulate(
        deployment, load, slo=limits).summary.to_dict()
    with pytest.raises(SpecError, match="slo"):
        bstar.simulate(deployment, load, slo="fast")
