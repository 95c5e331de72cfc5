"""Engine defaults by version and device, against the engines' own sources."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.catalog.devices import all_devices, get_device, with_overrides
from bstar.catalog.engines import ENGINES, engine_defaults, engine_name, engine_releases, parse_version
from bstar.errors import NotInCatalogError, SpecError
from bstar.units import GIB

VLLM_PYTHON = Path(os.environ.get("BSTAR_VLLM_VENV", ".vllm")).absolute() / "bin" / "python"


@pytest.mark.parametrize(
    ("gpu", "version", "server", "offline"),
    [
        ("h100", "0.32.0", (1024, 8192), (1024, 16384)),
        ("h200", "0.32.0", (1024, 8192), (1024, 16384)),
        ("b200", "0.32.0", (1024, 16384), (1024, 16384)),
        ("b200", "0.27.0", (1024, 8192), (1024, 16384)),
        ("mi300x", "0.32.0", (1024, 16384), (1024, 16384)),
        ("rtx-pro-6000", "0.32.0", (1024, 8192), (1024, 16384)),
        ("a100", "0.32.0", (256, 2048), (256, 8192)),
        ("a100", "0.8.5", (1024, 8192), (1024, 16384)),
        ("a800", "0.32.0", (1024, 8192), (1024, 16384)),
        ("h100", "0.8.4", (256, 8192), (256, 16384)),
        ("rtx-4090", "0.32.0", (256, 2048), (256, 8192)),
        ("l40s", "0.11.0", (256, 2048), (256, 8192)),
        ("gb10", "0.32.0", (256, 2048), (256, 8192)),
        ("tpu-v6e", "0.32.0", (256, 1024), (256, 2048)),
    ],
)
def test_vllm_batch_defaults(gpu: str, version: str, server: tuple[int, int], offline: tuple[int, int]) -> None:
    device = get_device(gpu)
    for usage, expected in (("server", server), ("offline", offline)):
        found = engine_defaults("vllm", version, device, usage=usage)  # type: ignore[arg-type]
        assert (found.max_num_seqs, found.max_num_batched_tokens) == expected


def test_vllm_cpu_defaults_are_per_rank() -> None:
    from bstar.catalog.probe import Probe, device_of

    cpu = device_of(Probe(
        processor="x", logical_cpus=2, memory_bytes=200 * GIB, read_bytes_per_s=2e10, copy_bytes_per_s=2e10,
        fp32_flops_per_s=1e11, measured_at="2026-11-30T00:00:00Z",
    ))  # fmt: skip
    found = engine_defaults("vllm", None, cpu, world_size=2)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 4096)
    assert (found.kv_block_size(), found.kv_block_size("mla"), found.kv_block_size("compressed")) == (128, 16, 256)


@pytest.mark.parametrize(
    ("version", "utilization", "graphs_subtracted", "asynchronous", "hybrid_prefix", "reserve"),
    [  # config/cache.py, envs.py, config/scheduler.py, config/model.py of each version
        ("0.11.0", 0.90, False, False, False, False),
        ("0.12.0", 0.90, False, False, False, False),
        ("0.14.1", 0.90, False, True, False, False),
        ("0.18.0", 0.90, False, True, False, False),
        ("0.19.0", 0.90, False, True, False, True),
        ("0.20.0", 0.92, True, True, False, True),
        ("0.25.1", 0.92, True, True, False, True),
        ("0.26.0", 0.92, True, True, True, True),
        ("0.32.0", 0.92, True, True, True, True),
    ],
)
def test_vllm_by_version(
    version: str, utilization: float, graphs_subtracted: bool, asynchronous: bool, hybrid_prefix: bool, reserve: bool
) -> None:
    found = engine_defaults("vllm", version, get_device("h100"))
    assert found.gpu_memory_utilization == utilization and found.memory_rule == "fraction-of-total"
    assert found.cudagraph_memory_subtracted is graphs_subtracted
    assert found.async_scheduling is asynchronous
    assert found.prefix_caching(hybrid=False) is True and found.prefix_caching(hybrid=True) is hybrid_prefix
    assert found.reserve_full_prompt is reserve and found.enable_chunked_prefill


@pytest.mark.parametrize(
    ("gpu", "version", "attention", "quantized", "tokens"),
    [
        ("h100", "0.32.0", "gqa", False, 16), ("b200", "0.32.0", "gqa", False, 16),
        ("b200", "0.32.0", "mla", False, 32), ("b300", "0.24.0", "mla", True, 32), ("b200", "0.16.0", "mla", False, 64),
        ("b200", "0.11.0", "mla", False, 128), ("h100", "0.11.0", "mla", False, 64),
        ("h200", "0.17.0", "mla", False, 64),
        ("h100", "0.32.0", "mla", False, 16), ("h100", "0.32.0", "mla", True, 64), ("a100", "0.32.0", "mla", False, 16),
        ("h200", "0.32.0", "sparse-mla", False, 64), ("h200", "0.32.0", "compressed", False, 256),
        ("rtx-pro-6000", "0.32.0", "mla", False, 16), ("arc-pro-b60", "0.32.0", "gqa", False, 64),
    ],
)  # fmt: skip
def test_vllm_block_sizes(gpu: str, version: str, attention: str, quantized: bool, tokens: int) -> None:
    found = engine_defaults("vllm", version, get_device(gpu))
    assert found.kv_block_size(attention, quantized_cache=quantized) == tokens  # type: ignore[arg-type]


def _vllm_sizes(top: int) -> list[int]:
    sizes = [n for n in (1, 2, 4) if n <= top]
    sizes += list(range(8, min(top + 1, 256), 8)) if top >= 8 else []
    return sizes + (list(range(256, top + 1, 16)) if top >= 256 else [])


@given(st.integers(1, 2000), st.integers(1, 20000))
def test_vllm_capture_sizes_follow_the_engines_rule(max_num_seqs: int, tokens: int) -> None:
    for version, extra in (("0.12.0", ()), ("0.24.0", ("tokens",)), ("0.32.0", ("tokens", "seqs"))):
        top = min(max_num_seqs * 2, 512, tokens)
        expected = set(_vllm_sizes(top))
        expected |= {tokens} if "tokens" in extra and tokens <= top else set()
        expected |= {max_num_seqs} if "seqs" in extra and max_num_seqs <= top else set()
        found = engine_defaults("vllm", version, get_device("h100"))
        assert list(found.cudagraph_sizes(max_num_seqs, tokens)) == sorted(expected)


def test_larger_graphs_on_data_centre_blackwell() -> None:
    expected = (("b200", None, 1024), ("h100", None, 512), ("b200", "0.27", 512), ("l4", "0.32", 512))
    for gpu, version, largest in expected:
        assert engine_defaults("vllm", version, get_device(gpu)).cudagraph_max_size(1024, 8192) == largest
    assert engine_defaults("vllm", None, get_device("b300")).cudagraph_max_size(1024, 8192) == 1024
    fine = engine_defaults("vllm", "0.11.0", get_device("h100")).cudagraph_sizes(1024, 8192)
    assert fine == (1, 2, 4, *range(8, 513, 8))
    assert engine_defaults("vllm", "0.14.0", get_device("h100")).cudagraph_max_size(8, 8192, query_tokens=4) == 64


def test_vllm_limits_of_a_short_model() -> None:
    found = engine_defaults("vllm", None, get_device("h100"))
    assert found.batch_limits(8192) == (1024, 8192)
    assert found.batch_limits(4) == (1024, 4096)
    assert found.batch_limits(1) == (1024, 1024)


def _sglang_fraction(memory_mib: float, chunk: int, graphs: int, ranks: int) -> float:
    reserved = 512 + chunk * 1.5 + graphs * 2 + ranks / 8 * 1024
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory_mib - reserved) / memory_mib, 3)


@pytest.mark.parametrize(
    ("gpu", "ranks", "chunk", "graphs"),
    [("h100", 1, 8192, 256), ("h100", 8, 8192, 512), ("h200", 4, 8192, 512), ("b200", 1, 16384, 512),
     ("l40s", 1, 4096, 32), ("rtx-4090", 4, 2048, 80), ("t4", 1, 2048, 8), ("mi300x", 8, 16384, 512)],
)  # fmt: skip
def test_sglang_by_batch(gpu: str, ranks: int, chunk: int, graphs: int) -> None:
    device = get_device(gpu)
    found = engine_defaults("sglang", "0.5.5", device, world_size=ranks)
    memory_mib = (device.nvml_memory_bytes or 0) / (1 << 20)
    assert found.max_num_batched_tokens == chunk and found.cudagraph_max_size(2048, chunk) == graphs
    assert found.gpu_memory_utilization == _sglang_fraction(memory_mib, chunk, graphs, ranks)
    assert found.memory_rule == "static-fraction-of-free" and not found.mixes_prefill_and_decode


def test_sglang_reserves_for_prefill_graphs_and_attention_dp() -> None:
    h100 = get_device("h100")
    plain = engine_defaults("sglang", "0.5.10", h100)
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
             *range(1280, 4097, 256), *range(4608, 8193, 512)]  # fmt: skip
    reserved = 512 + 8192 * 1.5 + 256 * 2 + 128 + len(sizes) * 8
    assert plain.gpu_memory_utilization == round((81559 - reserved) / 81559, 3)
    assert engine_defaults("sglang", "0.5.10", h100, mla=True).gpu_memory_utilization < plain.gpu_memory_utilization
    wide = engine_defaults("sglang", "0.5.5", get_device("b200"), world_size=8, attention_dp=8)
    assert wide.gpu_memory_utilization < engine_defaults(
        "sglang", "0.5.5", get_device("b200"), world_size=8).gpu_memory_utilization  # fmt: skip
    for ranks, fraction in ((1, 0.88), (2, 0.87), (4, 0.85), (8, 0.81), (16, 0.79)):
        assert engine_defaults("sglang", "0.4.6", h100, world_size=ranks).gpu_memory_utilization == fraction
    assert engine_defaults("sglang", "0.5.2", h100).gpu_memory_utilization == round((81559 - 10 * 1024) / 81559, 3)


def test_tensorrt_llm() -> None:
    found = engine_defaults("TensorRT-LLM", "1.2.0", get_device("h100"))
    assert (found.engine, found.max_num_seqs, found.max_num_batched_tokens) == ("trtllm", 2048, 8192)
    assert (found.gpu_memory_utilization, found.memory_rule) == (0.9, "fraction-of-free-after-load")
    assert (found.kv_block_size(), found.cudagraph_max_size(2048, 8192)) == (32, 128)
    assert found.enable_prefix_caching and not found.enable_chunked_prefill and found.async_scheduling


@pytest.mark.parametrize("engine", ENGINES)
def test_every_device_has_defaults_at_every_release(engine: str) -> None:
    for version, source in engine_releases(engine):
        assert source
        for device in all_devices():
            for ranks in (1, 8):
                found = engine_defaults(engine, version, device, world_size=ranks)
                assert found.known_version == version and found.note == ""
                assert found.max_num_seqs >= 1 and 128 <= found.max_num_batched_tokens <= 1 << 15
                assert 0.3 < found.gpu_memory_utilization <= 1, (device.id, version)
                sizes = found.cudagraph_sizes(found.max_num_seqs, found.max_num_batched_tokens)
                assert list(sizes) == sorted(set(sizes))
                assert found.kv_block_size("mla") >= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_releases_are_in_order_and_known(engine: str) -> None:
    data = tomllib.loads((files("bstar.catalog") / "engines" / f"{engine}.toml").read_text(encoding="utf-8"))
    numbers = [parse_version(release["from"]) for release in data["release"]]
    assert numbers == sorted(set(numbers)) and numbers[-1] <= parse_version(data["newest"])


def test_versions_outside_the_data() -> None:
    h100 = get_device("h100")
    newer = engine_defaults("vllm", "0.40.1", h100)
    assert newer.max_num_seqs == 1024 and "0.40.1 is newer than the data: defaults of 0.32.0" in newer.note
    assert engine_defaults("vllm", "v0.21.0rc1", h100).known_version == "0.20.1"
    with pytest.raises(SpecError, match=r"vllm 0\.2\.5 is older than the data; 0\.4\.0 is the oldest"):
        engine_defaults("vllm", "0.2.5", h100)
    for text in ("latest", "x", "1", "zero.one", "gpt-oss-dev"):
        with pytest.raises(SpecError, match="engine version"):
            engine_defaults("vllm", text, h100)
    for text in ("nightly-5b8c30d62b754b57", "main", "0.1.dev20073", "nightly-dev"):
        found = engine_defaults("vllm", text, h100)
        assert found.known_version == "0.32.0" and "development build" in found.note
    loose = engine_defaults("trtllm", "gpt-oss-dev", h100, strict=False)
    assert loose.known_version == "1.0.0" and "not a version" in loose.note
    assert "older than the data" in engine_defaults("vllm", "0.2.5", h100, strict=False).note


def test_the_first_engine_of_vllm_chunks_only_long_models() -> None:
    found = engine_defaults("vllm", "0.6.4.post1", get_device("rtx-3090"))
    assert [found.batch_limits(n)[1] for n in (1024, 20_000, 29_000, 35_000)] == [2048, 20_000, 29_000, 2048]
    assert not found.prefix_caching(hybrid=False) and found.cudagraph_max_size(256, 2048) == 256
    assert engine_defaults("vllm", "0.8.0", get_device("rtx-3090")).chunked_prefill(1024)


def test_unknown_engines() -> None:
    assert [engine_name(text) for text in ("vLLM", "SGLang", "TensorRT-LLM", "trtllm", "trt-llm")] == [
        "vllm", "sglang", "trtllm", "trtllm", "trtllm"]  # fmt: skip
    with pytest.raises(NotInCatalogError, match="did you mean vllm"):
        engine_name("vlm")
    with pytest.raises(NotInCatalogError, match="engines: vllm, sglang, trtllm"):
        engine_name("ollama")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no environment with vLLM (set BSTAR_VLLM_PYTHON)")
def test_against_the_engine_itself() -> None:
    """vLLM 0.32's own get_batch_defaults, for every device whose NVML total is known."""
    devices = [d for d in all_devices() if d.vendor == "nvidia" and d.nvml_memory_bytes and not d.unified_memory]
    asked = [(d.id, d.nvml_memory_bytes, d.name) for d in devices]
    code = (
        "import json, sys\nfrom unittest.mock import MagicMock\nimport vllm.engine.arg_utils as a\nout = {}\n"
        "from vllm.usage.usage_lib import UsageContext as U\n"
        "for key, memory, name in json.load(sys.stdin):\n"
        "    p = MagicMock(); p.get_device_total_memory.return_value = memory; p.get_device_name.return_value = name\n"
        "    p.is_tpu.return_value = False; p.is_cpu.return_value = False; a.current_platform = p\n"
        "    tokens, seqs = a.EngineArgs.get_batch_defaults(1)\n"
        "    out[key] = [[seqs[u], tokens[u]] for u in (U.OPENAI_API_SERVER, U.LLM_CLASS)]\n"
        "print('RESULT' + json.dumps(out))"
    )
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", code], input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=300
    )
    answered = json.loads(done.stdout.split("RESULT")[1])
    for device in devices:
        for usage, expected in zip(("server", "offline"), answered[device.id], strict=True):
            found = engine_defaults("vllm", "0.32.0", device, usage=usage)  # type: ignore[arg-type]
            assert [found.max_num_seqs, found.max_num_batched_tokens] == expected, (device.id, usage)


def test_a_device_with_the_users_memory_takes_its_class() -> None:
    small = with_overrides(get_device("h100"), memory_bytes=40 * GIB)
    assert engine_defaults("vllm", None, small).max_num_seqs == 256
