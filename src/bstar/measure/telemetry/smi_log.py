"""Log files of `nvidia-smi dmon` and `nvidia-smi --query-gpu=… --format=csv`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bstar.errors import ConfigError
from bstar.measure.telemetry.table import GpuSample, Telemetry
from bstar.units import MIB

# Column of dmon -> (field, factor).
_DMON: Final = {
    "sm": ("gpu_busy_fraction", 0.01), "mem": ("memory_busy_fraction", 0.01), "pwr": ("power_w", 1.0),
    "gtemp": ("temperature_c", 1.0), "pclk": ("sm_clock_hz", 1e6), "mclk": ("memory_clock_hz", 1e6),
    "fb": ("memory_used_bytes", float(MIB)),
    # columns of --gpm-metrics 2,5,10; the last one's name differs between drivers
    "smutil": ("sm_active_fraction", 0.01), "mmaact": ("tensor_active_fraction", 0.01),
    **dict.fromkeys(("drambw", "dramutil", "drmutil", "dramact", "drmact"), ("dram_active_fraction", 0.01)),
}  # fmt: skip
# Column of --query-gpu without its unit -> (field, factor).
_QUERY: Final = {
    "utilization.gpu": ("gpu_busy_fraction", 0.01), "utilization.memory": ("memory_busy_fraction", 0.01),
    "power.draw": ("power_w", 1.0), "power.draw.instant": ("power_w", 1.0), "power.draw.average": ("power_w", 1.0),
    "memory.used": ("memory_used_bytes", float(MIB)), "memory.total": ("memory_total_bytes", float(MIB)),
    "clocks.sm": ("sm_clock_hz", 1e6), "clocks.current.sm": ("sm_clock_hz", 1e6),
    "clocks.gr": ("sm_clock_hz", 1e6), "clocks.current.graphics": ("sm_clock_hz", 1e6),
    "clocks.mem": ("memory_clock_hz", 1e6), "clocks.current.memory": ("memory_clock_hz", 1e6),
    "temperature.gpu": ("temperature_c", 1.0),
}  # fmt: skip
_DATED_AFTER_S: Final = 1e9  # 2001: before any log of these tools
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")


def read_smi_log(path: Path, *, interval_s: float = 1.0) -> Telemetry:
    """Samples of a log file, either kind. `interval_s` spaces them where the log has no times of its own.

    Raises ConfigError where the file is neither.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--telemetry: {path}: {error.strerror or error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if any(line.lstrip().startswith("#") and "gpu" in line.lower() for line in lines[:4]):
        samples = tuple(_dmon(lines, interval_s))
        return Telemetry(source="nvidia-smi dmon", samples=samples, dated=_dated(samples))
    if lines and ("," in lines[0]) and any(_bare(c) in _QUERY for c in lines[0].split(",")):
        return _query(lines, interval_s)
    raise ConfigError(
        f"--telemetry: {path} is no log of nvidia-smi; write one with `nvidia-smi dmon -s pucm -o DT -f FILE` or "
        "`nvidia-smi --query-gpu=timestamp,index,utilization.gpu,utilization.memory,power.draw,memory.used,clocks.sm "
        "--format=csv -l 1 -f FILE`"
    )


def _dmon(lines: list[str], interval_s: float) -> Iterator[GpuSample]:
    columns: list[str] = []
    rounds, seen = -1, set[int]()
    for line in lines:
        words = line.replace(",", " ").split()  # --format csv
        if line.lstrip().startswith("#"):
            names = [w.lower() for w in line.replace(",", " ").lstrip("# ").split()]
            if "gpu" in names:
                columns = names
            continue
        row = dict(zip(columns, words, strict=False))
        gpu = _number(row.get("gpu", ""))
        if gpu is None or len(words) < len(columns):
            continue
        if int(gpu) in seen or rounds < 0:
            rounds, seen = rounds + 1, set()
        seen.add(int(gpu))
        at = _moment(f"{row.get('date', '')} {row.get('time', '')}".strip())
        yield GpuSample(time_s=rounds * interval_s if at is None else at, gpu=int(gpu), values=_values(row, _DMON))


def _query(lines: list[str], interval_s: float) -> Telemetry:
    reader = csv.reader(lines, skipinitialspace=True)
    columns = [_bare(c) for c in next(reader)]
    samples: list[GpuSample] = []
    names: dict[int, str] = {}
    uuids: dict[str, int] = {}
    rounds, seen = -1, set[int]()
    for cells in reader:
        row = dict(zip(columns, cells, strict=False))
        if [_bare(c) for c in cells] == columns:
            continue  # nvidia-smi repeats its header when it is started again on the same file
        label = row.get("uuid") or row.get("gpu_uuid") or row.get("pci.bus_id") or "0"
        index = _number(row.get("index", ""))
        gpu = int(index) if index is not None else uuids.setdefault(label, len(uuids))
        if gpu in seen or rounds < 0:
            rounds, seen = rounds + 1, set()
        seen.add(gpu)
        name = row.get("name") or row.get("gpu_name")
        if name:
            names[gpu] = name
        at = _moment(row.get("timestamp", ""))
        samples.append(GpuSample(time_s=rounds * interval_s if at is None else at, gpu=gpu,
                                 values=_values(row, _QUERY)))
    return Telemetry(source="nvidia-smi --query-gpu", samples=tuple(samples), names=names,
                     dated=_dated(samples))


def _bare(column: str) -> str:
    """`utilization.gpu [%]` -> `utilization.gpu`."""
    return column.strip().split(" [")[0].strip().lower()


def _values(row: dict[str, str], known: dict[str, tuple[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for column, (field, factor) in known.items():
        value = _number(row.get(column, ""))
        if value is not None:
            out.setdefault(field, value * factor)
    return out


def _number(text: str) -> float | None:
    """`45 %`, `300.12 W`, `45`; None for `-`, `[N/A]`, `[Not Supported]`."""
    found = _NUMBER.match(text.strip())
    return float(found.group()) if found else None


def _moment(text: str) -> float | None:
    """Seconds of the log's own clock: `2026/11/30 12:00:00.123`, `20261130 12:00:00`, `12:00:00`.

    nvidia-smi writes local time: a date is taken as one of this machine's calendar.
    """
    for form in ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y%m%d %H:%M:%S"):
        try:
            return datetime.strptime(text.strip(), form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return datetime.strptime(text.strip(), "%H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _dated(samples: Sequence[GpuSample]) -> bool:
    """Whether the log has dates; times of day alone lie in 1900, and those of a log without any near 0."""
    return bool(samples) and all(s.time_s > _DATED_AFTER_S for s in samples)
