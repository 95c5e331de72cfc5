"""The loads one can ask for by name: open loops by their arrivals, the closed loop, and loads of a Workload.

All take input_tokens and output_tokens as an int, a DIST text ("lognormal:mean=512,cv=1.2") or a
LengthDistribution, or both together as `lengths=` (see `bstar.traffic.joint`), and draw from named
streams of one seed: the lengths of request r do not depend on the arrivals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from bstar.errors import SpecError
from bstar.specs.workload import LengthDistribution, Workload
from bstar.traffic import streams
from bstar.traffic.arrivals import Gaps, arrivals, epochs
from bstar.traffic.arrivals import ramp_up as ramped
from bstar.traffic.joint import JointLengths, pairs
from bstar.traffic.lengths import Floats, Ints, fixed, parse_lengths, sample
from bstar.traffic.load import Traffic
from bstar.traffic.prefixes import PrefixGroups
from bstar.traffic.rates import RateCurve, parse_rate_curve
from bstar.traffic.times import TimeDistribution, as_times, sample_times

Lengths = int | str | LengthDistribution
Times = float | str | TimeDistribution


# What fits in the memory of a laptop: some ten arrays of so many numbers.
MOST_REQUESTS: Final = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    """What requests are, apart from when they come."""

    input_tokens: Lengths | None
    output_tokens: Lengths | None
    lengths: JointLengths | None
    prefix: PrefixGroups | None
    priority: int
    seed: int

    def at(self, arrival_s: Floats, *, count: int | None = None, name: str, **more: object) -> Traffic:
        """The traffic of these requests at those arrivals; `count` where it is more than the arrivals."""
        count = arrival_s.size if count is None else count
        if count == 0:
            raise SpecError("duration: no request comes in it; take a longer one or a higher rate")
        source, target = draw_lengths(self.input_tokens, self.output_tokens, self.lengths, count, self.seed)
        columns: dict[str, object] = {"priority": np.asarray([self.priority])}
        if self.prefix is not None:
            drawn = self.prefix.draw(source, self.seed)
            source = drawn.input_tokens
            columns |= {"prefix_group": drawn.group, "prefix_tokens": drawn.tokens}
        if arrival_s.size < count:
            arrival_s = np.concatenate((arrival_s, np.full(count - arrival_s.size, np.nan)))
        return Traffic(
            arrival_s=arrival_s, input_tokens=source, output_tokens=target, seed=self.seed, name=name,
            **columns, **more,  # type: ignore[arg-type]
        )  # fmt: skip


def poisson(
    rate_per_s: float, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int | None = None, *, duration_s: float | None = None, seed: int = 0, rescale: bool = False,
    lengths: JointLengths | None = None, prefix: PrefixGroups | None = None, priority: int = 0,
    warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """A Poisson process of `rate_per_s` requests a second.

    num_requests / duration_s   one of the two says where it ends
    rescale     stretch the arrivals so that the last comes at exactly num_requests/rate (`vllm bench serve`)
    lengths     joint (input, output) lengths, instead of input_tokens and output_tokens
    prefix      groups of requests that begin with the same text
    Raises SpecError or UnitError that names the argument.
    """
    return _renewal(
        Gaps(), rate_per_s, num_requests, duration_s, rescale, warmup_requests, f"poisson {_shown(rate_per_s)}/s",
        _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                  priority=priority, seed=seed),
    )  # fmt: skip


def gamma(
    rate_per_s: float, burstiness: float, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int | None = None, *, duration_s: float | None = None, seed: int = 0, rescale: bool = False,
    lengths: JointLengths | None = None, prefix: PrefixGroups | None = None, priority: int = 0,
    warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """Gamma gaps of shape `burstiness` (CV² = 1/burstiness; 1 is Poisson, below 1 burstier, inf evenly spaced).

    With rescale=True it is the load of `vllm bench serve --request-rate R --burstiness F`; the rest as in `poisson`.
    """
    return _renewal(
        _gamma_gaps(burstiness), rate_per_s, num_requests, duration_s, rescale, warmup_requests,
        f"gamma {rate_per_s}/s burstiness {burstiness}",
        _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                  priority=priority, seed=seed),
    )  # fmt: skip


def weibull(
    rate_per_s: float, shape: float, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int | None = None, *, duration_s: float | None = None, seed: int = 0, rescale: bool = False,
    lengths: JointLengths | None = None, prefix: PrefixGroups | None = None, priority: int = 0,
    warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """Weibull gaps of that shape (1 is Poisson, below 1 burstier); the rest as in `poisson`."""
    return _renewal(
        Gaps(kind="weibull", shape=shape), rate_per_s, num_requests, duration_s, rescale, warmup_requests,
        f"weibull {rate_per_s}/s shape {shape}",
        _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                  priority=priority, seed=seed),
    )  # fmt: skip


def constant(
    rate_per_s: float, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int | None = None, *, duration_s: float | None = None, seed: int = 0,
    lengths: JointLengths | None = None, prefix: PrefixGroups | None = None, priority: int = 0,
    warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """Evenly spaced requests, the first at 1/rate; the rest as in `poisson`."""
    return _renewal(
        Gaps(kind="constant"), rate_per_s, num_requests, duration_s, False, warmup_requests,
        f"constant {_shown(rate_per_s)}/s",
        _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                  priority=priority, seed=seed),
    )  # fmt: skip


def varying(
    rate: RateCurve | str, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int | None = None, *, duration_s: float | None = None, seed: int = 0, gaps: Gaps | None = None,
    lengths: JointLengths | None = None, prefix: PrefixGroups | None = None, priority: int = 0,
    warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """Requests at a rate that changes with time, exactly: unit-rate arrivals through the inverse of ∫rate.

    rate   a curve of `bstar.traffic.rates`, or its text: "diurnal:mean=5,peak=10", "step:0s=2,10min=8",
           "ramp:2-10,over=10min", "spike:base=2,peak=20,at=60s,for=10s"
    gaps   the law of the gaps in operational time (None: Poisson, an inhomogeneous Poisson process)
    """
    curve = parse_rate_curve(rate) if isinstance(rate, str) else rate
    law = gaps if gaps is not None else Gaps()
    count = _count(num_requests, duration_s)
    rng = streams.stream(seed, streams.ARRIVALS)
    limit = None if duration_s is None else float(curve.integral(np.asarray([duration_s]))[0])
    if limit is not None and limit > MOST_REQUESTS:
        raise SpecError(f"duration_s: {duration_s:g} s hold about {limit:,.0f} requests, which do not fit in memory; "
                        "take a shorter one")
    unit = epochs(law, rng, count=count, limit=limit)
    times = curve.inverse(unit)
    if not np.isfinite(times).all():
        raise SpecError(f"rate: the curve ends before {num_requests} requests have come; ask for fewer")
    requests = _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                         priority=priority, seed=seed)  # fmt: skip
    return requests.at(times, name=str(curve), warmup_requests=warmup_requests)


def ramp_up(
    start_per_s: float, end_per_s: float, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int = 1000, *, strategy: Literal["linear", "exponential"] = "linear", burstiness: float = 1.0,
    seed: int = 0, lengths: JointLengths | None = None, prefix: PrefixGroups | None = None, priority: int = 0,
    warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """The load of `vllm bench serve --ramp-up-strategy`: the rate grows with the number of the request.

    See `bstar.traffic.arrivals.ramp_up`; a rate that grows with time is `varying("ramp:2-10,over=10min", …)`.
    """
    requests = _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                         priority=priority, seed=seed)  # fmt: skip
    times = ramped(_gamma_gaps(burstiness), start_per_s, end_per_s, streams.stream(seed, streams.ARRIVALS),
                   count=_whole("num_requests", num_requests), strategy=strategy)  # fmt: skip
    return requests.at(times, name=f"ramp-up {start_per_s}-{end_per_s}/s", warmup_requests=warmup_requests)


def closed_loop(
    concurrency: int, input_tokens: Lengths | None = None, output_tokens: Lengths | None = None,
    num_requests: int | None = None, *, think_s: Times = 0.0, start_s: float = 0.0, seed: int = 0,
    start: Literal["burst", "even", "random"] = "burst", lengths: JointLengths | None = None,
    prefix: PrefixGroups | None = None, priority: int = 0, warmup_requests: int = 0,
) -> Traffic:  # fmt: skip
    """`concurrency` clients, each sending its next request when its last one is answered and it has thought.

    num_requests  all requests together (default: 10 for each client); whoever is free takes the next
    think_s       seconds, or a TimeDistribution or its text ("exponential:mean=5s")
    start         "burst": all clients at 0; "even" or "random": spread over the first `start_s` seconds
    warmup_requests   the first so many requests are load but not measurement
    """
    clients = _whole("concurrency", concurrency)
    count = _whole("num_requests", 10 * clients if num_requests is None else num_requests)
    law = as_times(think_s, field="think time")
    requests = _Requests(input_tokens=input_tokens, output_tokens=output_tokens, lengths=lengths, prefix=prefix,
                         priority=priority, seed=seed)  # fmt: skip
    return requests.at(
        starts(min(clients, count), start, start_s, seed), count=count, name=f"closed loop of {clients}",
        concurrency=clients, warmup_requests=warmup_requests,
        think_s=sample_times(law, count, streams.stream(seed, streams.THINK)),
    )  # fmt: skip


def from_workload(
    workload: Workload, *, num_requests: int | None = None, duration_s: float | None = None, seed: int = 0,
    rescale: bool = False,
) -> Traffic:  # fmt: skip
    """Requests of a Workload: its rate and burstiness, or its clients; its lengths and its shared prefix.

    `prefix_hit_fraction` of the requests share one prefix of `prefix_tokens`. Raises SpecError where the
    workload has neither a rate nor clients.
    """
    pair = pairs([i for i, _ in workload.joint], [o for _, o in workload.joint]) if workload.joint else None
    prefix = None
    if workload.prefix_tokens and workload.prefix_hit_fraction:
        prefix = PrefixGroups(count=1, tokens=fixed(workload.prefix_tokens), fraction=workload.prefix_hit_fraction)
    source = None if pair is not None else workload.input_tokens
    target = None if pair is not None else workload.output_tokens
    if workload.concurrency is not None:
        return closed_loop(workload.concurrency, source, target, num_requests, seed=seed, lengths=pair, prefix=prefix)
    if workload.rate_per_s is None:
        raise SpecError("load: has neither a rate nor a concurrency; give one")
    if workload.burstiness == 1.0:
        return poisson(workload.rate_per_s, source, target, num_requests, duration_s=duration_s, seed=seed,
                       rescale=rescale, lengths=pair, prefix=prefix)  # fmt: skip
    return gamma(workload.rate_per_s, workload.burstiness, source, target, num_requests, duration_s=duration_s,
                 seed=seed, rescale=rescale, lengths=pair, prefix=prefix)  # fmt: skip


def draw_lengths(
    input_tokens: Lengths | None, output_tokens: Lengths | None, lengths: JointLengths | None, count: int, seed: int
) -> tuple[Ints, Ints]:
    """(input, output) tokens of `count` requests, from their two streams or from the joint one."""
    if lengths is not None:
        if input_tokens is not None or output_tokens is not None:
            raise SpecError("lengths: are input and output together; leave input_tokens and output_tokens out")
        return lengths.draw(count, streams.stream(seed, streams.JOINT))
    if input_tokens is None or output_tokens is None:
        missing = "input_tokens" if input_tokens is None else "output_tokens"
        raise SpecError(f"{missing}: a load needs lengths of prompts and answers; give {missing}")
    source = sample(as_lengths(input_tokens, "input_tokens"), count, streams.stream(seed, streams.INPUT))
    target = sample(as_lengths(output_tokens, "output_tokens"), count, streams.stream(seed, streams.OUTPUT))
    return source, target


def as_lengths(value: Lengths, field: str) -> LengthDistribution:
    """A distribution of an int, a text or a distribution. Raises SpecError or UnitError naming `field`."""
    if isinstance(value, LengthDistribution):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, str, np.integer)):
        raise SpecError(f"{field}: needs a number, a text like uniform:100-900 or a distribution, is {value!r}")
    return parse_lengths(str(value), field=field)


def starts(clients: int, start: str, start_s: float, seed: int) -> Floats:
    """The first arrivals of the clients of a closed loop, ascending."""
    if not 0 <= start_s < math.inf:
        raise SpecError(f"start_s: must be at least 0 and finite, is {start_s}")
    if start == "burst":
        return np.zeros(clients)
    if start == "even":
        return np.arange(clients, dtype=np.float64) * (start_s / clients)
    if start == "random":
        return np.sort(streams.stream(seed, streams.START).random(clients) * start_s)
    raise SpecError(f"start: must be burst, even or random, is {start!r}")


def _renewal(
    gaps: Gaps, rate_per_s: float, num_requests: int | None, duration_s: float | None, rescale: bool, warmup: int,
    name: str, requests: _Requests,
) -> Traffic:  # fmt: skip
    rate = check_rate(rate_per_s)
    count = _count(num_requests, duration_s)
    if duration_s is not None and rate * duration_s > MOST_REQUESTS:
        raise SpecError(f"duration_s: {duration_s:g} s hold about {rate * duration_s:,.0f} requests, which do not fit "
                        f"in memory; ask for at most {MOST_REQUESTS / rate:,.0f} s")
    if rescale and duration_s is not None:
        raise SpecError("rescale: needs num_requests and no duration, as in vllm bench serve")
    times = arrivals(gaps, rate, streams.stream(requests.seed, streams.ARRIVALS), count=count, duration_s=duration_s,
                     rescale=rescale)  # fmt: skip
    return requests.at(times, name=name, warmup_requests=warmup)


def _gamma_gaps(burstiness: float) -> Gaps:
    return Gaps(kind="constant") if burstiness == math.inf else Gaps(kind="gamma", shape=burstiness)


def _shown(rate_per_s: float) -> str:
    """10 as 10, a million with commas."""
    try:
        rate = float(rate_per_s)
    except (TypeError, ValueError):
        return str(rate_per_s)
    return f"{rate:,.0f}" if rate.is_integer() else f"{rate:,}"


def check_rate(rate_per_s: float, field: str = "rate_per_s") -> float:
    """`rate_per_s` as a float. Raises SpecError where it is not positive and finite."""
    try:
        rate = float(rate_per_s)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 < rate < math.inf:
        raise SpecError(f"{field}: must be positive and finite, is {rate_per_s!r}")
    return rate


def _count(num_requests: int | None, duration_s: float | None) -> int | None:
    if (num_requests is None) == (duration_s is None):
        raise SpecError("num_requests: say where the load ends by num_requests or by duration_s, one of the two")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise SpecError(f"duration_s: must be positive and finite, is {duration_s}")
    return None if num_requests is None else _whole("num_requests", num_requests)


def _whole(field: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise SpecError(f"{field}: must be a whole number of at least 1, is {value!r}")
    if value > MOST_REQUESTS:
        raise SpecError(f"{field}: {value:,} requests do not fit in memory; ask for at most {MOST_REQUESTS:,}")
    return int(value)
