"""What of a deployment's step time does not depend on the constants: operators, peaks, links, names of constants.

`frame_for` is kept per deployment, so that a fit, which tries thousands of constants, pays for the constants alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.latency.efficiency import kernel_family, link_for
from bstar.physics.arithmetic import computed_dtype, fallback_note
from bstar.physics.loading import offloaded_weight_bytes
from bstar.physics.operators import CompiledStep, compiled_step
from bstar.physics.work import Work
from bstar.specs.deployment import Deployment
from bstar.specs.ffn import MoeFfn

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepFrame:
    """Per operator: peak FLOP/s, bandwidth (of memory, or of the link of a collective), names of its constants.

    constants     names that some operator uses; `fixed`, `compute`, `memory` index them (−1: none)
    scale_…       likewise, of the factor between a kernel alone and in serving
    launch_share  whether its fixed time shrinks when it is replayed from a graph (not a collective's latency)
    host_share    share of the weight bytes that come over the host bus; bus_s_per_byte at the datasheet's bandwidth
    layers, moe_layers   of the whole model
    """

    step: CompiledStep
    peak: FloatArray
    bandwidth: FloatArray
    constants: tuple[str, ...]
    fixed: IntArray
    compute: IntArray
    memory: IntArray
    scale_compute: IntArray
    scale_memory: IntArray
    launch_share: NDArray[np.bool_]
    collective: NDArray[np.bool_]
    host_share: FloatArray
    bus_s_per_byte: float
    layers: int
    moe_layers: int
    names: tuple[str, ...]
    name_matrix: FloatArray
    notes: tuple[str, ...]


# The constant that scales a kernel's compute and memory fraction, by kind of work.
_SCALES: Final = {
    "gemm": ("scale.gemm_compute", "scale.gemm_memory"), "moe_gemm": ("scale.moe_compute", "scale.moe_memory"),
    "attention_decode": (None, "scale.kv_memory"), "attention_prefill": ("scale.prefill_compute", None),
}  # fmt: skip


class _Names:
    """Gives every constant that is asked for a place; None is the last place of `values`, a 1."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, name: str | None) -> int:
        return -1 if name is None else self.places.setdefault(name, len(self.places))


_CACHE: OrderedDict[int, tuple[Deployment, StepFrame]] = OrderedDict()
_CACHE_SIZE: Final = 2048


def frame_for(deployment: Deployment) -> StepFrame:
    """The frame of `deployment`, built once (kept by identity). Raises SpecError for links that are not known."""
    found = _CACHE.get(id(deployment))
    if found is not None and found[0] is deployment:
        return found[1]
    frame = _build(deployment)
    _CACHE[id(deployment)] = (deployment, frame)
    if len(_CACHE) > _CACHE_SIZE:
        _CACHE.popitem(last=False)
    return frame


def _build(deployment: Deployment) -> StepFrame:
    device = deployment.device
    step = compiled_step(deployment.model, deployment.parallel, deployment.kv_format, "all")
    n, names = len(step.works), _Names()
    peak, bandwidth = np.full(n, np.inf), np.full(n, device.bandwidth_bytes_per_s)
    places = np.full((5, n), -1, dtype=np.int64)
    notes: dict[str, None] = {}
    for i, work in enumerate(step.works):
        if work.collective is not None:
            link = link_for(device, _span(deployment, work))
            bandwidth[i] = link.bandwidth_bytes_per_s
            places[0, i] = names.place(f"collective.{link.kind}.latency_s")
            places[2, i] = names.place(f"collective.{link.kind}.bandwidth")
            continue
        computed = None
        if work.compute_dtype is not None:
            computed = computed_dtype(device, work.compute_dtype)
            peak[i] = device.peak(computed)
            note = fallback_note(device, work.compute_dtype)
            if note is not None:
                notes[note] = None
        family = kernel_family(work, deployment.kv_format, computed)
        places[:3, i] = [names.place(f"{family}.{field}") for field in ("t0_s", "compute", "memory")]
        places[3:, i] = [names.place(name) for name in _SCALES.get(work.kind, (None, None))]
    operators = tuple(dict.fromkeys(w.name for w in step.works))
    collective = np.array([w.collective is not None for w in step.works])
    share, bus_s_per_byte = _host_reads(deployment, step)
    model = deployment.model
    return StepFrame(
        step=step, peak=peak, bandwidth=bandwidth, constants=tuple(names.places), fixed=places[0], compute=places[1],
        memory=places[2], scale_compute=places[3], scale_memory=places[4], launch_share=~collective,
        collective=collective, host_share=share, bus_s_per_byte=bus_s_per_byte, layers=model.num_layers,
        moe_layers=sum(group.count for group in model.layers if isinstance(group.ffn, MoeFfn)),
        names=operators, notes=tuple(notes),
        name_matrix=np.array([[float(w.name == name) for w in step.works] for name in operators]),
    )  # fmt: skip


def _span(deployment: Deployment, work: Work) -> int:
    """Devices that a collective spans: a pipeline hop may cross a node though it joins two ranks."""
    assert work.collective is not None
    if work.collective.kind == "p2p":
        return deployment.parallel.devices_per_copy
    return work.collective.ranks


def _host_reads(deployment: Deployment, step: CompiledStep) -> tuple[FloatArray, float]:
    """Share per operator of the weight bytes that stay in host memory (`cpu_offload_bytes`), seconds per byte there.

    The engine offloads whole layers, the first ones; here every layer's GEMMs carry the same share, which is the
    same time in sum. Raises SpecError where the device has no bus in the catalog.
    """
    share = np.zeros(len(step.works))
    device = deployment.device
    moved = sum(offloaded_weight_bytes(deployment.model, deployment.parallel, deployment.engine.cpu_offload_bytes))
    if not moved or device.unified_memory:
        return share, 0.0
    if device.pcie is None:
        raise SpecError(f"cpu_offload_bytes: {device.name} has no bus to the host in the catalog; leave it out")
    in_layers = np.array([w.name not in ("embedding", "lm_head") for w in step.works])
    share[in_layers] = min(1.0, moved / float(step.weight_bytes[in_layers].sum()))
    return share, 1.0 / device.pcie.bandwidth_bytes_per_s
