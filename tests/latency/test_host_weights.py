"""Weights in host memory: what they leave on the device, and what a step pays for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bstar.codec.build import build_deployment
from bstar.errors import SpecError
from bstar.latency import decode_step_time
from bstar.physics.loading import offloaded_weight_bytes
from bstar.physics.memory import memory_budget
from bstar.specs.deployment import Deployment
from bstar.units import GIB


def offloading(model: str, gib: int, gpu: str = "h100-sxm-80gb", **settings: Any) -> Deployment:
    built = build_deployment(model, gpu, **settings)
    return replace(built, engine=replace(built.engine, cpu_offload_bytes=gib * GIB))


def test_whole_parameters_move_in_order() -> None:
    """Llama-3.1-8B: 436,224,000 bytes a layer; the parameter that crosses the limit moves whole."""
    model = build_deployment("llama-3.1-8b", "h100-sxm-80gb")
    h, kv, w = 4096, 1024, 14336
    qkv, out, gate_up, down = (h + 2 * kv) * h * 2, h * h * 2, 2 * w * h * 2, w * h * 2
    layer = qkv + out + gate_up + down + 2 * h * 2
    for limit, moved in ((1, qkv), (qkv, qkv), (qkv + 1, qkv + out), (layer * 5 + 1, layer * 5 + qkv),
                         (10**15, 32 * layer)):
        assert offloaded_weight_bytes(model.model, model.parallel, limit) == (moved,)


def test_every_stage_and_rank_has_its_own_limit() -> None:
    for settings in ({"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}):
        d = build_deployment("llama-3.1-70b", "h100-sxm-80gb", **settings)
        moved = offloaded_weight_bytes(d.model, d.parallel, 4 * GIB)
        assert len(moved) == settings.get("pp", 1) and all(4 * GIB <= m < 5 * GIB for m in moved)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-120b", "qwen3-30b-a3b"])
def test_memory_that_is_left_goes_to_the_cache(model: str) -> None:
    plain, budget = (memory_budget(offloading(model, gib)) for gib in (0, 10))
    moved = plain.weight_bytes - budget.weight_bytes
    assert 10 * GIB <= moved < 11.2 * GIB
    assert budget.kv_cache_bytes - plain.kv_cache_bytes == moved
    assert any("host memory" in note for note in budget.notes)
    assert not any("host memory" in note for note in plain.notes)


def test_a_step_reads_them_over_the_bus() -> None:
    d = offloading("llama-3.1-8b", 10)
    moved = offloaded_weight_bytes(d.model, d.parallel, d.engine.cpu_offload_bytes)[0]
    assert d.device.pcie is not None
    bus_s = moved / d.device.pcie.bandwidth_bytes_per_s
    step, plain = decode_step_time(d, 1, 1000), decode_step_time(offloading("llama-3.1-8b", 0), 1, 1000)
    saved_s = moved / d.device.bandwidth_bytes_per_s
    assert step.floor_s == pytest.approx(plain.floor_s - saved_s + bus_s, rel=1e-3)
    assert step.expected_s > plain.expected_s + bus_s


def test_shared_memory_has_no_bus_and_an_unknown_bus_is_refused() -> None:
    shared = offloading("llama-3.1-8b", 10, "gb10")
    assert decode_step_time(shared, 1, 100).expected_s == pytest.approx(
        decode_step_time(offloading("llama-3.1-8b", 0, "gb10"), 1, 100).expected_s)
    with pytest.raises(SpecError, match="bus"):
        decode_step_time(replace(offloading("llama-3.1-8b", 10),
                                 device=replace(shared.device, unified_memory=False)), 1, 100)
