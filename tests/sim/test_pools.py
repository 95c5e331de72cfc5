"""The compiled loop over two pools is the one that takes every step; its times are those of the step model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bstar
from bstar.errors import SpecError
from bstar.latency.step_model import step_model
from bstar.physics.batch import BatchShape
from bstar.sim.cluster.pool_cost import Acceptance, DecodeCost, PromptCost, curve_at, decode_cost, prompt_cost
from bstar.sim.cluster.pool_run import DecodePool, PoolRequests, PoolRun, PromptPool, run_pools
from bstar.sim.cluster.pool_stepwise import DecodeSeconds, PromptSeconds, StepwisePools
from bstar.specs.deployment import Deployment

TIMES = ("arrival_s", "prefilled_s", "landed_s", "first_s", "finish_s")


@cache
def worker(windows: bool) -> Deployment:
    """One worker of four GPUs: with attention data parallelism, or with sliding windows and tensor parallelism."""
    if windows:
        return bstar.deployment(model="gpt-oss-120b", gpu="h100-sxm-80gb", tp=4)
    return bstar.deployment(model="deepseek-r1", gpu="h200-sxm-141gb", engine="trtllm", attention_dp=8, ep=8,
                            max_num_seqs=64)


@cache
def costs(windows: bool) -> tuple[PromptCost, DecodeCost]:
    """With an entry for every count, so that curves are exact."""
    d = worker(windows)
    return prompt_cost(d, max_tokens=2048, max_prompts=64, dense=1 << 15), decode_cost(d, max_sequences=64)


def step_seconds(deployment: Deployment) -> tuple[PromptSeconds, DecodeSeconds]:
    """Of the step model itself: a worker's step is that of its slowest rank, whose experts see the tokens of all."""
    model = step_model(deployment)

    def slowest(ranks: list[list[tuple[float, float, float, bool]]]) -> float:
        tokens, dp = sum(new for rank in ranks for new, _, _, _ in rank), model.step.attention_dp
        seconds = 0.0
        for rank in filter(None, ranks):
            shape = BatchShape.from_rows([(new, after, count * dp, prompt) for new, after, count, prompt in rank])
            values = np.array(model.step.values(shape))
            values[model.step.expert_tokens_index] = tokens
            seconds = max(seconds, float(model.expected_s(values)))
        return seconds

    return (
        lambda chunks: slowest([[(float(n), float(n + done), 1.0, True) for n, done in rank] for rank in chunks]),
        lambda contexts: slowest([[(1.0, float(c), 1.0, False) for c in rank] for rank in contexts]),
    )


@st.composite
def loads(draw: st.DrawFn, ranks: int) -> tuple[PoolRequests, PromptPool, DecodePool, str]:
    clients = draw(st.integers(1, 16))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = clients * draw(st.integers(1, 4))
    moved = rng.uniform(0, 0.05, n) * draw(st.sampled_from([0.0, 1.0]))
    requests = PoolRequests.of(rng.integers(20, 700, n), rng.integers(0, 40, n), moved, clients=clients,
                               front_s=draw(st.sampled_from([0.0, 0.003])))  # fmt: skip
    routers = st.sampled_from(["in-turn", "least-outstanding"])
    prefill = PromptPool(
        workers=draw(st.integers(1, 3)), ranks=ranks, prompts=draw(st.sampled_from([1, 2, 64])),
        tokens=draw(st.sampled_from([300, 1000, 2048])), chunked=draw(st.booleans()), shared=draw(st.booleans()),
        router=draw(routers))  # fmt: skip
    decode = DecodePool(
        workers=draw(st.integers(1, 3)), ranks=ranks, seats=draw(st.sampled_from([1, 2, 64])),
        room=draw(st.sampled_from([1 << 30, 2000])), shared=draw(st.booleans()), ahead=draw(st.booleans()),
        router=draw(routers))  # fmt: skip
    return requests, prefill, decode, draw(st.sampled_from(["prefill", "landing", "decode-step"]))


@pytest.mark.parametrize("windows", [False, True])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_compiled_is_stepwise(windows: bool, data: st.DataObject) -> None:
    requests, prefill, decode, shown = data.draw(loads(1 if windows else 8))
    fast = run_pools(requests, prefill, decode, *costs(windows), shown=shown)
    slow = StepwisePools(requests, prefill, decode, *step_seconds(worker(windows)), shown=shown).run()
    for name in TIMES:
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=1e-9, atol=1e-12, err_msg=name)
    both_sides = requests.steps > 0
    np.testing.assert_array_equal(fast.rank[both_sides], slow.rank[both_sides])


