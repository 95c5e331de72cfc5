"""Cache bytes per token, sequence and state: exact facts of every kind, and laws."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.codec.resolve import resolve_model
from bstar.physics.kv_cache import (
    cache_groups,
    entry_bytes,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    state_bytes,
    state_bytes_per_sequence,
)
from bstar.physics.kv_pages import attention_block_tokens, layer_pages
from bstar.specs.attention import CacheEntry
from bstar.specs.formats import KV_FORMATS
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

DATA = Path(__file__).parents[1] / "data"
BF16, FP8 = KV_FORMATS["bf16"], KV_FORMATS["fp8"]


@pytest.mark.parametrize(
    ("name", "split", "bytes_"),
    [
        ("meta-llama/Meta-Llama-3-8B", ParallelSpec(), 131_072),
        ("meta-llama/Meta-Llama-3-8B", ParallelSpec(tp=8), 16_384),
        ("meta-llama/Meta-Llama-3-8B", ParallelSpec(tp=16), 16_384),  # KV heads replicated beyond 8
        ("meta-llama/Llama-3.1-70B", ParallelSpec(), 327_680),
        ("meta-llama/Llama-3.1-70B", ParallelSpec(pp=4), 81_920),
        ("deepseek-ai/DeepSeek-V2-Lite", ParallelSpec(), 31_104),
        ("deepseek-ai/DeepSeek-V2-Lite", ParallelSpec(tp=8), 31_104),  # a latent has no heads to split
        ("deepseek-ai/DeepSeek-V2-Lite", ParallelSpec(tp=8, dcp=8), 3_888),
        ("deepseek-ai/DeepSeek-V3", ParallelSpec(), 61 * 576 * 2),
        ("Qwen/Qwen3-235B-A22B-FP8", ParallelSpec(tp=4), 94 * 128 * 2 * 2),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", ParallelSpec(), 163_840),
    ],
)
def test_bytes_per_token(name: str, split: ParallelSpec, bytes_: int) -> None:
    assert kv_bytes_per_token(resolve_model(name), BF16, split) == bytes_


@pytest.mark.parametrize(
    "name", ["meta-llama/Meta-Llama-3-8B", "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-27b-it"])
def test_fp8_is_exactly_half(name: str) -> None:
    model = resolve_model(name)
    assert 2 * kv_bytes_per_token(model, FP8) == kv_bytes_per_token(model, BF16)


def test_sparse_mla_packs_656_bytes_and_keeps_an_index_beside_it() -> None:
    latent, index = resolve_model("deepseek-ai/DeepSeek-V3.2").layers[0].mixer.cache()
    assert entry_bytes(latent, FP8) == 656
    assert entry_bytes(latent, BF16) == 1152
    assert entry_bytes(index, BF16) == entry_bytes(index, FP8) == 132


@pytest.mark.parametrize(
    ("fmt", "bytes_"),
    [("bf16", 8 * 512), ("fp8", 8 * 256), ("int8_per_token_head", 8 * (256 + 8)), ("nvfp4", 8 * (128 + 16))],
)
def test_scales_are_counted(fmt: str, bytes_: int) -> None:
    assert entry_bytes(CacheEntry(kind="kv", heads=8, elements=256), KV_FORMATS[fmt]) == bytes_


def test_windows_stop_growing() -> None:
    model = resolve_model("openai/gpt-oss-120b")
    window = next(g.window for g in cache_groups(model, BF16) if g.window)
    short, long, longer = (kv_bytes_per_sequence(model, BF16, n) for n in (window, 2 * window, 4 * window))
    assert short == window * kv_bytes_per_token(model, BF16)
    assert longer - long == long - short + (longer - 2 * long + short)
    full = sum(g.bytes_per_token for g in cache_groups(model, BF16) if g.window is None)
    assert longer - long == 2 * window * full


@cache
def growing_models() -> tuple[ModelSpec, ...]:
    names = ("google/gemma-3-27b-it", "deepseek-ai/DeepSeek-V4-Flash", "Qwen/Qwen3.6-27B")
    return tuple(resolve_model(name) for name in names)


@given(st.integers(1, 300_000), st.integers(1, 300_000))
def test_a_longer_context_never_takes_less(a: int, b: int) -> None:
    low, high = sorted((a, b))
    for model in growing_models():
        assert kv_bytes_per_sequence(model, BF16, low) <= kv_bytes_per_sequence(model, BF16, high)


def test_contexts_may_be_arrays() -> None:
    model = resolve_model("google/gemma-3-27b-it")
    contexts = np.array([1.0, 1024.0, 4096.0, 131072.0])
    together = kv_bytes_per_sequence(model, BF16, contexts)
    assert together.tolist() == [kv_bytes_per_sequence(model, BF16, float(c)) for c in contexts]


def test_states_are_split_by_tp_and_constant() -> None:
    model = resolve_model("Qwen/Qwen3.6-27B")
    one = 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2)
    assert state_bytes_per_sequence(model) == one
    assert state_bytes_per_sequence(model, ParallelSpec(tp=2)) == one // 2


# Attention block sizes of hybrids as start-up logs show them (blocks grow until a page holds a state).
@pytest.mark.parametrize(
    ("name", "fmt", "tp", "lookahead", "block", "page"),
    [
        ("Qwen/Qwen3.6-27B", "fp8", 2, 3, 1600, 1600 * 1024),
        ("Qwen/Qwen3.6-27B", "fp8", 2, 0, 1568, 1568 * 1024),
        ("Qwen/Qwen3.6-35B-A3B", "fp8", 1, 0, 2096, 2096 * 1024),
    ],
)
def test_hybrid_blocks(name: str, fmt: str, tp: int, lookahead: int, block: int, page: int) -> None:
    model = resolve_model(name)
    pages = [p for layer in layer_pages(model, KV_FORMATS[fmt], tp=tp, block_tokens=16,
                                        num_speculative_tokens=lookahead) for p in layer]
    assert {p.block_tokens for p in pages if p.kind == "full"} == {block}
    assert {p.page_bytes for p in pages} == {page}


def test_block_sizes_by_attention_kind() -> None:
    sizes = {
        name: attention_block_tokens(resolve_model(name), compute_capability=90)
        for name in ("meta-llama/Meta-Llama-3-8B", "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash")
    }
    assert list(sizes.values()) == [16, 64, 256]


def test_state_pages_equal_vllm() -> None:
    data = json.loads((DATA / "state_oracle.json").read_text(encoding="utf-8"))["states"]
    checked = 0
    for row in data:
        path = DATA / "model_configs" / row["config"]
        if not path.exists():
            continue
        mixers = [g.mixer for g in resolve_model(str(path)).layers]
        sizes = {sum(s) for m in mixers if (s := state_bytes(m, tp=row["tp"]))}
        assert sizes == {row["page_bytes"]}, row
        checked += 1
    assert checked >= 16
