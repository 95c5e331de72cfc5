"""Every policy keeps the laws that hold for all, and one of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import bstar
from bstar.errors import SpecError
from bstar.physics.batch import BatchShape
from bstar.sim.deployed import StepFigures, deployed_engine, step_figures
from bstar.sim.policies.lockstep import LockStepScheduler
from bstar.sim.policies.options import options_from, split_policy
from bstar.sim.policies.plan import PolicyPlan
from bstar.sim.policies.registry import engine_policy, policy_names, run_of
from bstar.sim.policies.sglang import SglangOptions, SglangScheduler
from bstar.sim.policies.speculative import SpeculationOptions, SpeculativeScheduler, expected_tokens, uniform
from bstar.sim.policies.swap import SwapOptions, SwapScheduler
from bstar.sim.policies.trtllm import TrtllmOptions, TrtllmScheduler
from bstar.sim.scheduler import Plan, Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.sim.static import run_static
from bstar.sim.stepwise import EngineRun, ReferenceEngine
from bstar.traffic.load import Traffic

BASE = SchedulerSettings(block_size=4, num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)
LINK = SwapOptions(block_bytes=4e6, link_bytes_per_s=1e9, latency_s=1e-4)
Make = Callable[[SchedulerSettings], Scheduler]


def seconds(shape: BatchShape) -> StepFigures:
    """A step of a made-up engine."""
    total = 0.01 + 1e-4 * float(shape.new_tokens.sum()) + 1e-6 * float(shape.context_after.sum())
    return StepFigures(seconds=total, flops=0.0, compute_s=0.0, memory_s=0.0)


def sglang(**options: object) -> Make:
    return lambda s: SglangScheduler(s, SglangOptions(**options))  # type: ignore[arg-type]


def trtllm(**options: object) -> Make:
    return lambda s: TrtllmScheduler(s, TrtllmOptions(**options))  # type: ignore[arg-type]


def speculative(*acceptance: float, **options: float) -> Make:
    return lambda s: SpeculativeScheduler(
        replace(s, async_scheduling=False), SpeculationOptions(acceptance=acceptance, **options)  # type: ignore[arg-type]
    )


TABLE: dict[str, Make] = {
    "sglang": sglang(),
    "sglang, whole prompts": sglang(chunked_prefill_size=0),
    "sglang, mixed": sglang(mixed_chunk=True),
    "sglang, polled": sglang(recv_interval=5),
    "sglang, reckless": sglang(conservativeness=0.0),
    "trtllm, no-evict": trtllm(),
    "trtllm, max-utilization": trtllm(capacity="max-utilization"),
    "trtllm, waiting for company": trtllm(wait_iters=3, wait_ratio=0.5),
    "swap": lambda s: SwapScheduler(s, LINK),
    "swap, little host memory": lambda s: SwapScheduler(s, replace(LINK, host_blocks=12)),
    "speculative": speculative(0.8, 0.6, 0.5),
    "lock-step": lambda s: LockStepScheduler(s, 2),
}


@dataclass(frozen=True)
class Watched:
    """A run, and every step of it."""

    run: EngineRun
    scheduler: Scheduler
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    plan: Plan
    prompts: int  # requests that took prompt tokens
    decodes: int
    free: int
    cut: list[int]  # tokens of the prompt chunks that do not end a prompt


def run(make: Make, s: SchedulerSettings, load: Traffic) -> Watched:
    """Serve `load`, looking at the blocks and at the batch after every plan."""
    scheduler = make(s)
    watched: list[Step] = []
    plan_of = scheduler.schedule

    def schedule() -> Plan:
        plan = plan_of()
        prompts = sum(r.computed - t < r.target for r, t in plan.tokens.items())
        cut = [t for r, t in plan.tokens.items() if r.computed < r.target]
        watched.append(Step(plan, prompts, len(plan.tokens) - prompts, len(scheduler.pool.free), cut))
        ranks = scheduler.ranks if isinstance(scheduler, LockStepScheduler) else [scheduler]
        for rank in ranks:
            held = {b for r in rank.running for b in r.blocks}
            held |= {b for r in getattr(rank, "batch", []) for b in r.blocks}
            assert len(held) + len(rank.pool.free) + 1 == s.num_blocks
            assert all(n >= 0 for n in rank.pool.references)
            for r in rank.running:
                assert len(r.blocks) * s.block_size >= min(r.computed, s.max_model_len)
        return plan

    scheduler.schedule = schedule  # type: ignore[method-assign]
    used = replace(s, async_scheduling=scheduler.settings.async_scheduling)
    if isinstance(scheduler, LockStepScheduler):
        used = replace(used, num_blocks=s.num_blocks * len(scheduler.ranks))
    result = ReferenceEngine(used, load, seconds, scheduler=scheduler).run()
    return Watched(result, scheduler, watched)


def load_of(arrival: list[float], prompt: list[int], output: list[int]) -> Traffic:
    return Traffic(arrival_s=np.array(arrival), input_tokens=np.array(prompt), output_tokens=np.array(output))


@st.composite
def loads(draw: st.DrawFn) -> Traffic:
    n = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3]), min_size=n, max_size=n))
    prompts = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    outputs = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    return load_of(list(np.cumsum(gaps)), prompts, outputs)


@st.composite
def engines(draw: st.DrawFn) -> SchedulerSettings:
    return replace(
        BASE, num_blocks=draw(st.sampled_from([40, 60, 300])), max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        async_scheduling=draw(st.booleans()), enable_prefix_caching=draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
@hypothesis_settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tokens_are_conserved_and_blocks_never_negative(name: str, data: st.DataObject) -> None:
    s, load = data.draw(engines()), data.draw(loads())
    out = run(TABLE[name], s, load)
    assert out.run.made_tokens.tolist() == load.output_tokens.tolist()
    assert np.isfinite(out.run.finish_s).all()
    assert (out.run.first_token_s >= out.run.arrival_s).all() and (out.run.finish_s >= out.run.first_token_s).all()
    # Every token between a first and a last one has its gap.
    lived = (out.run.finish_s - out.run.first_token_s).sum()
    gaps = out.run.log.gaps
    assert math.isclose(gaps.total_s, lived, rel_tol=1e-9, abs_tol=1e-9)
    assert all(step.free >= 0 for step in out.steps)
    budget = s.token_budget * (2 if name == "lock-step" else 1)
    if name != "sglang, whole prompts":
        extra = s.max_num_seqs if "mixed" not in name and name.startswith("sglang") else 0
        assert all(sum(step.plan.tokens.values()) <= budget + extra for step in out.steps)
    assert all(
        not pool.pool.references[b]
        for pool in (out.scheduler.ranks if isinstance(out.scheduler, LockStepScheduler) else [out.scheduler])
        for b in range(s.num_blocks)
    )


@pytest.mark.parametrize("name", ["sglang", "sglang, whole prompts", "sglang, polled", "sglang, reckless"])
@hypothesis_settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sglang_never_mixes_prompts_and_decodes(name: str, data: st.DataObject) -> None:
    out = run(TABLE[name], data.draw(engines()), data.draw(loads()))
    assert not any(step.prompts and step.decodes for step in out.steps)


def test_sglang_mixed_chunks_do_mix_and_stall_nobody() -> None:
    load = load_of([0.0, 0.0, 0.2], [8, 8, 60], [60, 60, 5])
    plain, mixed = run(sglang(chunked_prefill_size=16), BASE, load), run(
        sglang(chunked_prefill_size=16, mixed_chunk=True), BASE, load)
    assert any(step.prompts and step.decodes for step in mixed.steps)

    def longest_gap(w: Watched) -> float:
        return max(w.run.log.single_gap_s.max(initial=0.0), w.run.log.base_s.max())

    # Unmixed, the two wait for four chunks of the third; mixed, for one at a time.
    assert longest_gap(plain) > 2 * longest_gap(mixed)
    assert plain.run.first_token_s[2] <= mixed.run.first_token_s[2]


def test_sglang_admits_by_the_growth_it_expects() -> None:
    # 59 blocks of 4 = 236 tokens, three requests of 40 + 80: at ratio 1 one at a time has room to end.
    load = load_of([0.0, 0.05, 0.1], [40, 40, 40], [80, 80, 80])
    careful = run(sglang(conservativeness=10.0), BASE, load)
    assert (careful.run.scheduled_s[1:] >= careful.run.finish_s[:-1]).all()
    assert careful.run.preemptions.sum() == 0
    bold = run(sglang(conservativeness=0.0), BASE, load)  # ratio 0: let in at once, and too many
    assert bold.run.scheduled_s[2] < 0.2
    assert bold.run.preemptions.sum() > 0


def test_sglang_retracts_the_fewest_tokens_made_and_queues_them_last() -> None:
    s = replace(BASE, num_blocks=46, max_num_seqs=4)
    load = load_of([0.0, 0.05, 0.10], [30, 30, 30], [40, 40, 40])
    out = run(sglang(conservativeness=0.0, retract_steps=1), s, load)
    first = next(step for step in out.steps if step.plan.preempted)
    assert first.plan.preempted[0].rank == 2  # it came last, so it had made the fewest
    assert out.run.finish_s[2] == out.run.finish_s.max()


def test_sglang_ratio_falls_linearly_to_its_floor() -> None:
    o = SglangOptions()
    assert o.first_ratio == 0.7 and math.isclose(o.least_ratio, 0.098)
    s = replace(BASE, max_model_len=2000, num_blocks=600)
    out = run(sglang(), s, load_of([0.0], [4], [301]))
    assert isinstance(out.scheduler, SglangScheduler)
    assert math.isclose(out.scheduler.ratio, 0.7 - 300 * o.decay)  # 300 decode steps: half the way


def test_sglang_polls_every_so_many_decode_steps() -> None:
    load = load_of([0.0, 0.011], [4, 4], [60, 4])
    waits = [run(sglang(recv_interval=k), BASE, load).run.scheduled_s[1] for k in (1, 5, 20)]
    assert waits[0] < waits[1] < waits[2]


def test_sglang_overlap_costs_a_step_of_the_seat() -> None:
    """The end of a request is noticed a step late: whoever waits for the seat gets it a step later."""
    s = replace(BASE, max_num_seqs=1)
    load = load_of([0.0, 0.0], [4, 4], [10, 10])
    plain, overlapped = run(sglang(), s, load), run(sglang(), replace(s, async_scheduling=True), load)
    steps = [sum(bool(x.plan.tokens) for x in w.steps) for w in (plain, overlapped)]
    assert steps[1] == steps[0] + 2  # one wasted step each


@pytest.mark.parametrize("chunked", [False, True])
@hypothesis_settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_trtllm_no_evict_never_preempts(chunked: bool, data: st.DataObject) -> None:
    s = replace(data.draw(engines()), enable_chunked_prefill=chunked)
    out = run(trtllm(), s, data.draw(loads()))
    assert out.run.preemptions.sum() == 0
    assert not any(step.plan.preempted for step in out.steps)


def test_trtllm_no_evict_reserves_the_whole_answer() -> None:
    """Blocks for prompt + answer: 59 // ceil(120 / 4) = 1 at a time; max-utilization takes all, and pauses some."""
    load = load_of([0.0] * 3, [40] * 3, [80] * 3)
    careful, bold = run(trtllm(), BASE, load), run(trtllm(capacity="max-utilization"), BASE, load)
    assert max(len(step.plan.tokens) for step in careful.steps) == 1
    assert max(len(step.plan.tokens) for step in bold.steps) == 3
    assert bold.run.preemptions.tolist()[0] == 0 and bold.run.preemptions.sum() > 0
    longer = run(trtllm(answer_tokens=160), BASE, load)  # what a request allows counts, not what it gets
    assert max(len(step.plan.tokens) for step in longer.steps) == 1


