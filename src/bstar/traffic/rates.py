"""Rates that change with time, with their exact integrals and inverses.

Arrivals at a varying rate λ(t) come from unit-rate epochs u₁ < u₂ < … by t = Λ⁻¹(u), Λ(t) = ∫₀ᵗ λ. With
exponential gaps that is exactly the inhomogeneous Poisson process of rate λ (Çinlar 1975); no thinning
bound and no rejected draws. `thinned` is the other exact way, for rates given as a function only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bstar.errors import SpecError
from bstar.traffic.lengths import CHUNK, Floats
from bstar.units import parse_rate, parse_seconds

FORMS = "step:0s=2,10min=8 · ramp:2-10,over=10min · spike:base=2,peak=20,at=60s,for=10s · diurnal:mean=5,peak=10"
_HOUR_S, _DAY_S = 3600.0, 86400.0
_COSINE_POINTS, _NEWTON_ROUNDS, _SETTLED = 4096, 60, 1e-14
# Points closer than this are one time, and a jump.
_JUMP_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """A rate in requests per second: straight lines between points, or a cosine, once or again and again.

    times_s, rates_per_s   the points; two points at one time are a jump. Before the first and after the last
                           point the rate stays what it is there
    period_s               the curve repeats after it (0: it does not)
    cosine                 (mean, amplitude, peak time) of mean + amplitude·cos(2π(t - peak time)/period)
    """

    times_s: tuple[float, ...] = ()
    rates_per_s: tuple[float, ...] = ()
    period_s: float = 0.0
    cosine: tuple[float, float, float] | None = None
    name: str = "varying"

    def __post_init__(self) -> None:
        if self.cosine is not None:
            mean, amplitude, _ = self.cosine
            if not 0 <= abs(amplitude) <= mean or not self.period_s > 0:
                raise SpecError("rate: a diurnal rate needs a period and a swing of at most its mean")
            return
        times, rates = np.asarray(self.times_s), np.asarray(self.rates_per_s)
        if times.size == 0 or times.size != rates.size:
            raise SpecError("rate: a curve needs as many times as rates, and at least one")
        if not (np.isfinite(times).all() and np.isfinite(rates).all()) or (rates < 0).any():
            raise SpecError("rate: the rates of a curve are finite and at least 0")
        if times[0] < 0 or (np.diff(times) < 0).any():
            raise SpecError("rate: the times of a curve are ascending from 0")
        if self.period_s and times[-1] > self.period_s:
            raise SpecError("rate: a repeating curve has its points inside its period")
        _, values, _, area = self._pieces()
        if (area[-1] <= 0 and values[-1] <= 0) or (self.period_s and self._period_area() <= 0):
            raise SpecError("rate: the curve is 0 everywhere; give it a positive rate")

    def __str__(self) -> str:
        return self.name

    def rate(self, time_s: Floats) -> Floats:
        """λ(t) in requests per second; at a jump the rate after it."""
        t = np.asarray(time_s, dtype=np.float64)
        if self.cosine is not None:
            mean, amplitude, peak = self.cosine
            return np.asarray(mean + amplitude * np.cos(2 * math.pi * (t - peak) / self.period_s))
        knots, values, slopes, _ = self._pieces()
        if self.period_s:
            t = np.mod(t, self.period_s)
        piece = np.searchsorted(knots, t, side="right") - 1
        return np.asarray(values[piece] + slopes[piece] * (t - knots[piece]))

    def integral(self, time_s: Floats) -> Floats:
        """Λ(t): the expected number of requests up to t."""
        t = np.asarray(time_s, dtype=np.float64)
        if self.cosine is not None:
            mean, amplitude, peak = self.cosine
            turn = 2 * math.pi / self.period_s
            return np.asarray(mean * t + amplitude / turn * (np.sin(turn * (t - peak)) + math.sin(turn * peak)))
        knots, values, slopes, area = self._pieces()
        whole = np.zeros(t.shape)
        if self.period_s:
            whole = np.floor(t / self.period_s)
            t = t - whole * self.period_s
            whole *= self._period_area()
        piece = np.searchsorted(knots, t, side="right") - 1
        into = t - knots[piece]
        return np.asarray(whole + area[piece] + into * (values[piece] + 0.5 * slopes[piece] * into))

    def inverse(self, requests: Floats) -> Floats:
        """Λ⁻¹(u): when the u-th expected request comes, ascending; inf where the curve never gets there."""
        u = np.asarray(requests, dtype=np.float64)
        invert = self._inverse_of_lines if self.cosine is None else self._inverse_of_cosine
        times = np.empty(u.shape)
        for start in range(0, u.size, CHUNK):
            part = slice(start, start + CHUNK)
            times[part] = invert(u[part])
        return times

    def _inverse_of_lines(self, u: Floats) -> Floats:
        whole = np.zeros(u.shape)
        if self.period_s:
            per = self._period_area()
            whole = np.floor(u / per)
            u = u - whole * per
            whole *= self.period_s
        knots, values, slopes, area = self._pieces()
        # side="left": u at a piece's end is reached there, not after a silent stretch behind it.
        piece = np.maximum(np.searchsorted(area, u, side="left") - 1, 0)
        left, value, slope = u - area[piece], values[piece], slopes[piece]
        # Root of value·x + slope·x²/2 = left in the form without cancellation.
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.sqrt(np.maximum(value * value + 2.0 * slope * left, 0.0))
            into = np.where(left > 0, 2.0 * left / (value + root), 0.0)
        return np.asarray(whole + knots[piece] + into)

    def _pieces(self) -> tuple[Floats, Floats, Floats, Floats]:
        """(start, rate at the start, slope, requests before the start) of each piece; the last has no end."""
        times = np.asarray((0.0, *self.times_s) if self.times_s[0] > 0 else self.times_s, dtype=np.float64)
        rates = np.asarray((self.rates_per_s[0], *self.rates_per_s) if self.times_s[0] > 0 else self.rates_per_s,
                           dtype=np.float64)  # fmt: skip
        widths = np.diff(times)
        kept = widths > _JUMP_S
        widths = np.where(kept, widths, 0.0)
        slopes = np.divide(np.diff(rates), widths, out=np.zeros_like(widths), where=kept)
        area = np.concatenate(([0.0], np.cumsum(widths * (rates[:-1] + rates[1:]) / 2)))
        last = np.ones(1, dtype=bool)
        keep = np.concatenate((kept, last))
        return times[keep], rates[keep], np.concatenate((slopes, [0.0]))[keep], area[keep]

    def _period_area(self) -> float:
        knots, values, _, area = self._pieces()
        return float(area[-1] + (self.period_s - knots[-1]) * values[-1])

    def _inverse_of_cosine(self, u: Floats) -> Floats:
        """Newton from a straight line between points of the integral, which are its bracket; else bisection."""
        points = np.linspace(0.0, self.period_s, _COSINE_POINTS + 1)
        area = np.maximum.accumulate(self.integral(points))
        whole = np.floor(u / area[-1])
        u = u - whole * area[-1]
        cell = np.clip(np.searchsorted(area, u, side="right") - 1, 0, _COSINE_POINTS - 1)
        low, high = points[cell], points[cell + 1]
        t = np.interp(u, area, points)
        left = np.arange(u.size)  # those that still move: near a rate of 0 Newton is slow
        for _ in range(_NEWTON_ROUNDS):
            now = t[left]
            error = self.integral(now) - u[left]
            low[left] = np.where(error <= 0, now, low[left])
            high[left] = np.where(error >= 0, now, high[left])
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                step = now - error / self.rate(now)
            inside = (step >= low[left]) & (step <= high[left])
            t[left] = np.where(inside, step, (low[left] + high[left]) / 2)
            left = left[np.abs(t[left] - now) > _SETTLED * self.period_s]
            if left.size == 0:
                break
        return np.maximum.accumulate(whole * self.period_s + t)


def steps(points: Sequence[tuple[float, float]], *, name: str = "step") -> RateCurve:
    """A rate that jumps: (time in seconds, rate from then on), the first at 0."""
    times: list[float] = []
    rates: list[float] = []
    for time, rate in points:
        if times:
            times.append(time)
            rates.append(rates[-1])
        times.append(time)
        rates.append(rate)
    return RateCurve(times_s=tuple(times), rates_per_s=tuple(rates), name=name)


def ramp(start_per_s: float, end_per_s: float, over_s: float, *, name: str = "ramp") -> RateCurve:
    """A rate that goes straight from one to another in `over_s` seconds and stays."""
    return RateCurve(times_s=(0.0, over_s), rates_per_s=(start_per_s, end_per_s), name=name)


def spike(base_per_s: float, peak_per_s: float, at_s: float, for_s: float, *, name: str = "spike") -> RateCurve:
    """A base rate with one stretch of `for_s` seconds at the peak rate."""
    return steps([(0.0, base_per_s), (at_s, peak_per_s), (at_s + for_s, base_per_s)], name=name)


def diurnal(
    mean_per_s: float, peak_per_s: float, *, peak_at_s: float = 14 * _HOUR_S, period_s: float = _DAY_S,
    name: str = "diurnal",
) -> RateCurve:  # fmt: skip
    """A cosine about the mean, highest at `peak_at_s` of every period (default: 14:00 of a day)."""
    return RateCurve(period_s=period_s, cosine=(mean_per_s, peak_per_s - mean_per_s, peak_at_s), name=name)


def table(points: Sequence[tuple[float, float]], *, period_s: float = 0.0, name: str = "table") -> RateCurve:
    """Straight lines through (time in seconds, rate); with a period it repeats, and joins its end to its start."""
    listed = list(points)
    if period_s and listed and listed[0][0] == 0 and listed[-1][0] < period_s:
        listed.append((period_s, listed[0][1]))
    return RateCurve(times_s=tuple(t for t, _ in listed), rates_per_s=tuple(r for _, r in listed), period_s=period_s,
                     name=name)  # fmt: skip


def thinned(
    rate: Callable[[Floats], Floats], bound_per_s: float, duration_s: float, rng: np.random.Generator
) -> Floats:
    """Arrivals of an inhomogeneous Poisson process by thinning one of rate `bound_per_s` (Lewis & Shedler 1979).

    Raises SpecError where the rate exceeds the bound.
    """
    count = int(rng.poisson(bound_per_s * duration_s))
    times = np.sort(rng.random(count)) * duration_s
    rates = np.asarray(rate(times))
    if (rates > bound_per_s * (1 + 1e-12)).any():
        raise SpecError(f"rate: exceeds its bound of {bound_per_s:g}/s; give a higher bound")
    return np.asarray(times[rng.random(count) * bound_per_s < rates])


def parse_rate_curve(text: str, *, field: str = "rate") -> RateCurve:
    """The curve of one of `FORMS`. Raises SpecError or UnitError that names `field`."""
    kind, _, rest = text.strip().partition(":")
    if kind == "step":
        pairs = [part.partition("=")[::2] for part in rest.split(",")]
        points = [(parse_seconds(t, field=field), parse_rate(r, field=field)) for t, r in pairs]
        if points[0][0] != 0:
            raise SpecError(f"{field}: the first step is at 0s; write step:0s=2,10min=8")
        return steps(points, name=text)
    if kind == "ramp":
        ends, _, rest = rest.partition(",")
        low, sign, high = ends.partition("-")
        given = _settings(rest, field, {"over"}, set())
        if not sign:
            raise SpecError(f"{field}: a ramp needs both rates; write ramp:2-10,over=10min")
        return ramp(parse_rate(low, field=field), parse_rate(high, field=field),
                    parse_seconds(given["over"], field=field), name=text)  # fmt: skip
    if kind == "spike":
        given = _settings(rest, field, {"base", "peak", "at", "for"}, set())
        return spike(parse_rate(given["base"], field=field), parse_rate(given["peak"], field=field),
                     parse_seconds(given["at"], field=field), parse_seconds(given["for"], field=field),
                     name=text)  # fmt: skip
    if kind == "diurnal":
        given = _settings(rest, field, {"mean", "peak"}, {"at", "period"})
        return diurnal(parse_rate(given["mean"], field=field), parse_rate(given["peak"], field=field),
                       peak_at_s=parse_seconds(given.get("at", "14h"), field=field),
                       period_s=parse_seconds(given.get("period", "24h"), field=field), name=text)  # fmt: skip
    raise SpecError(f"{field}: {text!r} is not a rate curve; write one of {FORMS}")


def _settings(text: str, field: str, needed: set[str], allowed: set[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in text.split(","):
        key, sign, value = part.partition("=")
        name = key.strip()
        if not sign or name not in needed | allowed or name in given:
            raise SpecError(f"{field}: {part.strip()!r} is not understood; write one of {FORMS}")
        given[name] = value
    if needed - set(given):
        raise SpecError(f"{field}: {', '.join(sorted(needed - set(given)))} is missing; write one of {FORMS}")
    return given
