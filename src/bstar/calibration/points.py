"""Files of measured points: CSV with the columns of measured_serving_points.csv or of measured_latency_points.csv.

The header decides the schema; unknown columns are ignored, optional ones may be missing. A row that cannot be read
becomes a Point with a `fault` that names its column, so that one bad row does not end a file.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bstar.calibration.cells import (
    MOST_CLIENTS,
    MS,
    CellError,
    clients_of,
    gpus_of,
    loose_tokens,
    number_of,
    ranks_of,
    seconds_of,
    tokens_of,
    whole_of,
)
from bstar.calibration.doubts import with_doubts
from bstar.calibration.point import Point, Pool, Schema
from bstar.calibration.point_deployments import deployment_of
from bstar.errors import BstarError, ConfigError

__all__ = ["LATENCY_COLUMNS", "SERVING_COLUMNS", "Point", "Pool", "deployment_of", "read_points", "read_rows"]

# Columns without which a file is not of that schema.
SERVING_COLUMNS: Final = ("engine", "model", "gpu", "isl_tokens", "osl_tokens", "concurrency")
LATENCY_COLUMNS: Final = ("engine", "model", "gpu", "isl", "osl", "load_kind", "load_value")
_MOST_BYTES: Final = 1 << 28
# Most clients of a closed loop, sequences and prompts of other loads.
_MOST_SEQUENCES: Final = 1_000_000


_WANTED: Final = (f"a file of measured points has the columns {', '.join(SERVING_COLUMNS)}, or "
                  f"{', '.join(LATENCY_COLUMNS)}")


def read_points(path: str | Path) -> list[Point]:
    """The points of a CSV file (also gzipped), in its order. Raises ConfigError for a file that is no such table."""
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"points: {file} cannot be read ({error.strerror})") from None
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data, file)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"points: {file} is larger than {_MOST_BYTES >> 20} MiB; split it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"points: {file} is not UTF-8 text (byte {error.start})") from None
    return read_rows(text, source=str(file))


def read_rows(text: str, *, source: str = "points") -> list[Point]:
    """The points of a CSV text. Raises ConfigError where the header is of neither schema."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        names = _names(reader.fieldnames or [], source)
        reader.fieldnames = names
        schema = _schema(names, source)
        if schema == "serving":
            return [with_doubts(serving_point(row, number)) for number, row in _rows(reader)]
        return _labelled([with_doubts(latency_row(row, number)) for number, row in _rows(reader)])
    except csv.Error as error:
        raise ConfigError(f"points: {source}, line {reader.line_num}: {error}") from None


def _labelled(points: list[Point]) -> list[Point]:
    """Latency points with what is wrong with their labels, found by rule over the whole table."""
    from bstar.calibration.latency_points import LatencyPoint, latency_point
    from bstar.calibration.latency_points_labels import label_notes, measured_tpot_s

    read: list[LatencyPoint | None] = []
    for place, point in enumerate(points):
        try:
            read.append(latency_point({**point.columns, "id": point.id}))
        except BstarError as error:
            points[place] = replace(point, fault=point.fault or str(error).removeprefix(f"{point.id}: "))
            read.append(None)
    notes = label_notes([found for found in read if found is not None])
    return [
        point if found is None else replace(
            point, label_note=point.label_note or notes.get(found.id, ""), tpot_s=measured_tpot_s(found))
        for point, found in zip(points, read, strict=True)
    ]  # fmt: skip


