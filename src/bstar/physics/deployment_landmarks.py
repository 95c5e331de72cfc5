"""The batch landmarks of a deployment: its own bytes, FLOPs and memory put into the formulas of `landmarks`.

What B counts. B is the number of sequences that one copy of the replica decodes at a time, over all its
attention-data-parallel ranks and pipeline stages. A tensor-parallel group sees every one of its sequences:
each rank reads its share of the weights and its share of every cache, KV heads that are replicated
(TP beyond the KV heads, MLA) in full; so B* = W_rank / kv_rank, and replication lowers it. Attention data
parallelism gives each of its A groups B/A sequences, pipelining each of its S stages B/S at a time:

    B* = A · S · b*,   b* the sequences of one rank and stage with  W(b*) = b* · kv

W(b) is what a decode step of b·A sequences streams, all stages added up: every dense weight, and the routed
experts that b·A tokens are expected to touch. kv is what the step READS for one sequence: all cached tokens
of full attention, the window of sliding layers, the top k and the index keys of sparse attention, states once,
a shared cache once per layer that reads it. B_mem divides the memory by what a sequence KEEPS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.physics import landmarks as formulas
from bstar.physics.arithmetic import computed_dtype
from bstar.physics.batch import BatchShape
from bstar.physics.kv_cache import kv_bytes_per_sequence, state_bytes_per_sequence
from bstar.physics.operators import CompiledStep, compiled_step
from bstar.specs.deployment import Deployment
from bstar.specs.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Landmarks:
    """Landmarks of a deployment, in sequences of one replica copy; None where one does not exist.

    context_tokens            mean context that a decode step sees
    ridge_point               I* of the dtype that most FLOPs compute in (`compute_dtype`), FLOP/byte
    weight_bytes              W(B*): streamed per step and rank, all stages (all experts where B* is None)
    kv_bytes_per_sequence     read per sequence and step, per rank, all stages
    kept_bytes_per_sequence   held in memory, per rank of the fullest stage; at the full length: kept_bytes_full
    parameters                P: what one token multiplies with, per rank, all stages (active experts only)
    attention_flops_per_sequence   a·L of one decoded token, per rank
    arithmetic_intensity_limit     AI(∞) = (2P + a·L) / kv: what no batch exceeds
    b_star, b_gemm, b_compute, b_mem, b_mem_full, b_tok   the landmarks; b_mem_full is at the full length I + O
    sequences_per_rank        A · S: B over the sequences of one rank and stage
    """

    context_tokens: float
    full_context_tokens: float
    ridge_point: float
    compute_dtype: str
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    weight_bytes: float
    weight_bytes_all: float
    kv_bytes_per_sequence: float
    kept_bytes_per_sequence: float
    kept_bytes_full: float
    kv_pool_bytes: float
    parameters: float
    attention_flops_per_sequence: float
    arithmetic_intensity_limit: float | None
    b_star: float | None
    b_gemm: float
    b_compute: float | None
    b_mem: float | None
    b_mem_full: float | None
    b_tok: float
    sequences_per_rank: int


def landmarks_at(deployment: Deployment, workload: Workload | float) -> Landmarks:
    """See `bstar.physics.landmarks.landmarks_of`."""
    context, full = _contexts(workload)
    split = deployment.parallel
    step = compiled_step(deployment.model, split, deployment.kv_format, "all")
    per_rank = split.attention_dp * split.pp
    rank = _rank_step(step, split.attention_dp, context)
    dtype, peak = _dominant_dtype(deployment, step, rank.values)
    bandwidth = deployment.device.bandwidth_bytes_per_s
    ridge = float(formulas.ridge_point(peak, bandwidth))

    streamed = _streamed(step)

    def weights(sequences: NDArray[np.float64]) -> NDArray[np.float64]:
        return streamed(sequences * split.attention_dp)

    w_max, kv = rank.weight_bytes_all, rank.kv_bytes
    if step.routed.any():
        b_star = float(formulas.b_star_fixed_point(weights, kv, w_max))
        b_gemm = float(formulas.b_gemm_fixed_point(ridge, weights, rank.parameters, w_max))
        b_c = float(formulas.b_compute_fixed_point(ridge, weights, rank.parameters, kv, w_max))
    else:
        b_star, b_gemm = float(formulas.b_star(w_max, kv)), float(formulas.b_gemm(ridge, w_max, rank.parameters))
        b_c = float(formulas.b_compute(ridge, w_max, rank.parameters, kv))
    kept, kept_full = (_kept(deployment, tokens) for tokens in (context, full))
    pool = _pool_bytes(deployment)
    limit = float(formulas.arithmetic_intensity_limit(rank.parameters, kv, rank.attention_flops))
    return Landmarks(
        context_tokens=context, full_context_tokens=full, ridge_point=ridge, compute_dtype=dtype,
        peak_flops_per_s=peak, bandwidth_bytes_per_s=bandwidth,
        weight_bytes=float(weights(np.array(b_star))) if np.isfinite(b_star) else w_max, weight_bytes_all=w_max,
        kv_bytes_per_sequence=kv, kept_bytes_per_sequence=kept, kept_bytes_full=kept_full, kv_pool_bytes=pool,
        parameters=rank.parameters, attention_flops_per_sequence=rank.attention_flops,
        arithmetic_intensity_limit=_finite(limit), b_star=_finite(b_star * per_rank), b_gemm=b_gemm * per_rank,
        b_compute=_finite(b_c * per_rank), b_mem=_finite(float(formulas.b_mem(pool, kept)) * split.attention_dp),
        b_mem_full=_finite(float(formulas.b_mem(pool, kept_full)) * split.attention_dp),
        b_tok=_token_limit(deployment), sequences_per_rank=per_rank,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankStep:
    """One decoded sequence per rank: its work, and the weights at a large batch."""

    values: NDArray[np.float64]
    parameters: float
    attention_flops: float
    kv_bytes: float
    weight_bytes_all: float


def _rank_step(step: CompiledStep, attention_dp: int, context: float) -> _RankStep:
    shape = BatchShape.decode(float(attention_dp), context)
    values = step.values(shape, chunks_as_windows=True)
    flops, kv = step.flops @ values, step.kv_reads @ values
    gemm = np.array([w.kind in ("gemm", "moe_gemm") for w in step.works])
    attention = np.array([w.name in ("attn", "indexer", "mixer") and not g
                          for w, g in zip(step.works, gemm, strict=True)])
    return _RankStep(
        values=values, parameters=float(flops[gemm].sum()) / 2.0, attention_flops=float(flops[attention].sum()),
        kv_bytes=float(kv.sum()), weight_bytes_all=float(step.weight_bytes.sum()),
    )  # fmt: skip


def _streamed(step: CompiledStep) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Weight bytes of one step over its expert tokens: dense + Σ kinds of experts · (1 − (1 − k/n)^tokens)."""
    dense = float(step.weight_bytes[~step.routed].sum())
    kinds = [(float(miss), float(step.weight_bytes[step.routed & (step.miss_base == miss)].sum()))
             for miss in np.unique(step.miss_base[step.routed])]

    def weights(expert_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.full(np.shape(expert_tokens), dense)
        for miss, routed in kinds:
            total = total + routed * (1.0 - miss**expert_tokens)
        return total

    return weights


def _dominant_dtype(deployment: Deployment, step: CompiledStep, values: NDArray[np.float64]) -> tuple[str, float]:
    """The dtype that most GEMM FLOPs of a decode step compute in on this device, and its peak."""
    flops = step.flops @ values
    by_dtype: dict[str, float] = {}
    for work, amount in zip(step.works, flops, strict=True):
        if work.kind in ("gemm", "moe_gemm") and work.compute_dtype is not None:
            used = computed_dtype(deployment.device, work.compute_dtype)
            by_dtype[used] = by_dtype.get(used, 0.0) + float(amount)
    if not by_dtype:
        raise SpecError(f"model {deployment.model.name!r}: it has no GEMM to take a ridge point from")
    dtype = max(by_dtype, key=lambda d: by_dtype[d])
    return dtype, deployment.device.peak(dtype)


def _kept(deployment: Deployment, context: float) -> float:
    """Bytes that one sequence of `context` tokens holds on a rank of the fullest stage."""
    model, split = deployment.model, deployment.parallel
    kv = float(kv_bytes_per_sequence(model, deployment.kv_format, context, split))
    return kv + state_bytes_per_sequence(model, split)


def _pool_bytes(deployment: Deployment) -> float:
    """KV space of one GPU; 0 where the model does not fit."""
    from bstar.physics.memory import memory_budget

    return float(max(memory_budget(deployment).kv_cache_bytes, 0))


def _token_limit(deployment: Deployment) -> float:
    """What max_num_seqs and the token budget admit to one step, over all ranks and pipeline stages.

    Both flags hold per attention-data-parallel rank. The budget is per step, so pipelining multiplies it;
    max_num_seqs counts all running requests. A speculating sequence takes 1 + k tokens.
    """
    engine, split = deployment.engine, deployment.parallel
    per_step = engine.max_num_batched_tokens // (1 + engine.num_speculative_tokens)
    return float(min(engine.max_num_seqs, per_step * split.pp) * split.attention_dp)


def _contexts(workload: Workload | float) -> tuple[float, float]:
    """(mean context of a decode step, full length) of a workload, or one number for both."""
    if isinstance(workload, Workload):
        return workload.mean_decode_context_tokens, workload.mean_full_context_tokens
    if not workload > 0:
        raise SpecError(f"context: must be positive, is {workload}")
    return float(workload), float(workload)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
