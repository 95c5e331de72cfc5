"""vLLM's and transformers' own classes, asked about models that no catalog holds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import HERE, ROOT

from bstar.codec.hf_config import model_from_config
from bstar.physics.kv_cache import cache_groups
from bstar.physics.weights import parameter_counts
from bstar.specs.formats import kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

sys.path.insert(0, str(ROOT / "tests" / "physics"))
from test_step_cost_oracle import FLOPS, ours, theirs

pytestmark = pytest.mark.vllm

BLOCK = 32
COMMON = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "hidden_act": "silu",
          "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama, odd sizes": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1536, "num_hidden_layers": 5,
        "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 4224, "vocab_size": 33024,
        "tie_word_embeddings": True},
    "qwen2, biases": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 3,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 2432, "vocab_size": 20000,
        "tie_word_embeddings": False},
    "qwen3 moe, 24 experts": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 96,
        "intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 24, "num_experts_per_tok": 3,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 40960, "tie_word_embeddings": False},
    "mixtral, 6 experts": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 2048, "num_local_experts": 6,
        "num_experts_per_tok": 2, "vocab_size": 32000, "tie_word_embeddings": False},
    "gemma 2, windows": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 1152, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 192, "intermediate_size": 3456,
        "vocab_size": 50000, "sliding_window": 1024, "query_pre_attn_scalar": 192,
        "hidden_activation": "gelu_pytorch_tanh"},
    "deepseek v3, latent": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 1024,
        "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 384,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "intermediate_size": 2816, "moe_intermediate_size": 512, "n_routed_experts": 16,
        "n_shared_experts": 1, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "vocab_size": 30000, "tie_word_embeddings": False},
}  # fmt: skip
STEP_MODELS = ("llama, odd sizes", "qwen3 moe, 24 experts", "mixtral, 6 experts")
DEGREES = {"llama, odd sizes": [1, 4], "qwen2, biases": [1, 2], "qwen3 moe, 24 experts": [1, 2, 8],
           "mixtral, 6 experts": [1, 4], "gemma 2, windows": [1, 2], "deepseek v3, latent": [1, 4]}  # fmt: skip


def draw_steps(seed: int) -> list[list[list[Any]]]:
    """Batches of decodes, of prompts (one on a cached prefix), and of both."""
    rng = random.Random(seed)
    decodes = [[1, rng.randint(2, 8000), False] for _ in range(23)]
    prompts = [[700, 700, True], [256, 256 + 1000, True]]
    return [decodes, prompts, decodes + prompts, [[1, 2, False]]]


STEPS = draw_steps(7)


def model(name: str) -> ModelSpec:
    return model_from_config(CONFIGS[name] | {k: v for k, v in COMMON.items() if k not in CONFIGS[name]}, name=name)


@pytest.fixture(scope="module")
def answers(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All answers in one process: importing vLLM takes longer than answering."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "questions.json").write_text(
        json.dumps(
            {
                name: {
                    "config": COMMON | config,
                    "tp": DEGREES[name],
                    "block_size": BLOCK,
                    "steps": STEPS if name in STEP_MODELS else [],
                }
                for name, config in CONFIGS.items()
            }
        )
    )
    subprocess.run(
        [vllm_python, HERE / "answer.py", folder / "questions.json", folder / "answers.json"], check=True, timeout=240
    )
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_transformers_builds(name: str, answers: dict[str, Any]) -> None:
    assert parameter_counts(model(name)).total == answers[name]["parameters"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_kv_block_has_the_bytes_of_vllms_spec(name: str, answers: dict[str, Any]) -> None:
    for tp, pages in answers[name]["pages"].items():
        groups = cache_groups(model(name), kv_format("bf16"), ParallelSpec(tp=int(tp)))
        assert sum(g.bytes_per_token for g in groups) * BLOCK == sum(pages), tp


@pytest.mark.parametrize("name", STEP_MODELS)
def test_flops_and_bytes_of_a_step_are_vllms(name: str, answers: dict[str, Any]) -> None:
    spec = model(name)
    for tp, steps in answers[name]["steps"].items():
        for batch, reference in zip(STEPS, steps, strict=True):
            flops, read, write = ours(spec, {"tp": int(tp), "batch": [tuple(row) for row in batch]})
            for operator, components in FLOPS.items():
                expected = sum(reference["flops"].get(c, 0) for c in components)
                assert flops.get(operator, 0.0) == pytest.approx(expected, rel=1e-12), (tp, operator)
            for mine, table in ((read, reference["read_bytes"]), (write, reference["write_bytes"])):
                for operator, value in theirs(table).items():
                    assert mine[operator] == pytest.approx(value, rel=1e-12), (tp, operator)
