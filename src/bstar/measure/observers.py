"""Who else watches a run: server counters, GPU telemetry. They run in the parent, never in a process that sends.

An observer is started just before the load and stopped after its last answer. What it returns becomes a key of
summary.json and, where it has tables, Parquet files of its name in the run's folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an observer saw.

    name      key in summary.json and name of its files ("server", "gpu")
    summary   JSON
    tables    name of a file (without suffix) -> columns of equal length; times in seconds since the start of the load
    """

    name: str
    summary: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, NDArray[Any] | list[Any]]] = field(default_factory=dict)


class Observer(Protocol):
    """Watches a run from a thread of its own."""

    def start(self, origin_s: float) -> None:
        """Begin; `origin_s` is time 0 of the load on `time.monotonic`."""

    def stop(self) -> Observation:
        """End, and say what was seen. Never raises: a failure is a line in the summary."""


class Repeating:
    """Calls something now, every `interval_s` from a thread of its own, and once more at the end."""

    def __init__(self, call: Callable[[], None], interval_s: float, *, name: str) -> None:
        self._call, self._interval_s = call, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._call()
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """`timeout_s`: how long a call under way may take."""
        self._ended.set()
        self._thread.join(timeout=timeout_s)
        self._call()

    def _loop(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._call()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters of a server at one moment, as far as it has them (nan: it has not).

    prefix_hit_tokens, prefix_query_tokens   tokens found in, and looked up in, its prefix cache
    """

    prefix_hit_tokens: float = np.nan
    prefix_query_tokens: float = np.nan


class CounterReader(Protocol):
    """Reads the counters that a run is checked by, once before and once after it."""

    def read(self) -> Counters | None:
        """None where the server shows none. Never raises."""


def hit_fraction(before: Counters | None, after: Counters | None) -> float | None:
    """Share of looked-up prompt tokens that the prefix cache had, between two readings."""
    if before is None or after is None:
        return None
    looked = after.prefix_query_tokens - before.prefix_query_tokens
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    return float(found / looked) if looked > 0 and found >= 0 else None
