"""A measured run: its requests, what of them counts, and the figures; the same records as a simulated run has."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.measure.health import Health
from bstar.measure.observers import Observation
from bstar.measure.rates import loaded_rates, loaded_time, rates_of_run
from bstar.measure.tables import RequestTable
from bstar.measure.verdict import Verdict, judge_run
from bstar.metrics.distribution import Distribution
from bstar.metrics.gaps import TokenGaps
from bstar.metrics.intervals import Interval, batch_means
from bstar.metrics.rates import Rates
from bstar.metrics.records import RequestRecords, inside_so_far
from bstar.metrics.summary import RunSummary, summarize
from bstar.specs.slo import Slo
from bstar.traffic.load import Traffic

SCHEMA = "bstar.bench/1"

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What counts: requests that were due from `warmup_s` to `cooldown_s` before the last one was due.

    warmup_requests   the first so many of the load do not count either
    """

    warmup_s: float = 0.0
    cooldown_s: float = 0.0
    warmup_requests: int = 0

    def mask(self, table: RequestTable) -> Mask:
        """Which entries of the table count."""
        if len(table) == 0:
            return np.zeros(0, dtype=bool)
        last = float(table.intended_s.max()) - self.cooldown_s
        return np.asarray((table.index >= self.warmup_requests) & (table.intended_s >= self.warmup_s)
                          & (table.intended_s <= last), dtype=bool)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchRun:
    """A measured run.

    table       every request that was sent
    traffic     the load
    window      what of it counts
    config, environment   what was asked for, and where it ran, as JSON
    observations   what others watched meanwhile (server counters, telemetry)
    prefix_hit_fraction   prompt tokens that the server found in its cache, of all that it looked up; None: unknown
    refused_in_a_row   connections that were refused until the clients of a closed loop gave up; 0: they did not
    stop_asked  Ctrl-C came after the last answer: this run is whole, and none should follow
    """

    table: RequestTable
    traffic: Traffic
    window: Window
    health: Health
    slo: Slo | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    observations: tuple[Observation, ...] = ()
    clocks: tuple[dict[str, float | int], ...] = ()
    prefix_hit_fraction: float | None = None
    expected_hit_fraction: float = 0.0
    interrupted: bool = False
    write_error: str = ""
    max_error_fraction: float = 0.05
    allow_client_limited: bool = False
    connections_opened: int = 0
    refused_in_a_row: int = 0
    stop_asked: bool = False

    @cached_property
    def measured(self) -> RequestTable:
        """The requests that count."""
        mask = self.window.mask(self.table)
        return self.table if mask.all() else self.table.take(mask)

    @cached_property
    def records(self) -> RequestRecords:
        """For `bstar.metrics`, from the moment of sending."""
        return self.measured.records()

    @cached_property
    def gaps(self) -> TokenGaps:
        """Gaps between tokens of whole answers."""
        return self.measured.gaps()

    @cached_property
    def summary(self) -> RunSummary:
        return self.summary_for(self.slo)

    def summary_for(self, slo: Slo | None) -> RunSummary:
        """The metrics against another SLO."""
        return self._summary_over(self.rates, slo)

    def _summary_over(self, rates: Rates, slo: Slo | None) -> RunSummary:
        return summarize(self.records, self.gaps, slo, undecided=self._undecided(slo), rates=rates)

    def _undecided(self, slo: Slo | None, *, intended: bool = False) -> int:
        """Requests that an interrupt met in flight, inside every limit so far."""
        cut = self.measured.take(self.measured.error == "interrupted")
        sent = cut.intended_s if intended else cut.sent_s
        return int(inside_so_far(sent, cut.first_token_s, cut.end_s, slo).sum())

    @property
    def holds_nothing(self) -> bool:
        """Whether it was interrupted before any request came to an end of its own."""
        return self.interrupted and bool((self.table.error == "interrupted").all())

    @cached_property
    def mean_tokens(self) -> tuple[float, float]:
        """(prompt, answer) tokens of a whole answer on average, as the server counted them; as asked without any."""
        good = self.measured.succeeded
        if not good.any():
            return self.traffic.mean_input_tokens, self.traffic.mean_output_tokens
        return float(self.measured.input_tokens[good].mean()), float(self.measured.output_tokens[good].mean())

    @cached_property
    def from_intended(self) -> RunSummary:
        """The same from the moment the load asked for: what users would feel who do not wait for the client."""
        rates = self.rates if len(self.measured) < len(self.table) else None
        return summarize(self.measured.records(intended=True), self.gaps, self.slo, rates=rates,
                         undecided=self._undecided(self.slo, intended=True))  # fmt: skip

    @cached_property
    def chunk_gap_s(self) -> Distribution:
        """Gaps between chunks, each of one token or more."""
        return Distribution.of(self.measured.chunk_gaps_s())

    @cached_property
    def rates(self) -> Rates:
        """What the rates of `summary` are: of the loaded time where there is a warm-up or a cool-down, else of all."""
        return rates_of_run(self)

    @cached_property
    def loaded(self) -> RunSummary:
        """The summary with the rates of the loaded time, also without a warm-up; as `summary` where that is too short.
        Points of sweeps and tunings are this."""
        found = loaded_rates(self)
        return self.summary if found is None else self._summary_over(found, self.slo)

    @cached_property
    def steady(self) -> dict[str, float | None]:
        """Rates while the load was on; None where that was too short."""
        start, end = loaded_time(self)
        known = self.loaded if loaded_rates(self) is not None else None
        return {"start_s": start, "end_s": end,
                "output_tokens_per_s": None if known is None else known.output_tokens_per_s,
                "requests_per_s": None if known is None else known.requests_per_s,
                "goodput_requests_per_s": None if known is None else known.goodput_requests_per_s}  # fmt: skip

    def interval(self, metric: str = "tpot_s", confidence: float = 0.95) -> Interval:
        """The confidence interval of a mean within this run, by batch means in the order of sending."""
        values = getattr(self.records, metric)
        return batch_means(values[np.argsort(self.records.sent_s, kind="stable")], confidence=confidence)

    def figure(self, name: str) -> float | None:
        """One figure by name: "output_tokens_per_s", or a metric with a statistic like "ttft_s.p99"."""
        metric, _, statistic = name.partition(".")
        found = getattr(self.summary, metric, None)
        if isinstance(found, Distribution):
            found = getattr(found, statistic or "mean", None)
        return None if found is None or isinstance(found, str) else float(found)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether this is a result of the server, and what to know about it."""
        return judge_run(self)

    @property
    def accepted(self) -> bool:
        """Whether it is a result of the server, or the client's limit is allowed and nothing else is wrong."""
        reasons = set(self.verdict.reasons)
        return self.verdict.valid or (self.allow_client_limited and reasons <= set(self.health.limited))

    @property
    def exit_code(self) -> int:
        """0 measured · 1 measured, but no result of the server · 2 not written · 130 interrupted."""
        if self.interrupted:
            return 130
        if self.write_error:
            return 2
        return 0 if self.accepted else 1

    def series(self, interval_s: float = 1.0) -> dict[str, Floats]:
        """The run in time: per interval requests sent, answered, failed, in flight, tokens and chunks."""
        table = self.table
        ends = table.end_s[~np.isnan(table.end_s)]
        last = float(max(ends.max(initial=0.0), table.sent_s.max(initial=0.0))) if len(table) else 0.0
        edges = np.arange(0.0, max(np.ceil(last / interval_s), 1.0) + 1.0) * interval_s

        def count(moments: Floats, weights: Any = None) -> Floats:
            return np.histogram(moments, bins=edges, weights=weights)[0].astype(float)

        good = table.succeeded
        sent_by = np.searchsorted(np.sort(table.sent_s), edges[1:], side="right")
        ended_by = np.searchsorted(np.sort(ends), edges[1:], side="right")
        return {
            "start_s": edges[:-1], "sent": count(table.sent_s), "finished": count(table.end_s[good]),
            "failed": count(table.end_s[~good & ~np.isnan(table.end_s)]),
            "in_flight_at_end": (sent_by - ended_by).astype(float),
            "output_tokens": count(table.chunk_s, table.chunk_tokens), "chunks": count(table.chunk_s),
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON; `summary.schema.json` describes it."""
        intended, table = self.from_intended, self.table
        return {
            "schema": SCHEMA, "kind": "measured", **self.summary.to_dict(),
            "chunk_gap_s": self.chunk_gap_s.to_dict(),
            "from_intended": {"ttft_s": intended.ttft_s.to_dict(), "e2e_s": intended.e2e_s.to_dict(),
                              "slo_attainment_fraction": intended.slo_attainment_fraction,
                              "goodput_requests_per_s": intended.goodput_requests_per_s},
            "intervals": {name: self.interval(name).to_dict() for name in ("ttft_s", "tpot_s", "e2e_s")},
            "rates_over": {"start_s": self.rates.start_s, "end_s": self.rates.end_s}, "steady": self.steady,
            "num_sent": len(table), "num_not_sent": self.traffic.num_requests - len(table),
            "num_outside_window": len(table) - len(self.measured),
            "errors": error_counts(table), "tokens": token_facts(self.measured),
            "prefix_cache": {"hit_fraction": self.prefix_hit_fraction, "expected_fraction": self.expected_hit_fraction},
            "health": self.health.to_dict(), "connections_opened": self.connections_opened,
            "clocks": list(self.clocks), "verdict": self.verdict.to_dict(), "interrupted": self.interrupted,
            "write_error": self.write_error or None,
            "load": {"name": self.traffic.name, "num_requests": self.traffic.num_requests, "seed": self.traffic.seed,
                     "concurrency": self.traffic.concurrency, "rate_per_s": self.traffic.rate_per_s,
                     "fingerprint": self.traffic.fingerprint()},
            "window": {"warmup_s": self.window.warmup_s, "cooldown_s": self.window.cooldown_s,
                       "warmup_requests": self.window.warmup_requests},
            **{o.name: o.summary for o in self.observations},
        }  # fmt: skip


def error_counts(table: RequestTable) -> dict[str, dict[str, Any]]:
    """Per kind: how many, an example, and the Retry-After that came with it."""
    out = {}
    for kind in sorted(set(table.error.tolist()) - {""}):
        members = np.flatnonzero(table.error == kind)
        waits = table.retry_after_s[members]
        waits = waits[~np.isnan(waits)]
        out[str(kind)] = {
            "count": int(members.size), "example": str(table.error_text[members[0]]),
            "with_tokens": int(np.count_nonzero(~np.isnan(table.first_token_s[members]))),
            "retry_after_s": float(waits.mean()) if waits.size else None,
        }
    return out


def token_facts(table: RequestTable) -> dict[str, Any]:
    """How tokens were counted, and where answers were not as asked."""
    good = table.succeeded
    source, made, asked = table.token_source[good], table.output_tokens[good], table.asked_output_tokens[good]
    reasons = table.finish_reason[good]
    chunks = np.diff(table.chunk_offsets)[good]
    total = int(made.sum())
    return {
        "counted_by": {str(s): int(np.count_nonzero(source == s)) for s in sorted(set(source.tolist()))},
        "per_chunk": float(total / chunks.sum()) if chunks.sum() else None,
        "spread_evenly": int(np.count_nonzero(table.spread[good])),
        "mismatch": int(np.count_nonzero(table.mismatch[good])),
        "shorter_than_asked": int(np.count_nonzero(made < asked)),
        "shorter_finish_reasons": _counts(reasons[made < asked]),
        "longer_than_asked": int(np.count_nonzero(made > asked)),
        "finish_reasons": _counts(reasons),
        "done_missing": int(np.count_nonzero(~table.done[good])),
        "input_tokens_off": int(np.count_nonzero(table.input_tokens[good] != table.asked_input_tokens[good])),
        "mean_input_tokens": float(table.input_tokens[good].mean()) if good.any() else None,
        "mean_asked_input_tokens": float(table.asked_input_tokens[good].mean()) if good.any() else None,
    }  # fmt: skip


def _counts(reasons: NDArray[np.str_]) -> dict[str, int]:
    return {r or "none": int(np.count_nonzero(reasons == r)) for r in sorted(set(reasons.tolist()))}
