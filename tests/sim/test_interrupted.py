"""A run that Ctrl-C ends: its engines stop at one moment, and it says no more than what happened until then."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from loads import deployed

from bstar.sim.cluster import simulate_cluster
from bstar.sim.cluster.fleet import Failure
from bstar.sim.compare import compare
from bstar.sim.engine import KernelEngine
from bstar.sim.export import request_columns
from bstar.sim.result import SimResult
from bstar.sim.run import simulate
from bstar.sim.slices import in_slices
from bstar.specs.slo import Slo
from bstar.traffic import closed_loop, poisson

LOAD = poisson(30.0, 500, 100, num_requests=1500)


@pytest.fixture
def at_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Ctrl-C in the first call of a compiled engine that would go on to this time or beyond."""
    advance = KernelEngine.advance

    def stop(moment_s: float) -> None:
        pressed: list[float] = []

        def stopped(self: KernelEngine, until_s: float = math.inf) -> bool:
            if until_s >= moment_s and not pressed:
                pressed.append(until_s)
                raise KeyboardInterrupt
            return advance(self, until_s)

        monkeypatch.setattr(KernelEngine, "advance", stopped)

    return stop


def check(result: SimResult, engines: int) -> None:
    """Every engine came as far, and the figures are of requests that were sent until then."""
    assert result.interrupted
    end = result.span_s[1]
    sent = ~np.isnan(result.arrival_s)
    assert 0 < sent.sum() < len(result)
    assert np.nanmax(result.arrival_s) <= end
    assert (result.measured == sent).all()
    for engine in range(engines):
        steps = result.steps.end_s[result.steps.replica == engine]
        assert steps.max() == pytest.approx(end, abs=0.1)
    assert result.steadiness.reached is None
    assert result.steadiness.message is None
    assert result.to_dict()["steady_state"] is None
    assert all(column.size == sent.sum() for column in request_columns(result).values())
    assert result.summary.requests_per_s == pytest.approx(30.0, rel=0.15)


@pytest.mark.parametrize("router", ["round-robin", "random", "least-outstanding", "least-kv"])
def test_engines_stop_at_one_moment(router: str, at_s: Callable[[float], None]) -> None:
    at_s(20.0)
    check(simulate_cluster(deployed(), LOAD, replicas=3, router=router), 3)


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding"])
def test_engines_of_a_fleet_that_changes_stop_at_one_moment(router: str, at_s: Callable[[float], None]) -> None:
    at_s(20.0)
    failed = [Failure(replica=1, at_s=3.0, back_s=1.0)]
    check(simulate_cluster(deployed(), LOAD, replicas=3, router=router, failures=failed), 3)


def test_one_engine_is_not_judged_either(at_s: Callable[[float], None]) -> None:
    at_s(20.0)
    check(simulate(deployed(), LOAD), 1)


def test_no_engine_is_called_slow_for_being_stopped(at_s: Callable[[float], None]) -> None:
    """Copies are simulated one after another: the one that was stopped is left out, unless it is the only one."""
    both = deployed(dp=2)
    at_s(20.0)
    first = simulate(both, LOAD)
    assert first.interrupted
    assert first.notes[-1] == "figures are of engine 0 of 2, as far as it came"
    whole = simulate(both, LOAD)
    calls: list[float] = []
    advance = KernelEngine.advance

    def stopped(self: KernelEngine, until_s: float = math.inf) -> bool:
        calls.append(until_s)
        if calls.count(-math.inf) == 2 and calls[-2] == -math.inf:
            raise KeyboardInterrupt
        return advance(self, until_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelEngine, "advance", stopped)
        second = simulate(both, LOAD)
    assert second.interrupted
    assert second.notes[-1] == "figures are of 1 of 2 engines, which had run to their end"
    assert np.array_equal(second.finish_s[::2], whole.finish_s[::2])
    assert np.isnan(second.arrival_s[1::2]).all()
    assert second.summary.num_requests == second.summary.num_finished == 750


