"""GPU samples in one set of names.

    time_s                     on the clock of the source: monotonic while watching, seconds of the log otherwise
    gpu                        index
    dram_active_fraction       share of the memory bandwidth that is used (DCGM PROF_DRAM_ACTIVE, GPM DRAM_BW_UTIL)
    sm_active_fraction         share of SMs with work, averaged over time (PROF_SM_ACTIVE)
    tensor_active_fraction     share of time the tensor pipes are busy
    gpu_busy_fraction          share of TIME in which a kernel ran (NVML utilization.gpu): 1 says little
    memory_busy_fraction       share of TIME in which memory was accessed (utilization.memory, dmon's mem): no bandwidth
    power_w, sm_clock_hz, memory_clock_hz, memory_used_bytes, memory_total_bytes, temperature_c
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bstar.units import format_seconds

FIELDS: Final = (
    "dram_active_fraction", "sm_active_fraction", "tensor_active_fraction", "gpu_busy_fraction",
    "memory_busy_fraction", "power_w", "sm_clock_hz", "memory_clock_hz", "memory_used_bytes", "memory_total_bytes",
    "temperature_c",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU at one moment; what the source does not show is missing from `values`."""

    time_s: float
    gpu: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Samples of some GPUs over some time, in the order of time.

    source   "nvml", "dcgm", "nvidia-smi dmon", "nvidia-smi --query-gpu"
    names    model name by GPU index, where the source tells
    dated    whether times are seconds of the calendar (time.time), as in logs with a date
    note     what to know of it: "" or a line
    """

    source: str
    samples: tuple[GpuSample, ...]
    names: Mapping[int, str] = field(default_factory=dict)
    dated: bool = False
    note: str = ""

    def between(self, start_s: float, end_s: float) -> Telemetry:
        """The samples of a part of the time."""
        return replace(self, samples=tuple(s for s in self.samples if start_s <= s.time_s <= end_s))

    def inside(self, start_s: float, end_s: float) -> Telemetry:
        """The samples of a window of the calendar's time, where they are dated; all, with a note, where none is."""
        if not self.dated or not self.samples:
            return self
        found = self.between(start_s, end_s)
        if found.samples:
            return found
        first, last = self.samples[0].time_s, self.samples[-1].time_s
        apart, where = (start_s - last, "before") if last < start_s else (first - end_s, "after")
        return replace(self, note=f"all samples of the log lie outside the window, {_long(max(apart, 0.0))} {where} "
                                  "it by this machine's clock: they are of another time, or of another time zone")

    def column(self, name: str) -> NDArray[np.float64]:
        """All values of a field, nan where a sample lacks it."""
        return np.array([s.values.get(name, np.nan) for s in self.samples])

    def mean(self, name: str) -> float | None:
        """Over samples and GPUs; None where the source does not show it."""
        values = self.column(name)
        return None if values.size == 0 or np.isnan(values).all() else float(np.nanmean(values))

    def columns(self, origin_s: float = 0.0) -> dict[str, Any]:
        """A table: time since `origin_s`, GPU, and every field that some sample has."""
        out: dict[str, Any] = {
            "time_s": np.array([s.time_s for s in self.samples]) - origin_s,
            "gpu": np.array([s.gpu for s in self.samples], dtype=np.int64),
        }
        for name in FIELDS:
            values = self.column(name)
            if values.size and not np.isnan(values).all():
                out[name] = values
        return out

    def summary(self) -> dict[str, Any]:
        """Means and maxima over GPUs and time, and by GPU where there are several."""
        out: dict[str, Any] = {"source": self.source, "samples": len(self.samples)}
        if self.names:
            out["names"] = {str(k): v for k, v in sorted(self.names.items())}
        for name in FIELDS:
            values = self.column(name)
            if values.size and not np.isnan(values).all():
                out[name] = {"mean": float(np.nanmean(values)), "max": float(np.nanmax(values))}
        gpus = sorted({s.gpu for s in self.samples})
        if len(gpus) > 1:
            out["gpus"] = {str(g): self._one(g).summary() for g in gpus}
        return out

    def _one(self, gpu: int) -> Telemetry:
        return Telemetry(source=self.source, samples=tuple(s for s in self.samples if s.gpu == gpu))


def _long(seconds: float) -> str:
    for scale, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * scale:
            return f"{seconds / scale:,.3g} {name}"
    return format_seconds(seconds)
