"""What was seen of a server in a window: gauges over time, counters and histograms between its ends, GPUs, client.

How many requests run and wait is taken from what the finished ones say where the server has those histograms, by
Little's law (their seconds of E2E and of waiting, over the window's seconds): gauges are read at moments, and a server
shows 0 between two waves. Gauges are the fallback, also where a window is too short against the requests for those
that began or end outside it not to matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.measure.server.snapshot import Snapshot, Window, window

if TYPE_CHECKING:
    from bstar.measure.telemetry.table import Telemetry

Floats = NDArray[np.float64]

# How many mean requests long a window must be: the seconds of those that its ends cut are others' by then.
_LEAST_REQUESTS_LONG = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A window of a server. nan and None: the server does not show it.

    engine, duration_s   of the window; the time that was counted, without that around a restart
    running, waiting     requests at each scrape inside the load
    kv_usage             fraction of the cache in use at each of them
    seen                 counters and histograms between the first and the last scrape
    engines              how many show their metrics together; `max_num_seqs` is that of one
    served               names of the model that is served; empty: nothing says them
    kv_total_tokens      tokens that the cache holds
    block_tokens         tokens of a block of the cache; 0: not shown
    max_num_seqs, max_num_batched_tokens   as told (flags); None: not known
    assumed              those of the two that nobody told: the deployment's defaults
    whole                whether every request of the load began and ended in the window
    telemetry            of the GPUs in the window
    client_limits        why the load's own client was the limit, where it was; None: no client of ours
    """

    engine: str
    duration_s: float
    running: Floats
    waiting: Floats
    kv_usage: Floats
    seen: Window
    engines: int = 1
    served: tuple[str, ...] = ()
    kv_total_tokens: float = math.nan
    block_tokens: float = 0.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    assumed: frozenset[str] = frozenset()
    whole: bool = False
    telemetry: Telemetry | None = None
    client_limits: tuple[str, ...] | None = None
    config: dict[str, str] = field(default_factory=dict)

    @property
    def client_limited(self) -> bool | None:
        """Whether the client was the limit; None where it is not known."""
        return None if self.client_limits is None else bool(self.client_limits)

    @property
    def seats(self) -> int | None:
        """Seats of all engines, as told or assumed."""
        return None if self.max_num_seqs is None else self.max_num_seqs * self.engines

    @property
    def outrun(self) -> bool:
        """Whether more requests ran at a time than there are seats: then those are not what the server has."""
        return self.seats is not None and self.running.size > 0 and bool(self.running.max() > self.seats)

    @property
    def scrapes(self) -> int:
        """Scrapes inside the load."""
        return max(self.running.size, self.waiting.size, self.kv_usage.size)

    @property
    def by_latencies(self) -> bool:
        """Whether the latencies of finished requests say how many were there (else the gauges do)."""
        e2e = self.mean_of("e2e_s")
        long = self.whole or self.duration_s >= _LEAST_REQUESTS_LONG * e2e
        return e2e > 0 and long and not self.seen.restarted

    @property
    def mean_running(self) -> float:
        """Requests that run, on average: their prefill and decode, by Little's law; else the gauge's mean.

        Where a server does not count those, E2E without waiting: with what its front end takes. By latencies a
        request runs a moment longer than it has its seat; no more run than there are seats.
        """
        running = self.seen.held("prefill_s") + self.seen.held("decode_s")
        if math.isnan(running):
            running = self.seen.held("e2e_s") - self.seen.held("queue_s")
        found = running if self.by_latencies and not math.isnan(running) else _mean(self.running)
        return found if self.seats is None or self.outrun else min(found, float(self.seats))

    @property
    def mean_waiting(self) -> float:
        """Requests that wait, on average: by Little's law; else the gauge's mean."""
        waiting = self.seen.held("queue_s")
        return waiting if self.by_latencies and not math.isnan(waiting) else _mean(self.waiting)

    @property
    def in_flight(self) -> float:
        """Requests in the server, on average; nan where nothing tells.

        The most of what latencies, gauges, and tokens (their rate times the gap between two) say: each can miss some.
        """
        by_tokens = self.seen.rate("generated_tokens") * self.mean_of("itl_s")
        gauges = _mean(self.running) + (_mean(self.waiting) if self.waiting.size else 0.0)
        by_latencies = self.seen.held("e2e_s") if self.by_latencies else math.nan
        found = [v for v in (by_latencies, gauges, by_tokens) if not math.isnan(v)]
        return max(found, default=math.nan)

    @property
    def waiting_share(self) -> float:
        """Share of scrapes at which some request waited."""
        return float(np.mean(self.waiting > 0)) if self.waiting.size else math.nan

    @property
    def preemptions(self) -> float:
        return self.seen.count("preemptions")

    @property
    def step_tokens(self) -> float:
        """Mean tokens of a step; where no steps are counted those that are done from one token of a request to its
        next; nan where that is not known either.
        """
        found = self.seen.histograms.get("step_tokens")
        if found is not None and found.count > 0:
            return found.mean
        steps = self.seen.steps
        tokens = self.seen.count("generated_tokens") + self.seen.count("prompt_tokens")
        if steps > 0:
            return tokens / steps
        return tokens / self.duration_s * self.mean_of("itl_s") if self.duration_s > 0 else math.nan

    @property
    def step_s(self) -> float:
        """Mean seconds between steps while the server was busy; nan where it is not known.

        With steps that are counted: busy time over steps, where busy is the share of scrapes with requests running.
        Else the mean gap between tokens.
        """
        busy = float(np.mean(self.running > 0)) if self.running.size else math.nan
        steps = self.seen.steps
        if steps > 0 and busy > 0:
            return self.duration_s * busy / steps
        return self.mean_of("itl_s")

    @property
    def prompt_share(self) -> float:
        """Share of all processed tokens that were prompt tokens; nan where not counted."""
        prompt, made = self.seen.count("prompt_tokens"), self.seen.count("generated_tokens")
        hits = self.seen.counters.get("prefix_hit_tokens", 0.0)
        computed = max(prompt - (0.0 if math.isnan(hits) else hits), 0.0)
        return computed / (computed + made) if computed + made > 0 else math.nan

    def mean_of(self, histogram: str) -> float:
        """Mean of a histogram in the window; nan without observations."""
        found = self.seen.histograms.get(histogram)
        return math.nan if found is None else found.mean

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "engine": self.engine, "duration_s": self.duration_s, "scrapes": self.scrapes,
            "running": _spread(self.running), "waiting": _spread(self.waiting), "kv_usage": _spread(self.kv_usage),
            "mean_running": self.mean_running, "mean_waiting": self.mean_waiting, "in_flight": self.in_flight,
            "counted_by": "latencies" if self.by_latencies else "gauges",
            "waiting_share": self.waiting_share, "preemptions": self.preemptions, "steps": self.seen.steps,
            "step_s": self.step_s, "step_tokens": self.step_tokens, "prompt_share": self.prompt_share,
            "generated_tokens_per_s": self.seen.rate("generated_tokens"),
            "prompt_tokens_per_s": self.seen.rate("prompt_tokens"), "requests_per_s": self.seen.rate("requests"),
            "kv_total_tokens": self.kv_total_tokens, "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens, "assumed": sorted(self.assumed),
            "client_limited": self.client_limited,
            "client_limits": None if self.client_limits is None else list(self.client_limits),
            "means_s": {name: self.mean_of(name) for name in ("ttft_s", "itl_s", "queue_s", "prefill_s", "e2e_s")},
        }  # fmt: skip
        if self.telemetry is not None:
            out["gpu"] = self.telemetry.summary()
        return out


