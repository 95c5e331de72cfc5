"""What a plan says of its best candidates is what the simulator says of the deployments that it launches."""

from __future__ import annotations

import pytest

import bstar
from bstar.errors import SpecError
from bstar.traffic import poisson

slow = pytest.mark.slow


@pytest.mark.parametrize(("model", "gpu", "lengths", "rate", "slo"), [
    ("deepseek-r1", "h200", (4000, 1000), 5.0, "tpot=50ms"),  # data-parallel attention, few seats a rank
    pytest.param("qwen3-235b-a22b", "h200", (2000, 500), 10.0, "ttft=2s,tpot=40ms", marks=slow),
    pytest.param("gpt-oss-120b", "h100", (3000, 800), 10.0, "ttft=2s,tpot=30ms", marks=slow),
    pytest.param("llama-3.3-70b", "h100", (2000, 500), 6.0, "ttft=2s,tpot=50ms", marks=slow),
])  # fmt: skip
def test_the_best_candidates_hold_in_the_simulator(model, gpu, lengths, rate, slo):
    plan = bstar.plan(model, gpu, input_tokens=lengths[0], output_tokens=lengths[1], rate_per_s=rate, slo=slo)
    for candidate in [c for c in plan.candidates[:3] if c.layout.pp == 1]:
        load = poisson(rate / candidate.replicas, *lengths, 1500, seed=1, warmup_requests=300)
        seen = bstar.simulate(candidate.deployment, load, slo=plan.slo).summary
        assert candidate.predicted.tpot_s.mean == pytest.approx(seen.tpot_s.mean, rel=0.15), str(candidate.layout)
        assert seen.slo_attainment_fraction > candidate.slo_attainment_fraction - 0.05, str(candidate.layout)


def test_the_command_launches_what_was_planned():
    """Also the flag that keeps CUDA graphs as wide with few seats as with many."""
    plan = bstar.plan("deepseek-r1", "h200", input_tokens=4000, output_tokens=1000, rate_per_s=5, slo="tpot=50ms")
    candidate = next(c for c in plan.candidates if c.deployment.engine.max_num_seqs < 256)
    assert "--max-cudagraph-capture-size 512" in candidate.launch_command
    launched = bstar.deployment(**bstar_keywords(candidate.launch_command), gpu="h200")
    assert launched.engine.cudagraph_max_size == candidate.deployment.engine.cudagraph_max_size
    assert launched.engine.max_num_seqs == candidate.deployment.engine.max_num_seqs
    fixed = bstar.plan("deepseek-r1", "h200", input_tokens=4000, output_tokens=1000, rate_per_s=5, slo="tpot=50ms",
                       max_num_seqs=candidate.deployment.engine.max_num_seqs,
                       max_num_batched_tokens=candidate.deployment.engine.max_num_batched_tokens)
    same = next(c for c in fixed.candidates if c.layout == candidate.layout)
    assert (same.replicas, same.predicted.tpot_s.mean) == (candidate.replicas, candidate.predicted.tpot_s.mean)


def bstar_keywords(command):
    from bstar.codec.engine_command import parse_command

    parsed = parse_command(command)
    return {**parsed.settings, "model": "deepseek-r1", "engine": parsed.engine_at_version}


@pytest.mark.parametrize("gpu", ["l40s", pytest.param("h100", marks=slow), pytest.param("a100-sxm-80gb", marks=slow)])
@pytest.mark.parametrize("lengths", [(1000, 200), (4000, 100), (100, 1000)])
def test_without_an_slo_the_queue_does_not_grow(gpu, lengths):
    """A rate and no limits: enough replicas for it, each with a token budget that lets its prompts in."""
    plan = bstar.plan("llama-3.1-8b", gpu, input_tokens=lengths[0], output_tokens=lengths[1], rate_per_s=20)
    best = plan.best
    assert best.slo_attainment_fraction == 1.0
    assert best.predicted.ttft_s.p99 < 60.0
    assert best.goodput_requests_per_s == pytest.approx(20.0)
    load = poisson(20 / best.replicas, *lengths, 4000, seed=1)
    seen = bstar.simulate(best.deployment, load)
    assert seen.summary.ttft_s.p99 < 60.0


