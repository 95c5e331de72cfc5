"""The physics sheet: its numbers follow from its formulas, its landmarks mean what they say, its rules bind."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.codec.build import build_deployment
from bstar.errors import SpecError
from bstar.latency import decode_curve, decode_step_time
from bstar.planning.limits import floored, largest_batch_within
from bstar.planning.sheet import explain
from bstar.specs.slo import Slo, parse_slo
from bstar.specs.workload import Workload
from bstar.traffic.lengths import fixed, parse_lengths

CASES = [
    ("llama-3.1-8b", "h100-sxm-80gb", {}, 2000.0),
    ("llama-3.1-8b", "a100-sxm-80gb", {}, 512.0),
    ("llama-3.1-70b", "h100-sxm-80gb", {"tp": 4}, 8192.0),
    ("llama-3.1-70b", "h100-sxm-80gb", {"tp": 2, "pp": 2}, 2048.0),
    ("deepseek-r1", "h200-sxm-141gb", {"attention_dp": 8, "ep": 8}, 4096.0),
    ("qwen3-30b-a3b", "h100-sxm-80gb", {}, 4096.0),
    ("gemma-3-27b", "h100-sxm-80gb", {"tp": 2}, 16384.0),
]


def deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", **fields):
    return build_deployment(model, gpu, **{"max_model_len": 32768, **fields})


def number_of(text):
    found = re.match(r"-?[\d.]+(?:e[+-]?\d+)?", text)
    return float(found.group()) if found else None


@pytest.mark.parametrize(("model", "gpu", "layout", "context"), CASES)
def test_every_formula_can_be_checked_by_hand(model, gpu, layout, context):
    sheet = explain(deployment(model, gpu, **layout), context)
    checked = 0
    for row in sheet.formulas:
        text = row.substituted.replace("·", "*").replace("−", "-").replace(" ms", "")
        if "≤" in text or "B*" in text or "=" in text or not re.fullmatch(r"[\d\s.e+\-*/()]+", text):
            continue
        value = eval(text)
        scale = 1e3 if row.name == "bandwidth_floor" else 1e3 if row.name.startswith("time_per") else 1.0
        assert value * scale == pytest.approx(number_of(row.result), rel=2e-4), row
        checked += 1
    assert checked >= 7
    for name in ("step_time.floor", "step_time.expected"):
        row = next(r for r in sheet.formulas if r.name == name)
        parts = [float(part.rsplit(" ", 1)[1]) for part in row.substituted.split(" + ")]
        assert sum(parts) == pytest.approx(number_of(row.result), rel=2e-3)


@pytest.mark.parametrize(("model", "gpu", "layout", "context"), CASES)
def test_contract_and_consistency(model, gpu, layout, context):
    d = deployment(model, gpu, **layout)
    sheet = explain(d, context, batch=16, slo=Slo(tpot_s=0.1))
    out = json.loads(json.dumps(sheet.to_dict(), allow_nan=False))
    for key in ("ridge_point", "arithmetic_intensity", "landmarks", "regions", "step_time_s", "bound_by",
                "time_per_output_token_amortized_s", "recommended_max_num_seqs", "formulas"):  # fmt: skip
        assert key in out
    assert set(out["landmarks"]) >= {"b_star", "b_gemm", "b_compute", "b_mem", "b_slo", "b_tok"}
    step, each = out["step_time_s"], out["time_per_output_token_amortized_s"]
    assert 0 < step["floor"] <= step["expected"]
    assert each["expected"] == pytest.approx(step["expected"] / 16)
    assert step["expected"] == pytest.approx(decode_step_time(d, 16, context).expected_s)
    assert sum(e["expected_s"] for e in out["by_operator"]) == pytest.approx(step["expected"])
    edges = out["regions"]
    assert edges[0]["from"] == 0
    assert edges[-1]["to"] is None
    assert all(a["to"] == b["from"] for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize(("model", "gpu", "layout", "context"), CASES)
def test_b_slo_is_the_largest_batch_inside_the_limit(model, gpu, layout, context):
    d = deployment(model, gpu, **layout)
    limit = 1.7 * decode_step_time(d, 1, context).expected_s
    b_slo = explain(d, context, slo=Slo(tpot_s=limit)).b_slo
    inside, outside = decode_curve(d, np.array([b_slo, b_slo * 1.01]), context).expected_s
    assert inside <= limit * (1 + 1e-9)
    assert outside > limit
    assert explain(d, context, slo=Slo(tpot_s=limit * 1.2)).b_slo > b_slo
    alone = decode_step_time(d, 1, context).expected_s
    assert explain(d, context, slo=Slo(tpot_s=0.9 * alone)).b_slo is None


def test_prefill_share_lowers_b_slo():
    d = deployment()
    load = Workload(input_tokens=fixed(3000), output_tokens=fixed(100))
    slo = Slo(tpot_s=0.04)
    with_prompts = explain(d, load, slo=slo)
    without = explain(d, load.mean_decode_context_tokens, slo=slo)
    assert with_prompts.b_slo < without.b_slo
    assert with_prompts.prefill_share_s > 0
    assert without.prefill_share_s == 0
    # At B_slo the step and its share of prefill are the limit: each sequence brings c/D to every step.
    at = explain(d, load, slo=slo, batch=with_prompts.b_slo)
    total = at.step_time_s.expected + at.prefill_share_s * at.batch
    assert total == pytest.approx(slo.tpot_s, rel=1e-3)


def test_mission_rules_for_max_num_seqs():
    """B* ≈ B_mem for 70B on 4 × 80 GB: memory binds; 8B at 512 tokens: B* does; a TPOT limit; offline: memory."""
    large = explain(build_deployment("llama-3.1-70b", "a100-sxm-80gb", tp=4, max_model_len=16384), 8192.0)
    assert large.recommended_max_num_seqs.rule == "b_mem"
    assert large.recommended_max_num_seqs.value <= 0.9 * large.landmarks.b_mem
    d = deployment()
    small = explain(d, 2048.0)
    assert small.recommended_max_num_seqs.rule == "b_star"
    assert small.recommended_max_num_seqs.value == math.floor(small.landmarks.b_star)
    limited = explain(d, 2048.0, slo=parse_slo("tpot=9ms"))
    assert limited.recommended_max_num_seqs.rule == "b_slo"
    assert limited.recommended_max_num_seqs.value <= limited.b_slo
    offline = explain(d, 2048.0, slo=parse_slo("batch"))
    assert offline.recommended_max_num_seqs.rule == "b_mem"
    assert 0.8 * offline.landmarks.b_mem <= offline.recommended_max_num_seqs.value <= 0.9 * offline.landmarks.b_mem
    short = explain(build_deployment("llama-3.1-8b", "h100-sxm-80gb", max_model_len=1024), 64.0)
    assert short.recommended_max_num_seqs.rule == "b_gemm"


def test_a_recommendation_counts_per_data_parallel_rank():
    one = explain(deployment("deepseek-r1", "h200-sxm-141gb", attention_dp=8, ep=8), 4096.0)
    assert one.recommended_max_num_seqs.value <= min(one.landmarks.b_star, one.landmarks.b_mem) / 8
    assert one.batch == 8 * one.recommended_max_num_seqs.value


def test_what_does_not_fit_recommends_nothing():
    sheet = explain(deployment("llama-3.1-70b"), 2000.0)
    assert not sheet.fits
    assert sheet.recommended_max_num_seqs.value is None
    assert sheet.bound_by == "kv_capacity"
    assert any("does not fit" in note for note in sheet.notes)
    json.dumps(sheet.to_dict(), allow_nan=False)


def test_an_unreachable_limit_recommends_nothing():
    sheet = explain(deployment(), 2000.0, slo=Slo(tpot_s=0.001))
    assert (sheet.b_slo, sheet.recommended_max_num_seqs.value) == (None, None)
    assert sheet.recommended_max_num_seqs.rule == "b_slo"


def test_an_e2e_limit_becomes_a_token_limit():
    load = Workload(input_tokens=fixed(1000), output_tokens=fixed(200))
    sheet = explain(deployment(), load, slo=Slo(e2e_s=4.0))
    assert sheet.b_slo is not None
    total = sheet.b_slo and explain(deployment(), load, slo=Slo(e2e_s=8.0)).b_slo
    assert total > sheet.b_slo


def test_token_budget_follows_the_tpot_limit():
    load = Workload(input_tokens=fixed(4000), output_tokens=fixed(200))
    d = deployment()
    budgets = [explain(d, load, slo=Slo(tpot_s=t)).recommended_max_num_batched_tokens.value for t in (0.02, 0.05, 0.2)]
    assert budgets == sorted(budgets)
    assert budgets[0] < budgets[-1] == 8192
    assert explain(d, load).recommended_max_num_batched_tokens.rule == "engine_default"


@pytest.mark.parametrize("batch", [0, 0.5, -1, float("inf"), float("nan")])
def test_a_batch_below_one_is_refused(batch):
    with pytest.raises(SpecError, match="batch"):
        explain(deployment(), 2000.0, batch=batch)


@given(st.floats(1.0, 1e6), st.floats(1e-6, 1.0), st.floats(1e-9, 1e-3))
def test_largest_batch_within_inverts_an_affine_step(limit_over_base, base, slope):
    limit = base * limit_over_base
    found = largest_batch_within(lambda b: base + slope * b, limit)
    exact = (limit - base) / slope
    if exact < 1:
        assert found is None
    elif exact >= 2**20:
        assert found == math.inf
    else:
        assert found == pytest.approx(exact, rel=1e-6)


@given(st.floats(0, 5000))
def test_floored_never_rounds_up_and_little_down(value):
    out = floored(value)
    assert out <= value + 1e-6
    assert out >= 0.93 * value - 1


def test_more_bandwidth_never_lowers_b_slo():
    from dataclasses import replace

    d = deployment()
    fast = replace(d, device=replace(d.device, bandwidth_bytes_per_s=2 * d.device.bandwidth_bytes_per_s))
    load = Workload(input_tokens=parse_lengths("lognormal:mean=1000,cv=1"), output_tokens=fixed(200))
    slo = Slo(tpot_s=0.03)
    assert explain(fast, load, slo=slo).b_slo > explain(d, load, slo=slo).b_slo
