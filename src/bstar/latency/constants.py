"""The constants of the step-time model: few, named, physical, each with a range and where its value is known from.

    constants_for(deployment)                      what the data files say for its engine, version and device
    constants.replace(layer_s=40e-6)               another value (a fit, a calibration)
    step_model(deployment, constants)              step times with them

Values come from three files in `latency/data/`, the later over the earlier: kernels.toml (measured kernels, by GPU
generation and engine), engines.toml (first values of what engines add), fitted.toml (written by `benchmarks/fit`).
An entry may hold for everybody or for an engine, from a version on, a generation, or several of these together: the
entry with most of them wins. constants.toml says what each name means.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.latency.constant_values import ConstantKey, Value, resolved_values
from bstar.specs.calibration import Calibration
from bstar.specs.deployment import Deployment
from bstar.specs.device import Provenance

GEMM_CLASSES: Final = ("bf16", "fp8", "fp8_block", "fp4", "int8", "weight_only", "mxfp4_a16", "mxfp4_a8")
LINKS: Final = ("nvlink", "pcie", "network")
MATRIX_FAMILIES: Final = (*(f"gemm.{c}" for c in GEMM_CLASSES), *(f"moe_gemm.{c}" for c in GEMM_CLASSES))
KERNEL_FAMILIES: Final = (
    *MATRIX_FAMILIES, "attention_decode.wide", "attention_decode.narrow", "attention_decode.latent",
    "attention_decode.scalar", "attention_prefill", "elementwise", "state",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSpec:
    """What a constant is. low, high: the range that physics allows, in `unit` (SI; "1" for a fraction)."""

    name: str
    meaning: str
    unit: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A constant with a value, and where that is known from (standard_error: None where there is none)."""

    spec: ConstantSpec
    value: float
    provenance: Provenance
    source: str
    standard_error: float | None


@lru_cache(maxsize=1)
def constant_specs() -> Mapping[str, ConstantSpec]:
    """Every constant there is, by name, in a fixed order."""
    raw = tomllib.loads(files("bstar.latency").joinpath("data/constants.toml").read_text(encoding="utf-8"))
    out: dict[str, ConstantSpec] = {}

    def add(name: str, what: dict[str, Any], of: str = "") -> None:
        low, high = what["range"]
        out[name] = ConstantSpec(
            name=name, meaning=what["meaning"] + of, unit=what["unit"], low=float(low), high=float(high))

    for name, what in raw["host"].items():
        add(name, what)
    for name, what in raw["scale"].items():
        add(f"scale.{name}", what)
    for family in KERNEL_FAMILIES:
        for name, what in raw["kernel"].items():
            add(f"{family}.{name}", what, f" ({family})")
        for name, what in raw["matrix"].items() if family in MATRIX_FAMILIES else ():
            add(f"{family}.{name}", what, f" ({family})")
    for link in LINKS:
        for name, what in raw["link"].items():
            add(f"collective.{link}.{name}", what, f" ({link})")
    for name, what in raw["bus"].items():
        add(f"host_bus.{name}", what)
    return MappingProxyType(out)


class Constants(Mapping[str, float]):
    """A frozen mapping from every constant's name to its value (SI units)."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value]) -> None:
        missing = [name for name in constant_specs() if name not in values]
        if missing:
            raise SpecError(f"constants: no value for {', '.join(missing[:5])}")
        self._values: Mapping[str, Value] = MappingProxyType({name: values[name] for name in constant_specs()})
        self._hash = hash(tuple(v.value for v in self._values.values()))

    def __getitem__(self, name: str) -> float:
        return self._values[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Constants) and dict(self) == dict(other))

    def __repr__(self) -> str:
        return f"Constants({len(self)} values, {self.provenance})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Constants, (dict(self._values),)

    def constant(self, name: str) -> Constant:
        """A constant with its meaning, range and provenance. Raises SpecError on a name that does not exist."""
        value = self._values.get(name)
        if value is None:
            raise SpecError(f"constant: there is no {name!r}; `bstar.latency.constants.constant_specs()` lists them")
        return Constant(
            spec=constant_specs()[name], value=value.value, provenance=value.provenance, source=value.source,
            standard_error=value.standard_error,
        )  # fmt: skip

    def array(self, names: Sequence[str]) -> NDArray[np.float64]:
        """Values of `names`, in this order."""
        return np.array([self._values[name].value for name in names])

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance of what carries a step's time: the kernels' and the engine's constants.

        "measured" where a calibration on the very deployment replaced some of them.
        """
        if any(v.provenance == "measured" for v in self._values.values()):
            return "measured"
        found = {v.provenance for name, v in self._values.items() if not name.startswith(("scale.", "host_bus."))}
        return "assumed" if "assumed" in found else "fitted"

    def replace(
        self, changes: Mapping[str, float] | None = None, /, *, provenance: Provenance = "fitted", source: str = "",
        **named: float,
    ) -> Constants:  # fmt: skip
        """The same with other values. Raises SpecError on a name that does not exist or a value out of range."""
        values = dict(self._values)
        specs = constant_specs()
        for name, value in {**(changes or {}), **named}.items():
            spec = specs.get(name)
            if spec is None:
                raise SpecError(f"constant: there is no {name!r}; `constant_specs()` lists them")
            if not (math.isfinite(value) and spec.low <= value <= spec.high):
                raise SpecError(f"constant: {name} must lie in [{spec.low:g}, {spec.high:g}] {spec.unit}, is {value:g}")
            values[name] = Value(value=float(value), provenance=provenance, source=source, standard_error=None)
        return Constants(values)


def constants_for(deployment: Deployment) -> Constants:
    """The constants of this deployment's engine, version and device, those of its calibration over them.

    Raises SpecError for an unknown engine.
    """
    key = constant_key(deployment)
    return _constants(key) if deployment.calibration is None else _calibrated(key, deployment.calibration)


def constant_key(deployment: Deployment) -> ConstantKey:
    """What of a deployment its constants depend on."""
    device, engine = deployment.device, deployment.engine
    return ConstantKey(
        engine=engine.name, version=engine.version_tuple, compute_capability=device.compute_capability,
        half_rate_accumulation=device.half_rate_accumulation, inline_ecc=device.inline_ecc, device=device.id,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _calibrated(key: ConstantKey, calibration: Calibration) -> Constants:
    return _constants(key).replace(
        dict(calibration.values), provenance="measured", source=f"profile {calibration.name}")


@lru_cache(maxsize=256)
def _constants(key: ConstantKey) -> Constants:
    found = Constants(resolved_values(key))
    for name, spec in constant_specs().items():
        if not spec.low <= found[name] <= spec.high:
            raise SpecError(f"constant: {name} = {found[name]:g} outside [{spec.low:g}, {spec.high:g}]")
    return found
