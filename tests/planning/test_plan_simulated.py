"""What a plan says of its best candidates is what the simulator says of the deployments that it launches."""

from __future__ import annotations

import pytest

import bstar
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
