"""Signs of life on stderr of a command that takes long: a count in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

import click

from bstar.interfaces.cli import output

_FIRST_S: Final = 10.0
_EVERY_S: Final = 60.0
_STEP: Final = 16


@contextmanager
def heartbeat(
    what: str, *, first_s: float = _FIRST_S, every_s: float = _EVERY_S
) -> Iterator[Callable[[int, int], None]]:
    """A function to be called with (done, of how many).

    Nothing is said of what takes less than `first_s`, but for the count in a terminal. Work of which nothing is done
    by then is told to be compiling: what else comes before the first of many small pieces takes no time.
    """
    terminal = sys.stderr.isatty()
    done, total = [0], [0]
    ended, begun = Event(), time.monotonic()

    def report(now: int, of: int) -> None:
        done[0], total[0] = now, of
        if terminal and (now % _STEP == 0 or now == of):
            click.echo(f"\r{now:,} of {of:,} {what} ", nl=False, err=True)

    def speak() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            if not done[0]:
                click.echo("note: compiling the simulator, once on this machine for each release (minutes)", err=True)
            elif not terminal:
                passed_s = time.monotonic() - begun
                click.echo(f"note: {done[0]:,} of {total[0]:,} {what} after {passed_s:.0f} s", err=True)
            wait_s = every_s

    Thread(target=speak, daemon=True).start()
    try:
        yield report
    finally:
        ended.set()
        if terminal:
            click.echo("\r" + " " * 40 + "\r", nl=False, err=True)


@contextmanager
def compiling_told() -> Iterator[None]:
    """Compiling is told, once, as soon as it begins."""
    from bstar.sim.compiling import on_compile

    with on_compile(lambda: output.warn("compiling the simulator, once on this machine for each release (a minute)")):
        yield
