"""`SimResult`: what a simulated run gives, per request and in time, and the figures made from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bstar.metrics.distribution import Distribution
from bstar.metrics.gaps import TokenGaps
from bstar.metrics.rates import LEAST_REQUESTS_LONG, Rates, loaded
from bstar.metrics.records import RequestRecords, inside_so_far
from bstar.metrics.summary import RunSummary, summarize
from bstar.sim.measured_gaps import has_warmup, measured_gaps
from bstar.sim.series import TimeSeries, time_series
from bstar.sim.steady import Steadiness, steadiness
from bstar.sim.steps import StepLog
from bstar.sim.stepwise import Counts
from bstar.specs.slo import Slo

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds that the simulation itself took; `compile_s`: of loading compiled code, or of making it."""

    compile_s: float = 0.0
    simulate_s: float = 0.0
    total_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return {"compile_s": self.compile_s, "simulate_s": self.simulate_s, "total_s": self.total_s}


@dataclass(frozen=True, kw_only=True, eq=False)
class SimResult:
    """A simulated run. Arrays have one entry per request, in the order of the traffic.

    arrival_s         when it was sent; nan where it did not come to that
    scheduled_s       when it first had a place in a step
    first_token_s, finish_s   its first and its last token; nan where it did not come to that
    output_tokens     tokens made: fewer than asked for where max_model_len ended it, or the run was interrupted
    num_preemptions   times it lost its cache and was computed again
    cached_tokens     prompt tokens that the prefix cache had when it was first scheduled
    replica           which engine served it
    rejected          longer than the engine takes: answered with an error, not served
    measured          counted by the metrics: all that were sent but the traffic's own warm-up. Those that got no answer
                      (rejected, left without an engine) miss every SLO
    steps             the run in time; None where a policy has no steps to show
    front_end_s       from sending to the scheduler's sight of a request: tokenizing, HTTP
    policy            how requests were batched
    itl_exact         whether every gap between tokens is known, or some only by their sum
    left              numbers of the requests that no engine was there for in the end
    """

    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    num_preemptions: Counts
    cached_tokens: Counts
    replica: Ints
    rejected: NDArray[np.bool_]
    measured: NDArray[np.bool_]
    steps: StepLog
    slo: Slo | None = None
    open_loop: bool = True
    concurrency: int | None = None
    front_end_s: float = 0.0
    policy: str = "continuous"
    engine: str = "reference"
    interrupted: bool = False
    itl_exact: bool = True
    timing: Timing = field(default_factory=Timing)
    notes: tuple[str, ...] = ()
    left: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @cached_property
    def records(self) -> RequestRecords:
        """The measured requests, for `bstar.metrics`."""
        return self._everyone if self.measured.all() else self._everyone.take(self.measured)

    @property
    def _everyone(self) -> RequestRecords:
        """All requests, those of the warm-up too."""
        return RequestRecords(
            sent_s=self.arrival_s, first_token_s=self.first_token_s, finish_s=self.finish_s,
            input_tokens=self.input_tokens, output_tokens=self.output_tokens,
        )  # fmt: skip

    @cached_property
    def gaps(self) -> TokenGaps:
        """Gaps between tokens of the measured requests; of all where the log cannot tell (`remarks` say so)."""
        found = measured_gaps(self)
        return self.steps.gaps if found is None else found

    @property
    def remarks(self) -> tuple[str, ...]:
        """`notes`, and which figures the traffic's own warm-up is part of."""
        if not has_warmup(self):
            return self.notes
        whole = "" if measured_gaps(self) is not None else "ITL, "
        return (*self.notes, f"{whole}in flight, steps, KV cache, MBU, MFU, preemptions and the series are of the "
                             "whole run, warm-up included")

    @cached_property
    def summary(self) -> RunSummary:
        """The metrics of the run, against `slo`."""
        return self.summary_for(self.slo)

    def summary_for(self, slo: Slo | None) -> RunSummary:
        """The metrics of the same run against another SLO."""
        return summarize(self.records, self.gaps, slo, undecided=self._undecided(slo) if self.interrupted else 0,
                         rates=self._loaded_rates())  # fmt: skip

    def _loaded_rates(self) -> Rates | None:
        """With a warm-up: of everything that was served while the measured load was on, as `bstar bench` has it."""
        if not has_warmup(self) or not self.records.finished.any():
            return None
        records = self.records
        start, end = float(np.nanmin(records.sent_s)), float(np.nanmax(records.sent_s))
        if end - start < LEAST_REQUESTS_LONG * float(np.nanmean(records.e2e_s)):
            end = float(np.nanmax(records.finish_s))
        return loaded(self._everyone, start_s=start, end_s=end)

    def _undecided(self, slo: Slo | None) -> int:
        """Requests that the end of an interrupted run met in flight, inside every limit so far."""
        cut = self.measured & np.isnan(self.finish_s) & ~self.rejected & ~self.unserved
        return int(inside_so_far(self.arrival_s[cut], self.first_token_s[cut], self.span_s[1], slo).sum())

    @cached_property
    def steadiness(self) -> Steadiness:
        """Whether the run has a steady state, and the figures within it."""
        return steadiness(self)

    def series(self, points: int = 200) -> TimeSeries:
        """The run at `points` equal intervals of time."""
        return time_series(self, points)

    @property
    def ttft_s(self) -> Floats:
        """Per request, nan where it has none."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Per request, nan where it has none."""
        from bstar.metrics.definitions import tpot_s

        return tpot_s(self.first_token_s, self.finish_s, self.output_tokens)

    @property
    def e2e_s(self) -> Floats:
        """Per request, nan where it did not finish."""
        return self.finish_s - self.arrival_s

    @property
    def span_s(self) -> tuple[float, float]:
        """From the first request to the last thing that happened."""
        if not len(self) or np.isnan(self.arrival_s).all():
            return 0.0, 0.0
        start = float(np.nanmin(self.arrival_s))
        last = float(self.steps.end_s.max(initial=start))
        return start, max(last, float(np.nanmax(self.finish_s, initial=start)))

    @property
    def kv_usage(self) -> float | None:
        """Mean over the run of the fraction of KV blocks in use."""
        return self.steps.kv_usage(*self.span_s)

    @property
    def mean_in_flight(self) -> float:
        """Requests in the system, averaged over the run: the integral over time, not Little's law."""
        start, end = self.span_s
        if end <= start:
            return 0.0
        here = ~np.isnan(self.arrival_s) & ~self.turned_away
        gone = np.where(np.isnan(self.finish_s[here]), end, self.finish_s[here])
        return float(np.maximum(gone - self.arrival_s[here], 0.0).sum()) / (end - start)

    @cached_property
    def unserved(self) -> NDArray[np.bool_]:
        """Per request: whether it was left without an engine."""
        found = np.zeros(len(self), dtype=bool)
        found[self.left] = True
        return found

    @property
    def placed_s(self) -> Floats:
        """Per request: when it stopped waiting for what it needs to make its tokens; nan where it still does."""
        return self.scheduled_s

    @property
    def turned_away(self) -> NDArray[np.bool_]:
        """Per request: whether it never was in the system: rejected, or never given to an engine."""
        return self.rejected | (self.unserved & (self.replica < 0))

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `bstar simulate`."""
        steady, steps = self.steadiness, self.steps
        return {
            **self.summary.to_dict(),
            "queue_s": Distribution.of((self.scheduled_s - self.arrival_s)[self.measured]).to_dict(),
            "num_preemptions": int(self.num_preemptions.sum()),
            "num_rejected": int(self.rejected.sum()),
            "num_unserved": int(self.left.size),
            "cached_tokens": int(self.cached_tokens.sum()),
            "kv_usage": self.kv_usage, "kv_usage_max": steps.max_kv_usage(), "mbu": steps.mbu, "mfu": steps.mfu,
            "num_steps": steps.num_steps, "mean_in_flight": self.mean_in_flight,
            "steady_state": steady.reached, "steady": steady.to_dict(),
            "policy": self.policy, "engine": self.engine, "itl_exact": self.itl_exact,
            "interrupted": self.interrupted, "timing": self.timing.to_dict(), "notes": list(self.remarks),
        }  # fmt: skip


R = TypeVar("R", bound=SimResult)


def came_to(result: R) -> R:
    """An interrupted run without the requests that were to be sent after its end: they have no arrival.

    Raises KeyboardInterrupt where it ended before the first step.
    """
    if np.isnan(result.scheduled_s).all():
        raise KeyboardInterrupt
    late = result.arrival_s > result.span_s[1]
    return replace(result, arrival_s=np.where(late, np.nan, result.arrival_s), measured=result.measured & ~late,
                   rejected=result.rejected & ~late)
