"""Real servers: a load generator with honest clocks, its runs as folders, searches over the load.

    server = prepare(parse_endpoint("http://127.0.0.1:8000"))
    run = bench(server, bstar.traffic.poisson(rate_per_s=4, input_tokens=512, output_tokens=128, num_requests=200))
    run.summary.ttft_s.p99

Needs the extra `bench` (httptools, uvloop, pyarrow). Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bstar.measure.contents import Given
    from bstar.measure.endpoint import Endpoint, Timeouts, parse_endpoint
    from bstar.measure.folder import RecordedRun, read_run, recover
    from bstar.measure.observers import CounterReader, Counters, Observation, Observer
    from bstar.measure.payloads import BodyOptions
    from bstar.measure.probe import ServerError, ServerFacts
    from bstar.measure.repeats import Precision, Repeated, repeat
    from bstar.measure.result import BenchRun, Window
    from bstar.measure.run import Prepared, RunOptions, bench, prepare
    from bstar.measure.sweeps import Point, SweepPlan, SweepResult, parse_sweep, sweep

_NAMES = {
    "BenchRun": "result", "BodyOptions": "payloads", "CounterReader": "observers", "Counters": "observers",
    "Endpoint": "endpoint", "Given": "contents", "Observation": "observers", "Observer": "observers",
    "Point": "sweeps", "Precision": "repeats", "Prepared": "run", "RecordedRun": "folder", "Repeated": "repeats",
    "RunOptions": "run", "ServerError": "probe", "ServerFacts": "probe", "SweepPlan": "sweeps",
    "SweepResult": "sweeps", "Timeouts": "endpoint", "Window": "result", "bench": "run", "parse_endpoint": "endpoint",
    "parse_sweep": "sweeps", "prepare": "run", "read_run": "folder", "recover": "folder", "repeat": "repeats",
    "sweep": "sweeps",
}  # fmt: skip

__all__ = [
    "BenchRun",
    "BodyOptions",
    "CounterReader",
    "Counters",
    "Endpoint",
    "Given",
    "Observation",
    "Observer",
    "Point",
    "Precision",
    "Prepared",
    "RecordedRun",
    "Repeated",
    "RunOptions",
    "ServerError",
    "ServerFacts",
    "SweepPlan",
    "SweepResult",
    "Timeouts",
    "Window",
    "bench",
    "parse_endpoint",
    "parse_sweep",
    "prepare",
    "read_run",
    "recover",
    "repeat",
    "sweep",
]


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'bstar.measure' has no attribute {name!r}")
    value = getattr(import_module(f"bstar.measure.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
