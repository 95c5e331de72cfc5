"""How requests reach one of several replicas: a renewal stream, or the arrivals of a trace, split at random."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bstar.planning.draws import RequestDraws
from bstar.queueing.general import fifo_waits_s, kingman_mean_wait_s, mg1_wait_quantile_s
from bstar.specs.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A longer trace is replayed in windows of neighbours, evenly spaced: bursts stay whole.
_MOST_REQUESTS = 20_000
_WINDOW_REQUESTS = 4_000
# Replicas are replayed until about so many requests are.
_REPLAYED_REQUESTS = 4_096
_SCALES = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """The arrivals of a trace at a mean rate of 1, and what is needed to replay them.

    moment        arrival times, ascending, mean gap 1; shape (n,)
    new_tokens    prompt tokens to compute
    lot           uniform in [0, 1): the router's draw for each
    scale, dispersion   variance over mean of the number of arrivals in windows of that length
    """

    moment: Floats
    new_tokens: Floats
    lot: Floats
    scale: Floats
    dispersion: Floats
    parts: dict[int, tuple[Ints, Ints]] = field(default_factory=dict)

    def part(self, replicas: int) -> tuple[Ints, Ints]:
        """(requests of as many of `replicas` as are replayed, one replica after another; the replica of each)."""
        if replicas not in self.parts:
            owner = (self.lot * replicas).astype(np.int64)
            shown = min(max(-(-_REPLAYED_REQUESTS * replicas // self.moment.size), 1), replicas)
            chosen = np.flatnonzero(owner < shown)
            chosen = chosen[np.argsort(owner[chosen], kind="stable")]
            self.parts[replicas] = chosen, owner[chosen]
        return self.parts[replicas]


def replay_of(workload: Workload, draws: RequestDraws) -> Replay | None:
    """The replay of a trace's arrivals; None where there are none, or where another burstiness was asked for."""
    moments = np.asarray(workload.arrivals_s, dtype=np.float64)
    if workload.concurrency is not None or moments.size < 100 or moments[-1] <= moments[0]:
        return None
    gaps = np.diff(moments)
    if not np.isclose(gaps.var() / gaps.mean() ** 2, workload.gap_cv_squared, rtol=1e-3):
        return None
    moments = (moments - moments[0]) / gaps.mean()
    inputs = np.asarray(workload.joint, dtype=np.float64)[:, 0]
    new = np.maximum(inputs - float(draws.cached_tokens.mean()), 1.0)
    scale = np.geomspace(0.5, max(moments[-1] / 20.0, 1.0), _SCALES)
    dispersion = np.array([_dispersion(moments, float(width)) for width in scale])
    kept = _windows(moments.size)
    lot = np.random.default_rng(20_261).permutation((np.arange(kept.size) + 0.5) / kept.size)
    return Replay(
        moment=moments[kept], new_tokens=new[kept], lot=lot, scale=scale, dispersion=np.maximum(dispersion, 0.1)
    )


def _dispersion(moments: Floats, width: float) -> float:
    counts = np.bincount((moments / width).astype(np.int64))
    return float(counts.var() / counts.mean())


def _windows(count: int) -> Ints:
    """Which of `count` requests are replayed."""
    if count <= _MOST_REQUESTS:
        return np.arange(count, dtype=np.int64)
    starts = np.linspace(0, count - _WINDOW_REQUESTS, _MOST_REQUESTS // _WINDOW_REQUESTS).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(_WINDOW_REQUESTS)).ravel())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """What one of `replicas` sees.

    gap_cv_squared   CV² of the gaps of the whole stream (1: Poisson)
    replay           the trace's own arrivals instead
    A router that spreads at random thins the stream: its excess over Poisson falls with 1/replicas. Round robin
    and least-loaded do better; this is the cautious case.
    """

    gap_cv_squared: float = 1.0
    replicas: int = 1
    replay: Replay | None = None

    @property
    def is_poisson(self) -> bool:
        return self.replay is None and self.gap_cv_squared == 1.0

    def dispersion(self, window_s: Floats, rate: Floats) -> Floats:
        """Variance over mean of the number of arrivals in windows of that length at `rate`; (lanes, 1)."""
        if self.replay is None:
            return np.full((rate.size, 1), 1.0 + (self.gap_cv_squared - 1.0) / self.replicas)
        scaled = np.log(np.maximum(window_s * rate * self.replicas, 1e-12))
        whole = np.interp(scaled, np.log(self.replay.scale), self.replay.dispersion)
        return np.asarray(1.0 + (whole - 1.0) / self.replicas)[:, None]

    def peakedness(self, window_s: Floats, rate: Floats) -> Floats:
        """Variance of the number in flight over that of Poisson arrivals; (lanes, 1)."""
        seen = self.dispersion(window_s, rate)
        return seen if self.replay is not None else (1.0 + seen) / 2.0  # bursts of a renewal stream: Kingman's factor

    def prefill_wait_s(self, draws: RequestDraws, rate: Floats, service: Floats) -> Floats:
        """Wait behind the prompts that came before, by rank; service (lanes, count)."""
        if self.replay is None:
            mean = service.mean(axis=1)
            square_cv = service.var(axis=1) / np.maximum(mean, 1e-12) ** 2
            gaps = 1.0 + (self.gap_cv_squared - 1.0) / self.replicas
            wait = kingman_mean_wait_s(rate, mean, square_cv, gaps)
            return mg1_wait_quantile_s((rate * mean)[:, None], wait[:, None], draws.wait)
        chosen, owner = self.replay.part(self.replicas)
        order = np.argsort(draws.new_tokens)
        tokens = self.replay.new_tokens[chosen]
        waits = np.empty_like(service)
        for lane in range(rate.size):
            each = np.interp(tokens, draws.new_tokens[order], service[lane, order])
            if float(each.mean()) * rate[lane] >= 1.0:
                waits[lane] = np.inf
                continue
            moment = self.replay.moment[chosen] / (rate[lane] * self.replicas)
            waits[lane] = np.quantile(fifo_waits_s(moment, each, owner), draws.wait)
        return waits
