"""The workers of a run, on one clock: processes on this machine, this process itself, or Ray actors elsewhere."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bstar.errors import ConfigError
from bstar.measure.clock import ClockOffset, measure_offset, now
from bstar.measure.driver import Driver
from bstar.measure.job import Job
from bstar.measure.worker import Message, new_loop, progress_of, read_frame, write_frame

Floats = NDArray[np.float64]
Inbox = queue.Queue[tuple[int, Message]]

# From the last handshake to time 0 of the load.
_LEAD_S = 0.25
_STOP_S, _POLL_S = 10.0, 0.25


class Worker(Protocol):
    """A process that sends a job; its messages go to the inbox under its number."""

    def prepare(self, job: Job) -> None: ...
    def clock(self) -> float: ...
    def go(self, origin_s: float, inbox: Inbox) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class FleetReport:
    """What the workers saw.

    origin_s       time 0 of the load, on our monotonic clock
    offsets        of each worker's clock
    lags_s, cpus   of each worker that ended
    lost           workers that died
    refused_in_a_row   connections that were refused one after another until the clients of a closed loop gave up
    stop_asked     Ctrl-C came after the last answer
    """

    origin_s: float
    offsets: list[ClockOffset]
    lags_s: list[Floats] = field(default_factory=list)
    cpus: list[Floats] = field(default_factory=list)
    opened: int = 0
    lost: list[int] = field(default_factory=list)
    interrupted: bool = False
    refused_in_a_row: int = 0
    stop_asked: bool = False


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counts of all workers together."""

    total: int
    elapsed_s: float = 0.0
    sent: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0


