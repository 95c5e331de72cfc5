"""Tuning by measuring: against a running server (clients of a closed loop stand for the batch), or by starting the
server once for each max_num_seqs. What was measured is on disk after every point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bstar.errors import InfeasibleError, SpecError
from bstar.measure.result import BenchRun
from bstar.measure.run import Prepared, RunOptions, bench
from bstar.measure.server.scraper import ServerObserver, metrics_of
from bstar.measure.sweeps import Point, SweepPlan, sweep
from bstar.specs.slo import Slo
from bstar.traffic.load import Traffic
from bstar.tuning.advice import Reading, read_sweep
from bstar.tuning.decode_fit import fit_decode
from bstar.tuning.points import TunePoint, point_of
from bstar.tuning.serve import command_for, default_command, served
from bstar.tuning.state import InterruptedTuningError, TuneState

Report = Callable[[str], None]

# Values that are measured beside those asked for, and the ratio within which nothing is gained by more.
_REFINEMENTS, _CLOSE = 3, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How a point is measured.

    load       the traffic of a value
    options    of the client; `scrape_s` between two readings of the server's counters
    """

    load: Callable[[int], Traffic]
    options: RunOptions
    scrape_s: float = 0.5
    metrics_url: str | None = None

    def run(self, server: Prepared, value: int, place: Path) -> BenchRun:
        """One run, watched; a folder of an interrupted one is measured again."""
        observer = ServerObserver(metrics_of(server.endpoint, self.metrics_url), interval_s=self.scrape_s)
        options = replace(self.options, observers=(*self.options.observers, observer))
        found = bench(server, self.load(value), options, out=_free(place))
        if found.interrupted or found.stop_asked:
            raise InterruptedTuningError("interrupted")
        return found


def tune_running(
    server: Prepared, probe: Probe, state: TuneState, plan: SweepPlan, *, slo: Slo | None, report: Report,
    refine: bool = True,
) -> Reading:  # fmt: skip
    """Sweep the clients of a closed loop against a running server; `refine` measures more values where one binds."""

    def measure(load: float) -> Point:
        value = round(load)
        point = state.find(value)
        if point is None:
            report(f"{value} clients")
            point = point_of(value, probe.run(server, value, state.folder / f"clients-{value}"))
            state.add(point)
        return Point(load=float(value), throughput_per_s=point.throughput_per_s, goodput_per_s=point.goodput_per_s,
                     attainment_fraction=point.attainment_fraction, valid=point.valid)

    target = _target(slo)
    sweep(measure, plan, target_fraction=target)

    def read() -> Reading:
        return read_sweep(state.points, target_fraction=target, decode=fit_decode(state.points))

    return _refined(read, lambda _, value: measure(float(value))) if refine else read()


def _refined(read: Callable[[], Reading], measure: Callable[[Reading, int], object]) -> Reading:
    """The reading after values between the two that the recommended one lies between were measured too."""
    reading, tried = read(), set[int]()
    for _ in range(_REFINEMENTS):
        value = value_between(reading)
        if value is None or value in tried:  # in vain: with it no server started, or the client was the limit
            break
        tried.add(value)
        measure(reading, value)
        reading = read()
    return reading


