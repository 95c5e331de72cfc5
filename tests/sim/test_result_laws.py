"""Laws that every simulated run keeps, whatever the load, the policy and the implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from loads import deployed, loads, tight

from bstar.errors import InfeasibleError, SpecError
from bstar.sim.measured_gaps import measured_gaps
from bstar.sim.result import SimResult
from bstar.sim.run import simulate
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo
from bstar.traffic import closed_loop, poisson
from bstar.traffic.load import Traffic

LOADS = loads()
DEPLOYMENTS = {
    "roomy": deployed(), "sync": deployed(async_scheduling=False), "tight": tight(),
    "tight-sync": tight(async_scheduling=False, enable_prefix_caching=False),
    "budget": deployed(max_num_batched_tokens=256, max_num_seqs=8, async_scheduling=False), "tp2": deployed(tp=2, dp=2),
}  # fmt: skip


def check_laws(result: SimResult, traffic: Traffic) -> None:
    assert not np.isnan(result.finish_s).any()
    # Order of events, and who was sent when.
    assert (result.scheduled_s >= result.arrival_s).all()
    assert (result.first_token_s > result.scheduled_s).all()
    assert (result.finish_s >= result.first_token_s).all()
    given = ~np.isnan(traffic.arrival_s)
    assert (result.arrival_s[given] == traffic.arrival_s[given]).all()
    for r in np.flatnonzero(traffic.parent >= 0):
        expected = result.finish_s[traffic.parent[r]] + traffic.think_s[r]
        assert result.arrival_s[r] == pytest.approx(expected, rel=1e-9)
    # Tokens are conserved: made, as asked for; sampled by steps, all of them.
    assert (result.output_tokens == traffic.output_tokens).all()
    steps = result.steps
    assert int(steps.made @ steps.steps) == result.output_tokens.sum()
    assert steps.gaps.count == (result.output_tokens - 1).sum()
    assert steps.gaps.total_s == pytest.approx(float((result.finish_s - result.first_token_s).sum()), rel=1e-9)
    mine = result.measured if measured_gaps(result) is not None else slice(None)
    assert result.gaps.count == (result.output_tokens - 1)[mine].sum()
    assert result.gaps.total_s == pytest.approx(float((result.finish_s - result.first_token_s)[mine].sum()), rel=1e-9)
    # Prompts are computed, what was cached aside, and again after a preemption.
    lost = int(result.num_preemptions.sum())
    computed, wanted = int(steps.prompt_tokens @ steps.steps), int((result.input_tokens - result.cached_tokens).sum())
    assert computed == wanted if lost == 0 and result.policy != "static" else computed >= wanted
    assert int(steps.preempted.sum()) == lost
    # Little's law: the integral over time is the sum over requests.
    start, end = result.span_s
    assert result.mean_in_flight * (end - start) == pytest.approx(float(result.e2e_s.sum()), rel=1e-9)
    in_system = result.series(50).in_system
    assert in_system.sum() * (end - start) / 50 == pytest.approx(float(result.e2e_s.sum()), rel=1e-9)
    # Steps of an engine do not overlap, blocks are never more than there are.
    for replica in range(steps.replicas):
        mine = steps.replica == replica
        assert (steps.start_s[mine][1:] >= steps.end_s[mine][:-1] - 1e-9).all()
    assert (steps.used_blocks >= 0).all()
    assert (steps.used_blocks <= steps.kv_blocks).all()
    assert 0 < (steps.mbu or 0) <= 1
    assert 0 < (steps.mfu or 0) <= 1
    assert 0 < (result.kv_usage or 0) <= steps.max_kv_usage() <= 1


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_laws_and_twins(load: str, name: str) -> None:
    slow = simulate(DEPLOYMENTS[name], LOADS[load], engine="reference")
    fast = simulate(DEPLOYMENTS[name], LOADS[load], engine="kernel")
    assert (slow.engine, fast.engine) == ("reference", "kernel")
    for result in (slow, fast):
        check_laws(result, LOADS[load])
    if name.startswith("tight") and load == "bursty":
        assert slow.num_preemptions.sum() > 0
    for column in ("num_preemptions", "cached_tokens", "output_tokens", "replica"):
        assert (getattr(slow, column) == getattr(fast, column)).all(), column
    for column in ("arrival_s", "scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(fast, column), getattr(slow, column), rtol=1e-9)
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        for part in ("mean", "p50", "p95", "p99", "max"):
            found, expected = getattr(getattr(fast.summary, metric), part), getattr(getattr(slow.summary, metric), part)
            assert found == pytest.approx(expected, rel=1e-9), (metric, part)
    for figure in ("mbu", "mfu"):
        assert getattr(fast.steps, figure) == pytest.approx(getattr(slow.steps, figure), rel=1e-9)
    assert fast.steps.num_steps == slow.steps.num_steps
    assert float(fast.steps.flops.sum()) == pytest.approx(float(slow.steps.flops.sum()), rel=1e-9)
    for column in ("running", "waiting", "step_s", "output_tokens_per_s", "mbu"):
        found, expected = getattr(fast.series(20), column), getattr(slow.series(20), column)
        # Within a run the kernel spreads tokens and work evenly over its time.
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02 * np.nanmax(expected), err_msg=column)


@pytest.mark.parametrize("load", ["poisson", "closed"])
def test_static_batching_keeps_the_laws(load: str) -> None:
    for name in ("roomy", "tight"):
        check_laws(simulate(DEPLOYMENTS[name], LOADS[load], policy="static"), LOADS[load])


def test_series_add_up() -> None:
    result = simulate(deployed(), LOADS["poisson"], engine="reference")
    series, (start, end) = result.series(40), result.span_s
    width = (end - start) / 40
    assert series.output_tokens_per_s.sum() * width == pytest.approx(float(result.output_tokens.sum()))
    assert series.prompt_tokens_per_s.sum() * width == pytest.approx(float(result.input_tokens.sum()))
    assert series.flops_per_s.sum() * width == pytest.approx(float(result.steps.flops.sum()))
    assert series.busy.sum() * width == pytest.approx(result.steps.busy_s)
    assert series.mbu.sum() * width == pytest.approx(float(result.steps.memory_s.sum()))
    assert series.kv_usage.mean() == pytest.approx(result.kv_usage)


def test_a_request_alone_is_what_the_steps_take() -> None:
    from bstar.latency import decode_step_time, prefill_time
    from bstar.latency.constants import constants_for

    d = deployed(async_scheduling=False)
    load = Traffic(arrival_s=np.array([1.0]), input_tokens=np.array([600]), output_tokens=np.array([5]))
    for engine in ("reference", "auto"):
        result = simulate(d, load, engine=engine)  # type: ignore[arg-type]
        beside = constants_for(d)["request_s"]
        assert result.ttft_s[0] == pytest.approx(beside + prefill_time(d, 600).expected_s, rel=1e-9)
        gaps = [decode_step_time(d, 1, 600 + k).expected_s for k in range(1, 5)]
        assert result.finish_s[0] - result.first_token_s[0] == pytest.approx(sum(gaps), rel=1e-9)
        assert sorted(result.gaps.expanded()) == pytest.approx(gaps, rel=1e-9)
        work = prefill_time(d, 600).details[0]
        assert work.floor.sum() > 0


def test_the_same_seed_the_same_bits() -> None:
    first, second = (simulate(deployed(), LOADS["bursty"], seed=3) for _ in range(2))
    assert (first.finish_s == second.finish_s).all()
    assert first.to_dict()["ttft_s"] == second.to_dict()["ttft_s"]


def test_what_cannot_be_served_is_said() -> None:
    load = poisson(1.0, 9000, 10, num_requests=5)
    with pytest.raises(SpecError, match="max_model_len"):
        simulate(deployed(max_model_len=4096), load)
    with pytest.raises(InfeasibleError):
        simulate(Deployment(model=deployed().model, device=deployed().device, parallel=deployed().parallel,
                            engine=tight_engine()), load)  # fmt: skip
    with pytest.raises(SpecError, match="policy"):
        simulate(deployed(), load, policy="magic")


def tight_engine():  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(deployed().engine, gpu_memory_utilization=0.1)


def test_some_prompts_too_long() -> None:
    load = poisson(1.0, "uniform:100-8000", 50, num_requests=60, seed=9)
    result = simulate(deployed(max_model_len=4096), load, engine="reference")
    refused = load.input_tokens >= 4096
    assert (result.rejected == refused).all()
    assert np.isnan(result.finish_s[refused]).all()
    assert not np.isnan(result.finish_s[~refused]).any()
    # They were sent, and got no answer: an SLO that every answer meets is met by the others only.
    assert result.summary.num_requests == 60
    assert result.summary_for(Slo(e2e_s=1e6)).slo_attainment_fraction == pytest.approx((~refused).sum() / 60)
    assert result.summary.ttft_s.count == int((~refused).sum())
    assert "are refused" in result.notes[0]


def test_warmup_requests_are_not_measured() -> None:
    result = simulate(deployed(), LOADS["warm"], engine="reference")
    assert result.summary.num_requests == 48
    assert math.isclose(result.summary.ttft_s.mean or 0, float(np.mean(result.ttft_s[12:])))


def test_a_horizon_ends_the_run() -> None:
    load = closed_loop(8, 300, 400, num_requests=80)
    whole = simulate(deployed(), load, engine="reference")
    half = whole.span_s[1] / 2
    part = simulate(deployed(), load, engine="reference", until_s=half)
    known = ~np.isnan(part.finish_s)
    assert 0 < known.sum() < 80
    assert (part.finish_s[known] == whole.finish_s[known]).all()
    assert part.summary.num_finished == known.sum()


def test_an_interrupt_keeps_what_happened() -> None:
    def stop(done: int, _total: int, _clock_s: float) -> None:
        if done > 10:
            raise KeyboardInterrupt

    load = closed_loop(8, 300, 400, num_requests=200)
    result = simulate(deployed(), load, engine="reference", progress=stop)
    assert result.interrupted
    assert 10 < result.summary.num_finished < 200
    assert result.to_dict()["interrupted"] is True


@pytest.mark.parametrize("warmup", [1, 7, 8, 20])
def test_rates_beside_a_warm_up_keep_littles_law(warmup: int) -> None:
    """The last requests of the warm-up are served in the time that rates divide by, so they count."""
    load = replace(closed_loop(8, 200, 50, num_requests=160), warmup_requests=warmup)
    found = simulate(deployed(), load).summary
    assert found.requests_per_s * (found.e2e_s.mean or 0.0) == pytest.approx(8.0, rel=0.05)
    assert found.output_tokens_per_s == pytest.approx(50.0 * found.requests_per_s)
    assert found.goodput_requests_per_s == pytest.approx(found.requests_per_s)
