"""Rounds of simulating and fitting, and what is held out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from parameters import Cell, Parameter, Term, moved, terms_of
from points import FitPoint
from sensitivity import Sensitivity, Shifts
from simulate import Simulated, simulated
from solve import Problem, solve

from bstar.latency.constants import constants_for

Floats = NDArray[np.float64]
Cells = list[Cell]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """points and samples; terms and their values; the problem they solve."""

    points: list[FitPoint]
    samples: list[Simulated]
    parameters: tuple[Parameter, ...]
    terms: list[Term]
    values: Floats
    problem: Problem
    steady: NDArray[np.bool_]


def shifts_of(terms: Sequence[Term], values: Floats, cells: Cells) -> dict[Cell, dict[str, float]]:
    """By cell, the shift of each parameter."""
    out: dict[Cell, dict[str, float]] = {}
    for cell in set(cells):
        shift = out.setdefault(cell, {})
        for term, value in zip(terms, values, strict=True):
            if term.holds(cell):
                shift[term.parameter.name] = shift.get(term.parameter.name, 0.0) + float(value)
    return out


def simulate_all(points: list[FitPoint], parameters: tuple[Parameter, ...], shifts: Shifts) -> list[Simulated]:
    """Every point through the simulator with its constants moved."""
    out = []
    for p in points:
        constants = moved(constants_for(p.deployment), parameters, shifts.get(p.cell, {}))
        out.append(simulated(p.point, p.deployment, constants))
    return out


def problem_of(
    points: list[FitPoint], samples: list[Simulated], parameters: tuple[Parameter, ...], terms: list[Term],
    values: Floats,
) -> Problem:  # fmt: skip
    """Linear in the terms around `values`."""
    cells: Cells = [p.cell for p in points]
    found = Sensitivity(samples, cells, parameters, shifts_of(terms, values, cells))
    names = [p.name for p in parameters]
    slopes = np.zeros((len(points), 2, len(terms)))
    for k, term in enumerate(terms):
        holds = np.array([term.holds(cell) for cell in cells])
        slopes[holds, :, k] = found.slopes[holds][:, :, names.index(term.parameter.name)]
    measured = np.array([[p.point.tpot_s or np.nan, p.point.ttft_s or np.nan] for p in points])
    return Problem(measured=measured, predicted=found.predicted, slopes=slopes, at=values.copy(),
                   centers=np.array([t.center for t in terms]), widths=np.array([t.width for t in terms]),
                   low=_lowest(points, terms))  # fmt: skip


def _lowest(points: list[FitPoint], terms: list[Term]) -> Floats:
    """How far down each term may go before some constant leaves its range; beside coarser terms, well below them."""
    low = np.full(len(terms), -np.inf)
    for cell in {p.cell for p in points}:
        prior = constants_for(next(p.deployment for p in points if p.cell == cell))
        for k, term in enumerate(terms):
            if term.holds(cell):
                coarser = sum(t.center + 2.0 * t.width for t in terms if t.parameter is term.parameter
                              and t is not term and t.holds(cell) and len(t.where) < len(term.where))
                low[k] = max(low[k], term.parameter.lowest(prior[term.parameter.name]) - coarser)
    return low


def fit(
    points: list[FitPoint], parameters: tuple[Parameter, ...], *, rounds: int = 2, say: Callable[[str], None] = print,
) -> Fitted:  # fmt: skip
    """Simulate, fit on derivatives (twice, as fractions are not linear), and again."""
    cells: Cells = [p.cell for p in points]
    terms = terms_of(parameters, set(cells))
    values = np.array([t.center for t in terms])
    steady = np.array([p.unsteady is None for p in points])
    samples: list[Simulated] = []
    for number in range(rounds):
        begun = time.perf_counter()
        samples = simulate_all(points, parameters, shifts_of(terms, values, cells))
        took = time.perf_counter() - begun
        for _ in range(3):
            problem = problem_of(points, samples, parameters, terms, values)
            values = solve(problem, steady)
        say(f"round {number + 1}: simulated in {took:.0f} s, in all {time.perf_counter() - begun:.0f} s: "
            f"{summary(problem.errors(values))}")
    problem = problem_of(points, samples, parameters, terms, values)
    return Fitted(points=points, samples=samples, parameters=parameters, terms=terms, values=values,
                  problem=problem, steady=steady)


def held_out(fitted: Fitted, folds: NDArray[np.int64], chosen: NDArray[np.bool_] | None = None) -> Floats:
    """log(predicted / measured) of every point, (points, 2), by a fit without its fold.

    chosen   terms that are fitted (others stay at their prior); None: all
    """
    problem = fitted.problem
    if chosen is not None:
        problem = replace(problem, widths=np.where(chosen, problem.widths, 1e-12),
                          centers=np.where(chosen, problem.centers, 0.0))
    out = np.empty((len(fitted.points), 2))
    start = fitted.values if chosen is None else np.where(chosen, fitted.values, 0.0)  # at the prior without it
    for fold in np.unique(folds):
        held = folds == fold
        values = solve(problem, ~held & fitted.steady, start)
        out[held] = problem.errors(values, held)
    return out


def summary(errors: Floats) -> str:
    """Errors as the issue counts them."""
    tpot, ttft = errors[:, 0], errors[:, 1][np.isfinite(errors[:, 1])]
    relative, waiting = np.abs(np.expm1(tpot)), np.abs(np.expm1(ttft))
    return (f"TPOT {np.median(relative):.1%} mean {relative.mean():.1%} bias {np.median(tpot):+.1%}, "
            f"TTFT {np.median(waiting):.1%} |log| {np.abs(ttft).mean():.2f} bias {np.median(ttft):+.1%}")
