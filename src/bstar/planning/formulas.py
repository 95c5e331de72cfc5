"""The sheet's formulas with the numbers put in, so that a reader can check each by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bstar.latency.times import StepTime
from bstar.physics.deployment_landmarks import Landmarks
from bstar.planning.limits import Recommendation
from bstar.specs.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """name of the quantity, its formula, the formula with numbers, and the result with its unit."""

    name: str
    formula: str
    substituted: str
    result: str

    def to_dict(self) -> dict[str, str]:
        return {
            "name": self.name, "formula": self.formula, "substituted": self.substituted, "result": self.result,
        }  # fmt: skip


def number(value: float | None) -> str:
    """A number as it can be typed into a calculator: 6 significant digits, whole numbers below 10^12 in full."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "∞"
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value)}"
    return f"{value:.6g}"


def sheet_formulas(
    deployment: Deployment, marks: Landmarks, *, batch: float, step: StepTime, weight_bytes: float, intensity: float,
    b_slo: float | None, tpot_s: float | None, prefill_share_s: float, seqs: Recommendation,
) -> tuple[Formula, ...]:  # fmt: skip
    """Every number of the sheet that follows from a formula, in reading order."""
    routed = deployment.model.is_moe
    rows = [*_walls(deployment, marks), *_step(marks, batch, step, weight_bytes, intensity, routed=routed)]
    if tpot_s is not None:
        rows.append(_slo_row(b_slo, tpot_s, prefill_share_s))
    rows.append(_recommendation(marks, b_slo, seqs, ranks=deployment.parallel.attention_dp))
    return tuple(rows)


def _walls(deployment: Deployment, m: Landmarks) -> list[Formula]:
    ranks = m.sequences_per_rank
    times = "" if ranks == 1 else f"{ranks} · "
    w, kv, ridge, p = (number(x) for x in (m.weight_bytes, m.kv_bytes_per_sequence, m.ridge_point, m.parameters))
    w_gemm = m.b_gemm / ranks * 2 * m.parameters / m.ridge_point
    slack = 2 * m.parameters - m.ridge_point * m.kv_bytes_per_sequence
    prefix = "" if ranks == 1 else "ranks · "
    rows = [
        Formula(
            name="ridge_point", formula=f"I* = peak({m.compute_dtype}) / bandwidth",
            substituted=f"{number(m.peak_flops_per_s)} / {number(m.bandwidth_bytes_per_s)}",
            result=f"{number(m.ridge_point)} FLOP/byte",
        ),
        Formula(
            name="b_star", formula=f"B* = {prefix}W / kv", substituted=f"{times}{w} / {kv}",
            result="none: a sequence has no cache" if m.b_star is None else f"{number(m.b_star)} sequences",
        ),
        Formula(
            name="b_gemm", formula=f"B_gemm = {prefix}I*·W / (2·P)",
            substituted=f"{times}{ridge} · {number(w_gemm)} / (2 · {p})", result=f"{number(m.b_gemm)} sequences",
        ),
        Formula(
            name="b_compute", formula=f"B_c = {prefix}I*·W / (2·P − I*·kv)",
            substituted=f"{times}{ridge} · {number(w_gemm)} / (2 · {p} − {ridge} · {kv} = {number(slack)})",
            result=("none: 2·P / kv stays below the ridge" if m.b_compute is None
                    else f"{number(m.b_compute)} sequences"),
        ),
    ]  # fmt: skip
    groups = deployment.parallel.attention_dp
    lead, factor = ("", "") if groups == 1 else ("groups · ", f"{groups} · ")
    for name, kept, value, context in (
        ("b_mem", m.kept_bytes_per_sequence, m.b_mem, m.context_tokens),
        ("b_mem_full", m.kept_bytes_full, m.b_mem_full, m.full_context_tokens),
    ):
        if name == "b_mem_full" and kept == m.kept_bytes_per_sequence:
            continue
        rows.append(Formula(
            name=name, formula=f"B_mem = {lead}KV space / bytes of a sequence of {number(context)} tokens",
            substituted=f"{factor}{number(m.kv_pool_bytes)} / {number(kept)}",
            result="none: a sequence keeps nothing" if value is None else f"{number(value)} sequences",
        ))  # fmt: skip
    return rows


