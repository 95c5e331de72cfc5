"""Profiles: what measurements of one deployment say about the constants of its step times, as a small file.

    write_profile(profile, "mine.json")        .json or .toml, atomically
    read_profile("mine.json")                  strict: an unknown key, a missing one, an unknown constant is an error
    calibrated(deployment, profile)            the deployment with it: every prediction then uses it

A profile holds for the model, GPU and engine that it was measured on (using it elsewhere is refused); another engine
version, layout, dtype or set of flags is told as a note. `profile_schema()` is the JSON schema of the file.

A device that has no datasheet (a CPU) is described by a measurement; the profile keeps the figures that it was fitted
with, and a deployment with the profile has these, whatever a measurement says now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from bstar.catalog.devices import PROBED_IDS
from bstar.errors import SpecError
from bstar.latency.constants import constant_specs
from bstar.specs.calibration import Calibration
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec

FORMAT: Final = "bstar-profile/1"
# Not constants of the model: `Calibration.peak_scale` and `bandwidth_scale`, with their ranges.
PEAK: Final = "device.peak"
BANDWIDTH: Final = "device.bandwidth"
_OF_DEVICE: Final = {PEAK: (0.01, 1000.0), BANDWIDTH: (0.05, 20.0)}
_UNEXPLAINED: Final = 0.405  # ln, of a point: half as much again
# Of the scope: what a profile is refused for, and what is only said.
_BINDING: Final = ("model", "gpu", "engine")
_LOOSE: Final = ("engine_version", "tp", "pp", "dp", "attention_dp", "ep", "dcp", "weight_dtype", "kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What was measured; dp counts copies behind one endpoint."""

    model: str
    gpu: str
    engine: str
    engine_version: str = ""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    attention_dp: int = 1
    ep: int = 1
    dcp: int = 1
    weight_dtype: str = ""
    kv_dtype: str = ""

    @property
    def layout(self) -> str:
        """ "tp 4, ep 4": degrees above 1; "1 GPU"."""
        names = ("tp", "pp", "dp", "attention_dp", "ep", "dcp")
        return ", ".join(f"{n} {getattr(self, n)}" for n in names if getattr(self, n) > 1) or "1 GPU"

    @property
    def binding(self) -> tuple[str, ...]:
        """What a profile holds for and nothing else."""
        return tuple(getattr(self, name) for name in _BINDING)

    @classmethod
    def of(cls, deployment: Deployment) -> Scope:
        p, e = deployment.parallel, deployment.engine
        return cls(
            model=deployment.model.name, gpu=deployment.device.id, engine=e.name, engine_version=e.version,
            tp=p.tp, pp=p.pp, dp=p.dp, attention_dp=p.attention_dp, ep=p.ep, dcp=p.dcp,
            weight_dtype=deployment.model.weight_dtype, kv_dtype=deployment.kv_format.name,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDevice:
    """What a measurement said of the device when the profile was fitted; `device.peak` and `device.bandwidth` are over
    these."""

    name: str
    bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]

    @classmethod
    def of(cls, device: DeviceSpec) -> ProfileDevice | None:
        """None for a device that has a datasheet."""
        if device.id not in PROBED_IDS:
            return None
        return cls(name=device.name, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
                   peak_flops_per_s=dict(device.peak_flops_per_s))

    def on(self, device: DeviceSpec) -> DeviceSpec:
        """The device with these figures instead of those measured now; what the user said of it (--bandwidth) stays."""
        measured = set(device.unverified)
        bandwidth = self.bandwidth_bytes_per_s if "bandwidth_bytes_per_s" in measured else device.bandwidth_bytes_per_s
        peaks = {dtype: self.peak_flops_per_s.get(dtype, peak) if f"peak_flops_per_s.{dtype}" in measured else peak
                 for dtype, peak in device.peak_flops_per_s.items()}
        return replace(device, bandwidth_bytes_per_s=bandwidth, peak_flops_per_s=peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConstant:
    """A constant's value from the measurements, in its own (SI) unit.

    prior            the fitted value that it replaces
    standard_error   of `value`, from the measurements and the prior together
    """

    name: str
    value: float
    prior: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """A measured point and what was predicted for it, before and after the calibration (means, SI units).

    load   "concurrency" or "rate_per_s", with `load_value`
    """

    id: str
    load: str
    load_value: float
    input_tokens: float
    output_tokens: float
    measured: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]
    measured_on: str = ""

    def residual(self, metric: str) -> float:
        """ln(measured / predicted) after the calibration."""
        return math.log(self.measured[metric] / self.after[metric])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A calibration with where it comes from.

    device       the measured figures that it was fitted with; None where the device has a datasheet
    covariance   of the constants' relative errors (ln; of those that may be 0: in units of their prior spread), in
                 the order of `constants`
    """

    name: str
    scope: Scope
    constants: tuple[ProfileConstant, ...]
    points: tuple[ProfilePoint, ...]
    device: ProfileDevice | None = None
    covariance: tuple[tuple[float, ...], ...] = ()
    created_by: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise SpecError("profile: needs a name")
        for one in self.constants:
            low, high, unit = limits_of(one.name)
            if not unit:
                raise SpecError(f"profile {self.name}: there is no constant {one.name!r}; another version made it: "
                                "calibrate again")
            if not (math.isfinite(one.value) and low <= one.value <= high):
                raise SpecError(f"profile {self.name}: {one.name} must lie in [{low:g}, {high:g}] {unit}, is "
                                f"{one.value:g}; calibrate again")
        n = len(self.constants)
        if self.covariance and (len(self.covariance) != n or any(len(row) != n for row in self.covariance)):
            raise SpecError(f"profile {self.name}: covariance must have {n} rows of {n} numbers, one a constant")

    @property
    def calibration(self) -> Calibration:
        """What a deployment carries of it."""
        loads = [p.load_value for p in self.points if p.load == "concurrency"] or [1.0]
        return Calibration(
            name=self.name, **carried({c.name: c.value for c in self.constants}),
            concurrency=(min(loads), max(loads)), num_points=len(self.points),
            lengths=tuple(dict.fromkeys((p.input_tokens, p.output_tokens) for p in self.points)),
        )  # fmt: skip

    def residuals(self, metric: str) -> tuple[float, ...]:
        """ln(measured / predicted) of the points that have the metric, after the calibration."""
        return tuple(p.residual(metric) for p in self.points if metric in p.measured and metric in p.after)

    def to_dict(self) -> dict[str, Any]:
        """The file's content."""
        found = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {"format": FORMAT} | {key: value for key, value in found.items() if value is not None}


