"""Cells of a row of measured points: figures, counts, lengths and times; 0 and blank say nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

# Most of what a cell can mean: clients; GPUs and workers; tokens; milliseconds (fewest, most).
MOST_CLIENTS: Final = 100_000
_MOST_GPUS: Final = 65_536
_MOST_TOKENS: Final = 100_000_000
_MEASURED_MS: Final = (1e-6, 1e9)
MS: Final = 1e-3


class CellError(Exception):
    """A cell that is not what its column holds."""


def number_of(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column, "")
    if not text or text.lower() in ("nan", "none", "null", "n/a"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CellError(f"{column}: {text[:60]!r} is not a number")
    return value


def whole_of(row: Mapping[str, str], column: str, *, loose: bool = False, most: int = 10**9) -> int | None:
    """A count, at least 1 (0 and blank: the row does not say). loose: what is no count is not said either."""
    try:
        value = number_of(row, column)
    except CellError:
        if loose:
            return None
        raise
    if value is None or value == 0:
        return None
    if value != int(value) or not 1 <= value <= most:
        if loose:
            return None
        wanted = "of at least 1" if value < 1 or value <= most else f"of at most {most:,}"
        raise CellError(f"{column}: must be a whole number {wanted}, is {row[column][:60]!r}")
    return int(value)


def gpus_of(row: Mapping[str, str], column: str) -> int | None:
    """A number of GPUs or of workers."""
    return whole_of(row, column, most=_MOST_GPUS)


def ranks_of(row: Mapping[str, str], column: str) -> int | None:
    """The same, where 0 is no way to leave it open."""
    found = gpus_of(row, column)
    if found is None and number_of(row, column) is not None:
        raise CellError(f"{column}: must be a whole number of at least 1, is {row[column][:60]!r}")
    return found


def clients_of(row: Mapping[str, str], column: str) -> int:
    value = whole_of(row, column, most=MOST_CLIENTS)
    if value is None:
        _not_empty(row, column)
        raise CellError(f"{column}: must be a whole number of at least 1, is {row[column][:60]!r}")
    return value


def _not_empty(row: Mapping[str, str], column: str) -> None:
    if not row.get(column):
        raise CellError(f"{column}: is empty; a point needs it")


def tokens_of(row: Mapping[str, str], column: str) -> float:
    """A length, which may be a mean."""
    _not_empty(row, column)
    value = number_of(row, column)
    if value is not None and value > _MOST_TOKENS:
        raise CellError(f"{column}: must be a number of tokens of at most {_MOST_TOKENS:,}, is {row[column][:60]!r}")
    if value is None or value < 1:
        raise CellError(f"{column}: must be a number of tokens of at least 1, is {row.get(column, '')[:60]!r}")
    return value


def loose_tokens(row: Mapping[str, str], column: str) -> float:
    """A length, 0 where the cell is not one number."""
    try:
        return max(number_of(row, column) or 0.0, 0.0)
    except CellError:
        return 0.0


def seconds_of(row: Mapping[str, str], column: str) -> float | None:
    """Milliseconds of the file in seconds; 0 and blank: not measured."""
    value = number_of(row, column)
    if value is not None and value < 0:
        raise CellError(f"{column}: must not be negative, is {row[column][:60]!r}")
    if value and not _MEASURED_MS[0] <= value <= _MEASURED_MS[1]:
        raise CellError(f"{column}: {row[column][:60]!r} is no time that can have been measured")
    return None if not value else value * MS
