"""Rates of a part of a run: whatever was served in it, of whichever request, over its length.

A warm-up is load that is not measured. While the first measured requests are served its last ones are too, so a rate
that counts the measured ones alone divides part of the work by all of the time. Requests in flight at an edge of the
window count by the share of their tokens that came inside: requests/s times tokens of an answer are tok/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bstar.metrics.records import RequestRecords

Floats = NDArray[np.float64]

# A loaded time of fewer requests one after another shows little but how the load begins. Closed loops of three requests
# for each client, which is what the notes ask for, have two.
LEAST_REQUESTS_LONG: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second between `start_s` and `end_s`."""

    start_s: float
    end_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def rates_of(
    share: Floats, input_tokens: ArrayLike, output_tokens: ArrayLike, *, start_s: float, seconds: float
) -> Rates:
    """The rates of a window from `start_s` on; 0 where it has no length.

    share                         (n,) of the tokens of each answer that came in the window, 0 to 1; warm-up counts too
    input_tokens, output_tokens   (n,) of the whole prompt and the whole answer
    """
    inputs, outputs = float(share @ np.asarray(input_tokens)), float(share @ np.asarray(output_tokens))
    each = [amount / seconds if seconds > 0 else 0.0 for amount in (float(share.sum()), outputs, inputs + outputs)]
    return Rates(start_s=start_s, end_s=start_s + seconds, requests_per_s=each[0], output_tokens_per_s=each[1],
                 total_tokens_per_s=each[2])  # fmt: skip


def whole_run(records: RequestRecords) -> Rates:
    """From the first request that was sent to the last token: what other clients define."""
    start = float(np.nanmin(records.sent_s)) if len(records) else 0.0
    return rates_of(records.finished.astype(float), records.input_tokens, records.output_tokens, start_s=start,
                    seconds=records.duration_s)  # fmt: skip


def loaded(records: RequestRecords, *, start_s: float, end_s: float) -> Rates:
    """Of `records`, warm-up among them, between the two; an answer's tokens come evenly from its first to its last."""
    first, last = records.first_token_s, records.finish_s
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = np.minimum(last, end_s) - np.maximum(first, start_s)
        share = np.where(last > first, inside / (last - first), (last >= start_s) & (last <= end_s))
    share = np.clip(np.nan_to_num(np.where(records.finished, share, 0.0)), 0.0, 1.0)
    return rates_of(share, records.input_tokens, records.output_tokens, start_s=start_s, seconds=end_s - start_s)
