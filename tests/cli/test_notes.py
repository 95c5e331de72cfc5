"""What a command assumes, drops or overrides is said once on stderr, and in JSON; secrets and trifles are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
G = ("--gpu", "h100-sxm-80gb")
LLAMA = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
YARN = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}'


@pytest.mark.parametrize(("name", "found"), [
    ("foo/llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B"), ("meta-lama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
    ("someone/Qwen3-32B-AWQ", "w4a16 (read off the name"), ("llama-3.1-70b-w4a16", "w4a16 (read off the name"),
])
def test_a_model_known_by_a_part_of_its_name_says_so(bstar: Run, bstar_json: Run, name: str, found: str) -> None:
    for command in (("model", name), ("memory", name, *G, "--tp", "8"),
                    ("explain", name, *G, "--tp", "8", "--context", "512"),
                    ("curve", name, *G, "--tp", "8", "--context", "512")):
        result = bstar(*command)
        assert result.output.count("is not in the catalog: taken by its name for") == 1
        assert result.stderr.startswith(f"note: {name} is not in the catalog")
        assert found in result.stderr
        notes = bstar_json(*command)["notes"]
        assert sum(name in note for note in notes) == 1


@pytest.mark.parametrize("name", [
    "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "llama3.1:8b", "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-R1-0528", "Qwen/Qwen3-32B-FP8", "google/gemma-3-27b-it",
])
def test_the_publishers_own_names_need_no_note(bstar: Run, name: str) -> None:
    assert bstar("model", name).stderr == ""


@pytest.mark.parametrize("name", [
    "bartowski/Llama-3.3-70B-Instruct-GGUF", "unsloth/gpt-oss-20b-GGUF:Q4_K_M"])
def test_a_gguf_repository_is_refused(bstar: Run, name: str) -> None:
    result = bstar("model", name)
    assert result.exit_code == 2
    assert ".gguf" in result.stderr


def test_the_launch_command_serves_what_was_asked_for(bstar_json: Run, tmp_path: Path) -> None:
    load = (*G, "--input", "100", "--output", "20", "--rate", "1")

    def served(name: str) -> str:
        return str(bstar_json("plan", name, *load)["candidates"][0]["launch_command"].split()[2])

    assert served("meta-llama/Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert served("NousResearch/Hermes-3-Llama-3.1-8B") == "NousResearch/Hermes-3-Llama-3.1-8B"
    assert served("llama-3.1-8b") == "meta-llama/Meta-Llama-3.1-8B"
    folder = tmp_path / "mine"
    folder.mkdir()
    from bstar.catalog.models import get_entry

    entry = get_entry("llama-3.1-8b")
    assert entry is not None
    import json

    (folder / "config.json").write_text(json.dumps(entry.config))
    assert served(str(folder)) == served(str(folder / "config.json")) == str(folder)


def test_an_unknown_flag_is_refused_unless_allowed(bstar: Run, bstar_json: Run) -> None:
    load = ("--input", "100", "--output", "20")
    for command in (("memory", *G), ("explain", *G, "--context", "512"), ("curve", *G, "--context", "512"),
                    ("plan", *G, *load)):
        line = ("--from-command", LLAMA + " --tensor-paralel-size 2 --enable-lora")
        result = bstar(*command, *line)
        assert result.exit_code == 2
        assert "did you mean --tensor-parallel-size?" in result.stderr
        allowed = bstar(*command, *line, "--allow-unknown-flags")
        assert allowed.exit_code == 0
        assert "note: not a flag of vllm: --tensor-paralel-size 2\n" in allowed.stderr
    stray = bstar("memory", *G, "--from-command", LLAMA + " -tp 2 stray")
    assert stray.exit_code == 2
    assert "stray" in stray.stderr


def test_a_release_that_is_newer_than_the_table_may_have_the_flag(bstar: Run) -> None:
    line = "docker run --gpus all vllm/vllm-openai:v{} --model meta-llama/Llama-3.1-8B --brand-new-flag 3"
    newer = bstar("memory", *G, "--from-command", line.format("0.99.0"))
    assert "not a flag of vllm: --brand-new-flag 3" in newer.stderr
    assert newer.exit_code == 0
    assert bstar("memory", *G, "--from-command", line.format("0.20.0")).exit_code == 2


def test_engines_whose_flags_are_not_all_known_get_a_note(bstar: Run) -> None:
    line = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --some-rare-flag 3"
    result = bstar("memory", *G, "--from-command", line)
    assert result.exit_code == 0
    assert "not a flag of sglang: --some-rare-flag 3" in result.stderr
    misspelt = bstar("memory", *G, "--from-command", line.replace("--some-rare-flag", "--max-runing-requests"))
    assert misspelt.exit_code == 2
    assert "did you mean --max-running-requests?" in misspelt.stderr


def test_secrets_and_trifles_are_not_printed(bstar: Run, bstar_json: Run) -> None:
    line = f"HF_TOKEN=tops3cret {LLAMA} --port 8000 --api-key tops3cret --enable-lora --served-model-name x"
    for command in (("memory", *G), ("explain", *G, "--context", "512"), ("plan", *G, "--input", "9", "--output", "9")):
        result = bstar(*command, "--from-command", line)
        assert "tops3cret" not in result.output
        assert result.stderr.count("--enable-lora") == 1
        assert "--port" not in result.stderr
        assert "--served-model-name" not in result.stderr
        assert "--enable-lora" not in result.stdout
        assert "tops3cret" not in bstar(*command, "--from-command", line, "--json").output
    listed = bstar_json("memory", *G, "--from-command", line)["deployment"]["unmodelled"]
    assert listed == ["--port 8000", "--api-key '***'", "--enable-lora", "--served-model-name x"]


def test_secrets_are_not_saved(bstar: Run, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    bstar("memory", *G, "--from-command", LLAMA + " --api-key tops3cret", "--save-spec", str(path))
    assert "tops3cret" not in path.read_text()


def test_what_replaces_the_command_is_said(bstar: Run, bstar_json: Run) -> None:
    line = ("--from-command", LLAMA + " -tp 8 --max-num-seqs 64")
    result = bstar("memory", "llama-3.1-70b", *G, "--tp", "4", "--max-num-seqs", "64", *line)
    (note,) = result.stderr.splitlines()
    assert "MODEL llama-3.1-70b (the command: meta-llama/Llama-3.1-8B-Instruct)" in note
    assert "--tp 4 (the command: 8)" in note
    assert "max-num-seqs" not in note
    assert note.removeprefix("note: ") in bstar_json("memory", "llama-3.1-70b", *G, "--tp", "4", *line)["notes"]
    planned = bstar("plan", "llama-3.1-70b", *G, "--input", "100", "--output", "20", *line)
    assert "MODEL llama-3.1-70b (the command:" in planned.stderr


def test_notes_of_a_file_are_said(bstar: Run, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("model: llama-3.1-8b\ngpu: h100\nunmodelled: [--enable-lora, --api-key tops3cret]\n")
    result = bstar("memory", "--file", str(path), "--json")
    assert "note: not modelled: --enable-lora" in result.stderr
    assert "tops3cret" not in result.output


@pytest.mark.parametrize("line", [
    f"vllm serve Qwen/Qwen3-32B --rope-scaling '{YARN}' --max-model-len 131072 -tp 4",
    f"vllm serve Qwen/Qwen3-32B --hf-overrides '{{\"rope_scaling\":{YARN}}}' --max-model-len 131072 -tp 4",
    f"vllm serve Qwen/Qwen3-32B --hf-overrides.rope_parameters '{YARN}' --max-model-len 131072 -tp 4",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-32B --max-model-len 131072 -tp 4",
])
def test_recipes_for_long_contexts_are_answered(bstar: Run, bstar_json: Run, line: str) -> None:
    found = bstar_json("memory", *G, "--from-command", line)
    assert found["max_model_len"] == 131072
    assert any("beyond the 40,960 tokens" in note for note in found["notes"])
    plain = bstar("memory", *G, "--from-command", "vllm serve Qwen/Qwen3-32B --max-model-len 131072 -tp 4")
    assert plain.exit_code == 2
    assert "--max-context" in plain.stderr


def test_yarn_lengthens_the_default_of_older_releases(bstar_json: Run) -> None:
    line = ("--from-command", f"vllm serve Qwen/Qwen3-32B --rope-scaling '{YARN}' -tp 4")
    old, new = (bstar_json("memory", *G, *line, "--engine", f"vllm@{v}") for v in ("0.11", "0.32"))
    assert (old["max_model_len"], new["max_model_len"]) == (131072, 40960)


def test_an_override_changes_the_model(bstar_json: Run) -> None:
    line = "vllm serve Qwen/Qwen3-32B --hf-overrides '{\"num_hidden_layers\": 4}'"
    small: Any = bstar_json("memory", *G, "--from-command", line)
    whole: Any = bstar_json("memory", "qwen3-32b", *G, "--tp", "8")
    assert small["per_gpu"]["weight_bytes"] < whole["per_gpu"]["weight_bytes"] * 2


@pytest.mark.parametrize("gpu", ["t4", "v100-sxm2-32gb", "rtx-2080-ti"])
def test_a_gpu_without_bf16_runs_in_fp16(bstar: Run, bstar_json: Run, gpu: str) -> None:
    found = bstar_json("memory", "llama-3.2-1b", "--gpu", gpu)
    assert (found["deployment"]["weight_dtype"], found["deployment"]["kv_dtype"]) == ("fp16", "fp16")
    assert any("has no bf16" in note for note in found["notes"])
    refused = bstar("memory", "--gpu", gpu, "--from-command", "vllm serve meta-llama/Llama-3.2-1B --dtype bfloat16")
    assert refused.exit_code == 2
    assert bstar("memory", "llama-3.2-1b", "--gpu", "a10").stderr == ""


def test_explain_without_an_answer_is_exit_code_1(bstar_json: Run) -> None:
    load = ("--input", "2000", "--output", "300")
    slow = bstar_json("explain", "llama-3.1-8b", *G, *load, "--slo", "tpot=1ms", exit_code=1)
    assert slow["recommended_max_num_seqs"]["value"] is None
    bstar_json("explain", "llama-3.1-405b", *G, *load, exit_code=1)
    bstar_json("explain", "llama-3.1-8b", *G, *load, "--slo", "tpot=50ms")


def test_rows_of_a_curve_without_a_setting_say_why(bstar: Run) -> None:
    text = bstar("curve", "llama-3.1-8b", "qwen3-32b", *G, "--context", "2048,8192").stdout
    assert " ".join(text.split()).count("max_model_len 40960 needs 10.00 GiB of KV cache") == 2


def test_the_unwritable_output_is_one_line(tmp_path: Path) -> None:
    import subprocess
    import sys

    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with full.open("w") as handle:
        done = subprocess.run([sys.executable, "-m", "bstar.interfaces.cli", "catalog"], stdout=handle, check=False,
                              stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


CONFIG_LINE = (
    "(EngineCore_DP0 pid=221) INFO 10-02 11:02:11 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: "
    "model='openai/gpt-oss-120b', speculative_config=None, tokenizer='openai/gpt-oss-120b', dtype=torch.bfloat16, "
    "max_seq_len=131072, tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, quantization=mxfp4, "
    "enforce_eager=True, kv_cache_dtype=auto\n"
    "(Worker_TP0 pid=300) INFO 10-02 11:03:00 [gpu_model_runner.py:2653] Model loading took 33.2 GiB and 20.1 s\n")
NAMESPACE_LINE = (
    "INFO 05-12 09:14:03 [api_server.py:1043] vLLM API server version 0.8.5\n"
    "INFO 05-12 09:14:03 [api_server.py:1044] args: Namespace(subparser='serve', model='meta-llama/Llama-3.1-8B', "
    "max_model_len=8192, tensor_parallel_size=2, gpu_memory_utilization=0.85, max_num_seqs=None)\n"
    "INFO 05-12 09:14:40 [gpu_model_runner.py:1347] Model loading took 7.5 GiB and 4.1 s\n")


def test_a_logs_own_lines_give_the_settings(bstar: Run, bstar_json: Run, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "a.log"
    path.write_text(CONFIG_LINE)
    found = bstar_json("memory", "--gpu", "h100", "--log", str(path))["deployment"]
    assert (found["tp"], found["max_model_len"], found["enforce_eager"]) == (2, 131072, True)
    path.write_text(NAMESPACE_LINE)
    found = bstar_json("memory", "--gpu", "h100", "--log", str(path))["deployment"]
    assert (found["tp"], found["max_model_len"], found["gpu_memory_utilization"]) == (2, 8192, 0.85)
    packed = tmp_path / "a.log.gz"
    packed.write_bytes(gzip.compress(NAMESPACE_LINE.encode()))
    assert bstar_json("memory", "--gpu", "h100", "--log", str(packed))["deployment"] == found
    packed.write_bytes(gzip.compress(NAMESPACE_LINE.encode())[:40])
    assert bstar("memory", "--gpu", "h100", "--log", str(packed)).exit_code == 2
    other = bstar("memory", "qwen3-32b", "--gpu", "h100", "--log", str(path))
    assert "the log is of meta-llama/Llama-3.1-8B, what is predicted is qwen3-32b" in other.stderr
    assert bstar("memory", "llama-3.1-8b", "--gpu", "h100", "--log", str(path)).stderr == ""
