"""Ranges around predictions, from how far held-out predictions of like rows were off (`data/residuals.toml`).

    likeness = likeness_of(deployment)                      how near it is to what was measured
    range_of(0.0091, "tpot", likeness, "weight_bandwidth")  Range(low=…, high=…, basis="212 held-out rows: …")

An 80 % range held the measurement for about 80 % of rows that the constants had not seen. It is of the mean of a run's
TTFT or TPOT; it says nothing of a load, a prompt length or a flag that differs from what was asked.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from bstar.calibration.residuals import LEVEL, Distance, Metric, cells_of, found_cell
from bstar.specs.deployment import Deployment

# Loads this much outside the calibrated ones still count as inside.
_BEYOND: Final = 1.5
_WORDS: Final[Mapping[str, str]] = MappingProxyType({
    "combination": "this engine, GPU and model were measured", "engine_gpu": "this engine and GPU were measured",
    "unknown": "neither this engine on this GPU nor the model on it were measured",
    "calibrated": "calibrated on this deployment, like lengths and loads",
    "calibrated_lengths": "calibrated on this deployment with other lengths or loads",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where the measurement is expected to lie, with probability `level`; `basis`: from which rows that is known."""

    low: float
    high: float
    level: float
    basis: str

    def to_list(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How near a deployment, under a load, is to what was measured."""

    engine: str
    distance: Distance

    @property
    def words(self) -> str:
        return _WORDS[self.distance]


def likeness_of(
    deployment: Deployment, *, in_flight: float | None = None, input_tokens: float | None = None,
    output_tokens: float | None = None,
) -> Likeness:  # fmt: skip
    """The distance from the measured rows; of a calibrated deployment from the points that calibrated it.

    in_flight, lengths   of the load; None: not known, taken to be another one
    """
    engine, found = deployment.engine.name, deployment.calibration
    if found is not None:
        low, high = found.concurrency
        same_load = in_flight is not None and low / _BEYOND <= in_flight <= high * _BEYOND
        lengths = (input_tokens, output_tokens)
        alike = same_load and any(
            all(b is not None and 1 / _BEYOND <= b / max(a, 1.0) <= _BEYOND
                for a, b in zip(known, lengths, strict=True))
            for known in found.lengths)
        return Likeness(engine=engine, distance="calibrated" if alike else "calibrated_lengths")
    seen = _table()["combinations"]
    device, model = deployment.device.id, deployment.model.name
    if (engine, device, model) in seen:
        return Likeness(engine=engine, distance="combination")
    near = any(one[:2] == (engine, device) for one in seen)
    return Likeness(engine=engine, distance="engine_gpu" if near else "unknown")


def device_was_measured(device: str) -> bool:
    """Whether rows of this device are among those that the constants were fitted on."""
    return any(one[1] == device for one in _table()["combinations"])


def range_of(
    value: float | None, metric: Metric, likeness: Likeness, bound_by: str, *, floor: float = 0.0
) -> Range | None:
    """The range of a predicted mean, never below `floor`; None where there is no value or no residual is known."""
    factors = range_factors(metric, likeness, bound_by)
    if value is None or not math.isfinite(value) or factors is None:
        return None
    low, high, basis = factors
    return Range(low=min(max(value * low, floor), value), high=value * high, level=LEVEL, basis=basis)


def range_factors(metric: Metric, likeness: Likeness, bound_by: str) -> tuple[float, float, str] | None:
    """(factor to the low end, factor to the high end, basis): the measurement over the prediction."""
    cells = _table()["cells"]
    name = found_cell(cells, cells_of(metric, likeness.distance, likeness.engine, bound_by))
    if name is None:
        return None
    low, high, rows = cells[name]
    scope = " ".join(name.split(".")[2:]) or "all engines"
    return math.exp(low), math.exp(high), f"{rows:,} held-out rows ({scope}; {likeness.words})"


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    text = files("bstar.calibration").joinpath("data/residuals.toml").read_text(encoding="utf-8")
    raw = tomllib.loads(text)
    return MappingProxyType({
        "cells": {name: (c["low"], c["high"], c["rows"]) for name, c in raw["cells"].items()},
        "combinations": frozenset(tuple(one) for one in raw["combinations"]),
    })  # fmt: skip
