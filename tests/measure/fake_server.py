"""A server that behaves as told: good OpenAI streams, and every way of going wrong. In a thread of the test.

`FakeServer(behave)` calls `behave(answer, body)` for every POST; `Answer` writes what it likes.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Behave = Callable[["Answer", dict[str, Any]], Awaitable[None]]


class Answer:
    """Writes one HTTP answer."""

    def __init__(self, writer: asyncio.StreamWriter, headers: dict[str, str]) -> None:
        self.writer, self.headers = writer, headers
        self.chunked = False

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, *, kind: str = "text/event-stream", **more: str) -> None:
        """Status and headers of a chunked answer."""
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", "transfer-encoding: chunked"]
        lines += [f"{k.replace('_', '-')}: {v}" for k, v in more.items()]
        self.chunked = True
        await self.raw(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def body(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)

    async def event(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        await self.body(f"data: {text}\n\n".encode())

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def reply(self, status: int, body: bytes = b"{}", **more: str) -> None:
        """A plain answer with a length."""
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"{k.replace('_', '-')}: {v}" for k, v in more.items()]
        await self.raw(("\r\n".join(lines) + "\r\n\r\n").encode() + body)

    def reset(self) -> None:
        """Drop the connection with a reset."""
        import socket
        import struct

        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class FakeServer:
    """Serves on a free port of the loopback; use it as a context."""

    def __init__(self, behave: Behave, *, models: Any = None, context: ssl.SSLContext | None = None) -> None:
        self.behave, self.context = behave, context
        self.models = {"data": [{"id": "fake", "owned_by": "fake"}]} if models is None else models
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"{'https' if self.context else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive() and not self._over.is_set():
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(10)

    def _stop(self) -> None:
        self._over.set()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            for _ in range(3):  # connections that are being accepted have no task of ours yet
                self._stop()
                if left := asyncio.all_tasks(self._loop):
                    self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
                self._loop.run_until_complete(asyncio.sleep(0.01))
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self.context, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            await self._over.wait()
            await asyncio.sleep(0.02)  # asyncio drops a connection that is being accepted when its server closes
        finally:
            server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._tasks.append(self._loop.create_task(self._client(reader, writer)))

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        answer = Answer(writer, headers)
        size = int(headers.get("content-length", 0))
        body = await reader.readexactly(size) if size else b""
        if first.startswith("GET"):
            found = self.models if "/v1/models" in first else {}
            await answer.reply(200 if found else 404, json.dumps(found).encode())
            return True
        self.bodies.append(json.loads(body))
        self.headers.append(headers)
        await self.behave(answer, self.bodies[-1])
        return not writer.transport.is_closing()


def choice(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A completions event."""
    return {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish,
                                                                 **more}]}


def delta(finish: str | None = None, **content: Any) -> dict[str, Any]:
    """A chat event."""
    return {"id": "c", "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion", "choices": [],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def prompt_tokens(body: dict[str, Any]) -> int:
    """Tokens of a prompt as this server counts: ids, or words (and three for a chat template)."""
    if "messages" in body:
        return sum(3 + len(str(m["content"]).split()) for m in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


async def good(answer: Answer, body: dict[str, Any], *, gap_s: float = 0.0, first_s: float = 0.0) -> None:
    """A well-behaved stream of max_tokens tokens."""
    count = int(body.get("max_tokens") or body.get("max_completion_tokens"))
    chat = "messages" in body
    await asyncio.sleep(first_s)
    await answer.head()
    if chat:
        await answer.event(delta(role="assistant", content=""))
    for i in range(count):
        if i and gap_s:
            await asyncio.sleep(gap_s)
        finish = "length" if i == count - 1 else None
        await answer.event(delta(finish, content=" a") if chat else choice(" a", finish))
    if body.get("stream_options", {}).get("include_usage"):
        await answer.event(usage(prompt_tokens(body), count))
    await answer.event("[DONE]")
    await answer.end()
