"""Laws that every device file obeys, and facts that a datasheet or a log states."""

from __future__ import annotations

import re

import pytest

from bstar.catalog.devices import all_devices, get_device
from bstar.errors import SpecError
from bstar.specs.device import DeviceSpec
from bstar.units import GIB

DEVICES = all_devices()
FIELDS = set(DeviceSpec.__dataclass_fields__)
each_device = pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.id)


def test_catalog_is_wide() -> None:
    assert len(DEVICES) >= 45
    assert {d.vendor for d in DEVICES} >= {"nvidia", "amd", "intel", "google", "aws", "apple"}


@each_device
def test_every_figure_has_a_source(device: DeviceSpec) -> None:
    assert device.source and re.fullmatch(r"\d{4}-\d{2}-\d{2}", device.date)
    if device.price is not None:
        assert device.price.source and device.price.date and 0 < device.price.usd_per_hour < 30
    for name in device.unverified:
        field, _, dtype = name.partition(".")
        assert field in FIELDS and (not dtype or dtype in device.peak_flops_per_s), name


@each_device
def test_magnitudes(device: DeviceSpec) -> None:
    assert 5e9 <= device.memory_bytes <= 600e9
    assert 50e9 <= device.bandwidth_bytes_per_s <= 30e12
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", device.id)
    assert device.devices_per_node >= 1
    for link in (device.link, device.pcie, device.inter_node):
        if link is not None:
            assert 1e9 <= link.bandwidth_bytes_per_s <= 4e12 and 0 < link.latency_s < 1e-3
    if device.inter_node is not None:
        assert device.inter_node.provenance == "assumed"
    if device.link is not None and device.inter_node is not None:
        assert device.link.bandwidth_bytes_per_s > device.inter_node.bandwidth_bytes_per_s


@each_device
def test_driver_memory_is_near_the_vendors(device: DeviceSpec) -> None:
    for known in (device.usable_memory_bytes, device.nvml_memory_bytes):
        if known is not None:
            assert 0.85 <= known / device.memory_bytes <= 1.08
    if device.usable_memory_bytes and device.nvml_memory_bytes:
        assert device.usable_memory_bytes <= device.nvml_memory_bytes


@each_device
def test_peaks_are_dense(device: DeviceSpec) -> None:
    peaks = device.peak_flops_per_s
    wide = max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
    if wide == 0.0:
        return
    assert peaks.get("bf16", wide) == peaks.get("fp16", wide)
    assert 20 <= wide / device.bandwidth_bytes_per_s <= 600  # ridge point, FLOP per byte
    for dtype, factor in (("fp8", 4.0 if device.vendor == "aws" else 2.2), ("int8", 4.2), ("fp4", 8.1), ("tf32", 1.01)):
        if dtype in peaks:
            assert peaks[dtype] <= factor * wide, dtype
    if "fp32" in peaks and device.vendor != "apple":
        assert peaks["fp32"] <= wide


def test_a_missing_dtype_is_refused_with_those_that_exist() -> None:
    with pytest.raises(SpecError, match=r"no fp8 peak in its datasheet; it has bf16, fp16, fp32, int4, int8, tf32"):
        get_device("a100").peak("fp8")
    assert get_device("h100").peak("bf16") == 989.4e12


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("h100-sxm-80gb", 79.19), ("a100-sxm-80gb", 79.25), ("rtx-4090", 23.516), ("rtx-3090", 23.58),
        ("rtx-a6000", 47.54), ("b200-sxm-180gb", 178.35), ("gb10", 121.63), ("h200-sxm-141gb", 139.80),
        ("gb200", 184.31), ("b300", 267.69), ("gb300", 276.50), ("mi300x", 191.98), ("a10g", 22.06),
    ],
)  # fmt: skip
def test_memory_that_drivers_were_seen_to_report(name: str, memory_gib: float) -> None:
    assert get_device(name).reported_memory_bytes == pytest.approx(memory_gib * GIB, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "bandwidth", "bf16"),
    [  # the system table of AIConfigurator 0.12, an independent reading of the same datasheets
        ("a100_sxm", 2039e9, 312e12), ("h100_sxm", 3350e9, 989e12), ("h200_sxm", 4800e9, 989e12),
        ("b200_sxm", 7700e9, 2250e12), ("gb200", 8000e9, 2500e12), ("l40s", 864e9, 362e12), ("b60", 456e9, 98e12),
    ],
)  # fmt: skip
def test_agrees_with_an_independent_table(name: str, bandwidth: float, bf16: float) -> None:
    device = get_device(name)
    assert device.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.001)
    assert device.peak("bf16") == pytest.approx(bf16, rel=0.01)


def test_nodes_and_links() -> None:
    assert get_device("gb200").devices_per_node == get_device("gb300").devices_per_node == 72
    h100 = get_device("h100")
    assert h100.link is not None and h100.link.bandwidth_bytes_per_s == 450e9 and h100.devices_per_node == 8
    assert h100.inter_node is not None and h100.inter_node.bandwidth_bytes_per_s == 50e9
    assert get_device("l40s").link is None and get_device("l40s").pcie is not None


def test_the_link_that_a_group_of_devices_crosses() -> None:
    rtx3090, h100, gb200, l4 = (get_device(name) for name in ("rtx-3090", "h100", "gb200", "l4"))
    assert rtx3090.link_between(2) == rtx3090.link and rtx3090.link_between(4) == rtx3090.pcie
    assert h100.link_between(8) == h100.link and h100.link_between(16) == h100.inter_node
    assert gb200.link_between(64) == gb200.link and gb200.link_between(144) == gb200.inter_node
    assert l4.link_between(2) == l4.pcie and get_device("apple-m4-max").link_between(2) is None


@each_device
def test_bridged_cards_say_how_many_a_bridge_joins(device: DeviceSpec) -> None:
    if device.link is None:
        assert device.link_devices is None
    elif device.link_devices is not None:
        assert 2 <= device.link_devices < device.devices_per_node and device.pcie is not None
    assert (device.link is not None and device.link.kind == "nvlink-bridge") <= (device.link_devices is not None)
