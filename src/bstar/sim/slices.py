"""A run in slices of simulated time: between two of them a bar moves, and Ctrl-C is heard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_SLICE_WALL_S = 0.2
_FIRST_SLICES = 64


def loaded(advance: Callable[[float], bool]) -> float:
    """Seconds that loading `advance` took (compiling it where no cache has it): nothing happens before time 0.

    An interrupt is the caller's: there is nothing to show yet.
    """
    begun = time.perf_counter()
    advance(-math.inf)
    return time.perf_counter() - begun


def in_slices(advance: Callable[[float], bool], *, from_s: float, span_s: float, until_s: float = math.inf) -> bool:
    """Call `advance` with later and later moments, until it says that nothing is left, or `until_s` is reached.

    A slice takes about 0.2 s of the clock; the first is a small part of `span_s`. Returns whether it was interrupted
    (Ctrl-C): then when the slice was whole, so that engines side by side stop at one moment. A second interrupt is
    raised at once.
    """
    slice_s, horizon_s = max(span_s / _FIRST_SLICES, 1.0), from_s
    try:
        while True:
            horizon_s = min(horizon_s + slice_s, until_s)
            begun = time.perf_counter()
            if advance(horizon_s) or horizon_s >= until_s:
                return False
            slice_s *= 2.0 if time.perf_counter() - begun < _SLICE_WALL_S else 0.5
    except KeyboardInterrupt as pressed:
        if is_second(pressed):
            raise
        advance(horizon_s)
    return True


def is_second(pressed: KeyboardInterrupt) -> bool:
    """Whether it came while another interrupt was waiting for engines to come to one moment."""
    return isinstance(pressed.__context__, KeyboardInterrupt)
