"""This machine's CPU as a device: its memory bandwidth and FLOP/s, measured with numpy.

Nothing is measured at import. `cpu_device()` measures once per machine (about a second) and keeps the result in
the user's cache folder, so that the same command says the same twice. A machine is a processor and a number of CPUs.

    python -m bstar.catalog.probe     measures anew and keeps that: after a change of the machine, or where the first
                                      measurement was made beside other work

Deleting the file that it names does the same.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from bstar.errors import ConfigError, SpecError
from bstar.files import write_whole
from bstar.specs.device import DeviceSpec
from bstar.units import GB, KIB, TERA

# Larger than the last-level caches of today's servers (up to 1 GB with stacked cache), and small enough
# for a small machine: an eighth of its memory at most.
_COPY_BYTES = 1 << 28
_MATRIX_SIZE = 1024
# What is measured is kept: long enough to find a moment without others.
_MIN_SECONDS = 0.3
_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one measurement found.

    read_bytes_per_s   summing an array larger than the caches
    copy_bytes_per_s   copying it, read and write bytes counted
    fp32_flops_per_s   a square fp32 matrix product through numpy's BLAS
    """

    processor: str
    logical_cpus: int
    memory_bytes: int
    read_bytes_per_s: float
    copy_bytes_per_s: float
    fp32_flops_per_s: float
    measured_at: str

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The better of reading and copying: what a stream of weights can hope for."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


@cache
def cpu_device() -> DeviceSpec:
    """This machine's CPU: as it was measured once; measured now, and kept, where it was not."""
    return device_of(load_probe() or _kept(measure()))


def _kept(probe: Probe) -> Probe:
    """The probe that later processes will read; this one where nothing can be kept."""
    try:
        first = load_probe()  # of a process that measured at the same time
        if first is None:
            save_probe(probe)
    except ConfigError:  # a read-only home: each process measures for itself
        return probe
    return first or probe


def device_of(probe: Probe) -> DeviceSpec:
    """The device that a probe describes: one per machine, its memory shared with everything else."""
    return DeviceSpec(
        id="cpu",
        name=f"CPU ({probe.processor}, {probe.logical_cpus} logical CPUs)",
        vendor="cpu",
        generation="cpu",
        memory_bytes=probe.memory_bytes,
        usable_memory_bytes=probe.memory_bytes,
        bandwidth_bytes_per_s=probe.bandwidth_bytes_per_s,
        peak_flops_per_s=dict.fromkeys(_DTYPES, probe.fp32_flops_per_s),
        devices_per_node=1,
        unified_memory=True,
        source=f"measured on this machine with numpy at {probe.measured_at}",
        date=probe.measured_at[:10],
        unverified=("bandwidth_bytes_per_s", *(f"peak_flops_per_s.{dtype}" for dtype in _DTYPES)),
        notes=("bf16 and fp16 at the measured fp32 rate, as on a CPU that widens them; AMX and AVX-512 are faster",),
    )


def measure(*, min_seconds: float = _MIN_SECONDS) -> Probe:
    """Measure now: the best of several passes, each kernel for about `min_seconds` (s).

    Raises SpecError where the machine does not say how much memory it has.
    """
    import numpy as np  # slow to import, and only a probe needs it

    memory_bytes = _memory_bytes()
    count = min(_COPY_BYTES, memory_bytes // 8) // 8
    source = np.ones(count, dtype=np.float64)
    target = np.empty_like(source)
    left = np.full((_MATRIX_SIZE, _MATRIX_SIZE), 0.5, dtype=np.float32)
    product = np.empty_like(left)
    copy_s = _best_s(lambda: np.copyto(target, source), min_seconds)
    read_s = _best_s(lambda: source.sum(), min_seconds)
    matmul_s = _best_s(lambda: np.matmul(left, left, out=product), min_seconds)
    return Probe(
        processor=_processor(),
        logical_cpus=_logical_cpus(),
        memory_bytes=memory_bytes,
        read_bytes_per_s=source.nbytes / read_s,
        copy_bytes_per_s=2 * source.nbytes / copy_s,
        fp32_flops_per_s=2 * _MATRIX_SIZE**3 / matmul_s,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def probe_path() -> Path:
    """Where the saved probe of this machine lies: a file a processor and number of CPUs, in the user's cache folder."""
    # A home may be shared by machines that differ; a job may get some of a machine's CPUs.
    machine = re.sub(r"[^a-z0-9]+", "-", _processor().lower()).strip("-")[:80]
    return _cache_folder() / "bstar" / f"cpu-{machine}-{_logical_cpus()}.json"


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        raise ConfigError("cpu probe: there is no home folder to keep it in; set XDG_CACHE_HOME") from None


def save_probe(probe: Probe) -> Path:
    """Keep a probe for later processes; returns its path. Raises ConfigError where it cannot be written."""
    path = probe_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cpu probe: {str(path)!r} cannot be written ({error.strerror})") from None
    write_whole(path, json.dumps(asdict(probe), indent=1) + "\n", what="cpu probe")
    return path


def load_probe() -> Probe | None:
    """The saved probe of this machine, or None: not there, not readable, or of another processor.

    Its memory is that of now, which needs no measurement: another container on the machine may have another limit.
    """
    try:
        raw = json.loads(probe_path().read_text(encoding="utf-8"))
        probe = Probe(**raw)
        usable = min(probe.memory_bytes, probe.bandwidth_bytes_per_s, probe.fp32_flops_per_s) > 0
    except (OSError, ValueError, TypeError, ConfigError):
        return None
    same = probe.processor == _processor() and probe.logical_cpus == _logical_cpus()
    return replace(probe, memory_bytes=_memory_bytes()) if usable and same else None


def _best_s(kernel: Callable[[], object], min_seconds: float) -> float:
    kernel()  # pages are touched and the BLAS threads started outside the timing
    best, spent, passes = float("inf"), 0.0, 0
    while spent < min_seconds or passes < 3:
        start = time.perf_counter()
        kernel()
        elapsed = time.perf_counter() - start
        best, spent, passes = min(best, elapsed), spent + elapsed, passes + 1
    return max(best, 1e-9)


def _logical_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _memory_bytes() -> int:
    """Memory of the machine, or of the container where that has a lower limit."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        total = 0
    if total <= 0:
        raise SpecError("gpu cpu: this machine does not say how much memory it has; describe it in a TOML file instead")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        total = min(total, limit) if limit >= 64 * KIB else total
    except (OSError, ValueError):
        pass
    return total


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def main() -> None:
    """Measure anew, keep it, and print what was found."""
    probe = measure()
    path, device = save_probe(probe), device_of(probe)
    sys.stdout.write(f"{device.name}: {device.bandwidth_bytes_per_s / GB:.4g} GB/s, "
                     f"{device.peak('fp32') / TERA:.4g} TFLOP/s; kept in {path}\n")


if __name__ == "__main__":
    main()
