"""GPU telemetry through a run: NVML of this machine, or a DCGM exporter's URL."""

from __future__ import annotations

import contextlib
import importlib
import urllib.request
from typing import Any, Protocol

from bstar.errors import ConfigError
from bstar.measure.clock import now
from bstar.measure.observers import Observation, Repeating
from bstar.measure.telemetry.dcgm import read_dcgm
from bstar.measure.telemetry.table import GpuSample, Telemetry


class TelemetrySource(Protocol):
    """Reads all GPUs once."""

    def read(self) -> Telemetry:
        """Samples of this moment. Raises ConfigError where there is nothing to read."""


class Nvml:
    """The GPUs of this machine. With GPM (Hopper and later) also the used share of the memory bandwidth."""

    def __init__(self) -> None:
        try:
            pynvml: Any = importlib.import_module("pynvml")  # it has no types
        except ImportError:
            raise ConfigError("telemetry: NVML needs nvidia-ml-py; pip install nvidia-ml-py") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise ConfigError(f"telemetry: NVML finds no GPU here: {error}") from None
        self._before: dict[int, Any] = {}

    def read(self) -> Telemetry:
        at = now()
        samples = tuple(GpuSample(time_s=at, gpu=i, values=self._one(i, h)) for i, h in enumerate(self._handles))
        return Telemetry(source="nvml", samples=samples, names=self._names())

    def _names(self) -> dict[int, str]:
        out: dict[int, str] = {}
        for i, handle in enumerate(self._handles):
            with contextlib.suppress(self._nvml.NVMLError):
                name = self._nvml.nvmlDeviceGetName(handle)
                out[i] = name.decode() if isinstance(name, bytes) else str(name)
        return out

    def _one(self, index: int, handle: Any) -> dict[str, float]:
        n = self._nvml
        out: dict[str, float] = {}
        with contextlib.suppress(n.NVMLError):
            use = n.nvmlDeviceGetUtilizationRates(handle)
            out["gpu_busy_fraction"], out["memory_busy_fraction"] = use.gpu / 100.0, use.memory / 100.0
        with contextlib.suppress(n.NVMLError):
            out["power_w"] = n.nvmlDeviceGetPowerUsage(handle) / 1000.0
        with contextlib.suppress(n.NVMLError):
            memory = n.nvmlDeviceGetMemoryInfo(handle)
            out["memory_used_bytes"], out["memory_total_bytes"] = float(memory.used), float(memory.total)
        with contextlib.suppress(n.NVMLError):
            out["sm_clock_hz"] = n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM) * 1e6
        with contextlib.suppress(n.NVMLError):
            out["memory_clock_hz"] = n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM) * 1e6
        with contextlib.suppress(n.NVMLError):
            out["temperature_c"] = float(n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU))
        with contextlib.suppress(n.NVMLError, AttributeError):
            out.update(self._performance(index, handle))
        return out

    def _performance(self, index: int, handle: Any) -> dict[str, float]:
        """GPM metrics between two readings, as fractions."""
        n = self._nvml
        if not n.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return {}
        sample = n.nvmlGpmSampleAlloc()
        n.nvmlGpmSampleGet(handle, sample)
        before, self._before[index] = self._before.get(index), sample
        if before is None:
            return {}
        wanted = {
            "dram_active_fraction": n.NVML_GPM_METRIC_DRAM_BW_UTIL,
            "sm_active_fraction": n.NVML_GPM_METRIC_SM_UTIL,
            "tensor_active_fraction": n.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        }
        ask = n.c_nvmlGpmMetricsGet_t()
        ask.version, ask.numMetrics = n.NVML_GPM_METRICS_GET_VERSION, len(wanted)
        ask.sample1, ask.sample2 = before, sample
        for i, identifier in enumerate(wanted.values()):
            ask.metrics[i].metricId = identifier
        n.nvmlGpmMetricsGet(ask)
        n.nvmlGpmSampleFree(before)
        found = zip(wanted, ask.metrics, strict=False)
        return {name: metric.value / 100.0 for name, metric in found if metric.nvmlReturn == n.NVML_SUCCESS}


class DcgmExporter:
    """A DCGM exporter, on the machine of the server."""

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        self.url, self.timeout_s = url, timeout_s

    def read(self) -> Telemetry:
        try:
            with urllib.request.urlopen(self.url, timeout=self.timeout_s) as answer:
                text = answer.read().decode("utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"telemetry: {self.url}: {error}; give the /metrics of a DCGM exporter") from None
        return read_dcgm(text, now())


class GpuObserver:
    """Watches GPUs through a run: `gpu` in summary.json, and a table of samples."""

    def __init__(self, source: TelemetrySource, *, interval_s: float = 1.0) -> None:
        self.source, self.interval_s = source, interval_s
        self._samples: list[GpuSample] = []
        self._last: Telemetry | None = None
        self._failure = ""
        self._repeating: Repeating | None = None
        self._origin_s = 0.0

    def start(self, origin_s: float) -> None:
        self._samples, self._last, self._failure = [], None, ""
        self._origin_s = origin_s
        self._repeating = Repeating(self._sample, self.interval_s, name="bstar-gpu")
        self._repeating.start()

    @property
    def telemetry(self) -> Telemetry | None:
        """What was seen so far; None where the source never answered."""
        if self._last is None:
            return None
        return Telemetry(source=self._last.source, samples=tuple(self._samples), names=self._last.names)

    def stop(self) -> Observation:
        if self._repeating is not None:
            self._repeating.stop(timeout_s=10.0)
        seen = self.telemetry
        if seen is None:
            return Observation(name="gpu", summary={"error": self._failure})
        summary = seen.summary() if not self._failure else {**seen.summary(), "last_failure": self._failure}
        return Observation(name="gpu", summary=summary, tables={"gpu": seen.columns(self._origin_s)})

    def _sample(self) -> None:
        try:
            self._last = self.source.read()
            self._samples.extend(self._last.samples)
        except Exception as error:  # a run is not lost for its observer
            self._failure = str(error) or type(error).__name__
