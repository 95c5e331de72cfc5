"""What measurements of a deployment say about it: constants that replace the fitted ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The part of a profile that a deployment carries, so that every prediction of it is a calibrated one.

    name          of the profile
    values        (constant, value in SI units) pairs; names of `bstar.latency.constants.constant_specs()`
    concurrency   fewest and most requests in flight of the measured points
    lengths       (input, output) tokens of the measured points, means
    num_points    how many there were
    peak_scale, bandwidth_scale   what the device computes and moves at most over its own figures: 1, but where those
                  are a guess (a CPU)
    """

    name: str
    values: tuple[tuple[str, float], ...]
    concurrency: tuple[float, float] = (1.0, 1.0)
    lengths: tuple[tuple[float, float], ...] = ()
    num_points: int = 0
    peak_scale: float = 1.0
    bandwidth_scale: float = 1.0
