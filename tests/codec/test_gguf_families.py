"""GGUF files of many architectures, tensor by tensor as llama.cpp stores them (gguf-py constants.py, MODEL_TENSORS)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import FF, HEADS, KV, D, H, V, check, experts, layers, meta, outer
from gguf_writing import Tensor


def norms(i: int, *names: str, bias: bool = False) -> Iterator[Tensor]:
    for name in names:
        yield f"blk.{i}.{name}.weight", (H,), "f32"
        if bias:
            yield f"blk.{i}.{name}.bias", (H,), "f32"


def projections(
    i: int, *, bias: bool = False, out_bias: bool = False, qk_norm: str = "", gate: bool = False
) -> Iterator[Tensor]:
    """q, k, v and output; `gate`: q also makes an output gate."""
    for name, rows in (("attn_q", HEADS * D * (1 + gate)), ("attn_k", KV * D), ("attn_v", KV * D)):
        yield f"blk.{i}.{name}.weight", (H, rows), "q4_k"
        if bias:
            yield f"blk.{i}.{name}.bias", (rows,), "f32"
    yield f"blk.{i}.attn_output.weight", (HEADS * D, H), "q4_k"
    if out_bias:
        yield f"blk.{i}.attn_output.bias", (H,), "f32"
    if qk_norm:
        widths = (D, D) if qk_norm == "head" else (HEADS * D, KV * D)
        yield f"blk.{i}.attn_q_norm.weight", (widths[0],), "f32"
        yield f"blk.{i}.attn_k_norm.weight", (widths[1],), "f32"


def ffn(i: int, *, gated: bool = True, bias: bool = False, fused: bool = False) -> Iterator[Tensor]:
    if gated and not fused:
        yield f"blk.{i}.ffn_gate.weight", (H, FF), "q4_k"
    yield f"blk.{i}.ffn_up.weight", (H, FF * (1 + fused)), "q4_k"
    yield f"blk.{i}.ffn_down.weight", (FF, H), "q4_k"
    if bias:
        yield f"blk.{i}.ffn_up.bias", (FF,), "f32"
        yield f"blk.{i}.ffn_down.bias", (H,), "f32"


def moe(i: int, *, shared: int = 0, gate: bool = False, correction: bool = False) -> Iterator[Tensor]:
    yield from (t for t in experts(i, shared=shared) if "ffn_norm" not in t[0])
    if gate:
        yield f"blk.{i}.ffn_gate_inp_shexp.weight", (H,), "f32"
    if correction:
        yield f"blk.{i}.exp_probs_b.bias", (8,), "f32"


def delta_net(i: int, names: str) -> Iterator[Tensor]:
    """Gated delta net: 2 key heads and 4 value heads of 64, a convolution of 4; by the names of three converters."""
    key, value = 2 * 64, 4 * 64
    if names == "fused":
        yield f"blk.{i}.ssm_in.weight", (H, 2 * key + 2 * value), "q4_k"
    else:
        yield f"blk.{i}.attn_qkv.weight", (H, 2 * key + value), "q4_k"
        yield f"blk.{i}.attn_gate.weight", (H, value), "q4_k"
    if names == "split":
        yield f"blk.{i}.ssm_beta.weight", (H, 4), "f32"
        yield f"blk.{i}.ssm_alpha.weight", (H, 4), "f32"
    else:
        yield f"blk.{i}.ssm_ba.weight", (H, 8), "f32"
    yield f"blk.{i}.ssm_conv1d.weight", (4, 2 * key + value), "f32"
    yield f"blk.{i}.ssm_dt.bias", (4,), "f32"
    yield f"blk.{i}.ssm_a", (4,), "f32"
    yield f"blk.{i}.ssm_norm.weight", (64,), "f32"
    yield f"blk.{i}.ssm_out.weight", (value, H), "q4_k"


def hybrid(i: int, names: str, feed_forward: Callable[[int], Iterator[Tensor]]) -> Iterator[Tensor]:
    yield from norms(i, "attn_norm", "post_attention_norm")
    yield from projections(i, qk_norm="head", gate=True) if i % 4 == 3 else delta_net(i, names)
    yield from feed_forward(i)


def gated_moe(i: int) -> Iterator[Tensor]:
    return moe(i, shared=256, gate=True)


def mamba(i: int) -> Iterator[Tensor]:
    """Mamba 2: 8 heads of 64, one group of 64 states, a convolution of 4."""
    inner, states = 512, 64
    yield f"blk.{i}.ssm_in.weight", (H, 2 * inner + 2 * states + 8), "q4_k"
    yield f"blk.{i}.ssm_conv1d.weight", (4, inner + 2 * states), "f32"
    yield f"blk.{i}.ssm_conv1d.bias", (inner + 2 * states,), "f32"
    yield f"blk.{i}.ssm_dt.bias", (8,), "f32"
    yield f"blk.{i}.ssm_a", (1, 8), "f32"
    yield f"blk.{i}.ssm_d", (1, 8), "f32"
    yield f"blk.{i}.ssm_norm.weight", (inner, 1), "f32"
    yield f"blk.{i}.ssm_out.weight", (inner, H), "q4_k"


def nemotron_layer(i: int) -> Iterator[Tensor]:
    yield from norms(i, "attn_norm")
    yield from (mamba(i), ffn(i, gated=False), projections(i), mamba(i))[i]


def nemotron_moe_layer(i: int) -> Iterator[Tensor]:
    yield from norms(i, "attn_norm")
    if i == 1:
        for name, shape, kind in moe(i, shared=512, correction=True):
            if "ffn_gate_exps" not in name and "ffn_gate_shexp" not in name:
                yield name, shape, kind
    else:
        yield from (mamba(i), projections(i))[i == 2]


def granite_layer(i: int) -> Iterator[Tensor]:
    yield from norms(i, "attn_norm", "ffn_norm")
    yield from projections(i) if i == 2 else mamba(i)


def head_bias(kind: str = "output_norm", length: int = H) -> Tensor:
    return f"{kind}.bias", (length,), "f32"


HEAD_WIDTH = {"attention.key_length": D, "attention.value_length": D}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}
STATES = {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.state_size": 64, "ssm.time_step_rank": 4,
          "ssm.inner_size": 256, "full_attention_interval": 4, **HEAD_WIDTH}  # fmt: skip
MOE_STATES = EXPERTS | STATES | {"expert_shared_feed_forward_length": 256}
MAMBA = {"ssm.conv_kernel": 4, "ssm.group_count": 1, "ssm.state_size": 64, "ssm.time_step_rank": 8,
         "ssm.inner_size": 512, "attention.head_count_kv": [0, 0, KV, 0], **HEAD_WIDTH}  # fmt: skip
TWO = ("attn_norm", "ffn_norm")
POST = ("post_attention_norm", "post_ffw_norm")

# architecture -> (metadata beside the common sizes, tensors outside the layers, tensors of layer i)
FAMILIES: dict[str, tuple[dict[str, Any], Iterable[Tensor], Callable[[int], Iterable[Tensor]]]] = {
    "granite": ({}, [*outer(tied=True)], lambda i: [*projections(i), *ffn(i), *norms(i, *TWO)]),
    "granitemoe": (
        {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": 256}, [*outer(tied=True)],
        lambda i: [*projections(i), *moe(i), *norms(i, *TWO)]),
    "olmoe": (
        {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": 256}, [*outer()],
        lambda i: [*projections(i, qk_norm="full"), *moe(i), *norms(i, *TWO)]),
    "minimax-m2": (
        EXPERTS | HEAD_WIDTH, [*outer()],
        lambda i: [*projections(i, qk_norm="full"), *moe(i, correction=True), *norms(i, *TWO)]),
    "dots1": (
        EXPERTS | HEAD_WIDTH | {"expert_shared_count": 1, "leading_dense_block_count": 1}, [*outer()],
        lambda i: [*projections(i, qk_norm="head"), *(moe(i, shared=256, correction=True) if i else ffn(i)),
                   *norms(i, *TWO)]),
    "phimoe": (
        EXPERTS, [*outer(), head_bias(), head_bias("output", V)],
        lambda i: [*projections(i, bias=True, out_bias=True), *moe(i), *norms(i, *TWO, bias=True)]),
    "llama4": (
        EXPERTS | HEAD_WIDTH | {"interleave_moe_layer_step": 2, "expert_shared_count": 1}, [*outer()],
        lambda i: [*projections(i), *(moe(i, shared=256) if i % 2 else ffn(i)), *norms(i, *TWO)]),
    "mistral3": (HEAD_WIDTH, [*outer()], lambda i: [*projections(i), *ffn(i), *norms(i, *TWO)]),
    "gemma": (HEAD_WIDTH, [*outer(tied=True)], lambda i: [*projections(i), *ffn(i), *norms(i, *TWO)]),
    "olmo2": ({}, [*outer()], lambda i: [*projections(i, qk_norm="full"), *ffn(i), *norms(i, *POST)]),
    "exaone4": ({}, [*outer()], lambda i: [*projections(i, qk_norm="head"), *ffn(i), *norms(i, *POST)]),
    "command-r": ({}, [*outer(tied=True)], lambda i: [*projections(i), *ffn(i), *norms(i, "attn_norm")]),
    "cohere2": (
        {"attention.sliding_window": 4096}, [*outer(tied=True)],
        lambda i: [*projections(i), *ffn(i), *norms(i, "attn_norm")]),
    "stablelm": ({}, [*outer(), head_bias()], lambda i: [*projections(i), *ffn(i), *norms(i, *TWO, bias=True)]),
    "starcoder2": (
        {}, [*outer(tied=True), head_bias()],
        lambda i: [*projections(i, bias=True, out_bias=True), *ffn(i, gated=False, bias=True),
                   *norms(i, *TWO, bias=True)]),
    "falcon": (
        {}, [*outer(), head_bias()],
        lambda i: [(f"blk.{i}.attn_qkv.weight", (H, (HEADS + 2 * KV) * D), "q4_k"),
                   (f"blk.{i}.attn_output.weight", (H, H), "q4_k"), *ffn(i, gated=False),
                   *norms(i, "attn_norm", "attn_norm_2", bias=True)]),
    "glm4": ({}, [*outer()], lambda i: [*projections(i, bias=True), *ffn(i, fused=True), *norms(i, *TWO, *POST)]),
    "nemotron": (
        {}, [*outer(), head_bias()], lambda i: [*projections(i), *ffn(i, gated=False), *norms(i, *TWO, bias=True)]),
    "arcee": ({}, [*outer()], lambda i: [*projections(i), *ffn(i, gated=False), *norms(i, *TWO)]),
    "smollm3": ({}, [*outer(tied=True)], lambda i: [*projections(i), *ffn(i), *norms(i, *TWO)]),
    "seed_oss": (
        HEAD_WIDTH, [*outer()],
        lambda i: [*projections(i, bias=True), *ffn(i), *norms(i, "attn_norm", "post_attention_norm")]),
    "ernie4_5": (HEAD_WIDTH, [*outer(tied=True)], lambda i: [*projections(i), *ffn(i), *norms(i, *TWO)]),
    "hunyuan-dense": (
        HEAD_WIDTH, [*outer(tied=True)], lambda i: [*projections(i, qk_norm="head"), *ffn(i), *norms(i, *TWO)]),
    "nemotron_h": (MAMBA | {"feed_forward_length": [0, FF, 0, 0]}, [*outer()], nemotron_layer),
    "nemotron_h_moe": (
        MAMBA | EXPERTS | {"feed_forward_length": [0, 256, 0, 0], "expert_shared_count": 1,
                           "expert_shared_feed_forward_length": 512}, [*outer()], nemotron_moe_layer),
    "granitehybrid": (
        MAMBA | {"feed_forward_length": FF}, [*outer(tied=True)], lambda i: [*granite_layer(i), *ffn(i)]),
    "granitehybrid, experts": (
        MAMBA | EXPERTS | {"feed_forward_length": 256, "expert_shared_feed_forward_length": 256},
        [*outer(tied=True)], lambda i: [*granite_layer(i), *moe(i, shared=256)]),
    "qwen35": (STATES, [*outer(tied=True)], lambda i: hybrid(i, "split", ffn)),
    "qwen35moe": (MOE_STATES, [*outer()], lambda i: hybrid(i, "split", gated_moe)),
    "qwen3next": (MOE_STATES, [*outer()], lambda i: hybrid(i, "", gated_moe)),
    "qwen3next, fused": (MOE_STATES, [*outer()], lambda i: hybrid(i, "fused", gated_moe)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_bytes_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    more, outside, layer = FAMILIES[name]
    model = check(tmp_path, meta(name.split(",")[0], **more), [*outside, *layers(layer)])
    assert model.weight_dtype == "q4_k"


def test_hybrids_keep_their_states_and_windows(tmp_path: Path) -> None:
    more, _, layer = FAMILIES["qwen35"]
    model = check(tmp_path, meta("qwen35", **more), [*outer(tied=True), *layers(layer)])
    assert [(g.mixer.kind, g.indices) for g in model.layers] == [("gated_delta_net", (0, 1, 2)), ("gqa", (3,))]
    more, _, layer = FAMILIES["nemotron_h"]
    model = check(tmp_path, meta("nemotron_h", **more), [*outer(), *layers(layer)])
    assert [(g.mixer.kind, g.ffn.kind, g.indices) for g in model.layers] == [
        ("mamba2", "none", (0, 3)),
        ("none", "dense", (1,)),
        ("gqa", "none", (2,)),
    ]
    more, _, layer = FAMILIES["cohere2"]
    model = check(tmp_path, meta("cohere2", **more), [*outer(tied=True), *layers(layer)])
    assert [getattr(g.mixer, "window", None) for g in model.layers] == [4096, None]
