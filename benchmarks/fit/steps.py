"""What a simulated row's steps weigh in its mean TPOT and mean TTFT.

    mean TPOT = Σ steps weight_tpot · seconds        a decoding request weighs 1 / (its tokens - 1) / requests
    mean TTFT = request_s + Σ steps weight_ttft · seconds   a waiting one 1 / requests

Steps are put together in bins of like steps (decode only, or with prompt tokens; by weight along their seconds), each
with its mean statistics: seconds are nearly linear in them, so 48 bins say what 10,000 steps do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.latency.step_model import StepModel
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel_log import RunWork, _weights_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSample:
    """values (statistics, bins) of one rank's mean steps; weights (bins,); seconds as simulated (bins,)."""

    values: Floats
    tpot: Floats
    ttft: Floats
    seconds: Floats
    prompt: NDArray[np.bool_]


def statistic_columns(model: StepModel, cost: StepCost) -> Floats:
    """(statistics, log columns): what a unit of each column of a run log adds to each statistic."""
    width = RunWork(model, cost).width
    return np.array([_weights_of(s, model, cost, width) for s in model.step.statistics])


def integral(begin: Floats, end: Floats, weight: Floats, at: Floats) -> Floats:
    """Σ weight · length of [begin, end] before each of the times `at`."""
    def ramps(edge: Floats) -> Floats:
        order = np.argsort(edge, kind="stable")
        e, w = edge[order], weight[order]
        cw, cwe = np.concatenate([[0.0], np.cumsum(w)]), np.concatenate([[0.0], np.cumsum(w * e)])
        i = np.searchsorted(e, at, side="right")
        return cw[i] * at - cwe[i]

    return ramps(begin) - ramps(end)


def binned(
    values: Floats, tpot: Floats, ttft: Floats, seconds: Floats, prompt: NDArray[np.bool_], bins: int
) -> StepSample:
    """Runs (columns) as bins; tpot, ttft: weights in steps; seconds of one step."""
    parts = []
    for kind, count in ((False, bins // 3), (True, bins - bins // 3)):
        chosen = np.flatnonzero((prompt == kind) & (tpot + ttft > 0))
        if not chosen.size:
            continue
        # Bins hold equal shares of TPOT and TTFT together.
        share = (tpot * seconds)[chosen] / max(float(tpot @ seconds), 1e-30) + (ttft * seconds)[chosen] / max(
            float(ttft @ seconds), 1e-30)
        order = chosen[np.argsort(seconds[chosen], kind="stable")]
        share = share[np.argsort(seconds[chosen], kind="stable")]
        place = np.minimum((np.cumsum(share) / share.sum() * count).astype(int), count - 1)
        for b in np.unique(place):
            inside = order[place == b]
            # the mean step for TPOT and the one for TTFT may differ: weigh by both shares
            w = share[place == b]
            w = w / w.sum() if w.sum() > 0 else np.full(w.size, 1.0 / w.size)
            mean_s = float(seconds[inside] @ w)
            parts.append((values[:, inside] @ w, tpot[inside].sum(), ttft[inside].sum(), mean_s, kind))
    return StepSample(
        values=np.stack([p[0] for p in parts], axis=1), tpot=np.array([p[1] for p in parts]),
        ttft=np.array([p[2] for p in parts]), seconds=np.array([p[3] for p in parts]),
        prompt=np.array([p[4] for p in parts]),
    )  # fmt: skip
