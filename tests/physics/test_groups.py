"""Quantization groups that a rank's share does not hold whole, as vLLM 0.32 treats them."""

from __future__ import annotations

import pytest

from bstar.codec.build import build_deployment
from bstar.codec.hf_config import model_from_config
from bstar.codec.resolve import resolve_model
from bstar.physics.memory import memory_budget
from bstar.physics.partition import check_parallel
from bstar.physics.weights import stage_streamed_weight_bytes, stage_weight_bytes
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
    "targets": ["Linear"], "input_activations": None,
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}}}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
PACKED_FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
    "targets": ["Linear"], "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "dynamic": True},
    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}}}


def experts(quantization: dict[str, object], **keys: object) -> ModelSpec:
    return model_from_config(MOE | keys | {"quantization_config": quantization}, name="x")


@pytest.mark.parametrize(("quantization", "tp", "accepted"), [
    (GPTQ, 2, True), (GPTQ, 4, True), (GPTQ, 8, True), (AWQ, 4, True), (AWQ, 8, True),
    (GPTQ, 16, False),  # 48 columns hold no group of 32
    (PACKED, 2, True), (PACKED, 4, False), (PACKED, 8, False),
    (FP8, 2, True), (FP8, 4, True), (FP8, 8, True), (FP8, 16, False), (PACKED_FP8, 2, True), (PACKED_FP8, 4, False),
])
def test_experts(quantization: dict[str, object], tp: int, accepted: bool) -> None:
    """768 columns an expert: 384, 192 (groups of 64), 96 (of 32), 48 a rank."""
    model = experts(quantization)
    assert (not check_parallel(model, ParallelSpec(tp=tp))) == accepted
    assert not check_parallel(model, ParallelSpec(tp=tp, ep=tp))


@pytest.mark.parametrize(("tp", "group"), [(1, 128), (2, 128), (4, 64), (8, 32)])
def test_smaller_groups_repeat_their_scales(tp: int, group: int) -> None:
    """A 16-bit scale and a 4-bit zero point for every group, over all of a rank's experts, gate, up and down."""
    elements = 2 * 128 * 3 * 768 * 2048 // tp
    expected = elements // 2 + elements // group * 20 // 8
    parallel = ParallelSpec(tp=tp)
    with_experts, without = experts(GPTQ), experts(GPTQ, num_experts=8)
    found = stage_weight_bytes(with_experts, parallel)[0] - stage_weight_bytes(without, parallel)[0]
    router = 2 * 120 * 2048 * 2
    assert found - router == pytest.approx(expected * 120 / 128, rel=1e-6)
    streamed = [stage_streamed_weight_bytes(m, parallel)[0] for m in (with_experts, without)]
    assert streamed[0] - streamed[1] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize(("engine", "quantization", "accepted"), [
    ("vllm@0.28.0", FP8, False), ("vllm@0.29.0", FP8, True), ("vllm", FP8, True), ("sglang", FP8, False),
    ("vllm@0.11.0", GPTQ, True), ("sglang", GPTQ, True), ("trtllm", GPTQ, False), ("vllm", PACKED, False),
])
def test_engines_that_cut_blocks(engine: str, quantization: dict[str, object], accepted: bool) -> None:
    """Qwen3-30B-A3B at TP 4 is the known case: 192 columns a rank; block fp8 was refused before vLLM 0.29."""
    built = build_deployment(experts(quantization), "h200-sxm-141gb", tp=4, engine=engine)
    assert memory_budget(built).fits == accepted


def test_cut_blocks_have_more_scales() -> None:
    """One fp32 scale for every 64 × 64 elements instead of 128 × 128 of the same experts."""
    parallel = ParallelSpec(tp=4)
    found = stage_weight_bytes(experts(FP8), parallel)[0] - stage_weight_bytes(experts(FP8, num_experts=8), parallel)[0]
    elements = 2 * 120 * 3 * 192 * 2048
    assert found - 2 * 120 * 2048 * 2 == elements + elements // 64**2 * 4


@pytest.mark.parametrize("quantization", [GPTQ, AWQ, PACKED])
def test_dense_groups_stay_whole(quantization: dict[str, object]) -> None:
    """29568 is 231 groups of 128: no even number of ranks divides them, and the refusal says what publishers do."""
    dense = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 2,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768,
        "torch_dtype": "float16", "quantization_config": quantization,
    }  # fmt: skip
    plain = model_from_config(dense | {"intermediate_size": 29568}, name="x")
    padded = model_from_config(dense | {"intermediate_size": 29696}, name="x")
    for tp in (2, 4, 8):
        [reason] = check_parallel(plain, ParallelSpec(tp=tp))
        assert "pad" in reason
        assert not check_parallel(padded, ParallelSpec(tp=tp))


@pytest.mark.parametrize("name", [
    "Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "Qwen/Qwen2-72B-Instruct-GPTQ-Int8",
    "Qwen/Qwen2-VL-72B-Instruct-AWQ", "Qwen/Qwen2.5-VL-72B-Instruct-AWQ",
])
def test_qwens_72b_checkpoints_are_padded(name: str) -> None:
    model = resolve_model(name)
    assert not any(check_parallel(model, ParallelSpec(tp=tp)) for tp in (1, 2, 4, 8))


def test_the_size_of_qwens_awq_checkpoint() -> None:
    """Hugging Face lists Qwen2.5-72B-Instruct-AWQ at 41.6 GB."""
    assert sum(stage_weight_bytes(resolve_model("Qwen/Qwen2.5-72B-Instruct-AWQ"))) / 1e9 == pytest.approx(41.6, abs=0.1)


@pytest.mark.parametrize(("quantization", "heads", "head_dim", "refused"), [
    (AWQ, 40, 64, {8}), (GPTQ, 40, 64, {8}), (FP8, 40, 64, {8}), (AWQ, 32, 128, set()), (FP8, 14, 64, {2, 4, 8}),
])
def test_the_output_projection_is_split_by_whole_groups(
    quantization: dict[str, object], heads: int, head_dim: int, refused: set[int]
) -> None:
    """AWQ, GPTQ and block fp8 read a scale per 128 inputs: 40 heads of 64 over 8 ranks are 320 inputs each."""
    dense = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": heads * head_dim,
        "head_dim": head_dim, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16",
        "quantization_config": quantization,
    }  # fmt: skip
    model = model_from_config(dense, name="x")
    found = {tp for tp in (1, 2, 4, 8) if any("o_proj" in r for r in check_parallel(model, ParallelSpec(tp=tp)))}
    assert found == refused
