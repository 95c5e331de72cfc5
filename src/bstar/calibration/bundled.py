"""The measured points that ship with the package (`data/SOURCES.md` says from where)."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files

from bstar.calibration.point import Point
from bstar.calibration.points import read_rows

SERVING = "measured_serving_points"
LATENCY = "measured_latency_points"
PEER = "peer_predictions"


def bundled_text(name: str) -> str:
    """A bundled table as CSV text."""
    return gzip.decompress((files("bstar.calibration") / "data" / f"{name}.csv.gz").read_bytes()).decode("utf-8")


@cache
def bundled_points(name: str) -> tuple[Point, ...]:
    """The points of SERVING or of LATENCY."""
    return tuple(read_rows(bundled_text(name), source=f"bundled {name}"))


def all_bundled_points() -> list[Point]:
    """Serving points, then latency points."""
    return [*bundled_points(SERVING), *bundled_points(LATENCY)]
