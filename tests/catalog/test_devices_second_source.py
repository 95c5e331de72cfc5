"""The second source of the device catalog: tests/data/device_facts.csv, one published fact a line.

Each line was read from a public table, library or page that is not the one the device file was written from. Rates are
dense and links go one way; where the source prints a sparse figure or both directions, the line says so and has half.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from bstar.catalog.devices import all_devices, get_device
from bstar.specs.device import DeviceSpec

_TABLE = Path(__file__).parents[1] / "data" / "device_facts.csv"
FACTS = list(csv.DictReader(_TABLE.read_text(encoding="utf-8").splitlines()))
SCALE = {"": 1.0, "GB/s": 1e9, "GB": 1e9, "GiB": 2.0**30, "MiB": 2.0**20, "TFLOP/s": 1e12}
BY_DEVICE: dict[str, list[dict[str, str]]] = defaultdict(list)
for _fact in FACTS:
    BY_DEVICE[_fact["device"]].append(_fact)
ROUNDING = 0.01  # sources round: 756 or 756.5 TFLOP/s, 696 or 695.8 GB/s


def of(device: DeviceSpec, figure: str) -> float | None:
    if figure.startswith("peak."):
        return device.peak_flops_per_s.get(figure.removeprefix("peak."))
    if figure == "link":
        return None if device.link is None else device.link.bandwidth_bytes_per_s
    value: float | None = getattr(device, figure)
    return value


def test_the_table_is_wide() -> None:
    assert len(FACTS) >= 700
    assert len(BY_DEVICE) >= 90
    assert len({fact["source"] for fact in FACTS}) >= 60
    assert all(fact["source"] for fact in FACTS)


@pytest.mark.parametrize("name", sorted(BY_DEVICE))
def test_catalog_equals_the_second_source(name: str) -> None:
    device = get_device(name)
    assert device.id == name
    for fact in BY_DEVICE[name]:
        ours, theirs = of(device, fact["figure"]), float(fact["value"]) * SCALE[fact["unit"]]
        said = f"{fact['figure']}: {ours} here, {theirs} in {fact['source']}"
        assert ours is not None, said
        if fact["unit"] == "":
            assert ours == theirs, said
        elif fact["unit"] == "MiB":
            assert abs(ours - theirs) <= SCALE["MiB"], said
        else:
            assert ours == pytest.approx(theirs, rel=ROUNDING), said


@pytest.mark.parametrize("device", all_devices(), ids=lambda d: d.id)
def test_what_no_second_source_confirms_is_marked_unverified(device: DeviceSpec) -> None:
    seen = {fact["figure"] for fact in BY_DEVICE[device.id]}
    peaks = device.peak_flops_per_s
    for pair in (("bf16", "fp16"), ("fp8", "int8"), ("fp6", "fp4")):  # one matrix unit at one rate
        if len({peaks.get(dtype) for dtype in pair}) == 1 and any(f"peak.{dtype}" in seen for dtype in pair):
            seen |= {f"peak.{dtype}" for dtype in pair}
    if "peak_flops_per_s" not in device.unverified:
        marked = {name.partition(".")[2] for name in device.unverified if name.startswith("peak_flops_per_s.")}
        assert marked == {dtype for dtype in peaks if f"peak.{dtype}" not in seen}
    else:
        assert not any(f"peak.{dtype}" in seen for dtype in peaks)
    assert ("bandwidth_bytes_per_s" in device.unverified) == ("bandwidth_bytes_per_s" not in seen)
    if device.link is not None:
        assert ("link" in device.unverified) == ("link" not in seen)
