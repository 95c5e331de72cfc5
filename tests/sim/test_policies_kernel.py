"""The compiled policies take the decisions of the readable ones, at the same times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bstar.metrics.gaps import TokenGaps
from bstar.physics.batch import BatchShape
from bstar.sim.deployed import StepFigures
from bstar.sim.kernel.cost import CACHED, StepCost
from bstar.sim.policies.fast import PolicyKernel, policy_kernel
from bstar.sim.policies.sglang import SglangOptions, SglangScheduler
from bstar.sim.policies.swap import SwapOptions, SwapScheduler
from bstar.sim.policies.trtllm import TrtllmOptions, TrtllmScheduler
from bstar.sim.settings import SchedulerSettings
from bstar.sim.stepwise import EngineRun, ReferenceEngine
from bstar.traffic.load import Traffic

STEP_S, TOKEN_S, CONTEXT_S, CACHED_S = 0.01, 1e-4, 1e-6, 3e-6


def cost(window: int = 0) -> StepCost:
    """A made-up engine's step times, with a sliding window where one is given."""
    none, zero = np.zeros(0), np.zeros(0, dtype=np.int64)
    linear = np.zeros(4)
    linear[CACHED] = CACHED_S
    tokens = np.arange(4000) * TOKEN_S
    limits = np.array([0, window] if window else [0], dtype=np.int64)
    return StepCost(
        decode_s=STEP_S + tokens, span_rate=np.full(limits.size, CONTEXT_S), span_limit=limits,
        span_restarts=np.zeros(limits.size, dtype=np.int64), token_s=tokens, sampled_s=np.zeros(4000), linear=linear,
        prompt_fixed_s=0.0, decode_fixed_s=0.0, step_s=STEP_S, row_compute=np.zeros((0, 4)),
        row_memory=np.zeros((0, 4)), row_base=none, row_phase=zero, power=3.0, prompt_limit=zero,
        prompt_restarts=zero, prompt_gathers=zero, prompt_stride=none,
    )  # fmt: skip


def figures(window: int):  # type: ignore[no-untyped-def]
    def of(shape: BatchShape) -> StepFigures:
        prompt, context = shape.is_prefill, shape.context_after
        seen = context[~prompt].sum() + (np.minimum(context[~prompt], window).sum() if window else 0.0)
        cached = (context - shape.new_tokens)[prompt].sum()
        total = STEP_S + TOKEN_S * shape.new_tokens.sum() + CONTEXT_S * seen + CACHED_S * cached
        return StepFigures(seconds=float(total), flops=0.0, compute_s=0.0, memory_s=0.0)

    return of


@st.composite
def loads(draw: st.DrawFn) -> Traffic:
    n = draw(st.integers(1, 25))
    pick = st.sampled_from
    prompts = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    outputs = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    if draw(st.booleans()):
        gaps = draw(st.lists(pick([0.0, 0.001, 0.0137, 0.07, 0.31]), min_size=n, max_size=n))
        return Traffic(
            arrival_s=np.cumsum(gaps), input_tokens=np.array(prompts), output_tokens=np.array(outputs))
    clients = draw(st.integers(1, n))
    arrival = np.full(n, np.nan)
    arrival[:clients] = 0.0
    think = draw(st.lists(pick([0.0, 0.013, 0.2]), min_size=n, max_size=n))
    return Traffic(arrival_s=arrival, input_tokens=np.array(prompts), output_tokens=np.array(outputs),
                   think_s=np.array(think), concurrency=clients)  # fmt: skip


@st.composite
def engines(draw: st.DrawFn) -> SchedulerSettings:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return SchedulerSettings(
        block_size=pick(1, 4, 7), num_blocks=pick(135, 160, 400), max_num_seqs=pick(1, 3, 8, 20),
        max_num_batched_tokens=pick(64, 65, 120), max_model_len=pick(90, 130), async_scheduling=pick(True, False),
        enable_chunked_prefill=pick(True, False),
    )  # fmt: skip


@st.composite
def sglang_options(draw: st.DrawFn) -> SglangOptions:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return SglangOptions(
        chunked_prefill_size=pick(None, 0, 10, 33), max_prefill_tokens=pick(40, 16384),
        conservativeness=pick(0.0, 0.3, 1.0, 2.0), mixed_chunk=pick(True, False), recv_interval=pick(1, 1, 3, 10),
        answer_tokens=pick(None, None, 80), decay_steps=pick(10, 600),
    )  # fmt: skip


