"""Deployments from names and flags: every unset flag is the engine version's default for device and model."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from bstar.codec import by_hand
from bstar.codec.build import build_deployment, with_dtype
from bstar.codec.resolve import resolve_model, with_weight_dtype
from bstar.errors import BstarError, ConfigError, NotInCatalogError, SpecError, UnsupportedArchitectureError

CONFIGS = Path(__file__).parent.parent / "data" / "model_configs"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "engine", "seqs", "budget", "utilization"), [
    ("h100-sxm-80gb", "vllm", 1024, 8192, 0.92), ("a100-sxm-80gb", "vllm", 256, 2048, 0.92),
    ("b200-sxm-180gb", "vllm", 1024, 16384, 0.92), ("l40s", "vllm", 256, 2048, 0.92),
    ("h100-sxm-80gb", "vllm@0.11.0", 1024, 8192, 0.9),
])  # fmt: skip
def test_vllm_defaults_by_device_and_version(gpu: str, engine: str, seqs: int, budget: int, utilization: float) -> None:
    e = build_deployment("llama-3.1-8b", gpu, engine=engine).engine
    assert (e.max_num_seqs, e.max_num_batched_tokens, e.gpu_memory_utilization) == (seqs, budget, utilization)
    assert e.max_model_len == 131072


def test_the_token_budget_follows_what_is_set() -> None:
    short = build_deployment("llama-3.1-8b", "h100", max_num_seqs=2, max_model_len=512).engine
    assert short.max_num_batched_tokens == 1024  # two sequences of 512 tokens need no more
    whole = build_deployment("llama-3.1-8b", "h100", enable_chunked_prefill=False).engine
    assert whole.max_num_batched_tokens == 131072
    few = build_deployment("llama-3.1-8b", "h100", max_num_batched_tokens=512).engine
    assert few.max_num_seqs == 512
    assert build_deployment("llama-3.1-8b", "l40s", performance_mode="throughput").engine.max_num_seqs == 512


def test_cuda_graphs_follow_the_batch() -> None:
    def largest(**flags: object) -> int:
        return build_deployment("llama-3.1-8b", "h100", **flags).engine.cudagraph_max_size  # type: ignore[arg-type]

    assert largest() == 512
    assert largest(max_num_seqs=64) == 128
    assert largest(enforce_eager=True) == 0
    assert largest(cudagraph_max_size=32) == 32


def test_data_parallel_of_experts_is_attention_dp() -> None:
    moe = build_deployment("qwen3-30b-a3b", "h100", dp=4, enable_expert_parallel=True).parallel
    assert (moe.dp, moe.attention_dp, moe.ep) == (1, 4, 4)
    dense = build_deployment("qwen3-32b", "h100", dp=4).parallel
    assert (dense.dp, dense.attention_dp, dense.ep) == (4, 1, 1)
    assert build_deployment("qwen3-30b-a3b", "h100", tp=4, ep=2).parallel.moe_tp == 2
    with pytest.raises(SpecError, match=r"attention_dp: .*no experts that ranks could share; say --dp 2"):
        build_deployment("llama-3.1-8b", "h100", attention_dp=2)


@pytest.mark.parametrize(("flags", "word"), [
    ({"max_model_len": 10**6}, "max_model_len"), ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ({"max_num_seqs": 0}, "max_num_seqs"), ({"tp": 0}, "tp"), ({"ep": 2}, "ep"),
    ({"kv_cache_dtype": "fp7"}, "kv cache"),
    ({"weight_dtype": "int3"}, "weight dtype"), ({"engine": "vlm"}, "engine"), ({"engine": "vllm@x"}, "version"),
    ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "max_num_batched_tokens"),
    ({"max_num_batched_tokens": 2048, "enable_chunked_prefill": False}, "chunked"), ({"dtype": "fp8"}, "dtype"),
    ({"tp": 4, "dcp": 3}, "dcp"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(flags: dict[str, object], word: str) -> None:
    with pytest.raises(BstarError) as caught:
        build_deployment("llama-3.1-8b", "h100", **flags)  # type: ignore[arg-type]
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_device_can_be_overridden() -> None:
    d = build_deployment("llama-3.1-8b", "h100", gpu_memory_bytes=64 << 30, bandwidth_bytes_per_s=3e12,
                         price_usd_per_hour=1.5).device
    assert (d.reported_memory_bytes, d.bandwidth_bytes_per_s) == (64 << 30, 3e12)
    assert d.price is not None
    assert d.price.usd_per_hour == 1.5


def test_dtypes() -> None:
    model = resolve_model("llama-3.1-8b")
    fp8 = with_weight_dtype(model, "fp8")
    assert (fp8.weight_dtype, fp8.converted_from) == ("fp8", "bf16")
    assert with_weight_dtype(model, "bf16") is model
    assert with_dtype(model, "bfloat16") is model
    wide = with_dtype(model, "float32")
    assert (wide.dtype, wide.layers[0].formats.default.bits) == ("fp32", 32)
    named = resolve_model("someone/Llama-3.1-8B-Instruct-FP8")
    assert (named.weight_dtype, named.converted_from) == ("fp8", None)


def test_names_paths_and_folders(tmp_path: Path) -> None:
    by_name = resolve_model("llama-3.1-8b")
    for other in ("meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b-instruct", "unsloth/Llama-3.1-8B"):
        assert resolve_model(other).layers == by_name.layers
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json"):
        found = resolve_model(str(path))
        assert found.name == "my-model"
        assert found.num_layers == 32


def test_a_folder_named_like_a_model_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("meta-llama/Llama-3.1-8B").num_layers == 3
    assert resolve_model("llama-3.1-8b").num_layers == 32


def test_unknown_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotInCatalogError, match="did you mean"):
        resolve_model("lama-3.1-8b")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        resolve_model("no-such-org/no-such-model-xyz")
    for bad in ("", "  ", "a\0b", str(tmp_path / "none.json"), str(tmp_path), "x" * 5000):
        with pytest.raises(BstarError):
            resolve_model(bad)


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot be reached"):
        resolve_model("no-such-org/no-such-model-xyz")


class _Hub(BaseHTTPRequestHandler):
    """A hub with one model: org/new-model has a config.json, org/gated does not let anyone in."""

    def do_GET(self) -> None:
        found = {"/org/new-model/resolve/main/config.json": (200, json.dumps(LLAMA).encode()),
                 "/org/text/resolve/main/config.json": (200, b"<html>"),
                 "/org/gated/resolve/main/config.json": (401, b"")}  # fmt: skip
        code, body = found.get(self.path, (404, b""))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


def test_a_hub_id_is_fetched_where_the_network_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        model = resolve_model("org/new-model")
        assert (model.num_layers, model.name) == (32, "org/new-model")
        assert model.source.endswith("/org/new-model/resolve/main/config.json")
        for name, word in (("org/gated", "gated"), ("org/none", "404"), ("org/text", "not JSON")):
            with pytest.raises(ConfigError, match=word):
                resolve_model(name)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_sizes_by_hand_replace_and_describe(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert resolve_model(str(path), overrides={"layers": 4, "kv_heads": 4}).num_layers == 4
    assert resolve_model("llama-3.1-8b", overrides={"max_context": 200_000}).max_context_tokens == 200_000
    sizes = {"layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "intermediate_size": 14336,
             "vocab_size": 128256, "max_context": 131072}
    from bstar.physics.weights import parameter_counts

    assert parameter_counts(resolve_model("mine", overrides=sizes)).total == 8030261248
    path.write_text(json.dumps({"architectures": ["NewForCausalLM"], "model_type": "brand_new"}))
    assert parameter_counts(resolve_model(str(path), overrides=sizes)).total == 8030261248


@pytest.mark.parametrize("extra", [
    {"experts": 64, "experts_per_token": 8, "moe_intermediate_size": 1024},
    {"experts": 64, "experts_per_token": 8, "moe_intermediate_size": 1024, "shared_experts": 1, "dense_layers": 1,
     "intermediate_size": 8192},
    {"intermediate_size": 8192, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
     "v_head_dim": 128},
    {"experts": 64, "experts_per_token": 8, "moe_intermediate_size": 1024, "kv_lora_rank": 512,
     "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "shared_experts": 1},
    {"intermediate_size": 8192, "sliding_window": 4096, "kv_heads": 8},
    {"intermediate_size": 8192, "tie_embeddings": 1},
])  # fmt: skip
def test_mechanisms_by_hand(extra: dict[str, int]) -> None:
    sizes = {"layers": 6, "hidden_size": 2048, "heads": 16, "vocab_size": 32000, "max_context": 8192} | extra
    model = resolve_model("mine", overrides=sizes)
    mixer, ffn = model.layers[-1].mixer, model.layers[-1].ffn
    assert mixer.kind == ("mla" if "kv_lora_rank" in extra else "gqa")
    assert ffn.kind == ("moe" if "experts" in extra else "dense")
    assert getattr(mixer, "window", None) == extra.get("sliding_window")
    assert model.tied == bool(extra.get("tie_embeddings"))


def test_missing_sizes_are_named() -> None:
    with pytest.raises(SpecError, match="--heads"):
        by_hand.described({"layers": 2, "hidden_size": 64})
    with pytest.raises(SpecError, match="no-such"):
        by_hand.described({"no-such": 2})


def test_an_unknown_architecture_keeps_its_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["NewForCausalLM"], "model_type": "brand_new", "hidden_size": 8}))
    with pytest.raises(UnsupportedArchitectureError):
        resolve_model(str(path))
