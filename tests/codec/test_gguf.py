"""GGUF: llama.cpp's naming of each architecture becomes the same model, with the exact bytes of its types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import (
    FF,
    HEADS,
    KV,
    D,
    H,
    L,
    attention,
    check,
    dense,
    experts,
    layers,
    meta,
    outer,
    parameters,
    weight_bytes,
)
from gguf_writing import Tensor, write

from bstar.codec.gguf_file import GGML_TYPES
from bstar.codec.gguf_model import ggml_format, read_gguf
from bstar.errors import ConfigError, UnsupportedArchitectureError
from bstar.specs.attention import GroupedQueryAttention, LatentAttention
from bstar.specs.ffn import DenseFfn, MoeFfn


def test_llama(tmp_path: Path) -> None:
    model = check(tmp_path, meta("llama"), (*outer(), *layers(attention, dense)))
    assert [g.mixer for g in model.layers] == [
        GroupedQueryAttention(num_heads=HEADS, num_kv_heads=KV, head_dim=D, v_head_dim=D)
    ]
    assert model.layers[0].ffn == DenseFfn(width=FF) and not model.tied
    assert (model.weight_dtype, model.dtype) == ("q4_k", "fp16")


def test_layers_of_different_types_become_groups(tmp_path: Path) -> None:
    def mixed(i: int) -> Iterator[Tensor]:
        for name, shape, kind in dense(i):
            yield name, shape, "q6_k" if "down" in name and i in (0, 3) else kind

    model = check(tmp_path, meta("llama"), (*outer(), *layers(attention, mixed)))
    assert [g.indices for g in model.layers] == [(0, 3), (1, 2)]
    down = next(t for t in model.layers[0].tensors(H) if t.name == "mlp.down_proj")
    assert [g.formats.of(down).name for g in model.layers] == ["q6_k", "q4_k"]


def test_a_bf16_file_keeps_its_dtype(tmp_path: Path) -> None:
    def plain(part: Callable[..., Iterator[Tensor]]) -> Callable[[int], Iterator[Tensor]]:
        return lambda i: part(i, kind="bf16")

    tensors = list(outer(tied=True, kind="bf16")) + list(layers(plain(attention), plain(dense)))
    model = check(tmp_path, meta("llama"), tensors)
    assert (model.weight_dtype, model.dtype, model.tied) == ("bf16", "bf16", True)


def test_mixtral_is_llama_with_experts(tmp_path: Path) -> None:
    model = check(
        tmp_path,
        meta("llama", expert_count=8, expert_used_count=2, feed_forward_length=256),
        (*outer(), *layers(attention, experts)),
    )
    assert model.layers[0].ffn == MoeFfn(num_experts=8, top_k=2, width=256)


def test_old_mixtral_files_hold_one_tensor_per_expert(tmp_path: Path) -> None:
    def split(i: int) -> Iterator[Tensor]:
        for name, shape, kind in experts(i):
            if "_exps" not in name:
                yield name, shape, kind
            else:
                yield from ((name.replace("_exps", f".{e}"), shape[:2], kind) for e in range(8))

    model = check(
        tmp_path,
        meta("llama", expert_count=8, expert_used_count=2, feed_forward_length=256),
        (*outer(), *layers(attention, split)),
    )
    assert model.is_moe and model.weight_dtype == "q4_k"


def test_qwen2_has_qkv_biases(tmp_path: Path) -> None:
    model = check(tmp_path, meta("qwen2"), (*outer(tied=True), *layers(lambda i: attention(i, bias=True), dense)))
    assert model.tied and model.layers[0].mixer.qkv_bias  # type: ignore[union-attr]


def test_qwen3_dense_and_moe(tmp_path: Path) -> None:
    normed = lambda i: attention(i, qk_norm=True, d=128)  # noqa: E731
    sizes = {"attention.key_length": 128, "attention.value_length": 128}
    model = check(tmp_path, meta("qwen3", **sizes), (*outer(), *layers(normed, dense)))
    assert (model.layers[0].mixer.qk_norm, model.layers[0].mixer.head_dim) == ("head", 128)  # type: ignore[union-attr]
    moe = meta("qwen3moe", expert_count=8, expert_used_count=4, expert_feed_forward_length=256, **sizes)
    model = check(tmp_path, moe, (*outer(), *layers(normed, experts)))
    assert model.layers[0].ffn == MoeFfn(num_experts=8, top_k=4, width=256)


def test_qwen2_moe_has_a_gated_shared_expert(tmp_path: Path) -> None:
    def gate(i: int) -> Iterator[Tensor]:
        yield f"blk.{i}.ffn_gate_inp_shexp.weight", (H,), "f32"

    moe = meta(
        "qwen2moe",
        expert_count=8,
        expert_used_count=4,
        expert_feed_forward_length=256,
        expert_shared_feed_forward_length=512,
    )
    model = check(
        tmp_path, moe, (*outer(), *layers(lambda i: attention(i, bias=True), lambda i: experts(i, shared=512), gate))
    )
    assert (model.layers[0].ffn.shared_width, model.layers[0].ffn.shared_gate) == (512, True)  # type: ignore[union-attr]


@pytest.mark.parametrize(("arch", "windows"), [("gemma2", [0, 2]), ("gemma3", [0, 1, 2, 3])])
def test_gemma_alternates_windows(tmp_path: Path, arch: str, windows: list[int]) -> None:
    def norms(i: int) -> Iterator[Tensor]:
        yield f"blk.{i}.post_attention_norm.weight", (H,), "f32"
        yield f"blk.{i}.post_ffw_norm.weight", (H,), "f32"

    sizes = {"attention.key_length": D, "attention.value_length": D, "attention.sliding_window": 1024}
    model = check(
        tmp_path,
        meta(arch, **sizes),
        (*outer(tied=True), *layers(lambda i: attention(i, qk_norm=arch == "gemma3"), dense, norms)),
    )
    assert sorted(i for g in model.layers if g.mixer.window == 1024 for i in g.indices) == windows  # type: ignore[union-attr]
    assert model.tied


def test_phi3_stores_fused_projections(tmp_path: Path) -> None:
    def fused(i: int) -> Iterator[Tensor]:
        yield f"blk.{i}.attn_qkv.weight", (H, (HEADS + 2 * KV) * D), "q5_k"
        yield f"blk.{i}.attn_output.weight", (H, H), "q4_k"
        yield f"blk.{i}.ffn_up.weight", (H, 2 * FF), "q4_k"
        yield f"blk.{i}.ffn_down.weight", (FF, H), "q6_k"
        yield f"blk.{i}.attn_norm.weight", (H,), "f32"
        yield f"blk.{i}.ffn_norm.weight", (H,), "f32"

    model = check(tmp_path, meta("phi3", **{"attention.sliding_window": 2048}), (*outer(), *layers(fused)))
    names = {t.name: model.layers[0].formats.of(t).name for t in model.layers[0].tensors(H) if t.matmul}
    assert "q5_k" in names.values() and "q6_k" in names.values()


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("q_lora", [0, 256])
def test_deepseek_latent_attention(tmp_path: Path, newer: bool, q_lora: int) -> None:
    rank, rope, nope, v = 256, 64, 128, 128

    def latent(i: int) -> Iterator[Tensor]:
        if q_lora:
            yield f"blk.{i}.attn_q_a.weight", (H, q_lora), "q4_k"
            yield f"blk.{i}.attn_q_a_norm.weight", (q_lora,), "f32"
            yield f"blk.{i}.attn_q_b.weight", (q_lora, HEADS * (nope + rope)), "q4_k"
        else:
            yield f"blk.{i}.attn_q.weight", (H, HEADS * (nope + rope)), "q4_k"
        yield f"blk.{i}.attn_kv_a_mqa.weight", (H, rank + rope), "q8_0"
        yield f"blk.{i}.attn_kv_a_norm.weight", (rank,), "f32"
        if newer:
            yield f"blk.{i}.attn_k_b.weight", (nope, rank, HEADS), "q8_0"
            yield f"blk.{i}.attn_v_b.weight", (rank, v, HEADS), "q8_0"
        else:
            yield f"blk.{i}.attn_kv_b.weight", (rank, HEADS * (nope + v)), "q8_0"
        yield f"blk.{i}.attn_output.weight", (HEADS * v, H), "q4_k"
        yield f"blk.{i}.attn_norm.weight", (H,), "f32"
        if i:
            yield from experts(i, shared=512)
            if q_lora:
                yield f"blk.{i}.exp_probs_b.bias", (8,), "f32"
        else:
            yield from dense(i)

    sizes = {
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
    }
    if q_lora:
        sizes["attention.q_lora_rank"] = q_lora
    if newer:
        sizes |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": v,
        }
    else:
        sizes |= {"attention.head_count_kv": HEADS, "attention.key_length": nope + rope, "attention.value_length": v}
    model = check(tmp_path, meta("deepseek2", **sizes), (*outer(), *layers(latent)))
    assert {g.mixer for g in model.layers} == {
        LatentAttention(
            num_heads=HEADS,
            q_lora_rank=q_lora or None,
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=v,
        )
    }
    assert [g.ffn.kind for g in model.layers] == ["dense", "moe"]
    assert model.layers[1].ffn.shared_width == 512  # type: ignore[union-attr]


def test_gpt_oss(tmp_path: Path) -> None:
    def attn(i: int) -> Iterator[Tensor]:
        yield from attention(i, kind="bf16", bias=True)
        yield f"blk.{i}.attn_output.bias", (H,), "f32"
        yield f"blk.{i}.attn_sinks.weight", (HEADS,), "f32"

    def moe(i: int) -> Iterator[Tensor]:
        yield from experts(i, kind="mxfp4")
        yield f"blk.{i}.ffn_gate_inp.bias", (8,), "f32"
        for name, rows in (("gate", 256), ("up", 256), ("down", H)):
            yield f"blk.{i}.ffn_{name}_exps.bias", (rows, 8), "f32"

    sizes = {
        "expert_count": 8,
        "expert_used_count": 4,
        "expert_feed_forward_length": 256,
        "attention.key_length": D,
        "attention.value_length": D,
        "attention.sliding_window": 128,
        "feed_forward_length": 256,
    }
    model = check(tmp_path, meta("gpt-oss", **sizes), (*outer(kind="bf16"), *layers(attn, moe)))
    assert model.weight_dtype == "mxfp4" and [g.mixer.window for g in model.layers] == [128, None]  # type: ignore[union-attr]


def test_glm_moe_leaves_its_mtp_block_out_of_the_layers(tmp_path: Path) -> None:
    def layer(i: int) -> Iterator[Tensor]:
        yield from attention(i, bias=True)
        if i:
            yield from experts(i, shared=256)
            yield f"blk.{i}.exp_probs_b.bias", (8,), "f32"
        else:
            yield from dense(i)

    mtp = [(n.replace("blk.1.", f"blk.{L}."), s, k) for n, s, k in layer(1)]
    mtp += [(f"blk.{L}.nextn.eh_proj.weight", (2 * H, H), "q4_k"), (f"blk.{L}.nextn.enorm.weight", (H,), "f32")]
    sizes = {
        "block_count": L + 1,
        "nextn_predict_layers": 1,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "attention.key_length": D,
        "attention.value_length": D,
    }
    path = write(tmp_path / "glm.gguf", meta("glm4moe", **sizes), [*outer(), *layers(layer), *mtp])
    model = read_gguf(path)
    assert model.num_layers == L
    corrections = 4 * 8 * (L - 1)
    assert model.checkpoint_weight_bytes == weight_bytes(model) + corrections  # what the engine loads: no MTP block


def test_a_description_that_differs_from_the_tensors_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", meta("llama", feed_forward_length=2 * FF), [*outer(), *layers(attention, dense)])
    with pytest.raises(UnsupportedArchitectureError, match=r"describes .* its tensors hold .*config\.json"):
        read_gguf(path)


@pytest.mark.parametrize(("metadata", "part"), [
    ({}, r"general\.architecture"),
    ({"general.architecture": "clip"}, "projector"),
    ({"general.architecture": "llama", "general.type": "adapter"}, "adapter"),
    (meta("rwkv7"), "rwkv7"),
    (meta("x" * 5000), "gguf"),
    (meta("llama", block_count=0), "block_count"),
    (meta("llama", block_count=-4), "block_count"),
    (meta("llama", block_count=10**9), "block_count"),
    (meta("llama", block_count="4"), "block_count"),
    (meta("llama", embedding_length=0), "hidden_size|embedding_length"),
    (meta("llama", embedding_length=4.5), "embedding_length"),
    (meta("llama", **{"attention.head_count": [4, 4, 2, 4]}), "differs from layer to layer"),
    (meta("llama", **{"attention.head_count": True}), "head_count"),
    (meta("llama", expert_count=8), "expert_used_count"),
])  # fmt: skip
def test_metadata_that_describes_no_model_is_one_line(tmp_path: Path, metadata: dict[str, Any], part: str) -> None:
    path = write(tmp_path / "x.gguf", metadata, [*outer(), *layers(attention, dense)])
    with pytest.raises(ConfigError, match=part) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


def test_a_split_file_is_read_as_one(tmp_path: Path) -> None:
    tensors = [*outer(), *layers(attention, dense)]
    split = {"split.count": 3}
    parts = [tensors[:5], tensors[5:9], tensors[9:]]
    for i, part in enumerate(parts, 1):
        metadata = (meta("llama") if i == 1 else {"general.architecture": "llama"}) | split | {"split.no": i - 1}
        write(tmp_path / f"m-{i:05d}-of-00003.gguf", metadata, part)
    whole = read_gguf(write(tmp_path / "whole.gguf", meta("llama"), tensors))
    for i in (1, 3):
        model = read_gguf(tmp_path / f"m-{i:05d}-of-00003.gguf")
        assert model.layers == whole.layers and model.checkpoint_weight_bytes == whole.checkpoint_weight_bytes
        assert model.name == "m"
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="00002-of-00003"):
        read_gguf(tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ConfigError, match="restore the name"):
        read_gguf(tmp_path / "other.gguf")


def test_llama_3_1_8b_q4_k_m_at_its_real_size(tmp_path: Path) -> None:
    """llama.cpp prints for this file: model size = 4.58 GiB (4.89 BPW)."""
    n, h, ff, vocab = 32, 4096, 14336, 128256
    tensors: list[Tensor] = [
        ("token_embd.weight", (h, vocab), "q4_k"),
        ("output_norm.weight", (h,), "f32"),
        ("output.weight", (h, vocab), "q6_k"),
        ("rope_freqs.weight", (64,), "f32"),
    ]
    for i in range(n):
        more = "q6_k" if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else "q4_k"  # llama.cpp's use_more_bits
        tensors += [
            (f"blk.{i}.{name}.weight", shape, kind)
            for name, shape, kind in (
                ("attn_q", (h, h), "q4_k"),
                ("attn_k", (h, 1024), "q4_k"),
                ("attn_v", (h, 1024), more),
                ("attn_output", (h, h), "q4_k"),
                ("ffn_gate", (h, ff), "q4_k"),
                ("ffn_up", (h, ff), "q4_k"),
                ("ffn_down", (ff, h), more),
                ("attn_norm", (h,), "f32"),
                ("ffn_norm", (h,), "f32"),
            )
        ]
    metadata = {"general.architecture": "llama"} | {
        f"llama.{k}": v
        for k, v in {
            "block_count": n,
            "embedding_length": h,
            "feed_forward_length": ff,
            "context_length": 131072,
            "attention.head_count": 32,
            "attention.head_count_kv": 8,
        }.items()
    }
    model = read_gguf(write(tmp_path / "llama-3.1-8b-q4_k_m.gguf", metadata, tensors))
    assert parameters(model) == 8_030_261_248
    stored = model.checkpoint_weight_bytes
    assert stored is not None and f"{stored / 2**30:.2f}" == "4.58"
    assert f"{8 * stored / parameters(model):.2f}" == "4.89"
    assert len(model.layers) == 2


def test_every_ggml_type_has_exactly_its_bytes() -> None:
    for kind in GGML_TYPES.values():
        if kind.name not in ("i8", "i16", "i32", "i64", "f64"):
            assert ggml_format(kind).bytes_of(3, 2 * kind.block) == 6 * kind.bytes, kind


def test_types_and_files_of_the_gguf_library_agree(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    assert {q.value: (b, s) for q, (b, s) in gguf.GGML_QUANT_SIZES.items()} == {
        n: (t.block, t.bytes) for n, t in GGML_TYPES.items()
    }
    assert {q.value: q.name.lower() for q in gguf.GGML_QUANT_SIZES} == {n: t.name for n, t in GGML_TYPES.items()}
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(FF)
    writer.add_context_length(4096)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_token_list([f"token{i}" for i in range(1000)])
    writer.add_token_scores([0.5] * 1000)
    for name, shape, kind in [*outer(), *attention(0), *dense(0)]:
        number = next(n for n, t in GGML_TYPES.items() if t.name == kind)
        row = shape[0] // GGML_TYPES[number].block * GGML_TYPES[number].bytes
        if kind == "f32":
            writer.add_tensor(name, np.zeros(tuple(reversed(shape)), np.float32))
        else:
            writer.add_tensor(
                name, np.zeros((*reversed(shape[1:]), row), np.uint8), raw_dtype=gguf.GGMLQuantizationType(number)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_gguf(tmp_path / "x.gguf")
    assert model.num_layers == 1 and model.checkpoint_weight_bytes == weight_bytes(model)
    read = gguf.GGUFReader(tmp_path / "x.gguf")
    assert sum(int(t.n_bytes) for t in read.tensors) == model.checkpoint_weight_bytes
