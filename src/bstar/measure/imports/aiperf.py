"""AIPerf's profile_export_aiperf.json, with the requests of profile_export.jsonl where that lies beside it.

Its inter-token latency of a request is bstar's TPOT. Token counts are the server's (usage) where the file has them;
the client's own count stands in for them otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from bstar.errors import ConfigError
from bstar.measure.imports.run import ImportedRun, number, put, records_of

TOOL: Final = "aiperf"
_TIMES: Final = {"time_to_first_token": "ttft_s", "inter_token_latency": "tpot_s", "inter_chunk_latency": "itl_s",
                 "request_latency": "e2e_s"}  # fmt: skip
_COUNTS: Final = {"input_sequence_length": "input_tokens", "output_sequence_length": "output_tokens"}
_RATES: Final = {"request_throughput": "requests_per_s", "output_token_throughput": "output_tokens_per_s",
                 "goodput": "goodput_requests_per_s"}  # fmt: skip
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
_PARTS: Final = {"avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}


def matches(content: Any) -> bool:
    """Whether a file's content is of this tool."""
    return isinstance(content, Mapping) and ("aiperf_version" in content or (
        "request_latency" in content and "input_config" in content))


def read(content: Mapping[str, Any], name: str, folder: Path | None = None) -> list[ImportedRun]:
    """The one run of a file; `folder` may hold its profile_export.jsonl."""
    figures: dict[str, float] = {}
    for key, metric in _TIMES.items():
        found = content.get(key)
        if isinstance(found, Mapping):
            factor = _UNITS.get(str(found.get("unit", "ms")), math.nan)
            for their, part in _PARTS.items():
                put(figures, f"{metric}.{part}", found.get(their), factor)
    for key, metric in _COUNTS.items():
        put(figures, f"{metric}.mean", (content.get(key) or {}).get("avg"))
    for key, metric in _RATES.items():
        put(figures, metric, (content.get(key) or {}).get("avg"))
    phases = [p for p in _phases(content) if p.get("kind", "profiling") == "profiling"]
    load = phases[0] if phases else (content.get("input_config") or {}).get("loadgen") or {}
    rate, cap = number(load.get("rate", load.get("request_rate"))), number(load.get("concurrency"))
    records, gaps, failed, notes = _requests(folder)
    if not failed:
        failed = int(sum(number(e.get("count")) or 0 for e in content.get("error_summary") or ()
                         if isinstance(e, Mapping)))
    return [ImportedRun(
        tool=TOOL, name=name, model=_model(content),
        date=str(content.get("start_time") or ""), concurrency=None if math.isnan(cap) else int(cap),
        rate_per_s=None if math.isnan(rate) else rate, burstiness=None if math.isnan(rate) else _burst(load),
        figures=figures, records=records, gaps_s=gaps, failed=failed, notes=notes,
    )]  # fmt: skip


def _model(content: Mapping[str, Any]) -> str:
    found = (content.get("input_config") or {}).get("models")
    items = found.get("items") if isinstance(found, Mapping) else found
    first = items[0] if isinstance(items, list) and items else None
    return str(first.get("name") or "") if isinstance(first, Mapping) else str(first or "")


def _phases(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = (content.get("input_config") or {}).get("phases") or ()
    return [p for p in found if isinstance(p, Mapping)]


def _burst(load: Mapping[str, Any]) -> float:
    mode = str(load.get("type") or load.get("request_rate_mode") or "")
    return math.inf if "constant" in mode else number(load.get("arrival_smoothness", 1.0))


def _requests(folder: Path | None) -> tuple[Any, list[float], int, tuple[str, ...]]:
    path = folder / "profile_export.jsonl" if folder is not None else None
    if path is None or not path.is_file():
        return None, [], 0, ("no requests beside the file: profile_export.jsonl keeps them",)
    rows, gaps, failed, counted = [], [], 0, True
    for line in _lines(path):
        meta, metrics = line.get("metadata") or {}, line.get("metrics") or {}
        if meta.get("benchmark_phase", "profiling") != "profiling":
            continue
        start = number(meta.get("request_start_ns")) * 1e-9
        if line.get("error") or meta.get("was_cancelled"):
            failed += 1
            rows.append((start, math.nan, math.nan, 0, 0))
            continue
        usage = _value(metrics, "usage_completion_tokens")
        counted = counted and not math.isnan(usage)
        output = usage if not math.isnan(usage) else _value(metrics, "output_sequence_length")
        prompt = _value(metrics, "usage_prompt_tokens")
        prompt = prompt if not math.isnan(prompt) else _value(metrics, "input_sequence_length")
        rows.append((start, start + _value(metrics, "time_to_first_token"),
                     start + _value(metrics, "request_latency"), int(prompt), int(output)))
        found = metrics.get("inter_chunk_latency") or {}
        factor = _UNITS.get(str(found.get("unit", "ms")), math.nan)
        gaps += [g * factor for g in found.get("value") or ()]
    notes = () if counted else ("output tokens counted by the client's tokenizer",)
    return records_of(rows, path.name), gaps, failed, notes


def _lines(path: Path) -> Iterable[Mapping[str, Any]]:
    for n, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text.strip():
            try:
                yield json.loads(text)
            except ValueError:
                raise ConfigError(f"{path}: line {n} is not JSON; write the file again with AIPerf") from None


def _value(metrics: Mapping[str, Any], key: str) -> float:
    """In seconds where it is a time."""
    found = metrics.get(key) or {}
    return number(found.get("value")) * _UNITS.get(str(found.get("unit", "")), 1.0)