def calibrated(deployment: Deployment, profile: Profile) -> Deployment:
    """The deployment with the profile's constants.

    Raises SpecError where the profile was made for another model, GPU or engine. Other differences are notes:
    `profile_notes`.
    """
    here = Scope.of(deployment)
    for name in _BINDING:
        there = getattr(profile.scope, name)
        if getattr(here, name) != there:
            raise SpecError(f"profile {profile.name}: was measured with {name} {there}, this is "
                            f"{getattr(here, name)}; calibrate on this one, or leave --profile out")
    own = carrying(deployment, None)
    if profile.device is not None and own.device.id in PROBED_IDS:
        own = replace(own, device=profile.device.on(own.device))
    return carrying(own, profile.calibration)


def carrying(deployment: Deployment, calibration: Calibration | None) -> Deployment:
    """The deployment with this calibration instead of the one that it has."""
    (peak, bandwidth), (peak_now, bandwidth_now) = (
        (1.0, 1.0) if one is None else (one.peak_scale, one.bandwidth_scale)
        for one in (calibration, deployment.calibration))
    device = deployment.device
    if (peak, bandwidth) != (peak_now, bandwidth_now):
        device = replace(
            device, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * (bandwidth / bandwidth_now),
            peak_flops_per_s={k: v * (peak / peak_now) for k, v in device.peak_flops_per_s.items()})
    return replace(deployment, device=device, calibration=calibration)