def test_trtllm_max_utilization_pauses_the_last_in_flight() -> None:
    out = run(trtllm(capacity="max-utilization"), BASE, load_of([0.0, 0.01, 0.02], [60, 60, 60], [60, 60, 60]))
    paused = [r.rank for step in out.steps for r in step.plan.preempted]
    assert paused and paused[0] == 2 and 0 not in paused


def test_trtllm_chunks_are_multiples_of_the_unit_but_for_the_last() -> None:
    s = replace(BASE, num_blocks=300, max_num_batched_tokens=50)
    load = load_of([0.0] * 3, [60, 45, 33], [5] * 3)
    out = run(trtllm(chunk_unit=8), s, load)
    cut = [tokens for step in out.steps for tokens in step.cut]
    assert cut and all(tokens % 8 == 0 for tokens in cut)
    whole = run(trtllm(), replace(s, enable_chunked_prefill=False, max_num_batched_tokens=64), load)
    first = [step.plan for step in whole.steps if step.prompts]
    assert [sum(p.tokens.values()) for p in first][:2] == [60, 46]  # a whole prompt a step; decodes ride along


@hypothesis_settings(max_examples=30, deadline=None)
@given(s=engines(), load=loads(), iters=st.integers(1, 6), ratio=st.sampled_from([0.3, 0.7, 1.0]))
def test_trtllm_prompts_wait_for_company_beside_generation(
    s: SchedulerSettings, load: Traffic, iters: int, ratio: float
) -> None:
    """They go when the step would hold enough, or when some have been passed over for so many steps."""
    waited = 0
    for step in run(trtllm(wait_iters=iters, wait_ratio=ratio), replace(s, enable_prefix_caching=False), load).steps:
        if step.decodes and step.prompts:
            tokens = sum(step.plan.tokens.values())
            assert tokens >= ratio * s.token_budget or waited >= iters
        waited = 0 if step.prompts and step.decodes else waited + bool(step.decodes)
    plain = run(trtllm(), s, load)
    never = run(trtllm(wait_iters=0, wait_ratio=0.0), s, load)
    assert plain.run.first_token_s.tolist() == never.run.first_token_s.tolist()


