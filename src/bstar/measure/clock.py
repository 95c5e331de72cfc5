"""One clock: `time.monotonic`, and how far another process's or machine's is from it.

On one machine CLOCK_MONOTONIC is the same for every process (the measured offset shows it). Between machines it is
not, so the offset is measured as NTP does: of several round trips the shortest bounds the error by half its length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

now = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Theirs = ours + offset_s, within ± uncertainty_s (half the shortest round trip)."""

    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    round_trips: int = 0

    def ours(self, theirs_s: float) -> float:
        return theirs_s - self.offset_s

    def theirs(self, ours_s: float) -> float:
        return ours_s + self.offset_s

    def to_dict(self) -> dict[str, float | int]:
        return {"offset_s": self.offset_s, "uncertainty_s": self.uncertainty_s, "round_trips": self.round_trips}


def measure_offset(ask: Callable[[], float], *, round_trips: int = 20) -> ClockOffset:
    """The offset of the clock that `ask()` reads, by the shortest of several round trips."""
    best: tuple[float, float] | None = None
    for _ in range(round_trips):
        before = now()
        theirs = ask()
        after = now()
        if best is None or after - before < best[0]:
            best = (after - before, theirs - (before + after) / 2.0)
    if best is None:
        return ClockOffset()
    return ClockOffset(offset_s=best[1], uncertainty_s=best[0] / 2.0, round_trips=round_trips)
