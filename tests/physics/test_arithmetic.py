"""In which dtype a device computes, and what engines have no kernel for."""

from __future__ import annotations

import pytest

from bstar.catalog.devices import get_device
from bstar.codec.build import build_deployment
from bstar.errors import SpecError
from bstar.latency import decode_step_time
from bstar.physics.arithmetic import computed_dtype
from bstar.physics.memory import memory_budget


@pytest.mark.parametrize(("gpu", "runs"), [
    ("t4", True), ("a100", True), ("l40s", True), ("h100", True), ("h200", True),
    ("b200", False), ("b300", False), ("gb200", False), ("rtx-5090", False), ("gb10", False), ("mi300x", True),
])
def test_int8_activations_have_no_kernels_on_blackwell(gpu: str, runs: bool) -> None:
    device = get_device(gpu)
    if runs:
        assert computed_dtype(device, "int8") == "int8"
        return
    with pytest.raises(SpecError, match="W8A8"):
        computed_dtype(device, "int8")


def test_a_w8a8_model_does_not_start_there() -> None:
    for gpu, dtype, starts in (("b200", "int8", False), ("b200", "w8a16", True), ("b200", "fp8", True),
                               ("h200", "int8", True)):
        deployment = build_deployment("llama-3.1-8b", gpu, weight_dtype=dtype)
        budget = memory_budget(deployment)
        assert budget.fits == starts, (gpu, dtype)
        if starts:
            decode_step_time(deployment, 1, 100)
        else:
            assert budget.reason is not None and "fp8" in budget.reason
            with pytest.raises(SpecError):
                decode_step_time(deployment, 1, 100)
