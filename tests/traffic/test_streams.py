"""Streams: same seed, same bits; a new stream changes no other; the draws of today are those of tomorrow."""

import numpy as np
import pytest

from bstar import traffic
from bstar.errors import SpecError
from bstar.traffic.streams import stream


def test_a_stream_is_fixed_by_seed_and_name():
    first = stream(7, "arrivals").random(100)
    stream(7, "something new").random(5000)
    assert (stream(7, "arrivals").random(100) == first).all()
    for other in (stream(8, "arrivals"), stream(7, "input")):
        assert (other.random(100) != first).any()


def test_streams_are_uncorrelated():
    names = ("arrivals", "input", "output", "joint", "think")
    draws = np.stack([stream(seed, name).standard_normal(20_000) for seed in (0, 1) for name in names])
    worst = np.abs(np.corrcoef(draws) - np.eye(len(draws))).max()
    assert worst < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(SpecError, match=r"seed: .*whole number"):
        stream(seed, "arrivals")


def test_bits_of_today():
    """A load that has been reported can be drawn again: these change only when a change is meant."""
    loads = {
        "poisson": traffic.poisson(6.5, "lognormal:mean=900,cv=1.1", "uniform:10-300", 1000, seed=1),
        "gamma": traffic.gamma(5, 0.4, 512, "exponential:mean=128", 1000, seed=2, rescale=True),
        "varying": traffic.varying("step:0s=2,1min=8", 512, 64, 500, seed=3),
        "closed": traffic.closed_loop(16, 512, "zipf:alpha=1.1,max=2000", 200, think_s="exponential:mean=5s", seed=4),
        "sessions": traffic.sessions(1.0, "uniform:1-6", 100, 50, 40, prefix=traffic.prefix_groups(800, 3), seed=5),
    }
    assert {name: load.fingerprint()[:16] for name, load in loads.items()} == GOLDEN


GOLDEN = {
    "poisson": "db01978bd97eae8e",
    "gamma": "2a5a90fe97b7972d",
    "varying": "8571210f3c6c9eef",
    "closed": "c569418db4c2549a",
    "sessions": "041749c6947c26b5",
}


def test_lengths_do_not_depend_on_arrivals_and_the_other_way_round():
    one = traffic.poisson(2.0, "lognormal:mean=500,cv=1", 100, 300, seed=9)
    faster = traffic.gamma(20.0, 0.5, "lognormal:mean=500,cv=1", 100, 300, seed=9)
    longer = traffic.poisson(2.0, "lognormal:mean=5000,cv=1", "uniform:5-50", 300, seed=9)
    assert (one.input_tokens == faster.input_tokens).all()
    assert (one.arrival_s == longer.arrival_s).all()
    assert (one.arrival_s != faster.arrival_s).any()


def test_a_longer_load_begins_with_the_shorter_one():
    short = traffic.poisson(2.0, "lognormal:mean=500,cv=1", "uniform:1-9", 1000, seed=3)
    long = traffic.poisson(2.0, "lognormal:mean=500,cv=1", "uniform:1-9", 5000, seed=3)
    for name in ("arrival_s", "input_tokens", "output_tokens"):
        assert (getattr(long.head(1000), name) == getattr(short, name)).all()
    timed = traffic.poisson(2.0, "lognormal:mean=500,cv=1", "uniform:1-9", duration_s=400.0, seed=3)
    assert long.arrival_s[: timed.num_requests] == pytest.approx(timed.arrival_s, rel=1e-12)
    assert long.arrival_s[timed.num_requests] > 400.0 >= timed.arrival_s[-1]
