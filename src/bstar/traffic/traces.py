"""Request traces: which format a file is in is detected, malformed rows are errors with their line number.

    Azure        CSV   TIMESTAMP, ContextTokens, GeneratedTokens        date and time, 100 ns digits
    BurstGPT     CSV   Timestamp, Model, Request tokens, Response tokens, …   seconds; 0 tokens = failed request
    Mooncake     JSONL {"timestamp": ms, "input_length", "output_length", "hash_ids"}
    own          CSV or JSONL with an input and an output column and, if there is one, an arrival column
                 (names in `trace_rows.COLUMNS`; `_ms` in a name means milliseconds, else seconds)
    Parquet      as own, where pyarrow is installed

A trailing .gz is unpacked. A trace without arrivals has lengths only: its rate must come from elsewhere.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from bstar.codec.safe_json import open_regular, shown
from bstar.errors import ConfigError
from bstar.specs.workload import Workload
from bstar.traffic.lengths import Floats, Ints, empirical
from bstar.traffic.trace_rows import Form, Row, csv_rows, jsonl_rows, parquet_rows

_MAX_BYTES = 2_000_000_000
_MAX_TOKENS = 100_000_000

@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in arrival order, one array entry each.

    arrival_s        seconds since the first request, ascending; None: the file has no arrivals
    input_tokens, output_tokens   shape (n,), at least 1
    format           "azure", "burstgpt", "mooncake", "csv", "jsonl" or "parquet"
    dropped          requests with no prompt or no answer (failures), left out
    """

    name: str
    format: str
    arrival_s: Floats | None
    input_tokens: Ints
    output_tokens: Ints
    dropped: int = 0

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
            arrivals_s=() if cv_squared is None or self.arrival_s is None else tuple(self.arrival_s.tolist()),
            joint=tuple(zip(self.input_tokens.tolist(), self.output_tokens.tolist(), strict=True)),
            name=self.name,
        )


def read_trace(path: str | Path) -> Trace:
    """The requests of a trace file, sorted by arrival.

    Raises ConfigError naming the file, and the line where one is malformed.
    """
    file = Path(path)
    handle, size = open_regular(file, what="trace")
    with handle:
        if size > _MAX_BYTES:
            raise ConfigError(f"trace: {file} is larger than {_MAX_BYTES // 10**9} GB; cut it to the hours that matter")
        if file.suffix.lower() == ".parquet":
            rows, form = parquet_rows(handle, file)
            return _collect(rows, file, form)
        return _read_text(handle, file)


def _read_text(handle: BinaryIO, file: Path) -> Trace:
    packed = gzip.GzipFile(fileobj=handle) if file.suffix.lower() == ".gz" else handle
    try:
        with io.TextIOWrapper(cast(IO[bytes], packed), encoding="utf-8-sig", newline="") as stream:
            text = _first_text(stream)
            if text.startswith("["):
                raise ConfigError(f"trace: {file} is one JSON array; write one JSON object a line")
            rows, form = (jsonl_rows(stream, file) if text.startswith("{") else csv_rows(stream, file))
            return _collect(rows, file, form)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error, csv.Error) as error:
        raise ConfigError(f"trace: {file} is not a text trace ({error}); give CSV or JSONL, packed or not") from error


def _first_text(stream: TextIO) -> str:
    """The first characters that are not white space; the stream is put back to its start."""
    head = stream.read(4096).lstrip()
    stream.seek(0)
    return head


def _count(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not number.is_integer() or not 0 <= number <= _MAX_TOKENS:
        raise ValueError
    return int(number)


def _collect(rows: Iterator[Row], file: Path, form: Form) -> Trace:
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


def _time(clock: Callable[[Any], float], row: Row, file: Path) -> float:
    try:
        found = clock(row.arrival)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"trace: {file} line {row.line}: {shown(row.arrival)} is not an arrival time")
    return found


def _sorted(
    file: Path, form: Form, times: list[float], inputs: list[int], outputs: list[int], dropped: int
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
