"""Weights that stay in host memory: a step reads them over the bus instead of from the device's memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.latency.efficiency import bus_efficiency
from bstar.physics.loading import offloaded_weight_bytes
from bstar.physics.operators import CompiledStep
from bstar.specs.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostReads:
    """share (per operator) of the weight bytes that come over the bus, and the seconds a byte takes there.

    light_s_per_byte   at the datasheet's bandwidth; s_per_byte: at what transfers reach
    """

    share: NDArray[np.float64]
    light_s_per_byte: float
    s_per_byte: float


def host_reads(deployment: Deployment, step: CompiledStep) -> HostReads:
    """What `cpu_offload_bytes` makes of a step. Raises SpecError where the device has no bus in the catalog.

    The engine offloads whole layers, the first ones; here every layer's GEMMs carry the same share, which is the
    same time in sum.
    """
    share = np.zeros(len(step.works))
    device = deployment.device
    moved = sum(offloaded_weight_bytes(deployment.model, deployment.parallel, deployment.engine.cpu_offload_bytes))
    if not moved or device.unified_memory:
        return HostReads(share=share, light_s_per_byte=0.0, s_per_byte=0.0)
    if device.pcie is None:
        raise SpecError(f"cpu_offload_bytes: {device.name} has no bus to the host in the catalog; leave it out")
    in_layers = np.array([w.name not in ("embedding", "lm_head") for w in step.works])
    share[in_layers] = min(1.0, moved / float(step.weight_bytes[in_layers].sum()))
    seconds = 1.0 / device.pcie.bandwidth_bytes_per_s
    return HostReads(share=share, light_s_per_byte=seconds, s_per_byte=seconds / bus_efficiency())
