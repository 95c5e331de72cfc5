"""Requests of a run, simulated or measured, as arrays: what every metric is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.metrics.definitions import e2e_s, tpot_s, ttft_s
from bstar.specs.slo import Slo

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestRecords:
    """One entry per request, in any order; all arrays have equal length.

    sent_s, first_token_s, finish_s   seconds on one clock; nan where it did not happen
    input_tokens, output_tokens       of the prompt, and made
    """

    sent_s: Floats
    first_token_s: Floats
    finish_s: Floats
    input_tokens: Ints
    output_tokens: Ints

    def __post_init__(self) -> None:
        sizes = {np.shape(getattr(self, name)) for name in self.__dataclass_fields__}
        if len(sizes) != 1 or len(next(iter(sizes))) != 1:
            raise SpecError(f"records: arrays must be flat and of equal length, have shapes {sorted(sizes)}")

    def __len__(self) -> int:
        return int(self.sent_s.size)

    @property
    def finished(self) -> Mask:
        """Which requests have their last token."""
        return ~np.isnan(self.finish_s)

    @property
    def ttft_s(self) -> Floats:
        return ttft_s(self.sent_s, self.first_token_s)

    @property
    def tpot_s(self) -> Floats:
        """nan for a request of one token and for one that did not finish."""
        return tpot_s(self.first_token_s, self.finish_s, self.output_tokens)

    @property
    def e2e_s(self) -> Floats:
        return e2e_s(self.sent_s, self.finish_s)

    @property
    def duration_s(self) -> float:
        """From the first request to the last token; 0 where nothing finished."""
        if len(self) == 0 or not self.finished.any():
            return 0.0
        return float(np.nanmax(self.finish_s) - np.nanmin(self.sent_s))

    def meets(self, slo: Slo | None) -> Mask:
        """Which requests finished and are within every limit of `slo`. One without TPOT meets any TPOT limit."""
        good = self.finished
        if slo is None:
            return good
        if slo.ttft_s is not None:
            good = good & (self.ttft_s <= slo.ttft_s)
        if slo.tpot_s is not None:
            tpot = self.tpot_s
            good = good & (np.isnan(tpot) | (tpot <= slo.tpot_s))
        if slo.e2e_s is not None:
            good = good & (self.e2e_s <= slo.e2e_s)
        return good

    def take(self, chosen: Any) -> RequestRecords:
        """Those at an index, slice or mask."""
        return RequestRecords(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


def inside_so_far(sent_s: Floats, first_token_s: Floats, at_s: Floats | float, slo: Slo | None) -> Mask:
    """Of requests that were cut off at `at_s`: whether they had broken no limit by then. They count neither way.

    first_token_s   nan where it had not come
    """
    inside = np.ones(sent_s.shape, dtype=np.bool_)
    if slo is not None and slo.ttft_s is not None:
        inside &= np.where(np.isnan(first_token_s), at_s, first_token_s) - sent_s <= slo.ttft_s
    if slo is not None and slo.e2e_s is not None:
        inside &= at_s - sent_s <= slo.e2e_s
    return inside