def same(kernel: PolicyKernel, run: EngineRun) -> None:
    s = kernel.state
    assert s.preemptions.tolist() == run.preemptions.tolist()
    for mine, its in ((s.scheduled_s, run.scheduled_s), (s.first_s, run.first_token_s), (s.finish_s, run.finish_s)):
        np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(kernel.requests.arrival_s, run.arrival_s, rtol=1e-9)
    assert (s.known - kernel.requests.prompt).tolist() == run.made_tokens.tolist()
    # Every block is free again, and the log has every step and every gap.
    runs = kernel.runs
    assert int(runs[:, 1].sum()) == int(run.log.steps.sum())
    assert int((runs[:, 1] * runs[:, 5]).sum()) >= int(run.made_tokens.sum())
    mine = TokenGaps(base_s=runs[:, 2], slope_s=runs[:, 3], steps=runs[:, 1].astype(np.int64),
                     weight=runs[:, 4].astype(np.int64), single_s=kernel.gaps_s)  # fmt: skip
    assert mine.count == run.log.gaps.count
    np.testing.assert_allclose(mine.total_s, (s.finish_s - s.first_s).sum(), rtol=1e-9, atol=1e-9)
    for q in (0.1, 0.5, 0.99):
        if mine.count:
            np.testing.assert_allclose(mine.quantile(q), run.log.gaps.quantile(q), rtol=1e-9)


@hypothesis_settings(max_examples=70, deadline=None)
@given(s=engines(), options=sglang_options(), load=loads(), window=st.sampled_from([0, 0, 50]))
def test_sglang_twins(s: SchedulerSettings, options: SglangOptions, load: Traffic, window: int) -> None:
    scheduler = SglangScheduler(s, options)
    run = ReferenceEngine(s, load, figures(window), scheduler=scheduler).run()
    kernel = policy_kernel(s, options, load, cost(window))
    assert kernel.advance()
    same(kernel, run)
    assert kernel.state.n[0] == s.num_blocks - 1


@hypothesis_settings(max_examples=70, deadline=None)
@given(s=engines(), load=loads(), window=st.sampled_from([0, 0, 50]), unit=st.sampled_from([None, 8]),
       capacity=st.sampled_from(["guaranteed-no-evict", "max-utilization"]), slices=st.booleans(),
       wait=st.sampled_from([(0, 0.0), (0, 0.0), (3, 0.5), (20, 0.9), (7, 1.0)]))  # fmt: skip
def test_trtllm_twins(
    s: SchedulerSettings, load: Traffic, window: int, unit: int | None, capacity: str, slices: bool,
    wait: tuple[int, float],
) -> None:
    options = TrtllmOptions(capacity=capacity, chunk_unit=unit, wait_iters=wait[0], wait_ratio=wait[1])  # type: ignore[arg-type]
    if capacity == "max-utilization":  # a paused request comes back with what it has made: the budget must hold it
        s = replace(s, max_num_batched_tokens=130)
    run = ReferenceEngine(s, load, figures(window), scheduler=TrtllmScheduler(s, options)).run()
    kernel = policy_kernel(s, options, load, cost(window))
    until = 0.0
    while slices and not kernel.advance(until):
        until += 0.37
    assert kernel.advance()
    same(kernel, run)
    assert kernel.state.n[0] == s.num_blocks - 1


@hypothesis_settings(max_examples=70, deadline=None)
@given(s=engines(), load=loads(), window=st.sampled_from([0, 0, 50]), threshold=st.sampled_from([0, 0, 9]),
       watermark=st.sampled_from([0.0, 0.2]), reserve=st.booleans(), host=st.sampled_from([None, None, 0]))  # fmt: skip
def test_swapping_twins(
    s: SchedulerSettings, load: Traffic, window: int, threshold: int, watermark: float, reserve: bool, host: int | None
) -> None:
    """With no host memory it is vLLM's own preemption."""
    s = replace(s, long_prefill_token_threshold=threshold, watermark_fraction=watermark,
                scheduler_reserve_full_isl=reserve, max_num_batched_tokens=130)  # fmt: skip
    options = SwapOptions(block_bytes=1e6, link_bytes_per_s=1e9, latency_s=1e-4, host_blocks=host)
    run = ReferenceEngine(s, load, figures(window), scheduler=SwapScheduler(s, options)).run()
    kernel = policy_kernel(s, options, load, cost(window))
    assert kernel.advance()
    same(kernel, run)
    assert kernel.state.n[0] == s.num_blocks - 1


@pytest.mark.parametrize("text", ["swap", "sglang", "sglang-mixed", "trtllm-no-evict", "trtllm-max-utilization"])
def test_a_deployment_gets_the_same_times_from_both(text: str) -> None:
    import math

    import bstar
    from bstar.sim.deployed import deployed_engine
    from bstar.sim.policies.registry import run_of

    deployed = deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb"))
    rng = np.random.default_rng(1)
    load = Traffic(arrival_s=np.cumsum(rng.exponential(0.05, 40)), input_tokens=rng.integers(10, 3000, 40),
                   output_tokens=rng.integers(1, 60, 40))  # fmt: skip
    slow = run_of(text + ":engine=reference")(deployed, load, math.inf, None)
    fast = run_of(text)(deployed, load, math.inf, None)
    assert (slow.implementation, fast.implementation) == ("reference", "kernel")
    np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-9)
    np.testing.assert_allclose(fast.first_token_s, slow.first_token_s, rtol=1e-9)
    np.testing.assert_allclose(fast.log.flops.sum(), slow.log.flops.sum(), rtol=1e-9)
    assert fast.log.mbu is not None and slow.log.mbu is not None
    np.testing.assert_allclose(fast.log.mbu, slow.log.mbu, rtol=1e-6)
