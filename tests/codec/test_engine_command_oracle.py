"""vLLM's own parser is the oracle: the same command lines, the same values."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bstar.codec.build import build_deployment
from bstar.codec.engine_command import format_command, parse_command
from bstar.errors import BstarError

VLLM_PYTHON = Path(os.environ.get("BSTAR_VLLM_VENV", ".vllm")).absolute() / "bin" / "python"
ORACLE = Path(__file__).with_name("vllm_parser_oracle.py")
KEYS = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "decode_context_parallel_size": "dcp", "max_cudagraph_capture_size": "cudagraph_max_size",
}  # fmt: skip

pytestmark = [
    pytest.mark.vllm, pytest.mark.slow,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="real vLLM is not installed"),
]  # fmt: skip


def ask(commands: list[list[str]]) -> list[dict[str, Any]]:
    """What vLLM's parser makes of each argv."""
    done = subprocess.run([str(VLLM_PYTHON), str(ORACLE)], input=json.dumps(commands), capture_output=True, text=True,
                          check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def compare(argv: list[str], answer: dict[str, Any]) -> None:
    """Every setting that was read has the parser's value; None where the parser has its default."""
    try:
        parsed = parse_command(shlex.join(["vllm", "serve", *argv]))
    except BstarError:
        assert answer.get("error"), argv
        return
    if answer.get("error"):
        return  # bstar may read what the engine refuses (an unknown flag is listed, not refused)
    assert parsed.model == (answer["model_tag"] or answer["model"]), argv
    for name, value in answer.items():
        key = KEYS.get(name, name)
        # No graphs at all is said by --compilation-config, not by the largest size.
        if key in parsed.settings and (key, parsed.settings[key]) != ("cudagraph_max_size", 0):
            assert parsed.settings[key] == value, (name, argv)


def random_argv(rng: random.Random) -> list[str]:
    """Flags in the spellings that the parser takes, in any order."""
    counts = ["1", "8", "64", "2k", "2K", "8192", "1.5k"]
    pieces: list[list[str]] = []
    for spelling, values in (
        (("--tensor-parallel-size", "-tp", "--tensor_parallel_size"), ["1", "2", "8"]),
        (("--pipeline-parallel-size", "-pp"), ["1", "4"]), (("--data-parallel-size", "-dp"), ["2"]),
        (("--decode-context-parallel-size", "-dcp"), ["2"]), (("--max-num-seqs",), ["1", "256"]),
        (("--max-num-batched-tokens", "--max_num_batched_tokens"), counts),
        (("--max-model-len",), [*counts, "auto", "-1"]),
        (("--gpu-memory-utilization", "--gpu-memory-util"), ["0.9", ".5", "1"]), (("--block-size",), ["16", "64"]),
        (("--kv-cache-dtype",), ["auto", "fp8"]), (("--num-gpu-blocks-override",), ["100"]),
        (("--kv-cache-memory-bytes",), ["1000000", "1G"]), (("--scheduling-policy",), ["fcfs", "priority"]),
        (("--long-prefill-token-threshold",), ["0", "2048"]), (("--served-model-name",), ["x"]),
        (("--port",), ["8000"]),
    ):  # fmt: skip
        if rng.random() < 0.4:
            flag, value = rng.choice(spelling), rng.choice(values)
            inline = flag.startswith("--") and rng.random() < 0.5
            pieces.append([f"{flag}={value}"] if inline else [flag, value])
    switches = ("enable-prefix-caching", "enable-chunked-prefill", "async-scheduling", "enforce-eager",
                "enable-expert-parallel")
    pieces += [[f"--{rng.choice(['', 'no-'])}{name}"] for name in switches if rng.random() < 0.3]
    if rng.random() < 0.3:
        pieces.append([rng.choice(["-O3", "-O2", "-cc.mode=0", '--speculative-config={"num_speculative_tokens": 2}'])])
    rng.shuffle(pieces)
    model = [["--model", "org/name"]] if rng.random() < 0.5 else [["--model=org/name"]]
    pieces.insert(rng.randrange(len(pieces) + 1), model[0])
    return [word for piece in pieces for word in piece]


def test_random_command_lines_mean_the_same() -> None:
    rng = random.Random(0)
    commands = [random_argv(rng) for _ in range(300)]
    for argv, answer in zip(commands, ask(commands), strict=True):
        assert not answer.get("error"), argv
        compare(argv, answer)


def test_launch_commands_are_taken_by_the_engine() -> None:
    lines = [
        format_command(build_deployment("llama-3.1-8b", "h100", tp=2, max_num_seqs=64, kv_cache_dtype="fp8")),
        format_command(build_deployment("qwen3-30b-a3b", "h200", dp=4, enable_expert_parallel=True,
                                        weight_dtype="fp8")),
        format_command(build_deployment("llama-3.1-8b", "l40s", enforce_eager=True, enable_prefix_caching=False,
                                        async_scheduling=False, num_gpu_blocks_override=500, cudagraph_max_size=None)),
        format_command(build_deployment("qwen3-8b", "a100", cudagraph_max_size=0, block_size=32,
                                        scheduling_policy="priority", long_prefill_token_threshold=1024)),
        format_command(build_deployment("qwen3-8b", "a100", cudagraph_max_size=64)),
    ]
    commands = [["--model", *shlex.split(line, comments=True)[2:]] for line in lines]
    for argv, answer in zip(commands, ask(commands), strict=True):
        assert not answer.get("error"), argv
        compare(argv, answer)
