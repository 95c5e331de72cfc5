"""Seconds of a step: laws that hold for every model and device, and what each setting does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bstar
from bstar.catalog.devices import all_devices, device_ids, get_device
from bstar.errors import SpecError
from bstar.latency import decode_curve, decode_step_time, prefill_time, step_time, step_times_s
from bstar.latency.step_model import BOUNDS
from bstar.physics.batch import BatchShape
from bstar.physics.kv_cache import kv_bytes_per_sequence
from bstar.physics.weights import streamed_weight_bytes
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-r1", "deepseek-v3.2", "gpt-oss-120b", "qwen3.5-35b-a3b")


@cache
def deploy(model: str = "llama-3.1-8b", gpu: str = "h100-sxm-80gb", **settings_: object) -> Deployment:
    return bstar.deployment(model=model, gpu=gpu, **settings_)  # type: ignore[no-any-return, arg-type]


def full_attention_floor(d: Deployment, batch: float, context: float) -> float:
    kv = float(kv_bytes_per_sequence(d.model, d.kv_format, context, d.parallel))
    return (streamed_weight_bytes(d.model, d.parallel) + batch * kv) / d.device.bandwidth_bytes_per_s


@pytest.mark.parametrize("gpu", device_ids())
def test_no_device_is_faster_than_light(gpu: str) -> None:
    device = get_device(gpu)
    if "bf16" not in device.peak_flops_per_s and "fp16" not in device.peak_flops_per_s:
        pytest.skip("no 16-bit peak in its datasheet")
    d = replace(deploy(), device=device)
    for shape in (BatchShape.decode(1, 10), BatchShape.decode(300, 8000), BatchShape.prefill(8000, 100),
                  BatchShape.decode(64, 2000) + BatchShape.prefill(500)):
        time = step_time(d, shape)
        assert 0 < time.floor_s < time.expected_s
        assert math.isclose(sum(time.shares.values()), 1.0)
        assert math.isclose(sum(row[2] for row in time.by_operator), time.expected_s)
        assert math.isclose(sum(row[1] for row in time.by_operator), time.floor_s)
        assert all(floor <= expected * (1 + 1e-12) for _, floor, expected in time.by_operator)


@pytest.mark.parametrize("model", MODELS)
@given(batch=st.floats(1, 2000), context=st.floats(1, 100_000))
@settings(max_examples=15, deadline=None)
def test_the_floor_is_under_the_expected_time(model: str, batch: float, context: float) -> None:
    d = deploy(model, "b200-sxm-180gb", tp=2)
    time = decode_step_time(d, batch, context)
    assert 0 < time.floor_s < time.expected_s
    assert time.bound_by == max(BOUNDS, key=lambda b: time.shares[b])


def test_the_floor_of_a_dense_decode_is_bytes_over_bandwidth() -> None:
    for split in ({}, {"tp": 4}):
        d = deploy(**split)
        for batch, context in ((1, 100), (16, 8192), (100, 4000)):
            assert math.isclose(
                decode_step_time(d, batch, context).floor_s, full_attention_floor(d, batch, context), rel_tol=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_the_curve_is_the_points(model: str) -> None:
    d = deploy(model, "h200-sxm-141gb", tp=2)
    batches = np.array([1.0, 3.0, 17.0, 64.5, 256.0, 4000.0])
    curve = decode_curve(d, batches, 3000)
    for i, batch in enumerate(batches):
        point = decode_step_time(d, float(batch), 3000)
        assert math.isclose(curve.floor_s[i], point.floor_s, rel_tol=1e-12)
        assert math.isclose(curve.expected_s[i], point.expected_s, rel_tol=1e-12)
        assert curve.bound_by[i] == point.bound_by
        shaped = step_time(d, BatchShape.decode(float(batch), 3000))
        assert math.isclose(shaped.expected_s, point.expected_s, rel_tol=1e-12)
    assert np.allclose(curve.amortized_floor_s * batches, curve.floor_s)


@pytest.mark.parametrize("model", MODELS)
def test_longer_contexts_and_larger_batches_are_not_faster(model: str) -> None:
    d = deploy(model, "h200-sxm-141gb", tp=2)
    contexts = [decode_step_time(d, 32, c) for c in (1, 100, 127, 128, 129, 2047, 2048, 2049, 30_000)]
    assert all(a.expected_s <= b.expected_s and a.floor_s <= b.floor_s for a, b in pairwise(contexts))
    curve = decode_curve(d, np.arange(1.0, 600.0), 2000)
    assert np.all(np.diff(curve.expected_s) > 0)
    assert np.all(np.diff(curve.floor_s) >= 0)


@pytest.mark.parametrize("model", MODELS)
def test_a_decode_step_is_affine_in_the_context_below_above_and_between_the_windows(model: str) -> None:
    d = deploy(model, "h200-sxm-141gb", tp=2)
    for batch in (1, 64, 700):
        for low, high in ((2, 127), (130, 2047), (2050, 60_000)):
            ends = [decode_step_time(d, batch, c).expected_s for c in (low, (low + high) / 2, high)]
            assert math.isclose(ends[1], (ends[0] + ends[2]) / 2, rel_tol=1e-9)


def test_more_bandwidth_or_a_higher_peak_is_not_slower() -> None:
    d = deploy()
    for change in ({"bandwidth_bytes_per_s": d.device.bandwidth_bytes_per_s * 1.5},
                   {"peak_flops_per_s": {k: 2 * v for k, v in d.device.peak_flops_per_s.items()}}):
        better = replace(d, device=replace(d.device, **change))  # type: ignore[arg-type]
        for shape in (BatchShape.decode(16, 4000), BatchShape.prefill(4000)):
            assert step_time(better, shape).expected_s < step_time(d, shape).expected_s


def test_what_bounds_a_step() -> None:
    assert decode_step_time(deploy(), 1, 500).bound_by == "weight_bandwidth"
    assert decode_step_time(deploy(), 64, 30_000).bound_by == "kv_bandwidth"
    assert decode_step_time(deploy("qwen3-1.7b", "b200-sxm-180gb"), 1, 10).bound_by == "overhead"
    assert step_time(deploy(), BatchShape.prefill(8192)).bound_by == "compute"
    assert step_time(deploy("llama-3.1-70b", "l40s", tp=8), BatchShape.prefill(8192)).bound_by == "communication"


def test_a_pipeline_keeps_its_stages_busy_with_parts_of_the_batch() -> None:
    """Four stages: a token still passes all the weights, each stage holds a quarter of the sequences at a time."""
    one, four = deploy("llama-3.1-8b"), deploy("llama-3.1-8b", pp=4)
    assert math.isclose(decode_step_time(four, 64, 2000).floor_s, decode_step_time(one, 16, 2000).floor_s, rel_tol=1e-9)
    assert math.isclose(decode_step_time(four, 1, 2000).floor_s, decode_step_time(one, 1, 2000).floor_s, rel_tol=1e-9)


def test_a_prompt_beyond_the_budget_is_prefilled_in_chunks() -> None:
    d = deploy(max_num_batched_tokens=2048)
    whole = prefill_time(d, 5000)
    chunks = [step_time(d, BatchShape.prefill(n, k)) for n, k in ((2048, 0), (2048, 2048), (904, 4096))]
    assert math.isclose(whole.expected_s, sum(c.expected_s for c in chunks))
    assert math.isclose(whole.floor_s, sum(c.floor_s for c in chunks))
    assert math.isclose(sum(whole.shares.values()), 1.0)
    assert prefill_time(d, 1000, cached_tokens=4000).expected_s < whole.expected_s


def test_many_steps_at_once_are_the_single_ones() -> None:
    d = deploy("qwen3-30b-a3b")
    shapes = [BatchShape.decode(8, 100), BatchShape.prefill(700, 30), BatchShape.decode(9, 9) + BatchShape.prefill(50)]
    floor, expected = step_times_s(d, shapes)
    for i, shape in enumerate(shapes):
        single = step_time(d, shape)
        assert math.isclose(floor[i], single.floor_s, rel_tol=1e-12)
        assert math.isclose(expected[i], single.expected_s, rel_tol=1e-12)


def test_eager_kernels_cost_their_whole_launch() -> None:
    graphs, eager = deploy(), deploy(enforce_eager=True)
    assert decode_step_time(eager, 1, 100).expected_s > decode_step_time(graphs, 1, 100).expected_s


def test_weight_only_kernels_say_so() -> None:
    """An fp8 model on an A100: half the bytes, 16-bit arithmetic (Marlin)."""
    wide, narrow = deploy(gpu="a100-sxm-80gb"), deploy(gpu="a100-sxm-80gb", weight_dtype="fp8")
    assert decode_step_time(narrow, 1, 100).floor_s < 0.6 * decode_step_time(wide, 1, 100).floor_s
    assert any("dequantized" in note for note in decode_step_time(narrow, 1, 100).notes)
    prompt = BatchShape.prefill(8192)
    assert step_time(narrow, prompt).floor_s == pytest.approx(step_time(wide, prompt).floor_s, rel=0.02)
    assert not decode_step_time(deploy(weight_dtype="fp8"), 1, 100).notes


def test_a_narrow_cache_is_read_faster() -> None:
    wide, narrow = deploy("llama-3.1-8b", "b200-sxm-180gb"), deploy(
        "llama-3.1-8b", "b200-sxm-180gb", kv_cache_dtype="fp8")
    assert decode_step_time(narrow, 64, 30_000).expected_s < 0.7 * decode_step_time(wide, 64, 30_000).expected_s


def test_a_batch_or_context_that_makes_no_sense_is_refused() -> None:
    for batch, context in ((0, 100), (-1, 100), (1, -5)):
        with pytest.raises(SpecError):
            decode_step_time(deploy(), batch, context)


@pytest.mark.parametrize("device", [d for d in all_devices() if d.vendor == "nvidia" and d.nvml_memory_bytes])
def test_inline_ecc_is_where_a_sixteenth_of_the_memory_is_missing(device: DeviceSpec) -> None:
    assert device.nvml_memory_bytes is not None
    nominal = round(device.memory_bytes / 1e9) * 2**30
    gddr = device.compute_capability in (75, 86, 89, 120)
    assert device.inline_ecc == (gddr and abs(device.nvml_memory_bytes / nominal - 15 / 16) < 0.002)
