"""Rows of finished requests as columns: one table for metrics, files and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bstar.measure.clock import ClockOffset
from bstar.measure.tokens import Counted, settle, token_gaps
from bstar.metrics.gaps import TokenGaps
from bstar.metrics.records import RequestRecords
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# The order of `Outcome.row`.
FIELDS: Final = (
    "index", "due_s", "allowed_s", "sent_s", "connected_s", "first_byte_s", "end_s", "status", "error", "error_text",
    "retry_after_s", "retries", "reused", "prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason",
    "done", "chunk_s", "chunk_kind", "chunk_tokens", "text",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(FIELDS)}
_TIMES = ("due_s", "allowed_s", "sent_s", "connected_s", "first_byte_s", "end_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestTable:
    """One entry per request that was sent, in the order of the traffic; seconds since the start of the run.

    index            number in the traffic
    intended_s       when the load said that it should be sent
    allowed_s        when the cap on requests in flight let it go
    sent_s, first_byte_s, first_token_s, last_token_s, end_s   nan where it did not happen; first and last token are
                     kept for broken answers too (`error` tells)
    asked_input_tokens, asked_output_tokens   of the load
    input_tokens     as the server counts, else as asked
    output_tokens    see `tokens`; token_source says where from
    spread, mismatch   see `tokens.Counted`
    error            kind, "" where the answer is whole
    chunk_offsets    shape (n + 1,): request i has chunk_s[chunk_offsets[i]:chunk_offsets[i + 1]]
    chunk_s, chunk_tokens   of every chunk that holds tokens
    """

    index: Ints
    worker: Ints
    intended_s: Floats
    allowed_s: Floats
    sent_s: Floats
    connected_s: Floats
    first_byte_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    end_s: Floats
    asked_input_tokens: Ints
    asked_output_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    token_source: NDArray[np.str_]
    spread: Mask
    mismatch: Mask
    status: Ints
    error: NDArray[np.str_]
    error_text: NDArray[np.str_]
    retry_after_s: Floats
    retries: Ints
    reused: Mask
    finish_reason: NDArray[np.str_]
    done: Mask
    chunk_offsets: Ints
    chunk_s: Floats
    chunk_tokens: Ints

    def __len__(self) -> int:
        return int(self.index.size)

    @property
    def succeeded(self) -> Mask:
        """Which answers are whole."""
        return np.asarray(self.error == "", dtype=bool)

    @property
    def finish_s(self) -> Floats:
        """Last token of the whole answers, nan for others: what metrics call finished."""
        return np.where(self.succeeded, self.last_token_s, np.nan)

    def records(self, *, intended: bool = False) -> RequestRecords:
        """For `bstar.metrics`: latencies are of whole answers.

        intended   from the moment the load asked for, not from sending
        """
        return RequestRecords(
            sent_s=self.intended_s if intended else self.sent_s,
            first_token_s=np.where(self.succeeded, self.first_token_s, np.nan), finish_s=self.finish_s,
            input_tokens=self.input_tokens,
            output_tokens=np.where(self.succeeded, self.output_tokens, 0),
        )  # fmt: skip

    def chunks_of(self, request: int) -> tuple[Floats, Ints]:
        """(times, tokens) of the chunks of entry `request`."""
        part = slice(int(self.chunk_offsets[request]), int(self.chunk_offsets[request + 1]))
        return self.chunk_s[part], self.chunk_tokens[part]

    def gaps(self) -> TokenGaps:
        """Gaps between the tokens of whole answers."""
        return TokenGaps.of_samples(self._joined(lambda t, n: token_gaps(t, n)))

    def chunk_gaps_s(self) -> Floats:
        """Gaps between the chunks of whole answers: what other clients call ITL."""
        return self._joined(lambda t, _: np.diff(t))

    def take(self, chosen: Mask) -> RequestTable:
        """Some of the requests."""
        picked = np.flatnonzero(chosen)
        counts = np.diff(self.chunk_offsets)
        kept = np.repeat(np.asarray(chosen, dtype=bool), counts)
        columns = {name: getattr(self, name)[picked] for name in self.__dataclass_fields__
                   if not name.startswith("chunk_")}  # fmt: skip
        offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts[picked])))
        return RequestTable(**columns, chunk_offsets=offsets, chunk_s=self.chunk_s[kept],
                            chunk_tokens=self.chunk_tokens[kept])  # fmt: skip

    def _joined(self, each: Callable[[Floats, Ints], Floats]) -> Floats:
        parts = [each(*self.chunks_of(i)) for i in np.flatnonzero(self.succeeded).tolist()]
        return np.concatenate(parts) if parts else np.zeros(0)


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """Rows of one worker, and its clock."""

    worker: int
    offset: ClockOffset
    rows: Sequence[tuple[Any, ...]]


def request_table(
    workers: Iterable[WorkerRows], traffic: Traffic, origin_s: float, *,
    count_text: Callable[[str], int] | None = None,
) -> RequestTable:  # fmt: skip
    """The table of all workers' rows, on our clock, from `origin_s` on.

    count_text   tokens of an answer's text, for answers that the server does not count
    """
    rows: list[tuple[Any, ...]] = []
    workers_of: list[int] = []
    shifts: list[float] = []
    for part in workers:
        rows += part.rows
        workers_of += [part.worker] * len(part.rows)
        shifts += [part.offset.offset_s + origin_s] * len(part.rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    rows, shift = [rows[i] for i in order], np.asarray([shifts[i] for i in order])
    counted = [_counted(row, count_text) for row in rows]
    index = _ints(rows, "index")
    sizes = np.asarray([c.times_s.size for c in counted], dtype=np.int64)
    prompt, asked = _ints(rows, "prompt_tokens"), np.asarray(traffic.input_tokens)[index]
    times = {name: np.asarray([row[_AT[name]] for row in rows], dtype=float) - shift for name in _TIMES}
    chunks = np.concatenate([c.times_s for c in counted]) if counted else np.zeros(0)
    return RequestTable(
        index=index, worker=np.asarray([workers_of[i] for i in order], dtype=np.int64), intended_s=times["due_s"],
        allowed_s=times["allowed_s"], sent_s=times["sent_s"], connected_s=times["connected_s"],
        first_byte_s=times["first_byte_s"],
        first_token_s=np.asarray([c.times_s[0] if c.times_s.size else np.nan for c in counted], dtype=float) - shift,
        last_token_s=np.asarray([c.times_s[-1] if c.times_s.size else np.nan for c in counted], dtype=float) - shift,
        end_s=times["end_s"], asked_input_tokens=asked,
        asked_output_tokens=np.asarray(traffic.output_tokens)[index],
        input_tokens=np.where(prompt > 0, prompt, asked),
        output_tokens=np.asarray([c.total for c in counted], dtype=np.int64),
        cached_tokens=_ints(rows, "cached_tokens"), token_source=_texts([c.source for c in counted]),
        spread=np.asarray([c.spread for c in counted], dtype=bool),
        mismatch=np.asarray([c.mismatch for c in counted], dtype=bool), status=_ints(rows, "status"),
        error=_texts([row[_AT["error"]] for row in rows]), error_text=_texts([row[_AT["error_text"]] for row in rows]),
        retry_after_s=np.asarray([row[_AT["retry_after_s"]] for row in rows], dtype=float),
        retries=_ints(rows, "retries"), reused=np.asarray([row[_AT["reused"]] for row in rows], dtype=bool),
        finish_reason=_texts([row[_AT["finish_reason"]] for row in rows]),
        done=np.asarray([row[_AT["done"]] for row in rows], dtype=bool),
        chunk_offsets=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes))),
        chunk_s=chunks - np.repeat(shift, sizes),
        chunk_tokens=np.concatenate([c.per_chunk for c in counted]) if counted else np.zeros(0, dtype=np.int64),
    )  # fmt: skip


def _counted(row: tuple[Any, ...], count_text: Callable[[str], int] | None) -> Counted:
    usage, text = row[_AT["completion_tokens"]], row[_AT["text"]]
    found = count_text(text) if count_text is not None and usage < 0 and text is not None else None
    return settle(
        np.frombuffer(row[_AT["chunk_s"]], dtype=np.float64), row[_AT["chunk_kind"]],
        np.frombuffer(row[_AT["chunk_tokens"]], dtype=np.int32).astype(np.int64), usage, found,
    )  # fmt: skip


def _ints(rows: list[tuple[Any, ...]], name: str) -> Ints:
    at = _AT[name]
    return np.asarray([row[at] for row in rows], dtype=np.int64)


def _texts(values: list[str]) -> NDArray[np.str_]:
    return np.asarray(values, dtype=np.str_)
