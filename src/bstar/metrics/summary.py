"""The figures of a run, computed once for whoever prints them: simulator, load generator, reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bstar.metrics.distribution import Distribution
from bstar.metrics.gaps import TokenGaps
from bstar.metrics.rates import Rates, whole_run
from bstar.metrics.records import RequestRecords
from bstar.specs.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Metrics of a run (`bstar.metrics.METRICS` defines each).

    num_requests   of the run, finished or not; tokens and rates count finished ones
    slo            the limits that attainment and goodput are about; None: every finished request counts
    """

    num_requests: int
    num_finished: int
    input_tokens: int
    output_tokens: int
    duration_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo: Slo | None
    slo_attainment_fraction: float
    goodput_requests_per_s: float
    goodput_output_tokens_per_s: float

    @property
    def meets_slo(self) -> bool | None:
        """Whether enough requests meet every limit; None without limits."""
        if self.slo is None or self.slo.is_empty:
            return None
        return self.slo_attainment_fraction >= self.slo.attainment_fraction

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests, "num_finished": self.num_finished, "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens, "duration_s": self.duration_s,
            **{name: getattr(self, name).to_dict() for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
            "output_tokens_per_s": self.output_tokens_per_s, "total_tokens_per_s": self.total_tokens_per_s,
            "requests_per_s": self.requests_per_s, "goodput_requests_per_s": self.goodput_requests_per_s,
            "goodput_output_tokens_per_s": self.goodput_output_tokens_per_s,
            "slo_attainment_fraction": self.slo_attainment_fraction, "meets_slo": self.meets_slo,
        }  # fmt: skip


def summarize(
    records: RequestRecords, gaps: TokenGaps, slo: Slo | None = None, *, undecided: int = 0,
    rates: Rates | None = None,
) -> RunSummary:  # fmt: skip
    """The metrics of `records`; `gaps` are those between the tokens of the same requests.

    undecided   requests that were cut off inside every limit: no part of the attainment
    rates       where others were served beside `records`; None: `records` over the time from the first that was sent
                to the last token. Goodput is the share of `records` that is good, of that rate
    """
    finished, good = records.finished, records.meets(slo)
    duration, count = records.duration_s, len(records)
    outputs = int(records.output_tokens[finished].sum())
    inputs = int(records.input_tokens[finished].sum())
    good_outputs = int(records.output_tokens[good].sum())
    over = rates if rates is not None else whole_run(records)
    shares = good.sum() / max(int(finished.sum()), 1), good_outputs / max(outputs, 1)

    return RunSummary(
        num_requests=count, num_finished=int(finished.sum()), input_tokens=inputs, output_tokens=outputs,
        duration_s=duration, ttft_s=Distribution.of(records.ttft_s), tpot_s=Distribution.of(records.tpot_s),
        itl_s=gaps.distribution(), e2e_s=Distribution.of(records.e2e_s), requests_per_s=over.requests_per_s,
        output_tokens_per_s=over.output_tokens_per_s, total_tokens_per_s=over.total_tokens_per_s, slo=slo,
        slo_attainment_fraction=float(good.sum()) / (count - undecided) if count > undecided else 0.0,
        goodput_requests_per_s=over.requests_per_s * float(shares[0]),
        goodput_output_tokens_per_s=over.output_tokens_per_s * shares[1],
    )  # fmt: skip
