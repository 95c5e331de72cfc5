"""Request traces: which format a file is in is detected, malformed rows are errors with their line number.

    Azure        CSV   TIMESTAMP, ContextTokens, GeneratedTokens        date and time, 100 ns digits
    BurstGPT     CSV   Timestamp, Model, Request tokens, Response tokens, …   seconds; 0 tokens = failed request
    Mooncake     JSONL {"timestamp": ms, "input_length", "output_length", "hash_ids"}
    own          CSV or JSONL with an input and an output column and, if there is one, an arrival column
                 (names in `COLUMNS`; `_ms` in a name means milliseconds, else seconds)
    Parquet      as own, where pyarrow is installed

A trailing .gz is unpacked. A trace without arrivals has lengths only: its rate must come from elsewhere.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from bstar.codec.safe_json import open_regular, shown
from bstar.errors import ConfigError
from bstar.specs.workload import Workload
from bstar.traffic.lengths import Floats, Ints, empirical
from bstar.units import MS

_MAX_BYTES = 2_000_000_000
_MAX_TOKENS = 100_000_000
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in arrival order, one array entry each.

    arrival_s        seconds since the first request, ascending; None: the file has no arrivals
    input_tokens, output_tokens   shape (n,), at least 1
    format           "azure", "burstgpt", "mooncake", "csv", "jsonl" or "parquet"
    dropped          requests with no prompt or no answer (failures), left out
    priority, session   where the file has such columns; sessions are numbered in the order of their first request
    block_hashes     what the prompts hold, where the file says so (hash_ids)
    """

    name: str
    format: str
    arrival_s: Floats | None
    input_tokens: Ints
    output_tokens: Ints
    dropped: int = 0
    priority: Ints | None = None
    session: Ints | None = None
    block_hashes: BlockHashes | None = None

    @property
    def lengths(self) -> JointLengths:
        """The pairs (input, output) to draw from, for `poisson(lengths=…)` and its siblings."""
        return pairs(self.input_tokens, self.output_tokens)

    @property
    def num_requests(self) -> int:
        return int(self.input_tokens.size)

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate between the first and the last arrival; None without arrivals or with one instant only."""
        if self.arrival_s is None or self.arrival_s.size < 2 or self.arrival_s[-1] <= 0:
            return None
        return (self.arrival_s.size - 1) / float(self.arrival_s[-1])

    @property
    def gap_cv_squared(self) -> float | None:
        """Squared coefficient of variation of the gaps between arrivals (1: Poisson); None where there are none."""
        if self.rate_per_s is None or self.arrival_s is None or self.arrival_s.size < 3:
            return None
        gaps = np.diff(self.arrival_s)
        return float(gaps.var() / gaps.mean() ** 2)

    def workload(self, *, rate_per_s: float | None = None, concurrency: int | None = None) -> Workload:
        """The workload with this trace's joint lengths, rate and burstiness (1/CV² of the gaps).

        `rate_per_s` rescales the arrivals; `concurrency` replaces them by a closed loop.
        """
        cv_squared = self.gap_cv_squared
        return Workload(
            input_tokens=empirical(self.input_tokens),
            output_tokens=empirical(self.output_tokens),
            rate_per_s=None if concurrency is not None else (rate_per_s or self.rate_per_s),
            concurrency=concurrency,
            burstiness=1.0 if not cv_squared else 1.0 / cv_squared,
            joint=tuple(zip(self.input_tokens.tolist(), self.output_tokens.tolist(), strict=True)),
            name=self.name,
        )


def read_trace(
    path: str | Path, *, time_unit: TimeUnit | None = None, hash_block_tokens: int | None = None
) -> Trace:
    """The requests of a trace file, sorted by arrival.

    time_unit           "s" or "ms" for arrivals that are numbers, where detection is not to decide
    hash_block_tokens   tokens that a hash id covers; None: the number that fits every prompt's count of ids
    Raises ConfigError naming the file, and the line where one is malformed.
    """
    file = Path(path)
    handle, size = open_regular(file, what="trace")
    with handle:
        if size > _MAX_BYTES:
            raise ConfigError(f"trace: {file} is larger than {_MAX_BYTES // 10**9} GB; cut it to the hours that matter")
        if file.suffix.lower() == ".parquet":
            rows, form = _parquet_rows(handle, file)
            return _collect(rows, file, form)
        return _read_text(handle, file)


def _read_text(handle: BinaryIO, file: Path) -> Trace:
    packed = gzip.GzipFile(fileobj=handle) if file.suffix.lower() == ".gz" else handle
    try:
        with io.TextIOWrapper(cast(IO[bytes], packed), encoding="utf-8-sig", newline="") as stream:
            text = _first_text(stream)
            if text.startswith("["):
                raise ConfigError(f"trace: {file} is one JSON array; write one JSON object a line")
            rows, form = (_jsonl_rows(stream, file) if text.startswith("{") else _csv_rows(stream, file))
            return _collect(rows, file, form)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error, csv.Error) as error:
        raise ConfigError(f"trace: {file} is not a text trace ({error}); give CSV or JSONL, packed or not") from error


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    arrival: Any
    input: Any
    output: Any


@dataclass(frozen=True, slots=True)
class _Form:
    """A detected format: its name and how an arrival becomes seconds (None: no arrivals)."""

    name: str
    arrival_s: Callable[[Any], float] | None
    drops_failures: bool = False


def _first_text(stream: TextIO) -> str:
    """The first characters that are not white space; the stream is put back to its start."""
    head = stream.read(4096).lstrip()
    stream.seek(0)
    return head


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


def _csv_rows(stream: TextIO, file: Path) -> tuple[Iterator[_Row], _Form]:
    reader = csv.reader(stream)
    header = next((row for row in reader if any(cell.strip() for cell in row)), None)
    if header is None:
        raise ConfigError(f"trace: {file} is empty")
    names = {_key(name): index for index, name in enumerate(header)}
    arrival, source, target = _required(names, file)
    width = max(i for i in (arrival, source, target) if i is not None) + 1

    def rows() -> Iterator[_Row]:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) < width:
                raise ConfigError(
                    f"trace: {file} line {reader.line_num}: has {len(row)} columns, the header {len(header)}"
                )
            yield _Row(reader.line_num, None if arrival is None else row[arrival], row[source], row[target])

    label = "" if arrival is None else _key(header[arrival])
    if "contexttokens" in names:
        return rows(), _Form("azure", _clock if arrival is not None else None)
    if "request_tokens" in names:
        return rows(), _Form("burstgpt", _seconds if arrival is not None else None, drops_failures=True)
    return rows(), _Form("csv", _own_clock(label))


def _jsonl_rows(stream: TextIO, file: Path) -> tuple[Iterator[_Row], _Form]:
    first = next((line for line in stream if line.strip()), "")
    start = _object(first, file, 1)
    names = {_key(name): name for name in start}
    arrival, source, target = _required(names, file)
    stream.seek(0)

    def rows() -> Iterator[_Row]:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            found = _object(line, file, number)
            missing = [k for k in (arrival, source, target) if k is not None and k not in found]
            if missing:
                raise ConfigError(f"trace: {file} line {number}: has no {missing[0]!r}")
            yield _Row(number, None if arrival is None else found[arrival], found[source], found[target])

    if "hash_ids" in names or {"input_length", "output_length", "timestamp"} <= set(names):
        return rows(), _Form("mooncake", _milliseconds if arrival is not None else None)
    return rows(), _Form("jsonl", _own_clock("" if arrival is None else _key(arrival)))


def _parquet_rows(handle: BinaryIO, file: Path) -> tuple[Iterator[_Row], _Form]:
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
    rows = (_Row(n, t, i, o) for n, (t, i, o) in enumerate(zip(times, *columns, strict=True), 1))
    return rows, _Form("parquet", _own_clock("" if arrival is None else _key(arrival)))


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


def _count(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not number.is_integer() or not 0 <= number <= _MAX_TOKENS:
        raise ValueError
    return int(number)


def _collect(rows: Iterator[_Row], file: Path, form: _Form) -> Trace:
    times: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    dropped = 0
    for row in rows:
        try:
            source, target = _count(row.input), _count(row.output)
        except (TypeError, ValueError):
            raise ConfigError(
                f"trace: {file} line {row.line}: input {shown(row.input)} and output {shown(row.output)} "
                "must both be whole token counts of at least 0"
            ) from None
        if form.arrival_s is not None:
            times.append(_time(form.arrival_s, row, file))
        if source == 0 or target == 0:
            dropped += 1
            if form.arrival_s is not None:
                times.pop()
            continue
        inputs.append(source)
        outputs.append(target)
    if not inputs:
        raise ConfigError(f"trace: {file} holds no request with a prompt and an answer")
    return _sorted(file, form, times, inputs, outputs, dropped)


def _time(clock: Callable[[Any], float], row: _Row, file: Path) -> float:
    try:
        found = clock(row.arrival)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"trace: {file} line {row.line}: {shown(row.arrival)} is not an arrival time")
    return found


def _sorted(
    file: Path, form: _Form, times: list[float], inputs: list[int], outputs: list[int], dropped: int
) -> Trace:
    source, target = np.asarray(inputs, dtype=np.int64), np.asarray(outputs, dtype=np.int64)
    arrival: NDArray[np.float64] | None = None
    if form.arrival_s is not None:
        moments = np.asarray(times, dtype=np.float64)
        order = np.argsort(moments, kind="stable")
        arrival, source, target = moments[order] - moments[order[0]], source[order], target[order]
    name = file.name.removesuffix(".gz")
    return Trace(
        name=name.rpartition(".")[0] or name, format=form.name, arrival_s=arrival,
        input_tokens=source, output_tokens=target, dropped=dropped,
    )  # fmt: skip