def test_before_the_first_step_an_interrupt_is_raised(at_s: Callable[[float], None]) -> None:
    for run in (
        lambda: simulate(deployed(), LOAD), lambda: simulate_cluster(deployed(), LOAD, replicas=2),
        lambda: simulate_cluster(deployed(), LOAD, replicas=2, router="least-kv"),
        lambda: simulate_cluster(deployed(), closed_loop(4, 100, 20, num_requests=20), replicas=2),
    ):  # fmt: skip
        at_s(-math.inf)
        with pytest.raises(KeyboardInterrupt):
            run()


@pytest.mark.parametrize("policy", ["static", "continuous", "sglang", "swap:engine=reference"])
def test_an_interrupted_run_holds_what_happened(policy: str) -> None:
    def pressed(done: int, _total: int, _clock_s: float) -> None:
        if done > 20 and not seen:
            seen.append(done)
            raise KeyboardInterrupt

    seen: list[int] = []
    load = poisson(30.0, 500, "uniform:5-100", num_requests=1500)
    result = simulate(deployed(), load, policy=policy, progress=pressed)
    assert result.interrupted
    finished = ~np.isnan(result.finish_s)
    assert 20 < finished.sum() < 1500
    assert (result.output_tokens[finished] == load.output_tokens[finished]).all()
    assert np.nanmin(result.tpot_s) > 0


def test_requests_in_flight_at_an_interrupt_count_neither_way(at_s: Callable[[float], None]) -> None:
    """Unless they had broken a limit by then: a queue that grows is not made good by stopping."""
    load = poisson(5.0, 500, 100, num_requests=400)
    at_s(30.0)
    result = simulate(deployed(), load, slo="ttft=5s,e2e=60s")
    cut = np.isnan(result.finish_s) & result.measured
    assert result.interrupted
    assert cut.any()
    assert result.summary.slo_attainment_fraction == 1.0
    assert result.summary.num_requests == result.summary.num_finished + cut.sum()
    late = result.summary_for(Slo(e2e_s=1e-3))
    assert late.slo_attainment_fraction == 0.0
    mixed = result.summary_for(Slo(ttft_s=float(np.nanmedian(result.first_token_s - result.arrival_s))))
    assert 0.3 < mixed.slo_attainment_fraction < 0.7


def test_an_interrupted_comparison_leaves_ways_out(at_s: Callable[[float], None]) -> None:
    at_s(20.0)
    found = compare(deployed(), LOAD, ["static", "continuous", "unchunked"])
    assert found.interrupted
    assert found.names == ("static",)
    assert found.left_out == ("continuous", "unchunked")


def test_a_second_interrupt_ends_at_once() -> None:
    reached: list[float] = []

    def advance(horizon_s: float) -> bool:
        reached.append(horizon_s)
        if len(reached) >= 3:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        in_slices(advance, from_s=0.0, span_s=640.0)
    assert reached == [10.0, 30.0, 70.0, 70.0]


def test_a_second_interrupt_in_the_same_slice_ends_at_once() -> None:
    def advance(_horizon_s: float) -> bool:
        try:
            raise KeyboardInterrupt
        finally:  # where it waits for the other engines
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_slices(advance, from_s=0.0, span_s=640.0)


def test_a_slice_is_made_whole() -> None:
    reached: list[float] = []

    def advance(horizon_s: float) -> bool:
        reached.append(horizon_s)
        if len(reached) == 2:
            raise KeyboardInterrupt
        return False

    assert in_slices(advance, from_s=5.0, span_s=0.0, until_s=100.0)
    assert reached == [6.0, 8.0, 8.0]


def test_compiling_is_not_simulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever loading the kernels takes is `compile_s`, for one engine and for many."""
    import time

    advance = KernelEngine.advance

    def slow(self: KernelEngine, until_s: float = math.inf) -> bool:
        if until_s == -math.inf:
            time.sleep(0.3)
        return advance(self, until_s)

    monkeypatch.setattr(KernelEngine, "advance", slow)
    small = poisson(30.0, 100, 10, num_requests=20)
    for result in (
        simulate(deployed(), small), simulate_cluster(deployed(), small, replicas=2),
        simulate_cluster(deployed(), small, replicas=2, router="least-kv"),
    ):  # fmt: skip
        assert result.timing.compile_s >= 0.3
        assert result.timing.total_s == pytest.approx(result.timing.compile_s + result.timing.simulate_s)
