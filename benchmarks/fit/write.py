"""The data file that bstar reads: constants by engine and generation, with standard errors and what they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from parameters import Cell, Parameter

from bstar.latency.constants import constants_for
from fit import Fitted, shifts_of

Floats = NDArray[np.float64]

_HEAD = """\
# Written by `python benchmarks/fit` from the serving points bundled in bstar.calibration: do not edit.
# Constants in SI units, over kernels.toml and engines.toml; meanings and ranges in constants.toml. An entry holds where
# its conditions do (engine, GPU generation, engine version since); the one with most conditions wins.
# standard_error: groups (GPU x engine x model) taken as independent. rows: measured points that the value comes from.
"""


def write_constants(fitted: Fitted, errors: Floats, path: Path) -> None:
    """One entry for each cell (engine, generation) that has points, one for each engine, one for all."""
    entries: list[dict[str, object]] = []
    for parameter in fitted.parameters:
        entries += _entries(fitted, parameter, errors)
    lines = [_HEAD, "value = ["]
    lines += ["    { " + ", ".join(f"{key} = {_toml(value)}" for key, value in e.items()) + " }," for e in entries]
    path.write_text("\n".join([*lines, "]", ""]), encoding="utf-8")


def _entries(fitted: Fitted, parameter: Parameter, errors: Floats) -> list[dict[str, object]]:
    """Entries of one constant; for engines on generations without points too, where the parameter says so."""
    cells = [p.cell for p in fitted.points]
    columns = [k for k, t in enumerate(fitted.terms) if t.parameter is parameter]
    uses = np.any(fitted.problem.slopes[:, :, columns] != 0.0, axis=(1, 2)) & fitted.steady
    by_cell = shifts_of(fitted.terms, fitted.values, cells)
    out: list[dict[str, object]] = []
    for engine in sorted({c[0] for c in cells if not parameter.only or c[0] in parameter.only}):
        here = np.array([c[0] == engine for c in cells]) & uses
        terms = [(t, v) for t, v in zip(fitted.terms, fitted.values, strict=True) if t.parameter is parameter]
        if parameter.elsewhere:
            shift = sum(v for t, v in terms if t.where in ((), (engine,)))
            out += _entry(fitted, parameter, errors, (engine, "", ""), float(shift), np.flatnonzero(here))
        for cell in sorted({c for c in cells if c[0] == engine}):
            if cell[2] and not any(t.level == "era" for t, _ in terms):
                continue
            inside = np.flatnonzero(here & np.array([c == cell for c in cells]))
            if cell[2] or any(t.level != "era" for t, _ in terms):
                out += _entry(fitted, parameter, errors, cell, by_cell[cell].get(parameter.name, 0.0), inside)
    return [e for e in out if "generation" not in e or not any(_same(e, o) for o in out)]


def _same(entry: dict[str, object], other: dict[str, object]) -> bool:
    """Whether an entry says what the one for its engine says already."""
    return "generation" not in other and other["engine"] == entry["engine"] and other["value"] == entry["value"]


def _entry(
    fitted: Fitted, parameter: Parameter, errors: Floats, cell: Cell, shift: float, rows: NDArray[np.int64],
) -> list[dict[str, object]]:  # fmt: skip
    if not rows.size:
        return []
    engine, generation, era = cell
    value = parameter.moved(constants_for(fitted.points[rows[0]].deployment)[parameter.name], shift)
    holding = [k for k, t in enumerate(fitted.terms) if t.parameter is parameter
               and (t.holds(cell) or (not generation and t.where in ((), (engine,))))]
    error = float(np.sqrt(np.sum(errors[holding] ** 2)))
    if parameter.is_fraction:
        error *= value / max(1.0 + shift, 0.1)
    conditions = {"engine": engine} | ({"generation": generation} if generation else {})
    if era:
        conditions["until"] = era
    if engine == "trtllm":
        conditions["since"] = "1.0"  # before, another runtime: fitted_static.toml
    return [{"name": parameter.name, **conditions, "value": value, "standard_error": error, "rows": int(rows.size)}]


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else (f"{value:.4g}" if isinstance(value, float) else str(value))
