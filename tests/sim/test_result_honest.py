"""Results say no more than a run shows: requests without an engine, short overloads, warm-up, engines that are not."""

from __future__ import annotations

import numpy as np
import pytest
from loads import deployed

from bstar.errors import SpecError
from bstar.interfaces.cli.traffic import TRAFFIC_KEYS, build_traffic
from bstar.sim.cluster import simulate_cluster
from bstar.sim.cluster.fleet import Autoscaler, Drain, Failure
from bstar.sim.cluster.transfer import KvLink
from bstar.sim.run import simulate
from bstar.traffic import closed_loop, poisson
from bstar.traffic.prefixes import prefix_groups


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_requests_without_an_engine_are_named_and_not_in_flight(engine: str) -> None:
    load = poisson(20.0, 500, 100, num_requests=300)
    lost = simulate_cluster(deployed(), load, failures=[Failure(replica=0, at_s=5.0)], engine=engine)  # type: ignore[arg-type]
    left = int(np.isnan(lost.finish_s).sum())
    assert lost.left.size == left > 100
    assert lost.steadiness.overload_fraction is None
    assert f"{left} of 300 requests are left without an engine (none takes what is sent from 5" in str(
        lost.steadiness.message)
    alone = simulate(deployed(), poisson(20.0, 500, 100, num_requests=300))
    assert 0 < lost.mean_in_flight < 2 * alone.mean_in_flight
    assert (lost.series(50).in_system >= -1e-9).all()
    drained = simulate_cluster(deployed(), load, replicas=2,
                               drains=[Drain(replica=0, at_s=2.0), Drain(replica=1, at_s=4.0)])
    assert drained.mean_in_flight > 0
    assert drained.to_dict()["num_unserved"] == drained.left.size > 100


def test_in_flight_is_littles_law() -> None:
    result = simulate(deployed(), poisson(10.0, 500, 100, num_requests=200))
    start, end = result.span_s
    assert result.mean_in_flight == pytest.approx(result.e2e_s.sum() / (end - start), rel=1e-12)


def test_events_of_engines_that_do_not_exist_are_refused() -> None:
    load = poisson(20.0, 500, 100, num_requests=50)
    with pytest.raises(SpecError, match="fail: engine 3 does not exist; there is engine 0 only"):
        simulate_cluster(deployed(), load, failures=[Failure(replica=3, at_s=1.0)])
    with pytest.raises(SpecError, match="drain: engine 2 does not exist; there are engines 0 to 1"):
        simulate_cluster(deployed(), load, replicas=2, drains=[Drain(replica=2, at_s=1.0)])
    scaled = simulate_cluster(deployed(), load, autoscaler=Autoscaler(metric="concurrency", target=1000.0, most=4),
                              failures=[Failure(replica=3, at_s=1.0)])
    assert any("engine 3 was not there yet" in note for note in scaled.notes)


def test_capacity_is_that_of_a_full_engine() -> None:
    """Filling a large cache takes requests at a rate that the engine cannot keep."""
    lengths = ("lognormal:mean=900,cv=1.1", "lognormal:mean=150,cv=1")
    long = simulate(deployed(), closed_loop(800, *lengths, num_requests=6000))
    # Of the middle: the end, when the clients run out of requests, empties the engine.
    finish = np.sort(long.finish_s[~np.isnan(long.finish_s)])
    low, high = finish.size // 5, 4 * finish.size // 5
    known = (high - low) / (finish[high] - finish[low])
    for rate, count in ((1.4, 1500), (2.0, 1500), (1.4, 4000)):
        steady = simulate(deployed(), poisson(rate * known, *lengths, num_requests=count)).steadiness
        assert steady.capacity_requests_per_s == pytest.approx(known, rel=0.12), steady.message


def test_a_burst_tells_no_capacity() -> None:
    steady = simulate(deployed(), poisson(1e6, 500, 100, num_requests=500)).steadiness
    assert not steady.reached
    assert steady.capacity_requests_per_s is None
    assert "inf" not in str(steady.message)


@pytest.mark.parametrize("rate", [5.0, 25.0])
def test_gaps_are_those_of_measured_requests(rate: float) -> None:
    import dataclasses

    load = poisson(rate, 500, 100, num_requests=300)
    result = simulate(deployed(), dataclasses.replace(load, warmup_requests=299))
    itl, tpot = result.summary.itl_s, result.summary.tpot_s
    assert itl.count == 99
    assert itl.mean == pytest.approx(tpot.mean, rel=1e-9)
    assert not result.steadiness.reached
    assert any("whole run" in note for note in result.remarks)
    half = simulate(deployed(), dataclasses.replace(load, warmup_requests=150))
    assert half.gaps.total_s == pytest.approx((half.finish_s - half.first_token_s)[150:].sum(), rel=1e-9)


def test_refusal_names_the_limit() -> None:
    with pytest.raises(SpecError, match="the 4,095 tokens that fit"):
        simulate(deployed(max_model_len=4096), poisson(5.0, 5000, 100, num_requests=10))


def test_a_prefix_is_shorter_than_the_prompts() -> None:
    options = dict.fromkeys(TRAFFIC_KEYS) | {
        "input_lengths": "500", "output_lengths": "100", "rate": 5.0, "num_requests": 9, "seed": 0,
        "warmup_requests": 0}  # fmt: skip
    with pytest.raises(SpecError, match="every prompt is shorter than its shared prefix"):
        build_traffic(options | {"prefix": "1000"})
    assert build_traffic(options | {"prefix": "1000,added"}).mean_input_tokens == 1500
    some = simulate(deployed(), poisson(5.0, "uniform:500-1500", 100, num_requests=40, prefix=prefix_groups(1000)))
    assert any("not longer than their shared prefix" in note for note in some.notes)


def test_a_slow_link_between_pools_is_an_overload() -> None:
    """It carries 7.63 prompts a second."""
    load = poisson(9.5, 500, 100, num_requests=400)
    result = simulate_cluster(deployed(), load, prefill_replicas=1, decode_replicas=1,
                              kv_link=KvLink(bandwidth_bytes_per_s=5e8))
    steady = result.steadiness
    assert steady.capacity_requests_per_s == pytest.approx(7.63, rel=0.03), steady.message
    fast = simulate_cluster(deployed(), load, prefill_replicas=1, decode_replicas=1)
    assert fast.steadiness.overload_fraction is None


def test_requests_that_an_interrupted_run_never_came_to_are_no_overload() -> None:
    result = simulate(deployed(), poisson(5.0, 500, 100, num_requests=2000), until_s=100.0)
    assert result.steadiness.overload_fraction is None
    assert 0 < result.mean_in_flight < 20
