"""Measured latency points: rows of a table of TTFT, TPOT and throughput by load, from many harnesses.

    column                          field               unit
    ──────────────────────────────  ──────────────────  ───────────────────────────────────────────────
    model, gpu, tp, pp, dp, ep      model, gpu, …       as written; `latency_points_mapping` reads them
    isl, osl                        input_tokens, …     mean tokens of a request (a range: its middle)
    load_kind, load_value           load, load_value    see `LoadKind`; "inf" is infinite
    ttft_ms, tpot_ms, itl_ms, e2e_ms   ttft_s, …        seconds
    out_tok_s, total_tok_s, req_s   …_per_s             of the whole system, all GPUs together

Empty cells are None: nothing is invented.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from bstar.errors import ConfigError

LoadKind = Literal["static_batch", "all_at_once", "closed", "max_load", "rate", "trace"]

# A table with these columns holds latency points; others may be missing.
LATENCY_COLUMNS: Final = frozenset({"model", "gpu", "isl", "osl", "load_kind", "load_value"})
_LOADS: Final[tuple[tuple[str, LoadKind], ...]] = (
    ("static", "static_batch"), ("all_at_once", "all_at_once"), ("burst", "all_at_once"), ("closed", "closed"),
    ("concurrency", "closed"), ("max_load", "max_load"), ("offline", "max_load"), ("rate", "rate"),
    ("trace", "trace"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPoint:
    """One row.

    load          how requests came; load_value its figure: sequences of a static batch, prompts sent at once, clients
                  of a closed loop, requests per second; inf: as many as the engine takes
    expert_parallel   as written: "", "yes" or a number of ranks
    ttft_stat, tpot_stat  what the harness says the figures are ("mean", "whole batch prefill", …)
    """

    id: str
    source: str
    engine: str
    engine_version: str
    model: str
    gpu: str
    num_gpus: int | None
    tp: int | None
    pp: int | None
    dp: int | None
    expert_parallel: str
    weight_dtype: str
    kv_dtype: str
    input_tokens: float | None
    output_tokens: float | None
    load: LoadKind
    load_text: str
    load_value: float
    max_concurrency: float | None
    num_prompts: int | None
    ttft_s: float | None
    ttft_stat: str
    tpot_s: float | None
    tpot_stat: str
    itl_s: float | None
    e2e_s: float | None
    out_tokens_per_s: float | None
    total_tokens_per_s: float | None
    requests_per_s: float | None
    peak_memory_gb: float | None
    dataset: str
    flags: str
    notes: str


def is_latency_table(header: Mapping[str, object] | list[str]) -> bool:
    """Whether a CSV with this header holds latency points."""
    return set(header) >= LATENCY_COLUMNS


def read_latency_points(path: str | Path) -> list[LatencyPoint]:
    """The points of a CSV file (a .gz one too). Raises ConfigError where it is none."""
    with _opened(Path(path)) as stream:
        reader = csv.DictReader(stream)
        if not is_latency_table(list(reader.fieldnames or ())):
            missing = sorted(LATENCY_COLUMNS - set(reader.fieldnames or ()))
            raise ConfigError(f"{path}: no table of latency points: the columns {', '.join(missing)} are missing")
        return list(_points(reader))


def _opened(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a CSV file") from None


def _points(rows: csv.DictReader[str]) -> Iterator[LatencyPoint]:
    for number, row in enumerate(rows, start=2):
        yield latency_point(row, line=number)


def latency_point(row: Mapping[str, str], *, line: int = 0) -> LatencyPoint:
    """The point of one row. Raises ConfigError that names the column where a figure is none."""
    cell = _Cells(row, row.get("id") or f"line {line}")
    load_text = cell.text("load_kind")
    load = next((kind for word, kind in _LOADS if word in load_text.lower()), None)
    if load is None:
        raise ConfigError(f"{cell.name}: load_kind {load_text[:40]!r} is not known; "
                          "use static_batch, all_at_once, closed, max_load, rate or trace")
    value = cell.number("load_value")
    return LatencyPoint(
        id=cell.name, source=cell.text("source"), engine=cell.text("engine"),
        engine_version=cell.text("engine_version"), model=cell.text("model"), gpu=cell.text("gpu"),
        num_gpus=cell.whole("n_gpus"), tp=cell.whole("tp"), pp=cell.whole("pp"), dp=cell.whole("dp"),
        expert_parallel=cell.text("ep").lower(), weight_dtype=cell.text("weight_dtype"),
        kv_dtype=cell.text("kv_dtype"), input_tokens=cell.number("isl"), output_tokens=cell.number("osl"),
        load=load, load_text=load_text, load_value=math.inf if value is None else value,
        max_concurrency=cell.number("max_concurrency"), num_prompts=cell.whole("num_prompts"),
        ttft_s=cell.seconds("ttft_ms"), ttft_stat=cell.text("ttft_stat"), tpot_s=cell.seconds("tpot_ms"),
        tpot_stat=cell.text("tpot_stat"), itl_s=cell.seconds("itl_ms"), e2e_s=cell.seconds("e2e_ms"),
        out_tokens_per_s=cell.number("out_tok_s"), total_tokens_per_s=cell.number("total_tok_s"),
        requests_per_s=cell.number("req_s"), peak_memory_gb=cell.number("peak_mem_gb"),
        dataset=cell.text("dataset"), flags=cell.text("flags"), notes=cell.text("notes"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells of one row, read strictly."""

    row: Mapping[str, str]
    name: str

    def text(self, column: str) -> str:
        return (self.row.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        text = self.text(column)
        if not text:
            return None
        ends = re.fullmatch(r"(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)", text)
        if ends is not None:  # "800-1000": the middle
            return (float(ends[1]) + float(ends[2])) / 2.0
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{self.name}: {column} {text[:40]!r} is not a number") from None
        if math.isnan(value) or value < 0:
            raise ConfigError(f"{self.name}: {column} must be a number of at least 0, is {text[:40]!r}")
        return value

    def whole(self, column: str) -> int | None:
        value = self.number(column)
        if value is None or not math.isfinite(value):
            return None
        return round(value)

    def seconds(self, column: str) -> float | None:
        value = self.number(column)
        return None if value is None else value * 1e-3
