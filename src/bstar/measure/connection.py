"""HTTP/1.1 connections for streams: as little as possible between the socket and the clock.

httptools (Node's llhttp) parses; what it finds goes straight to the exchange that holds the connection. A tenth of a
millisecond of framework per chunk would be the limit of the client: see `benchmarks/client_capacity.py`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from bstar.measure.clock import now
from bstar.measure.failures import of_exception

if TYPE_CHECKING:
    import httptools


class Reader(Protocol):
    """Who has sent a request on a connection and reads its answer."""

    def on_status(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None: ...
    def on_data(self, data: bytes, now_s: float) -> None: ...
    def on_whole(self, now_s: float) -> None: ...
    def on_lost(self, kind: str, text: str, now_s: float) -> None: ...


# Headers that an exchange looks at; all others are dropped unread.
_READ = frozenset({b"retry-after", b"content-type", b"server", b"content-length", b"transfer-encoding"})


class Connection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    __slots__ = ("_headers", "_now", "_parser", "_reusable", "free_since_s", "pool", "reader", "served", "transport")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.reader: Reader | None = None
        self.served = 0
        self.free_since_s = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._now = 0.0
        self._parser: httptools.HttpResponseParser = pool.parser(self)
        self._reusable = True

    def send(self, request: bytes, reader: Reader) -> None:
        """Write a request; `reader` gets its answer."""
        assert self.transport is not None
        self.reader = reader
        self._headers = {}
        self.transport.write(request)

    def abandon(self) -> None:
        """Close without reading further; the reader is not told."""
        self.reader = None
        if self.transport is not None:
            self.transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = now()
        if self.reader is None:  # bytes that nobody asked for
            self.abandon()
            return
        try:
            self._parser.feed_data(data)
        except self.pool.callback_error as error:  # a bug of ours, not of the server
            raise (error.__context__ or error) from None
        except self.pool.parser_error as error:
            self._fail(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.forget(self)
        reader, self.reader = self.reader, None
        if reader is None:
            return
        moment = now()
        if exc is None and self._ends_with_the_connection():
            reader.on_whole(moment)
            return
        kind, text = ("closed_early", "") if exc is None else of_exception(exc)
        reader.on_lost("reset" if kind == "connect" else kind, text, moment)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _READ:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self.reader is not None:
            self._reusable = self._parser.should_keep_alive()
            self.reader.on_status(status, self._headers, self._now)

    def on_body(self, body: bytes) -> None:
        if self.reader is not None:
            self.reader.on_data(body, self._now)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        reader, self.reader = self.reader, None
        self.served += 1
        if reader is None:
            return
        # First back to the pool: the next request may start in `on_whole`.
        if self._reusable:
            self.pool.give_back(self, self._now)
        elif self.transport is not None:
            self.transport.close()
        reader.on_whole(self._now)

    def _ends_with_the_connection(self) -> bool:
        """Whether the answer has neither a length nor chunks, so that closing is its end."""
        names = self._headers
        return bool(names) and b"content-length" not in names and b"transfer-encoding" not in names

    def _fail(self, error: Exception) -> None:
        reader, self.reader = self.reader, None
        if self.transport is not None:
            self.transport.abort()
        if reader is not None:
            reader.on_lost("malformed_http", " ".join(str(error).split())[:300], self._now)


class Pool:
    """Connections to one server, the last used first: idle ones age and are closed before the server does it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, addresses: Sequence[tuple[str, int]], *,
        context: ssl.SSLContext | None = None, server_name: str | None = None, connect_timeout_s: float = 10.0,
        idle_limit_s: float = 3.0,
    ) -> None:  # fmt: skip
        import httptools

        self.parser: Callable[[Connection], httptools.HttpResponseParser] = httptools.HttpResponseParser
        self.parser_error, self.callback_error = httptools.HttpParserError, httptools.HttpParserCallbackError
        self.opened = 0
        self._loop, self._addresses = loop, list(addresses)
        self._context, self._server_name = context, server_name
        self._connect_timeout_s, self._idle_limit_s = connect_timeout_s, idle_limit_s
        self._free: list[Connection] = []
        self._all: set[Connection] = set()

    def take(self) -> Connection | None:
        """A free connection, or None: open one."""
        free = self._free
        while free:
            connection = free.pop()
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            if now() - connection.free_since_s > self._idle_limit_s:
                connection.abandon()
                continue
            return connection
        return None

    async def open(self) -> Connection:
        """A new connection. Raises OSError, ssl.SSLError or TimeoutError."""
        host, port = self._addresses[self.opened % len(self._addresses)]
        self.opened += 1
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self), host, port, ssl=self._context,
                server_hostname=self._server_name if self._context is not None else None)
        self._all.add(connection)
        return connection

    def give_back(self, connection: Connection, now_s: float) -> None:
        connection.free_since_s = now_s
        self._free.append(connection)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)

    def close(self) -> None:
        """Close every connection."""
        self._free.clear()
        for connection in list(self._all):
            connection.abandon()
