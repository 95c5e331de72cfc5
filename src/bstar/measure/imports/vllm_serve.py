"""`vllm bench serve --save-result [--save-detailed]`, and the same file of SGLang's and InferenceX's forks of it.

Its TPOT is bstar's: (latency − TTFT) / (output tokens − 1) of each request. Its ITL is the gap between chunks. Times
count from the moment the request was sent; with a cap on concurrency that is after the wait for a free place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from bstar.measure.imports.run import ImportedRun, number, put, records_of

TOOL: Final = "vllm bench serve"
_METRICS: Final = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}
_STATISTIC: Final = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el)_ms")
_RATES: Final = {"request_throughput": "requests_per_s", "output_throughput": "output_tokens_per_s",
                 "request_goodput": "goodput_requests_per_s"}  # fmt: skip


def matches(content: Any) -> bool:
    """Whether a file's content is of this tool."""
    return isinstance(content, Mapping) and {"mean_ttft_ms", "output_throughput"} <= set(content)


def read(content: Mapping[str, Any], name: str) -> list[ImportedRun]:
    """The one run of a file."""
    figures: dict[str, float] = {}
    for key, value in content.items():
        found = _STATISTIC.fullmatch(key)
        if found:
            part = "p50" if found[1] == "median" else found[1]
            put(figures, f"{_METRICS[found[2]]}.{part}", value, 1e-3)
        elif key in _RATES:
            put(figures, _RATES[key], value)
    requests = number(content.get("completed"))
    for key, metric in (("total_input_tokens", "input_tokens.mean"), ("total_output_tokens", "output_tokens.mean")):
        if requests > 0:
            put(figures, metric, content.get(key), 1.0 / requests)
    records, gaps, failed, notes = _requests(content, name)
    rate = number(content.get("request_rate"))
    cap = number(content.get("max_concurrency"))
    burst = number(content.get("burstiness"))
    finite = not math.isnan(rate) and not math.isinf(rate)
    return [ImportedRun(
        tool=TOOL, name=name, model=str(content.get("model_id") or ""), date=str(content.get("date") or ""),
        concurrency=None if math.isnan(cap) else int(cap), rate_per_s=rate if finite else None,
        burstiness=None if math.isnan(burst) or not finite else burst, figures=figures, records=records,
        gaps_s=gaps, failed=failed or int(number(content.get("failed", 0)) or 0), notes=notes,
    )]  # fmt: skip


def _requests(content: Mapping[str, Any], name: str) -> tuple[Any, list[float], int, tuple[str, ...]]:
    ttfts, itls = content.get("ttfts"), content.get("itls")
    inputs, outputs = content.get("input_lens"), content.get("output_lens")
    if not (ttfts and itls and inputs and outputs):
        return None, [], 0, ("no requests in the file: --save-detailed keeps them",)
    starts = content.get("start_times")
    errors = content.get("errors") or [""] * len(ttfts)
    if not starts:
        return None, [g for gaps in itls for g in gaps], sum(map(bool, errors)), ("requests without start times",)
    latencies = content.get("latencies") or [None] * len(ttfts)
    rows, gaps_s, failed = [], [], 0
    for start, ttft, gaps, latency, prompt, output, error in zip(
        starts, ttfts, itls, latencies, inputs, outputs, errors, strict=False
    ):
        if error or not output:
            failed += 1
            rows.append((start, math.nan, math.nan, prompt, 0))
            continue
        last = start + (latency if latency else ttft + math.fsum(gaps))
        rows.append((start, start + ttft, last, prompt, output))
        gaps_s += gaps
    return records_of(rows, name), gaps_s, failed, ()
