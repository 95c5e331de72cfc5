"""Prediction layers that draft: their weights on a rank, and their cache."""

from __future__ import annotations

from typing import Any

import pytest

from bstar.codec.build import build_deployment
from bstar.codec.hf_config import model_from_config
from bstar.codec.resolve import resolve_model
from bstar.physics.memory import memory_budget
from bstar.physics.weights import draft_weight_bytes
from bstar.specs.parallel import ParallelSpec

H, W, E = 7168, 2048, 256  # DeepSeek-V3: hidden size, width of an expert, experts


def fp8(rows: int, columns: int) -> int:
    """Bytes of a block-scaled fp8 matrix."""
    return rows * columns + -(-rows // 128) * -(-columns // 128) * 4


def expert() -> int:
    return 2 * fp8(W, H) + fp8(H, W)


@pytest.mark.parametrize(("parallel", "experts", "ranks"), [
    (ParallelSpec(), E, 1), (ParallelSpec(attention_dp=8, ep=8), E / 8, 1), (ParallelSpec(tp=8), E / 8, 8),
    (ParallelSpec(tp=8, ep=8), E / 8, 8), (ParallelSpec(tp=4, attention_dp=8, ep=32), E / 32, 4),
])
def test_experts_of_a_prediction_layer_are_spread_as_all_others(parallel: ParallelSpec, experts: float, ranks: int
                                                               ) -> None:
    """DeepSeek-V3's own MTP layer, counted by hand; small tensors are left to the tolerance."""
    attention = fp8(1536, H) + fp8(576, H)  # replicated
    heads = 128 // ranks
    split = fp8(heads * 192, 1536) + fp8(heads * 256, 512) + fp8(H, heads * 128) + heads * 256 * 512 * 2
    shared = expert() / ranks
    projection, router = 2 * H * H * 2, E * H * 2
    expected = experts * expert() + attention + split + shared + projection + router
    assert draft_weight_bytes(resolve_model("deepseek-v3"), parallel) == pytest.approx(expected, rel=0.002)


def budgets(model: str, **settings: Any) -> tuple[Any, Any]:
    return tuple(memory_budget(build_deployment(model, "h200-sxm-141gb", num_speculative_tokens=n, **settings))
                 for n in (0, 1))  # type: ignore[return-value]


def test_expert_parallel_drafts_fit() -> None:
    """Eight ranks with expert parallelism hold 1.75 GiB of the prediction layer each, not all 10.8 GiB of it."""
    plain, drafting = budgets("deepseek-v3", attention_dp=8, enable_expert_parallel=True)
    assert 1.6 < (drafting.weight_bytes - plain.weight_bytes) / 2**30 < 1.9
    assert plain.fits and drafting.fits


def test_the_prediction_layer_has_a_cache() -> None:
    plain, drafting = budgets("deepseek-v3", tp=8)
    assert drafting.bytes_per_block * 61 == plain.bytes_per_block * 62


@pytest.mark.parametrize(("method", "loaded"), [
    (None, True), ("mtp", True), ("deepseek_mtp", True), ("nextn", True), ("ngram", False), ("eagle3", False),
])
def test_only_mtp_methods_load_it(method: str | None, loaded: bool) -> None:
    from dataclasses import replace

    drafting = build_deployment("deepseek-v3", "h200-sxm-141gb", tp=8, num_speculative_tokens=1)
    changed = replace(drafting, engine=replace(drafting.engine, speculative_method=method))
    plain = memory_budget(build_deployment("deepseek-v3", "h200-sxm-141gb", tp=8))
    budget = memory_budget(changed)
    assert (budget.weight_bytes > plain.weight_bytes) == loaded
    assert (budget.bytes_per_block > plain.bytes_per_block) == loaded


def test_excluded_prediction_layers_stay_at_16_bits() -> None:
    """Checkpoints name the layer behind the decoder's ("model.layers.4") or "mtp.*" in their exclusions."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048,
        "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    sizes = []
    for excluded in ([], ["model.layers.4*"], ["mtp.*"], ["mtp.layers.0*"]):
        quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": excluded}
        model = model_from_config(config | {"quantization_config": quantization}, name="x")
        sizes.append(draft_weight_bytes(model, ParallelSpec()))
    assert sizes[1] == sizes[2] == sizes[3]
    assert 2.0 < sizes[1] / sizes[0] < 3.5
