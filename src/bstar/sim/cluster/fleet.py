"""How many replicas there are and when: start-up, failures, drains, and the rules of an autoscaler."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from bstar.errors import SpecError
from bstar.units import parse_seconds

Metric = Literal["concurrency", "kv"]

_UNBOUNDED = 1_000_000
# What is simulated side by side: so many engines, and so many bytes of them.
_MOST_ENGINES, _MOST_BYTES = 1024, 8 << 30
_ENGINE_BYTES, _BLOCK_BYTES = 1 << 20, 36  # of one with the seats of a usual engine; of a block in its prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Replica `replica` fails at `at_s`; what it had goes elsewhere and is computed again.

    back_s    seconds until it begins to start again; None: it stays away
    """

    replica: int
    at_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        _moment("fail", self.replica, self.at_s)
        if self.back_s is not None and not 0 <= self.back_s < math.inf:
            raise SpecError(f"fail: a replica comes back after at least 0 seconds, not {self.back_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Replica `replica` takes no more requests from `at_s` on, and stops when it has answered those it has."""

    replica: int
    at_s: float

    def __post_init__(self) -> None:
        _moment("drain", self.replica, self.at_s)


def _moment(field: str, replica: int, at_s: float) -> None:
    if isinstance(replica, bool) or not isinstance(replica, int) or replica < 0:
        raise SpecError(f"{field}: a replica is a whole number from 0, not {replica!r}")
    if not 0 <= at_s < math.inf:
        raise SpecError(f"{field}: the time must be at least 0 seconds, is {at_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaler:
    """Replicas wanted = ceil(what there is / target a replica), as a horizontal autoscaler of Kubernetes does.

    metric           "concurrency": requests in the replicas and in front of them; "kv": fraction of KV blocks in use
    target           of one replica: requests, or a fraction
    least, most      replicas; without `most` as many as the simulator takes
    interval_s       between looks; 0: at every arrival, the new request counted
    stabilization_s  replicas are taken away only when this long none more were wanted
    tolerance_fraction   no change while the metric is within this of the target
    """

    metric: Metric = "concurrency"
    target: float
    least: int = 1
    most: int = _UNBOUNDED
    interval_s: float = 15.0
    stabilization_s: float = 300.0
    tolerance_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.metric not in ("concurrency", "kv"):
            raise SpecError(f"autoscale: metric must be concurrency or kv, is {self.metric!r}")
        if not 0 < self.target < math.inf or (self.metric == "kv" and self.target > 1):
            raise SpecError(f"autoscale: target must be positive (kv: a fraction), is {self.target}")
        if not 1 <= self.least <= self.most:
            raise SpecError(f"autoscale: needs 1 ≤ least ≤ most, is {self.least} and {self.most}")
        if not (0 <= self.interval_s < math.inf and 0 <= self.stabilization_s < math.inf):
            raise SpecError("autoscale: interval and stabilization must be at least 0 seconds")
        if not 0 <= self.tolerance_fraction < 1:
            raise SpecError(f"autoscale: tolerance must be in [0, 1), is {self.tolerance_fraction}")

    def wanted(self, total: float, replicas: int) -> int:
        """Replicas for a metric that sums to `total` over `replicas` that serve or start."""
        ratio = total / (self.target * max(replicas, 1))
        if replicas and abs(ratio - 1.0) <= self.tolerance_fraction:
            return replicas
        # A total of exactly n targets wants n replicas, whatever the rounding of the division.
        return min(max(math.ceil(total / self.target - 1e-9), self.least), self.most)


def most_engines(num_blocks: int, prefix_caching: bool) -> int:
    """How many engines with caches of `num_blocks` the simulator holds at once."""
    each = _ENGINE_BYTES + (_BLOCK_BYTES * num_blocks if prefix_caching else 0)
    return max(min(_MOST_ENGINES, _MOST_BYTES // each), 1)


def check_number(what: str, wanted: int, most: int) -> None:
    """Raises SpecError, before arrays are made, where `wanted` engines are more than `most`."""
    if wanted > most:
        raise SpecError(f"{what}: at most {most:,} engines of this size are simulated side by side, not {wanted:,}; "
                        "give fewer")


def check_autoscaler(scaler: Autoscaler, most: int) -> None:
    """Raises SpecError where the autoscaler may want, or is told to have, more than `most` engines."""
    check_number("autoscale min", scaler.least, most)
    if scaler.most != _UNBOUNDED:
        check_number("autoscale max", scaler.most, most)


class Stabilizer:
    """The wish of an autoscaler, upwards at once, downwards when nobody wanted more for a while."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.wishes: deque[tuple[float, int]] = deque()

    def settle(self, at_s: float, wish: int) -> int:
        """The most that was wanted within the window."""
        while self.wishes and self.wishes[0][0] < at_s - self.window_s:
            self.wishes.popleft()
        while self.wishes and self.wishes[-1][1] <= wish:
            self.wishes.pop()
        self.wishes.append((at_s, wish))
        return self.wishes[0][1]


def parse_autoscaler(text: str) -> Autoscaler:
    """`concurrency=20,max=8,interval=15,stabilization=300` or `kv=0.8,…`. Raises SpecError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in ("concurrency", "kv", "min", "max", "interval", "stabilization", "tolerance"):
            raise SpecError(f"autoscale: {key.strip()!r} is not known; use concurrency= or kv=, min=, max=, interval=, "
                            "stabilization=, tolerance=")  # fmt: skip
        is_time = key.strip() in ("interval", "stabilization")
        values[key.strip()] = (parse_seconds if is_time else _number)(value, field="autoscale")
    metrics = [m for m in ("concurrency", "kv") if m in values]
    if len(metrics) != 1:
        raise SpecError("autoscale: needs one target, concurrency=N or kv=F")
    metric: Metric = "kv" if metrics[0] == "kv" else "concurrency"
    names = {"interval": "interval_s", "stabilization": "stabilization_s", "tolerance": "tolerance_fraction"}
    given = {names[k]: v for k, v in values.items() if k in names}
    return Autoscaler(metric=metric, target=values[metric], least=int(values.get("min", 1)),
                      most=int(values.get("max", _UNBOUNDED)), **given)  # fmt: skip


def parse_failure(text: str) -> Failure:
    """`1@30s` (replica 1 fails at 30 s) or `1@30s+1min` (and begins to start again 60 s later). Raises SpecError."""
    replica, at, rest = text.partition("@")
    if not at or not replica.strip().isdecimal():
        raise SpecError(f"fail: is REPLICA@TIME[+TIME], like 1@30s+1min, not {text!r}")
    moment, plus, back = rest.partition("+")
    return Failure(replica=int(replica), at_s=parse_seconds(moment, field="fail"),
                   back_s=parse_seconds(back, field="fail") if plus else None)  # fmt: skip


def parse_drain(text: str) -> Drain:
    """`1@30s`: replica 1 takes no more requests from 30 s on. Raises SpecError."""
    replica, at, moment = text.partition("@")
    if not at or not replica.strip().isdecimal() or "+" in moment:
        raise SpecError(f"drain: is REPLICA@TIME, like 1@30s, not {text!r}")
    return Drain(replica=int(replica), at_s=parse_seconds(moment, field="drain"))


def _number(text: str, *, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SpecError(f"{field}: {text!r} is no number")
    return value
