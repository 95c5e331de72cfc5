"""The rows of a trace file, whatever its format: which columns hold what, and how an arrival becomes seconds."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from bstar.errors import ConfigError
from bstar.units import MS

# Column names by what they hold, lower case, words joined by "_". The first that a file has is used.
COLUMNS: dict[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "arrival_time_s", "arrived_at", "arrival_time", "arrival", "arrival_ms", "timestamp_ms",
                "timestamp_s", "timestamp", "time_s", "time"),
    "input": ("input_tokens", "input_length", "contexttokens", "context_tokens", "request_tokens", "num_prefill_tokens",
              "prompt_tokens", "prompt_len", "prompt_length", "isl", "input"),
    "output": ("output_tokens", "output_length", "generatedtokens", "generated_tokens", "response_tokens",
               "num_decode_tokens", "completion_tokens", "output_len", "osl", "output"),
    "priority": ("priority",),
    "session": ("session", "session_id", "conversation_id"),
    "hashes": ("hash_ids",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    line: int
    arrival: Any
    input: Any
    output: Any


@dataclass(frozen=True, slots=True)
class Form:
    """A detected format: its name and how an arrival becomes seconds (None: no arrivals)."""

    name: str
    arrival_s: Callable[[Any], float] | None
    drops_failures: bool = False


def _key(name: Any) -> str:
    return str(name).strip().lower().replace(" ", "_").replace("-", "_")


def _find(names: Mapping[str, Any], what: str) -> str | None:
    return next((names[c] for c in COLUMNS[what] if c in names), None)


def _required(names: Mapping[str, Any], file: Path) -> tuple[Any, Any, Any]:
    """The (arrival or None, input, output) columns of a file, as the file spells them."""
    source, target = _find(names, "input"), _find(names, "output")
    if source is None or target is None:
        missing = "input" if source is None else "output"
        raise ConfigError(
            f"trace: {file} has no {missing}-token column (it has {', '.join(map(str, list(names)[:8]))}); "
            f"name it {COLUMNS[missing][0]}"
        )
    return _find(names, "arrival"), source, target


def csv_rows(stream: TextIO, file: Path) -> tuple[Iterator[Row], Form]:
    reader = csv.reader(stream)
    header = next((row for row in reader if any(cell.strip() for cell in row)), None)
    if header is None:
        raise ConfigError(f"trace: {file} is empty")
    names = {_key(name): index for index, name in enumerate(header)}
    arrival, source, target = _required(names, file)
    width = max(i for i in (arrival, source, target) if i is not None) + 1

    def rows() -> Iterator[Row]:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) < width:
                raise ConfigError(
                    f"trace: {file} line {reader.line_num}: has {len(row)} columns, the header {len(header)}"
                )
            yield Row(reader.line_num, None if arrival is None else row[arrival], row[source], row[target])

    label = "" if arrival is None else _key(header[arrival])
    if "contexttokens" in names:
        return rows(), Form("azure", _clock if arrival is not None else None)
    if "request_tokens" in names:
        return rows(), Form("burstgpt", _seconds if arrival is not None else None, drops_failures=True)
    return rows(), Form("csv", _own_clock(label))


def jsonl_rows(stream: TextIO, file: Path) -> tuple[Iterator[Row], Form]:
    first = next((line for line in stream if line.strip()), "")
    start = _object(first, file, 1)
    names = {_key(name): name for name in start}
    arrival, source, target = _required(names, file)
    stream.seek(0)

    def rows() -> Iterator[Row]:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            found = _object(line, file, number)
            missing = [k for k in (arrival, source, target) if k is not None and k not in found]
            if missing:
                raise ConfigError(f"trace: {file} line {number}: has no {missing[0]!r}")
            yield Row(number, None if arrival is None else found[arrival], found[source], found[target])

    if "hash_ids" in names or {"input_length", "output_length", "timestamp"} <= set(names):
        return rows(), Form("mooncake", _milliseconds if arrival is not None else None)
    return rows(), Form("jsonl", _own_clock("" if arrival is None else _key(arrival)))


def parquet_rows(handle: BinaryIO, file: Path) -> tuple[Iterator[Row], Form]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        remedy = "install it, or write the file as CSV"
        raise ConfigError(f"trace: {file} is Parquet, which needs pyarrow; {remedy}") from None
    try:
        table = parquet.read_table(handle)
    except Exception as error:
        raise ConfigError(f"trace: {file} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    names = {_key(name): name for name in table.column_names}
    arrival, source, target = _required(names, file)
    columns = [table.column(c).to_pylist() for c in (source, target)]
    times = [None] * len(columns[0]) if arrival is None else table.column(arrival).to_pylist()
    rows = (Row(n, t, i, o) for n, (t, i, o) in enumerate(zip(times, *columns, strict=True), 1))
    return rows, Form("parquet", _own_clock("" if arrival is None else _key(arrival)))


def _object(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"trace: {file} line {number}: is not JSON; write one object a line") from None
    if not isinstance(found, dict):
        raise ConfigError(f"trace: {file} line {number}: is not a JSON object")
    return found


def _own_clock(label: str) -> Callable[[Any], float] | None:
    if not label:
        return None
    return _milliseconds if label.endswith("_ms") else _seconds_or_clock


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _milliseconds(value: Any) -> float:
    return _seconds(value) * MS


def _clock(value: Any) -> float:
    """Seconds of "2023-11-16 18:17:03.9799600" or an ISO time; digits beyond microseconds are kept."""
    if isinstance(value, datetime):
        return value.timestamp()
    whole, dot, rest = str(value).strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(whole + rest[len(digits):])
    # A fixed epoch instead of the local time zone: only differences matter, and they must not jump in March.
    origin = datetime(2000, 1, 1, tzinfo=moment.tzinfo)
    return (moment - origin).total_seconds() + (float(f"0.{digits}") if dot and digits else 0.0)


def _seconds_or_clock(value: Any) -> float:
    try:
        return _seconds(value)
    except (TypeError, ValueError):
        return _clock(value)
