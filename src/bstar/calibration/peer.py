"""What the strongest peer, AIConfigurator 0.12.0, predicts for bundled serving rows in its default mode."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cache
from typing import Final

from bstar.calibration.bundled import PEER, SERVING, bundled_points, bundled_text
from bstar.calibration.point import Point

PEER_NAME: Final = "AIConfigurator 0.12.0"
_PREFIX: Final = "aiconfigurator_0.12.0_silicon_"  # its default database mode


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPrediction:
    """Seconds; None where the peer does not answer."""

    ttft_s: float | None
    tpot_s: float | None


def peer_prediction(point: Point) -> PeerPrediction | None:
    """The peer's answer for `point`; None where it has none, or where the row is not the bundled one of that id."""
    known = _rows().get(point.id)
    if known is None or known[0] != _labels(point):
        return None
    return known[1]


@cache
def _rows() -> dict[str, tuple[tuple[object, ...], PeerPrediction]]:
    labels = {point.id: _labels(point) for point in bundled_points(SERVING)}
    found = {}
    for row in csv.DictReader(io.StringIO(bundled_text(PEER))):
        ttft, tpot = (row[f"{_PREFIX}{name}_ms"] for name in ("ttft", "tpot"))
        if ttft or tpot:
            found[row["id"]] = labels[row["id"]], PeerPrediction(ttft_s=_seconds(ttft), tpot_s=_seconds(tpot))
    return found


def _labels(point: Point) -> tuple[object, ...]:
    """What the prediction was made for."""
    return (
        point.engine, point.model, point.gpu, point.mode, point.weight_dtype, point.input_tokens, point.output_tokens,
        point.concurrency, point.num_gpus, point.attention_tp, point.expert_parallel,
    )  # fmt: skip


def _seconds(text: str) -> float | None:
    return float(text) / 1000.0 if text else None
