"""What a request experienced and what a system delivered: one definition each, for simulated and measured runs."""

from bstar.metrics.definitions import METRICS, Metric, e2e_s, metric, tpot_s, ttft_s
from bstar.metrics.distribution import Distribution
from bstar.metrics.gaps import TokenGaps
from bstar.metrics.intervals import (
    Interval,
    batch_means,
    quantile_interval,
    rate_interval,
    replications,
    share_interval,
)
from bstar.metrics.records import RequestRecords
from bstar.metrics.summary import RunSummary, summarize

__all__ = [
    "METRICS",
    "Distribution",
    "Interval",
    "Metric",
    "RequestRecords",
    "RunSummary",
    "TokenGaps",
    "batch_means",
    "e2e_s",
    "metric",
    "quantile_interval",
    "rate_interval",
    "replications",
    "share_interval",
    "summarize",
    "tpot_s",
    "ttft_s",
]
