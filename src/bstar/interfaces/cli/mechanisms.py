"""Mechanisms in words: the kind of a layer as people name it, and its sizes on one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any


def mixer_kind(mixer: Any) -> str:
    """The kind of a token mixer: softmax attention by what a query sees, the rest by mechanism."""
    if mixer.kind == "gqa":
        if getattr(mixer, "indexer", None) is not None:
            return "sparse_attention"
        if mixer.window is None:
            return "full_attention"
        return "chunked_attention" if mixer.chunked else "sliding_attention"
    if mixer.kind == "mla" and mixer.indexer is not None:
        return "sparse_mla"
    return str(mixer.kind)


def mixer_text(mixer: Any) -> str:
    """Heads, widths and windows of a mixer."""
    words = _MIXERS.get(mixer.kind)
    return words(mixer) if words is not None else ""


def ffn_text(ffn: Any) -> str:
    """Widths and experts of a feed-forward network."""
    if ffn.kind == "dense":
        return f"{ffn.width:,}{' gated' if ffn.gated else ''}"
    if ffn.kind == "moe":
        shared = f" + shared {ffn.shared_width:,}" if ffn.shared_width else ""
        dense = f" + dense {ffn.parallel_dense_width:,}" if ffn.parallel_dense_width else ""
        return f"{ffn.top_k} of {ffn.num_experts} × {ffn.width:,}{shared}{dense}"
    return ""


def positions(indices: Sequence[int]) -> str:
    """ "0–2, 5, 7–9" of layer positions; a long regular pattern by its first two and its last."""
    if len(indices) > 2 and indices[1] - indices[0] > 1:
        step = indices[1] - indices[0]
        if all(b - a == step for a, b in pairwise(indices)):
            return f"{indices[0]}, {indices[1]}, … {indices[-1]}"
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs]
    return ", ".join(text) if len(text) <= 4 else f"{', '.join(text[:2])}, … {text[-1]}"


def _gqa(m: Any) -> str:
    width = f"{m.head_dim}" if m.head_dim == m.v_head_dim else f"{m.head_dim}/{m.v_head_dim}"
    parts = [f"{m.num_heads} heads, {m.num_kv_heads} KV × {width}"]
    if m.window:
        parts.append(f"window {m.window:,}")
    if m.shares_kv:
        parts.append("shares another layer's KV")
    if getattr(m, "indexer", None) is not None:
        parts.append(f"top {m.indexer.top_k:,}")
    return ", ".join(parts)


def _mla(m: Any) -> str:
    index = f", top {m.indexer.top_k:,} by indexer" if m.indexer is not None else ""
    return f"{m.num_heads} heads, latent {m.kv_lora_rank} + {m.qk_rope_head_dim}{index}"


def _compressed(m: Any) -> str:
    ratio = f", 1 entry per {m.compress_ratio} tokens" if m.compress_ratio else ""
    return f"{m.num_heads} heads × {m.head_dim}, window {m.window:,}{ratio}"


_MIXERS: dict[str, Callable[[Any], str]] = {
    "gqa": _gqa,
    "mla": _mla,
    "compressed": _compressed,
    "gated_delta_net": lambda m: (
        f"{m.num_k_heads} K × {m.k_head_dim}, {m.num_v_heads} V × {m.v_head_dim}, conv {m.conv_kernel}"),
    "mamba2": lambda m: f"{m.num_heads} heads × {m.head_dim}, state {m.state_size}, conv {m.conv_kernel}",
    "mamba1": lambda m: f"width {m.inner_size:,}, state {m.state_size}, conv {m.conv_kernel}",
    "lightning": lambda m: f"{m.num_heads} heads × {m.head_dim}",
    "kimi_delta": lambda m: f"{m.num_heads} heads × {m.head_dim}, conv {m.conv_kernel}",
    "short_conv": lambda m: f"width {m.width:,}, conv {m.conv_kernel}",
    "cross": lambda m: f"{m.num_heads} heads, {m.num_kv_heads} KV × {m.head_dim}, to the encoder",
    "parallel": lambda m: " ∥ ".join(f"{mixer_kind(b).replace('_', ' ')} {mixer_text(b)}" for b in m.branches),
}  # fmt: skip
