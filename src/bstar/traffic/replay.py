"""Traces as loads: replayed at their own times, sliced, sped up, repeated, or given to closed-loop clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bstar.errors import SpecError
from bstar.traffic import streams
from bstar.traffic.arrivals import Gaps, arrivals
from bstar.traffic.generators import Times, check_rate
from bstar.traffic.lengths import Floats, Ints
from bstar.traffic.load import BlockHashes, Traffic
from bstar.traffic.times import as_times, sample_times
from bstar.traffic.traces import TimeUnit, Trace, read_trace


def from_trace(
    path: str | Path | Trace, *, rate_scale: float = 1.0, rate_per_s: float | None = None, start_s: float | None = None,
    end_s: float | None = None, num_requests: int | None = None, concurrency: int | None = None, think_s: Times = 0.0,
    burstiness: float | None = None, seed: int = 0, warmup_requests: int = 0, time_unit: TimeUnit | None = None,
    hash_block_tokens: int | None = None,
) -> Traffic:  # fmt: skip
    """The requests of a trace file (its format is detected), or of a Trace that has been read.

    start_s, end_s   only the requests that come in [start_s, end_s), in the trace's own seconds
    num_requests     the first so many; where the trace has fewer it starts again (its prompts then new text)
    rate_scale       2: twice as fast
    rate_per_s       times stretched to this mean rate; for a trace without times, or with `burstiness`,
                     arrivals are drawn: gamma gaps of that shape (default 1, a Poisson process)
    concurrency      the requests in their order, sent by so many closed-loop clients that think for `think_s`
    time_unit, hash_block_tokens   what detection would otherwise decide: "s" or "ms", and tokens a hash id covers
    Raises ConfigError naming file and line, or SpecError naming the argument.
    """
    trace = path if isinstance(path, Trace) else read_trace(path, time_unit=time_unit,
                                                             hash_block_tokens=hash_block_tokens)  # fmt: skip
    times, chosen = _slice(trace, start_s, end_s)
    period = 0.0
    if times is not None and times.size > 1 and times[-1] > times[0]:
        period = float(times[-1] - times[0]) * times.size / (times.size - 1)
    count = chosen.size if num_requests is None else num_requests
    if count < 1:
        raise SpecError(f"num_requests: must be at least 1, is {num_requests}")
    if count > chosen.size and times is not None and period == 0.0 and concurrency is None and burstiness is None:
        raise SpecError("num_requests: a trace of one instant cannot be repeated; ask for fewer or give a concurrency")
    index = np.resize(chosen, count)
    hashes = _repeat_hashes(trace.block_hashes, index, chosen.size)
    clients: int | None = None
    if concurrency is not None:
        if concurrency < 1:
            raise SpecError(f"concurrency: must be at least 1, is {concurrency}")
        if rate_per_s is not None or rate_scale != 1.0 or burstiness is not None:
            raise SpecError("concurrency: a closed loop has no rate; leave rate and burstiness out")
        clients = concurrency
        arrival = np.full(count, np.nan)
        arrival[:clients] = 0.0
    elif times is None or burstiness is not None:
        arrival = _drawn(trace, rate_per_s, rate_scale, burstiness, count, seed)
    else:
        rounds = np.arange(count) // chosen.size
        arrival = np.resize(times, count) + rounds * period
        arrival = arrival / _speed(rate_per_s, rate_scale, chosen.size, period)
    think = sample_times(as_times(think_s, field="think time"), count, streams.stream(seed, streams.THINK))
    return Traffic(
        arrival_s=arrival, input_tokens=trace.input_tokens[index], output_tokens=trace.output_tokens[index],
        priority=np.zeros(1, np.int64) if trace.priority is None else trace.priority[index],
        session=np.full(1, -1) if trace.session is None else trace.session[index],
        concurrency=clients, think_s=think if clients is not None else np.zeros(1), block_hashes=hashes,
        warmup_requests=warmup_requests, name=trace.name, source=f"{trace.format} trace {trace.name}", seed=seed,
    )  # fmt: skip


def _slice(trace: Trace, start_s: float | None, end_s: float | None) -> tuple[Floats | None, Ints]:
    """Times from the slice's start, and which requests are in it."""
    everything = np.arange(trace.num_requests)
    if start_s is None and end_s is None:
        return trace.arrival_s, everything
    if trace.arrival_s is None:
        raise SpecError("start_s: this trace has no arrivals to slice; use num_requests")
    low, high = 0.0 if start_s is None else start_s, np.inf if end_s is None else end_s
    inside = everything[(trace.arrival_s >= low) & (trace.arrival_s < high)]
    if inside.size == 0:
        last = float(trace.arrival_s[-1])
        raise SpecError(f"start_s: no request comes between {low:g} s and {high:g} s; the trace goes to {last:g} s")
    return trace.arrival_s[inside] - low, inside


def _speed(rate_per_s: float | None, rate_scale: float, count: int, period_s: float) -> float:
    """By how much the times shrink."""
    scale = check_rate(rate_scale, "rate_scale")
    if rate_per_s is None:
        return scale
    if scale != 1.0:
        raise SpecError("rate_scale: a load is stretched by a factor or to a rate; give one of the two")
    if period_s == 0.0:
        raise SpecError("rate_per_s: the trace comes at one instant and has no rate to scale; give a burstiness")
    return check_rate(rate_per_s) * period_s / count


def _drawn(
    trace: Trace, rate_per_s: float | None, rate_scale: float, burstiness: float | None, count: int, seed: int
) -> Floats:
    """Arrivals that are not the trace's own."""
    rate = rate_per_s if rate_per_s is not None else trace.rate_per_s
    if rate is None:
        raise SpecError("rate_per_s: this trace has no arrivals; give a rate or a concurrency")
    gaps = Gaps() if burstiness is None else Gaps(kind="gamma", shape=burstiness)
    rate = check_rate(rate) * check_rate(rate_scale, "rate_scale")
    return arrivals(gaps, rate, streams.stream(seed, streams.ARRIVALS), count=count)


def _repeat_hashes(hashes: BlockHashes | None, index: Ints, once: int) -> BlockHashes | None:
    """The hashes of the requests `index`; from the second time on with ids of their own."""
    if hashes is None:
        return None
    taken = hashes.take(index)
    rounds = np.arange(index.size) // once
    shift = np.repeat(rounds * (int(hashes.ids.max(initial=0)) + 1), np.diff(taken.offsets))
    return replace(taken, ids=taken.ids + shift)
