"""A run as files: requests as Parquet, CSV or JSON lines, and the steps and requests as a Chrome trace.

A Chrome trace opens in ui.perfetto.dev or chrome://tracing: one track of steps per engine with counters beside it,
and one slice per request from queue to last token.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bstar.errors import ConfigError, SpecError
from bstar.files import check_writable, whole_file
from bstar.sim.result import SimResult

REQUEST_FORMATS: Final = (".parquet", ".csv", ".jsonl", ".json")
_COLUMNS: Final = (
    "arrival_s", "scheduled_s", "first_token_s", "finish_s", "input_tokens", "output_tokens", "ttft_s", "tpot_s",
    "e2e_s", "num_preemptions", "cached_tokens", "replica", "rejected", "measured",
)  # fmt: skip
_MICROSECONDS: Final = 1e6


def request_columns(result: SimResult) -> dict[str, np.ndarray[Any, Any]]:
    """One array per column, a row per request; seconds that do not exist are nan.

    Of an interrupted run only requests that were sent.
    """
    columns = {name: np.asarray(getattr(result, name)) for name in _COLUMNS}
    if not result.interrupted:
        return columns
    sent = ~np.isnan(result.arrival_s)
    return {name: column[sent] for name, column in columns.items()}


def check_request_path(path: Path) -> None:
    """Raises SpecError where requests cannot be written to `path`, before a run is spent on it."""
    if path.suffix.lower() not in REQUEST_FORMATS:
        raise SpecError(f"requests file: {path.name!r} must end with one of {', '.join(REQUEST_FORMATS)}")
    if path.suffix.lower() == ".parquet":
        _pyarrow()
    check_writable(path, what="requests file")


def check_trace_path(path: Path) -> None:
    """Raises SpecError or ConfigError where a trace cannot be written to `path`: a .json file, a pipe or a device."""
    if path.suffix.lower() != ".json" and not (path.exists() and not path.is_file()):
        raise SpecError(f"trace file: {path.name!r} must end with .json")
    check_writable(path, what="trace file")


def write_requests(result: SimResult, path: Path) -> None:
    """Write the requests of a run; the suffix decides the format."""
    check_request_path(path)
    columns = request_columns(result)
    try:
        with whole_file(path) as place:
            _write_columns(columns, place, path.suffix.lower())
    except OSError as error:
        raise ConfigError(f"requests file: {path}: {error.strerror or error}") from None


def _write_columns(columns: dict[str, np.ndarray[Any, Any]], path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pyarrow = _pyarrow()
        from pyarrow import parquet

        table = pyarrow.table({
            name: pyarrow.array(c, mask=np.isnan(c) if c.dtype.kind == "f" else None) for name, c in columns.items()
        })  # fmt: skip
        parquet.write_table(table, path)
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(_rows(columns, missing=""))
    elif suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in _rows(columns, missing=None):
                file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
    else:  # row by row, so that an interrupt is heard
        with path.open("w", encoding="utf-8") as file:
            for number, row in enumerate(_rows(columns, missing=None)):
                file.write((", " if number else "[") + json.dumps(dict(zip(columns, row, strict=True))))
            file.write("]" if len(columns["arrival_s"]) else "[]")


def write_trace(result: SimResult, path: Path) -> None:
    """Write the run as a Chrome trace (JSON), in simulated time from the first request."""
    try:
        with whole_file(path) as place, place.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            first = True
            for event in trace_events(result):
                file.write(("" if first else ",\n") + json.dumps(event, separators=(",", ":")))
                first = False
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"trace file: {path}: {error.strerror or error}") from None


def trace_events(result: SimResult) -> Iterator[dict[str, Any]]:
    """The events of the Chrome trace format: metadata, steps, counters, requests. Times in µs."""
    origin = result.span_s[0]
    log = result.steps
    for replica in range(log.replicas):
        yield _named("process_name", replica + 1, 0, f"engine {replica}")
        yield _named("thread_name", replica + 1, 0, "steps")
    yield _named("process_name", 0, 0, "requests")
    starts, ends = _us(log.start_s, origin), _us(log.end_s, origin)
    counts = (log.steps, log.made, log.sequences, log.running, log.waiting, log.used_blocks, log.prompt_tokens,
              log.preempted, log.replica)
    for i, (m, made, sequences, running, waiting, used, prompt, lost, replica) in enumerate(
        zip(*(c.tolist() for c in counts), strict=True)
    ):
        name = f"{m} decode steps" if m > 1 else ("step with prompts" if prompt else "decode step")
        span = max(ends[i] - starts[i], 0.001)
        yield {
            "name": name, "cat": "step", "ph": "X", "ts": starts[i], "dur": span, "pid": replica + 1, "tid": 0,
            "args": {"steps": m, "step_ms": span / m / 1000.0, "sequences": sequences, "prompt_tokens": prompt,
                     "tokens_made": made, "preempted": lost},
        }  # fmt: skip
        yield {"name": "requests", "ph": "C", "ts": starts[i], "pid": replica + 1,
               "args": {"running": running, "waiting": waiting}}
        yield {"name": "KV blocks", "ph": "C", "ts": starts[i], "pid": replica + 1, "args": {"used": used}}
    yield from _request_events(result, origin)


def _request_events(result: SimResult, origin: float) -> Iterator[dict[str, Any]]:
    """Queue, prefill and decode of each request, nested in one slice; async events, so that they may overlap."""
    end = result.span_s[1]
    moments = [_us(np.where(np.isnan(x), end, x), origin) for x in
               (result.arrival_s, result.scheduled_s, result.first_token_s, result.finish_s)]
    for r in range(len(result)):
        if np.isnan(result.arrival_s[r]) or result.rejected[r]:
            continue
        sent, placed, first, last = (m[r] for m in moments)
        details = {
            "input_tokens": int(result.input_tokens[r]), "output_tokens": int(result.output_tokens[r]),
            "cached_tokens": int(result.cached_tokens[r]), "preemptions": int(result.num_preemptions[r]),
            "replica": int(result.replica[r]),
        }  # fmt: skip
        whole = {"cat": "request", "id": r, "pid": 0, "tid": 0}
        yield {"name": f"request {r}", "ph": "b", "ts": sent, "args": details, **whole}
        for name, begin, finish in (("queue", sent, placed), ("prefill", placed, first), ("decode", first, last)):
            if finish > begin:
                yield {"name": name, "ph": "b", "ts": begin, **whole}
                yield {"name": name, "ph": "e", "ts": finish, **whole}
        yield {"name": f"request {r}", "ph": "e", "ts": last, **whole}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: np.ndarray[Any, Any], origin: float) -> list[float]:
    out: list[float] = np.round((seconds - origin) * _MICROSECONDS, 3).tolist()
    return out


def _rows(columns: dict[str, np.ndarray[Any, Any]], *, missing: object) -> Iterator[list[Any]]:
    """Rows of plain Python values, nan as `missing`."""
    plain = [[missing if v != v else v for v in c.tolist()] for c in columns.values()]
    for row in zip(*plain, strict=True):
        yield list(row)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise SpecError("requests file: Parquet needs pyarrow; pip install 'bstar[parquet]', or write .csv or .jsonl"
                        ) from None
    return pyarrow


