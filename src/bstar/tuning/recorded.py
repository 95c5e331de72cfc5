"""The evidence of a run of `bstar bench`: its scrapes, its GPU samples, and what its client says of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstar.catalog.served import served_in
from bstar.errors import ConfigError
from bstar.measure.server.histogram import Histogram
from bstar.measure.server.snapshot import Window
from bstar.measure.telemetry.table import FIELDS, GpuSample, Telemetry
from bstar.tuning.evidence import Evidence, block_tokens, total_tokens

if TYPE_CHECKING:
    from bstar.measure.folder import RecordedRun
    from bstar.measure.result import BenchRun
    from bstar.measure.tables import RequestTable

_FEWEST_SCRAPES = 2


def evidence_in(
    folder: Path, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
) -> Evidence:
    """The evidence of a run's folder. Raises ConfigError where it is none, or where the server was not scraped."""
    from bstar.measure.folder import read_run, runs_in

    runs = runs_in(folder)
    if runs != [folder]:
        raise ConfigError(f"run: {str(folder)!r} holds {len(runs)} runs; name one of them ("
                          f"{', '.join(one.name for one in runs[:6])})")
    run = read_run(folder)
    found = evidence_of_recorded(run)
    if found is None:
        raise ConfigError(f"run: {str(folder)!r} has too few scrapes of the server's metrics for a diagnosis; measure "
                          "longer, or give bstar bench --metrics URL")
    return _told(found, max_num_seqs, max_num_batched_tokens)


def evidence_of_recorded(run: RecordedRun) -> Evidence | None:
    """The evidence of a run that was read; None where the server was not, or hardly, scraped."""
    from bstar.measure.folder import read_table

    tables = {name: read_table(run.path / f"{name}.parquet") for name in ("server", "gpu")
              if (run.path / f"{name}.parquet").is_file()}
    limits = (run.summary.get("health") or {}).get("limited") or ()
    return _evidence(run.summary, tables, limits, load_of(run.table), served_in(run.environment))


def evidence_of_run(run: BenchRun) -> Evidence | None:
    """The evidence of a run that has just ended; None where the server was not, or hardly, scraped."""
    summary = {o.name: o.summary for o in run.observations}
    tables = {name: table for o in run.observations for name, table in o.tables.items()}
    return _evidence(summary, tables, run.health.limited, load_of(run.table))


def load_of(table: RequestTable) -> tuple[float, float] | None:
    """(first request sent, last answer ended), seconds of the load; None where nothing was sent."""
    ends = np.asarray(table.end_s, dtype=np.float64)
    ends = ends[~np.isnan(ends)]
    return (float(np.min(table.sent_s)), float(ends.max())) if len(table.sent_s) and ends.size else None


def _told(seen: Evidence, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> Evidence:
    from dataclasses import replace

    return replace(seen, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def _evidence(
    summary: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], limits: Any,
    load: tuple[float, float] | None = None, served: tuple[str, ...] = (),
) -> Evidence | None:  # fmt: skip
    """`load`: when it began and ended. The first scrape comes before it and the last one after: gauges of those are
    none of the load, and it is shorter than what lies between them. What lies around a restart was not counted.
    """
    server, series = summary.get("server") or {}, tables.get("server") or {}
    if len(series.get("time_s", ())) < _FEWEST_SCRAPES or not server.get("duration_s"):
        return None
    counters = {name: float(value) for name, value in (server.get("counters") or {}).items() if value is not None}
    if server.get("steps") is not None:
        counters.setdefault("steps", float(server["steps"]))
    config = dict(server.get("config") or {})
    times = np.asarray(series["time_s"], dtype=np.float64)
    start, end = (times[0], times[-1]) if load is None else (max(load[0], times[0]), min(load[1], times[-1]))
    inside = (times >= start) & (times <= end)
    duration_s = max(float(end - start), 0.0) - _uncounted_s(server, float(start), float(end))
    restarted, engines = bool(server.get("restarted")), int(server.get("engines") or 1)
    return Evidence(
        engine=str(server.get("engine") or ""), duration_s=duration_s,
        running=_gauge(series, "running", inside), waiting=_gauge(series, "waiting", inside),
        kv_usage=_gauge(series, "kv_usage_fraction", inside), block_tokens=block_tokens(config),
        whole=load is not None and bool(times[0] <= load[0] and load[1] <= times[-1]),
        seen=Window(duration_s=duration_s, engine=str(server.get("engine") or ""), restarted=restarted,
                    counters=counters, histograms=_histograms(server)),
        engines=engines, served=served or tuple(map(str, server.get("served") or ())),
        kv_total_tokens=total_tokens(config) * engines,
        telemetry=_telemetry(summary.get("gpu") or {}, tables.get("gpu") or {}, load),
        client_limits=tuple(map(str, limits)), config=config,
    )  # fmt: skip


def _uncounted_s(server: Mapping[str, Any], start: float, end: float) -> float:
    """Seconds of the load between the scrapes around each restart."""
    return sum(max(min(float(after), end) - max(float(before), start), 0.0)
               for before, after in server.get("restarts_s") or ())


def _gauge(
    series: Mapping[str, Any], name: str, inside: np.ndarray[Any, np.dtype[np.bool_]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    if name not in series:
        return np.zeros(0)
    values: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(series[name], dtype=np.float64)[inside]
    known: np.ndarray[Any, np.dtype[np.float64]] = values[~np.isnan(values)]
    return known


def _histograms(server: Mapping[str, Any]) -> dict[str, Histogram]:
    """Counts and means: all that a summary keeps of a histogram's buckets and that a diagnosis needs."""
    return {name: Histogram(bounds=(math.inf,), counts=(float(h["count"]),), total=float(h["count"]) * float(h["mean"]))
            for name, h in (server.get("histograms") or {}).items() if h.get("mean") is not None}


def _telemetry(
    summary: Mapping[str, Any], table: Mapping[str, Any], load: tuple[float, float] | None
) -> Telemetry | None:
    times = table.get("time_s")
    if times is None or not len(times):
        return None
    columns = {name: table[name] for name in FIELDS if name in table}
    samples = tuple(
        GpuSample(time_s=float(time), gpu=int(gpu),
                  values={name: float(column[i]) for name, column in columns.items() if not np.isnan(column[i])})
        for i, (time, gpu) in enumerate(zip(times, table["gpu"], strict=True)))
    found = Telemetry(source=str(summary.get("source") or ""), samples=samples)
    inside = found if load is None else found.between(*load)
    return inside if inside.samples else found
