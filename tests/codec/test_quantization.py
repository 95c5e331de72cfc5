"""Quantization configs: which module gets which format, and how many bytes the checkpoint then holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from bstar.codec.hf_config import model_from_config
from bstar.codec.module_names import Patterns, canonical, local_names
from bstar.codec.quantization import quantization_of
from bstar.errors import BstarError, ConfigError
from bstar.specs.formats import FP8, NVFP4
from bstar.specs.model import ModelSpec

DATA = Path(__file__).resolve().parent.parent / "data" / "model_configs"
GIB = 1 << 30


def real(name: str) -> ModelSpec:
    raw = json.loads((DATA / f"{name}_config.json").read_text())
    beside = DATA / f"{name}_hf_quant_config.json"
    return model_from_config(raw, name=name,
                             hf_quant_config=json.loads(beside.read_text()) if beside.exists() else None)


def stored_bytes(model: ModelSpec) -> int:
    """Bytes of layers, embedding and head as stored (towers and MTP layers aside)."""
    total = sum(g.formats.of(t).bytes_of(t.rows, t.columns) * t.copies * g.count
                for g in model.layers for t in g.tensors(model.hidden_size))
    outside = model.embedding + model.head_tensors + (() if model.tied else model.lm_head)
    return total + sum(model.outer_formats.of(t).bytes_of(t.rows, t.columns) for t in outside)


def formats(model: ModelSpec, layer: int) -> dict[str, str]:
    """Format name of each GEMM tensor of one layer."""
    group = next(g for g in model.layers if layer in g.indices)
    return {t.name: group.formats.of(t).name for t in group.tensors(model.hidden_size) if t.matmul}


LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip


# What vLLM logged for these checkpoints (shared/data/measured_memory_points.csv: mp009, mp037, mp048).
@pytest.mark.parametrize(("quantization", "gib"), [
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}}}, 67.72),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, 37.06),
    ({"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}}}, 67.7229),
])
def test_quantized_llama_70b_weighs_what_the_engine_logged(quantization: dict[str, Any], gib: float) -> None:
    model = model_from_config({**LLAMA_70B, "quantization_config": quantization}, name="m")
    assert stored_bytes(model) / GIB == pytest.approx(gib, rel=0.005)


def test_deepseek_r1_block_fp8_with_fp32_scales() -> None:
    model = real("deepseek-ai--DeepSeek-R1")
    found = formats(model, 10)
    assert found["mlp.experts.gate_up_proj"] == found["self_attn.o_proj"] == "fp8_block"
    assert found["mlp.gate"] == "bf16"
    # The Hub counts 688.6 GB with the MTP layer's 14 B parameters (embedding and head copied there).
    mtp = next(b for b in model.blocks if b.role == "mtp")
    copies = 2 * 129280 * 7168 * 2
    assert stored_bytes(model) + mtp.parameters * (1 + 4 / 128**2) + copies == pytest.approx(688.6e9, rel=0.003)


def test_nvfp4_keeps_the_excluded_modules_of_each_layer() -> None:
    model = real("nvidia--DeepSeek-V3.1-NVFP4")
    found = formats(model, 5)
    assert found["mlp.experts.down_proj"] == found["self_attn.o_proj"] == "nvfp4"
    assert found["self_attn.q_a_proj"] == found["self_attn.kv_b_proj"] == "bf16"
    assert model.kv_cache_dtype == "fp8"


def test_wildcards_split_layers_into_groups() -> None:
    model = real("nvidia--GLM-5.1-NVFP4")
    assert formats(model, 0)["mlp.gate_proj"] == "bf16"  # "model.layers.0*" excludes the whole layer
    assert formats(model, 10)["mlp.experts.gate_up_proj"] == "nvfp4"
    assert formats(model, 10)["mlp.shared_experts.up_proj"] == "bf16"


def test_mixed_precision_by_name() -> None:
    model = real("nvidia--Qwen3.6-27B-NVFP4")
    linear = next(g.indices[0] for g in model.layers if g.mixer.kind == "gated_delta_net")
    found = formats(model, linear)
    assert found["linear_attn.in_proj_qkv"] == "fp8" and found["mlp.up_proj"] == "nvfp4_w4a16"
    assert found["linear_attn.in_proj_a"] == "bf16"
    assert model.outer_formats.of(model.lm_head[0]).name == "nvfp4_w4a16"


def test_gemma_4_experts_stand_beside_the_dense_ffn() -> None:
    found = formats(real("nvidia--Gemma-4-26B-A4B-NVFP4"), 3)
    assert found["experts.gate_up_proj"] == "nvfp4" and found["mlp.up_proj"] == "bf16"


def test_nvfp4_recipe_leaves_linear_attention_alone() -> None:
    model = real("Qwen--Qwen3.5-35B-A3B").with_weight_format(NVFP4)
    linear = next(g.indices[0] for g in model.layers if g.mixer.kind == "gated_delta_net")
    found = formats(model, linear)
    assert {f for n, f in found.items() if n.startswith("linear_attn.")} == {"bf16"}
    assert found["mlp.experts.gate_up_proj"] == "nvfp4" and found["mlp.shared_expert_gate"] == "bf16"
    assert formats(model.with_weight_format(FP8), linear)["linear_attn.out_proj"] == "fp8"


def test_mxfp4_covers_experts_only() -> None:
    model = real("openai--gpt-oss-120b")
    found = formats(model, 0)
    assert {n for n, f in found.items() if f == "mxfp4"} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert 60 < stored_bytes(model) / GIB < 62


def test_deepseek_v4_attention_is_fp8_and_experts_are_fp4() -> None:
    found = formats(real("nvidia--DeepSeek-V4-Flash-NVFP4"), 4)
    assert found["mlp.experts.gate_up_proj"] == "nvfp4"
    assert found["self_attn.q_b_proj"] == found["mlp.shared_experts.up_proj"] == "fp8_block"
    assert found["self_attn.compressor.kv_proj"] == found["mlp.gate"] == "bf16"


SMALL: dict[str, Any] = {**LLAMA_70B, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}


@pytest.mark.parametrize(("quantization", "weight", "kv"), [
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", None),
    ({"quant_method": "fp8", "weight_block_size": [64, 32]}, "fp8_block_64x32", None),
    ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}, "fp8_channel", None),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "w4a16", None),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "w8a16", None),
    ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "w3a16_g64", None),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "w4a16_g64", None),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit", None),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb_int8", None),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8", "fp8"),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}},
     "nvfp4", "nvfp4"),
    ({"producer": {"name": "modelopt"}, "quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "fp8", "fp8"),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                                 "group_size": 128, "symmetric": False}}}}, "w4a16", "fp8"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                                 "group_size": 16},
              "input_activations": {"num_bits": 4, "type": "float", "group_size": 16}}}}, "nvfp4", None),
    ({"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "input_tensors": {"dtype": "fp8_e4m3"}}},
     "fp8_channel", None),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, "w4a16_sym", None),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "w8a16", None),
])
def test_methods(quantization: dict[str, Any], weight: str, kv: str | None) -> None:
    model = model_from_config({**SMALL, "quantization_config": quantization}, name="m")
    assert (model.weight_dtype, model.kv_cache_dtype) == (weight, kv)
    assert {f for n, f in formats(model, 0).items()} == {weight}
    assert model.outer_formats.of(model.lm_head[0]).name == "bf16"


def test_unquantized_layers_and_modules() -> None:
    skipped = ["model.layers.0", "re:.*layers\\.1\\..*down_proj", "model.layers.2.self_attn.q_proj", "*.k_proj"]
    quantization = {"quant_method": "compressed-tensors", "ignore": skipped, "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
              "input_activations": {"num_bits": 8, "type": "float"}}}}
    model = model_from_config({**SMALL, "quantization_config": quantization}, name="m")
    assert set(formats(model, 0).values()) == {"bf16"}
    assert [n for n, f in formats(model, 1).items() if f == "bf16"] == ["self_attn.k_proj", "mlp.down_proj"]
    assert [n for n, f in formats(model, 2).items() if f == "bf16"] == ["self_attn.q_proj", "self_attn.k_proj"]
    assert [n for n, f in formats(model, 3).items() if f == "bf16"] == ["self_attn.k_proj"]
    assert len(model.layers) == 4


def test_expert_targets_by_regular_expression() -> None:
    raw = {**SMALL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
           "quantization_config": {"quant_method": "compressed-tensors", "ignore": [], "config_groups": {"g": {
               "targets": ["re:.*mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$"],
               "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}}}}
    found = formats(model_from_config(raw, name="m"), 0)
    assert {n for n, f in found.items() if f != "bf16"} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_gptq_dynamic_and_auto_round_extras() -> None:
    dynamic = {"-:.*layers\\.0\\..*": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}}
    model = model_from_config({**SMALL, "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}}, name="m")
    assert set(formats(model, 0).values()) == {"bf16"}
    assert formats(model, 1)["mlp.down_proj"] == "w8a16_g32"
    extra = {"model.layers.1.mlp.down_proj": {"bits": 16, "group_size": 128}, ".*o_proj.*": {"bits": 8}}
    model = model_from_config({**SMALL, "quantization_config": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": extra}}, name="m")
    assert formats(model, 1)["mlp.down_proj"] == "bf16" and formats(model, 1)["self_attn.o_proj"].startswith("w8a16")


@pytest.mark.parametrize("quantization", [
    {"quant_method": "aqlm"}, {"quant_method": 4}, {"bits": 4}, [], "fp8", {"quant_method": "gptq", "bits": 99},
    {"quant_method": "gptq", "bits": 4, "group_size": 0}, {"quant_method": "fp8", "weight_block_size": [0, 128]},
    {"quant_method": "modelopt", "quant_algo": "FP7"}, {"quant_method": "modelopt"},
    {"quant_method": "compressed-tensors"}, {"quant_method": "compressed-tensors", "config_groups": {"g": 3}},
    {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP5"},
    {"quant_method": "compressed-tensors", "ignore": ["re:(a+)+$"], "config_groups": {"g": {"weights": {}}}},
    {"quant_method": "compressed-tensors", "ignore": ["re:["], "config_groups": {"g": {"weights": {}}}},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": 3}},
])
def test_what_is_not_understood_is_one_clear_line(quantization: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        model_from_config({**SMALL, "quantization_config": quantization}, name="m")
    assert "quant" in str(caught.value) or "config_groups" in str(caught.value) or "ignore" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_quantization_is_the_model_dtype() -> None:
    for raw in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert quantization_of(raw, {}, None).default is None
    assert quantization_of({}, {}, {"quantization": {"quant_algo": None}}).default is None


def test_checkpoint_prefixes_are_tolerated() -> None:
    for prefix in ("model.", "model.language_model.", "language_model.model.", "backbone.", "transformer.", ""):
        assert canonical(f"{prefix}layers.3.mlp.gate_proj") == "layers.3.mlp.gate_proj"
    assert canonical("mtp.layers.0*") == "mtp.layers.0*"
    assert "experts.*.gate_proj" in {n.partition(".")[2] for n in local_names("mlp.experts.gate_up_proj")}
    assert Patterns(("model.layers.1.*",), where="x").match(["layers.1.mlp"])
    assert not Patterns(("model.layers.1.*",), where="x").match(["layers.10.mlp"])


def test_long_lists_and_hostile_patterns_end_soon() -> None:
    begin = time.perf_counter()
    names = {f"model.layers.{i}.mlp.experts.{j}.{p}": {"quant_algo": "NVFP4", "group_size": 16}
             for i in range(60) for j in range(120) for p in ("gate_proj", "up_proj", "down_proj")}
    model_from_config({**SMALL, "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": names}}, name="m")
    for pattern in ("re:" + ".*" * 60 + "x", "*" * 40 + "x", "re:(.*)*(.*)*x", "re:(?:a|aa)+(?:a|aa)+$"):
        try:
            model_from_config({**SMALL, "num_hidden_layers": 64, "quantization_config": {
                "quant_method": "compressed-tensors", "ignore": [pattern], "config_groups": {
                    "g": {"weights": {"num_bits": 8}}}}}, name="m")
        except BstarError:
            continue
    assert time.perf_counter() - begin < 5
