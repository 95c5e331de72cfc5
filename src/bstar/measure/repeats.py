"""Runs again and again, until the asked figure is known well enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bstar.errors import SpecError
from bstar.measure.result import BenchRun
from bstar.metrics.intervals import Interval, replications

# An interval of fewer runs says little.
LEAST_RUNS = 3
_FIGURES = ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "ttft_s", "ttft_s.p99", "tpot_s",
            "tpot_s.p99", "itl_s", "e2e_s", "e2e_s.p99")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`figure` within ± `relative` of its mean.

    figure      like "output_tokens_per_s", "tpot_s", "ttft_s.p99" (`BenchRun.figure`)
    most_runs   after so many it ends without
    """

    figure: str
    relative: float
    confidence: float = 0.95
    most_runs: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.relative < 1:
            raise SpecError(f"--until: the precision is a fraction below 1, is {self.relative}")
        if self.most_runs < LEAST_RUNS:
            raise SpecError(f"--max-runs: must be at least {LEAST_RUNS}, is {self.most_runs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Runs of one load, and what they say together.

    reached   whether the interval is as narrow as asked; None: none was asked for
    interrupted   whether Ctrl-C ended them; the last run may be cut off, or be whole
    """

    runs: tuple[BenchRun, ...]
    precision: Precision | None
    interval: Interval | None
    reached: bool | None
    interrupted: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why runs are no results of the server; each says which run."""
        return tuple(f"run {number}: {reason}" for number, run in enumerate(self.runs, start=1)
                     for reason in run.verdict.reasons)

    def to_dict(self) -> dict[str, Any]:
        figures = {}
        for name in _FIGURES:
            values = [run.figure(name) for run in self.runs]
            known = [v for v in values if v is not None]
            figures[name] = replications(known).to_dict() | {"values": values}
        return {
            "count": len(self.runs), "reached": self.reached,
            "asked": None if self.precision is None else {"figure": self.precision.figure,
                                                          "relative": self.precision.relative},
            "interval": None if self.interval is None else self.interval.to_dict(), "figures": figures,
        }  # fmt: skip


def parse_precision(text: str, *, most_runs: int = 10) -> Precision:
    """The precision of "tpot_s=2%" or "ttft_s.p99=0.05". Raises SpecError."""
    name, sign, value = text.partition("=")
    name, value = name.strip(), value.strip()
    metric, _, statistic = name.partition(".")
    distributions = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
    rates = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_requests_per_s",
             "slo_attainment_fraction")  # fmt: skip
    if not sign or not (metric in distributions or name in rates):
        raise SpecError(f"--until: {text!r} is not understood; write it like tpot_s=2% or ttft_s.p99=5% "
                        f"({', '.join((*distributions, *rates))})")
    if statistic and statistic not in ("mean", "p50", "p90", "p95", "p99", "p999"):
        raise SpecError(f"--until: {statistic!r} is no statistic; use mean, p50, p90, p95, p99 or p999")
    try:
        relative = float(value[:-1]) / 100.0 if value.endswith("%") else float(value)
    except ValueError:
        raise SpecError(f"--until: {value!r} is no fraction; write 2% or 0.02") from None
    return Precision(figure=name, relative=relative, most_runs=most_runs)


def repeat(run: Callable[[int], BenchRun], *, runs: int = 1, precision: Precision | None = None) -> Repeated:
    """`run(number)` so many times, or until the precision is reached; Ctrl-C ends it early.

    A run that was interrupted counts if it holds an answer. Raises KeyboardInterrupt where no run does.
    """
    done: list[BenchRun] = []
    interval: Interval | None = None
    reached: bool | None = None
    interrupted = False
    most = runs if precision is None else max(precision.most_runs, runs)
    for number in range(most):
        try:
            found = run(number)
        except KeyboardInterrupt:
            interrupted = True
            break
        interrupted = found.interrupted or found.stop_asked
        if found.holds_nothing:
            break
        done.append(found)
        if precision is not None:
            values = [v for r in done if (v := r.figure(precision.figure)) is not None]
            interval = replications(values, confidence=precision.confidence)
            width = interval.relative_half_width
            reached = len(done) >= LEAST_RUNS and width is not None and width <= precision.relative
        if interrupted or (reached and len(done) >= runs):
            break
    if not done:
        raise KeyboardInterrupt
    return Repeated(runs=tuple(done), precision=precision, interval=interval, reached=reached, interrupted=interrupted)
