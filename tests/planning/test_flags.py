"""Fixing a flag never beats leaving it free: the planner searches what it may choose before it ranks."""

import math
import random

import pytest

from bstar.planning import plan as planner
from bstar.planning.lanes import TOKEN_BUDGETS

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "llama-3.1-70b", "qwen2.5-7b", "deepseek-v2-lite")
GPUS = ("a100-sxm-40gb", "h100-sxm-80gb", "l40s", "rtx-4090", "a10g", "h200-sxm-141gb")
LENGTHS = (("lognormal:mean=1500,cv=1", 16), (2000, 200), ("lognormal:mean=800,cv=1", "lognormal:mean=300,cv=1"),
           (200, 600), (6000, 80))  # fmt: skip
SLOS = ("ttft=5s,tpot=50ms", "ttft=2s,tpot=50ms", "chat", "tpot=25ms", "ttft=1s", "e2e=30s")


def question(rng):
    """A model, GPUs and a load, as the arguments of a plan."""
    inputs, outputs = rng.choice(LENGTHS)
    load = rng.choice(({"rate_per_s": 2}, {"rate_per_s": 20}, {"rate_per_s": 60}, {"concurrency": 60}, {}))
    return rng.choice(MODELS), rng.sample(GPUS, 2), {
        "input_tokens": inputs, "output_tokens": outputs, "slo": rng.choice(SLOS), "max_model_len": 16_384, **load,
    }  # fmt: skip


def cost(result):
    """USD an hour, or a million tokens where there is no load; inf where nothing is feasible."""
    if not result.feasible:
        return math.inf
    best = result.best
    fixed = result.workload.rate_per_s is not None or result.workload.concurrency is not None
    return best.cost.usd_per_hour if fixed else best.cost.usd_per_million_output_tokens


def no_flag_beats_freedom(rng, rounds):
    for _ in range(rounds):
        model, gpus, load = question(rng)
        free = cost(planner.plan(model, gpus, most_candidates=1, **load))
        flags = ({"max_num_batched_tokens": rng.choice(TOKEN_BUDGETS)}, {"max_num_seqs": rng.choice((4, 16, 50, 256))},
                 {"max_num_seqs": rng.randint(1, 300)})  # fmt: skip
        # Without a load capacities compete, which are found to 0.4 %.
        slack = 1.0 if "rate_per_s" in load or "concurrency" in load else 0.98
        for flag in flags:
            fixed = cost(planner.plan(model, gpus, most_candidates=1, **load, **flag))
            assert fixed >= free * slack * (1 - 1e-9), f"{model} {gpus} {load} {flag}: {fixed} beats {free}"


@pytest.mark.parametrize("seed", range(2))
def test_fixing_a_flag_never_beats_leaving_it_free(seed):
    no_flag_beats_freedom(random.Random(seed), 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_fixing_a_flag_never_beats_leaving_it_free_over_many_questions(seed):
    no_flag_beats_freedom(random.Random(seed), 20)


@pytest.mark.parametrize(("gpus", "load", "gpus_needed"), [
    ("a100-sxm-40gb", {"input_tokens": "lognormal:mean=1500,cv=1", "output_tokens": 16, "slo": "ttft=5s,tpot=50ms"}, 3),
    ("a100-sxm-80gb", {"input_tokens": 2000, "output_tokens": 200, "slo": "ttft=2s,tpot=50ms"}, 5),
])  # fmt: skip
def test_a_smaller_token_budget_is_found_where_prompts_stall_the_streams(gpus, load, gpus_needed):
    best = planner.plan("llama-3.1-8b", gpus, rate_per_s=20, most_candidates=3, **load).best
    assert best.num_gpus <= gpus_needed
    assert best.deployment.engine.max_num_batched_tokens < 2048
    assert f"--max-num-batched-tokens {best.deployment.engine.max_num_batched_tokens}" in best.launch_command


def test_choices_of_dtype_are_never_worse_than_one_of_them():
    load = {"input_tokens": 1000, "output_tokens": 300, "rate_per_s": 12, "slo": "ttft=2s,tpot=40ms"}
    both = cost(planner.plan("llama-3.1-8b", "l40s,a10g", kv_cache_dtypes="auto,fp8", weight_dtypes="auto,fp8", **load))
    for kv in ("auto", "fp8"):
        for weights in ("auto", "fp8"):
            one = planner.plan("llama-3.1-8b", "l40s,a10g", kv_cache_dtypes=kv, weight_dtypes=weights, **load)
            assert both <= cost(one)
