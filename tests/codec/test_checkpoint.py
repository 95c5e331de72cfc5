"""Checkpoint headers: exact bytes from real layouts, one line for damaged ones."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar.codec.checkpoint import part_of, read_safetensors_folder
from bstar.codec.safetensors_files import DTYPE_BITS, read_header
from bstar.errors import ConfigError

BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8, "I32": 32, "F4": 4}


def safetensors(tensors: Mapping[str, tuple[str, list[int]]], *, metadata: bool = True) -> bytes:
    """A .safetensors file made by hand, weights all zero."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        count = 1
        for n in shape:
            count *= n
        size = -(-count * BITS[dtype] // 8)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


SMALL = {
    "model.embed_tokens.weight": ("BF16", [100, 16]),
    "model.layers.0.self_attn.q_proj.weight": ("F8_E4M3", [16, 16]),
    "model.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", [1, 1]),
    "model.layers.1.mlp.gate_proj.weight": ("BF16", [32, 16]),
    "model.layers.2.eh_proj.weight": ("BF16", [16, 32]),
    "model.layers.2.self_attn.q_proj.weight": ("BF16", [16, 16]),
    "model.visual.patch_embed.proj.weight": ("BF16", [16, 8]),
    "lm_head.weight": ("BF16", [100, 16]),
    "model.norm.weight": ("BF16", [16]),
}


def test_bytes_by_dtype_and_by_part(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(SMALL))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    found = read_safetensors_folder(tmp_path)
    assert found.bytes_by_part == {
        "mtp": 1024 + 512,
        "vision": 256,
        "lm_head": 3200,
        "embedding": 3200,
        "layers": 256 + 4 + 1024,
        "other": 32,
    }
    assert found.bytes_by_dtype == {"BF16": 1024 + 512 + 256 + 3200 + 3200 + 1024 + 32, "F8_E4M3": 256, "F32": 4}
    assert found.total_bytes == sum(found.bytes_by_part.values()) == sum(found.bytes_by_dtype.values())
    assert found.loaded_bytes == found.total_bytes - 1536
    assert (found.num_tensors, found.num_files, found.source) == (9, 1, "headers")
    assert found.stored_elements == 1600 + 256 + 1 + 512 + 512 + 256 + 128 + 1600 + 16


def test_a_tied_head_that_is_stored_is_not_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(SMALL))
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 2, "tie_word_embeddings": true}}')
    found = read_safetensors_folder(tmp_path)
    assert found.loaded_bytes == found.total_bytes - 1536 - 3200
    assert read_safetensors_folder(tmp_path, tied=False).loaded_bytes == found.total_bytes - 1536
    # A head alone is the table (some writers drop the other name).
    del (only_head := dict(SMALL))["model.embed_tokens.weight"]
    (tmp_path / "model.safetensors").write_bytes(safetensors(only_head))
    assert read_safetensors_folder(tmp_path).loaded_bytes == found.total_bytes - 1536 - 3200


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    for i, part in enumerate((dict(list(SMALL.items())[:4]), dict(list(SMALL.items())[4:])), 1):
        (tmp_path / f"model-0000{i}-of-00002.safetensors").write_bytes(safetensors(part))
    (tmp_path / "consolidated.safetensors").write_bytes(safetensors(SMALL))
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {n: f"model-0000{1 + (i >= 4)}-of-00002.safetensors" for i, n in enumerate(SMALL)},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_safetensors_folder(tmp_path, num_layers=2).num_tensors == 9
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of them are missing.*00002-of-00002"):
        read_safetensors_folder(tmp_path)


def test_mistrals_second_copy_and_adapters_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(safetensors(SMALL))
    assert read_safetensors_folder(tmp_path).num_files == 1
    (tmp_path / "model.safetensors").write_bytes(safetensors({"lm_head.weight": ("BF16", [4, 4])}))
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(SMALL))
    assert read_safetensors_folder(tmp_path).total_bytes == 32


