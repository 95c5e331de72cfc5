"""Reads a server's /metrics, once or through a run, from a thread of its own."""

from __future__ import annotations

import contextlib
import http.client
import math
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from bstar.errors import BstarError, ConfigError
from bstar.measure.clock import now
from bstar.measure.endpoint import Endpoint
from bstar.measure.failures import is_no_tls
from bstar.measure.keys import KeySource
from bstar.measure.observers import Counters, Observation, Repeating
from bstar.measure.server.snapshot import Snapshot, read_snapshot, restarts, window

_PATHS: Final = ("/metrics", "/prometheus/metrics", "/metrics/")
_MOST_BYTES: Final = 64_000_000
_GAUGES: Final = ("running", "waiting", "waiting_capacity", "kv_usage_fraction", "kv_used_tokens")
_COUNTERS: Final = ("preemptions", "prompt_tokens", "generated_tokens", "prefix_hit_tokens", "requests")


@dataclass(slots=True, kw_only=True)
class MetricsSource:
    """Where a server shows its metrics. `url` is the server's, or that of its metrics (ends in "metrics")."""

    url: str
    timeout_s: float = 5.0
    key: KeySource = field(default_factory=KeySource)
    headers: tuple[tuple[str, str], ...] = ()
    context: ssl.SSLContext | None = None
    _found: str = ""

    def read(self) -> Snapshot:
        """A snapshot. Raises ConfigError where nothing readable is there."""
        failures: dict[str, str] = {}
        for url in [self._found] if self._found else self._candidates():
            try:
                started = now()
                text = self._fetch(url)
                # The moment in the middle: counters were read by the server somewhere between.
                snapshot = read_snapshot(text, (started + now()) / 2.0)
            except (OSError, http.client.HTTPException, BstarError) as error:
                failures[urlsplit(url).path] = _reason(error)
                if is_no_tls(_cause(error)):
                    raise ConfigError(f"metrics: {url} does not speak TLS ({_reason(error)}); use http://") from None
                if isinstance(error, OSError) and not isinstance(error, urllib.error.HTTPError):
                    raise ConfigError(f"metrics: nothing answers at {url} ({_reason(error)}); is the server up?") \
                        from None
                continue
            self._found = url
            return snapshot
        said = "; ".join(dict.fromkeys(failures.values()))
        raise ConfigError(
            f"metrics: {' and '.join(failures)}: {said}; give the URL of the metrics, and start the server with them "
            "(SGLang --enable-metrics, llama.cpp --metrics)"
        )

    def _candidates(self) -> list[str]:
        parts = urlsplit(self.url)
        if parts.path.rstrip("/").endswith("metrics"):
            return [self.url]
        base = parts.path.rstrip("/").removesuffix("/v1")
        return [urlunsplit(parts._replace(path=base + path, query="", fragment="")) for path in _PATHS]

    def _fetch(self, url: str) -> str:
        request = urllib.request.Request(url, headers={"Accept": "text/plain, application/json;q=0.5"})
        secret = self.key.read()
        if secret is not None:
            request.add_unredirected_header("Authorization", f"Bearer {secret.reveal()}")
        for name, value in self.headers:
            request.add_unredirected_header(name, value)
        with urllib.request.urlopen(request, timeout=self.timeout_s, context=self.context) as answer:
            body: bytes = answer.read(_MOST_BYTES)
        return body.decode("utf-8", errors="replace")


def metrics_of(endpoint: Endpoint, url: str | None = None) -> MetricsSource:
    """The metrics of a server, reached as its requests are: with its key, headers and certificates.

    url   where they are, when not at the server's own address
    """
    place = url or endpoint.url
    return MetricsSource(url=place if "://" in place else "http://" + place, key=endpoint.key, headers=endpoint.headers,
                         context=endpoint.ssl_context())


