"""The same question with other random numbers: independent runs and the intervals over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bstar.metrics.intervals import Interval, replications
from bstar.sim.result import SimResult

_FIGURES: Final = (
    "ttft_s.mean", "ttft_s.p95", "ttft_s.p99", "tpot_s.mean", "tpot_s.p95", "itl_s.p99", "e2e_s.mean", "e2e_s.p95",
    "output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "slo_attainment_fraction",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replications:
    """Independent runs, and 95 % intervals of their figures.

    asked         how many there should have been
    interrupted   whether there would have been more; a run that was interrupted counts where it is the only one
    """

    results: tuple[SimResult, ...]
    intervals: dict[str, Interval]
    asked: int
    interrupted: bool

    def to_dict(self) -> dict[str, Any]:
        return {"count": len(self.results), "confidence": {k: v.to_dict() for k, v in self.intervals.items()}}


def replicate(run: Callable[[int], SimResult], count: int) -> Replications:
    """Call `run` with the numbers 0 … count - 1 (seeds, say), up to an interrupt.

    Raises KeyboardInterrupt where that came before the first step.
    """
    results: list[SimResult] = []
    interrupted = False
    while len(results) < count and not interrupted:
        try:
            found = run(len(results))
        except KeyboardInterrupt:
            if not results:
                raise
            interrupted = True
            continue
        interrupted = found.interrupted
        if not interrupted or not results:
            results.append(found)
    intervals = {name: _interval(results, name) for name in _FIGURES} if count > 1 else {}
    return Replications(results=tuple(results), intervals=intervals, asked=count, interrupted=interrupted)


def _interval(results: list[SimResult], name: str) -> Interval:
    metric, _, part = name.partition(".")
    values = []
    for result in results:
        value = getattr(result.summary, metric)
        value = getattr(value, part) if part else value
        values.append(float("nan") if value is None else float(value))
    return replications(values)
