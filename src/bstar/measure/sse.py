"""Server-sent events out of bytes that come in any pieces (WHATWG HTML, 9.2.6)."""

from __future__ import annotations

from typing import Final

DONE: Final = b"[DONE]"
_MOST_BYTES: Final = 64_000_000


class SseError(ValueError):
    """Bytes that are no event stream."""


class SseParser:
    """`feed` returns the data of the events that a piece completes; comments and other fields are left out.

    error_event   whether an event of type "error" has come
    """

    __slots__ = ("_rest", "error_event")

    def __init__(self) -> None:
        self._rest = b""
        self.error_event = False

    def feed(self, data: bytes) -> list[bytes]:
        """Raises SseError where an event is larger than 64 MB."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = self._without_returns(data)
        blocks = data.split(b"\n\n")
        self._rest = blocks.pop()
        if len(self._rest) > _MOST_BYTES:
            raise SseError("an event is larger than 64 MB")
        out = []
        for block in blocks:
            if block[:6] == b"data: " and b"\n" not in block:
                out.append(block[6:])
            else:
                found = self._fields(block)
                if found is not None:
                    out.append(found)
        return out

    def flush(self) -> list[bytes]:
        """What is left at the end of the stream: an event whose blank line never came (the standard drops it)."""
        rest, self._rest = self._rest.strip(b"\r\n"), b""
        found = self._fields(rest) if rest else None
        return [] if found is None else [found]

    def _without_returns(self, data: bytes) -> bytes:
        """Every line end as one newline; a return at the very end may be the first half of one, so it waits."""
        held = data.endswith(b"\r")
        if held:
            data = data[:-1]
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data + b"\r" if held else data

    def _fields(self, block: bytes) -> bytes | None:
        """The data of one event, its lines joined by newlines; None where it has none."""
        lines: list[bytes] | None = None
        for line in block.lstrip(b"\xef\xbb\xbf").split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"data":
                lines = [] if lines is None else lines
                lines.append(value[1:] if value[:1] == b" " else value)
            elif name == b"event" and value.strip() == b"error":
                self.error_event = True
            elif name and name not in (b"event", b"id", b"retry"):
                raise SseError(f"a line is no field of an event stream: {block[:60]!r}")
        return None if lines is None else b"\n".join(lines)