def evidence_of(
    snapshots: Sequence[Snapshot], *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
    telemetry: Telemetry | None = None, client_limits: Sequence[str] | None = None,
) -> Evidence:  # fmt: skip
    """The evidence of a series of snapshots. Raises SpecError for fewer than two."""
    if len(snapshots) < 2:
        raise SpecError("window: needs two or more scrapes; make it longer, or scrape more often")
    seen, last = window(snapshots), snapshots[-1]
    if not seen.duration_s > 0:
        raise SpecError("window: the server was restarted between its scrapes, nothing was counted; look again")
    total = last.gauge("kv_total_tokens")
    if math.isnan(total):
        total = total_tokens(last.info)
    return Evidence(
        engine=last.engine, duration_s=seen.duration_s, seen=seen, engines=last.engines, served=seen.served,
        running=_series(snapshots, "running"), waiting=_series(snapshots, "waiting"),
        kv_usage=_series(snapshots, "kv_usage_fraction"), kv_total_tokens=total * last.engines,
        block_tokens=block_tokens(last.info),
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, telemetry=telemetry,
        client_limits=None if client_limits is None else tuple(client_limits), config=dict(last.info),
    )  # fmt: skip


def _series(snapshots: Sequence[Snapshot], name: str) -> Floats:
    return np.array([v for v in (s.gauge(name) for s in snapshots) if not math.isnan(v)], dtype=np.float64)


def total_tokens(info: Mapping[str, str]) -> float:
    """Tokens of an engine's cache, from vLLM's cache_config_info or SGLang's pages; nan where neither is shown."""
    for blocks, size in (("num_gpu_blocks", "block_size"), ("num_pages", "page_size")):
        try:
            return float(info[blocks]) * float(info[size])
        except (KeyError, ValueError):
            continue
    return math.nan


def block_tokens(info: Mapping[str, str]) -> float:
    """Tokens of a block of an engine's cache; 0 where it does not show them."""
    for name in ("block_size", "page_size"):
        try:
            return float(info[name])
        except (KeyError, ValueError):
            continue
    return 0.0


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else math.nan


def _spread(values: Floats) -> dict[str, float] | None:
    if not values.size:
        return None
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
