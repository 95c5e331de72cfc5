"""Who else watches a run of `bstar bench`: the server's counters, the GPU's telemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bstar.measure.observers import CounterReader, Observer
    from bstar.measure.run import Prepared


def watchers(server: Prepared) -> tuple[tuple[Observer, ...], CounterReader | None]:
    """(observers, reader of the counters that a run is checked by) for a server."""
    return (), None