def value_between(reading: Reading) -> int | None:
    """The value to measure next: the geometric middle of the interval that the binding rule leaves open.

    None where it is known within a quarter, or nothing bound.
    """
    advice = reading.advice
    if advice is None or advice.rule == "largest_measured":
        return None
    # A knee's own interval is that of the throughputs: a value between the measured ones about it narrows that too.
    low, high = (reading.knee.low, reading.knee.high) if advice.rule == "knee" else (advice.low, advice.high)
    if low is None or high is None or not low > 0 or high <= _CLOSE * low:
        return None
    middle = round(math.sqrt(low * high))
    return middle if low < middle < high else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that is started for each value.

    template   the command with {max_num_seqs}, perhaps {max_num_batched_tokens}
    prepare    looks at the server once it is ready
    say        is told what takes long
    """

    template: str
    url: str
    prepare: Callable[[], Prepared]
    ready_s: float
    say: Callable[[str], None] = lambda _: None

    def running(self, words: list[str], log: Path) -> AbstractContextManager[None]:
        """A server of these words while the block runs."""
        return served(words, self.url, log, ready_s=self.ready_s, say=self.say)


def tune_served(
    server: Served, probe: Probe, state: TuneState, values: Sequence[int], budgets: Sequence[int], *, slo: Slo | None,
    report: Report, check: bool = True, refine: bool = True,
) -> Reading:  # fmt: skip
    """Start, measure and stop the server for each value (and budget), and for more where one binds (`refine`); then the
    recommended value against the default.

    Raises InfeasibleError where it starts for no value.
    """

    def measure(value: int, budget: int | None) -> None:
        key = _key(value, budget)
        if state.find(value, budget) is not None:
            return
        report(key)
        try:
            point = _once(server, probe, state, value, budget, key)
        except InfeasibleError as error:  # tried anew when the tuning is: memory or a port may be free by then
            state.failed[key] = str(error)
            state.save()
            return
        state.failed.pop(key, None)
        state.add(point)

    chosen: list[int | None] = list(budgets) or [None]
    for budget in chosen:
        for value in values:
            measure(value, budget)
    if not state.points:
        why = next(iter(state.failed.values()), "").removeprefix("--serve: ")
        raise InfeasibleError(f"--serve: for no value a server started: {why}")

    def read() -> Reading:
        return _best_reading(state.points, slo)

    reading = _refined(read, lambda now, value: measure(value, now.points[0].budget)) if refine else read()
    if check and reading.advice is not None:
        _compare(server, probe, state, reading, report)
    return reading


def _best_reading(points: Sequence[TunePoint], slo: Slo | None) -> Reading:
    """The reading of the budget whose recommended value gives most; without budgets there is one."""
    target = _target(slo)
    readings = []
    for budget in dict.fromkeys(p.budget for p in points):
        part = [p for p in points if p.budget == budget]
        readings.append(read_sweep(part, target_fraction=target, decode=fit_decode(part), seats_swept=True))

    def worth(reading: Reading) -> float:
        if reading.advice is None:
            return 0.0
        point = _nearest(reading.points, reading.advice.value)
        return point.goodput_per_s if target is not None else point.throughput_per_s

    return max(readings, key=worth)


def _once(server: Served, probe: Probe, state: TuneState, value: int, budget: int | None, key: str) -> TunePoint:
    values = {"max_num_seqs": value} | ({} if budget is None else {"max_num_batched_tokens": budget})
    words = command_for(server.template, values)
    with server.running(words, state.folder / f"{key}.log"):
        run = probe.run(server.prepare(), value, state.folder / key)
        return point_of(value, run, budget=budget, seats=value)


def _compare(server: Served, probe: Probe, state: TuneState, reading: Reading, report: Report) -> None:
    """The recommended value and the engine's default, one after the other, on servers of their own."""
    assert reading.advice is not None
    budget = reading.points[0].budget
    value = reading.advice.value
    values = {"max_num_seqs": value} | ({} if budget is None else {"max_num_batched_tokens": budget})
    for name, words in (("recommended", command_for(server.template, values)),
                        ("default", default_command(server.template))):
        known = state.compared.get(name)
        if known is not None and known.value in (value, 0) and known.budget == budget:
            continue
        report(f"{name} settings")
        try:
            with server.running(words, state.folder / f"{name}.log"):
                run = probe.run(server.prepare(), value, state.folder / name)
        except InfeasibleError as error:
            state.failed[name] = str(error)
            state.save()
            continue
        state.failed.pop(name, None)
        state.compared[name] = point_of(value if name == "recommended" else 0, run, budget=budget)
        state.save()


def default_values(least: int = 4, most: int = 256) -> tuple[int, ...]:
    """Doublings."""
    values = []
    while least <= most:
        values.append(least)
        least *= 2
    return tuple(values)


def parse_values(text: str, option: str = "--values") -> tuple[int, ...]:
    """ "8,16,32" or "8..256" (doublings). Raises SpecError."""
    parts = [p.strip() for p in text.split(",") if p.strip()]
    out: list[int] = []
    for part in parts:
        low, dots, high = part.partition("..")
        if not low.isdecimal() or (dots and not high.isdecimal()) or int(low) < 1:
            raise SpecError(f"{option}: {text!r} is not understood; write 8,16,32 or 8..256")
        out += default_values(int(low), int(high)) if dots else [int(low)]
    if not out:
        raise SpecError(f"{option}: names no value; write 8,16,32 or 8..256")
    return tuple(sorted(set(out)))


def _target(slo: Slo | None) -> float | None:
    return None if slo is None or slo.is_empty else slo.attainment_fraction


def throughput_at(points: Sequence[TunePoint], value: int) -> tuple[float, float] | None:
    """Throughput that the measured values show for one between them (straight on a log scale), and its half width."""
    known = sorted((p for p in points if p.valid and p.half_width is not None), key=lambda p: p.value)
    if not known or not known[0].value <= value <= known[-1].value:
        return None
    at = [math.log(p.value) for p in known]
    rate = float(np.interp(math.log(value), at, [p.throughput_per_s for p in known]))
    return rate, float(np.interp(math.log(value), at, [p.half_width or 0.0 for p in known]))


def _nearest(points: Sequence[TunePoint], value: int) -> TunePoint:
    return min(points, key=lambda p: abs(p.value - value))


def _key(value: int, budget: int | None) -> str:
    return f"seqs-{value}" + ("" if budget is None else f"-tokens-{budget}")


def _free(place: Path) -> Path:
    """The place, or one beside it where an interrupted run left its folder."""
    number, found = 1, place
    while found.exists() or found.with_name(found.name + ".partial").exists():
        number += 1
        found = place.with_name(f"{place.name}.{number}")
    return found


def summary_of(reading: Reading, state: TuneState, predicted: Any = None) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        **reading.to_dict(), "predicted": None if predicted is None else predicted.to_dict(), "failed": state.failed,
        "compared": {name: p.to_dict() for name, p in state.compared.items()}, "folder": str(state.folder),
    }  # fmt: skip
