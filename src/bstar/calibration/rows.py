"""An outcome as a row of the JSON of `bstar validate`."""

from __future__ import annotations

from typing import Any

from bstar.calibration.summary import AXES, Outcome, label_of


def outcome_row(outcome: Outcome) -> dict[str, Any]:
    """Predicted and measured seconds, errors (predicted / measured − 1), labels; None where there is no figure.

    counted   whether the row counts in the summary's errors
    reason    why there is no prediction
    """
    point, found, peer = outcome.point, outcome.prediction, outcome.peer
    return {
        "id": point.id, "predicted_ttft_s": found.ttft_s, "predicted_tpot_s": found.tpot_s, "reason": found.reason,
        "predicted_ttft_range_s": found.ttft_range_s, "predicted_tpot_range_s": found.tpot_range_s,
        "measured_ttft_s": point.ttft_s, "measured_tpot_s": point.tpot_s, "ttft_error": outcome.error("ttft"),
        "tpot_error": outcome.error("tpot"), "predicted_output_tokens_per_s": found.output_tokens_per_s,
        "measured_output_tokens_per_s": point.output_tokens_per_s, "counted": outcome.counts,
        "floor_tpot_s": found.floor_s,
        "peer_ttft_s": None if peer is None else peer.ttft_s, "peer_tpot_s": None if peer is None else peer.tpot_s,
        **{axis: label_of(outcome, axis) for axis in AXES if axis != "regime"},
        "regime": found.regime, "notes": list(found.notes),
    }  # fmt: skip
