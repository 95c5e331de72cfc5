"""The constants that a calibration may move, and how far it expects to: `data/priors.toml` for a deployment."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final, Literal

from bstar.calibration.intervals import device_was_measured
from bstar.calibration.profile import BANDWIDTH, PEAK, limits_of
from bstar.catalog.devices import PROBED_IDS
from bstar.latency.constants import GEMM_CLASSES, LINKS, Constants, constant_specs, constants_for
from bstar.latency.step_model import build_step_model
from bstar.physics.batch import BatchShape
from bstar.specs.deployment import Deployment

Kind = Literal["fraction", "time", "added"]
# A constant that changes no time by more than this share of it is left out.
_FELT: Final = 1e-3
_PEAK_SPREAD, _BANDWIDTH_SPREAD = 2.0, 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A constant with its prior: fitted value, and the spread of one standard deviation (see priors.toml)."""

    name: str
    kind: Kind
    fitted: float
    spread: float

    def value(self, u: float) -> float:
        """The constant at u standard deviations, kept inside its physical range."""
        low, high, _ = limits_of(self.name)
        if self.kind == "added":
            free = self.fitted + u * self.spread
        else:
            free = self.fitted * math.exp(u * self.spread if self.kind == "time" else -u * self.spread)
        return min(max(free, low), high)

    def time(self, u: float) -> float:
        """How far the time that the constant stands for is from the fitted one: linear in what is measured."""
        value = self.value(u)
        if self.kind == "added":
            return (value - self.fitted) / self.spread
        return value / self.fitted - 1.0 if self.kind == "time" else self.fitted / value - 1.0

    def slope(self, u: float) -> float:
        """d value / d u."""
        h = 1e-4
        return (self.value(u + h) - self.value(u - h)) / (2.0 * h)


def knobs_for(deployment: Deployment) -> tuple[Knob, ...]:
    """The constants that the deployment's times depend on, with their priors."""
    constants = constants_for(deployment)
    at = 0 if device_was_measured(deployment.device.id) else 1
    found = []
    for name, kind, spreads in _priors():
        fitted, spread = constants[name], spreads[at]
        if spread == 0.0 or (kind != "added" and fitted <= 0.0):
            continue
        knob = Knob(name=name, kind=kind, fitted=fitted, spread=spread)
        if name == "request_s" or _felt(deployment, constants, knob):
            found.append(knob)
    if deployment.device.id in PROBED_IDS:  # its figures are a guess (numpy's), not a datasheet's
        found += [Knob(name=PEAK, kind="fraction", fitted=1.0, spread=_PEAK_SPREAD),
                  Knob(name=BANDWIDTH, kind="fraction", fitted=1.0, spread=_BANDWIDTH_SPREAD)]
    return tuple(found)


def _felt(deployment: Deployment, constants: Constants, knob: Knob) -> bool:
    """Whether a decode step or a prefill takes another time with it."""
    times = [_times(deployment, constants.replace({knob.name: knob.value(u)})) for u in (0.0, 1.0, -1.0)]
    base = times[0]
    return any(abs(b / a - 1.0) > _FELT for moved in times[1:] for a, b in zip(base, moved, strict=True))


def _times(deployment: Deployment, constants: Constants) -> tuple[float, ...]:
    model = build_step_model(deployment, constants)
    shapes = (BatchShape.decode(8, 1024.0), BatchShape.decode(256, 1024.0), BatchShape.prefill(2048))
    return tuple(float(model.expected_s(model.step.values(shape))) for shape in shapes)


@lru_cache(maxsize=1)
def _priors() -> tuple[tuple[str, Kind, tuple[float, float]], ...]:
    """(constant, kind, (spread on devices that were measured, elsewhere))."""
    raw = tomllib.loads(files("bstar.calibration").joinpath("data/priors.toml").read_text(encoding="utf-8"))
    names = {f"scale.{k}": v for k, v in raw["scale"].items()} | dict(raw["host"])
    names |= {f"gemm.{kind}.{k}": v for kind in GEMM_CLASSES for k, v in raw["matrix"].items()}
    names |= {f"collective.{link}.{k}": v for link in LINKS for k, v in raw["link"].items()}
    return tuple((name, v["kind"], (float(v["spread"]), float(v["elsewhere"])))
                 for name, v in names.items() if name in constant_specs())
