"""The contract of design.md: keys and shapes of `--json`, which outside tests and scripts rely on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
GPU = ("--gpu", "h100-sxm-80gb")


def test_model(bstar_json: Run) -> None:
    sheet = bstar_json("model", "llama-3.1-8b", "--context", "8192")
    assert set(sheet["parameters"]) == {"total", "active", "embedding", "lm_head", "experts", "vision", "mtp"}
    assert sheet["parameters"]["total"] == 8030261248
    assert sheet["weight_bytes"] >= 2 * 8030261248
    assert sheet["streamed_weight_bytes"] == 2 * (8030261248 - 128256 * 4096)
    assert (sheet["kv_bytes_per_token"], sheet["kv_bytes_per_sequence"]) == (131072, 131072 * 8192)
    assert sheet["state_bytes_per_sequence"] == 0
    assert sheet["layers"] == {"full_attention": 32}
    assert sheet["max_context"] == 131072


def test_model_by_path_is_the_model_by_name(bstar_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    by_path, by_name = bstar_json("model", str(path)), bstar_json("model", "llama-3.1-8b")
    for key in ("parameters", "weight_bytes", "streamed_weight_bytes", "kv_bytes_per_token", "layers", "max_context"):
        assert by_path[key] == by_name[key]


def test_model_dtypes_and_layouts(bstar_json: Run) -> None:
    whole = bstar_json("model", "llama-3.1-8b")
    half = bstar_json("model", "llama-3.1-8b", "--weight-dtype", "fp8", "--kv-cache-dtype", "fp8")
    assert half["kv_bytes_per_token"] * 2 == whole["kv_bytes_per_token"]
    assert half["weight_bytes"] < 0.6 * whole["weight_bytes"]
    split = bstar_json("model", "llama-3.1-8b", "--tp", "2")
    assert split["kv_bytes_per_token"] * 2 == whole["kv_bytes_per_token"]
    assert bstar_json("model", "llama-3.1-8b", "--tp", "16")["kv_bytes_per_token"] == whole["kv_bytes_per_token"] / 8


def test_layers_by_kind(bstar_json: Run) -> None:
    hybrid = bstar_json("model", "qwen3.5-397b-a17b")
    assert hybrid["layers"] == {"gated_delta_net": 45, "full_attention": 15}
    assert hybrid["state_bytes_per_sequence"] > 0
    assert sum(g["count"] for g in hybrid["layer_groups"]) == hybrid["num_layers"] == 60


def test_memory(bstar_json: Run) -> None:
    sheet = bstar_json("memory", "llama-3.1-8b", *GPU, "--max-model-len", "8192")
    terms = {"total_bytes", "weight_bytes", "activation_bytes", "runtime_bytes", "cuda_graph_bytes", "kv_cache_bytes"}
    assert terms <= set(sheet["per_gpu"])
    assert sheet["per_gpu"]["total_bytes"] == 85029615043
    used = sum(sheet["per_gpu"][t] for t in terms - {"total_bytes"})
    assert used <= sheet["per_gpu"]["total_bytes"]
    assert sheet["fits"] is True
    assert sheet["reason"] is None
    assert isinstance(sheet["num_blocks"], int)
    assert isinstance(sheet["kv_cache_tokens"], int)
    assert sheet["max_concurrency"] == pytest.approx(sheet["kv_cache_tokens"] / 8192, rel=1e-3)


def test_memory_that_does_not_fit_is_exit_code_1(bstar_json: Run) -> None:
    sheet = bstar_json("memory", "llama-3.1-70b", *GPU, exit_code=1)
    assert sheet["fits"] is False
    assert sheet["reason"]


def test_memory_beside_a_log(bstar_json: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO [core.py:104] Initializing a V1 LLM engine (v0.19.0) with config: model='meta-llama/Llama-3.1-8B'\n"
        "INFO [gpu_model_runner.py:1] Model loading took 14.99 GiB memory and 3.1 seconds\n"
        "INFO [gpu_worker.py:1] Available KV cache memory: 54.0 GiB\n"
        "INFO [kv_cache_utils.py:1] GPU KV cache size: 442,368 tokens\n")
    sheet = bstar_json("memory", *GPU, "--log", str(log))
    assert sheet["deployment"]["engine_version"] == "0.19.0"
    assert sheet["deployment"]["model"] == "llama-3.1-8b"
    terms = sheet["log"]["terms"]
    assert terms["weight_bytes"]["logged"] == round(14.99 * 2**30)
    assert abs(terms["weight_bytes"]["difference_fraction"]) < 0.01
    assert set(terms["kv_cache_tokens"]) == {"predicted", "logged", "difference_fraction"}


def test_explain(bstar_json: Run) -> None:
    sheet = bstar_json("explain", "llama-3.1-8b", *GPU, "--context", "8192", "--slo", "tpot=20ms")
    assert {"b_star", "b_gemm", "b_compute", "b_mem", "b_slo", "b_tok"} <= set(sheet["landmarks"])
    assert sheet["landmarks"]["b_compute"] is None
    assert sheet["landmarks"]["b_star"] == pytest.approx(15009849344 / (131072 * 8192))
    for key in ("step_time_s", "time_per_output_token_amortized_s"):
        assert 0 < sheet[key]["floor"] <= sheet[key]["expected"]
    assert {"ridge_point", "arithmetic_intensity", "regions", "bound_by"} <= set(sheet)
    assert {"value", "rule"} <= set(sheet["recommended_max_num_seqs"])
    assert sheet["bound_by"] in {
        "weight_bandwidth", "kv_bandwidth", "compute", "kv_capacity", "communication", "overhead", "token_budget",
        "max_num_seqs", "queueing"}  # fmt: skip


def test_explain_at_a_batch_and_under_a_load(bstar_json: Run) -> None:
    at = bstar_json("explain", "llama-3.1-8b", *GPU, "--context", "8192", "--batch", "4")
    assert at["batch"] == 4
    step, amortized = at["step_time_s"]["expected"], at["time_per_output_token_amortized_s"]["expected"]
    assert amortized == pytest.approx(step / 4)
    loaded = bstar_json("explain", "llama-3.1-8b", *GPU, "--input", "2000", "--output", "300")
    assert loaded["context_tokens"] == 2150


def test_curve(bstar_json: Run) -> None:
    found = bstar_json("curve", "llama-3.1-8b", "qwen3-8b", "--gpu", "h100,l40s", "--context", "512,2048")
    assert len(found["curves"]) == 8
    for curve in found["curves"]:
        batch, step = curve["batch"], curve["step_time_s"]
        assert batch[0] == 1
        assert batch == sorted(batch)
        assert all(f <= e for f, e in zip(step["floor"], step["expected"], strict=True))
        amortized = curve["time_per_output_token_amortized_s"]["expected"]
        assert amortized == pytest.approx([e / b for e, b in zip(step["expected"], batch, strict=True)])
        assert len(curve["region"]) == len(curve["bound_by"]) == len(batch)


def test_curve_follows_moe_intensity(bstar_json: Run) -> None:
    curve = bstar_json("curve", "qwen3-30b-a3b", *GPU, "--context", "1024", "--batch", "1,8,64")["curves"][0]
    assert curve["batch"] == [1, 8, 64]
    assert curve["arithmetic_intensity"] == sorted(curve["arithmetic_intensity"])


def test_plan(bstar_json: Run) -> None:
    found = bstar_json("plan", "llama-3.1-8b", "--gpu", "h100-sxm-80gb,l40s", "--input", "512", "--output", "128",
                       "--rate", "10", "--slo", "ttft=1s,tpot=50ms")
    best = found["candidates"][0]
    assert {"gpu", "num_gpus", "replicas", "tp", "pp", "dp", "ep", "weight_dtype", "kv_dtype", "max_num_seqs",
            "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization", "mode"} <= set(best["deployment"])
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(best["predicted"][metric]) - {"range_80"} == {"mean", "p50", "p95", "p99"}
    assert {"output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "slo_attainment_fraction", "cost",
            "bound_by", "launch_command", "memory", "landmarks"} <= set(best)
    assert set(best["cost"]) >= {"usd_per_hour", "usd_per_million_output_tokens"}
    assert all(r["reason"] for r in found["rejected"])
    from bstar.codec.engine_command import parse_command

    command = parse_command(best["launch_command"])
    assert command.settings["max_num_seqs"] == best["deployment"]["max_num_seqs"]
    assert command.settings.get("tp", 1) == best["deployment"]["tp"]


def test_plan_without_an_answer_is_exit_code_1(bstar_json: Run) -> None:
    found = bstar_json("plan", "llama-3.1-405b", "--gpu", "l40s", "--input", "512", "--output", "128", "--rate", "1",
                       "--slo", "tpot=1ms", "--max-gpus", "2", exit_code=1)
    assert found["candidates"] == []
    assert found["rejected"]


def test_plan_takes_every_load_option(bstar_json: Run) -> None:
    base = ("plan", "llama-3.1-8b", "--gpu", "h100", "--input", "2000", "--output", "128", "--rate", "5")
    plain = bstar_json(*base)
    run = bstar_json(*base, "--num-requests", "100", "--seed", "1", "--burstiness", "1", "--fast",
                     "--executor", "local")
    assert "--num-requests, --seed" in run["notes"][0]
    assert run | {"notes": plain["notes"]} == plain
    cached = bstar_json(*base, "--prefix", "1500,hit=0.9")
    assert cached["candidates"][0]["capacity_requests_per_s"] > plain["candidates"][0]["capacity_requests_per_s"]
    assert bstar_json(*base, "--prefix-tokens", "1500", "--prefix-hit", "0.9") == cached


def test_plan_prices(bstar_json: Run) -> None:
    found = bstar_json("plan", "llama-3.1-8b", "--gpu", "h100", "--input", "512", "--output", "128", "--rate", "1",
                       "--price", "h100=9.5")
    best = found["candidates"][0]
    assert best["cost"]["usd_per_hour"] == pytest.approx(9.5 * best["deployment"]["num_gpus"])


@pytest.mark.parametrize("kind", ["models", "devices", "engines"])
def test_catalog(bstar_json: Run, kind: str) -> None:
    rows = bstar_json("catalog", kind) if kind != "models" else bstar_json("catalog", kind, "llama-3")
    assert len(rows) >= 3


def test_catalog_entries(bstar_json: Run) -> None:
    device = bstar_json("catalog", "devices", "H100 SXM")
    assert device["id"] == "h100-sxm-80gb"
    assert device["source"]
    assert bstar_json("catalog", "models", "llama-3.1-8b")["config"]["hidden_size"] == 4096
    assert bstar_json("catalog", "engines", "vllm@0.11")["gpu_memory_utilization"] == 0.9
    assert set(bstar_json("catalog")) == {"models", "devices", "engines"}


def test_from_command_and_flags_over_it(bstar_json: Run) -> None:
    line = "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64 --max-model-len 8k --kv-cache-dtype fp8 --port 1"
    taken = bstar_json("memory", *GPU, "--from-command", line)["deployment"]
    assert (taken["model"], taken["max_num_seqs"], taken["max_model_len"], taken["kv_dtype"]) == (
        "llama-3.1-8b", 64, 8000, "fp8")
    assert taken["unmodelled"] == ["--port 1"]
    over = bstar_json("memory", *GPU, "--from-command", line, "--max-num-seqs", "32")["deployment"]
    assert (over["max_num_seqs"], over["max_model_len"]) == (32, 8000)


def test_specs_are_saved_and_read(bstar_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    first = bstar_json("memory", "llama-3.1-8b", *GPU, "--tp", "2", "--no-enable-prefix-caching",
                       "--save-spec", str(path))
    again = bstar_json("memory", "--file", str(path))
    assert again == first
    assert bstar_json("memory", "--file", str(path), "--tp", "1")["deployment"]["tp"] == 1


def test_device_figures_by_hand(bstar_json: Run) -> None:
    sheet = bstar_json("memory", "llama-3.1-8b", *GPU, "--gpu-memory", "64GiB")
    assert sheet["per_gpu"]["total_bytes"] == 64 << 30
    fast = bstar_json("explain", "llama-3.1-8b", *GPU, "--bandwidth", "6.7TB/s", "--context", "512", "--batch", "1")
    slow = bstar_json("explain", "llama-3.1-8b", *GPU, "--bandwidth", "3.35TB/s", "--context", "512", "--batch", "1")
    assert slow["step_time_s"]["floor"] == pytest.approx(2 * fast["step_time_s"]["floor"])


def test_max_model_len_auto_takes_what_fits(bstar_json: Run) -> None:
    sheet = bstar_json("memory", "llama-3.1-8b", "--gpu", "rtx-4090", "--max-model-len", "auto")
    assert sheet["fits"] is True
    length = sheet["deployment"]["max_model_len"]
    assert 1024 < length < 131072
    longer = bstar_json("memory", "llama-3.1-8b", "--gpu", "rtx-4090", "--max-model-len", str(length + 1), exit_code=1)
    assert longer["fits"] is False


def test_no_number_is_nan_or_infinite(bstar_json: Run) -> None:
    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, float):
            assert math.isfinite(value)

    for args in (("explain", "llama-3.1-8b", *GPU, "--context", "1"), ("model", "qwen3.5-397b-a17b"),
                 ("curve", "deepseek-r1", "--gpu", "h200", "--tp", "8", "--context", "128")):
        walk(bstar_json(*args))
