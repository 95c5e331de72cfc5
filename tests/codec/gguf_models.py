"""Small models as llama.cpp names and stores their tensors, and the check that a file of them is understood exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gguf_writing import Tensor, write

from bstar.codec.gguf_file import read_gguf_header
from bstar.codec.gguf_model import read_gguf
from bstar.specs.model import ModelSpec

H, HEADS, KV, D, FF, V, L = 256, 4, 2, 64, 512, 1024, 4


def meta(arch: str, **more: Any) -> dict[str, Any]:
    keys = {"block_count": L, "embedding_length": H, "feed_forward_length": FF, "context_length": 8192,
            "attention.head_count": HEADS, "attention.head_count_kv": KV} | more  # fmt: skip
    known = {"general.architecture": arch, "tokenizer.ggml.tokens": ["a", "b"]}
    return known | {f"{arch}.{k}": v for k, v in keys.items()}


def outer(*, tied: bool = False, kind: str = "q4_k") -> Iterator[Tensor]:
    yield "token_embd.weight", (H, V), kind
    yield "output_norm.weight", (H,), "f32"
    if not tied:
        yield "output.weight", (H, V), "q6_k"


def attention(i: int, *, kind: str = "q4_k", bias: bool = False, qk_norm: bool = False, d: int = D) -> Iterator[Tensor]:
    for name, rows in (("attn_q", HEADS * d), ("attn_k", KV * d), ("attn_v", KV * d)):
        yield f"blk.{i}.{name}.weight", (H, rows), kind
        if bias:
            yield f"blk.{i}.{name}.bias", (rows,), "f32"
    yield f"blk.{i}.attn_output.weight", (HEADS * d, H), kind
    yield f"blk.{i}.attn_norm.weight", (H,), "f32"
    if qk_norm:
        yield f"blk.{i}.attn_q_norm.weight", (d,), "f32"
        yield f"blk.{i}.attn_k_norm.weight", (d,), "f32"


def dense(i: int, *, kind: str = "q4_k", width: int = FF) -> Iterator[Tensor]:
    yield f"blk.{i}.ffn_gate.weight", (H, width), kind
    yield f"blk.{i}.ffn_up.weight", (H, width), kind
    yield f"blk.{i}.ffn_down.weight", (width, H), kind
    yield f"blk.{i}.ffn_norm.weight", (H,), "f32"


def experts(i: int, *, n: int = 8, width: int = 256, kind: str = "q4_k", shared: int = 0) -> Iterator[Tensor]:
    yield f"blk.{i}.ffn_gate_inp.weight", (H, n), "f32"
    yield f"blk.{i}.ffn_gate_exps.weight", (H, width, n), kind
    yield f"blk.{i}.ffn_up_exps.weight", (H, width, n), kind
    yield f"blk.{i}.ffn_down_exps.weight", (width, H, n), kind
    yield f"blk.{i}.ffn_norm.weight", (H,), "f32"
    if shared:
        yield f"blk.{i}.ffn_gate_shexp.weight", (H, shared), kind
        yield f"blk.{i}.ffn_up_shexp.weight", (H, shared), kind
        yield f"blk.{i}.ffn_down_shexp.weight", (shared, H), kind


def layers(*parts: Callable[[int], Iterator[Tensor]]) -> Iterator[Tensor]:
    for i in range(L):
        for part in parts:
            yield from part(i)


def parameters(model: ModelSpec) -> int:
    inner = sum(t.parameters for g in model.layers for t in g.tensors(model.hidden_size) for _ in g.indices)
    outside = sum(t.parameters for t in (*model.embedding, *model.head_tensors))
    return inner + outside + (0 if model.tied else sum(t.parameters for t in model.lm_head))


def weight_bytes(model: ModelSpec) -> int:
    """From the formats alone, tensor by tensor."""
    total = 0
    for group in model.layers:
        for t in group.tensors(model.hidden_size):
            total += group.count * t.copies * group.formats.of(t).bytes_of(t.rows, t.columns)
    outside = (*model.embedding, *model.head_tensors, *(() if model.tied else model.lm_head))
    return total + sum(model.outer_formats.of(t).bytes_of(t.rows, t.columns) for t in outside)


def check(tmp_path: Path, metadata: dict[str, Any], tensors: Iterable[Tensor]) -> ModelSpec:
    """The model of a written file; its parameters and bytes are those of the file to the last one.

    The router's correction (exp_probs_b) is a buffer, no parameter, by transformers' count.
    """
    listed = list(tensors)
    path = write(tmp_path / "model-Q4_K_M.gguf", metadata, listed)
    model = read_gguf(path)
    stored = read_gguf_header(path).tensors
    buffers = [t for t in stored if "exp_probs_b" in t.name]
    assert parameters(model) == sum(t.elements for t in stored if t not in buffers)
    assert model.checkpoint_weight_bytes == sum(t.bytes for t in stored)
    assert model.checkpoint_weight_bytes == weight_bytes(model) + sum(t.bytes for t in buffers)
    assert model.name == "model-Q4_K_M" and model.vocab_size == V and model.max_context_tokens == 8192
    return model
