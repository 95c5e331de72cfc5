"""Robust regression of log times on the terms, each pulled to its prior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Errors below this count squared, above it by their size (soft L1): logarithms of TPOT and of TTFT.
SCALES = (0.08, 0.25)
# How much a TTFT counts beside a TPOT.
WEIGHTS = (1.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Predictions linear in the terms: predicted + slopes · (terms - at).

    measured, predicted   (points, 2) seconds of TPOT and TTFT; nan in measured: not known
    slopes                (points, 2, terms)
    at, low               (terms,) where it is linear; what terms may not be below
    centers, widths       (terms,) where they are pulled to; how far from there they may well be
    """

    measured: Floats
    predicted: Floats
    slopes: Floats
    at: Floats
    centers: Floats
    widths: Floats
    low: Floats

    def seconds(self, terms: Floats, rows: NDArray[np.bool_] | slice = slice(None)) -> Floats:
        """Predicted seconds, never below a fifth of those at `at`."""
        found = self.predicted[rows] + self.slopes[rows] @ (terms - self.at)
        result: Floats = np.maximum(found, 0.2 * self.predicted[rows])
        return result

    def errors(self, terms: Floats, rows: NDArray[np.bool_] | slice = slice(None)) -> Floats:
        """log(predicted / measured), (points, 2)."""
        result: Floats = np.log(self.seconds(terms, rows) / self.measured[rows])
        return result


def solve(problem: Problem, rows: NDArray[np.bool_], start: Floats | None = None, *, rounds: int = 60) -> Floats:
    """Terms that minimise Σ soft-L1(log errors) + Σ ((terms - centers) / widths)², over `rows`."""
    terms = problem.at.copy() if start is None else start.copy()
    scales, weights = np.array(SCALES), np.array(WEIGHTS)
    measured = problem.measured[rows]
    known = np.isfinite(measured)
    inverse = 1.0 / problem.widths**2

    def loss(x: Floats) -> float:
        z = np.where(known, problem.errors(x, rows), 0.0) / scales
        pulled = (x - problem.centers) / problem.widths
        return float(np.sum(weights * 2.0 * (np.sqrt(1.0 + z * z) - 1.0)) + np.sum(pulled**2))

    best = loss(terms)
    for _ in range(rounds):
        seconds = problem.seconds(terms, rows)
        error = np.where(known, np.log(seconds / measured), 0.0)
        weight = weights * known / scales**2 / np.sqrt(1.0 + (error / scales) ** 2)
        jacobian = (problem.slopes[rows] / seconds[:, :, None]).reshape(-1, terms.size)
        w = weight.reshape(-1)
        hessian = (jacobian * w[:, None]).T @ jacobian + np.diag(inverse)
        gradient = jacobian.T @ (w * error.reshape(-1)) + (terms - problem.centers) * inverse
        free = (terms > problem.low + 1e-15) | (gradient < 0)  # terms at their bound that do not want back stay there
        move, size = np.zeros_like(terms), 1.0
        move[free] = np.linalg.solve(hessian[np.ix_(free, free)], -gradient[free])
        while size > 1e-3 and not loss(np.maximum(terms + size * move, problem.low)) <= best + 1e-12:
            size /= 2.0
        terms = np.maximum(terms + size * move, problem.low)
        new = loss(terms)
        if best - new < 1e-5:
            break
        best = new
    return terms


def standard_errors(problem: Problem, rows: NDArray[np.bool_], terms: Floats, groups: NDArray[np.int64]) -> Floats:
    """Of the terms, by the sandwich with points of a group taken as dependent."""
    scales, weights = np.array(SCALES), np.array(WEIGHTS)
    known = np.isfinite(problem.measured[rows])
    seconds = problem.seconds(terms, rows)
    error = np.where(known, problem.errors(terms, rows), 0.0)
    weight = weights * known / scales**2 / np.sqrt(1.0 + (error / scales) ** 2)
    jacobian = problem.slopes[rows] / seconds[:, :, None]
    flat, w = jacobian.reshape(-1, terms.size), weight.reshape(-1)
    bread = np.linalg.inv((flat * w[:, None]).T @ flat + np.diag(1.0 / problem.widths**2))
    score = np.einsum("nkt,nk->nt", jacobian, weight * error)
    own = groups[rows]
    meat = np.zeros_like(bread)
    for group in np.unique(own):
        one = score[own == group].sum(axis=0)
        meat += np.outer(one, one)
    result: Floats = np.sqrt(np.maximum(np.diag(bread @ meat @ bread), 0.0))
    return result
