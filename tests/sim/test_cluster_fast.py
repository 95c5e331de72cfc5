"""Compiled clusters: the same replicas for the same requests at the same times as step by step."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_helpers import small
from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from bstar.errors import SpecError
from bstar.sim.cluster import ROUTERS, Autoscaler, Drain, Failure, simulate_cluster
from bstar.sim.cluster.fast import run_fast
from bstar.sim.cluster.loop import Fleet
from bstar.sim.cluster.routers import Router
from bstar.sim.deployed import deployed_engine
from bstar.sim.step_cost import step_cost
from bstar.traffic import closed_loop, poisson, sessions

TIMES = ("arrival_s", "scheduled_s", "first_token_s", "finish_s")
RANDOM = [Phase.explicit, Phase.reuse, Phase.generate]  # an example takes long: smaller ones are not looked for
COUNTS = ("replica", "output_tokens", "num_preemptions", "cached_tokens")


def assert_twins(d, load, **options):
    slow, fast = (simulate_cluster(d, load, engine=e, **options) for e in ("reference", "kernel"))
    for name in COUNTS:
        assert np.array_equal(getattr(slow, name), getattr(fast, name)), name
    for name in TIMES:
        np.testing.assert_allclose(getattr(slow, name), getattr(fast, name), rtol=1e-9, err_msg=name)
    assert fast.steps.gaps.mean_s == pytest.approx(slow.steps.gaps.mean_s, rel=1e-9)
    assert fast.replica_s == pytest.approx(slow.replica_s, rel=1e-9)
    return slow, fast


@examples(max_examples=25, deadline=None, phases=RANDOM)
@given(
    seed=st.integers(0, 10_000), router=st.sampled_from(ROUTERS), replicas=st.integers(1, 5),
    rate=st.sampled_from([5.0, 40.0, 400.0]), pipelined=st.booleans(), caching=st.booleans(),
)  # fmt: skip
def test_compiled_and_readable_clusters_are_the_same(seed, router, replicas, rate, pipelined, caching):
    rng = np.random.default_rng(seed)
    load = poisson(rate_per_s=rate, input_tokens="lognormal:mean=500,cv=1", output_tokens="uniform:1-60",
                   num_requests=40, seed=seed)  # fmt: skip
    from dataclasses import replace

    group = rng.integers(-1, 4, 40)
    load = replace(load, prefix_group=group, prefix_tokens=np.where(group < 0, 0, load.input_tokens // 2),
                   session=rng.integers(-1, 5, 40))  # fmt: skip
    d = small(async_scheduling=pipelined, enable_prefix_caching=caching, max_num_seqs=8)
    assert_twins(d, load, replicas=replicas, router=router, seed=seed)


def test_windows_preemption_and_priorities_are_the_same_too():
    load = poisson(rate_per_s=60, input_tokens=1500, output_tokens=300, num_requests=50, seed=3)
    tight = small(gpu_memory_utilization=0.27, max_model_len=8192, enable_prefix_caching=False)
    for router in ("least-outstanding", "power-of-two", "least-kv"):
        assert_twins(tight, load, replicas=2, router=router)
    import bstar

    windows = bstar.deployment(model="gemma-3-27b", gpu="h100-sxm-80gb")
    assert_twins(windows, poisson(rate_per_s=10, input_tokens=1000, output_tokens=100, num_requests=25, seed=1),
                 replicas=2, router="least-outstanding")  # fmt: skip


@examples(max_examples=25, deadline=None, phases=RANDOM)
@given(
    seed=st.integers(0, 10_000), router=st.sampled_from(ROUTERS), replicas=st.integers(1, 4), pipelined=st.booleans(),
    think=st.sampled_from(["0s", "0.2s", "exponential:mean=0.1s"]), closed=st.booleans(),
)  # fmt: skip
def test_closed_loops_and_sessions_are_the_same(seed, router, replicas, pipelined, think, closed):
    d = small(async_scheduling=pipelined, max_num_seqs=8, enable_prefix_caching=not closed)
    load = sessions(rate_per_s=20, turns="uniform:1-4", input_tokens="uniform:20-200", output_tokens="uniform:1-30",
                    think_s=think, num_sessions=15, seed=seed)  # fmt: skip
    if closed:
        load = closed_loop(concurrency=9, input_tokens="uniform:20-900", output_tokens="uniform:1-40", num_requests=50,
                           think_s=think, seed=seed)  # fmt: skip
    assert_twins(d, load, replicas=replicas, router=router, seed=seed)


def test_refused_prompts_go_nowhere():
    load = poisson(rate_per_s=20, input_tokens="uniform:100-2000", output_tokens=10, num_requests=30, seed=1)
    d = small(max_model_len=1024)
    assert_twins(d, load, replicas=2, router="power-of-two")
    run = simulate_cluster(d, load, replicas=2)
    assert (run.replica[run.rejected] == -1).all() and (run.output_tokens[~run.rejected] == 10).all()


def test_logs_that_fill_up_are_put_aside(monkeypatch):
    load = poisson(rate_per_s=100, input_tokens=100, output_tokens="uniform:1-100", num_requests=600, seed=1)
    whole = simulate_cluster(small(), load, replicas=2, router="least-kv")
    monkeypatch.setattr("bstar.sim.cluster.stack.ROWS", 64)
    pieces = simulate_cluster(small(), load, replicas=2, router="least-kv")
    assert np.array_equal(whole.finish_s, pieces.finish_s)
    assert whole.steps.num_steps == pieces.steps.num_steps > 1000


def test_threads_change_nothing():
    load = poisson(rate_per_s=50, input_tokens=300, output_tokens=50, num_requests=500, seed=1)
    deployed = deployed_engine(small())
    cost = step_cost(small(), max_tokens=deployed.settings.max_num_batched_tokens,
                     max_sequences=deployed.settings.max_num_seqs)  # fmt: skip
    router, fleet = Router("random", load), Fleet(replicas=4)
    runs = [run_fast(deployed.settings, cost, load, router, fleet, threads=t) for t in (1, 2)]
    assert np.array_equal(runs[0].out.finish_s, runs[1].out.finish_s)


def test_pools_are_not_compiled():
    load = poisson(rate_per_s=20, input_tokens=100, output_tokens=10, num_requests=10, seed=1)
    with pytest.raises(SpecError, match="kernel takes"):
        simulate_cluster(small(), load, prefill_replicas=1, decode_replicas=1, engine="kernel")


@examples(max_examples=25, deadline=None, phases=RANDOM)
@given(
    seed=st.integers(0, 10_000), router=st.sampled_from(ROUTERS), replicas=st.integers(2, 4),
    rate=st.sampled_from([10.0, 60.0, 400.0]), pipelined=st.booleans(), caching=st.booleans(),
    at_s=st.floats(0.05, 1.5), back=st.booleans(),
)  # fmt: skip
def test_failures_are_the_same(seed, router, replicas, rate, pipelined, caching, at_s, back):
    load = poisson(rate_per_s=rate, input_tokens="lognormal:mean=500,cv=1", output_tokens="uniform:1-60",
                   num_requests=40, seed=seed)  # fmt: skip
    d = small(async_scheduling=pipelined, enable_prefix_caching=caching, max_num_seqs=8)
    failures = [Failure(replica=0, at_s=at_s, back_s=0.2 if back else None),
                Failure(replica=1, at_s=at_s + 0.1, back_s=0.1)]  # fmt: skip
    assert_twins(d, load, replicas=replicas, router=router, seed=seed, failures=failures, startup_s=0.1,
                 drains=[Drain(replica=replicas - 1, at_s=at_s / 2)] if replicas > 2 else [])  # fmt: skip


@examples(max_examples=8, deadline=None, phases=RANDOM)
@given(
    seed=st.integers(0, 10_000), router=st.sampled_from(ROUTERS), interval_s=st.sampled_from([0.0, 0.07, 0.5]),
    metric=st.sampled_from(["concurrency", "kv"]), startup_s=st.sampled_from([0.0, 0.3]), rate=st.floats(20, 200),
)  # fmt: skip
def test_autoscaled_clusters_are_the_same(seed, router, interval_s, metric, startup_s, rate):
    load = poisson(rate_per_s=rate, input_tokens="lognormal:mean=500,cv=1", output_tokens="uniform:1-60",
                   num_requests=60, seed=seed)  # fmt: skip
    scaler = Autoscaler(metric=metric, target=3 if metric == "concurrency" else 0.004, interval_s=interval_s,
                        stabilization_s=0.3, tolerance_fraction=0.0)  # fmt: skip
    d = small(async_scheduling=bool(seed % 2), enable_prefix_caching=False, max_num_seqs=8)
    slow, fast = assert_twins(d, load, replicas=1, router=router, seed=seed, autoscaler=scaler, startup_s=startup_s)
    assert [s[1:] for s in slow.states] == [s[1:] for s in fast.states]
    assert [s[0] for s in slow.states] == pytest.approx([s[0] for s in fast.states], rel=1e-9)
