"""Request traces: which format a file is in is detected, malformed rows are errors with their line number.

    Azure        CSV   TIMESTAMP, ContextTokens, GeneratedTokens        date and time, 100 ns digits
    BurstGPT     CSV   Timestamp, Model, Request tokens, Response tokens, …   seconds; 0 tokens = failed request
    Mooncake     JSONL {"timestamp": ms, "input_length", "output_length", "hash_ids": one for 512 tokens}
    vLLM timed   JSONL the same keys in seconds, one hash id for 16 tokens (`vllm bench serve --dataset-name
                 timed_trace`; the Qwen-Bailian traces, with chat_id)
    own          CSV or JSONL with an input and an output column and, if there are any, an arrival, a priority
                 and a session column (names in `trace_rows.COLUMNS`; `_ms` in a name means milliseconds, else
                 seconds)
    Parquet      as own, where pyarrow is installed

A trailing .gz is unpacked. A trace without arrivals has lengths only: its rate must come from elsewhere.
Mooncake and timed traces have the same keys: whole timestamps with 512-token ids (or none) are milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bstar.codec.safe_json import open_regular, shown
from bstar.errors import ConfigError
from bstar.specs.workload import Workload
from bstar.traffic.joint import JointLengths, pairs
from bstar.traffic.lengths import Floats, Ints, empirical
from bstar.traffic.load import BlockHashes
from bstar.traffic.trace_hashes import block_hashes
from bstar.traffic.trace_rows import (
    Form,
    Row,
    TimeUnit,
    count_of,
    is_date,
    parquet_rows,
    priority_of,
    text_rows,
    time_of,
)
from bstar.units import MS

__all__ = ["TimeUnit", "Trace", "read_trace"]

_MAX_BYTES = 2_000_000_000
_MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in arrival order, one array entry each.

    arrival_s        seconds since the first request, ascending; None: the file has no arrivals
    input_tokens, output_tokens   shape (n,), at least 1
    format           "azure", "burstgpt", "mooncake", "timed", "csv", "jsonl" or "parquet"
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
            arrivals_s=() if cv_squared is None or self.arrival_s is None else tuple(self.arrival_s.tolist()),
            joint=tuple(zip(self.input_tokens.tolist(), self.output_tokens.tolist(), strict=True)),
            name=self.name,
        )


def read_trace(path: str | Path, *, time_unit: TimeUnit | None = None, hash_block_tokens: int | None = None) -> Trace:
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

        def take(rows: Iterator[Row], form: Form) -> Trace:
            return _Reading(file, form, time_unit, hash_block_tokens).of(rows)

        if file.suffix.lower() == ".parquet":
            return take(*parquet_rows(handle, file))
        return text_rows(handle, file, take)


@dataclass(slots=True)
class _Reading:
    """A trace being read."""

    file: Path
    form: Form
    time_unit: TimeUnit | None
    hash_block_tokens: int | None
    times: array[float] = field(default_factory=lambda: array("d"))
    lines: list[int] = field(default_factory=list)
    inputs: array[int] = field(default_factory=lambda: array("q"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    priorities: array[int] = field(default_factory=lambda: array("q"))
    sessions: list[str] = field(default_factory=list)
    hashes: list[list[Any]] = field(default_factory=list)
    dropped: int = 0
    dates: bool = False

    def of(self, rows: Iterator[Row]) -> Trace:
        for row in rows:
            self._add(row)
        if not self.inputs:
            raise ConfigError(f"trace: {self.file} holds no request with a prompt and an answer")
        return self._trace()

    def _add(self, row: Row) -> None:
        try:
            source, target = count_of(row.input), count_of(row.output)
        except (TypeError, ValueError, OverflowError):
            raise self._error(row, f"input {shown(row.input)} and output {shown(row.output)} "
                                   "must both be whole token counts of at least 0") from None  # fmt: skip
        form, time = self.form, 0.0
        if form.clock is not None:
            time = time_of(form.clock, row)
            if np.isnan(time):
                raise self._error(row, f"{shown(row.arrival)} is not an arrival time")
        if source == 0 or target == 0:
            self.dropped += 1
            return
        if form.clock is not None:
            self.dates = self.dates or (not self.times and is_date(row.arrival))
            self.times.append(time)
        self.inputs.append(source)
        self.outputs.append(target)
        if form.has_priority:
            try:
                self.priorities.append(priority_of(row.priority))
            except (TypeError, ValueError, OverflowError):
                raise self._error(row, f"priority {shown(row.priority)} is not a whole number") from None
        if form.has_session:
            self.sessions.append("" if row.session is None else str(row.session).strip())
        if form.has_hashes:
            if not isinstance(row.hashes, list):
                raise self._error(row, f"hash_ids {shown(row.hashes)} is not a list")
            self.hashes.append(row.hashes)
            self.lines.append(row.line)

    def _error(self, row: Row, what: str) -> ConfigError:
        return ConfigError(f"trace: {self.file} line {row.line}: {what}")

    def _trace(self) -> Trace:
        source = np.asarray(self.inputs, dtype=np.int64)
        target = np.asarray(self.outputs, dtype=np.int64)
        hashes = None
        if self.form.has_hashes and any(self.hashes):
            hashes = block_hashes(self.file, self.lines, source, self.hashes, self.hash_block_tokens)
        elif self.hash_block_tokens is not None:
            raise ConfigError(f"trace: {self.file} has no hash_ids; leave hash_block_tokens out")
        order, arrival, form = np.arange(source.size), None, self.form.name
        if self.form.clock is not None:
            moments = np.asarray(self.times, dtype=np.float64)
            order = np.argsort(moments, kind="stable")
            unit, form = self._unit(moments, hashes)
            arrival = moments[order] - moments[order[0]]
            if unit == "ms":
                arrival *= MS
        name = self.file.name.removesuffix(".gz")
        return Trace(
            name=name.rpartition(".")[0] or name, format=form, arrival_s=arrival, input_tokens=source[order],
            output_tokens=target[order], dropped=self.dropped,
            priority=np.asarray(self.priorities, dtype=np.int64)[order] if self.form.has_priority else None,
            session=_numbered(self.sessions, order) if self.form.has_session else None,
            block_hashes=hashes.take(order) if hashes is not None else None,
        )  # fmt: skip

    def _unit(self, moments: Floats, hashes: BlockHashes | None) -> tuple[TimeUnit, str]:
        """The unit of the arrivals, and the name of the format."""
        if self.dates:
            if self.time_unit is not None:
                raise ConfigError(f"trace: {self.file} has dates as arrivals; leave time_unit out")
            return "s", self.form.name
        if self.form.unit is not None:
            return self.time_unit or self.form.unit, self.form.name
        whole_numbers = bool((moments == np.floor(moments)).all())
        mooncake = whole_numbers and (hashes is None or hashes.tokens_per_block == _MOONCAKE_BLOCK_TOKENS)
        return self.time_unit or ("ms" if mooncake else "s"), "mooncake" if mooncake else "timed"


def _numbered(names: list[str], order: Ints) -> Ints:
    """0, 1, … in the order of first appearance; -1 where the file leaves it empty."""
    numbers = {"": -1}
    return np.asarray([numbers.setdefault(names[i], len(numbers) - 1) for i in order], dtype=np.int64)
