"""Efficiencies and fixed times as data: which fraction of a peak a kernel reaches, and where that is known from.

Data files in `latency/data/`; every set carries its provenance ("fitted" to kernel measurements, "assumed").
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from bstar.errors import SpecError
from bstar.specs.device import DeviceSpec, LinkSpec, Provenance
from bstar.units import US

# Weight formats by the class of kernel that multiplies them.
_GEMM_CLASSES = {
    "fp8": "fp8", "fp8_channel": "fp8", "fp8_block": "fp8_block", "mxfp8": "fp8_block", "nvfp4": "fp4",
    "mxfp4_w4a4": "fp4", "int8": "int8",
}  # fmt: skip
# Classes whose multipliers accumulate in FP32.
_FLOAT_CLASSES = ("bf16", "fp8", "fp8_block", "weight_only")
# Traffic with inline ECC over traffic without: 1/16 of the memory, and of what moves, is check bits.
_ECC_TRAFFIC = 16.0 / 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """t0_s per launch, and the fractions of compute peak and memory bandwidth that a kernel reaches."""

    t0_s: float
    compute: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """The kernels of one GPU generation, with where the figures come from.

    smoothing        exponent of the smooth max of compute and memory time
    graph_fraction   share of t0_s that is left when kernels are replayed from a CUDA graph
    """

    name: str
    source: str
    provenance: Provenance
    gemm: dict[str, Kernel]
    moe_gemm: dict[str, Kernel]
    attention_decode: dict[str, Kernel]
    attention_prefill: Kernel
    elementwise: Kernel
    state: Kernel
    smoothing: float
    graph_fraction: float

    def gemm_class(self, weight_format: str, bits: int, computed: str, wanted: str) -> str:
        """The kernel class: by format, `weight_only` where narrow weights are computed in 16 bits."""
        if bits < 16 and (wanted in ("bf16", "fp16", "fp32") or computed != wanted):
            return "weight_only"
        return _GEMM_CLASSES.get(weight_format, "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverhead:
    """What an engine adds to the kernels of a step, and to a request outside them (`per_request_s`, in TTFT)."""

    name: str
    provenance: Provenance
    collective_latency_s: dict[str, float]
    per_step_s: float
    per_sequence_s: float
    per_moe_layer_s: float
    per_request_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """A link as collectives see it."""

    kind: str
    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float


@lru_cache(maxsize=1)
def _kernels() -> dict[str, Any]:
    return tomllib.loads(files("bstar.latency").joinpath("data/kernels.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _engines() -> dict[str, Any]:
    return tomllib.loads(files("bstar.latency").joinpath("data/engines.toml").read_text(encoding="utf-8"))


def _kernel(raw: dict[str, float]) -> Kernel:
    return Kernel(t0_s=raw["t0_us"] * US, compute=raw["compute"], memory=raw["memory"])


@lru_cache(maxsize=64)
def kernel_set(
    compute_capability: int | None, *, half_rate_accumulation: bool = False, inline_ecc: bool = False
) -> KernelSet:
    """The kernels of the generation with this CUDA compute capability; [default] for anything not measured.

    half_rate_accumulation   power, not the halved rate, is what holds a full-rate sibling below its peak: the same
                             FLOP/s are a larger share of half the peak, up to what any kernel reaches
    inline_ecc               of the device. A generation that was measured on a card with inline ECC gives a card
                             without it the check bits' share of the bandwidth
    """
    data = _kernels()
    default = data["default"]
    found = next((g for g in data["generation"] if compute_capability in g["compute_capabilities"]), default)
    largest = data["largest_fraction"]
    more_compute = 2.0 if half_rate_accumulation else 1.0
    more_memory = _ECC_TRAFFIC if found.get("inline_ecc", False) and not inline_ecc else 1.0

    def kernel(raw: dict[str, float], *, floats: bool = True) -> Kernel:
        one = _kernel(raw)
        compute = min(one.compute * more_compute, largest) if floats and more_compute > 1.0 else one.compute
        memory = min(one.memory * more_memory, largest) if more_memory > 1.0 else one.memory
        return replace(one, compute=compute, memory=memory)

    return KernelSet(
        name=found["name"], source=found["source"], provenance=found["provenance"],
        gemm={k: kernel(v, floats=k in _FLOAT_CLASSES) for k, v in {**default["gemm"], **found["gemm"]}.items()},
        moe_gemm={k: _kernel(v) for k, v in data["moe_gemm"].items() if isinstance(v, dict)},
        attention_decode={k: kernel(v) for k, v in found["attention_decode"].items()},
        attention_prefill=kernel(found["attention_prefill"]), elementwise=_kernel(data["elementwise"]["kernel"]),
        state=_kernel(data["elementwise"]["state"]), smoothing=data["smoothing"],
        graph_fraction=data["graph_fraction"],
    )  # fmt: skip


@lru_cache(maxsize=16)
def engine_overhead(name: str) -> EngineOverhead:
    """The overhead of engine `name`. Raises SpecError where it is not known."""
    raw = _engines().get(name)
    if raw is None:
        raise SpecError(f"engine: {name!r} has no overhead profile; use one of {', '.join(sorted(_engines()))}")
    return EngineOverhead(
        name=name, provenance=raw["provenance"], per_step_s=raw["per_step_us"] * US,
        collective_latency_s={k: v * US for k, v in raw["collective_latency_us"].items()},
        per_sequence_s=raw["per_sequence_us"] * US, per_moe_layer_s=raw["per_moe_layer_us"] * US,
        per_request_s=raw["per_request_us"] * US,
    )  # fmt: skip


def bus_efficiency() -> float:
    """Fraction of the host bus's bandwidth that reads of pinned host memory reach (assumed)."""
    found: float = _kernels()["host_bus"]["bandwidth"]
    return found


def link_for(device: DeviceSpec, ranks: int, overhead: EngineOverhead) -> LinkUse:
    """The slowest link that `ranks` neighbouring devices have to cross. Raises SpecError where it is not known."""
    inside = ranks <= device.devices_per_node
    link: LinkSpec | None = device.link_between(ranks)
    if link is None:
        where = "between the GPUs of a node" if inside else f"between nodes ({device.devices_per_node} GPUs each)"
        raise SpecError(f"link: {device.name} has no link {where} in the catalog; {ranks} GPUs cannot work together")
    kind = "network" if not inside else ("pcie" if link.kind.startswith("pcie") else "nvlink")
    return LinkUse(
        kind=kind, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        efficiency=_kernels()["collective"][kind]["bandwidth"], latency_s=overhead.collective_latency_s[kind],
    )  # fmt: skip
