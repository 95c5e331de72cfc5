"""GPU telemetry: logs of nvidia-smi, DCGM exporter text, NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bstar.errors import ConfigError
from bstar.measure.clock import now
from bstar.measure.telemetry.dcgm import read_dcgm
from bstar.measure.telemetry.smi_log import read_smi_log
from bstar.measure.telemetry.watch import GpuObserver, Nvml

DMON = """# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk
# Idx      W      C      C      %      %      %      %    MHz    MHz
    0    300     60     70    100     45      0      0   2619   1980
    1      -     60      -     50     25      0      0   2619   1755
# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk
# Idx      W      C      C      %      %      %      %    MHz    MHz
    0    310     61     70     90     35      0      0   2619   1980
    1    200     60      -     50     25      0      0   2619   1755
"""
DATED = """#Date       Time        gpu    pwr     sm    mem smutil mmaact
#YYYYMMDD   HH:MM:SS    Idx      W      %      %  GPM:%  GPM:%
 20261130   12:00:00      0    300    100     45     80     30
 20261130   12:00:02      0    310     90     35     60     10
"""
QUERY = """timestamp, index, name, utilization.gpu [%], utilization.memory [%], power.draw [W], memory.used [MiB], clocks.current.sm [MHz]
2026/11/30 12:00:00.500, 0, NVIDIA H100 80GB HBM3, 99 %, 40 %, 512.25 W, 70000 MiB, 1980 MHz
2026/11/30 12:00:01.500, 0, NVIDIA H100 80GB HBM3, 97 %, [N/A], 500.00 W, 70000 MiB, 1980 MHz
"""  # noqa: E501


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_dmon(tmp_path: Path) -> None:
    seen = read_smi_log(write(tmp_path / "log", DMON), interval_s=2.0)
    assert [(s.time_s, s.gpu) for s in seen.samples] == [(0.0, 0), (0.0, 1), (2.0, 0), (2.0, 1)]
    assert seen.samples[0].values["power_w"] == 300.0
    assert "power_w" not in seen.samples[1].values
    assert seen.mean("memory_busy_fraction") == pytest.approx(0.325)
    assert seen.mean("dram_active_fraction") is None  # dmon's mem is a share of time, not of bandwidth
    assert seen.samples[0].values["sm_clock_hz"] == 1.98e9


def test_dmon_with_times_and_gpm_columns(tmp_path: Path) -> None:
    seen = read_smi_log(write(tmp_path / "log", DATED))
    assert seen.samples[1].time_s - seen.samples[0].time_s == 2.0
    assert seen.mean("sm_active_fraction") == pytest.approx(0.7)
    assert seen.mean("tensor_active_fraction") == pytest.approx(0.2)


@pytest.mark.parametrize("nounits", [False, True])
def test_query_csv(tmp_path: Path, nounits: bool) -> None:
    text = QUERY
    for unit in (" %,", " W,", " MiB,", " MHz\n") if nounits else ():
        text = text.replace(unit, unit[-1])
    seen = read_smi_log(write(tmp_path / "log", text))
    assert seen.names == {0: "NVIDIA H100 80GB HBM3"}
    assert seen.samples[1].time_s - seen.samples[0].time_s == 1.0
    assert "memory_busy_fraction" not in seen.samples[1].values
    assert seen.mean("memory_used_bytes") == 70000 * 2**20
    assert len(seen.between(seen.samples[1].time_s, 1e12).samples) == 1


def test_samples_of_another_time_are_noted(tmp_path: Path) -> None:
    """Only a log with dates can be laid beside a window."""
    dated = read_smi_log(write(tmp_path / "dated", DATED))
    assert dated.dated
    first, last = (s.time_s for s in dated.samples)
    assert [s.time_s for s in dated.inside(first - 1, first + 1).samples] == [first]
    assert dated.inside(first - 1, first + 1).note == ""
    late = dated.inside(last + 60, last + 90)
    assert len(late.samples) == 2
    assert "outside the window, 60.0 s before it" in late.note
    assert "10.0 s after it" in dated.inside(first - 20, first - 10).note
    for text in (DMON, DATED.replace("#Date       ", "#").replace("#YYYYMMDD   ", "#").replace(" 20261130  ", " ")):
        undated = read_smi_log(write(tmp_path / "undated", text))
        assert not undated.dated
        assert undated.inside(0.0, 1e12) == undated


@pytest.mark.parametrize("text", ["", "hello, world\n1, 2\n", "gpu 1\n"])
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no log of nvidia-smi") as error:
        read_smi_log(write(tmp_path / "log", text))
    assert "\n" not in str(error.value)


def test_dcgm() -> None:
    pytest.importorskip("prometheus_client")
    text = """# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",modelName="NVIDIA H200"} 98
DCGM_FI_DEV_GPU_UTIL{gpu="1",modelName="NVIDIA H200"} 96
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",modelName="NVIDIA H200"} 0.75
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",GPU_I_ID="1"} 0.1
"""
    seen = read_dcgm(text, 3.0)
    assert seen.names == {0: "NVIDIA H200", 1: "NVIDIA H200"}
    assert seen.samples[0].values == {"gpu_busy_fraction": 0.98, "dram_active_fraction": 0.75}
    with pytest.raises(ConfigError, match="no field of a GPU"):
        read_dcgm("up 1\n", 0.0)


def test_nvml_is_read_through_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def missing(*_: object) -> Any:
        raise NVMLError

    fake = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0, nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda h: b"NVIDIA L4",
        nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=50, memory=25),
        nvmlDeviceGetPowerUsage=lambda h: 72000, nvmlDeviceGetMemoryInfo=missing,
        nvmlDeviceGetClockInfo=lambda h, which: 2040, nvmlDeviceGetTemperature=missing,
        nvmlGpmQueryDeviceSupport=lambda h: SimpleNamespace(isSupportedDevice=0),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    observer = GpuObserver(Nvml(), interval_s=60.0)
    observer.start(now())
    seen = observer.stop()
    assert seen.summary["power_w"] == {"mean": 72.0, "max": 72.0}
    assert seen.summary["names"] == {"0": "NVIDIA L4"}
    assert "memory_used_bytes" not in seen.summary
    assert len(seen.tables["gpu"]["time_s"]) == 2


def test_without_nvml_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        Nvml()
