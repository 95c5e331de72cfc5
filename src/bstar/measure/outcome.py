"""What happened to one request: the moments, the chunks, the counts, the end. Filled while the answer streams in."""

from __future__ import annotations

import math
from array import array
from typing import Any, Final

# What a chunk of the stream is. A chunk without text may be a token all the same (half a character, an end token);
# `tokens.settle` decides that once the server's own count is known.
TEXT: Final = 1
BLANK: Final = 2  # an answer chunk without text
FINAL: Final = 3  # without text, with the finish reason
ROLE: Final = 4  # a first chunk that only says who speaks
_UNKNOWN: Final = -1


class Outcome:
    """One request. Times are on the monotonic clock of the process that sent it; nan and -1 are unknown.

    due_s        when the load said it should be sent
    allowed_s    when it could be: later than due_s where a cap on requests in flight held it back
    sent_s       when the client began to send it (opening a connection included)
    connected_s  when its connection was there
    first_byte_s, end_s   first byte of the answer; when the answer was whole or given up
    chunk_s, chunk_kind, chunk_tokens   of each event with a choice: when, what, tokens in it where the server says so
    prompt_tokens, completion_tokens, cached_tokens   as `usage` says
    error        kind (see `failures`), "" where the answer is whole
    """

    __slots__ = (
        "allowed_s", "answer_ids", "cached_tokens", "chunk_kind", "chunk_s", "chunk_tokens", "completion_tokens",
        "connected_s", "done", "due_s", "end_s", "error", "error_text", "finish_reason", "first_byte_s", "index",
        "prompt_tokens", "retries", "retry_after_s", "reused", "sent_s", "status", "text",
    )  # fmt: skip

    def __init__(self, index: int, due_s: float, allowed_s: float) -> None:
        self.index = index
        self.due_s = due_s
        self.allowed_s = allowed_s
        self.sent_s = math.nan
        self.connected_s = math.nan
        self.first_byte_s = math.nan
        self.end_s = math.nan
        self.status = 0
        self.error = ""
        self.error_text = ""
        self.retry_after_s = math.nan
        self.retries = 0
        self.reused = False
        self.chunk_s = array("d")
        self.chunk_kind = bytearray()
        self.chunk_tokens = array("i")
        self.prompt_tokens = _UNKNOWN
        self.completion_tokens = _UNKNOWN
        self.cached_tokens = _UNKNOWN
        self.finish_reason = ""
        self.done = False
        self.text: list[str] | None = None
        self.answer_ids: list[int] | None = None

    def begin_again(self) -> None:
        """Forget an attempt on a connection that the server had already closed."""
        self.retries += 1
        self.first_byte_s = self.end_s = math.nan
        self.error = self.error_text = ""
        self.status = 0
        del self.chunk_s[:], self.chunk_kind[:], self.chunk_tokens[:]

    def fail(self, kind: str, text: str, at_s: float) -> None:
        """Note the first thing that went wrong."""
        if not self.error:
            self.error, self.error_text = kind, text
        self.end_s = at_s

    def row(self) -> tuple[Any, ...]:
        """The fields of `tables.FIELDS`, as they travel between processes."""
        return (
            self.index, self.due_s, self.allowed_s, self.sent_s, self.connected_s, self.first_byte_s, self.end_s,
            self.status, self.error, self.error_text, self.retry_after_s, self.retries, self.reused,
            self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.finish_reason, self.done,
            self.chunk_s.tobytes(), bytes(self.chunk_kind), self.chunk_tokens.tobytes(),
            None if self.text is None else "".join(self.text),
        )  # fmt: skip
