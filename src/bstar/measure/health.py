"""The client watches itself: a load generator that is late measures itself and not the server.

    dispatch delay   sent - due, where nothing but the client held the request back
    loop lag         how late the event loop is: every time stamp may be that much too late
    CPU              of the worker's process, in shares of one core
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bstar.measure.clock import now
from bstar.metrics.distribution import Distribution

Floats = NDArray[np.float64]

_TICK_S, _CPU_EVERY_S = 0.01, 0.5
# A client that is busier than this has no time left: what it measures is its own queue.
BUSY_FRACTION: Final = 0.95
# Delays of less than this are no one's business; above it they count where they are a tenth of what is measured.
HARMLESS_S, SHARE_OF_LATENCY = 0.005, 0.1
# Of the median TTFT, what may be the mean wait for the client itself: a client that stands still makes the latencies
# that its lateness is compared with.
MOST_OWN_WAIT: Final = 0.25
_FEWEST_LATE: Final = 3
# Requests sent per second, of those that should have been.
LEAST_SENT_FRACTION: Final = 0.9


class LoopMonitor:
    """Measures the lag of a running event loop and the CPU share of its process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags, self._cpu = array("d"), array("d")
        self._due = self._cpu_wall = self._cpu_used = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._cpu_wall, self._cpu_used = now(), time.process_time()
        self._arm()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._sample_cpu(least_s=0.1)

    def report(self) -> dict[str, array[float]]:
        return {"lag_s": self._lags, "cpu_fraction": self._cpu}

    def _arm(self) -> None:
        self._due = now() + _TICK_S
        self._handle = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._lags.append(max(now() - self._due, 0.0))
        self._sample_cpu(least_s=_CPU_EVERY_S)
        self._arm()

    def _sample_cpu(self, *, least_s: float) -> None:
        wall = now()
        if wall - self._cpu_wall >= least_s:
            used = time.process_time()
            self._cpu.append((used - self._cpu_used) / (wall - self._cpu_wall))
            self._cpu_wall, self._cpu_used = wall, used


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How well the client did.

    dispatch_delay_s, loop_lag_s   over all requests and all ticks of all workers
    read_delay_s       what an answer waits on average until the event loop reads it, in the worker that is worst
    cpu_fraction       of one core, of the busiest worker: mean, and its 95th percentile over half seconds
    sent_fraction      requests sent, of those whose time had come
    client_ports       requests that failed because this machine ran out of ports, files or buffers
    lost_workers       processes that died
    limited            reasons why this is the client's result and not the server's
    strained           reasons for care
    """

    dispatch_delay_s: Distribution
    loop_lag_s: Distribution
    cpu_fraction: float | None
    cpu_fraction_p95: float | None
    sent_fraction: float
    read_delay_s: float = 0.0
    client_ports: int = 0
    lost_workers: int = 0
    limited: tuple[str, ...] = ()
    strained: tuple[str, ...] = ()

    @property
    def client_limited(self) -> bool:
        return bool(self.limited)

    def to_dict(self) -> dict[str, Any]:
        return {
            "client_limited": self.client_limited, "limited": list(self.limited), "strained": list(self.strained),
            "dispatch_delay_s": self.dispatch_delay_s.to_dict(), "loop_lag_s": self.loop_lag_s.to_dict(),
            "read_delay_s": self.read_delay_s,
            "cpu_fraction": self.cpu_fraction, "cpu_fraction_p95": self.cpu_fraction_p95,
            "sent_fraction": self.sent_fraction, "client_ports": self.client_ports,
            "lost_workers": self.lost_workers,
        }  # fmt: skip


def judge(
    dispatch_delay_s: Floats, lags_s: list[Floats], cpus: list[Floats], *, latency_s: float | None, gap_s: float | None,
    sent_fraction: float = 1.0, client_ports: int = 0, lost_workers: int = 0,
) -> Health:  # fmt: skip
    """The verdict.

    latency_s   median time to first token of the run: what a late client would falsify
    gap_s       median gap between chunks
    """
    lags = np.concatenate(lags_s) if lags_s else np.zeros(0)
    busy = [float(np.percentile(c, 95)) for c in cpus if c.size]
    mean_busy = [float(c.mean()) for c in cpus if c.size]
    limited, strained = [], []
    for name, values in (("requests are sent", dispatch_delay_s), ("events are read", lags)):
        found, count = _late_s(values)
        if found <= HARMLESS_S:
            continue
        told = f"{count:,} of {values.size:,} {name} {found * 1e3:.1f} ms late or more"
        if latency_s is not None and found > latency_s:
            limited.append(f"{told}, more than the median TTFT of {latency_s * 1e3:.1f} ms")
        elif (latency_s is not None and found > SHARE_OF_LATENCY * latency_s) or (gap_s and found > gap_s):
            strained.append(told)
    waited = max(map(_mean_wait_s, lags_s), default=0.0)
    if latency_s is not None and waited > max(MOST_OWN_WAIT * latency_s, HARMLESS_S):
        limited.append(f"an answer waits {waited * 1e3:.1f} ms on average until the client reads it, more than "
                       f"{MOST_OWN_WAIT:.0%} of the median TTFT of {latency_s * 1e3:.1f} ms")
    if mean_busy and max(mean_busy) > BUSY_FRACTION:
        limited.append(f"a worker process uses {max(mean_busy):.0%} of a core: more workers are needed (--workers)")
    elif busy and max(busy) > BUSY_FRACTION:
        strained.append(f"a worker process is at {max(busy):.0%} of a core at times")
    if sent_fraction < LEAST_SENT_FRACTION:
        limited.append(f"only {sent_fraction:.0%} of the requests whose time had come were sent")
    if client_ports:
        limited.append(f"{client_ports} requests failed because this machine ran out of ports, files or buffers")
    if lost_workers:
        limited.append(f"{lost_workers} worker processes died")
    return Health(
        dispatch_delay_s=Distribution.of(dispatch_delay_s), loop_lag_s=Distribution.of(lags),
        cpu_fraction=max(mean_busy, default=None), cpu_fraction_p95=max(busy, default=None),
        sent_fraction=sent_fraction, read_delay_s=waited, client_ports=client_ports, lost_workers=lost_workers,
        limited=tuple(limited), strained=tuple(strained),
    )  # fmt: skip


def _mean_wait_s(lags_s: Floats) -> float:
    """What an event at any moment waits for a loop that stood still for these times, one a tick."""
    stood = float(lags_s.sum())
    return float(np.square(lags_s).sum()) / 2.0 / (stood + lags_s.size * _TICK_S) if stood else 0.0


def _late_s(values: Floats) -> tuple[float, int]:
    """How late one in a hundred is, three at least: a single hiccup of a short run is none of its figures."""
    values = values[~np.isnan(values)]
    count = max(_FEWEST_LATE, math.ceil(values.size / 100.0))
    if values.size < count:
        return 0.0, count
    return float(np.partition(values, -count)[-count]), count