def test_trtllm_waiting_delays_the_prompt_and_spares_the_others_a_step() -> None:
    load = load_of([0.0, 0.05], [8, 8], [40, 4])
    at_once, later = run(trtllm(), BASE, load), run(trtllm(wait_iters=5, wait_ratio=0.9), BASE, load)
    delay = later.run.scheduled_s[1] - at_once.run.scheduled_s[1]
    assert 4.5 * 0.01 < delay < 6 * 0.0105
    alone = load_of([0.0], [8], [4])
    assert run(trtllm(wait_iters=5, wait_ratio=0.9), BASE, alone).run.scheduled_s[0] == 0.0  # nobody generates


def test_swap_moves_what_it_must_and_no_faster_than_the_link() -> None:
    load = load_of([0.0] * 4, [40] * 4, [60] * 4)
    out = run(TABLE["swap"], BASE, load)
    scheduler = out.scheduler
    assert isinstance(scheduler, SwapScheduler) and out.run.preemptions.sum() > 0
    moved = sum(s.plan.extra_s for s in out.steps if isinstance(s.plan, PolicyPlan))
    assert moved >= scheduler.moved_blocks * LINK.block_bytes / LINK.link_bytes_per_s
    # Nothing is computed twice: prompt tokens + all outputs but each last one.
    computed = sum(t for step in out.steps for t in step.plan.tokens.values())
    assert computed == sum(p + o - 1 for p, o in zip(load.input_tokens, load.output_tokens, strict=True))
    assert scheduler.host_blocks == 0 and not scheduler.kept
    recomputed = run(Scheduler, BASE, load)
    assert sum(t for step in recomputed.steps for t in step.plan.tokens.values()) > computed


def test_swap_wins_where_the_link_is_fast_and_loses_where_it_is_slow() -> None:
    load = load_of([0.0] * 4, [40] * 4, [60] * 4)

    def end_s(rate: float) -> float:
        link = replace(LINK, link_bytes_per_s=rate)
        return float(run(lambda s: SwapScheduler(s, link), BASE, load).run.finish_s.max())

    recomputed = run(Scheduler, BASE, load).run.finish_s.max()
    assert end_s(1e12) < recomputed < end_s(1e7)


@given(st.lists(st.floats(0, 1), max_size=6))
def test_speculation_makes_the_expected_tokens(acceptance: list[float]) -> None:
    exact = 1 + sum(float(np.prod(acceptance[: i + 1])) for i in range(len(acceptance)))
    assert math.isclose(expected_tokens(acceptance), exact, rel_tol=1e-12)


def test_speculation_draws_have_that_mean() -> None:
    acceptance = (0.8, 0.7, 0.5)
    s = replace(BASE, max_model_len=4_000, num_blocks=1_000, max_num_batched_tokens=512)
    out = run(speculative(*acceptance, seed=7), s, load_of([0.0], [10], [3_000]))
    steps = sum(step.decodes > 0 for step in out.steps)
    mean, expected = (3_000 - 1) / steps, expected_tokens(acceptance)
    reached = np.cumprod(acceptance)
    square = sum((i + 1) ** 2 * p for i, p in enumerate(np.append(1, reached) - np.append(reached, 0)))
    assert abs(mean - expected) < 4 * math.sqrt((square - expected**2) / steps)
    luck = np.array([uniform(5, r, m) for r in range(30) for m in range(100)])
    assert abs(luck.mean() - 0.5) < 0.02 and luck.min() >= 0 and luck.max() < 1


