"""Parameters and weight bytes: exact facts, sharding rules, and what a step streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.catalog.devices import get_device
from bstar.codec.resolve import resolve_model
from bstar.errors import SpecError
from bstar.physics.loading import loaded_weight_bytes
from bstar.physics.partition import check_parallel, padded_vocab_rows, rank_shape, stage_bounds
from bstar.physics.weights import (
    expected_distinct_experts,
    parameter_counts,
    stage_weight_bytes,
    streamed_weight_bytes,
    weight_bytes,
)
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec
from bstar.specs.tensors import WeightTensor
from bstar.units import GIB

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def model(name: str, **kw: str) -> ModelSpec:
    return resolve_model(name, **kw)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "total"),
    [(LLAMA, 8_030_261_248), ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496), ("Qwen/Qwen3-0.6B", 596_049_920)],
)
def test_published_totals(name: str, total: int) -> None:
    assert parameter_counts(model(name)).total == total


# Loaded weights as vLLM logs them ("model loading took N GiB"), with pipeline stages, quantization and padding.
@pytest.mark.parametrize(
    ("name", "dtype", "split", "device", "gib"),
    [
        (LLAMA, None, ParallelSpec(), "h100", 14.99),
        (LLAMA, None, ParallelSpec(tp=4), "h100", 3.77),
        (LLAMA, None, ParallelSpec(pp=2), "h100", 7.51),
        (LLAMA, None, ParallelSpec(pp=4), "h100", 4.26),
        (LLAMA, "fp8", ParallelSpec(), "h100", 8.49),
        ("Qwen/Qwen3-8B", None, ParallelSpec(), "h100", 15.27),
        ("Qwen/Qwen3-8B", None, ParallelSpec(pp=3), "h100", 5.48),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "w4a16", ParallelSpec(), "a100-sxm-80gb", 37.06),
        ("openai/gpt-oss-20b", None, ParallelSpec(), "h100", 13.47),
        ("openai/gpt-oss-120b", None, ParallelSpec(), "h100", 64.38),
        ("openai/gpt-oss-120b", None, ParallelSpec(), "a100-sxm-80gb", 65.97),
    ],
)
def test_loaded_weights_as_the_engine_logs_them(
    name: str, dtype: str | None, split: ParallelSpec, device: str, gib: float
) -> None:
    loaded = loaded_weight_bytes(resolve_model(name, weight_dtype=dtype), split, get_device(device))
    assert loaded[0] / GIB == pytest.approx(gib, rel=0.005)


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_cover_every_layer_once_and_differ_by_at_most_one(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(SpecError, match="pp"):
            stage_bounds(layers, pp)
        return
    bounds = stage_bounds(layers, pp)
    assert [b[0] for b in bounds] == [0, *(b[1] for b in bounds[:-1])] and bounds[-1][1] == layers
    sizes = [end - first for first, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def test_remainder_layers_go_before_the_last_stage() -> None:
    assert [end - first for first, end in stage_bounds(61, 4)] == [15, 15, 16, 15]


@pytest.mark.parametrize(("tp", "rows"), [(1, 1024), (4, 256), (8, 128), (16, 128)])
def test_kv_heads_are_replicated_beyond_their_number(tp: int, rows: int) -> None:
    tensor = WeightTensor(name="k_proj", role="qkv", rows=1024, columns=4096, shard="kv", heads=8)
    assert rank_shape(tensor, ParallelSpec(tp=tp)) == (rows, 4096, 1)


def test_experts_are_split_whole_by_ep_and_by_width_otherwise() -> None:
    up = WeightTensor(name="e.gate_up_proj", role="experts", rows=4096, columns=2048, copies=128, shard="expert")
    down = WeightTensor(name="e.down_proj", role="experts", rows=2048, columns=2048, copies=128, shard="expert")
    assert rank_shape(up, ParallelSpec(tp=8)) == (512, 2048, 128)
    assert rank_shape(down, ParallelSpec(tp=8)) == (2048, 256, 128)
    assert rank_shape(up, ParallelSpec(tp=8, ep=8)) == (4096, 2048, 16)
    assert rank_shape(up, ParallelSpec(tp=2, attention_dp=4, ep=8)) == (4096, 2048, 16)
    assert rank_shape(up, ParallelSpec(tp=2, attention_dp=4)) == (512, 2048, 128)


def test_vocabulary_is_padded_to_64() -> None:
    assert padded_vocab_rows(128256) == 128256
    assert padded_vocab_rows(50257) == 50304


@pytest.mark.parametrize("name", [LLAMA, "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"])
def test_ranks_together_hold_at_least_the_model(name: str) -> None:
    whole = weight_bytes(model(name))
    for split in (ParallelSpec(tp=2), ParallelSpec(tp=4), ParallelSpec(tp=8, ep=8), ParallelSpec(pp=2)):
        ranks = sum(stage_weight_bytes(model(name), split)) * split.tp
        assert whole * 0.999 <= ranks <= whole * 1.35


def test_streamed_weights_leave_the_embedding_out_and_stream_a_tied_head() -> None:
    untied, tied = model(LLAMA), model("Qwen/Qwen3-0.6B")
    assert weight_bytes(untied) - streamed_weight_bytes(untied) == 128256 * 4096 * 2
    assert tied.tied and streamed_weight_bytes(tied) == weight_bytes(tied)


@given(st.floats(1, 5000), st.floats(1, 5000))
def test_streamed_experts_grow_with_the_batch_up_to_all(a: float, b: float) -> None:
    moe = model("Qwen/Qwen3-30B-A3B")
    few, many = sorted((a, b))
    split = ParallelSpec(tp=4, ep=4)
    low, high = (streamed_weight_bytes(moe, split, tokens=t) for t in (few, many))
    assert low <= high <= streamed_weight_bytes(moe, split)


def test_distinct_experts_of_the_source() -> None:
    assert expected_distinct_experts(256, 8, 32) == pytest.approx(163.31384595038296, rel=1e-12)
    assert expected_distinct_experts(256, 8, 1) == pytest.approx(8)


@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        (LLAMA, ParallelSpec(tp=3), "num_attention_heads 32 is not divisible by 3"),
        ("Qwen/Qwen3-235B-A22B-FP8", ParallelSpec(tp=32), "48 is no multiple of the scale block 32"),
        (LLAMA, ParallelSpec(pp=64), "64 stages for 32 layers"),
        (LLAMA, ParallelSpec(tp=16, dcp=16), "dcp: 16 exceeds the 2 replicas"),
    ],
)
def test_splits_that_the_engine_refuses_say_why(name: str, split: ParallelSpec, says: str) -> None:
    assert any(says in reason for reason in check_parallel(model(name), split))


@pytest.mark.parametrize(
    ("name", "split"),
    [(LLAMA, ParallelSpec(tp=16)), ("Qwen/Qwen3-235B-A22B-FP8", ParallelSpec(tp=8, ep=8)),
     ("deepseek-ai/DeepSeek-V3", ParallelSpec(tp=8)), ("Qwen/Qwen3.6-27B", ParallelSpec(tp=2))],
)
def test_splits_that_the_engine_takes(name: str, split: ParallelSpec) -> None:
    assert check_parallel(model(name), split) == ()