@pytest.mark.parametrize(("model", "gpu", "lengths", "clients", "slo"), [
    ("minimax-m2", "h100", (4000, 1), 300, "ttft=0.5s,e2e=30s"),
    ("qwen3-32b", "h200", (1000, 32), 200, "ttft=2s,tpot=80ms"),
    ("mixtral-8x7b", "h100", (2000, 32), 200, None),
    ("qwen3-235b-a22b-fp8", "h100", (200, 300), 500, "ttft=1s"),
    ("qwen3-next-80b-a3b", "b200", (64, 2), 2000, None),
])  # fmt: skip
def test_all_clients_of_a_closed_loop_are_somewhere(model, gpu, lengths, clients, slo):
    """Little's law for every candidate, pipelines and data-parallel attention too."""
    plan = bstar.plan(model, gpu, input_tokens=lengths[0], output_tokens=lengths[1], concurrency=clients, slo=slo)
    for candidate in plan.candidates:
        inside = candidate.requests_per_s * candidate.predicted.e2e_s.mean
        assert inside == pytest.approx(clients, rel=0.06), str(candidate.layout)
        assert candidate.capacity_requests_per_s >= candidate.requests_per_s * (1 - 1e-9)


def test_one_seat_is_one_request_in_all_stages():
    plan = bstar.plan("qwen3-next-80b-a3b", "l40s", input_tokens=8000, output_tokens=2, rate_per_s=20,
                      slo="ttft=2s,tpot=80ms", attainment_fraction=0.9)
    for candidate in (c for c in plan.candidates if c.layout.pp > 1):
        alone = bstar.simulate(candidate.deployment, bstar.traffic.closed_loop(1, 8000, 2, num_requests=20))
        seats = candidate.deployment.engine.max_num_seqs
        assert 20 / candidate.replicas < 1.1 * seats / alone.summary.e2e_s.mean


def test_a_prompt_that_is_not_split_fits_into_a_step():
    plan = bstar.plan("qwen3-30b-a3b", "l40s", input_tokens="lognormal:mean=1000,cv=1", output_tokens=16, rate_per_s=10,
                      slo="ttft=2s,tpot=80ms", engine="trtllm")
    for candidate in plan.candidates:
        engine = candidate.deployment.engine
        assert engine.enable_chunked_prefill or engine.max_num_batched_tokens >= engine.max_model_len


def test_gpus_that_cost_nothing_and_other_corners():
    load = {"input_tokens": 1000, "output_tokens": 200, "rate_per_s": 2}
    assert bstar.plan("llama-3.1-8b", "h100", prices={"h100-sxm-80gb": 0}, **load).best.cost.usd_per_hour == 0
    small = bstar.plan("llama-3.1-8b", "h100", max_num_batched_tokens=128, **load)
    assert small.best.deployment.engine.max_num_batched_tokens == 128
    twice = bstar.plan("llama-3.1-8b", "h100", weight_dtypes="auto,auto,bf16", **load)
    assert len({str(c.layout) for c in twice.candidates}) == len(twice.candidates)
    with pytest.raises(SpecError, match="burstiness"):
        bstar.plan("llama-3.1-8b", "h100", input_tokens=9, output_tokens=9, concurrency=2, burstiness=2.0)


def test_a_closed_loop_costs_at_its_mean():
    one, two = (bstar.plan("llama-3.1-8b", "h100", input_tokens=1000, output_tokens=200, concurrency=10,
                           peak_factor=factor).best for factor in (1.0, 2.0))
    assert two.output_tokens_per_s < 1.1 * one.output_tokens_per_s