@hypothesis_settings(max_examples=30, deadline=None)
@given(s=engines(), load=loads())
def test_speculation_without_drafts_is_the_plain_engine(s: SchedulerSettings, load: Traffic) -> None:
    s = replace(s, async_scheduling=False)
    plain, none = run(Scheduler, s, load).run, run(speculative(), s, load).run
    assert plain.finish_s.tolist() == none.finish_s.tolist()
    assert plain.first_token_s.tolist() == none.first_token_s.tolist()
    assert plain.preemptions.tolist() == none.preemptions.tolist()


def test_speculation_of_certain_drafts_takes_one_step_for_k_plus_one_tokens() -> None:
    load = load_of([0.0], [10], [41])
    out = run(speculative(1.0, 1.0, 1.0, draft_s=0.002), replace(BASE, num_blocks=300), load)
    assert [step.decodes for step in out.steps].count(1) == 10  # 40 tokens, 4 a step
    assert out.run.log.made.tolist() == [1] + [4] * 10
    plan = out.steps[1].plan
    assert isinstance(plan, PolicyPlan) and math.isclose(plan.extra_s, 0.006)


def test_a_draft_model_costs_its_decode_steps() -> None:
    deployed = deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb"))
    load = load_of([0.0], [100], [61])

    def end_s(extra: str) -> float:
        run = run_of(f"speculative:acceptance=0/0/0{extra}")(deployed, load, math.inf, None)
        return float(run.finish_s[0])

    drafting = (end_s(",draft_model=llama-3.2-1b") - end_s("")) / (60 * 3)  # 60 steps of three drafts, all rejected
    floor = 2 * 1.2e9 / 3.35e12  # its weights, read once
    assert floor < drafting < 3 * floor


