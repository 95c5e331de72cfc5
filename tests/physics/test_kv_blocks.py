"""KV blocks against the answers of vLLM's own functions, and laws of the pool."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.codec.resolve import resolve_model
from bstar.physics.kv_blocks import (
    RequestShape,
    block_groups,
    block_plan,
    blocks_of_request,
    kv_rules,
    longest_context,
)
from bstar.physics.kv_pages import Page, layer_pages
from bstar.specs.formats import KV_FORMATS

ORACLE = Path(__file__).parents[1] / "data" / "kv_oracle.json.gz"


def oracle() -> dict[str, Any]:
    with gzip.open(ORACLE) as file:
        return dict(json.load(file))


def page(cache: dict[str, Any]) -> Page:
    if cache["kind"] == "state":
        return Page(kind="state", block_tokens=0, page_bytes=cache["padded"], shape=(cache["state_bytes"],))
    latent = cache["kind"] == "latent"
    per_token = cache["heads"] * cache["head_size"] * (1 if latent else 2) * cache["bytes"]
    return Page(
        kind="full" if latent else cache["kind"], block_tokens=cache["block"], page_bytes=per_token * cache["block"],
        window=cache.get("window"), shape=(cache["heads"], cache["head_size"], cache["bytes"]), latent=latent)


@pytest.mark.parametrize("version", ["0.12.0", "0.19.0", "0.20.1", "0.25.1", "0.28.0", "0.32.0"])
def test_groups_blocks_tokens_and_concurrency_equal_vllm(version: str) -> None:
    data = oracle()
    rules = kv_rules(tuple(int(p) for p in version.split(".")))
    answered = 0
    for case, answer in zip(data["cases"], data["answers"][version], strict=True):
        groups = block_groups([[page(c)] for c in case["layers"]], rules)
        request = RequestShape(
            max_model_len=case["max_model_len"],
            in_flight_tokens=case["max_num_batched_tokens"] * (case["batches"] if rules.in_flight_batches else 1),
            state_blocks=2 if case["prefix_caching"] and rules.state_checkpoints else 1)
        plan = block_plan(groups, case["available"], request, rules, num_layers=len(case["layers"]),
                          num_blocks_override=case["override"])
        if "error" in answer:
            assert not plan.holds_one_request, answer["error"]
            if rules.stages_projected and "maximum model length is" in answer["error"]:
                estimate = int(answer["error"].split("maximum model length is ")[1].split(".")[0])
                assert longest_context(plan, request, upper=case["max_model_len"]) == estimate
            continue
        answered += 1
        assert plan.holds_one_request
        assert sorted(sorted(g.layers) for g in groups) == answer["groups"]
        assert plan.num_blocks == answer["num_blocks"]
        assert plan.max_concurrency == pytest.approx(answer["max_concurrency"], rel=1e-12)
        assert plan.kv_cache_tokens == answer["tokens"]
    assert answered > 100


@given(st.integers(1, 40), st.sampled_from([16, 32, 64]), st.integers(1, 200_000), st.integers(0, 10**10))
def test_one_kind_of_layer_gives_whole_blocks_of_tokens(layers: int, block: int, length: int, room: int) -> None:
    pages = [[Page(kind="full", block_tokens=block, page_bytes=4096 * block)]] * layers
    rules = kv_rules(())
    request = RequestShape(max_model_len=length, in_flight_tokens=8192)
    plan = block_plan(block_groups(pages, rules), [room], request, rules, num_layers=layers)
    assert plan.num_blocks == room // (layers * 4096 * block)
    assert plan.blocks_per_request == -(-length // block)
    assert plan.bytes_per_block * plan.num_blocks <= room


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(16, 4096))
def test_a_window_never_needs_more_than_the_whole_context(length: int, in_flight: int, window: int) -> None:
    rules = kv_rules(())
    full, sliding = (
        block_groups([[Page(kind=kind, block_tokens=16, page_bytes=65536, window=w)]], rules)[0]
        for kind, w in (("full", None), ("sliding", window))
    )
    request = RequestShape(max_model_len=length, in_flight_tokens=in_flight)
    assert blocks_of_request(sliding, request) <= blocks_of_request(full, request) + 1


@given(st.integers(0, 5000), st.sampled_from([1, 2, 4]))
def test_longest_context_is_the_largest_that_fits(room: int, dcp: int) -> None:
    groups = block_groups(
        [[Page(kind="full", block_tokens=16, page_bytes=4096)], [Page(kind="state", block_tokens=0, page_bytes=4096)]],
        kv_rules(()))
    request = RequestShape(max_model_len=1, in_flight_tokens=8192, dcp=dcp, state_blocks=2)
    plan = block_plan(groups, [(room + 1) * 4096], request, kv_rules(()), num_layers=2)
    longest = longest_context(plan, request, upper=1 << 20)

    def needed(length: int) -> int:
        shape = RequestShape(max_model_len=length, in_flight_tokens=8192, dcp=dcp, state_blocks=2)
        return sum(blocks_of_request(g, shape) for g in groups)

    assert longest == 0 or needed(longest) <= room
    assert longest == 1 << 20 or needed(longest + 1) > room


@pytest.mark.parametrize("version", ["0.20.1", "0.22.0", "0.25.1", "0.27.0", "0.28.0", "0.32.0"])
def test_compressed_caches_are_packed_as_vllm_packs_them(version: str) -> None:
    """DeepSeek-V4-Flash: window, compressed, index and pending caches of five page sizes side by side in one block."""
    model = resolve_model("deepseek-ai/DeepSeek-V4-Flash")
    rules = kv_rules(tuple(int(p) for p in version.split(".")))
    data = json.loads((ORACLE.parent / "kv_compressed_oracle.json").read_text(encoding="utf-8"))["answers"][version]
    for answer in data:
        pages = layer_pages(model, KV_FORMATS["fp8" if answer["fp8"] else "bf16"], tp=1, block_tokens=256)
        request = RequestShape(
            max_model_len=answer["max_model_len"],
            in_flight_tokens=answer["max_num_batched_tokens"] * (answer["batches"] if rules.in_flight_batches else 1))
        groups = block_groups(pages, rules)
        plan = block_plan(groups, [answer["available"]], request, rules, num_layers=model.num_layers)
        if "error" in answer:
            assert f"({plan.needed_bytes / (1 << 30):.2f} GiB KV" in answer["error"]
            assert not plan.holds_one_request
            continue
        assert plan.holds_one_request
        assert sorted(len(g.pages) for g in groups) == answer["groups"]
        assert plan.num_blocks == answer["num_blocks"]
        assert plan.max_concurrency == pytest.approx(answer["max_concurrency"], rel=1e-12)
    assert sum("error" not in a for a in data) >= 4
