"""The flags of published runs: what the recipes say, for rows that we have and for some that we do not have."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

import bstar
from bstar.catalog.run_settings import evaluate, run_settings
from bstar.codec.spec_files import deployment_keys
from bstar.errors import SpecError


def flags(
    engine: str, gpu: str, model: str, dtype: str, concurrency: int, isl: int = 1024, **more: object
) -> dict[str, object]:
    given = {"osl_tokens": 1024, "tp": 8} | more
    return run_settings(engine, gpu, model, dtype, isl_tokens=isl, concurrency=concurrency, **given).flags  # type: ignore[arg-type]


def test_budgets_follow_the_load() -> None:
    assert flags("trtllm", "h200_sxm", "deepseek-ai/DeepSeek-R1", "fp8", 64)["max_num_batched_tokens"] == 1152
    assert flags("trtllm", "b200_sxm", "deepseek-ai/DeepSeek-R1", "fp8", 64, 8192)["max_num_batched_tokens"] == 8320
    assert flags("vllm", "b200_sxm", "MiniMaxAI/MiniMax-M2.5", "fp8", 64, 8192)["max_num_batched_tokens"] == 16384
    assert flags("vllm", "h100_sxm", "meta-llama/Llama-3.1-70B", "fp8", 16)["max_num_seqs"] == 16
    assert flags("vllm", "b200_sxm", "meta-llama/Llama-3.1-70B", "fp4", 16)["max_num_seqs"] == 512


def test_polling_follows_concurrency_and_layout() -> None:
    for concurrency, expected in ((8, 10), (16, 30), (128, 30)):
        found = flags("sglang", "b200_sxm", "deepseek-ai/DeepSeek-R1", "fp8", concurrency)
        assert found["scheduler_recv_interval"] == expected
    four = flags("sglang", "b200_sxm", "deepseek-ai/DeepSeek-R1", "fp8", 64, tp=4)
    assert (four["scheduler_recv_interval"], four["max_num_seqs"], four["max_prefill_tokens"]) == (10, 32, 8192)


def test_the_date_chooses_among_recipes() -> None:
    old = flags("vllm", "b200_sxm", "MiniMaxAI/MiniMax-M2.5", "fp8", 64, measured_on="2026-03-11")
    new = flags("vllm", "b200_sxm", "MiniMaxAI/MiniMax-M2.5", "fp8", 64, measured_on="2026-04-03")
    assert old["enable_expert_parallel"] is True and "kv_cache_dtype" not in old and new["kv_cache_dtype"] == "fp8"
    first = flags("vllm", "b200_sxm", "MiniMaxAI/MiniMax-M2.5", "fp8", 64, measured_on="2020-01-01")
    assert first == old, "before the oldest entry the oldest counts"


def test_a_run_that_is_not_listed_has_the_common_flags() -> None:
    found = run_settings("sglang", "h100_sxm", "some/Other-9B", "bf16", isl_tokens=1000, osl_tokens=200, concurrency=4)
    assert found.run == "default" and found.flags["scheduler_recv_interval"] == 10


def test_every_entry_is_read_and_its_flags_are_a_deployments() -> None:
    data = tomllib.loads((files("bstar.catalog") / "runs" / "inferencex.toml").read_text(encoding="utf-8"))
    known = set(deployment_keys())
    for run in data["run"]:
        assert run["source"] and run["from"][:3] == "202"
        used = set(run["flags"]).union(*(rule["flags"] for rule in run.get("when", ())))
        assert used <= known, used - known
    for engine, gpu, model, dtype in (
        ("vllm", "b200_sxm", "openai/gpt-oss-120b", "fp4"), ("sglang", "b300_sxm", "zai-org/GLM-5-FP8", "fp8"),
        ("trtllm", "b200_sxm", "meta-llama/Llama-3.1-70B", "fp8"),
    ):
        bstar.deployment(model=model, gpu=gpu, tp=8, engine=engine, **flags(engine, gpu, model, dtype, 64))


@pytest.mark.parametrize("text", ["isl + other", "__import__('os')", "isl.real", "'a'", "isl +"])
def test_text_that_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="run settings"):
        evaluate(text, {"isl": 1})


def test_arithmetic() -> None:
    values = {"c": 20, "b": True}
    assert evaluate("(c + 63) // 64 * 64", values) == 64 and evaluate("30 if c >= 16 else 10", values) == 30
    assert evaluate("b and not 5 < c < 10", values) and evaluate("max(c, 8) * 0.5", values) == 10.0
