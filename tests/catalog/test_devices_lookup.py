"""Finding a device: ids, aliases, product names, files of the user, errors."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.catalog import devices
from bstar.catalog.devices import build_index, device_ids, get_device, normalized, with_overrides
from bstar.errors import BstarError, ConfigError, NotInCatalogError, SpecError

DATA = Path(__file__).parents[1] / "data"
NAMES: dict[str, str | None] = json.loads((DATA / "gpu_names.json").read_text(encoding="utf-8"))["names"]
MINE = """
id = "my-gpu"
name = "My GPU"
vendor = "mine"
generation = "one"
memory_bytes = 48_000_000_000
bandwidth_bytes_per_s = 1e12
aliases = ["big one"]
source = "my own datasheet"
[peak_flops_per_s]
bf16 = 200e12
[link]
kind = "pcie"
bandwidth_bytes_per_s = 32e9
latency_s = 5e-6
provenance = "assumed"
"""


def test_index_is_fresh() -> None:
    stored = json.loads((Path(devices.__file__).parent / "devices" / devices.INDEX_NAME).read_text(encoding="utf-8"))
    assert stored == build_index(), "run `python -m bstar.catalog.devices`"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_measured_files(name: str) -> None:
    expected = NAMES[name]
    if expected is None:
        with pytest.raises(NotInCatalogError):
            get_device(name)
    else:
        assert get_device(name).id == expected


@pytest.mark.parametrize(
    ("name", "device_id"),
    [
        ("h100", "h100-sxm-80gb"), ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"), ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"), ("NVIDIA H200", "h200-sxm-141gb"), ("NVIDIA H20", "h20-sxm-96gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA B200", "b200-sxm-180gb"), ("NVIDIA B300 SXM6 AC", "b300-sxm-288gb"),
        ("NVIDIA GB200", "gb200-nvl72-186gb"),
        ("NVIDIA GB300", "gb300-nvl72-288gb"), ("NVIDIA GH200 480GB", "gh200-96gb"), ("NVIDIA GB10", "gb10"),
        ("Tesla T4", "t4"), ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"), ("NVIDIA A10G", "a10g"), ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("GeForce RTX 3090", "rtx-3090"), ("4090", "rtx-4090"),
        ("RTX 3090", "rtx-3090"), ("rtx_5090", "rtx-5090"), ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI300X OAM", "mi300x"), ("MI355X", "mi355x"),
        ("Intel Gaudi 3", "gaudi-3"), ("TPU v5e", "tpu-v5e"), ("Google TPU v6e (Trillium)", "tpu-v6e"),
        ("trn2", "trainium-2"), ("Apple M4 Max", "apple-m4-max"), ("dgx-spark", "gb10"),
        (" H100_SXM ", "h100-sxm-80gb"),
    ],
)  # fmt: skip
def test_common_spellings(name: str, device_id: str) -> None:
    assert get_device(name).id == device_id


@given(st.sampled_from(device_ids()), st.randoms(use_true_random=False), st.sampled_from(" -_"))
def test_case_and_separators_do_not_matter(device_id: str, random: object, separator: str) -> None:
    assert get_device(device_id.upper().replace("-", separator)).id == device_id


@given(st.text(max_size=40))
def test_any_text_resolves_or_is_one_line(text: str) -> None:
    try:
        get_device(text if normalized(text) != "cpu" else "x")
    except BstarError as error:
        assert "\n" not in str(error).replace(text, "")


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(NotInCatalogError) as caught:
        get_device("h1000")
    assert "h100-sxm-80gb" in caught.value.suggestions
    assert "bstar catalog devices" in str(caught.value)
    with pytest.raises(NotInCatalogError) as caught:
        get_device("rtx 4091")
    assert caught.value.suggestions[0] == "rtx-4090"


def test_a_users_file_as_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE, encoding="utf-8")
    device = get_device(str(path))
    assert (device.id, device.peak("bf16"), device.reported_memory_bytes) == ("my-gpu", 200e12, 48_000_000_000)
    assert device.link is not None and device.link.provenance == "assumed"


def test_a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "my-gpu.toml").write_text(MINE, encoding="utf-8")
    monkeypatch.setenv("BSTAR_CATALOG", str(tmp_path))
    assert get_device("MY GPU").id == get_device("big-one").id == "my-gpu"
    assert "my-gpu" in device_ids() and get_device("h100").id == "h100-sxm-80gb"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth_bytes_per_s = 1e12", "bandwith = 1e12", "'bandwith'; did you mean bandwidth_bytes_per_s?"),
        ("bandwidth_bytes_per_s = 1e12\n", "", "lacks bandwidth_bytes_per_s"),
        ("48_000_000_000", '"48GB"', "memory_bytes"),
        ("48_000_000_000", "-1", "must be positive"),
        ("48_000_000_000", "nan", "memory_bytes"),
        ("48_000_000_000", "inf", "memory_bytes"),
        ("bf16 = 200e12", "bf16 = 0", "a peak must be positive"),
        ("bf16 = 200e12", "bf16 = nan", "peak_flops_per_s.bf16: must be float, is nan"),
        ("bf16 = 200e12", "bf16 = true", "peak_flops_per_s.bf16"),
        ("bf16 = 200e12", "", "at least one dtype"),
        ("latency_s = 5e-6", "latency = 5e-6", "unknown key 'latency'; did you mean latency_s"),
        ("latency_s = 5e-6", "latency_s = -1", "latency at least 0"),
        ('provenance = "assumed"', 'provenance = "guess"', "provenance"),
        ("[link]", "[links]", "unknown key 'links'; did you mean link?"),
        ('source = "my own datasheet"', 'source = "x"\nlink = 3', "TOML"),
        ('aliases = ["big one"]', 'aliases = "big one"', "aliases"),
        ('id = "my-gpu"', "id = ", "not TOML"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINE
    path = tmp_path / "bad.toml"
    path.write_text(MINE.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        get_device(str(path))
    assert message in str(caught.value) and "bad.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    large = tmp_path / "large.toml"
    large.write_text("#" * (1 << 21), encoding="utf-8")
    for path in (tmp_path / "missing.toml", loop, binary, large, tmp_path):
        name = str(path) if path.suffix else f"{path}/.toml"
        with pytest.raises(ConfigError, match="gpu file"):
            get_device(name)


def test_overrides() -> None:
    device = with_overrides(
        get_device("h100"), price_usd_per_hour=1.5, memory_bytes=90 * 10**9, bandwidth_bytes_per_s=3e12
    )
    assert device.price is not None and device.price.usd_per_hour == 1.5
    assert device.reported_memory_bytes == 90 * 10**9 and device.bandwidth_bytes_per_s == 3e12
    assert with_overrides(get_device("h100")) is get_device("h100")
    with pytest.raises(SpecError):
        with_overrides(get_device("h100"), memory_bytes=0)


def test_devices_travel_to_other_processes() -> None:
    device = get_device("h100")
    assert pickle.loads(pickle.dumps(device)) == device and hash(device) == hash(get_device("H100"))


def test_the_whole_catalog_loads_quickly() -> None:
    devices._shipped.cache_clear()
    start = time.perf_counter()
    devices.all_devices()
    assert time.perf_counter() - start < 0.5  # 0.02 s on an idle machine; CI shares its cores


def test_one_lookup_parses_one_file_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from bstar.catalog import devices; n = 0\n"
        "def count(*a, _p=devices._parse):\n    global n; n += 1; return _p(*a)\n"
        "devices._parse = count; devices.get_device('NVIDIA H100 80GB HBM3')\n"
        "assert n == 1, n; assert 'numpy' not in sys.modules and 'bstar.catalog.probe' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_the_cpu_is_measured_and_kept_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bstar.catalog import probe

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "_COPY_BYTES", 1 << 23)
    monkeypatch.setattr(probe, "_MATRIX_SIZE", 128)
    probe.cpu_device.cache_clear()
    assert probe.load_probe() is None
    found = probe.measure(min_seconds=0.001)
    assert found.bandwidth_bytes_per_s > 1e8 and found.fp32_flops_per_s > 1e8 and found.memory_bytes > 1e8
    assert not list(tmp_path.rglob("*.json"))
    saved = probe.save_probe(found)
    assert saved.is_relative_to(tmp_path) and probe.load_probe() == found
    device = get_device("CPU")
    assert device.id == "cpu" and device.peak("fp32") == found.fp32_flops_per_s and device.unified_memory
    saved.write_text("{}", encoding="utf-8")
    assert probe.load_probe() is None
    probe.cpu_device.cache_clear()