def _step(
    m: Landmarks, batch: float, step: StepTime, weight_bytes: float, intensity: float, *, routed: bool
) -> list[Formula]:
    b = batch / m.sequences_per_rank
    per = "B" if m.sequences_per_rank == 1 else f"B/{number(m.sequences_per_rank)}"  # sequences of a rank
    # The sum reads what unevenly routed tokens touch: fewer experts than W has for evenly routed ones.
    evenly = ", W by evenly routed tokens" if routed else ""
    unevenly = "; unevenly routed tokens touch fewer experts" if routed else ""
    bytes_moved = weight_bytes + b * m.kv_bytes_per_sequence
    bandwidth_floor = bytes_moved / m.bandwidth_bytes_per_s
    parts = " + ".join(f"{name} {expected * 1e3:.4g}" for name, _, expected in step.by_operator if expected > 0)
    floors = " + ".join(f"{name} {floor * 1e3:.4g}" for name, floor, _ in step.by_operator if floor > 0)
    return [
        Formula(
            name="arithmetic_intensity", formula=f"AI(B) = {per}·(2·P + a·L) / (W + {per}·kv)",
            substituted=(f"{number(b)} · (2 · {number(m.parameters)} + {number(m.attention_flops_per_sequence)}) / "
                         f"({number(weight_bytes)} + {number(b)} · {number(m.kv_bytes_per_sequence)})"),
            result=f"{number(intensity)} FLOP/byte",
        ),
        Formula(
            name="bandwidth_floor", formula=f"(W + {per}·kv) / bandwidth{evenly}",
            substituted=(f"({number(weight_bytes)} + {number(b)} · {number(m.kv_bytes_per_sequence)}) / "
                         f"{number(m.bandwidth_bytes_per_s)}"),
            result=f"{number(bandwidth_floor * 1e3)} ms",
        ),
        Formula(
            name="step_time.floor", formula=f"Σ operators max(FLOPs / peak, bytes / bandwidth), in ms{unevenly}",
            substituted=floors, result=f"{number(step.floor_s * 1e3)} ms",
        ),
        Formula(
            name="step_time.expected", formula="Σ operators at achievable rates + links + engine, in ms",
            substituted=parts, result=f"{number(step.expected_s * 1e3)} ms",
        ),
        Formula(
            name="time_per_output_token_amortized", formula="step time / B",
            substituted=f"{number(step.expected_s * 1e3)} ms / {number(batch)}",
            result=f"{number(step.expected_s / batch * 1e6)} µs",
        ),
    ]  # fmt: skip


def _slo_row(b_slo: float | None, tpot_s: float, prefill_share_s: float) -> Formula:
    share = "" if prefill_share_s == 0 else f" + B · {number(prefill_share_s * 1e6)} µs of prefill (at this batch)"
    return Formula(
        name="b_slo", formula="largest B with step(B) + B · prefill of a request / its decode steps ≤ TPOT limit",
        substituted=f"step(B){share} ≤ {number(tpot_s * 1e3)} ms",
        result="none: one sequence already exceeds it" if b_slo is None else f"{number(b_slo)} sequences",
    )  # fmt: skip


def _recommendation(m: Landmarks, b_slo: float | None, seqs: Recommendation, *, ranks: int) -> Formula:
    walls = f"B* {number(m.b_star)}, B_gemm {number(m.b_gemm)}, B_slo {number(b_slo)}, B_mem {number(m.b_mem)}"
    return Formula(
        name="recommended_max_num_seqs",
        formula="min(B*, B_gemm, B_slo, 0.85·B_mem)" + ("" if ranks == 1 else f" / {ranks} ranks")
        + "; offline: 0.9·B_mem",
        substituted=walls, result="none: " + seqs.reason if seqs.value is None else f"{seqs.value} ({seqs.rule})",
    )  # fmt: skip
