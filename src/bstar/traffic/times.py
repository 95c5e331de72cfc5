"""Think times: how they are written and drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bstar.errors import SpecError
from bstar.traffic.lengths import Floats
from bstar.units import parse_seconds

TimeKind = Literal["fixed", "exponential", "uniform", "lognormal"]
FORMS = "5s, exponential:mean=5s, lognormal:mean=5s,cv=1.5, uniform:1s-10s"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDistribution:
    """Seconds: fixed (mean), exponential (mean), uniform (low … high) or lognormal (mean, cv)."""

    kind: TimeKind
    mean_s: float
    cv: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.mean_s < math.inf or not 0 <= self.cv < math.inf:
            raise SpecError(f"time: mean and cv must be at least 0 and finite, are {self.mean_s} and {self.cv}")
        if self.kind == "uniform" and not 0 <= self.low_s <= self.high_s:
            raise SpecError(f"time: uniform needs 0 ≤ low ≤ high, has {self.low_s} and {self.high_s}")


def as_times(value: float | str | TimeDistribution, *, field: str) -> TimeDistribution:
    """Of seconds as a number, a text (see `FORMS`) or a distribution. Raises SpecError or UnitError naming `field`."""
    if isinstance(value, TimeDistribution):
        return value
    if isinstance(value, str):
        return parse_times(value, field=field)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SpecError(f"{field}: must be seconds or one of {FORMS}, is {value!r}")
    if not 0 <= value < math.inf:
        raise SpecError(f"{field}: must be at least 0 and finite, is {value}")
    return TimeDistribution(kind="fixed", mean_s=float(value))


def parse_times(text: str, *, field: str) -> TimeDistribution:
    """The distribution of one of `FORMS`."""
    kind, sign, rest = text.strip().partition(":")
    if not sign:
        return TimeDistribution(kind="fixed", mean_s=parse_seconds(text, field=field))
    if kind == "fixed":
        return TimeDistribution(kind="fixed", mean_s=parse_seconds(rest, field=field))
    if kind == "uniform":
        low, high = (parse_seconds(part, field=field) for part in _two(rest, field))
        if low > high:
            raise SpecError(f"{field}: {text} runs backwards; write the smaller end first")
        mean = (low + high) / 2
        cv = (high - low) / math.sqrt(12.0) / mean if mean else 0.0
        return TimeDistribution(kind="uniform", mean_s=mean, cv=cv, low_s=low, high_s=high)
    if kind not in ("exponential", "lognormal"):
        raise SpecError(f"{field}: {kind!r} is not a distribution of times; write one of {FORMS}")
    given = {key.strip(): value for key, _, value in (part.partition("=") for part in rest.split(","))}
    wanted = {"mean"} if kind == "exponential" else {"mean", "cv"}
    if set(given) != wanted:
        raise SpecError(f"{field}: {kind} takes {' and '.join(sorted(wanted, reverse=True))}; write one of {FORMS}")
    mean = parse_seconds(given["mean"], field=field)
    if kind == "exponential":
        return TimeDistribution(kind="exponential", mean_s=mean, cv=1.0)
    cv = parse_seconds(given["cv"], field=field)  # a plain number, at least 0
    return TimeDistribution(kind="lognormal", mean_s=mean, cv=cv)


def sample_times(law: TimeDistribution, count: int, rng: np.random.Generator) -> Floats:
    """`count` independent times in seconds; one value where all are the same."""
    if law.kind == "fixed":
        return np.asarray([law.mean_s])
    if law.kind == "exponential":
        return rng.standard_exponential(count) * law.mean_s
    if law.kind == "uniform":
        return law.low_s + (law.high_s - law.low_s) * rng.random(count)
    if law.mean_s == 0:
        return np.zeros(1)
    spread = math.sqrt(math.log1p(law.cv * law.cv))
    return np.asarray(law.mean_s * np.exp(spread * rng.standard_normal(count) - spread * spread / 2))


def _two(text: str, field: str) -> tuple[str, str]:
    low, sign, high = text.replace("..", "-").partition("-")
    if not sign:
        raise SpecError(f"{field}: uniform needs both ends; write uniform:1s-10s")
    return low, high