def test_an_index_alone_gives_its_total(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 141107412992.0}, "weight_map": {"a": "model-00001-of-00030.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_safetensors_folder(tmp_path)
    assert (found.total_bytes, found.source, found.stored_elements) == (141107412992, "index", None)


@pytest.mark.parametrize(("name", "part"), [
    ("model.layers.3.mlp.experts.5.down_proj.weight", "layers"), ("language_model.model.layers.0.x.weight", "layers"),
    ("backbone.layers.1.mixer.D", "layers"), ("transformer.h.0.attn.c_attn.weight", "layers"),
    ("model.layers.61.mlp.gate.weight", "mtp"), ("mtp.layers.0.x.weight", "mtp"), ("mtp.fc.weight", "mtp"),
    ("model.layers.61.shared_head.head.weight", "mtp"),
    ("model.visual.blocks.0.attn.qkv.weight", "vision"), ("vision_tower.encoder.blocks.0.wqkv.weight", "vision"),
    ("vision_model.model.layers.0.self_attn.q_proj.weight", "vision"), ("mm_projector.proj.0.weight", "vision"),
    ("multi_modal_projector.linear_1.weight", "vision"), ("model.audio_tower.layers.0.x.weight", "audio"),
    ("lm_head.weight", "lm_head"), ("language_model.lm_head.weight", "lm_head"), ("output.weight", "lm_head"),
    ("model.embed_tokens.weight", "embedding"), ("backbone.embeddings.weight", "embedding"),
    ("transformer.wte.weight", "embedding"), ("model.norm.weight", "other"), ("model.embed_tokens_per_layer.weight",
                                                                              "embedding"),
])  # fmt: skip
def test_parts_by_tensor_name(name: str, part: str) -> None:
    assert part_of(name, num_layers=61) == part


def refuses(folder: Path, part: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        read_safetensors_folder(folder)
    message = str(caught.value)
    assert part in message and "\n" not in message and len(message) < 700
    assert time.perf_counter() - started < 1


def header(text: str | bytes, data: int = 0, *, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def entry(**changes: Any) -> str:
    return json.dumps({"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]} | changes})


@pytest.mark.parametrize(("data", "part"), [
    (b"", "no header"),
    (b"\x01\x00", "no header"),
    (bytes(8), "no header"),
    (header("{}", length=2**63), "claims a header"),
    (header("{}", length=1000), "claims a header"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "claims a header"),
    (header("[]"), "not a JSON object"),
    (header(b"\xff\xfe{}"), "not UTF-8"),
    (header('{"a":' * 500 + "1" + "}" * 500), "nested deeper"),
    (header("{}"), "hold no weights"),
    (header(entry(), 7), "truncated"),
    (header(entry(), 9), "does not describe"),
    (header(entry(dtype=None), 8), "no dtype"),
    (header(entry(dtype="F32"), 8), "takes 8 bytes"),
    (header(entry(shape=[-2, -2]), 8), "no shape"),
    (header(entry(shape=[2.0, 2]), 8), "no shape"),
    (header(entry(shape=[True, 4]), 8), "no shape"),
    (header(entry(shape="4"), 8), "no shape"),
    (header(entry(shape=[10**30] * 16), 8), "takes 8 bytes"),
    (header(entry(shape=[1] * 100_000), 8), "no shape"),
    (header(entry(data_offsets=[8, 0]), 8), "ends before"),
    (header(entry(data_offsets=[0]), 8), "data_offsets"),
    (header(entry(data_offsets=[0, 2**70]), 8), "takes"),
    (header(entry(data_offsets=[8, 16]), 16), "gap"),
    (header('{"w": 1}'), "not described by an object"),
    (header(json.dumps({n: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for n in "ab"}), 4), "overlaps"),
    (header('{"w": {"dtype": "\\n\\u001b[31m", "shape": [1], "data_offsets": [1, 1]}}', 8), "gap"),
])  # fmt: skip
def test_damaged_files_are_one_line(tmp_path: Path, data: bytes, part: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    refuses(tmp_path, part)


@pytest.mark.parametrize(("index", "part"), [
    ({}, "weight_map"),
    ({"weight_map": {}}, "weight_map"),
    ({"weight_map": []}, "weight_map"),
    ({"weight_map": {"a": 1}}, "not a .safetensors file"),
    ({"weight_map": {"a": "../../etc/passwd"}}, "not a .safetensors file"),
    ({"weight_map": {"a": "../x.safetensors"}}, "not a .safetensors file"),
    ({"weight_map": {"a": "x.safetensors"}}, "total_size"),
    ({"weight_map": {"a": "x.safetensors"}, "metadata": {"total_size": -5}}, "total_size"),
    ({"weight_map": {"a": "x.safetensors"}, "metadata": {"total_size": True}}, "total_size"),
    ({"weight_map": {"a": "x.safetensors"}, "metadata": {"total_size": float("nan")}}, "total_size"),
    ({"weight_map": {str(i): f"{i}.safetensors" for i in range(6000)}, "metadata": {"total_size": 5}}, "6000 files"),
])  # fmt: skip
def test_damaged_indexes_are_one_line(tmp_path: Path, index: dict[str, Any], part: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, part)


def test_parts_that_are_missing_are_noticed_without_an_index(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, part in enumerate(parts):
        part.write_bytes(safetensors({f"w{i}": ("U8", [4])}))
    assert read_safetensors_folder(tmp_path).total_bytes == 12
    parts[1].unlink()
    refuses(tmp_path, "lacks 1 of the 3 parts of model")


def test_a_folder_without_weights_and_a_tensor_in_two_files(tmp_path: Path) -> None:
    refuses(tmp_path, "no .safetensors files")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors({"w": ("U8", [4])}))
    refuses(tmp_path, "in two files")


def test_a_dtype_newer_than_the_table_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(entry(dtype="F2_NEW"), 8))
    assert read_header(path)[0].bytes == 8 and "F2_NEW" not in DTYPE_BITS


@given(st.binary(max_size=120) | st.binary(max_size=100).map(lambda b: struct.pack("<Q", len(b)) + b))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_tensors_or_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        read_header(path)
    except ConfigError as error:
        assert "\n" not in str(error)


@given(st.dictionaries(
    st.text("abcdefgh.0123", min_size=1, max_size=12),
    st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 6).map(lambda n: 2 * n), max_size=3)),
    min_size=1, max_size=8))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    path.write_bytes(safetensors(tensors))
    found = {t.name: (t.dtype, list(t.shape)) for t in read_header(path)}
    assert found == tensors
