"""Any mixture of flags and values: an answer, or one line and exit code 2; never a traceback, never NaN."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUMBERS = st.sampled_from(
    ["0", "1", "2", "7", "64", "1k", "1e3", "1e30", "-1", "nan", "inf", "9" * 20, "", "x", "0.5", "٣", "8Ki", "1e-9"])
DTYPES = st.sampled_from(["fp8", "bf16", "int4", "fp4", "mxfp4", "int8", "fp7", "auto", "nvfp4", "fp32"])
LENGTHS = st.sampled_from(
    ["512", "1", "uniform:1-9", "uniform:9-1", "lognormal:mean=512,cv=1.2", "lognormal:mean=1e9,cv=9", "trace", "zipf",
     "normal:mean=5,cv=0", "exponential:mean=1", "values:1,2", "values:", "1e7"])
SLOS = st.sampled_from(["chat", "batch", "agent", "tpot=1ms", "ttft=0", "tpot=inf", "e2e=1s", "tpot=50", "x=1s", ""])
ENGINES = st.sampled_from(["vllm", "sglang", "trtllm", "vllm@0.11", "vllm@9", "vllm@", "x"])
MODELS = st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-r1", "gpt-oss-120b", "qwen3.5-35b-a3b", "nothing"])

ENGINE_FLAGS = {
    "--engine": ENGINES, "--max-num-seqs": NUMBERS, "--max-num-batched-tokens": NUMBERS, "--max-model-len": NUMBERS,
    "--gpu-memory-utilization": NUMBERS, "--gpu-memory": NUMBERS, "--bandwidth": NUMBERS, "--weight-dtype": DTYPES,
    "--kv-cache-dtype": DTYPES,
}  # fmt: skip
DEPLOY = ENGINE_FLAGS | {
    "--tp": NUMBERS, "--pp": NUMBERS, "--dp": NUMBERS, "--ep": NUMBERS, "--attention-dp": NUMBERS, "--dcp": NUMBERS,
    "--block-size": NUMBERS, "--num-gpu-blocks-override": NUMBERS, "--kv-cache-memory-bytes": NUMBERS,
    "--num-speculative-tokens": NUMBERS, "--cudagraph-max-size": NUMBERS,
}  # fmt: skip
LOAD = {"--input": LENGTHS, "--output": LENGTHS, "--prefix-tokens": NUMBERS, "--slo": SLOS, "--attainment": NUMBERS}
COMMANDS: dict[str, tuple[list[str], dict[str, st.SearchStrategy[str]]]] = {
    "model": ([], {"--context": NUMBERS, "--tp": NUMBERS, "--batch": NUMBERS, "--weight-dtype": DTYPES,
                   "--layers": NUMBERS, "--kv-heads": NUMBERS, "--heads": NUMBERS, "--hidden-size": NUMBERS}),
    "memory": (["--gpu", "h200"], DEPLOY),
    "explain": (["--gpu", "h200", "--context", "512"], DEPLOY | {
        "--context": NUMBERS, "--batch": NUMBERS, "--slo": SLOS}),
    "curve": (["--gpu", "b200", "--context", "512"], DEPLOY | {"--batch": NUMBERS, "--slo": SLOS}),
    "plan": (["--gpu", "h200", "--input", "512", "--output", "64", "--max-gpus", "2"], ENGINE_FLAGS | LOAD | {
        "--rate": NUMBERS, "--concurrency": NUMBERS, "--max-gpus": NUMBERS, "--peak-factor": NUMBERS}),
}  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command that would be answered, with up to three flags changed to anything."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    base, flags = COMMANDS[name]
    words = [name, draw(MODELS), *base]
    for flag in draw(st.lists(st.sampled_from(sorted(flags)), max_size=3)):
        words += [flag, draw(flags[flag])]
    return [*words, "--json"]


@settings(deadline=None, max_examples=100, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command_lines())
def test_an_answer_or_one_line(bstar: Callable[..., Result], words: list[str]) -> None:
    result = bstar(*words)
    assert result.exit_code in (0, 1, 2)
    if result.exit_code == 2:
        assert result.stdout == ""
        errors = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
        assert len(errors) == 1
        assert errors[0].startswith("error: ")
    else:
        json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
