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
from bstar.latency.efficiency import kernel_dtype, kernel_family, link_for
from bstar.latency.experts import ExpertLoad
from bstar.latency.graphs import GraphUse, graph_use
from bstar.physics.arithmetic import fallback_note
from bstar.physics.loading import offloaded_weight_bytes
from bstar.physics.operators import CompiledStep, compiled_step
from bstar.physics.statistics import count
from bstar.physics.work import Work
from bstar.specs.attention import (
    CompressedAttention,
    CrossAttention,
    GroupedQueryAttention,
    LatentAttention,
    NoMixer,
)
from bstar.specs.deployment import Deployment
from bstar.specs.ffn import MoeFfn

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepFrame:
    """Per operator: peak FLOP/s, bandwidth (of memory, or of the link of a collective), names of its constants.

    constants     names that some operator uses; `places` (rows: PLACES) index them (−1: none)
    row_flops     FLOPs of one row of a matrix product (of each expert, all of them, where routed), all layers
    ranks         devices of a collective, 2 elsewhere
    streaming, rounded, routed   operators that stream the cache, have a rounded corner, read routed experts (`load`)
    reaches       (statistics,) 1 where a statistic grows with the context of decoded tokens
    host_share    share of the weight bytes that come over the host bus; bus_s_per_byte at the datasheet's bandwidth
    layers, moe_layers, latent_layers, state_layers   of the whole model
    held_experts  experts of a rank, all layers, of a routed operator; 0 elsewhere
    """

    step: CompiledStep
    peak: FloatArray
    bandwidth: FloatArray
    constants: tuple[str, ...]
    places: IntArray
    row_flops: FloatArray
    ranks: FloatArray
    collective: NDArray[np.bool_]
    host_share: FloatArray
    bus_s_per_byte: float
    streaming: IntArray
    rounded: IntArray
    routed: IntArray
    load: ExpertLoad
    row_index: IntArray
    reaches: FloatArray
    tokens_index: int
    prefill_index: int
    sequences_index: int
    graphs: GraphUse
    layers: int
    moe_layers: int
    latent_layers: int
    state_layers: int
    held_experts: FloatArray
    names: tuple[str, ...]
    name_matrix: FloatArray
    notes: tuple[str, ...]


_LATENT: Final = (LatentAttention, CompressedAttention)
_PLAIN: Final = (GroupedQueryAttention, CrossAttention, NoMixer)

# What `StepFrame.places` has a row for. A collective's "half_rows" is the latency of a further rank, its
# "compute" how its bandwidth falls with ranks.
PLACES: Final = ("fixed", "compute", "memory", "half_rows", "scale_compute", "scale_memory")

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


def _query_group(step: CompiledStep, i: int, deployment: Deployment) -> int:
    """Query heads per cached head of a decode attention, read off its work: 2 FLOPs a query head and cached element."""
    elements = step.kv_reads[i].sum() * 8 / deployment.kv_format.bits
    return max(1, round(step.flops[i].sum() / (2.0 * elements))) if elements else 1


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
    places = np.full((len(PLACES), n), -1, dtype=np.int64)
    row_flops, ranks = np.zeros(n), np.full(n, 2.0)
    notes: dict[str, None] = {}
    for i, work in enumerate(step.works):
        if work.collective is not None:
            link = link_for(device, _span(deployment, work))
            bandwidth[i] = link.bandwidth_bytes_per_s
            fields = ("latency_s", "sharing", "bandwidth", "rank_latency_s")
            places[:4, i] = [names.place(f"collective.{link.kind}.{field}") for field in fields]
            ranks[i] = max(work.collective.ranks, 2)
            continue
        computed = kernel_dtype(work, device)
        if computed is not None and work.compute_dtype is not None:
            peak[i] = device.peak(computed)
            note = fallback_note(device, work.compute_dtype)
            if note is not None:
                notes[note] = None
        family = kernel_family(work, deployment.kv_format, computed, engine=deployment.engine,
                               group=_query_group(step, i, deployment))
        places[:3, i] = [names.place(f"{family}.{field}") for field in ("t0_s", "compute", "memory")]
        if work.kind in ("gemm", "moe_gemm"):
            places[3, i] = names.place(f"{family}.half_rows")
            row_flops[i] = step.flops[i].sum()
            if work.routing is not None:
                row_flops[i] *= work.routing.num_experts / work.routing.top_k
        places[4:, i] = [names.place(name) for name in _SCALES.get(work.kind, (None, None))]
    operators = tuple(dict.fromkeys(w.name for w in step.works))
    collective = np.array([w.collective is not None for w in step.works])
    share, bus_s_per_byte = _host_reads(deployment, step)
    model = deployment.model
    return StepFrame(
        step=step, peak=peak, bandwidth=bandwidth, constants=tuple(names.places), places=places, row_flops=row_flops,
        ranks=ranks, collective=collective, host_share=share, bus_s_per_byte=bus_s_per_byte,
        streaming=np.flatnonzero([w.kind == "attention_decode" for w in step.works]),
        rounded=np.flatnonzero([bool(w.flops) and w.kind != "attention_decode" for w in step.works]),
        routed=np.flatnonzero(step.routed), load=_load(step), row_index=step.rows.argmax(axis=1),
        reaches=np.array([float(s is not None and name.endswith("_decode")) for name, s in step.statistics]),
        tokens_index=step.statistics.index(count("tokens")),
        prefill_index=step.statistics.index(count("prefill_tokens")),
        sequences_index=step.statistics.index(count("sequences")), graphs=graph_use(deployment),
        layers=model.num_layers,
        moe_layers=sum(group.count for group in model.layers if isinstance(group.ffn, MoeFfn)),
        latent_layers=sum(group.count for group in model.layers if isinstance(group.mixer, _LATENT)),
        state_layers=sum(group.count for group in model.layers if not isinstance(group.mixer, (*_LATENT, *_PLAIN))),
        held_experts=np.array([
            w.routing.num_experts / w.routing.ranks * w.layers if w.routing else 0.0 for w in step.works]),
        names=operators, notes=tuple(notes),
        name_matrix=np.array([[float(w.name == name) for w in step.works] for name in operators]),
    )  # fmt: skip


def _span(deployment: Deployment, work: Work) -> int:
    """Devices that a collective spans: a pipeline hop may cross a node though it joins two ranks."""
    assert work.collective is not None
    if work.collective.kind == "p2p":
        return deployment.parallel.devices_per_copy
    return work.collective.ranks


def _load(step: CompiledStep) -> ExpertLoad:
    routing = [work.routing for work in step.works if work.routing is not None]
    experts, top_k, ranks = (np.array([float(getattr(r, name)) for r in routing]) for name in (
        "num_experts", "top_k", "ranks"))  # fmt: skip
    return ExpertLoad(experts=experts, top_k=top_k, ranks=ranks, skew=0.0)


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
