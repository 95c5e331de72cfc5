"""GuideLLM's JSON report: one run for each benchmark (load) of it.

Its "time per output token" is E2E / output tokens; bstar's TPOT is its "inter token latency", the mean gap of a
request. Requests carry moments, so with them everything is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from bstar.measure.imports.run import ImportedRun, number, put, records_of

TOOL: Final = "guidellm"
_MILLISECONDS: Final = {"time_to_first_token_ms": "ttft_s", "inter_token_latency_ms": "tpot_s"}
_RATES: Final = {"requests_per_second": "requests_per_s", "output_tokens_per_second": "output_tokens_per_s"}
_PARTS: Final = {"p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}


def matches(content: Any) -> bool:
    """Whether a file's content is of this tool."""
    if not isinstance(content, Mapping) or not isinstance(content.get("benchmarks"), list):
        return False
    return all(isinstance(b, Mapping) and "metrics" in b and "requests" in b for b in content["benchmarks"])


def read(content: Mapping[str, Any], name: str) -> list[ImportedRun]:
    """A run for each benchmark of the report."""
    model = ""
    backend = (content.get("config") or content.get("args") or {}).get("backend")
    if isinstance(backend, Mapping):
        model = str(backend.get("model") or "")
    return [_run(one, f"{name}#{i}", model) for i, one in enumerate(content["benchmarks"], 1)]


def _run(one: Mapping[str, Any], name: str, model: str) -> ImportedRun:
    figures: dict[str, float] = {}
    metrics = one["metrics"]
    for key, metric in _MILLISECONDS.items():
        _statistics(figures, metric, metrics.get(key), 1e-3)
    _statistics(figures, "e2e_s", metrics.get("request_latency"), 1.0)
    _statistics(figures, "input_tokens", metrics.get("prompt_token_count"), 1.0)
    _statistics(figures, "output_tokens", metrics.get("output_token_count"), 1.0)
    for key, name_of in _RATES.items():
        put(figures, name_of, ((metrics.get(key) or {}).get("successful") or {}).get("mean"))
    strategy = _strategy(one)
    rows, failed, dropped = _requests(one["requests"])
    totals = metrics.get("request_totals") or {}
    sampled = bool(rows) and len(rows) < number(totals.get("successful"))
    notes: tuple[str, ...] = ("requests of a sample only",) if sampled else ()
    notes += (f"{dropped} requests without moments",) if dropped else ()
    streams = number(strategy.get("streams"))
    rate = number(strategy.get("rate"))
    kind = str(strategy.get("type_") or strategy.get("kind") or "")
    return ImportedRun(
        tool=TOOL, name=name, model=model, concurrency=1 if kind == "synchronous" else _whole(streams),
        rate_per_s=None if math.isnan(rate) else rate,
        burstiness=None if math.isnan(rate) else (math.inf if kind == "constant" else 1.0),
        figures=figures, records=None if notes else records_of(rows, name), failed=failed, notes=notes,
    )  # fmt: skip


def _strategy(one: Mapping[str, Any]) -> Mapping[str, Any]:
    for place in (one.get("config"), one.get("args"), one.get("scheduler")):
        if isinstance(place, Mapping) and isinstance(place.get("strategy"), Mapping):
            found: Mapping[str, Any] = place["strategy"]
            return found
    return {}


def _statistics(figures: dict[str, float], metric: str, table: Any, factor: float) -> None:
    found = table.get("successful") if isinstance(table, Mapping) else None
    if not isinstance(found, Mapping) or not found.get("count"):
        return
    put(figures, f"{metric}.mean", found.get("mean"), factor)
    for key, part in _PARTS.items():
        put(figures, f"{metric}.{part}", (found.get("percentiles") or {}).get(key), factor)


def _requests(groups: Mapping[str, Any]) -> tuple[list[tuple[float, float, float, int, int]], int, int]:
    rows, dropped = [], 0
    for one in groups.get("successful") or ():
        times = ((one.get("info") or {}).get("timings")) or {}
        start, first = number(times.get("request_start")), number(times.get("first_token_iteration"))
        first = number(times.get("first_iteration")) if math.isnan(first) else first
        last = number(times.get("last_token_iteration"))
        last = number(times.get("last_iteration")) if math.isnan(last) else last
        prompt, output = _tokens(one, "input_metrics"), _tokens(one, "output_metrics")
        if any(map(math.isnan, (start, first, last, prompt, output))):
            dropped += 1
            continue
        rows.append((start, first, last, int(prompt), int(output)))
    return rows, len(groups.get("errored") or ()), dropped


def _tokens(one: Mapping[str, Any], side: str) -> float:
    found = one.get(side) or {}
    for key in ("text_tokens", "total_tokens"):
        value = number(found.get(key))
        if not math.isnan(value):
            return value
    return math.nan


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
