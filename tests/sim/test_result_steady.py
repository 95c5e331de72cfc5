"""Steady state: warm-up is cut, overload is named with its size, means come with honest intervals."""

from __future__ import annotations

import numpy as np
import pytest
from loads import deployed

from bstar.sim.replicate import replicate
from bstar.sim.run import simulate
from bstar.sim.steady import mser
from bstar.traffic import closed_loop, poisson
from bstar.traffic.load import Traffic


def test_mser_finds_a_transient() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1000)
    values = noise + np.where(np.arange(1000) < 100, 20.0 * (1 - np.arange(1000) / 100), 0.0)
    assert 80 <= mser(values) <= 150
    assert mser(noise) <= 100
    assert mser(np.ones(8)) == 0


def capacity(seqs: int) -> float:
    """Requests per second of a saturated engine."""
    load = closed_loop(2 * seqs, 600, 100, num_requests=1500)
    return simulate(deployed(max_num_seqs=seqs), load).summary.requests_per_s


@pytest.mark.parametrize("excess", [0.12, 0.5, 2.0])
def test_overload_is_named_with_its_size(excess: float) -> None:
    rate = capacity(32) * (1.0 + excess)
    result = simulate(deployed(max_num_seqs=32), poisson(rate, 600, 100, num_requests=6000, seed=1))
    steady = result.steadiness
    assert not steady.reached
    assert steady.overload_fraction == pytest.approx(excess, abs=0.05 * (1 + excess))
    assert steady.message is not None
    assert "no steady state: arrivals exceed capacity by" in steady.message
    assert result.to_dict()["steady_state"] is False


@pytest.mark.parametrize("load", [0.3, 0.7, 0.85])
def test_below_capacity_there_is_a_steady_state(load: float) -> None:
    rate = capacity(32) * load
    for seed in range(5):
        result = simulate(deployed(max_num_seqs=32), poisson(rate, 600, 100, num_requests=3000, seed=seed))
        assert result.steadiness.overload_fraction is None, result.steadiness.message
        assert result.steadiness.reached


def test_short_runs_and_bursts_say_so() -> None:
    short = simulate(deployed(), poisson(5.0, 100, 2000, num_requests=20))
    assert "send more requests" in (short.steadiness.message or "")
    burst = simulate(deployed(), Traffic(arrival_s=np.zeros(20), input_tokens=np.full(20, 100),
                                         output_tokens=np.full(20, 10)))
    assert "at once" in (burst.steadiness.message or "")
    loop = simulate(deployed(), closed_loop(16, 100, 50, num_requests=40))
    assert "three requests each" in (loop.steadiness.message or "")
    assert simulate(deployed(), closed_loop(16, 100, 50, num_requests=400)).steadiness.reached


def test_intervals_of_one_run_and_of_replications_agree() -> None:
    def run(seed: int):  # type: ignore[no-untyped-def]
        return simulate(deployed(), poisson(12.0, "lognormal:mean=600,cv=1", 100, num_requests=1500, seed=seed))

    several = replicate(run, 8)
    over = several.intervals["ttft_s.mean"]
    assert over.batches == 8
    assert over.mean is not None and over.half_width is not None
    assert over.half_width < 0.2 * over.mean
    one = several.results[0].steadiness.intervals["ttft_s.mean"]
    assert one.batches == 20
    assert one.mean == pytest.approx(over.mean, rel=0.2)
    assert set(several.to_dict()["confidence"]) == set(several.intervals)