@hypothesis_settings(max_examples=25, deadline=None)
@given(s=engines(), load=loads())
def test_lock_step_of_one_rank_is_that_rank(s: SchedulerSettings, load: Traffic) -> None:
    alone, ranked = run(Scheduler, s, load).run, run(lambda x: LockStepScheduler(x, 1), s, load).run
    assert alone.finish_s.tolist() == ranked.finish_s.tolist()



def test_lock_step_of_equal_ranks_is_one_engine_and_unequal_ones_wait() -> None:
    deployment = bstar.deployment(model="deepseek-v3", gpu="h200-sxm-141gb", attention_dp=8, ep=8, max_num_seqs=64)
    deployed = deployed_engine(deployment)
    equal = load_of([0.0] * 16, [100] * 16, [50] * 16)
    alike = run_of("lock-step")(deployed, equal, math.inf, None)
    alone = ReferenceEngine(  # two of them, on a rank that takes the others to be like it
        deployed.settings, load_of([0.0] * 2, [100] * 2, [50] * 2), lambda shape: step_figures(deployed.model, shape)
    ).run()
    assert np.allclose(alike.finish_s, alone.finish_s[0], rtol=1e-9)
    # One long prompt on one rank: seven others wait for it in every step.
    skewed = run_of("lock-step")(deployed, load_of([0.0] * 8, [4000] + [4] * 7, [50] * 8), math.inf, None)
    short = run_of("lock-step")(deployed, load_of([0.0] * 8, [4] * 8, [50] * 8), math.inf, None)
    assert (skewed.first_token_s == skewed.first_token_s[0]).all()
    assert skewed.first_token_s[1] > 2 * short.first_token_s[1]


def test_lock_step_counts_the_steps_of_idle_ranks() -> None:
    out = run(lambda s: LockStepScheduler(s, 4), BASE, load_of([0.0], [8], [11]))
    assert isinstance(out.scheduler, LockStepScheduler)
    assert (out.scheduler.rank_steps, out.scheduler.dummy_steps) == (44, 33)


@pytest.mark.parametrize("knob", [{"max_num_active_seqs": 3}, {"max_num_scheduled_tokens": 20},
                                  {"watermark_fraction": 0.3}, {"long_prefill_token_threshold": 7}])  # fmt: skip
def test_vllm_admission_knobs_bind(knob: dict[str, float]) -> None:
    load = load_of([0.0] * 8, [30] * 8, [40] * 8)
    free, bound = run(Scheduler, BASE, load), run(Scheduler, replace(BASE, **knob), load)  # type: ignore[arg-type]
    most = [max(len(step.plan.tokens) for step in w.steps) for w in (free, bound)]
    tokens = [max(sum(step.plan.tokens.values()) for step in w.steps) for w in (free, bound)]
    chunk = [max(t for step in w.steps for t in step.plan.tokens.values()) for w in (free, bound)]
    if "max_num_active_seqs" in knob:
        assert most[0] > most[1] == 3
    if "max_num_scheduled_tokens" in knob:
        assert tokens[0] > tokens[1] == 20
    if "long_prefill_token_threshold" in knob:
        first = [max(t for step in w.steps[:1] for t in step.plan.tokens.values()) for w in (free, bound)]
        assert first == [30, 7] and chunk[1] == 7
    if "watermark_fraction" in knob:
        admitting = [s.free for s in bound.steps if s.prompts and s.decodes]
        assert min(admitting) >= int(0.3 * 60) - s_growth(bound)
        assert bound.run.preemptions.sum() <= free.run.preemptions.sum()
    assert bound.run.made_tokens.tolist() == free.run.made_tokens.tolist()


def s_growth(w: Watched) -> int:
    """Blocks that decodes may take in a step."""
    return max(step.decodes for step in w.steps)


