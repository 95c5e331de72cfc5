"""A server that does nothing but stream: OpenAI completions whose tokens cost it nothing, for measuring clients.

    python benchmarks/null_server.py PORT [--gap 0.1] [--chunks 0]

The first chunk comes at once, then one every --gap seconds, max_tokens of them (--chunks: so many whatever is asked).
A tick every 5 ms writes to all streams that are due: one process, uvloop, no HTTP framework. CPU seconds of the server
are at GET /cpu.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time

import uvloop

TICK_S = 0.005
EVENT = (b'{"id":"cmpl-9d3a5a0a6b5f4e0c8e4b2c8d3f0f1a2b","object":"text_completion","created":1790000000,'
         b'"model":"tiny","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,'
         b'"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null}],'
         b'"usage":null}')  # fmt: skip
CHAT_EVENT = (b'{"id":"chatcmpl-9d3a5a0a6b5f4e0c8e4b2c8d3f0f1a2b","object":"chat.completion.chunk",'
              b'"created":1790000000,"model":"tiny","choices":[{"index":0,"delta":{"content":" token"},'
              b'"logprobs":null,"finish_reason":null,"token_ids":null}]}')  # fmt: skip
HEAD = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")


def chunked(event: bytes) -> bytes:
    body = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


CHUNKS = {False: chunked(EVENT), True: chunked(CHAT_EVENT)}


def ending(tokens: int, prompt: int) -> bytes:
    usage = json.dumps({"id": "cmpl-9d3a", "object": "text_completion", "created": 1790000000, "model": "tiny",
                        "choices": [], "usage": {"prompt_tokens": prompt, "total_tokens": prompt + tokens,
                                                 "completion_tokens": tokens}})  # fmt: skip
    return chunked(usage.encode()) + chunked(b"[DONE]") + b"0\r\n\r\n"


class Streams:
    """All open streams, by the tick in which their next chunk is due."""

    def __init__(self, gap_s: float, chunks: int) -> None:
        self.slots: list[list[Client]] = [[] for _ in range(max(round(gap_s / TICK_S), 1))]
        self.at = 0
        self.chunks = chunks

    def add(self, client: Client) -> None:
        self.slots[(self.at - 1) % len(self.slots)].append(client)

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due += TICK_S
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            self.at = (self.at + 1) % len(self.slots)
            kept = []
            for client in self.slots[self.at]:
                if client.left > 0:
                    client.left -= 1
                    client.transport.write(CHUNKS[client.chat])
                    kept.append(client)
                elif client.left == 0:
                    client.transport.write(ending(client.tokens, client.prompt))
            self.slots[self.at] = kept


class Client(asyncio.Protocol):
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.buffer = b""
        self.left = self.tokens = self.prompt = 0
        self.chat = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.left = -1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self.json({"cpu_s": usage.ru_utime + usage.ru_stime, "data": [{"id": "tiny", "object": "model"}]})
            return
        asked = json.loads(body)
        self.chat = "messages" in asked
        self.tokens = self.streams.chunks or int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        prompt = asked.get("prompt")
        self.prompt = len(prompt) if isinstance(prompt, list) else 8
        self.transport.write(HEAD + CHUNKS[self.chat])
        self.left = self.tokens - 1
        self.streams.add(self)

    def json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                             % (len(body), body))


async def serve(port: int, gap_s: float, chunks: int) -> None:
    streams = Streams(gap_s, chunks)
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(streams), "127.0.0.1", port, backlog=8192)
    async with server:
        await streams.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--gap", type=float, default=0.1)
    parser.add_argument("--chunks", type=int, default=0)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.gap, options.chunks))


if __name__ == "__main__":
    main()
