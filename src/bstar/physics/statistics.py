"""Sums over a batch that the work of every operator is linear in.

An operator's FLOPs and bytes are Σ coefficient · statistic. The statistics are few: token and sequence
counts, and for every distinct attention reach (`Span`) the (query, key) pairs and the keys read. A decode
batch enters only through Σ min(context, window), so the step is affine in it.

    tokens            new tokens on one attention-data-parallel rank
    expert_tokens     new tokens that the routed experts see: of all attention-data-parallel ranks
    sampled           positions that need logits
    sequences         sequences in the step (each reads and writes its states once)
    cached_prefill    cached tokens under prompt chunks (dense MLA up-projects them again)
    pairs, keys       per span, decode and prefill apart
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bstar.physics.batch import BatchShape
from bstar.physics.prefill import windowed_pairs

CountName = Literal[
    "tokens", "decode_tokens", "prefill_tokens", "expert_tokens", "sampled", "sequences", "cached_prefill"
]
SpanName = Literal["pairs_decode", "pairs_prefill", "keys_decode", "keys_prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one query sees.

    limit     tokens at most (a window, or top_k entries · stride), None: all
    chunked   the limit is a chunk that restarts
    stride    tokens per cache entry: pairs and keys count entries
    gather    every query picks its own entries (sparse attention), so neighbours do not share reads
    """

    limit: int | None = None
    chunked: bool = False
    stride: int = 1
    gather: bool = False


FULL = Span()
Statistic = tuple[CountName | SpanName, Span | None]


def count(name: CountName) -> Statistic:
    """A statistic that no span qualifies."""
    return (name, None)


def statistic_values(
    statistics: tuple[Statistic, ...], shape: BatchShape, attention_dp: int, *, chunks_as_windows: bool = False
) -> NDArray[np.float64]:
    """The values of `statistics` for one step, per rank: sums over the batch divided by `attention_dp`.

    chunks_as_windows   chunked spans count as sliding windows: the fullest a chunk gets, where a mean
                        context says nothing about the place in the chunk
    """
    q, after, weight, prompt = shape.new_tokens, shape.context_after, shape.count, shape.is_prefill
    decode, prefill = weight * ~prompt, weight * prompt
    tokens = float(weight @ q)
    share = 1.0 / attention_dp
    counts: dict[str, float] = {
        "tokens": tokens * share,
        "decode_tokens": float(decode @ q) * share,
        "prefill_tokens": float(prefill @ q) * share,
        "expert_tokens": tokens,
        "sampled": shape.sampled_tokens * share,
        "sequences": float(weight.sum()) * share,
        "cached_prefill": float(prefill @ (after - q)) * share,
    }
    spans: dict[tuple[str, Span], float] = {}
    out = np.empty(len(statistics))
    for i, (name, span) in enumerate(statistics):
        if span is None:
            out[i] = counts[name]
            continue
        if (name, span) not in spans:
            reach = replace(span, chunked=False) if chunks_as_windows and span.chunked else span
            pairs, keys = _span_sums(reach, q, after)
            for label, mask in (("decode", decode), ("prefill", prefill)):
                spans["pairs_" + label, span] = float(mask @ pairs) * share
                spans["keys_" + label, span] = float(mask @ keys) * share
        out[i] = spans[name, span]
    return out


def _span_sums(
    span: Span, q: NDArray[np.float64], after: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per row: pairs that its new tokens attend, and distinct keys that they read."""
    cached = after - q
    pairs = np.asarray(windowed_pairs(q, cached, span.limit, chunked=span.chunked)) / span.stride
    if span.limit is None:
        keys = after
    elif span.chunked:
        keys = np.where(q > 0, np.minimum(after, np.fmod(np.maximum(cached, 0.0), span.limit) + q), 0.0)
    elif span.gather:
        keys = np.minimum(after, q * span.limit)
    else:
        keys = np.minimum(after, span.limit + q - 1.0)
    return pairs, keys / span.stride
