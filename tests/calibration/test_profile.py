"""Profiles: strict files, and what they hold for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bstar
from bstar.calibration.profile import (
    Profile,
    ProfileConstant,
    ProfileDevice,
    ProfilePoint,
    Scope,
    calibrated,
    holds_for,
    profile_notes,
    profile_schema,
    read_profile,
    write_profile,
)
from bstar.catalog.devices import with_overrides
from bstar.catalog.probe import Probe, device_of
from bstar.errors import ConfigError, InputError, SpecError
from bstar.latency import decode_step_time
from bstar.latency.constants import constants_for
from bstar.specs.deployment import Deployment

DEPLOYMENT = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="vllm@0.19.0")


def a_profile(**changes: Any) -> Profile:
    parts: dict[str, Any] = {
        "name": "mine", "scope": Scope.of(DEPLOYMENT), "created_by": "bstar 0.1.0", "notes": ("a “note” \x7f",),
        "constants": (
            ProfileConstant(name="scale.gemm_memory", value=0.9, prior=1.0, standard_error=0.05),
            ProfileConstant(name="step_s", value=3e-3, prior=3e-4, standard_error=1e-4),
        ),
        "device": ProfileDevice(name="CPU (a, 8 logical CPUs)", bandwidth_bytes_per_s=5e10,
                                peak_flops_per_s={"bf16": 1e12, "fp32": 1e12}),
        "covariance": ((0.0025, -1e-6), (-1e-6, 1e-8)),
        "points": (ProfilePoint(
            id="low", load="concurrency", load_value=4.0, input_tokens=512.0, output_tokens=128.0,
            measured={"tpot_s": 0.008, "ttft_s": 0.05}, before={"tpot_s": 0.007, "ttft_s": 0.04},
            after={"tpot_s": 0.0081, "ttft_s": 0.049}, measured_on="2026-11-30"),),
    }  # fmt: skip
    return Profile(**(parts | changes))


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_file_holds_the_profile(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p{suffix}"
    write_profile(a_profile(), path)
    assert read_profile(path) == a_profile()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing beside it


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_profile(a_profile(), tmp_path / "no" / "p.json")
    with pytest.raises(ConfigError, match=r"\.json"):
        write_profile(a_profile(), tmp_path / "p.txt")
    assert list(tmp_path.iterdir()) == []


def _broken() -> list[tuple[str, dict[str, Any], str]]:
    def changed(**changes: Any) -> dict[str, Any]:
        return json.loads(json.dumps(a_profile().to_dict())) | changes

    plain = changed()
    point, constant = plain["points"][0], plain["constants"][0]
    return [
        ("another format", changed(format="bstar-profile/9"), "format"),
        ("an unknown key", changed(constnats=[]), "did you mean constants"),
        ("no scope", {k: v for k, v in plain.items() if k != "scope"}, "scope"),
        ("a scope without its GPU", changed(scope={"model": "a", "engine": "vllm"}), "gpu"),
        ("an unknown key of the scope", changed(scope=plain["scope"] | {"tpp": 2}), "tpp"),
        ("a degree of 0", changed(scope=plain["scope"] | {"tp": 0}), "at least 1"),
        ("a text for a number", changed(constants=[constant | {"value": "0.9"}]), "value"),
        ("a constant that is none", changed(constants=[constant | {"name": "magic"}], covariance=[]), "magic"),
        ("an efficiency above what physics allows",
         changed(constants=[constant | {"value": 7.0}], covariance=[]), "scale.gemm_memory"),
        ("an unknown key of a point", changed(points=[point | {"tpot": 1}]), "tpot"),
        ("a measured time below 0", changed(points=[point | {"measured": {"tpot_s": -1.0}}]), "more than 0"),
        ("another load", changed(points=[point | {"load": "qps"}]), "rate_per_s"),
        ("a device without its peaks", changed(device={"name": "a", "bandwidth_bytes_per_s": 1e9}), "peak_flops_per_s"),
        ("a bandwidth of 0", changed(device=plain["device"] | {"bandwidth_bytes_per_s": 0}), "more than 0"),
        ("a covariance of another size", changed(covariance=[[1.0]]), "covariance"),
    ]  # fmt: skip


@pytest.mark.parametrize(("what", "content", "said"), _broken(), ids=[one[0] for one in _broken()])
def test_a_broken_file_is_one_line_that_says_where(
    tmp_path: Path, what: str, content: dict[str, Any], said: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_profile(path)
    assert said in str(caught.value), what
    assert "\n" not in str(caught.value)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_profile(tmp_path / "none.json")
    path = tmp_path / "p.json"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError):
        read_profile(path)


def test_the_schema_names_every_key() -> None:
    schema = profile_schema()
    assert set(schema["properties"]) == set(a_profile().to_dict())
    assert set(schema["properties"]["points"]["items"]["properties"]) == set(a_profile().to_dict()["points"][0])
    published = Path(__file__).parents[2] / "docs" / "profile.schema.json"
    assert json.loads(published.read_text()) == schema, "python tools/make_profile_schema.py"


def test_a_calibrated_deployment_predicts_with_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(a_profile(), path)
    mine = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="vllm@0.19.0", profile=path)
    assert mine == calibrated(DEPLOYMENT, a_profile())
    found = constants_for(mine)
    assert found["scale.gemm_memory"] == 0.9
    assert found["step_s"] == 3e-3
    assert {n: v for n, v in found.items() if n not in ("scale.gemm_memory", "step_s")} == {
        n: v for n, v in constants_for(DEPLOYMENT).items() if n not in ("scale.gemm_memory", "step_s")}
    before, after = (decode_step_time(d, 8, 1024) for d in (DEPLOYMENT, mine))
    assert after.expected_s > before.expected_s
    assert after.floor_s == before.floor_s  # physics is not calibrated
    assert after.provenance == "measured"


@pytest.mark.parametrize("other", [
    {"model": "llama-3.1-70b", "tp": 4}, {"gpu": "a100-sxm-80gb"}, {"engine": "sglang"},
])  # fmt: skip
def test_a_profile_is_refused_elsewhere(other: dict[str, Any]) -> None:
    keywords = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "engine": "vllm@0.19.0"} | other
    elsewhere = bstar.deployment(**keywords)
    assert not holds_for(a_profile(), elsewhere)
    with pytest.raises(SpecError, match="profile mine: was measured with"):
        calibrated(elsewhere, a_profile())
    with pytest.raises(SpecError, match="profile mine"):
        bstar.deployment(**keywords, profile=a_profile())


def test_other_flags_are_noted() -> None:
    assert profile_notes(DEPLOYMENT, a_profile()) == ()
    wider = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="vllm@0.20.0", tp=2)
    assert calibrated(wider, a_profile()).calibration is not None
    (note,) = profile_notes(wider, a_profile())
    assert "tp 1 (here 2)" in note
    assert "engine_version 0.19.0 (here 0.20.0)" in note


def test_what_a_deployment_carries() -> None:
    two = replace(a_profile().points[0], id="high", load_value=64.0)
    found = a_profile(points=(a_profile().points[0], two)).calibration
    assert found.concurrency == (4.0, 64.0)
    assert found.lengths == ((512.0, 128.0),)
    assert found.num_points == 2
    assert hash(found) == hash(replace(found))


def test_plan_uses_it_where_it_holds() -> None:
    load: dict[str, Any] = {"input_tokens": 1000, "output_tokens": 100, "rate_per_s": 5, "engine": "vllm@0.19.0"}
    slow = a_profile(constants=(ProfileConstant(name="scale.gemm_memory", value=0.6, prior=1.0, standard_error=0.1),),
                     covariance=())  # fmt: skip
    gpus = ("h100-sxm-80gb", "a100-sxm-80gb")
    fitted, mine = (bstar.plan("llama-3.1-8b", gpus, profile=p, **load) for p in (None, slow))

    def tpot(found: Any, gpu: str) -> float:
        return min(c.predicted.tpot_s.mean for c in found.candidates if c.deployment.device.id == gpu)

    assert tpot(mine, gpus[0]) > 1.1 * tpot(fitted, gpus[0])
    assert tpot(mine, gpus[1]) == pytest.approx(tpot(fitted, gpus[1]))
    assert any("profile mine" in note for note in mine.notes)


CPU = Probe(processor="a", logical_cpus=8, memory_bytes=64 << 30, read_bytes_per_s=4e10, copy_bytes_per_s=3e10,
            fp32_flops_per_s=5e11, measured_at="2026-11-30T00:00:00Z")  # fmt: skip


def on_cpu(probe: Probe = CPU, **changes: Any) -> Deployment:
    device = with_overrides(device_of(probe), **changes)
    return bstar.deployment(model="qwen3-0.6b", gpu=device, max_model_len=2048)


def of_cpu(**changes: Any) -> Profile:
    constants = tuple(ProfileConstant(name=name, value=value, prior=1.0, standard_error=0.1)
                      for name, value in (("device.peak", 4.0), ("device.bandwidth", 1.5)))  # fmt: skip
    parts = {"scope": Scope.of(on_cpu()), "constants": constants, "covariance": (), "notes": (),
             "device": ProfileDevice.of(on_cpu().device)} | changes  # fmt: skip
    return a_profile(**parts)


def test_a_measured_device_is_as_it_was_when_the_profile_was_made(tmp_path: Path) -> None:
    """A new measurement of the CPU changes no prediction, whichever way the profile went through a file."""
    write_profile(of_cpu(), tmp_path / "p.toml")
    now = replace(CPU, read_bytes_per_s=7e10, fp32_flops_per_s=9e10)
    found = calibrated(on_cpu(now), read_profile(tmp_path / "p.toml"))
    assert found.device.bandwidth_bytes_per_s == pytest.approx(1.5 * 4e10)
    assert found.device.peak("bf16") == pytest.approx(4.0 * 5e11)
    then = decode_step_time(calibrated(on_cpu(), of_cpu()), 4, 512)
    assert decode_step_time(found, 4, 512).expected_s == then.expected_s
    assert calibrated(found, of_cpu()).device == found.device  # once, not once more
    assert profile_notes(found, of_cpu()) == ()
    (note,) = profile_notes(on_cpu(replace(CPU, processor="b")), of_cpu())
    assert "was measured on CPU (a, 8 logical CPUs), this is CPU (b, 8 logical CPUs)" in note


def test_what_the_user_says_of_a_measured_device_stays() -> None:
    found = calibrated(on_cpu(bandwidth_bytes_per_s=9e10), of_cpu())
    assert found.device.bandwidth_bytes_per_s == pytest.approx(1.5 * 9e10)


def test_an_older_profile_of_a_measured_device_is_read_and_said_to_be_unsure(tmp_path: Path) -> None:
    plain = of_cpu().to_dict()
    del plain["device"]
    (tmp_path / "p.json").write_text(json.dumps(plain))
    older = read_profile(tmp_path / "p.json")
    assert older.device is None
    assert "device" not in older.to_dict()
    assert calibrated(on_cpu(), older) == calibrated(on_cpu(), of_cpu())
    assert any("calibrate again" in note for note in profile_notes(on_cpu(), older))


def test_a_note_says_the_error_as_the_table_does() -> None:
    slow = replace(a_profile().points[0], measured={"tpot_s": 0.02}, after={"tpot_s": 0.01})
    (note,) = profile_notes(DEPLOYMENT, a_profile(points=(slow,)))
    assert "tpot_s is off by -50%, predicted / measured − 1" in note
