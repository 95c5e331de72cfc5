"""Rates that change: their integrals, their inverses, and the arrivals that come of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from bstar import traffic
from bstar.errors import InputError
from bstar.traffic import rates
from bstar.traffic.streams import stream

CURVES = {
    "step": rates.parse_rate_curve("step:0s=2,10s=8,20s=0,30s=3"),
    "ramp": rates.parse_rate_curve("ramp:2-10,over=1min"),
    "ramp down to nothing": rates.ramp(10.0, 0.0, 30.0),
    "spike": rates.parse_rate_curve("spike:base=2,peak=20,at=15s,for=5s"),
    "diurnal": rates.parse_rate_curve("diurnal:mean=5,peak=10,at=10s,period=40s"),
    "flat diurnal": rates.diurnal(5.0, 5.0, period_s=10.0),
    "hours": rates.table([(0, 1.0), (10, 5.0), (20, 0.0), (30, 2.0)], period_s=40.0),
    "late": rates.table([(5, 1.0), (10, 5.0)]),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_integral_is_that_of_the_rate(name):
    curve = CURVES[name]
    for end in (3.0, 17.0, 29.0, 61.0, 123.0):
        grid = [p + 40.0 * k for k in range(4) for p in (5, 10, 15, 20, 30, 40, 60) if p + 40.0 * k < end]
        exact = integrate.quad(lambda t: float(curve.rate(np.asarray([t]))[0]), 0, end, points=grid, limit=500)[0]
        assert float(curve.integral(np.asarray([end]))[0]) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("name", CURVES)
def test_the_inverse_undoes_the_integral(name):
    curve = CURVES[name]
    total = float(curve.integral(np.asarray([200.0]))[0])
    u = np.linspace(0.001, total * 0.999, 999)
    t = curve.inverse(u)
    assert (np.diff(t) >= 0).all()
    assert curve.integral(t) == pytest.approx(u, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_curve_is_inverted(points, repeats):
    times = sorted(t for t, _ in points)
    values = [r if r > 0.01 else 0.0 for _, r in points]
    try:
        curve = rates.RateCurve(times_s=tuple(times), rates_per_s=tuple(values), period_s=60.0 if repeats else 0.0)
    except InputError:
        return  # no request ever comes
    end = float(curve.integral(np.asarray([150.0]))[0])
    u = np.linspace(0, end, 50)[1:-1]
    t = curve.inverse(u)
    assert (np.diff(t) >= -1e-9).all()
    assert curve.integral(t) == pytest.approx(u, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("name", ["step", "spike", "diurnal", "hours"])
def test_arrivals_of_a_varying_rate_are_poisson_in_every_window(name):
    curve = CURVES[name]
    edges = np.linspace(0.0, 80.0, 41)
    expected = np.diff(curve.integral(edges))
    counts = np.zeros((300, 40))
    for seed in range(300):
        times = traffic.varying(curve, 1, 1, duration_s=80.0, seed=seed).arrival_s
        counts[seed] = np.histogram(times, bins=edges)[0]
    error = (counts.mean(axis=0) - expected) / np.sqrt(np.maximum(expected, 1e-9) / 300)
    assert np.abs(error[expected > 0]).max() < 4.5
    assert counts[:, expected == 0].sum() == 0
    busy = expected > 2
    assert (counts[:, busy].var(axis=0) / expected[busy]).mean() == pytest.approx(1.0, abs=0.1)


def test_thinning_and_time_change_agree():
    curve = CURVES["diurnal"]
    changed = np.concatenate([traffic.varying(curve, 1, 1, duration_s=80.0, seed=s).arrival_s for s in range(60)])
    thinned = np.concatenate([rates.thinned(curve.rate, 10.0, 80.0, stream(s, "thinning")) for s in range(60)])
    assert thinned.size == pytest.approx(60 * float(curve.integral(np.asarray([80.0]))[0]), rel=0.03)
    assert stats.ks_2samp(changed, thinned).pvalue > 1e-3
    with pytest.raises(InputError, match="exceeds its bound"):
        rates.thinned(curve.rate, 3.0, 80.0, stream(0, "thinning"))


def test_a_renewal_process_in_operational_time_keeps_its_burstiness():
    curve = rates.ramp(1.0, 9.0, 1000.0)
    load = traffic.varying(curve, 1, 1, 20_000, gaps=traffic.Gaps(kind="gamma", shape=0.25), seed=1)
    unit = np.diff(curve.integral(load.arrival_s), prepend=0.0)
    assert unit.mean() == pytest.approx(1.0, abs=0.06)
    assert unit.var() == pytest.approx(4.0, rel=0.15)


def test_a_day():
    day = traffic.varying("diurnal:mean=5,peak=10", 512, 128, duration_s=86_400, seed=0)
    hours = np.histogram(day.arrival_s, bins=24, range=(0, 86_400))[0]
    assert day.num_requests == pytest.approx(432_000, abs=4 * math.sqrt(432_000))
    assert hours.argmax() in (13, 14)
    assert hours.max() / hours.min() > 10


@pytest.mark.parametrize("text", ["", "flat:3", "step:5s=2", "step:0s", "step:0s=x", "step:0s=2,0s", "step:9s=1,0s=2",
                                  "ramp:2", "ramp:2-3", "ramp:2-3,over=x", "spike:base=1,peak=2", "diurnal:mean=5",
                                  "diurnal:mean=5,peak=11", "diurnal:mean=5,peak=9,period=0s", "step:0s=0",
                                  "spike:base=1,peak=2,at=1s,for=1s,of=1s"])  # fmt: skip
def test_bad_curves_are_one_line(text):
    with pytest.raises(InputError) as error:
        rates.parse_rate_curve(text)
    assert str(error.value).startswith("rate")
    assert "\n" not in str(error.value)


def test_a_curve_that_ends_cannot_bring_more():
    with pytest.raises(InputError, match="the curve ends before 1000"):
        traffic.varying("step:0s=2,10s=0", 1, 1, 1000)
