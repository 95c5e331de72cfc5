"""When numba compiles: the first time that a machine runs a path of the simulator; later its cache has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_EVENT = "numba:compile"


@contextmanager
def on_compile(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` whenever numba begins to compile a function that no cache has (in whatever thread)."""
    from numba.core import event

    class Told(event.Listener):
        def on_start(self, event: Any) -> None:
            tell()

        def on_end(self, event: Any) -> None:
            pass

    listener = Told()
    event.register(_EVENT, listener)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        event.unregister(_EVENT, listener)  # type: ignore[no-untyped-call]
