"""Seconds of a step as the kernel needs them: tables by batch, rates by context, a few rounded corners.

    decode step of B sequences     decode_s[B] + Σ spans rate·Σ reach(context)
    mixed step                     host_s + host_sequence_s·sequences + Σ spans rate·Σ reach
                                   + kernels, smoothly at least the time that launching them takes
        kernels                    step_s + token_s[N] + sampled_s[n] + linear·x + Σ rows (compute^p + memory^p)^(1/p)

    x = (decode tokens, prompt tokens, sequences, cached tokens under chunks, then pairs and keys of each prompt span)

`bstar.sim.step_cost` fills it from `bstar.latency`; nothing here knows a device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstar.sim.kernel.compiled import inlined, part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DECODE, PROMPT, SEQUENCES, CACHED, FIRST_SPAN = 0, 1, 2, 3, 4


class StepCost(NamedTuple):
    """A deployment's step times.

    decode_s     (max_num_seqs + 1,) a decode step at no context
    span_rate, span_limit, span_restarts   per reach of a decoded token: seconds per token of context, its window
                 (0: none), 1 where the window is a chunk that restarts
    token_s      (max tokens + 1,) operators that depend on the step's tokens alone
    sampled_s    (max_num_seqs + 1,) those that depend on the positions that need logits
    linear       (4 + 2·prompt spans,) seconds per unit of x
    prompt_fixed_s, decode_fixed_s, step_s   where the step has prompt tokens, has decoded ones, always
    row_compute, row_memory   (rows, len(x)) seconds per unit of x of operators with a rounded corner
    row_base, row_compute_base, row_phase   (rows,) seconds of their weights, compute seconds of half_rows rows;
                 0 always active, 1 with decodes, 2 with prompts
    prompt_limit, prompt_restarts, prompt_gathers, prompt_stride   per prompt span, as `physics.statistics.Span`
    host_s, host_sequence_s   the engine's work for a step and for each of its sequences, beside the kernels
    launch_s     launching all kernels of a step from the host
    piece_s, graph_tokens   of mixed steps of up to so many tokens: they are replayed from a graph in pieces
    decode_tokens   tokens that each decoding sequence of x[DECODE] stands for (verification of drafts); the counts that
                 are handed in hold one each
    decode_reach_s   of each decoding sequence, its drafts' attention beyond `span_rate` at the first token's context
    """

    decode_s: Floats
    span_rate: Floats
    span_limit: Ints
    span_restarts: Ints
    token_s: Floats
    sampled_s: Floats
    linear: Floats
    prompt_fixed_s: float
    decode_fixed_s: float
    step_s: float
    row_compute: Floats
    row_memory: Floats
    row_base: Floats
    row_phase: Ints
    power: float
    prompt_limit: Ints
    prompt_restarts: Ints
    prompt_gathers: Ints
    prompt_stride: Floats
    host_s: float = 0.0
    host_sequence_s: float = 0.0
    launch_s: float = 0.0
    piece_s: float = 0.0
    graph_tokens: int = 0
    decode_tokens: int = 1
    decode_reach_s: float = 0.0
    row_compute_base: Floats = np.zeros(0)


@part
def _pairs_upto(n: float, limit: int, restarts: int) -> float:
    """Pairs of the first n tokens of a sequence."""
    if limit == 0:
        return n * (n + 1.0) / 2.0
    if restarts:
        whole = np.floor(n / limit)
        rest = n - whole * limit
        return whole * (limit * (limit + 1.0) / 2.0) + rest * (rest + 1.0) / 2.0
    inside = min(n, float(limit))
    return inside * (inside + 1.0) / 2.0 + (n - inside) * limit


@inlined
def add_chunk(cost: StepCost, x: Floats, new: int, cached: int) -> None:
    """Count a prompt chunk of `new` tokens on `cached` ones."""
    x[PROMPT] += new
    x[SEQUENCES] += 1.0
    x[CACHED] += cached
    for g in range(cost.prompt_limit.size):
        limit, stride = cost.prompt_limit[g], cost.prompt_stride[g]
        restarts = cost.prompt_restarts[g]
        if limit == 0:
            pairs = new * cached + new * (new + 1.0) / 2.0
            keys = float(new + cached)
        else:
            pairs = _pairs_upto(float(cached + new), limit, restarts) - _pairs_upto(float(cached), limit, restarts)
            if restarts:
                keys = min(float(new + cached), float(cached % limit + new))
            elif cost.prompt_gathers[g]:
                keys = min(float(new + cached), float(new) * limit)
            else:
                keys = min(float(new + cached), limit + new - 1.0)
        x[FIRST_SPAN + 2 * g] += pairs / stride
        x[FIRST_SPAN + 2 * g + 1] += keys / stride


@inlined
def mixed_step_s(cost: StepCost, x: Floats, tokens: int, sampled: int, reach_s: float) -> float:
    """A step of `tokens` tokens, `sampled` positions that need logits and the counts x; `reach_s` of its decodes."""
    drafts = (cost.decode_tokens - 1) * int(x[DECODE])
    total = cost.step_s + cost.token_s[tokens + drafts] + cost.sampled_s[sampled + drafts]
    if x[DECODE] > 0.0:
        total += cost.decode_fixed_s
    if x[PROMPT] > 0.0:
        total += cost.prompt_fixed_s
    n = x.size
    for j in range(n):
        total += cost.linear[j] * x[j]
    for i in range(cost.row_base.size):
        phase = cost.row_phase[i]
        if (phase == 1 and x[DECODE] == 0.0) or (phase == 2 and x[PROMPT] == 0.0):
            continue
        compute, memory = 0.0, cost.row_base[i]
        for j in range(n):
            compute += cost.row_compute[i, j] * x[j]
            memory += cost.row_memory[i, j] * x[j]
        if cost.row_compute_base[i] > 0.0 and compute > 0.0:
            compute += compute * cost.row_compute_base[i] / (compute + cost.row_compute_base[i])
        if cost.power == 3.0:
            total += np.cbrt(compute * compute * compute + memory * memory * memory)
        else:
            total += (compute**cost.power + memory**cost.power) ** (1.0 / cost.power)
    launching = cost.launch_s if tokens + drafts > cost.graph_tokens else cost.piece_s
    if cost.power == 3.0:
        total = np.cbrt(total * total * total + launching * launching * launching)
    else:
        total = (total**cost.power + launching**cost.power) ** (1.0 / cost.power)
    return total + cost.host_s + cost.host_sequence_s * x[SEQUENCES] + reach_s + cost.decode_reach_s * x[DECODE]