def test_step_times_are_the_model_s() -> None:
    """All ranks alike: own and shared parts add up to the step of the whole worker."""
    for windows in (False, True):
        d, (prompts, steps) = worker(windows), costs(windows)
        model, ranks = step_model(d), d.parallel.attention_dp
        for sequences, context in ((1, 500), (7, 90), (64, 3000)):
            whole = float(model.expected_s(model.step.values(BatchShape.decode(sequences * ranks, context))))
            reach = np.where(steps.span_limit == 0, context, np.minimum(steps.span_limit, context))
            kernels = curve_at(steps.own, sequences) + curve_at(steps.shared, sequences * ranks)
            host = steps.host_s + steps.host_sequence_s * sequences
            assert kernels + host + float(steps.span_rate @ reach) * sequences == pytest.approx(whole, rel=1e-9)
        assert prompts.own.token_s.size > 2048


def test_curves_between_their_entries() -> None:
    d = worker(False)
    long = prompt_cost(d, max_tokens=16_384, max_prompts=4).shared
    model = step_model(d)
    for tokens in (900, 5000, 77_777):
        values = np.zeros(len(model.step.statistics))
        values[model.step.expert_tokens_index] = tokens
        times = model.times(model.work_of(values))
        assert curve_at(long, tokens) == pytest.approx(float(times.fixed.sum() + times.body.sum()), rel=3e-3)


def run(requests: PoolRequests, decode: DecodePool, shown: str = "decode-step", **prefill: object) -> PoolRun:
    prompts, steps = costs(False)
    given = {"workers": 1, "ranks": 8, "tokens": 2048}
    return run_pools(requests, PromptPool(**{**given, **prefill}), decode, prompts, steps, shown=shown)


def test_who_has_no_seat_waits_for_one() -> None:
    """Eight clients on eight seats do not queue; sixteen do, and a wave takes as long."""
    few = PoolRequests.of([100] * 8, [50] * 8, 0.0, clients=8)
    many = PoolRequests.of([100] * 16, [50] * 16, 0.0, clients=16)
    pool = DecodePool(workers=1, ranks=8, seats=1, ahead=False)
    waves = run(many, pool)
    assert run(few, pool).finish_s.max() < 0.6 * waves.finish_s.max()
    assert np.sum(waves.first_s > waves.finish_s.min()) == 8


def test_more_prefill_workers_shorten_the_burst() -> None:
    requests = PoolRequests.of([700] * 64, [20] * 64, 0.0, clients=64)
    pool = DecodePool(workers=1, ranks=8)
    one, four = run(requests, pool, workers=1, prompts=1), run(requests, pool, workers=4, prompts=1)
    assert one.prefilled_s.max() / 4 <= four.prefilled_s.max() < one.prefilled_s.max() / 3  # the first goes alone


def test_first_token_in_the_order_of_who_shows_it() -> None:
    requests = PoolRequests.of([300] * 20, [30] * 20, 0.01, clients=5)
    pool = DecodePool(workers=1, ranks=8)
    prefill, landing, step = (run(requests, pool, shown).first_s for shown in ("prefill", "landing", "decode-step"))
    assert (prefill + 0.0099 < landing).all() and (landing < step).all()


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(SpecError, match="no place"):
        run(PoolRequests.of([300], [30], 0.0, clients=1), DecodePool(workers=1, room=100))
    with pytest.raises(SpecError, match="client"):
        PoolRequests.of([], [], 0.0, clients=1)


def test_drafting_makes_more_tokens_a_step_and_longer_steps() -> None:
    assert Acceptance(probability=0.5).tokens_per_step(2) == 1.75
    assert Acceptance(probability=0.5).tokens_per_step(0) == 1.0
    assert Acceptance(probability=0.8, decay=0.5).tokens_per_step(2) == pytest.approx(1 + 0.8 + 0.8 * 0.4)
    d = worker(False)
    plain, drafting = decode_cost(d, max_sequences=8), decode_cost(d, max_sequences=8, drafted=3)
    assert curve_at(drafting.own, 4) > curve_at(plain.own, 4)
    assert curve_at(drafting.shared, 32) > curve_at(plain.shared, 32)
    assert (drafting.span_rate >= plain.span_rate).all()
