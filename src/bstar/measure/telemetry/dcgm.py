"""DCGM exporter text: one scrape of its /metrics."""

from __future__ import annotations

from typing import Final

from bstar.errors import ConfigError
from bstar.measure.telemetry.table import GpuSample, Telemetry
from bstar.units import MIB

# Field -> candidates with their factors; DCGM 4 renamed some.
_FIELDS: Final[dict[str, tuple[tuple[str, float], ...]]] = {
    "dram_active_fraction": (("DCGM_FI_PROF_DRAM_ACTIVE", 1.0),),
    "sm_active_fraction": (("DCGM_FI_PROF_SM_ACTIVE", 1.0),),
    "tensor_active_fraction": (("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1.0),),
    "gpu_busy_fraction": (("DCGM_FI_DEV_GPU_UTIL", 0.01),),
    "memory_busy_fraction": (("DCGM_FI_DEV_MEM_COPY_UTIL", 0.01),),
    "power_w": (("DCGM_FI_DEV_POWER_USAGE", 1.0), ("DCGM_FI_DEV_BOARD_POWER_AVG_WATTS", 1.0)),
    "sm_clock_hz": (("DCGM_FI_DEV_SM_CLOCK", 1e6), ("DCGM_FI_DEV_SM_CLOCK_MHZ", 1e6)),
    "memory_clock_hz": (("DCGM_FI_DEV_MEM_CLOCK", 1e6), ("DCGM_FI_DEV_MEM_CLOCK_MHZ", 1e6)),
    "memory_used_bytes": (("DCGM_FI_DEV_FB_USED", float(MIB)),),
    "memory_total_bytes": (("DCGM_FI_DEV_FB_TOTAL", float(MIB)),),
    "temperature_c": (("DCGM_FI_DEV_GPU_TEMP", 1.0), ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 1.0)),
}


def read_dcgm(text: str, time_s: float) -> Telemetry:
    """One sample a GPU from exporter text. Raises ConfigError where it has no DCGM field of a GPU."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[int, dict[str, float]] = {}
    names: dict[int, str] = {}
    wanted = {name: (field, factor) for field, found in _FIELDS.items() for name, factor in found}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # A GPU that is cut into instances (MIG) shows each one; the whole card is the sample without one.
                if sample.name not in wanted or sample.labels.get("GPU_I_ID"):
                    continue
                field, factor = wanted[sample.name]
                gpu = int(sample.labels.get("gpu", 0))
                values.setdefault(gpu, {}).setdefault(field, sample.value * factor)
                if sample.labels.get("modelName"):
                    names[gpu] = sample.labels["modelName"]
    except ValueError as error:
        raise ConfigError(f"telemetry: not the text of a DCGM exporter: {error}") from None
    if not values:
        raise ConfigError("telemetry: the text shows no field of a GPU; give the /metrics of a DCGM exporter")
    samples = tuple(GpuSample(time_s=time_s, gpu=gpu, values=found) for gpu, found in sorted(values.items()))
    return Telemetry(source="dcgm", samples=samples, names=names)
