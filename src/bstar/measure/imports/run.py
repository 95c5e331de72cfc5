"""A run as another tool wrote it: its load, its figures under bstar's definitions, its requests where they are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bstar.errors import ConfigError
from bstar.metrics.gaps import TokenGaps
from bstar.metrics.records import RequestRecords
from bstar.metrics.summary import RunSummary, summarize
from bstar.specs.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedRun:
    """One load of one file.

    tool          "vllm bench serve", "guidellm", "aiperf", "inference-perf"
    name          of the file, and which load of it
    model         as the tool calls it; "" where it does not say
    concurrency, rate_per_s, burstiness   the load; None: not that kind, or not said
    figures       "ttft_s.mean", "tpot_s.p99", "output_tokens_per_s", … in seconds, as far as the file has them
    records       the requests, from the moment they were sent; None where the file keeps none
    gaps_s        every gap between tokens (or chunks) that the file keeps
    failed        requests without a whole answer
    notes         where the tool's definitions or counts differ from bstar's
    """

    tool: str
    name: str
    model: str = ""
    date: str = ""
    concurrency: int | None = None
    rate_per_s: float | None = None
    burstiness: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    records: RequestRecords | None = None
    gaps_s: Sequence[float] = ()
    failed: int = 0
    notes: tuple[str, ...] = ()

    def summary(self, slo: Slo | None = None) -> RunSummary | None:
        """The figures of the requests, by bstar's definitions; None where the file keeps no requests."""
        if self.records is None:
            return None
        return summarize(self.records, slo=slo, gaps=TokenGaps.of_samples(np.asarray(self.gaps_s, dtype=float)))

    def figure(self, name: str) -> float | None:
        """A figure like "ttft_s.p95": of the requests where they are kept, else the tool's own."""
        summary = self.summary()
        if summary is not None:
            metric, _, part = name.partition(".")
            value: Any = getattr(summary, metric, None)
            if value is not None and not isinstance(value, float):
                value = getattr(value, part or "mean", None)
            if isinstance(value, float) and not math.isnan(value):
                return value
        return self.figures.get(name)


def records_of(rows: Sequence[tuple[float, float, float, int, int]], where: str) -> RequestRecords | None:
    """Of (sent, first token, last token, input tokens, output tokens); times in seconds from the first one sent."""
    if not rows:
        return None
    table = np.asarray([row[:3] for row in rows], dtype=float)
    counts = np.asarray([row[3:] for row in rows], dtype=float)
    if np.isnan(table[:, 0]).any() or np.isnan(counts).any():
        raise ConfigError(f"{where}: a request has no start or no token count; write the file again with the tool")
    table = table - table[:, 0].min()
    return RequestRecords(
        sent_s=table[:, 0], first_token_s=table[:, 1], finish_s=table[:, 2],
        input_tokens=counts[:, 0].astype(np.int64), output_tokens=counts[:, 1].astype(np.int64),
    )  # fmt: skip


def number(value: Any) -> float:
    """A number of a JSON file; nan where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def put(figures: dict[str, float], name: str, value: Any, factor: float = 1.0) -> None:
    """Set a figure where the file has it."""
    found = number(value)
    if not math.isnan(found):
        figures[name] = found * factor
