"""Constants: each means something, lies where physics allows it and says where it is known from."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

import bstar
from bstar.catalog.devices import device_ids, get_device
from bstar.errors import SpecError
from bstar.latency import decode_step_time
from bstar.latency.constants import Constants, constant_specs, constants_for
from bstar.latency.efficiency import link_for
from bstar.latency.step_model import step_model
from bstar.specs.deployment import Deployment


def deploy(gpu: str = "h100-sxm-80gb", engine: str = "vllm", **settings: object) -> Deployment:
    return bstar.deployment(model="llama-3.1-8b", gpu=gpu, engine=engine, **settings)  # type: ignore[no-any-return, arg-type]


@pytest.mark.parametrize("gpu", device_ids())
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_every_constant_lies_where_physics_allows_it(gpu: str, engine: str) -> None:
    constants = constants_for(replace(deploy(engine=engine), device=get_device(gpu)))
    assert list(constants) == list(constant_specs())
    for name in constants:
        one = constants.constant(name)
        assert one.spec.low <= one.value <= one.spec.high, name
        assert one.spec.meaning and one.spec.unit in ("s", "1", "rows"), name
        assert one.provenance in ("fitted", "assumed", "measured"), name
        assert one.source, name


def test_another_value_is_another_step_time_and_leaves_the_first_alone() -> None:
    d = deploy()
    constants = constants_for(d)
    slower = constants.replace({"gemm.bf16.memory": constants["gemm.bf16.memory"] / 2}, step_s=1e-3)
    assert slower["step_s"] == 1e-3 and constants["step_s"] != 1e-3
    assert step_model(d, slower).constants is slower
    values = step_model(d).step.decode_values(1000.0)
    assert step_model(d, slower).expected_s(values) > step_model(d).expected_s(values)
    assert step_model(d, slower) is step_model(d, slower)
    assert decode_step_time(d, 1, 1000).expected_s == pytest.approx(float(step_model(d).expected_s(values)))


def test_constants_compare_and_travel() -> None:
    constants = constants_for(deploy())
    again = pickle.loads(pickle.dumps(constants))
    assert again == constants and hash(again) == hash(constants)
    assert constants.replace(step_s=2e-3) != constants
    assert isinstance(constants, Constants) and "step_s" in constants


def test_what_is_no_constant_or_out_of_range_is_refused() -> None:
    constants = constants_for(deploy())
    with pytest.raises(SpecError, match="there is no 'fudge'"):
        constants.replace(fudge=1.0)
    with pytest.raises(SpecError, match="must lie in"):
        constants.replace({"gemm.bf16.compute": 1.2})
    with pytest.raises(SpecError, match="must lie in"):
        constants.replace(step_s=-1e-6)
    with pytest.raises(SpecError, match="overhead profile"):
        d = deploy()
        constants_for(replace(d, engine=replace(d.engine, name="triton")))  # type: ignore[arg-type]


def test_links_that_are_not_known_are_refused() -> None:
    device = replace(get_device("h100-sxm-80gb"), inter_node=None)
    with pytest.raises(SpecError, match="16 GPUs cannot work together"):
        link_for(device, 16)
    inside, across = (link_for(get_device("h100-sxm-80gb"), n) for n in (8, 16))
    assert (inside.kind, across.kind) == ("nvlink", "network")
    assert link_for(get_device("l40s"), 2).kind == "pcie"


def test_a_geforce_reaches_more_of_its_halved_peak_and_not_more_flops() -> None:
    full, half = constants_for(deploy("l40s")), constants_for(deploy("rtx-4090"))
    assert full["gemm.bf16.compute"] < half["gemm.bf16.compute"] <= 0.95
    for kind in ("bf16", "fp8", "fp8_block", "weight_only"):
        assert half[f"gemm.{kind}.compute"] <= 2 * full[f"gemm.{kind}.compute"]
    assert half["gemm.int8.compute"] == full["gemm.int8.compute"]
    assert get_device("rtx-4090").half_rate_accumulation
    assert not get_device("l40s").half_rate_accumulation


def test_a_card_without_inline_ecc_has_the_check_bits_bandwidth() -> None:
    with_ecc, without = constants_for(deploy("l40s")), constants_for(deploy("rtx-4090"))
    assert without["gemm.bf16.memory"] == pytest.approx(with_ecc["gemm.bf16.memory"] * 16 / 15)
    assert get_device("l40s").inline_ecc
    assert not get_device("rtx-4090").inline_ecc