def _unzipped(data: bytes, file: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as zipped:
            return zipped.read(_MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise ConfigError(f"points: {file} is not a whole gzip file ({error})") from None


def _names(header: Sequence[str], source: str) -> list[str]:
    """Columns in lower case, words joined by _. Raises ConfigError where the first line is no header of columns."""
    names = ["_".join(name.lower().split()) for name in header]
    if not any(names):
        raise ConfigError(f"points: {source} is empty; {_WANTED}")
    known = {*SERVING_COLUMNS, *LATENCY_COLUMNS}
    if not known & set(names):
        for sign, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if known & {part.strip().lower() for part in ",".join(header).split(sign)}:
                raise ConfigError(f"points: {source} is separated by {name}; save it with commas (CSV)")
        if _has_figures(names):
            raise ConfigError(f"points: {source} has no header; {_WANTED}")
    for metric in ("ttft", "tpot"):
        if {f"{metric}_ms", f"{metric}_s"} <= set(names):
            raise ConfigError(f"points: {source} has {metric}_ms and {metric}_s; keep one of them")
    return names


def _has_figures(names: Sequence[str]) -> bool:
    """Whether a line looks like a row of values: some are numbers."""
    return any(name.replace(".", "", 1).isdigit() for name in names)


def _in_ms(cells: dict[str, str]) -> dict[str, str]:
    """Cells with ttft_s and tpot_s as the milliseconds that the rest reads."""
    for metric in ("ttft", "tpot"):
        if f"{metric}_s" in cells:
            text = cells.pop(f"{metric}_s")
            try:
                cells[f"{metric}_ms"] = repr(float(text) / MS) if text else ""
            except ValueError:
                cells[f"{metric}_ms"] = text
    return cells


def _schema(names: list[str], source: str) -> Schema:
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise ConfigError(f"points: {source} has the column {repeated[0]!r} twice")
    if all(name in names for name in SERVING_COLUMNS):
        return "serving"
    if all(name in names for name in LATENCY_COLUMNS):
        return "latency"
    columns = LATENCY_COLUMNS if "load_kind" in names else SERVING_COLUMNS
    missing = [name for name in columns if name not in names]
    raise ConfigError(f"points: {source} lacks the column {', '.join(missing)}; {_WANTED}")


def _rows(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) of every row that is not empty; cells that are missing are empty."""
    for row in reader:
        cells = {name: (value or "").strip() for name, value in row.items()
                 if name is not None and not isinstance(value, list)}
        if any(cells.values()):
            yield reader.line_num, _in_ms(cells)


def serving_point(row: Mapping[str, str], number: int = 0) -> Point:
    """A row of the serving schema."""
    labels = _labels(row, number)
    try:
        return Point(
            **labels, schema="serving",
            mode=_mode(row), harness=row.get("harness", "").lower(),
            weight_dtype=row.get("weight_dtype") or None, gemm_dtype=row.get("gemm_quant") or None,
            moe_dtype=row.get("moe_quant") or None, kv_dtype=row.get("kv_cache_dtype") or None,
            input_tokens=tokens_of(row, "isl_tokens"), output_tokens=tokens_of(row, "osl_tokens"),
            concurrency=clients_of(row, "concurrency"), num_gpus=gpus_of(row, "num_gpus"),
            attention_tp=gpus_of(row, "attention_tp"), attention_dp=gpus_of(row, "attention_dp"),
            expert_parallel=gpus_of(row, "expert_parallel"), prefill=_pool(row, "prefill"), decode=_pool(row, "decode"),
            ttft_s=seconds_of(row, "ttft_ms"), tpot_s=seconds_of(row, "tpot_ms"),
            layout_note=row.get("layout_note", ""), label_note=row.get("label_note", ""),
        )  # fmt: skip
    except CellError as error:
        return Point(**labels, schema="serving", mode=(row.get("mode") or "agg").lower(), fault=str(error))


def latency_row(row: Mapping[str, str], number: int = 0) -> Point:
    """A row of the latency schema: its labels; `bstar.calibration.latency_points` reads the load."""
    labels = _labels(row, number)
    try:
        _check_load(row)
        return Point(
            **labels, schema="latency", mode=row.get("load_kind", "").split(" ")[0], harness=row.get("load_kind", ""),
            weight_dtype=row.get("weight_dtype") or None, kv_dtype=row.get("kv_dtype") or None,
            input_tokens=loose_tokens(row, "isl"), output_tokens=loose_tokens(row, "osl"),
            concurrency=whole_of(row, "load_value", loose=True) or whole_of(row, "max_concurrency", loose=True) or 0,
            num_gpus=ranks_of(row, "n_gpus"), attention_tp=ranks_of(row, "tp"),
            attention_dp=whole_of(row, "dp", loose=True),
            expert_parallel=whole_of(row, "ep", loose=True),
            ttft_s=seconds_of(row, "ttft_ms"), tpot_s=seconds_of(row, "tpot_ms"),
            output_tokens_per_s=number_of(row, "out_tok_s") or None,
            layout_note=row.get("layout_note", ""), label_note=row.get("label_note", ""),
        )  # fmt: skip
    except CellError as error:
        return Point(**labels, schema="latency", mode=row.get("load_kind", ""), fault=str(error))


def _labels(row: Mapping[str, str], number: int) -> dict[str, Any]:
    """What can always be read: names as they stand."""
    return {
        "id": row.get("id") or f"line {number}", "engine": row.get("engine", ""), "model": row.get("model", ""),
        "engine_version": row.get("engine_version", ""), "gpu": row.get("gpu", ""),
        "measured_on": row.get("measured_on", ""), "columns": dict(row),
    }  # fmt: skip


def _pool(row: Mapping[str, str], side: str) -> Pool | None:
    """The side's columns; None where the row has none of them."""
    def read(name: str) -> int | None:
        return gpus_of(row, f"{side}_{name}")

    tp, dp = read("tp_size"), read("attention_dp_size")
    if tp is None and dp is None and read("num_workers") is None:
        return None
    return Pool(
        workers=read("num_workers"), tp=tp or 1, pp=read("pp_size") or 1, attention_dp=dp or 1,
        moe_tp=read("moe_tp_size"), moe_ep=read("moe_ep_size"), batch_size=read("batch_size"),
    )  # fmt: skip


def _mode(row: Mapping[str, str]) -> str:
    """agg or disagg; a row that says neither and has both sides' columns is disaggregated."""
    text = row.get("mode", "").lower()
    if not text:
        sides = [any(row.get(f"{side}_{name}") for name in ("num_workers", "tp_size", "attention_dp_size"))
                 for side in ("prefill", "decode")]  # fmt: skip
        return "disagg" if all(sides) else "agg"
    if text.startswith(("agg", "disagg")):
        return text
    raise CellError(f"mode: {text[:40]!r} is not known; use agg, or disagg with the prefill_* and decode_* columns")


def _check_load(row: Mapping[str, str]) -> None:
    """A load that cannot have been sent, and a layout of nothing."""
    kind = row.get("load_kind", "").lower()
    ranks_of(row, "pp")
    text = row.get("load_value", "")
    if not text or text.lower() in ("inf", "nan"):
        return
    if "rate" in kind or "trace" in kind:
        if (_number_in_range(text) or 0.0) <= 0.0:
            raise CellError(f"load_value: a rate must be above 0 requests per second, is {text[:60]!r}")
        return
    most = MOST_CLIENTS if "closed" in kind or "concurrency" in kind else _MOST_SEQUENCES
    value = _number_in_range(text)
    if value is not None and (value != int(value) or not 1 <= value <= most):
        raise CellError(f"load_value: must be a whole number from 1 to {most:,}, is {text[:60]!r}")


def _number_in_range(text: str) -> float | None:
    """The number, where the text is one; the middle of a range is read elsewhere."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
