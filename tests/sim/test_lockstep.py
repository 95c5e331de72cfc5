"""Lock-step data parallelism, compiled, is the readable one: every time, preemption and figure of the log."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import bstar
from bstar.sim.deployed import DeployedEngine, deployed_engine
from bstar.sim.policies.lockstep import LockStepScheduler, lock_step_figures
from bstar.sim.policies.lockstep_fast import run_lock_step
from bstar.sim.policies.registry import run_of
from bstar.sim.stepwise import EngineRun, ReferenceEngine
from bstar.traffic import closed_loop, poisson, sessions
from bstar.traffic.load import Traffic

TIMES = ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "preemptions", "cached_tokens", "made_tokens")


def readable(deployed: DeployedEngine, load: Traffic) -> EngineRun:
    one, ranks = deployed.settings, deployed.deployment.parallel.attention_dp
    scheduler = LockStepScheduler(one, ranks)
    together = replace(one, num_blocks=one.num_blocks * ranks)
    figures = lock_step_figures(deployed.model, scheduler)
    return ReferenceEngine(together, load, figures, scheduler=scheduler).run()


@st.composite
def deployments(draw: st.DrawFn) -> DeployedEngine:
    ranks, seats = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([2, 8, 64]))
    eager = draw(st.booleans())
    d = bstar.deployment(
        model="qwen3-30b-a3b", gpu="h100-sxm-80gb", attention_dp=ranks, ep=ranks, max_num_seqs=seats,
        max_num_batched_tokens=draw(st.sampled_from([64, 256, 1024])), enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()), num_gpu_blocks_override=draw(st.sampled_from([26, 40, 5000])),
        max_model_len=384, scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])), enforce_eager=eager,
        cudagraph_max_size=None if eager else draw(st.sampled_from([2, 64])))  # fmt: skip
    return deployed_engine(d)


@st.composite
def loads(draw: st.DrawFn) -> Traffic:
    seed, n = draw(st.integers(0, 1000)), draw(st.integers(4, 40))
    inputs, outputs = "uniform:10-290", "uniform:1-80"
    if draw(st.booleans()):
        return closed_loop(draw(st.integers(1, 20)), inputs, outputs, n, seed=seed)
    rate = draw(st.sampled_from([5.0, 50.0, 400.0]))
    return poisson(rate_per_s=rate, input_tokens=inputs, output_tokens=outputs, num_requests=n, seed=seed)


def compare(fast: EngineRun, slow: EngineRun) -> None:
    for name in TIMES:
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=1e-9, atol=1e-12, err_msg=name)
    for name in ("made", "sequences"):
        assert int(getattr(fast.log, name) @ fast.log.steps) == int(getattr(slow.log, name).sum()), name
    for name in ("flops", "compute_s", "memory_s", "prompt_tokens", "preempted"):
        assert math.isclose(getattr(fast.log, name).sum(), getattr(slow.log, name).sum(), rel_tol=1e-9), name
    assert fast.log.used_blocks.max() == slow.log.used_blocks.max()
    assert np.allclose(np.sort(fast.log.single_gap_s), np.sort(slow.log.single_gap_s), rtol=1e-9)


@settings(max_examples=15, deadline=None)
@given(deployed=deployments(), load=loads())
def test_compiled_is_readable(deployed: DeployedEngine, load: Traffic) -> None:
    compare(run_lock_step(deployed, load), readable(deployed, load))


def test_conversations_and_stops() -> None:
    """Sessions come back to any rank; a run that is stopped at times goes on as if it had not been."""
    d = bstar.deployment(model="qwen3-30b-a3b", gpu="h100-sxm-80gb", attention_dp=4, ep=4, max_num_seqs=8,
                         max_num_batched_tokens=512, max_model_len=4096)  # fmt: skip
    deployed = deployed_engine(d)
    load = sessions(rate_per_s=20.0, turns=3, first_input_tokens=200, input_tokens=50, output_tokens="uniform:5-40",
                    think_s="100ms", num_sessions=12, seed=3)  # fmt: skip
    compare(run_lock_step(deployed, load), readable(deployed, load))


def test_the_policy_is_compiled_unless_asked_otherwise() -> None:
    d = bstar.deployment(model="qwen3-30b-a3b", gpu="h100-sxm-80gb", attention_dp=2, ep=2)
    load = closed_loop(8, 100, 20, 16, seed=0)
    fast = run_of("lock-step")(deployed_engine(d), load, math.inf, None)
    slow = run_of("lock-step", "reference")(deployed_engine(d), load, math.inf, None)
    assert fast.implementation == "kernel" and slow.implementation != "kernel"
    compare(fast, slow)
