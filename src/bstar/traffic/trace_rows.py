"""Rows of a trace file: which format it is in, and its columns row by row with their line numbers."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, TypeVar, cast

from bstar.errors import ConfigError

TimeUnit = Literal["s", "ms"]
T = TypeVar("T")
_ROOT = "the first request of the conversation"  # a key that no file has

_MAX_TOKENS = 100_000_000
# Column names by what they hold, lower case, words joined by "_". The first that a file has is used.
COLUMNS: dict[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "arrival_time_s", "arrived_at", "arrival_time", "arrival", "arrival_ms", "timestamp_ms",
                "timestamp_s", "timestamp", "time_s", "time", "queued_s"),
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
    """One request as the file spells it; None for what the file has no column for."""

    line: int
    arrival: Any
    input: Any
    output: Any
    priority: Any = None
    session: Any = None
    hashes: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A detected format: its name, and how an arrival becomes a number (None: no arrivals).

    unit            of arrivals that are numbers; None: of Mooncake or of a vLLM timed trace, to be told apart
    has_priority, has_session, has_hashes   optional columns of the file
    """

    name: str
    clock: Callable[[Any], float] | None
    unit: TimeUnit | None = "s"
    has_priority: bool = False
    has_session: bool = False
    has_hashes: bool = False


def text_rows(handle: BinaryIO, file: Path, take: Callable[[Iterator[Row], Form], T]) -> T:
    """What `take` makes of the rows of a CSV or JSONL file, packed (.gz) or not."""
    packed = gzip.GzipFile(fileobj=handle) if file.suffix.lower() == ".gz" else handle
    try:
        with io.TextIOWrapper(cast(IO[bytes], packed), encoding="utf-8-sig", newline="") as stream:
            text = _first_text(stream)
            if text.startswith("["):
                raise ConfigError(f"trace: {file} is one JSON array; write one JSON object a line")
            rows, form = _jsonl_rows(stream, file) if text.startswith("{") else _csv_rows(stream, file)
            return take(rows, form)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error, csv.Error) as error:
        raise ConfigError(f"trace: {file} is not a text trace ({error}); give CSV or JSONL, packed or not") from error


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a file keeps what: names or indices, None where it has none."""

    arrival: Any
    input: Any
    output: Any
    priority: Any
    session: Any
    hashes: Any

    @property
    def present(self) -> list[Any]:
        keys = (self.arrival, self.input, self.output, self.priority, self.session, self.hashes)
        return [key for key in keys if key is not None]

    def form(self, name: str, clock: Callable[[Any], float] | None, unit: TimeUnit | None = "s") -> Form:
        return Form(
            name=name, clock=clock if self.arrival is not None else None, unit=unit,
            has_priority=self.priority is not None, has_session=self.session is not None,
            has_hashes=self.hashes is not None,
        )  # fmt: skip

    def row(self, line: int, cells: Any) -> Row:
        def get(key: Any) -> Any:
            return None if key is None else cells[key]

        return Row(line, get(self.arrival), cells[self.input], cells[self.output], get(self.priority),
                   get(self.session), get(self.hashes))  # fmt: skip


def _first_text(stream: TextIO) -> str:
    """The first characters that are not white space; the stream is put back to its start."""
    head = stream.read(4096).lstrip()
    stream.seek(0)
    return head


def _key(name: Any) -> str:
    return str(name).strip().lower().replace(" ", "_").replace("-", "_")


def _find(names: Mapping[str, Any], what: str) -> Any:
    return next((names[c] for c in COLUMNS[what] if c in names), None)


def _columns(names: Mapping[str, Any], file: Path) -> _Columns:
    """The columns of a file, as the file spells them."""
    source, target = _find(names, "input"), _find(names, "output")
    if source is None or target is None:
        missing = "input" if source is None else "output"
        raise ConfigError(
            f"trace: {file} has no {missing}-token column (it has {', '.join(map(str, list(names)[:8]))}); "
            f"name it {COLUMNS[missing][0]}"
        )
    priority, session, hashes = (_find(names, what) for what in ("priority", "session", "hashes"))
    return _Columns(_find(names, "arrival"), source, target, priority, session, hashes)


def _csv_rows(stream: TextIO, file: Path) -> tuple[Iterator[Row], Form]:
    reader = csv.reader(stream)
    header = next((row for row in reader if any(cell.strip() for cell in row)), None)
    if header is None:
        raise ConfigError(f"trace: {file} is empty")
    names = {_key(name): index for index, name in enumerate(header)}
    columns = _columns({k: v for k, v in names.items() if k not in COLUMNS["hashes"]}, file)
    width = max(columns.present) + 1

    def rows() -> Iterator[Row]:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) < width:
                raise ConfigError(
                    f"trace: {file} line {reader.line_num}: has {len(row)} columns, the header {len(header)}"
                )
            yield columns.row(reader.line_num, row)

    label = "" if columns.arrival is None else _key(header[columns.arrival])
    if "contexttokens" in names:
        return rows(), columns.form("azure", _clock)
    if "request_tokens" in names:
        return rows(), columns.form("burstgpt", _seconds)
    return rows(), columns.form("csv", _seconds_or_clock, _unit_of(label))


def _jsonl_rows(stream: TextIO, file: Path) -> tuple[Iterator[Row], Form]:
    first = next((line for line in stream if line.strip()), "")
    names = {_key(name): name for name in _object(first, file, 1)}
    columns = _columns(names, file)
    stream.seek(0)

    chats = {"chat_id", "parent_chat_id"} <= set(names)
    roots: dict[str, str] = {}

    def rows() -> Iterator[Row]:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            found = _object(line, file, number)
            if chats:  # of a conversation, the id of its first request
                chat, parent = str(found.get(names["chat_id"])), str(found.get(names["parent_chat_id"]))
                found[_ROOT] = roots[chat] = roots.get(parent, chat)
            missing = [key for key in columns.present if key not in found]
            if missing:
                raise ConfigError(f"trace: {file} line {number}: has no {missing[0]!r}")
            yield columns.row(number, found)

    if chats:
        columns = replace(columns, session=_ROOT)
        return rows(), columns.form("timed", _seconds)
    if "hash_ids" in names or {"input_length", "output_length", "timestamp"} <= set(names):
        return rows(), columns.form("mooncake", _seconds, None)
    label = "" if columns.arrival is None else _key(columns.arrival)
    return rows(), columns.form("jsonl", _seconds_or_clock, _unit_of(label))


def parquet_rows(handle: BinaryIO, file: Path) -> tuple[Iterator[Row], Form]:
    """Rows of a Parquet file, by pyarrow. Raises ConfigError where it is not installed."""
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        remedy = "install it, or write the file as CSV"
        raise ConfigError(f"trace: {file} is Parquet, which needs pyarrow; {remedy}") from None
    try:
        table = parquet.read_table(handle)
    except Exception as error:
        raise ConfigError(f"trace: {file} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    columns = _columns({_key(name): name for name in table.column_names}, file)
    cells = {name: table.column(name).to_pylist() for name in columns.present}
    rows = (columns.row(n + 1, {name: column[n] for name, column in cells.items()}) for n in range(table.num_rows))
    label = "" if columns.arrival is None else _key(columns.arrival)
    return rows, columns.form("parquet", _seconds_or_clock, _unit_of(label))


def _object(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"trace: {file} line {number}: is not JSON; write one object a line") from None
    if not isinstance(found, dict):
        raise ConfigError(f"trace: {file} line {number}: is not a JSON object")
    return found


def _unit_of(label: str) -> TimeUnit:
    return "ms" if label.endswith("_ms") else "s"


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _clock(value: Any) -> float:
    """Seconds of "2023-11-16 18:17:03.9799600" or an ISO time; digits beyond microseconds are kept."""
    if isinstance(value, datetime):
        return _since_epoch(value)
    whole, dot, rest = str(value).strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(whole + rest[len(digits) :])
    return _since_epoch(moment) + (float(f"0.{digits}") if dot and digits else 0.0)


def _since_epoch(moment: datetime) -> float:
    """Seconds since a fixed moment of the same zone: only differences matter, and they must not jump in March."""
    return (moment - datetime(2000, 1, 1, tzinfo=moment.tzinfo)).total_seconds()


def _seconds_or_clock(value: Any) -> float:
    try:
        return _seconds(value)
    except (TypeError, ValueError):
        return _clock(value)


def is_date(value: Any) -> bool:
    """Whether an arrival is a date and time, which has no unit to choose."""
    try:
        _seconds(value)
    except (TypeError, ValueError):
        return True
    return False


def count_of(value: Any) -> int:
    """A whole number of tokens of at least 0. Raises ValueError, TypeError or OverflowError."""
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not number.is_integer() or not 0 <= number <= _MAX_TOKENS:
        raise ValueError
    return int(number)


def priority_of(value: Any) -> int:
    """A whole number that fits 32 bits. Raises ValueError, TypeError or OverflowError."""
    number = _seconds(value)
    if not number.is_integer() or abs(number) >= 2**31:
        raise ValueError
    return int(number)


def time_of(clock: Callable[[Any], float], row: Row) -> float:
    """The arrival of a row, or nan."""
    try:
        found = clock(row.arrival)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan
