"""One request and its answer: from sending to the last event, into an `Outcome`."""

from __future__ import annotations

import math
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from time import time as wall_clock

from bstar.measure import deltas
from bstar.measure.connection import Connection
from bstar.measure.outcome import TEXT, Outcome
from bstar.measure.sse import SseError, SseParser

_MOST_ERROR_BYTES = 4096
# Beyond twice what was asked for (and a few), a server does not count as we do: it will not stop.
_OVERRUN_FACTOR, _OVERRUN_SPARE = 2, 64
_AFTER_DONE_S = 1.0


class Exchange:
    """Reads the answer of one request; `finished(self)` is called once, when it is whole or given up."""

    __slots__ = (
        "_body", "_check_at", "_finished", "_most_texts", "_parser", "_stream", "connection", "deadline_s", "heard_s",
        "outcome", "request",
    )  # fmt: skip

    def __init__(
        self, outcome: Outcome, request: bytes, finished: Callable[[Exchange], None], *, output_tokens: int,
        deadline_s: float = math.inf,
    ) -> None:  # fmt: skip
        self.outcome = outcome
        self.request = request
        self.connection: Connection | None = None
        self.deadline_s = deadline_s
        self.heard_s = outcome.sent_s
        self._finished = finished
        self._most_texts = self._check_at = _OVERRUN_FACTOR * output_tokens + _OVERRUN_SPARE
        self._parser = SseParser()
        self._stream = True
        self._body = b""

    def start(self, connection: Connection, now_s: float) -> None:
        """Send on `connection`."""
        self.connection = connection
        outcome = self.outcome
        outcome.connected_s = now_s
        outcome.reused = connection.served > 0
        self.heard_s = now_s
        connection.send(self.request, self)

    def give_up(self, kind: str, text: str, now_s: float) -> None:
        """End it from our side."""
        if self.connection is not None:
            self.connection.abandon()
            self.connection = None
        self._end(kind, text, now_s)

    def time_out(self, now_s: float) -> None:
        """End it because its deadline is over."""
        self.give_up("timeout", f"after {self.deadline_s - self.outcome.sent_s:.4g} s", now_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether the deadline came before [DONE] or the end of the answer."""
        return now_s > self.deadline_s and not self.outcome.done

    def close_if_done(self, now_s: float) -> None:
        """End it where [DONE] has come and the server keeps the connection open all the same."""
        if self.outcome.done and now_s - self.heard_s > _AFTER_DONE_S:
            connection, self.connection = self.connection, None
            if connection is not None:
                connection.abandon()
            self.on_whole(self.heard_s)

    # the answer

    def on_status(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        outcome = self.outcome
        outcome.status = status
        outcome.first_byte_s = now_s
        self.heard_s = now_s
        if b"retry-after" in headers:
            outcome.retry_after_s = retry_after_s(headers[b"retry-after"])
        self._stream = status == 200 and not headers.get(b"content-type", b"").lower().startswith(b"application/json")

    def on_data(self, data: bytes, now_s: float) -> None:
        self.heard_s = now_s
        if now_s > self.deadline_s and self.is_overdue(now_s):  # first without a call: this is once a chunk
            self.time_out(now_s)
            return
        if not self._stream:
            if len(self._body) < _MOST_ERROR_BYTES:
                self._body += data
            return
        outcome = self.outcome
        try:
            for payload in self._parser.feed(data):
                deltas.take(payload, outcome, now_s)
        except deltas.StreamError as error:
            self.give_up("server_error", str(error), now_s)
        except (deltas.ChunkError, SseError) as error:
            self.give_up("malformed_sse", str(error), now_s)
        else:
            if len(outcome.chunk_s) > self._check_at:
                self._check_overrun(now_s)

    def on_whole(self, now_s: float) -> None:
        self.connection = None
        outcome = self.outcome
        if self.is_overdue(now_s):
            self.time_out(now_s)
            return
        if outcome.status != 200:
            self._end(f"http_{outcome.status}", _one_line(self._body), now_s)
            return
        if not self._stream:
            self._end("not_streaming", _one_line(self._body), now_s)
            return
        try:
            for payload in self._parser.flush():
                deltas.take(payload, outcome, now_s)
        except deltas.StreamError as error:
            self._end("server_error", str(error), now_s)
            return
        except (deltas.ChunkError, SseError) as error:
            self._end("malformed_sse", str(error), now_s)
            return
        if not outcome.done and not outcome.finish_reason:
            cut = "closed_early" if outcome.chunk_s else "empty"
            self._end("truncated" if cut == "closed_early" else cut, "", now_s)
        elif not outcome.chunk_s and outcome.completion_tokens <= 0:
            self._end("empty", "", now_s)
        else:
            self._end("", "", now_s)

    def on_lost(self, kind: str, text: str, now_s: float) -> None:
        outcome = self.outcome
        self.connection = None
        if outcome.done and outcome.chunk_s:  # all of it was there; only the closing went wrong
            self._end("", "", now_s)
        else:
            self._end(kind, text, now_s)

    @property
    def may_begin_again(self) -> bool:
        """Whether it failed because its old connection was closed under it, before any answer."""
        outcome = self.outcome
        return (outcome.error in ("reset", "closed_early") and outcome.reused and outcome.retries == 0
                and math.isnan(outcome.first_byte_s))

    def begin_again(self) -> None:
        """Make it ready to be sent on another connection."""
        self.outcome.begin_again()
        self._parser = SseParser()

    def _check_overrun(self, now_s: float) -> None:
        texts = self.outcome.chunk_kind.count(TEXT)
        if texts > self._most_texts:
            asked = (self._most_texts - _OVERRUN_SPARE) // _OVERRUN_FACTOR
            self.give_up("overrun", f"{texts} chunks with text for {asked} tokens", now_s)
        else:  # the others are without text: let them come
            self._check_at = len(self.outcome.chunk_s) + self._most_texts - texts

    def _end(self, error: str, text: str, now_s: float) -> None:
        outcome = self.outcome
        if not math.isnan(outcome.end_s):
            return
        if error:
            outcome.fail(error, text, now_s)
        else:
            outcome.end_s = now_s
        self._finished(self)


def retry_after_s(value: bytes) -> float:
    """Seconds of a Retry-After header: a number, or a date; nan where it is neither."""
    text = value.decode("latin-1").strip()
    try:
        return max(float(text), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(text).timestamp() - wall_clock(), 0.0)
    except (TypeError, ValueError, IndexError):
        return math.nan


def _one_line(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:300]
