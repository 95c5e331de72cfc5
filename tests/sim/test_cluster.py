"""Replicas behind a router: each router has a law of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cluster_helpers import affine, cluster, markov, mixed, serve, small, tight
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import bstar
from bstar.errors import SpecError
from bstar.queueing.markov import mmc_mean_wait_s
from bstar.sim.cluster import ROUTERS, Autoscaler, simulate_cluster
from bstar.sim.cluster.routers import BLIND, Router
from bstar.sim.run import simulate
from bstar.sim.stepwise import ReferenceEngine
from bstar.traffic import closed_loop, poisson, sessions

ARRAYS = ("scheduled_s", "first_token_s", "finish_s")


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n), equal_nan=True) for n in ARRAYS)


def test_one_replica_is_the_single_simulation():
    load = poisson(rate_per_s=20, input_tokens="lognormal:mean=900,cv=1.1", output_tokens=60, num_requests=60, seed=1)
    one, single = simulate_cluster(small(), load, engine="reference"), simulate(small(), load, engine="reference")
    assert same(one, single)
    assert np.array_equal(one.output_tokens, single.output_tokens)
    assert one.steps.gaps.mean_s == pytest.approx(single.steps.gaps.mean_s, rel=1e-12)


def test_a_replica_of_several_engines_is_so_many_behind_the_router():
    load = poisson(rate_per_s=40, input_tokens=500, output_tokens=60, num_requests=200, seed=1)
    two_of_two, four = simulate_cluster(small(dp=2), load, replicas=2), simulate_cluster(small(), load, replicas=4)
    assert same(two_of_two, four) and np.array_equal(two_of_two.replica, four.replica)
    assert two_of_two.steps.replicas == 4 and "2 engines" in two_of_two.notes[0]
    split = simulate_cluster(small(dp=2), load, prefill_replicas=1, decode_replicas=2)
    assert same(split, simulate_cluster(small(), load, prefill_replicas=2, decode_replicas=4))
    with pytest.raises(SpecError, match=r"autoscale: .*--dp 2"):
        simulate_cluster(small(dp=2), load, autoscaler=Autoscaler(target=4))


@pytest.mark.parametrize(("more", "says"), [
    ({"replicas": 2}, "replicas: .*--rate R/2"), ({"prefill_replicas": 1, "decode_replicas": 1}, "prefill-replicas: "),
    ({"router": "random"}, "attention_dp: "),
])  # fmt: skip
def test_ranks_that_step_together_are_not_put_behind_a_router(more, says):
    moe = bstar.deployment(model="mixtral-8x7b", gpu="h200-sxm-141gb", attention_dp=2)
    load = poisson(rate_per_s=4, input_tokens=500, output_tokens=60, num_requests=20, seed=1)
    with pytest.raises(SpecError, match=says):
        simulate_cluster(moe, load, **more)


@examples(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), async_scheduling=st.booleans(), caching=st.booleans(), blocks=st.integers(60, 200),
    policy=st.sampled_from(["fcfs", "priority"]), rate=st.sampled_from([2.0, 20.0, 2000.0]),
)  # fmt: skip
def test_one_replica_is_the_single_engine_in_every_setting(seed, async_scheduling, caching, blocks, policy, rate):
    rng = np.random.default_rng(seed)
    load = mixed(25, rate, seed, priority=rng.integers(0, 3, 25), prefix_group=rng.integers(-1, 2, 25))
    settings = tight(blocks, async_scheduling=async_scheduling, enable_prefix_caching=caching, policy=policy)
    single = ReferenceEngine(settings, load, affine).run()
    ledger = cluster(load, 1, "round-robin", settings=settings, figures=affine).ledger
    assert same(ledger, single)
    assert np.array_equal(ledger.preemptions, single.preemptions)
    assert np.array_equal(ledger.cached_tokens, single.cached_tokens)


def test_closed_loop_and_sessions_on_one_replica_are_the_single_simulation():
    for load in (
        closed_loop(concurrency=5, input_tokens=300, output_tokens=20, num_requests=30, seed=2),
        sessions(rate_per_s=3, turns=3, input_tokens=100, output_tokens=20, think_s="0.5s", num_sessions=8, seed=2),
    ):
        one = simulate_cluster(small(), load, engine="reference")
        single = simulate(small(), load, engine="reference")
        assert same(one, single)
        assert np.array_equal(one.arrival_s, single.arrival_s)


def test_round_robin_is_every_nth_request_alone():
    load, n = mixed(60, 50.0, 3), 3
    together = cluster(load, n, "round-robin", settings=tight(), figures=affine).ledger
    for k in range(n):
        alone = ReferenceEngine(tight(), load.take(np.arange(k, 60, n)), affine).run()
        for name in ARRAYS:
            assert np.array_equal(getattr(together, name)[k::n], getattr(alone, name))


@pytest.mark.parametrize("router", sorted(BLIND))
def test_a_blind_router_splits_before_anything_runs(router):
    load = mixed(60, 50.0, 4, session=np.arange(60) % 7 - 1, prefix_group=np.arange(60) % 5 - 1)
    split = Router(router, load, seed=9).split(4)
    assert np.array_equal(cluster(load, 4, router, settings=tight(), figures=affine, seed=9).ledger.replica, split)


def test_every_router_serves_every_token():
    load = mixed(40, 60.0, 5, session=np.arange(40) % 5, prefix_group=np.arange(40) % 3)
    for router in ROUTERS:
        run = cluster(load, 4, router, settings=tight(enable_prefix_caching=True), figures=affine)
        assert np.array_equal(run.ledger.made, load.output_tokens), router
        assert run.ledger.replica.min() >= 0


def test_readable_and_compiled_servers_are_the_same():
    load = markov(rate_per_s=8.0, mean_s=0.5, count=300, seed=5)
    for router in ("random", "power-of-two", "least-outstanding"):
        ledger, (wait_s, _, replica) = cluster(load, 6, router).ledger, serve(load, 6, router)
        np.testing.assert_allclose(ledger.scheduled_s - ledger.arrival_s, wait_s, rtol=1e-9, atol=1e-9)
        assert np.array_equal(ledger.replica, replica)


def test_random_routing_makes_separate_single_servers():
    """A Poisson stream dealt at random is Poisson: each replica is M/M/1, mean wait ρ/(1 − ρ) services."""
    rho = 0.6
    load = markov(rate_per_s=8 * rho / 0.5, mean_s=0.5, count=200_000, seed=6)
    batches = serve(load, 8, "random")[0][20_000:].reshape(-1, 4500).mean(axis=1)
    half = 3.2 * batches.std(ddof=1) / np.sqrt(batches.size)
    assert half < 0.04
    assert batches.mean() == pytest.approx(0.5 * rho / (1 - rho), abs=half)


def test_the_more_a_router_sees_the_less_requests_wait():
    """Mean wait: M/M/c with one queue ≤ least outstanding ≤ power of two ≤ round robin ≤ random, on the same load."""
    replicas, rho, service_s = 8, 0.8, 0.5
    load = markov(rate_per_s=replicas * rho / service_s, mean_s=service_s, count=200_000, seed=7)
    names = ("least-outstanding", "power-of-two", "round-robin", "random")
    waits = [float(serve(load, replicas, router)[0][20_000:].mean()) for router in names]
    one_queue_s = mmc_mean_wait_s(replicas * rho / service_s, service_s, replicas)
    assert [one_queue_s, *waits] == sorted([one_queue_s, *waits])


def test_power_of_two_has_the_mean_field_queue():
    """P(queue ≥ k) → ρ^(2^k − 1) for many replicas (Vvedenskaya, Dobrushin and Karpelevich 1996)."""
    replicas, rho, service_s = 200, 0.7, 0.5
    load = markov(rate_per_s=replicas * rho / service_s, mean_s=service_s, count=200_000, seed=8)
    stay_s = float(serve(load, replicas, "power-of-two")[1][40_000:].mean())
    queue = sum(rho ** (2**k - 1) for k in range(1, 12))
    assert stay_s == pytest.approx(service_s * queue / rho, rel=0.02)


def test_one_replica_with_many_seats_is_one_queue_for_many_servers():
    """Requests of one token a step of constant length: a replica of c seats is M/G/c; at c = 1 it is M/M/1."""
    load, rho = markov(rate_per_s=0.5 / 0.5, mean_s=0.5, count=200_000, seed=9), 0.5
    assert serve(load, 1, "round-robin")[0][20_000:].mean() == pytest.approx(0.5 * rho / (1 - rho), rel=0.05)


def test_a_session_stays_where_it_began():
    load = sessions(rate_per_s=5, turns=4, input_tokens=80, output_tokens=10, think_s="0.2s", num_sessions=12, seed=3)
    run = simulate_cluster(small(enable_prefix_caching=True), load, replicas=3, router="session-affinity")
    for session in np.unique(load.session):
        assert np.unique(run.replica[load.session == session]).size == 1
    spread = simulate_cluster(small(enable_prefix_caching=True), load, replicas=3, router="random")
    assert run.cached_tokens.sum() > spread.cached_tokens.sum()


def test_prefix_affinity_finds_what_is_cached():
    group = np.arange(60) % 6
    load = mixed(60, 4.0, 9, prefix_group=group, prefix_tokens=np.zeros(60, dtype=np.int64))
    load = replace(load, input_tokens=load.input_tokens + 512, prefix_tokens=np.full(60, 512))
    settings = tight(4000, enable_prefix_caching=True)
    near = cluster(load, 3, "prefix-affinity", settings=settings, figures=affine).ledger
    blind = cluster(load, 3, "random", settings=settings, figures=affine).ledger
    hashed = cluster(load, 3, "prefix-hash", settings=settings, figures=affine).ledger
    assert near.cached_tokens.sum() > blind.cached_tokens.sum()
    assert all(np.unique(hashed.replica[group == g]).size == 1 for g in range(6))


def test_same_seed_same_bits():
    load = mixed(40, 60.0, 5)
    runs = [cluster(load, 4, "power-of-two", settings=tight(), figures=affine, seed=s).ledger for s in (1, 1, 2)]
    assert same(runs[0], runs[1])
    assert not np.array_equal(runs[0].replica, runs[2].replica)


def test_bad_input_is_one_line():
    load = mixed(5, 1.0, 0)
    with pytest.raises(SpecError, match="router: 'best'"):
        simulate_cluster(small(), load, router="best")
    with pytest.raises(SpecError, match="replicas"):
        simulate_cluster(small(), load, replicas=0)
    with pytest.raises(SpecError, match="decode replicas"):
        simulate_cluster(small(), load, prefill_replicas=1)