class ProcessWorker:
    """A process on this machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bstar.measure.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C of a terminal is for the parent, also while the worker still starts
        )  # fmt: skip

    def prepare(self, job: Job) -> None:
        self._send("job", job)
        self._expect("ready")

    def clock(self) -> float:
        self._send("clock")
        return float(self._expect("clock")[1])

    def go(self, origin_s: float, inbox: Inbox) -> None:
        self._send("go", origin_s)
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._send("stop")

    def kill(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None and pipe is not self._process.stdout:
                    pipe.close()
        if self._process.poll() is None:
            try:
                self._process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdout.close()

    def _send(self, *message: Any) -> None:
        assert self._process.stdin is not None
        write_frame(self._process.stdin, message)

    def _expect(self, name: str) -> Message:
        assert self._process.stdout is not None
        found = read_frame(self._process.stdout)
        if found is not None and found[0] == "bug":
            raise RuntimeError(f"a worker failed:\n{found[1]}")
        if found is None or found[0] != name:
            raise ConfigError(f"workers: process {self.number} ended before the run ({found and found[0]})")
        return found

    def _listen(self, inbox: Inbox) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while (message := read_frame(self._process.stdout)) is not None:
                inbox.put((self.number, message))
                if message[0] in ("end", "bug"):
                    return
        inbox.put((self.number, ("lost",)))


def run_jobs(
    jobs: Sequence[Job], on_rows: Callable[[int, list[tuple[Any, ...]]], None], *,
    on_progress: Callable[[Progress], None] | None = None, make: Callable[[int], Worker] = ProcessWorker,
    on_start: Callable[[float, list[ClockOffset]], None] | None = None, total: int = 0,
) -> FleetReport:  # fmt: skip
    """Run every job in a worker of its own; rows go to `on_rows(worker, rows)` while the run goes on.

    on_start   called with time 0 of the load and the workers' clocks, just before it
    A first Ctrl-C stops the workers and keeps what they have; a second one leaves them.
    """
    workers: list[Worker] = []
    report: FleetReport | None = None
    try:
        for job in jobs:  # one by one: those that started are ended below
            workers.append(make(job.worker))  # noqa: PERF401
        for worker, job in zip(workers, jobs, strict=True):
            worker.prepare(job)
        offsets = [measure_offset(worker.clock) for worker in workers]
        origin = now() + _LEAD_S
        report = FleetReport(origin_s=origin, offsets=offsets)
        if on_start is not None:
            on_start(origin, offsets)
        inbox: Inbox = queue.Queue()
        for worker, offset in zip(workers, offsets, strict=True):
            worker.go(offset.theirs(origin), inbox)
        _gather(workers, inbox, report, on_rows, on_progress, Progress(total=total))
        return report
    finally:
        with uninterrupted() as pressed:
            for worker in workers:
                worker.kill()
        if report is not None:
            report.stop_asked = bool(pressed)


@contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Ctrl-C does not end the block and lose what it keeps. The signals that came are in the list, for who goes on."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    # SIGTERM too where it is taken for Ctrl-C.
    names = [n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))]
    handlers = {name: signal.signal(name, lambda number, _: pressed.append(number)) for name in names}
    try:
        yield pressed
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)


def _gather(
    workers: Sequence[Worker], inbox: Inbox, report: FleetReport, on_rows: Callable[[int, list[tuple[Any, ...]]], None],
    on_progress: Callable[[Progress], None] | None, progress: Progress,
) -> None:  # fmt: skip
    """Take messages until every worker has ended."""
    live = set(range(len(workers)))
    counts: dict[int, dict[str, int]] = {}
    leave_s = float("inf")
    while live and now() < leave_s:
        try:
            with contextlib.suppress(queue.Empty):
                number, message = inbox.get(timeout=_POLL_S)
                _take(number, message, live, counts, report, on_rows)
            if on_progress is not None:
                progress.elapsed_s = now() - report.origin_s
                for name in ("sent", "finished", "failed", "tokens"):
                    setattr(progress, name, sum(c.get(name, 0) for c in counts.values()))
                on_progress(progress)
        except KeyboardInterrupt:
            if report.interrupted:
                break
            report.interrupted = True
            leave_s = now() + _STOP_S
            for number in live:
                workers[number].stop()
    report.lost += sorted(live)


def _take(
    number: int, message: Message, live: set[int], counts: dict[int, dict[str, int]], report: FleetReport,
    on_rows: Callable[[int, list[tuple[Any, ...]]], None],
) -> None:  # fmt: skip
    kind = message[0]
    if kind == "rows":
        on_rows(number, message[1])
    elif kind == "progress":
        counts[number] = message[1]
    elif kind == "end":
        live.discard(number)
        note_end(report, message[1])
    elif kind == "lost":
        live.discard(number)
        report.lost.append(number)
    elif kind == "bug":
        live.discard(number)
        raise RuntimeError(f"a worker failed:\n{message[1]}")


def note_end(report: FleetReport, seen: dict[str, Any]) -> None:
    """Enter what a worker saw of itself."""
    report.lags_s.append(np.asarray(seen["lag_s"], dtype=float))
    report.cpus.append(np.asarray(seen["cpu_fraction"], dtype=float))
    report.opened += int(seen["opened"])
    report.refused_in_a_row += int(seen["refused_in_a_row"])


def run_here(
    job: Job, on_rows: Callable[[int, list[tuple[Any, ...]]], None], *,
    on_progress: Callable[[Progress], None] | None = None,
    on_start: Callable[[float, list[ClockOffset]], None] | None = None, total: int = 0, lead_s: float = 0.02,
) -> FleetReport:  # fmt: skip
    """Run one job in this process (tests, notebooks): no second process, but whatever else runs here is in its way."""
    driver = Driver(job, lambda rows: on_rows(job.worker, rows))
    driver.prepare()
    origin = now() + lead_s
    report = FleetReport(origin_s=origin, offsets=[ClockOffset()])
    if on_start is not None:
        on_start(origin, report.offsets)
    loop = new_loop()

    def interrupted() -> None:
        report.interrupted = True
        driver.stop()

    def tell() -> None:
        assert on_progress is not None
        on_progress(Progress(total=total, elapsed_s=now() - origin, **progress_of(driver)))
        loop.call_later(_POLL_S, tell)

    main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        if main_thread:
            loop.add_signal_handler(signal.SIGINT, interrupted)
        if on_progress is not None:
            loop.call_later(_POLL_S, tell)
        note_end(report, loop.run_until_complete(driver.run(origin)))
    finally:
        if main_thread:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, handler)
        loop.close()
    return report
