"""The gaps between tokens of the measured requests alone: what the run log has of all, less those of the warm-up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bstar.metrics.gaps import TokenGaps

if TYPE_CHECKING:
    from bstar.sim.result import SimResult


def has_warmup(result: SimResult) -> bool:
    """Whether some requests were served and are not measured."""
    return bool(_left_out(result).any())


def measured_gaps(result: SimResult) -> TokenGaps | None:
    """Gaps of the measured requests; None where the log does not tell them from those of the others.

    A request that is never interrupted gets a token in every step from its first to its last: each such step is one
    gap of its. Where these do not add up to its time (preemption, failure, caches sent elsewhere), nothing is said.
    """
    log, out = result.steps, _left_out(result)
    if not out.any():
        return log.gaps
    if np.isnan(result.finish_s[out]).any() or result.num_preemptions[out].any():
        return None
    duration = log.duration_s
    middle = log.start_s + duration / 2.0
    theirs = np.zeros(len(log), dtype=np.int64)
    for engine in np.unique(result.replica[out]):
        mine, rows = out & (result.replica == engine), log.replica == engine
        begun = np.searchsorted(np.sort(result.first_token_s[mine]), middle[rows])
        ended = np.searchsorted(np.sort(result.finish_s[mine]), middle[rows])
        theirs[rows] = begun - ended
    spent_s = float((result.finish_s - result.first_token_s)[out].sum())
    gaps = int((result.output_tokens[out] - 1).sum())  # fewer steps than these: it was passed over in some
    if int(theirs @ log.steps) != gaps or (theirs > log.regular).any():
        return None
    if abs(float(theirs @ duration) - spent_s) > 1e-6 * max(spent_s, 1e-3):
        return None
    return replace(log, regular=log.regular - theirs).gaps


def _left_out(result: SimResult) -> NDArray[np.bool_]:
    return ~result.measured & ~np.isnan(result.first_token_s)
