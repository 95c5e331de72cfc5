"""Accelerators, links and nodes: datasheet facts, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from bstar.errors import SpecError

Provenance = Literal["datasheet", "fitted", "assumed", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """On-demand price of one device for one hour."""

    usd_per_hour: float
    source: str
    date: str

    def __post_init__(self) -> None:
        if not self.usd_per_hour >= 0:
            raise SpecError(f"price: must be at least 0 USD per hour, is {self.usd_per_hour}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link between devices.

    kind                       "nvlink", "nvswitch", "pcie", "infinity-fabric", "infiniband", "ethernet", "ici", …
    bandwidth_bytes_per_s      one direction, per device, to all its peers together
    latency_s                  of one small message
    all_to_all                 every device reaches every other at that bandwidth (a switch)
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    all_to_all: bool = True
    provenance: Provenance = "datasheet"

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or self.latency_s < 0:
            raise SpecError(f"link {self.kind!r}: bandwidth must be positive and latency at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator.

    memory_bytes          as the vendor states it (80e9 for "80 GB")
    usable_memory_bytes   what the driver reports to the engine (torch's total), where known; else None
    nvml_memory_bytes     total of nvidia-smi or its like, where known: engines choose defaults by it
    peak_flops_per_s      dense peak by dtype; a dtype that is missing has no peak: refuse it
    link                  to the other devices of the node; None: there are none or over PCIe (`pcie`)
    devices_per_node      devices of one server, or of one link domain where that is larger (GB200 NVL72: 72)
    link_devices          devices that `link` joins, where fewer than the node (an NVLink bridge: 2); None: all
    inter_node            link between nodes, per device
    compute_capability    CUDA compute capability × 10 (90 for Hopper) or None
    num_sms               streaming multiprocessors (AMD: compute units) or None
    unified_memory        the memory is shared with the host CPU (GB10, Apple silicon, a CPU)
    inline_ecc            check bits lie in the memory itself: 1/16 of its space and of its traffic (GDDR6 with ECC on)
    half_rate_accumulation  the peaks of 16-bit and fp8 floats are half of what the multipliers could do, because
                          FP32 accumulation is halved (GeForce)
    unverified            fields that two sources do not confirm (printed as assumed)
    """

    id: str
    name: str
    vendor: str
    generation: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    usable_memory_bytes: int | None = None
    nvml_memory_bytes: int | None = None
    link: LinkSpec | None = None
    pcie: LinkSpec | None = None
    inter_node: LinkSpec | None = None
    devices_per_node: int = 8
    link_devices: int | None = None
    compute_capability: int | None = None
    num_sms: int | None = None
    unified_memory: bool = False
    half_rate_accumulation: bool = False
    inline_ecc: bool = False
    price: Price | None = None
    source: str = ""
    date: str = ""
    aliases: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops_per_s", MappingProxyType(dict(self.peak_flops_per_s)))
        if not self.memory_bytes > 0 or not self.bandwidth_bytes_per_s > 0:
            raise SpecError(f"device {self.id!r}: memory and bandwidth must be positive")
        for label in ("usable_memory_bytes", "nvml_memory_bytes"):
            value = getattr(self, label)
            if value is not None and not value > 0:
                raise SpecError(f"device {self.id!r}: {label} must be positive; leave it out where not known")
        if not self.peak_flops_per_s:
            raise SpecError(f"device {self.id!r}: peak_flops_per_s needs at least one dtype")
        if any(not v > 0 for v in self.peak_flops_per_s.values()):
            raise SpecError(f"device {self.id!r}: a peak must be positive; leave out a dtype it does not have")
        for label in ("devices_per_node", "link_devices"):
            count = getattr(self, label)
            if count is not None and count < 1:
                raise SpecError(f"device {self.id!r}: {label} must be at least 1, is {count}")

    @property
    def reported_memory_bytes(self) -> int:
        """What the engine sees: the driver's figure where known, else the vendor's."""
        return self.usable_memory_bytes if self.usable_memory_bytes is not None else self.memory_bytes

    def link_between(self, num_devices: int) -> LinkSpec | None:
        """The slowest link that `num_devices` neighbouring devices have to cross, or None where none is known."""
        if num_devices > self.devices_per_node:
            return self.inter_node
        if self.link is not None and num_devices <= (self.link_devices or self.devices_per_node):
            return self.link
        return self.pcie

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s of `dtype`. Raises SpecError naming the dtypes that exist."""
        found = self.peak_flops_per_s.get(dtype)
        if found is None:
            raise SpecError(
                f"dtype: {self.name} has no {dtype} peak in its datasheet; "
                f"it has {', '.join(sorted(self.peak_flops_per_s))}"
            )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; worker processes get a plain dict and wrap it again.
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        return _rebuild, ({**state, "peak_flops_per_s": dict(self.peak_flops_per_s)},)


def _rebuild(state: dict[str, Any]) -> DeviceSpec:
    return DeviceSpec(**state)
