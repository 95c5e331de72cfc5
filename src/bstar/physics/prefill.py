"""Prefill arithmetic: linear and attention FLOPs of a prompt, pairs of a chunk, where both are equal.

A query sees itself and what came before: q new tokens on k cached ones attend q·k + q(q+1)/2 pairs; half the
square only for a first chunk. All functions take floats or numpy arrays and broadcast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bstar.physics.roofline import Number


def prefill_linear_flops(parameters: Number, prompt_tokens: Number) -> Number:
    """2·P·L FLOPs of every weight GEMM of a prompt (mission §8), attention left out."""
    return 2.0 * parameters * prompt_tokens


def causal_pairs(new_tokens: Number, cached_tokens: Number = 0.0) -> Number:
    """(query, key) pairs that `new_tokens` on `cached_tokens` attend: q·k + q(q+1)/2."""
    q, k = new_tokens, cached_tokens
    return q * k + q * (q + 1.0) / 2.0


def windowed_pairs(new_tokens: Number, cached_tokens: Number, window: int | None, *, chunked: bool = False) -> Number:
    """Exact pairs under a window: Σ over the q new tokens of min(position, window).

    With `chunked` the window restarts at every multiple of itself: position p (from 1) sees
    (p − 1) mod window + 1 tokens. `window` None is full causal attention. Counts are exact for whole
    token numbers; in between (means) they interpolate.
    """
    if window is None:
        return causal_pairs(new_tokens, cached_tokens)
    upto = _chunk_total if chunked else _window_total
    total: Number = upto(np.asarray(cached_tokens + new_tokens, float), window) - upto(
        np.asarray(cached_tokens, float), window
    )
    return total if np.ndim(total) else float(total)


def _window_total(positions: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Σ_{p=1..n} min(p, w)."""
    inside = np.minimum(positions, window)
    result: NDArray[np.float64] = inside * (inside + 1.0) / 2.0 + (positions - inside) * window
    return result


def _chunk_total(positions: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Σ_{p=1..n} ((p − 1) mod w + 1): whole chunks of w(w+1)/2 and a part."""
    whole = np.floor_divide(positions, window)
    rest = positions - whole * window
    result: NDArray[np.float64] = whole * (window * (window + 1.0) / 2.0) + rest * (rest + 1.0) / 2.0
    return result


def attention_flops_per_pair(num_layers: Number, num_heads: Number, head_dim: Number) -> Number:
    """4·d_head FLOPs per head and pair (q·k and weight·v, a multiply and an add each), all layers."""
    return 4.0 * num_layers * num_heads * head_dim


def prefill_attention_flops(
    num_layers: Number, num_heads: Number, head_dim: Number, prompt_tokens: Number, cached_tokens: Number = 0.0
) -> Number:
    """Causal attention FLOPs of a chunk of `prompt_tokens` on `cached_tokens`, all layers, full attention."""
    return attention_flops_per_pair(num_layers, num_heads, head_dim) * causal_pairs(prompt_tokens, cached_tokens)


def attention_equals_linear_context(
    parameters: Number, num_layers: Number, num_heads: Number, head_dim: Number
) -> Number:
    """Prompt length L at which causal attention costs as much as the linear term, in tokens.

    Solves 4·layers·heads·d·L²/2 = 2·P·L, the half square without its diagonal (mission §8: 61K tokens for 8B,
    107K for 70B).
    """
    return 2.0 * parameters / (attention_flops_per_pair(num_layers, num_heads, head_dim) / 2.0)


def prefill_time_s(flops: Number, peak_flops_per_s: Number, efficiency_fraction: Number = 1.0) -> Number:
    """flops / (efficiency · peak), in seconds: a compute-bound prefill."""
    return flops / (efficiency_fraction * peak_flops_per_s)
