"""Whatever is handed to bstar, it answers or refuses: one line on stderr, exit code 2, nothing on stdout, quickly."""

from __future__ import annotations

import copy
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostile
import pytest
from click.testing import CliRunner
from gguf_writing import header, text
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bstar.interfaces.cli.main import cli

LLAMA = hostile.load("meta-llama--Meta-Llama-3.1-8B")


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of bstar in this process; a traceback fails the test."""
    started = time.perf_counter()
    result = CliRunner().invoke(cli, list(arguments))
    assert time.perf_counter() - started < 2.0
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), (code, out[:200], err)
    # Notes (flags that are not modelled) may come before the one line that says what is wrong.
    *notes, error = err.removesuffix("\n").split("\n")
    assert error.startswith("error: ") and all(n.startswith("note: ") for n in notes) and len(notes) < 3
    assert all(line.isprintable() and len(line) < 1500 for line in (error, *notes))
    return error


def cases(source: Any) -> list[Any]:
    return [pytest.param(config, id=label) for label, config in source]


@pytest.mark.parametrize("config", [
    *cases(hostile.wrong_sizes()), *cases(hostile.missing_sizes()), *cases(hostile.other_wrongs())])
def test_a_wrong_config_is_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    refused("model", str(path), "--json")


@pytest.mark.parametrize("index", range(4))
def test_code_that_a_config_names_is_never_run(tmp_path: Path, index: int) -> None:
    marker = tmp_path / "marker"
    _label, config = list(hostile.code_references(marker))[index]
    for name in ("configuration_evil.py", "modeling_evil.py", "__init__.py"):
        (tmp_path / name).write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("model", str(tmp_path), "--json")
    refused("model", str(tmp_path / "config.json"), "--json")
    assert not marker.exists()


def test_a_code_reference_beside_a_known_type_is_ignored(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "modeling_evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"auto_map": auto_map}))
    done = subprocess.run([sys.executable, "-m", "bstar.interfaces.cli.main", "model", str(tmp_path), "--json"],
                          capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["parameters"]["total"] == 8_030_261_248
    assert not marker.exists()


def make_big(path: Path) -> None:
    with path.open("wb") as handle:
        handle.truncate(100_000_000)


FILES = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "not JSON": lambda path: path.write_text("hidden_size: 4096\n"),
    "cut off": lambda path: path.write_text(json.dumps(LLAMA)[:-20]),
    "a list": lambda path: path.write_text(json.dumps([LLAMA])),
    "UTF-16": lambda path: path.write_text(json.dumps(LLAMA), encoding="utf-16"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "100 MB": make_big,
    "100,000 nested objects": lambda path: path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "1,000 nested lists": lambda path: path.write_text('{"model_type":' + "[" * 1000 + "]" * 1000 + "}"),
    "a number of a million digits": lambda path: path.write_text('{"hidden_size": ' + "9" * 10**6 + "}"),
    "a key twice": lambda path: path.write_text('{"hidden_size": 1, "hidden_size": 2}'),
    "a link to itself": lambda path: path.symlink_to(path),
    "a dangling link": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a pipe": lambda path: os.mkfifo(path),
    "half a surrogate pair": lambda path: path.write_text('{"model_type": "\\ud800"}'),
    "an escape sequence": lambda path: path.write_text('{"model_type": "\\u001b[2J\\nerror: x"}'),
    "a Git LFS pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "an HTML page": lambda path: path.write_text("<!doctype html><html><body>404</body></html>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["config.json", "model.gguf"])
def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    FILES[kind](path)
    refused("model", str(path), "--json")


@pytest.mark.parametrize("kind", [k for k in FILES if k not in ("missing", "a folder")])
def test_a_quantization_file_that_is_none_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    FILES[kind](tmp_path / "hf_quant_config.json")
    code, out, err = run("model", str(tmp_path), "--json")
    # A link that leads nowhere or a pipe is as good as absent; everything else must be understood.
    assert (code == 2 and not out and err.count("\n") == 1) or kind in ("a link to itself", "a dangling link", "a pipe")


@pytest.mark.parametrize("argument", [
    "", " ", "\0", "a\0b", "x" * 5000, "/" * 5000, "../" * 2000, "/dev/zero", "/dev/stdin", "/proc/self/mem",
    "/proc/self", "no/such/folder/config.json", "~nobody-at-all/config.json", "\ud800", "new\nline", "\x1b[31m", "-", "--", "..", "/",
    "llama-3.1-8b\n", "https://example.org/config.json", "file:///etc/passwd", "$(touch marker)", "`id`", "%s%s%n",
    "{}", "*", "C:\\model\\config.json", "\\\\server\\share", "٣", "🦙", "llama-3.1-8b;ls",
])  # fmt: skip
def test_a_name_that_is_no_model_is_one_line(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A Hub id would be looked up: these tests must not depend on a network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _out, err = run("model", argument, "--json")
    assert code in (0, 2)
    if code == 2:
        assert err.strip()
    assert list(tmp_path.iterdir()) == []


def index(**changes: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 10}, "weight_map": {"w": "model.safetensors"}} | changes).encode()


SAFETENSORS = {
    "empty": b"", "short": b"\x08", "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789\nsize 1\n",
    "nested": struct.pack("<Q", 1200) + b'{"a":' * 200 + b"1" + b"}" * 199,
    "truncated": struct.pack("<Q", 60) + b'{"w":{"dtype":"U8","shape":[99],"data_offsets":[0,99]}}    ' + b"\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_damaged_weights_in_a_model_folder_are_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS[kind])
    assert "safetensors" in refused("model", str(tmp_path), "--json")


@pytest.mark.parametrize("changes", [
    {"weight_map": None}, {"weight_map": {"w": "/etc/passwd"}}, {"weight_map": {"w": "../x.safetensors"}},
    {"weight_map": {"w": ["a"]}}, {"metadata": None}, {"metadata": {"total_size": -1}},
    {"metadata": {"total_size": "x"}}, {"metadata": {"total_size": float("inf")}}, {"metadata": {"total_size": 10**40}},
])  # fmt: skip
def test_a_damaged_weight_index_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_bytes(index(**changes))
    refused("model", str(tmp_path), "--json")


GOOD_GGUF, _ = header({"general.architecture": "llama"}, [])
KEY = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
TENSOR = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w")
GGUF = {
    "magic only": b"GGUF", "version 1": b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(20),
    "version 99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0) + bytes(20),
    "2^63 tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(20),
    "2^63 keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(20),
    "a name of 2^63 bytes": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(20),
    "a string of 2^62 bytes": KEY + struct.pack("<IQ", 8, 2**62),
    "an array of 2^62 bytes": KEY + struct.pack("<IIQ", 9, 0, 2**62),
    "2^62 empty strings": KEY + struct.pack("<IIQ", 9, 8, 2**62) + bytes(99),
    "an array of arrays": KEY + struct.pack("<IIQ", 9, 9, 1) + bytes(99),
    "a value of no type": KEY + struct.pack("<I", 77) + bytes(99),
    "a key twice": b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2,
    "a key that is not text": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1),
    "a tensor of 9 dimensions": TENSOR + struct.pack("<I", 9) + bytes(99),
    "a tensor of 0 dimensions": TENSOR + struct.pack("<I", 0) + bytes(99),
    "a tensor of 0 elements": TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(99),
    "a tensor of 2^100 elements": TENSOR + struct.pack("<IQQIQ", 2, 2**50, 2**50, 0, 0) + bytes(99),
    "a tensor of no type": TENSOR + struct.pack("<IQIQ", 1, 32, 999, 0) + bytes(99),
    "part of a block": TENSOR + struct.pack("<IQIQ", 1, 33, 12, 0) + bytes(99),
    "weights that are missing": TENSOR + struct.pack("<IQIQ", 1, 2**30, 0, 0) + bytes(99),
    "an offset beyond the file": TENSOR + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(99),
    "alignment 0": header({"general.alignment": 0}, [("w", (4,), "f32")])[0] + bytes(64),
    "alignment 2^40": header({"general.alignment": 2**40}, [("w", (4,), "f32")])[0] + bytes(64),
    "alignment as text": header({"general.alignment": "32"}, [("w", (4,), "f32")])[0] + bytes(64),
    "no tensors": GOOD_GGUF,
    "half a header": GOOD_GGUF[:40],
    "a part of many": header({"general.architecture": "llama", "split.count": 10**9}, [])[0],
    "a terminal escape": header({"general.architecture": "\x1b[2J\n"}, [("w", (4,), "f32")])[0] + bytes(64),
}  # fmt: skip


@pytest.mark.parametrize("kind", GGUF)
def test_a_damaged_gguf_file_is_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF[kind])
    assert "gguf" in refused("model", str(path), "--json")


LOGS: dict[str, Any] = {
    "missing": lambda path: None, "a folder": lambda path: path.mkdir(), "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path), "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 1000),
    "no engine": lambda path: path.write_text("INFO: hello\n" * 100), "100 MB": make_big,
    "absurd numbers": lambda path: path.write_text(
        "INFO 01-01 00:00:00 [kv_cache_utils.py:1] GPU KV cache size: " + "9" * 5000 + " tokens\n"
        "INFO Available KV cache memory: -1e999 GiB\nINFO Maximum concurrency for 0 tokens per request: NaNx\n"),
    "one line of 10 MB": lambda path: path.write_text("GPU KV cache size: " + "1," * 5_000_000),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_that_says_nothing_is_refused_or_answered(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "server.log"
    LOGS[kind](path)
    code, out, err = run("memory", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--log", str(path), "--json")
    if kind in ("missing", "a folder", "a pipe", "a link to itself"):
        assert code == 2
    if code == 2:
        assert out == "" and err.count("\n") == 1 and err.removesuffix("\n").isprintable()
    else:
        json.loads(out)


@pytest.mark.parametrize("command", [
    "", " ", "rm -rf /", "vllm", "vllm serve", "vllm serve --tp", "vllm serve 'unclosed", 'vllm serve "',
    "vllm serve \\", "vllm serve x --max-num-seqs many", "vllm serve x --max-num-seqs -1",
    "vllm serve x --max-num-seqs " + "9" * 5000, "vllm serve x -tp 0", "vllm serve x --gpu-memory-utilization nan",
    "vllm serve x --gpu-memory-utilization 1e999", "vllm serve x; rm -rf /", "vllm serve $(touch marker)",
    "vllm serve `touch marker`", "vllm serve x --max-model-len 10**9", "python -c 'import os'", "vllm serve x\0y",
    "vllm serve x --config /dev/zero", "\x1b[2J", "vllm serve " + "a " * 20_000,
    "vllm serve llama-3.1-8b --kv-cache-dtype posit", "vllm serve llama-3.1-8b --block-size 0",
    "vllm serve llama-3.1-8b --max-model-len 1k1",
])  # fmt: skip
def test_a_command_that_is_none_is_one_line_and_never_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("memory", "--gpu", "h100-sxm-80gb", "--from-command", command, "--json")
    assert list(tmp_path.iterdir()) == []


NAMES = sorted(
    p.name.removesuffix("_config.json") for p in hostile.CONFIGS.glob("*_config.json")
    if not p.name.endswith("hf_quant_config.json"))  # fmt: skip
VALUES = st.sampled_from([
    None, True, False, 0, 1, -1, 3, 7, 1.5, float("nan"), float("inf"), 10**30, 2**31, 10**6, "", "text", "fp8", [], {},
    [1], ["a"], [None], {"a": 1}, [[1]], "full_attention", ["full_attention"] * 3, 1e300, ...,
])  # fmt: skip


def paths(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += paths(value, (*before, key))
    return found


@given(st.sampled_from(NAMES), st.lists(st.tuples(st.floats(0, 0.999), VALUES), min_size=1, max_size=3))
@example("meta-llama--Meta-Llama-3.1-8B", [(0.0, None)])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_a_real_config_is_answered_or_refused(
    tmp_path: Path, name: str, changes: list[tuple[float, Any]]
) -> None:
    config = copy.deepcopy(hostile.load(name))
    for where, value in changes:
        all_paths = paths(config)
        if all_paths:
            config = hostile.changed(config, "\x1f".join(all_paths[int(where * len(all_paths))]), copy.deepcopy(value))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, err = run("model", str(path), "--json")
    if code == 0:
        answer = json.loads(out, parse_constant=lambda c: pytest.fail(f"{c} in the answer"))
        assert answer["parameters"]["total"] > 0 and answer["weight_bytes"] > 0 and answer["kv_bytes_per_token"] >= 0
    else:
        assert (code, out) == (2, "") and err.count("\n") == 1


@pytest.mark.slow
def test_the_same_from_a_shell(tmp_path: Path) -> None:
    for kind in ("100 MB", "a pipe", "a link to itself", "100,000 nested objects", "an escape sequence"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        FILES[kind](path)
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "bstar.interfaces.cli.main", "model", str(path), "--json"],
                              capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "Traceback" not in done.stderr and time.perf_counter() - started < 5
