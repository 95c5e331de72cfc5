"""Laws of a step's FLOPs and bytes, for every mechanism that a bundled config has."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar.codec.hf_config import model_from_config
from bstar.errors import SpecError
from bstar.physics.batch import BatchShape
from bstar.physics.operators import compiled_step, step_operators
from bstar.physics.prefill import windowed_pairs
from bstar.physics.step_costs import step_cost, totals_by_name
from bstar.physics.weights import streamed_weight_bytes
from bstar.specs.formats import kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
BF16 = kv_format("bf16")
LINEAR = ("qkv", "out", "mlp", "experts", "shared_experts", "router", "lm_head")
# One config for each mechanism: GQA, MoE, MLA, sparse MLA, compressed, gated delta, Mamba 2 hybrid, windows, chunks.
NAMES = [
    "meta-llama--Meta-Llama-3.1-8B", "Qwen--Qwen3-30B-A3B", "deepseek-ai--DeepSeek-R1", "deepseek-ai--DeepSeek-V3.2",
    "nvidia--DeepSeek-V4-Flash-NVFP4", "Qwen--Qwen3.5-35B-A3B", "nvidia--Nemotron-H-56B-Base-8K",
    "openai--gpt-oss-120b", "meta-llama--Llama-4-Maverick-17B-128E-Instruct", "nvidia--Gemma-4-26B-A4B-NVFP4",
    "XiaomiMiMo--MiMo-V2-Flash", "stepfun-ai--Step-3.7-Flash",
]  # fmt: skip
ALL = sorted(p.name.removesuffix("_config.json") for p in CONFIGS.glob("*_config.json") if "hf_quant" not in p.name)


@cache
def load(name: str) -> ModelSpec:
    quant = CONFIGS / f"{name}_hf_quant_config.json"
    return model_from_config(
        json.loads((CONFIGS / f"{name}_config.json").read_text(encoding="utf-8")), name=name,
        hf_quant_config=json.loads(quant.read_text(encoding="utf-8")) if quant.exists() else None,
    )  # fmt: skip


ROWS = st.tuples(st.integers(1, 300), st.integers(0, 5000), st.booleans()).map(
    lambda r: (r[0] if r[2] else 1, r[1] + (r[0] if r[2] else 1), r[2]))
BATCHES = st.lists(ROWS, min_size=1, max_size=5)


@pytest.mark.parametrize("name", ALL)
def test_streamed_weights_are_the_sum_over_operators(name: str) -> None:
    model = load(name)
    for split in (ParallelSpec(), ParallelSpec(tp=8), ParallelSpec(tp=4, ep=4)):
        step = compiled_step(model, split, BF16, "all")
        assert math.isclose(float(step.weight_bytes.sum()), streamed_weight_bytes(model, split), rel_tol=1e-12)
        few = float(step.touched_weights(16.0).sum())
        assert math.isclose(few, streamed_weight_bytes(model, split, tokens=16.0), rel_tol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(batch=BATCHES)
@settings(max_examples=8, deadline=None)
def test_a_doubled_batch_doubles_the_flops_and_nothing_is_negative(
    name: str, batch: list[tuple[int, int, bool]]
) -> None:
    model = load(name)
    once, twice = step_cost(model, ParallelSpec(), batch), step_cost(model, ParallelSpec(), batch * 2)
    for part, value in once["flops"].items():
        assert math.isclose(2 * value, twice["flops"][part], rel_tol=1e-12)
    for table in once.values():
        assert all(value >= 0 for value in table.values())
    for part, value in once["read_bytes"].items():
        assert value <= twice["read_bytes"][part] <= 2 * value * (1 + 1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(prompt=st.integers(2, 3000), cut=st.floats(0.05, 0.95), cached=st.integers(0, 3000))
@settings(max_examples=8, deadline=None)
def test_chunks_of_a_prompt_attend_what_the_prompt_attends(name: str, prompt: int, cut: float, cached: int) -> None:
    first = max(1, min(prompt - 1, int(prompt * cut)))
    model = load(name)

    def pairs(*chunks: tuple[int, int]) -> float:
        step = compiled_step(model, ParallelSpec(), BF16, "all")
        total = 0.0
        for new, before in chunks:
            values = step.values(BatchShape.prefill(new, before))
            values[[i for i, s in enumerate(step.statistics) if s[0] == "cached_prefill"]] = 0.0
            total += float((step.flops @ values)[[w.name in ("attn", "indexer", "mixer") for w in step.works]].sum())
        return total

    assert math.isclose(pairs((prompt, cached)), pairs((first, cached), (prompt - first, cached + first)), rel_tol=1e-9)


@given(new=st.integers(0, 400), cached=st.integers(0, 400), window=st.integers(1, 200), chunked=st.booleans())
def test_windowed_pairs_are_a_brute_force_count(new: int, cached: int, window: int, chunked: bool) -> None:
    positions = range(cached + 1, cached + new + 1)
    seen = [(p - 1) % window + 1 if chunked else min(p, window) for p in positions]
    assert windowed_pairs(new, cached, window, chunked=chunked) == sum(seen)


def test_a_first_chunk_attends_half_the_square() -> None:
    assert windowed_pairs(1000, 0, None) == 1000 * 1001 / 2
    assert windowed_pairs(1000, 500, None) == 1000 * 500 + 1000 * 1001 / 2


@pytest.mark.parametrize("tp", [2, 4, 8])
@given(batch=BATCHES)
@settings(max_examples=8, deadline=None)
def test_ranks_share_the_flops_of_what_is_not_replicated(tp: int, batch: list[tuple[int, int, bool]]) -> None:
    model = load("meta-llama--Meta-Llama-3.1-8B")
    whole = step_cost(model, ParallelSpec(), batch)["flops"]
    rank = step_cost(model, ParallelSpec(tp=tp), batch)["flops"]
    for part, value in whole.items():
        assert math.isclose(tp * rank[part], value, rel_tol=1e-12)


def test_ranks_beyond_the_kv_heads_replicate_them() -> None:
    model = load("meta-llama--Meta-Llama-3.1-8B")
    decode = [(1, 1000, False)] * 4
    at8, at16 = (step_cost(model, ParallelSpec(tp=t), decode) for t in (8, 16))
    cache = 4 * 1000 * 2 * 128 * 2 * 32  # one KV head on each rank in both
    for cost in (at8, at16):
        assert cost["read_bytes"]["attn"] >= cache
    q_share = 4096 / 16 + 2 * 128
    assert math.isclose(at16["flops"]["qkv"], 2 * 4 * 4096 * q_share * 32)


def test_expert_parallel_ranks_share_the_routed_flops() -> None:
    model = load("Qwen--Qwen3-30B-A3B")
    batch = [(1, 100, False)] * 64
    whole = step_cost(model, ParallelSpec(), batch)
    for split in (ParallelSpec(tp=4), ParallelSpec(tp=4, ep=4), ParallelSpec(tp=4, ep=2)):
        rank = step_cost(model, split, batch)
        assert math.isclose(4 * rank["flops"]["experts"], whole["flops"]["experts"], rel_tol=1e-12)


def test_attention_data_parallelism_splits_attention_and_not_the_experts_tokens() -> None:
    model = load("deepseek-ai--DeepSeek-R1")
    batch = [(1, 4000, False)] * 128
    tp = step_cost(model, ParallelSpec(tp=8), batch)
    dp = step_cost(model, ParallelSpec(attention_dp=8, ep=8), batch)
    # The latent is replicated by TP: each rank reads all 128; by DP only its 16.
    assert tp["read_bytes"]["attn"] > 7 * dp["read_bytes"]["attn"]
    assert math.isclose(tp["flops"]["experts"], dp["flops"]["experts"], rel_tol=1e-12)
    assert "all_to_all" in dp["read_bytes"]
    assert "allreduce" not in dp["read_bytes"]


def test_stages_add_up_to_the_whole() -> None:
    model = load("meta-llama--Meta-Llama-3.1-8B")
    shape = BatchShape.decode(16, 1000)
    whole = totals_by_name(step_operators(model, ParallelSpec(), shape, BF16))["flops"]
    split = ParallelSpec(pp=4)
    stages = [totals_by_name(step_operators(model, split, shape, BF16, stage=i))["flops"] for i in range(4)]
    for part, value in whole.items():
        assert math.isclose(sum(s.get(part, 0.0) for s in stages), value, rel_tol=1e-12)


def test_absorbed_mla_decode_reaches_its_published_intensity() -> None:
    """2·128·(576 + 512) FLOPs on the 1,152 bytes of a latent: 242 FLOP/byte (mission page, section 6)."""
    model = load("deepseek-ai--DeepSeek-R1")
    decode = next(o for o in step_operators(model, ParallelSpec(), BatchShape.decode(1, 1e9), BF16)
                  if o.kind == "attention_decode")
    assert round(decode.flops / decode.kv_read_bytes) == 242


def test_sparse_attention_attends_its_top_k_and_scores_everything() -> None:
    model = load("deepseek-ai--DeepSeek-V3.2")
    near, far = (step_cost(model, ParallelSpec(), [(1, c, False)]) for c in (2048, 8 * 2048))
    assert near["flops"]["attn"] == far["flops"]["attn"]
    step = compiled_step(model, ParallelSpec(), BF16, "all")
    scores = next(w for w in step.works if w.name == "indexer" and w.kind == "attention_decode")
    (per_pair,) = scores.flops.values()
    assert per_pair == 2 * 64 * 128


def test_a_window_bounds_what_decode_reads() -> None:
    model = load("openai--gpt-oss-120b")
    groups = [g.mixer.window for g in model.layers]  # type: ignore[union-attr]
    assert None in groups
    assert 128 in groups
    step = compiled_step(model, ParallelSpec(), BF16, "all")
    one, other = (float((step.kv_reads @ step.values(BatchShape.decode(1, c))).sum()) for c in (10_000, 20_000))
    full_layers = sum(g.count for g in model.layers if g.mixer.window is None)  # type: ignore[union-attr]
    assert math.isclose(other - one, 10_000 * full_layers * 2 * 8 * 64 * 2)


def test_a_decode_row_that_stands_for_many_is_the_same_as_many_rows() -> None:
    model = load("Qwen--Qwen3-30B-A3B")
    one, many = step_cost(model, ParallelSpec(), BatchShape.decode(32, 777)), step_cost(
        model, ParallelSpec(), [(1, 777, False)] * 32)
    for table in one:
        for part, value in one[table].items():
            assert math.isclose(value, many[table][part], rel_tol=1e-12)


def test_only_sampled_positions_meet_the_head() -> None:
    model = load("meta-llama--Meta-Llama-3.1-8B")
    assert step_cost(model, None, [(1, 9, False)])["flops"]["lm_head"] == 2 * 4096 * 128256
    assert step_cost(model, None, [(500, 500, True)])["flops"]["lm_head"] == 2 * 4096 * 128256


def test_a_batch_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SpecError, match="context after a step"):
        BatchShape.from_triples([(5, 3, True)])
    with pytest.raises(SpecError, match="not \\(new_tokens"):
        BatchShape.from_triples([(5, 3)])


def test_states_are_read_and_written_once_per_sequence() -> None:
    model = load("nvidia--Nemotron-H-56B-Base-8K")
    step = compiled_step(model, ParallelSpec(), BF16, "all")
    state = [w for w in step.works if w.kind == "state"]
    assert state
    for length in (1, 4000):
        values = step.values(BatchShape.prefill(length) if length > 1 else BatchShape.decode(1, 5))
        reads = (step.kv_reads @ values)[[w.kind == "state" for w in step.works]]
        assert np.isclose(reads.sum(), (step.kv_reads @ step.values(BatchShape.decode(1, 5)))[
            [w.kind == "state" for w in step.works]].sum())


def test_decode_context_parallelism_shards_the_cache_that_tp_replicates() -> None:
    model = load("deepseek-ai--DeepSeek-R1")
    batch = [(1, 30_000, False)] * 16
    plain, sharded = (step_cost(model, ParallelSpec(tp=8, dcp=dcp), batch) for dcp in (1, 8))
    assert plain["read_bytes"]["attn"] > 6 * sharded["read_bytes"]["attn"]
    assert "reducescatter" in sharded["read_bytes"]
    assert "reducescatter" not in plain["read_bytes"]
