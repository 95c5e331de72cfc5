"""Arrivals have the law they are named after: mean, CV and the whole distribution of their gaps."""

import math

import numpy as np
import pytest
from scipy import stats

from bstar import traffic
from bstar.errors import SpecError
from bstar.traffic.arrivals import Gaps, ramp_up
from bstar.traffic.streams import stream

LAWS = [
    (Gaps(), stats.expon()),
    (Gaps(kind="gamma", shape=0.25), stats.gamma(0.25, scale=4.0)),
    (Gaps(kind="gamma", shape=4.0), stats.gamma(4.0, scale=0.25)),
    (Gaps(kind="weibull", shape=0.6), stats.weibull_min(0.6, scale=1 / math.gamma(1 + 1 / 0.6))),
    (Gaps(kind="weibull", shape=2.5), stats.weibull_min(2.5, scale=1 / math.gamma(1 + 1 / 2.5))),
]


@pytest.mark.parametrize(("gaps", "law"), LAWS, ids=lambda v: f"{v.kind}{v.shape:g}" if isinstance(v, Gaps) else "")
def test_gaps_follow_their_law(gaps, law):
    n = 100_000
    draws = gaps.draw(n, stream(0, "arrivals"))
    mean, variance, _, kurtosis = (float(v) for v in law.stats("mvsk"))
    assert mean == pytest.approx(1.0)
    assert gaps.cv_squared == pytest.approx(variance)
    assert abs(draws.mean() - 1) < 4 * math.sqrt(variance / n)
    assert abs(draws.var() - variance) < 4 * variance * math.sqrt((kurtosis + 2) / n)
    assert stats.kstest(draws[:20_000], law.cdf).pvalue > 1e-3


def test_burstiness_is_one_over_cv_squared():
    for burstiness in (0.1, 0.5, 1.0, 3.0):
        load = traffic.gamma(10.0, burstiness, 1, 1, 200_000, seed=1)
        gaps = np.diff(load.arrival_s)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.06)
        assert load.rate_per_s == pytest.approx(10.0, rel=5 / math.sqrt(200_000 * burstiness))
    assert np.diff(traffic.gamma(10.0, math.inf, 1, 1, 9).arrival_s) == pytest.approx(0.1)


def test_burstiness_one_is_poisson():
    counts = np.histogram(traffic.gamma(10.0, 1.0, 1, 1, 100_000).arrival_s, bins=5000, range=(0, 5000))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=5 * math.sqrt(2 / 5000))


def test_rescaling_ends_at_n_over_rate():
    plain = traffic.gamma(4.0, 0.5, 1, 1, 1000, seed=2)
    scaled = traffic.gamma(4.0, 0.5, 1, 1, 1000, seed=2, rescale=True)
    assert scaled.arrival_s[-1] == pytest.approx(250.0, rel=1e-12)
    assert plain.arrival_s[-1] != pytest.approx(250.0, rel=1e-3)
    # What vLLM's get_request does with the delays it drew.
    gaps = np.diff(plain.arrival_s, prepend=0.0)
    vllm = np.cumsum(gaps) * (1000 / 4.0 / gaps.sum())
    assert scaled.arrival_s == pytest.approx(vllm, rel=1e-9)


def test_constant_and_duration():
    assert traffic.constant(4.0, 1, 1, 4).arrival_s.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert traffic.constant(4.0, 1, 1, duration_s=10.0).num_requests == 40
    many = [traffic.poisson(3.0, 1, 1, duration_s=20.0, seed=s).num_requests for s in range(400)]
    assert np.mean(many) == pytest.approx(60, abs=4 * math.sqrt(60 / 400))
    assert np.var(many) == pytest.approx(60, rel=0.3)


def test_ramp_up_as_vllm_does_it():
    times = ramp_up(Gaps(kind="constant"), 2.0, 6.0, stream(0, "arrivals"), count=5)
    assert np.diff(times, prepend=0.0) == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6])
    times = ramp_up(Gaps(kind="constant"), 1.0, 16.0, stream(0, "arrivals"), count=5, strategy="exponential")
    assert np.diff(times, prepend=0.0) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16])
    load = traffic.ramp_up(2, 20, 512, 128, 20_000, burstiness=0.5)
    first, last = np.diff(load.arrival_s)[:1000], np.diff(load.arrival_s)[-1000:]
    assert first.mean() / last.mean() == pytest.approx(19.55 / 2.45, rel=0.25)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: traffic.poisson(0, 1, 1, 5), "rate_per_s"),
    (lambda: traffic.poisson(float("nan"), 1, 1, 5), "rate_per_s"),
    (lambda: traffic.poisson("x", 1, 1, 5), "rate_per_s"),
    (lambda: traffic.poisson(1, 1, 1), "num_requests"),
    (lambda: traffic.poisson(1, 1, 1, 5, duration_s=3), "num_requests"),
    (lambda: traffic.poisson(1, 1, 1, 0), "num_requests"),
    (lambda: traffic.poisson(1, 1, 1, 2.5), "num_requests"),
    (lambda: traffic.poisson(1, 1, 1, duration_s=-3), "duration_s"),
    (lambda: traffic.poisson(1e-9, 1, 1, duration_s=1), "duration"),
    (lambda: traffic.poisson(1, 1, None, 5), "output_tokens"),
    (lambda: traffic.poisson(1, None, 1, 5), "input_tokens"),
    (lambda: traffic.poisson(1, True, 1, 5), "input_tokens"),
    (lambda: traffic.poisson(1, 5.5, 1, 5), "input_tokens"),
    (lambda: traffic.poisson(1, "gauss:5", 1, 5), "input_tokens"),
    (lambda: traffic.poisson(1, 1, 1, 5, seed=-1), "seed"),
    (lambda: traffic.poisson(1, 1, 1, 5, warmup_requests=5), "warm-up"),
    (lambda: traffic.poisson(1, 1, 1, duration_s=5, rescale=True), "rescale"),
    (lambda: traffic.gamma(1, 0, 1, 1, 5), "burstiness"),
    (lambda: traffic.weibull(1, -1, 1, 1, 5), "shape"),
    (lambda: traffic.weibull(1, 1e-4, 1, 1, 5), "shape"),
    (lambda: traffic.ramp_up(0, 5, 1, 1, 5), "ramp-up"),
    (lambda: traffic.ramp_up(1, 5, 1, 1, 5, strategy="cubic"), "ramp-up"),
    (lambda: traffic.closed_loop(0, 1, 1, 5), "concurrency"),
    (lambda: traffic.closed_loop(2, 1, 1, 5, think_s=-1), "think time"),
    (lambda: traffic.closed_loop(2, 1, 1, 5, think_s="soon"), "think time"),
    (lambda: traffic.closed_loop(2, 1, 1, 5, start="slow"), "start"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_one_line_that_names_the_argument(call, says):
    with pytest.raises(SpecError if "think" not in says else Exception) as error:
        call()
    assert str(error.value).startswith(says), str(error.value)
    assert "\n" not in str(error.value)
