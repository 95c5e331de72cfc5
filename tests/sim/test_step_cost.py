"""The kernel's step times are those of `bstar.latency`, whatever the model and its split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import bstar
from bstar.latency import step_times_s
from bstar.physics.batch import BatchShape
from bstar.sim.kernel.cost import StepCost
from bstar.sim.reference import step_seconds
from bstar.sim.scheduler import Plan, Request
from bstar.sim.step_cost import step_cost

# One per mechanism: dense, windows, chunks, MLA, sparse, compressed, states, experts, shared experts, fp4.
MODELS = (
    "llama-3.1-8b", "gemma-3-27b", "gpt-oss-120b", "llama-4-scout", "deepseek-r1", "deepseek-v3.2",
    "deepseek-v4-flash", "qwen3-next-80b-a3b", "qwen3-30b-a3b", "mixtral-8x7b", "nemotron-3-nano-30b-a3b",
)  # fmt: skip
SPLITS = ({"tp": 1}, {"tp": 8}, {"tp": 2, "dp": 4}, {"tp": 8, "engine": "sglang"})


def seconds(cost: StepCost, contexts: NDArray[np.int64], chunks: list[tuple[int, int]]) -> float:
    """A step by the readable evaluation of the same coefficients (the twins hold the kernel's to it)."""
    plan = Plan({}, [])
    for rank, context in enumerate(contexts.tolist()):
        plan.tokens[_request(rank, computed=context, target=context - 1)] = 1
    for rank, (new, cached) in enumerate(chunks):
        plan.tokens[_request(len(contexts) + rank, computed=cached + new, target=cached + new + 1)] = new
    return step_seconds(cost, plan)


def _request(rank: int, *, computed: int, target: int) -> Request:
    request = Request(rank=rank, prompt_tokens=1, output_tokens=1, block_key=lambda i: (rank, i))
    request.computed, request.target = computed, target
    return request


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_equal_to_latency(model: str, split: dict[str, Any]) -> None:
    deployment = bstar.deployment(model=model, gpu="h200-sxm-141gb", **split)
    if deployment.parallel.dp > 1:
        pytest.skip("a dense model's dp is replicas")
    cost = step_cost(deployment, max_tokens=8192, max_sequences=512)
    rng = np.random.default_rng(7)
    shapes, ours = [], []
    for _ in range(25):
        contexts = rng.integers(1, 30_000, int(rng.integers(0, 200)))
        few = 0 if contexts.size else 1
        chunks = [(int(rng.integers(1, 2000)), int(rng.integers(0, 9000))) for _ in range(int(rng.integers(few, 4)))]
        rows = [(1.0, float(c), 1.0, False) for c in contexts]
        shapes.append(BatchShape.from_rows(rows + [(float(q), float(q + k), 1.0, True) for q, k in chunks]))
        ours.append(seconds(cost, contexts, chunks))
    np.testing.assert_allclose(ours, step_times_s(deployment, shapes)[1], rtol=1e-12)


def test_one_rank_is_a_share_of_the_replica() -> None:
    """What a rank takes when all ranks have the same batch is what the replica takes with all of them together."""
    deployment = bstar.deployment(model="deepseek-r1", gpu="h200-sxm-141gb", dp=8)
    ranks = deployment.parallel.attention_dp
    assert ranks == 8
    whole = step_cost(deployment, max_tokens=8192, max_sequences=512)
    one = step_cost(deployment, max_tokens=1024, max_sequences=64, one_rank=True)
    contexts = np.arange(500, 520)
    assert seconds(one, contexts, [(700, 10)]) == pytest.approx(
        seconds(whole, np.tile(contexts, ranks), [(700, 10)] * ranks), rel=1e-12
    )
    assert seconds(one, contexts, []) == pytest.approx(seconds(whole, np.tile(contexts, ranks), []), rel=1e-12)


def test_pipeline_stages_share_a_round() -> None:
    deployment = bstar.deployment(model="llama-3.1-70b", gpu="h200-sxm-141gb", tp=2, pp=4)
    cost = step_cost(deployment, max_tokens=2048, max_sequences=256)
    for batch in (4, 37, 200):
        want = bstar.latency.decode_step_time(deployment, batch, 3000.0).expected_s
        assert seconds(cost, np.full(batch, 3000), []) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("model", "tolerance"), [
    ("llama-3.1-8b", 1e-12), ("deepseek-r1", 1e-12), ("qwen3-30b-a3b", 1e-12), ("gpt-oss-120b", 2e-3)])
def test_verification_of_drafts_is_priced_as_latency_prices_it(model: str, tolerance: float) -> None:
    """Four tokens a sequence, alone and beside prompt chunks; windows count at their fullest."""
    deployment = bstar.deployment(model=model, gpu="h200-sxm-141gb", tp=8)
    cost = step_cost(deployment, max_tokens=8192, max_sequences=512, decode_tokens=4)
    assert cost.decode_tokens == 4
    rng = np.random.default_rng(5)
    for chunks in ([], [(700, 30)], [(2000, 0), (300, 4000)]):
        contexts = rng.integers(1000, 20_000, 60)
        rows = [(4.0, float(c + 3), 1.0, False) for c in contexts]
        shape = BatchShape.from_rows(rows + [(float(q), float(q + k), 1.0, True) for q, k in chunks])
        np.testing.assert_allclose(
            seconds(cost, contexts, chunks), step_times_s(deployment, [shape])[1][0], rtol=tolerance)
