"""A worker process: reads its job, sends it, and writes what happens to its standard output, a pickle a message.

    python -m bstar.measure.worker      started by `fleet`; frames are a length (4 bytes) and a pickle

Messages in: job, clock, go, stop. Messages out: ready, clock, rows, progress, end, bug. The end of its standard input
(a parent that died) stops it. The API key comes from the environment that it inherits, never from a message.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import IO, Any

from bstar.measure.clock import now
from bstar.measure.driver import Driver
from bstar.measure.job import Job
from bstar.measure.keys import hide

Message = tuple[Any, ...]

_LENGTH = struct.Struct("<I")
_PROGRESS_S = 0.5


def write_frame(pipe: IO[bytes], message: Message) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Message | None:
    """The next message; None where the pipe has ended. Frames come from our own processes only."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    if len(data) < size:
        return None
    found: Message = pickle.loads(data)
    return found


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class _Out:
    """Writes messages from a thread of its own, so that a full pipe never holds up the event loop."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, *message: Any) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                write_frame(self._pipe, message)
            except OSError:  # the parent is gone; standard input has ended too
                return


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Obey the parent until the job is done."""
    out = _Out(stdout)
    driver: Driver | None = None
    try:
        while (message := read_frame(stdin)) is not None:
            if message[0] == "job":
                job: Job = message[1]
                driver = Driver(job, lambda rows: out.put("rows", rows))
                driver.prepare()
                out.put("ready")
            elif message[0] == "clock":
                out.put("clock", now())
            elif message[0] == "go" and driver is not None:
                out.put("end", _run(driver, message[1], stdin, out))
                return
            elif message[0] == "stop":
                return
    except Exception:
        secret = driver.job.endpoint.key.read() if driver is not None else None
        out.put("bug", hide(traceback.format_exc(), secret))
    finally:
        out.close()


def _run(driver: Driver, origin_s: float, stdin: IO[bytes], out: _Out) -> dict[str, Any]:
    loop = new_loop()
    asyncio.set_event_loop(loop)

    def listen() -> None:  # the only message during a run is stop; its end means the same
        loop.remove_reader(stdin.fileno())
        driver.stop()

    def tell() -> None:
        out.put("progress", progress_of(driver))
        loop.call_later(_PROGRESS_S, tell)

    loop.add_reader(stdin.fileno(), listen)
    loop.call_later(_PROGRESS_S, tell)
    try:
        return loop.run_until_complete(driver.run(origin_s))
    finally:
        out.put("progress", progress_of(driver))
        loop.close()


def progress_of(driver: Driver) -> dict[str, int]:
    """Counts so far."""
    return {"sent": driver.sent, "finished": driver.finished, "failed": driver.failed, "tokens": driver.tokens}


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM):  # the parent says when to stop; its end is the end of our input
        signal.signal(name, signal.SIG_IGN)
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but frames may go down the pipe
    sys.stdout = sys.stderr
    serve(sys.stdin.buffer, stdout)


if __name__ == "__main__":
    main()