def _cause(error: Exception) -> BaseException:
    """What urllib wraps."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return reason if isinstance(reason, BaseException) else error


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


class ServerCounters:
    """`CounterReader` of a metrics source: what a run is checked by before and after."""

    def __init__(self, source: MetricsSource) -> None:
        self.source = source

    def read(self) -> Counters | None:
        with contextlib.suppress(Exception):
            snapshot = self.source.read()
            return Counters(prefix_hit_tokens=snapshot.counter("prefix_hit_tokens"),
                            prefix_query_tokens=snapshot.counter("prefix_query_tokens"))
        return None


class ServerObserver:
    """Scrapes through a run: `server` in summary.json, and a series of gauges and rates.

    One scrape comes before the load, so that counters begin at 0, and one after its last answer. Gauges of those are
    none of the load: the summary leaves them out; the series has all. `in_flight` is by Little's law, from the
    latencies that the server counts over the time of the load, where it was seen to its end.

    Where the server was restarted (`restarted`; `restarts_s`: the scrapes around each, from the start of the load),
    counters and histograms are of `counted_s`: of what lies between the other scrapes (see `window`).

    interval_s   between two scrapes; a server that answers slower is asked less often
    extra        called with the snapshots when it ends, adds keys to the summary (utilisation from the physics)
    """

    def __init__(
        self, source: MetricsSource, *, interval_s: float = 1.0,
        extra: Callable[[list[Snapshot]], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.source, self.interval_s, self.extra = source, interval_s, extra
        self.snapshots: list[Snapshot] = []
        self.failures = 0
        self.last_failure = ""
        self._repeating: Repeating | None = None
        self._origin_s, self._ended_s = 0.0, math.inf

    def start(self, origin_s: float) -> None:
        # One observer may watch several runs, one after another.
        self.snapshots, self.failures, self.last_failure = [], 0, ""
        self._origin_s, self._ended_s = origin_s, math.inf
        self._repeating = Repeating(self._scrape, self.interval_s, name="bstar-metrics")
        self._repeating.start()

    def stop(self) -> Observation:
        self._ended_s = now()
        if self._repeating is not None:
            self._repeating.stop(timeout_s=self.source.timeout_s + 1.0)
        try:
            return Observation(name="server", summary=self._summary(), tables={"server": self._series()})
        except Exception as error:  # a run is not lost for its observer
            return Observation(name="server", summary={"error": f"{type(error).__name__}: {error}"})

    def _scrape(self) -> None:
        try:
            self.snapshots.append(self.source.read())
        except Exception as error:
            self.failures += 1
            self.last_failure = str(error) or type(error).__name__

    def _summary(self) -> dict[str, Any]:
        if not self.snapshots:
            return {"scrapes": 0, "failures": self.failures, "error": self.last_failure}
        first, last = self.snapshots[0], self.snapshots[-1]
        seen = window(self.snapshots)
        times = np.array([s.time_s for s in self.snapshots])
        inside = (times >= self._origin_s) & (times <= self._ended_s)
        columns = {name: values[inside] for name, values in self._series().items()}
        gauges = {
            name: {"mean": _mean(columns[name]), "max": _most(columns[name])} for name in _GAUGES if name in columns
        }
        waiting = columns.get("waiting")
        load_s = max(min(self._ended_s, last.time_s) - max(self._origin_s, first.time_s), 0.0)
        during = replace(seen, duration_s=load_s)
        whole = first.time_s <= self._origin_s and last.time_s >= self._ended_s and not seen.restarted
        held = {name: during.held(of) for name, of in (("requests", "e2e_s"), ("waiting", "queue_s"))}
        out: dict[str, Any] = {
            "engine": last.engine, "engines": last.engines, "scrapes": len(self.snapshots),
            "scrapes_inside": int(inside.sum()), "failures": self.failures,
            "duration_s": last.time_s - first.time_s, "counted_s": seen.duration_s, "load_s": load_s,
            "restarted": seen.restarted, "restarts_s": self._restarts_s(),
            "served": list(seen.served), "config": dict(last.info), "gauges": gauges,
            "waiting_share": None if waiting is None or not waiting.size else float(np.mean(waiting > 0)),
            "in_flight": {name: value if whole and not math.isnan(value) else None for name, value in held.items()},
            "counters": {name: seen.counters[name] for name in sorted(seen.counters)},
            "steps": None if math.isnan(seen.steps) else seen.steps,
            "histograms": {name: h.to_dict() for name, h in sorted(seen.histograms.items())},
        }
        if self.failures:
            out["last_failure"] = self.last_failure
        if self.extra is not None:
            try:
                out.update(self.extra(self.snapshots))
            except Exception as error:  # figures beside the measurement must not cost the measurement
                out["extra_error"] = f"{type(error).__name__}: {error}"
        return out

    def _restarts_s(self) -> list[list[float]]:
        """(last scrape before, first scrape after) of each restart."""
        pairs = [self.snapshots[i - 1 : i + 1] for i in restarts(self.snapshots)]
        return [[s.time_s - self._origin_s for s in pair] for pair in pairs]

    def _series(self) -> dict[str, Any]:
        """Columns of equal length: time since the start of the load, gauges, and rates since the row before."""
        rows = self.snapshots
        times = np.array([s.time_s for s in rows]) - self._origin_s
        columns: dict[str, Any] = {"time_s": times}
        for name in _GAUGES:
            if any(name in s.gauges for s in rows):
                columns[name] = np.array([s.gauge(name) for s in rows])
        gaps = np.maximum(np.diff(times), 1e-9)
        # Before the first reading nothing is known, nor is it across a restart.
        unknown = [0, *restarts(rows)]
        for name in _COUNTERS:
            if any(name in s.counters for s in rows):
                values = np.array([s.counter(name) for s in rows])
                rates = np.concatenate([[np.nan], np.diff(values) / gaps])
                rates[unknown] = np.nan
                columns[name + "_per_s"] = rates
        return columns


def _mean(values: Any) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _most(values: Any) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmax(values))
