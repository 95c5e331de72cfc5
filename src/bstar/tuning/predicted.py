"""What bstar predicts for a tuning, to lay beside what it measured: landmarks, the curve, the start value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bstar.errors import BstarError
from bstar.physics.landmarks import landmarks_of
from bstar.sim.run import simulate
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Landmarks at the mean context of the load; per measured value what the simulator says.

    bandwidth_fraction   achieved: bytes that a decode step has to read over its fitted time, of the datasheet's
    """

    landmarks: dict[str, float | None]
    throughput_per_s: dict[int, float]
    tpot_s: dict[int, float]
    recommended: int | None
    rule: str
    bandwidth_fraction: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"landmarks": self.landmarks, "recommended_max_num_seqs": self.recommended, "rule": self.rule,
                "throughput_per_s": {str(k): v for k, v in self.throughput_per_s.items()},
                "tpot_s": {str(k): v for k, v in self.tpot_s.items()},
                "bandwidth_fraction": self.bandwidth_fraction}  # fmt: skip


def predict(
    deployment: Deployment, loads: dict[int, tuple[Deployment, Traffic]], context: float, *,
    decode: tuple[float, float] | None = None, slo: Any = None,
) -> Predicted:  # fmt: skip
    """Predictions for each value: its deployment under its load.

    context   mean tokens of a decoding sequence
    decode    (a_s, b_s) of the measured steps
    """
    from bstar.planning.sheet import explain

    marks = landmarks_of(deployment, context)
    sheet = explain(deployment, max(round(context), 1), slo=slo)
    throughput, tpot = {}, {}
    for value, (deployed, load) in loads.items():
        try:
            found = simulate(deployed, load).summary
        except BstarError:
            continue
        throughput[value] = found.output_tokens_per_s
        if found.tpot_s.mean is not None:
            tpot[value] = found.tpot_s.mean
    bandwidth = None
    if decode is not None and decode[1] > 0:
        # The part of a step that grows with the batch is the reading of one more cache.
        bandwidth = marks.kv_bytes_per_sequence / decode[1] / marks.bandwidth_bytes_per_s
    names = ("b_star", "b_gemm", "b_compute", "b_mem", "b_mem_full", "b_tok")
    return Predicted(
        landmarks={name: getattr(marks, name) for name in names}, throughput_per_s=throughput, tpot_s=tpot,
        recommended=sheet.recommended_max_num_seqs.value, rule=sheet.recommended_max_num_seqs.rule,
        bandwidth_fraction=bandwidth,
    )  # fmt: skip


def mean_context(load: Traffic) -> float:
    """Mean tokens that a decode step sees of a sequence: E[O·(I + O/2)] / E[O] of the load."""
    prompt, answer = load.input_tokens.astype(float), load.output_tokens.astype(float)
    return float((answer * (prompt + answer / 2.0)).mean() / answer.mean())
