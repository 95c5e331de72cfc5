"""Which batch to allow: B_slo, and the rules for max_num_seqs and max_num_batched_tokens (mission §7, §9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.physics.deployment_landmarks import Landmarks
from bstar.specs.slo import Slo
from bstar.units import format_seconds

Floats = NDArray[np.float64]
StepOf = Callable[[Floats], Floats]

# Mission §7: 0.8–0.9 of B_mem keeps preemption away; the middle where latency counts, the upper end for throughput.
MEMORY_SHARE = 0.85
MEMORY_SHARE_OFFLINE = 0.9
# A step may take twice the TPOT limit when it carries a prompt chunk: TPOT is a mean, one step is one gap.
LONGEST_STEP_TPOTS = 2.0
_BUDGETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_LARGEST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A setting, the rule that bound it, and the sentence that says so; value None: there is none."""

    value: int | None
    rule: str
    reason: str

    def to_dict(self) -> dict[str, object]:
        return {"value": self.value, "rule": self.rule, "reason": self.reason}


def largest_batch_within(step_of: StepOf, limit_s: float) -> float | None:
    """The largest real B ≥ 1 with step_of(B) ≤ limit_s, for a non-decreasing step; None where B = 1 is over.

    Bisection by 64ths: each round evaluates a whole grid at once. inf where 2^20 sequences stay within.
    """
    if float(step_of(np.array([1.0]))[0]) > limit_s:
        return None
    low, high = 1.0, float(_LARGEST_BATCH)
    if float(step_of(np.array([high]))[0]) <= limit_s:
        return float("inf")
    for _ in range(6):
        grid = np.geomspace(low, high, 65)
        within = np.maximum.accumulate(step_of(grid)) <= limit_s
        last = int(np.count_nonzero(within)) - 1
        low, high = float(grid[max(last, 0)]), float(grid[min(last + 1, 64)])
        if high - low <= 1e-9 * high:
            break
    return low


def floored(value: float) -> int:
    """A batch rounded down to what engines pad to: whole below 64, multiples of 4 below 128, of 8 beyond."""
    whole = int(value + 1e-9)
    step = 1 if whole < 64 else 4 if whole < 128 else 8
    return max(whole // step * step, 0)


def recommend_max_num_seqs(
    landmarks: Landmarks, b_slo: float | None, slo: Slo | None, *, attention_dp: int, fits: bool, why_not: str | None
) -> Recommendation:
    """The start for max_num_seqs, per attention-data-parallel rank (as the flag counts).

    Without an SLO: min(B*, B_gemm, 0.85·B_mem). With a TPOT limit, B_slo joins. An SLO that asks for nothing
    (offline batch) follows throughput: 0.9·B_mem, for beyond B* and B_gemm a larger batch gains little but
    costs nobody anything. E2E-only SLOs are treated as the first case.
    """
    if not fits or landmarks.b_mem is None or landmarks.b_mem < 1:
        return Recommendation(value=None, rule="does_not_fit", reason=why_not or "no room for one sequence")
    if slo is not None and slo.tpot_s is not None and b_slo is None:
        reason = f"a single sequence already exceeds the TPOT limit of {format_seconds(slo.tpot_s)}"
        return Recommendation(value=None, rule="b_slo", reason=reason)
    if slo is not None and slo.is_empty:
        walls = {"b_mem": MEMORY_SHARE_OFFLINE * landmarks.b_mem}
    else:
        walls = {
            "b_star": float("inf") if landmarks.b_star is None else landmarks.b_star,
            "b_gemm": landmarks.b_gemm,
            "b_slo": float("inf") if b_slo is None else b_slo,
            "b_mem": MEMORY_SHARE * landmarks.b_mem,
        }
    rule = min(walls, key=lambda name: walls[name])
    value = max(floored(walls[rule] / attention_dp), 1)
    return Recommendation(value=value, rule=rule, reason=_REASONS[rule].format(b=walls[rule], n=value))


_REASONS = {
    "b_star": "B* = {b:.1f}: beyond it reading the KV cache costs more than the weights that the batch shares",
    "b_gemm": "B_gemm = {b:.1f}: beyond it the weight GEMMs are compute bound and nothing is shared any more",
    "b_slo": "B_slo = {b:.1f}: beyond it a step, with its share of prefill, exceeds the TPOT limit",
    "b_mem": "{b:.1f} is the share of B_mem that keeps sequences from waiting for memory or being preempted",
}


def recommend_token_budget(
    mixed_step_of: StepOf, *, default: int, max_num_seqs: int, b_gemm: float, tpot_s: float | None
) -> Recommendation:
    """max_num_batched_tokens: the engine's default, or less where one prompt chunk would stall a stream.

    mixed_step_of   seconds of a step of max_num_seqs decodes and the given number of prompt tokens
    With a TPOT limit: the largest usual budget whose full step takes at most twice that limit, but no less
    than what keeps the GEMMs of a chunk busy (B_gemm tokens beside the decodes).
    """
    if tpot_s is None:
        return Recommendation(value=default, rule="engine_default", reason="no TPOT limit: the engine's default")
    sizes = np.array([b for b in _BUDGETS if b <= default] or [default], dtype=np.float64)
    chunk = np.maximum(sizes - max_num_seqs, 1.0)
    within = sizes[mixed_step_of(chunk) <= LONGEST_STEP_TPOTS * tpot_s]
    needed = next((int(b) for b in sizes if b >= max_num_seqs + b_gemm), default)
    limit = f"twice the TPOT limit of {format_seconds(tpot_s)}"
    if within.size and int(within[-1]) >= needed:
        if within.size == sizes.size:
            return Recommendation(value=default, rule="tpot", reason=f"as it is: its full step takes at most {limit}")
        reason = f"the largest budget whose full step takes at most {limit}"
        return Recommendation(value=int(within[-1]), rule="tpot", reason=reason)
    chunk_of = f"a chunk B_gemm = {b_gemm:.0f} tokens beside {max_num_seqs} decodes"
    if needed < max_num_seqs + b_gemm:
        return Recommendation(value=needed, rule="b_gemm", reason=f"as it is: its full step takes more than {limit}, "
                              f"but to give {chunk_of} takes a larger one")
    return Recommendation(value=needed, rule="b_gemm", reason=f"the smallest budget that gives {chunk_of}")
