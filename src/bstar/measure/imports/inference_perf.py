"""inference-perf's stage_N_ and summary_lifecycle_metrics.json, and per_request_lifecycle_metrics.json.

Written from its documented report format. Its TPOT, (last − first token) / (output tokens − 1), is bstar's; times
are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from bstar.measure.imports.run import ImportedRun, number, put, records_of

TOOL: Final = "inference-perf"
_TIMES: Final = {"time_to_first_token": "ttft_s", "time_per_output_token": "tpot_s", "inter_token_latency": "itl_s",
                 "request_latency": "e2e_s"}  # fmt: skip
_PARTS: Final = {"mean": "mean", "median": "p50", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}


def matches(content: Any) -> bool:
    """Whether a file's content is of this tool."""
    if isinstance(content, list):
        return bool(content) and all(isinstance(r, Mapping) and {"start_time", "end_time", "info"} <= set(r)
                                     for r in content)  # fmt: skip
    return isinstance(content, Mapping) and {"load_summary", "successes"} <= set(content)


def read(content: Any, name: str) -> list[ImportedRun]:
    """The one run of a file."""
    if isinstance(content, list):
        return [_of_requests(content, name)]
    successes, load = content["successes"] or {}, content["load_summary"] or {}
    latency, throughput = successes.get("latency") or {}, successes.get("throughput") or {}
    figures: dict[str, float] = {}
    for key, metric in _TIMES.items():
        table = latency.get(key) or {}
        for their, part in _PARTS.items():
            put(figures, f"{metric}.{part}", table.get(their, (table.get("percentiles") or {}).get(their)))
    put(figures, "requests_per_s", throughput.get("requests_per_sec"))
    put(figures, "output_tokens_per_s", throughput.get("output_tokens_per_sec"))
    for key, metric in (("prompt_len", "input_tokens.mean"), ("output_len", "output_tokens.mean")):
        put(figures, metric, (successes.get(key) or {}).get("mean"))
    rate, cap = number(load.get("requested_rate")), number(load.get("concurrency"))
    return [ImportedRun(
        tool=TOOL, name=name, concurrency=None if math.isnan(cap) else int(cap),
        rate_per_s=None if math.isnan(rate) or not math.isnan(cap) else rate, burstiness=None, figures=figures,
        failed=int(number((content.get("failures") or {}).get("count", 0)) or 0),
        notes=("no requests in the file: per_request_lifecycle_metrics.json keeps them",),
    )]  # fmt: skip


def _of_requests(requests: Sequence[Mapping[str, Any]], name: str) -> ImportedRun:
    rows: list[tuple[float, float, float, int, int]] = []
    gaps: list[float] = []
    failed, untimed = 0, 0
    for one in requests:
        info = one.get("info") or {}
        answer = info.get("response_metrics") or info
        times = [number(t) for t in answer.get("output_token_times") or ()]
        start = number(one.get("start_time"))
        prompt = _first(info.get("input_tokens"), ((info.get("request_metrics") or {}).get("text") or {})
                        .get("input_tokens"))
        output = number(answer.get("output_tokens"))
        if one.get("error") or not output > 0:
            failed += 1
            rows.append((start, math.nan, math.nan, int(prompt), 0))
            continue
        untimed += not times
        first, last = (times[0], times[-1]) if times else (math.nan, number(one.get("end_time")))
        rows.append((start, first, last, int(prompt), int(output)))
        gaps += [b - a for a, b in pairwise(times)]
    notes = (f"{untimed} requests without the times of their tokens (not streamed)",) if untimed else ()
    return ImportedRun(tool=TOOL, name=name, records=records_of(rows, name), gaps_s=gaps, failed=failed, notes=notes)


def _first(*values: Any) -> float:
    return next((v for v in map(number, values) if not math.isnan(v)), 0.0)