def carried(values: Mapping[str, float]) -> dict[str, Any]:
    """Fields of a `Calibration`: constants of the model, and the device's figures apart."""
    return {"values": tuple((name, value) for name, value in values.items() if name not in _OF_DEVICE),
            "peak_scale": values.get(PEAK, 1.0), "bandwidth_scale": values.get(BANDWIDTH, 1.0)}


def limits_of(name: str) -> tuple[float, float, str]:
    """(least, most, unit) of what a profile may say; unit "" where there is no such constant."""
    if name in _OF_DEVICE:
        return (*_OF_DEVICE[name], "1")
    spec = constant_specs().get(name)
    return (0.0, 0.0, "") if spec is None else (spec.low, spec.high, spec.unit)


def holds_for(profile: Profile, deployment: Deployment) -> bool:
    """Whether `calibrated` takes it."""
    return Scope.of(deployment).binding == profile.scope.binding


def profile_notes(deployment: Deployment, profile: Profile) -> tuple[str, ...]:
    """In what the deployment differs from the one measured: predictions are then less sure."""
    here = Scope.of(deployment)
    changed = [f"{name} {getattr(profile.scope, name)} (here {getattr(here, name)})"
               for name in _LOOSE if getattr(profile.scope, name) != getattr(here, name)]
    notes = []
    if changed:
        notes.append(f"profile {profile.name} was measured with {', '.join(changed)}: its constants are taken all the "
                     "same")
    notes += _device_notes(deployment, profile)
    residuals = [(p.residual(m), p.id, m) for p in profile.points for m in p.after]
    off, point, metric = max(residuals, key=lambda one: abs(one[0]), default=(0.0, "", ""))
    if abs(off) > _UNEXPLAINED:
        notes.append(f"profile {profile.name} does not explain its own points ({point}: {metric} is off by "
                     f"{math.expm1(-off):+.0%}, predicted / measured − 1): calibrate again")
    return tuple(notes)


def _device_notes(deployment: Deployment, profile: Profile) -> list[str]:
    """Of a device without a datasheet: another one than was measured, or figures that may change between runs."""
    device = deployment.device
    if device.id not in PROBED_IDS:
        return []
    if profile.device is None:
        return [f"profile {profile.name} does not keep what was measured of the {device.id} that it was fitted with "
                "(an older bstar made it): predictions change with each new measurement; calibrate again"]
    if profile.device.name == device.name:
        return []
    return [f"profile {profile.name} was measured on {profile.device.name}, this is {device.name}: its figures are "
            "taken all the same"]


def as_profile(value: Profile | str | Path) -> Profile:
    """A profile, or the one in the file of that name."""
    if isinstance(value, Profile):
        return value
    if not isinstance(value, str | Path):
        raise SpecError(f"profile: must be a profile or a file's name, is {type(value).__name__}")
    return read_profile(value)


def read_profile(path: str | Path) -> Profile:
    """The profile in a .json or .toml file. Raises ConfigError naming file, key and remedy."""
    from bstar.calibration.profile_files import profile_from
    from bstar.codec.spec_files import read_mapping

    file = Path(path)
    return profile_from(read_mapping(file, what="profile"), source=str(file))


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write it to a .json or .toml file, whole or not at all. Raises ConfigError where it cannot be written."""
    from bstar.calibration.profile_files import profile_text
    from bstar.files import write_whole

    file = Path(path)
    write_whole(file, profile_text(profile, file.suffix.lower()), what="profile")


def profile_schema() -> dict[str, Any]:
    """The JSON schema of a profile file."""
    from bstar.calibration.profile_files import schema

    return schema()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Scope | ProfileDevice | ProfileConstant | ProfilePoint):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
