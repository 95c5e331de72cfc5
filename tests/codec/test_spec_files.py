"""Deployment files: what is written is read back, what is not understood is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bstar.codec.spec_files import FORMATS, read_deployment_file, read_mapping, write_deployment_file
from bstar.errors import ConfigError

KEYWORDS = st.fixed_dictionaries({}, optional={
    "model": st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=30),
    "gpu": st.just("h100-sxm-80gb"), "tp": st.integers(1, 64), "max_num_seqs": st.integers(1, 10**6),
    "gpu_memory_utilization": st.floats(0.01, 1), "enforce_eager": st.booleans(),
    "unmodelled": st.lists(st.sampled_from(["--port 8000", "-O3"]), min_size=1).map(tuple),
    "model_overrides": st.dictionaries(st.sampled_from(["layers", "heads"]), st.integers(1, 10**9), min_size=1),
})  # fmt: skip


@pytest.mark.parametrize("suffix", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(keywords=KEYWORDS)
def test_round_trip(tmp_path: Path, suffix: str, keywords: dict[str, object]) -> None:
    path = tmp_path / f"d{suffix}"
    write_deployment_file(path, keywords)
    assert read_deployment_file(path) == keywords


def test_sizes_and_lengths_take_units(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("model: m\ngpu: h100\ngpu_memory_bytes: 80GiB\nbandwidth_bytes_per_s: 3.3TB/s\nmax_model_len: 8k\n")
    assert read_deployment_file(path) == {
        "model": "m", "gpu": "h100", "gpu_memory_bytes": 80 << 30, "bandwidth_bytes_per_s": 3.3e12,
        "max_model_len": 8000}


@pytest.mark.parametrize(("name", "text", "word"), [
    ("d.yaml", "modell: x", "did you mean model"), ("d.yaml", "tp: two", "whole number"),
    ("d.yaml", "tp: true", "whole"),
    ("d.yaml", "- a\n- b", "key: value"), ("d.yaml", "a: [", "not yaml"), ("d.toml", "tp = ", "not toml"),
    ("d.json", "{", "d.json"), ("d.txt", "tp: 1", "must end in"), ("d.yaml", "enforce_eager: 1", "true or false"),
    ("d.yaml", "model: 3", "must be text"), ("d.yaml", "unmodelled: x", "list"),
    ("d.yaml", "model_overrides: {layers: many}", "whole number"), ("d.yaml", "a: &x [1]\nb: *x", "aliases"),
    ("d.yaml", "model: !!python/object/apply:os.system [ls]", "not yaml"),
])  # fmt: skip
def test_refusals(tmp_path: Path, name: str, text: str, word: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_deployment_file(path)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_mapping(tmp_path / "none.yaml", what="file")
    path = tmp_path / "b.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        read_mapping(path, what="file")


def test_every_key_has_a_kind() -> None:
    from bstar.codec import spec_files

    text = {"model", "gpu", "weight_dtype", "dtype", "kv_cache_dtype", "engine", "scheduling_policy",
            "performance_mode", "speculative_method", "cudagraph_mode", "profile"}
    kinds = (spec_files._INTEGERS, spec_files._NUMBERS, spec_files._SWITCHES, text,
             {"unmodelled", "model_overrides", "hf_overrides"})
    assert set(spec_files.deployment_keys()) == set().union(*kinds)
