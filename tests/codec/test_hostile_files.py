"""Weights, GGUF files, logs, commands, deployment files and traces that are not what they should be: one line each."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_models import attention, dense, layers, meta, outer
from gguf_writing import header, text
from hostile_run import LLAMA, make_big, refused, run
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar.codec.gguf_model import read_gguf
from bstar.errors import ConfigError


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


def yaml_bomb(path: Path) -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 12)]
    path.write_text("\n".join(lines))


SPEC_FILES: dict[str, tuple[str, Any]] = {
    "a bomb of aliases": ("d.yaml", yaml_bomb),
    "a Python tag": ("d.yaml", lambda path: path.write_text("gpu: !!python/object/apply:os.system ['touch marker']\n")),
    "nested YAML": ("d.yaml", lambda path: path.write_text("[" * 5000)),
    "nested JSON": ("d.json", lambda path: path.write_text('{"a":' * 100_000)),
    "a key twice": ("d.toml", lambda path: path.write_text("tp = 1\ntp = 2\n")),
    "binary": ("d.yaml", lambda path: path.write_bytes(bytes(range(256)) * 10)),
    "100 MB": ("d.yaml", make_big), "a pipe": ("d.yaml", lambda path: os.mkfifo(path)),
    "a link to itself": ("d.toml", lambda path: path.symlink_to(path)),
    "a folder": ("d.json", lambda path: path.mkdir()),
    "values of another kind": ("d.yaml", lambda path: path.write_text("model: [1, 2]\ngpu: {a: 1}\n")),
    "unknown keys": ("d.yaml", lambda path: path.write_text("model: llama-3.1-8b\ngpu: h100\nmax_num_sequences: 5\n")),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPEC_FILES)
def test_a_deployment_file_that_is_none_is_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make = SPEC_FILES[kind]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    refused("memory", "--file", str(tmp_path / name), "--json")
    assert [p.name for p in tmp_path.iterdir()] == [name]


COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,"
TRACES: dict[str, tuple[str, Any]] = {
    "empty": ("t.csv", lambda path: path.write_text("")),
    "not UTF-8": ("t.csv", lambda path: path.write_bytes(COLUMNS.encode() + b"\xff\xfe,1\n")),
    "negative": ("t.csv", lambda path: path.write_text(COLUMNS + "-5,2\n")),
    "NaN": ("t.csv", lambda path: path.write_text(COLUMNS + "nan,2\n")),
    "huge": ("t.csv", lambda path: path.write_text(COLUMNS + "1e300,2\n")),
    "other columns": ("t.csv", lambda path: path.write_text("a,b,c\n1,2,3\n")),
    "infinite": ("t.jsonl", lambda path: path.write_text('{"input_length": 1e999, "output_length": 5}')),
    "text": ("t.jsonl", lambda path: path.write_text('{"timestamp": 1, "input_length": "x", "output_length": 5}')),
    "nested": ("t.jsonl", lambda path: path.write_text("[" * 100_000)),
    "a pipe": ("t.csv", lambda path: os.mkfifo(path)),
    "a link to itself": ("t.csv", lambda path: path.symlink_to(path)),
    "not Parquet": ("t.parquet", lambda path: path.write_bytes(b"PAR1xxxxPAR1")),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_that_is_none_is_one_line(kind: str, tmp_path: Path) -> None:
    name, make = TRACES[kind]
    make(tmp_path / name)
    refused(
        "plan",
        "llama-3.1-8b",
        "--gpu",
        "h100-sxm-80gb",
        "--trace",
        str(tmp_path / name),
        "--slo",
        "tpot=50ms",
        "--json",
    )


GOOD = [*outer(), *layers(attention, dense)]
GOOD_HEADER, GOOD_WEIGHTS = header(meta("llama"), GOOD)


@given(st.lists(st.tuples(st.integers(0, len(GOOD_HEADER) - 1), st.integers(0, 255)), min_size=1, max_size=4),
       st.integers(0, len(GOOD_HEADER)) | st.none())  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_any_damage_to_a_gguf_header_is_one_line_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]], end: int | None
) -> None:
    data = bytearray(GOOD_HEADER)
    for place, byte in damage:
        data[place] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    with path.open("wb") as handle:
        handle.write(data[:end])
        handle.truncate(len(GOOD_HEADER) + GOOD_WEIGHTS if end is None else end)
    try:
        assert read_gguf(path).num_layers > 0
    except ConfigError as error:
        assert str(error).isprintable()