def test_policies_have_names_and_options() -> None:
    assert policy_names() == ("sglang", "sglang-mixed", "trtllm-no-evict", "trtllm-max-utilization", "swap",
                              "speculative", "lock-step")  # fmt: skip
    assert [engine_policy(e) for e in ("vllm", "sglang", "trtllm")] == ["continuous", "sglang", "trtllm-no-evict"]
    assert split_policy("sglang:recv-interval=4,mixed_chunk=true") == (
        "sglang", {"recv_interval": "4", "mixed_chunk": "true"})
    options = options_from(SglangOptions, {"recv_interval": "4", "chunked_prefill_size": "none"}, policy="sglang")
    assert options == SglangOptions(recv_interval=4)
    assert options_from(SpeculationOptions, {"acceptance": "0.8/0.5"}, policy="s").acceptance == (0.8, 0.5)


@pytest.mark.parametrize("text", ["orca", "sglang:x=1", "sglang:recv_interval", "sglang:recv_interval=0",
                                  "speculative", "speculative:acceptance=1.5", "swap:link_bytes_per_s=0"])  # fmt: skip
def test_what_a_policy_does_not_know_is_an_error(text: str) -> None:
    deployed = deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb"))
    with pytest.raises(SpecError):
        run_of(text)(deployed, load_of([0.0], [10], [10]), math.inf, None)


@pytest.mark.parametrize("text", ["sglang", "sglang-mixed", "trtllm-no-evict", "trtllm-max-utilization", "swap",
                                  "speculative:acceptance=0.7/0.6,draft_s=0.001"])  # fmt: skip
def test_a_deployment_runs_under_every_policy(text: str) -> None:
    deployed = deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb"))
    load = load_of([0.0, 0.01, 0.02, 0.5], [200, 300, 400, 100], [20, 30, 20, 10])
    out = run_of(text)(deployed, load, math.inf, None)
    assert out.made_tokens.tolist() == [20, 30, 20, 10] and np.isfinite(out.finish_s).all()


def test_the_flags_of_a_deployment_reach_its_scheduler() -> None:
    load = load_of([0.0, 0.05], [400, 400], [200, 20])

    def second(engine: str, **flags: object) -> float:
        d = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine=engine, **flags)  # type: ignore[arg-type]
        return float(run_of(engine_policy(d.engine.name))(deployed_engine(d), load, math.inf, None).scheduled_s[1])

    assert second("sglang", scheduler_recv_interval=40) > second("sglang") + 0.1
    waits = second("trtllm", batch_wait_timeout_iters=20, batch_wait_max_tokens_ratio=0.9)
    assert waits > second("trtllm") + 0.05
    rides = run_of("sglang")(
        deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="sglang",
                                         enable_mixed_chunk=True)), load, math.inf, None)  # fmt: skip
    assert rides.log.prompt_tokens[rides.log.sequences > 1].sum() > 0


def test_trtllm_refuses_a_prompt_longer_than_a_step() -> None:
    deployed = deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="trtllm"))
    assert not deployed.settings.enable_chunked_prefill
    with pytest.raises(SpecError, match="max_num_batched_tokens"):
        run_of("trtllm-no-evict")(deployed, load_of([0.0], [9000], [10]), math.inf, None)


def test_a_request_that_cannot_be_served_is_named() -> None:
    with pytest.raises(SpecError, match="never"):
        run(trtllm(), replace(BASE, num_blocks=11), load_of([0.0], [30], [30]))
    with pytest.raises(SpecError, match=r"outgrows|never"):
        run(sglang(), replace(BASE, num_blocks=11), load_of([0.0], [30], [30]))


def test_static_batching_uses_half_of_its_slots() -> None:
    """Answers of 20 and 500 tokens in one batch: 520 of 1,000 slot-steps make a token."""
    deployed = deployed_engine(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb"))
    out = run_static(deployed, load_of([0.0, 0.0], [100, 100], [20, 500]))
    slots = int(out.log.sequences @ out.log.steps)
    assert (int(out.made_tokens.sum()), slots) == (520, 1000)
