"""Predictions of all points from their step samples, and their derivatives by the constants, by bstar's own step model.

The prediction of a point is Σ bins weight · seconds (+ request_s): linear in times, smooth in fractions. So a fit needs
the derivative of each point by each constant once, and again where the values have moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from parameters import Cell, Parameter, moved
from simulate import Simulated

from bstar.latency import constant_values
from bstar.latency.constants import Constants, constant_key, constants_for
from bstar.latency.step_model import build_step_model
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
Shifts = Mapping[Cell, dict[str, float]]


def forget_fitted() -> None:
    """Priors are what the data files say without an earlier fit."""
    read = constant_values._file

    def without(name: str) -> dict:
        return {} if name == "fitted.toml" else read(name)

    constant_values._file = without  # type: ignore[assignment]


def evaluate(simulated: Simulated, constants: Constants) -> tuple[float, float]:
    """(TPOT, TTFT) seconds of a point's sample with these constants."""
    sample = simulated.sample
    seconds = build_step_model(simulated.deployment, constants).expected_s(sample.values)
    # What the bins lose against the simulation (about 0.2 %) is kept as a factor.
    return (float(sample.tpot @ seconds) * simulated.tpot_factor,
            float(sample.ttft @ seconds) * simulated.ttft_factor + constants["request_s"])


class Sensitivity:
    """Predictions and derivatives at given shifts of the parameters, by cell."""

    def __init__(
        self, simulated: Sequence[Simulated], cells: Sequence[Cell], parameters: tuple[Parameter, ...],
        shifts: Shifts,
    ) -> None:  # fmt: skip
        self.parameters = parameters
        self.predicted = np.empty((len(simulated), 2))
        self.slopes = np.zeros((len(simulated), 2, len(parameters)))
        made: dict[tuple[object, int], Constants] = {}

        def constants(deployment: Deployment, cell: Cell, index: int) -> tuple[Constants, float]:
            """With parameter `index` (−1: none) a little further, and how far."""
            key = constant_key(deployment), index
            shift, step = dict(shifts.get(cell, {})), 0.0
            if index >= 0:
                p = parameters[index]
                step = 0.05 * next(iter(p.widths.values()))  # slower: never beyond a peak
                shift[p.name] = shift.get(p.name, 0.0) + step
            if key not in made:
                made[key] = moved(constants_for(deployment), parameters, shift)
            return made[key], step

        for i, (one, cell) in enumerate(zip(simulated, cells, strict=True)):
            base, _ = constants(one.deployment, cell, -1)
            self.predicted[i] = evaluate(one, base)
            for k, parameter in enumerate(parameters):
                other, step = constants(one.deployment, cell, k)
                if other[parameter.name] == base[parameter.name]:  # at a bound: look the other way is not worth it
                    continue
                self.slopes[i, :, k] = (np.array(evaluate(one, other)) - self.predicted[i]) / step
