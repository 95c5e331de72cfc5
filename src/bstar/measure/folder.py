"""A run as a folder. While it runs the folder is NAME.partial and holds a journal; when all is written it is NAME.

    config.json           what was asked
    environment.json      where, with what, of which server
    traffic.parquet       the load, request by request: the same that a simulation takes
    requests.parquet      what happened to each request, chunk times included
    series.parquet        the run in time
    summary.json          the figures (schema: bstar/measure/data/summary.schema.json)
    requests.journal      only in a .partial folder: finished requests as Arrow records, for `recover`

Files are written beside their place and moved there, so that none is ever half written.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from bstar.errors import ConfigError, SpecError
from bstar.files import whole_file
from bstar.measure.clock import ClockOffset
from bstar.measure.result import BenchRun
from bstar.measure.tables import FIELDS, RequestTable, WorkerRows, request_table
from bstar.traffic.load import Traffic

PARTIAL: Final = ".partial"
_TRAFFIC = ("arrival_s", "input_tokens", "output_tokens", "priority", "prefix_group", "prefix_tokens", "session",
            "turn", "parent", "think_s")  # fmt: skip
_KINDS: Final[dict[str, str]] = {
    **dict.fromkeys(("index", "status", "retries", "prompt_tokens", "completion_tokens", "cached_tokens"), "int64"),
    **dict.fromkeys(("due_s", "allowed_s", "sent_s", "connected_s", "first_byte_s", "end_s", "retry_after_s"),
                    "float64"),
    **dict.fromkeys(("reused", "done"), "bool_"),
    **dict.fromkeys(("error", "error_text", "finish_reason", "text"), "string"),
    **dict.fromkeys(("chunk_s", "chunk_kind", "chunk_tokens"), "binary"),
}  # fmt: skip


class RunFolder:
    """Writes a run. A write that fails is kept in `error` and ends nothing: what was measured is in memory still."""

    def __init__(self, path: Path) -> None:
        self.final = path
        self.path = path.with_name(path.name + PARTIAL)
        self.error = ""
        self._journal: Any = None
        self._schema: Any = None
        _pyarrow()
        for place in (self.final, self.path):
            if place.exists():
                raise SpecError(f"--out: {place} exists; choose another name")
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--out: {self.path}: {error.strerror or error}") from None

    # during the run

    def begin(
        self, config: Mapping[str, Any], environment: Mapping[str, Any], traffic: Traffic, origin_s: float
    ) -> None:
        """What is known before: written now, so that a run that is killed can be read."""
        self.json("config.json", config)
        self.json("environment.json", environment)
        self.parquet("traffic", traffic_columns(traffic))
        self.json("journal.json", {"origin_s": origin_s, "concurrency": traffic.concurrency,
                                   "warmup_requests": traffic.warmup_requests, "name": traffic.name,
                                   "seed": traffic.seed})

    def journal(self, worker: int, offset: ClockOffset, rows: list[tuple[Any, ...]]) -> None:
        """Append finished requests."""
        if self.error:
            return
        pyarrow = _pyarrow()
        try:
            if self._journal is None:
                fields = [(name, getattr(pyarrow, _KINDS[name])()) for name in FIELDS]
                self._schema = pyarrow.schema([*fields, ("worker", pyarrow.int64()), ("offset_s", pyarrow.float64())])
                self._file = (self.path / "requests.journal").open("wb")
                self._journal = pyarrow.ipc.new_stream(self._file, self._schema)
            columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
            columns += [[worker] * len(rows), [offset.offset_s] * len(rows)]
            arrays = [pyarrow.array(c, type=f.type) for c, f in zip(columns, self._schema, strict=True)]
            self._journal.write_batch(pyarrow.record_batch(arrays, schema=self._schema))
            self._file.flush()
        except OSError as error:
            self._failed("requests.journal", error)

    # after it

    def finish(self, run: BenchRun, summary: Mapping[str, Any]) -> Path:
        """Write everything and give the folder its name. Returns where it is: still .partial after an error."""
        self.parquet("requests", request_columns(run.table, run.window.mask(run.table)))
        self.parquet("series", run.series())
        for observation in run.observations:
            for name, columns in observation.tables.items():
                self.parquet(name, columns)
        self.json("summary.json", {**summary, "write_error": self.error or None})
        if self._journal is not None:
            for end in (self._journal.close, self._file.close):
                with contextlib.suppress(OSError):  # its last bytes: all of it is in requests.parquet, or noted
                    end()
        if self.error:
            return self.path
        try:
            for name in ("requests.journal", "journal.json"):
                (self.path / name).unlink(missing_ok=True)
            self.path.rename(self.final)
        except OSError as error:
            self._failed(self.final.name, error)
            return self.path
        return self.final

    def discard(self) -> None:
        """Remove the folder of a run that holds nothing, and those above that were made for it alone."""
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)
        for place in self._made[1:]:
            with contextlib.suppress(OSError):
                place.rmdir()

    def json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        self._atomically(name, lambda file: file.write_text(text, encoding="utf-8"))

    def parquet(self, name: str, columns: Mapping[str, Any]) -> None:
        """Write a table; nan is missing."""
        pyarrow = _pyarrow()
        from pyarrow import parquet

        table = pyarrow.table({key: _column(pyarrow, value) for key, value in columns.items()})
        self._atomically(f"{name}.parquet", lambda file: parquet.write_table(table, file, compression="zstd"))

    def _atomically(self, name: str, write: Any) -> None:
        try:
            with whole_file(self.path / name) as place:
                write(place)
        except OSError as error:
            self._failed(name, error)

    def _failed(self, name: str, error: OSError) -> None:
        if not self.error:
            self.error = f"{name}: {error.strerror or error}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun:
    """A run as it was written.

    measured   which requests of the table count
    """

    path: Path
    table: RequestTable
    measured: np.ndarray[Any, np.dtype[np.bool_]]
    traffic: Traffic
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]


def broke_off(run: RecordedRun) -> str:
    """How far a run came that was interrupted or killed: "broke off: 17 of 200 requests were answered"; else ""."""
    if not run.summary.get("interrupted"):
        return ""
    answered = int(np.count_nonzero(run.table.succeeded))
    return f"broke off: {answered:,} of {run.traffic.num_requests:,} requests were answered"


def read_run(path: str | Path) -> RecordedRun:
    """A run's folder; of an unfinished one (.partial) what its journal holds. Raises ConfigError where it is none."""
    folder = Path(path)
    if is_unfinished(folder):
        return _unfinished(folder)
    _check_begun(folder)
    if not (folder / "requests.parquet").is_file():
        raise ConfigError(f"run: {folder} is no folder of bstar bench (no requests.parquet in it)")
    summary = _summary_of(folder)
    columns = read_table(folder / "requests.parquet")
    measured = np.asarray(columns.pop("measured"), dtype=bool)
    return RecordedRun(
        path=folder, table=_table_of(columns), measured=measured,
        traffic=_traffic_of(read_table(folder / "traffic.parquet"), summary.get("load", {}),
                            summary.get("window", {})),
        summary=summary, config=_read_json(folder / "config.json"),
        environment=_read_json(folder / "environment.json"),
    )  # fmt: skip


def _summary_of(folder: Path) -> dict[str, Any]:
    """A run's summary. Raises ConfigError where it is none."""
    file = folder / "summary.json"
    summary = _read_json(file)
    missing = [key for key in ("load", "window", "verdict") if not isinstance(summary.get(key), Mapping)]
    if missing:
        raise ConfigError(f"run: {str(file)!r} is no summary of bstar bench (it has no {missing[0]}); restore it, or "
                          "measure again")
    return summary


def is_unfinished(folder: Path) -> bool:
    """Whether a run broke off before it was written: it has a journal, and no summary or no requests."""
    whole = (folder / "requests.parquet").is_file() and (folder / "summary.json").is_file()
    return (folder / "requests.journal").is_file() and not whole


def _unfinished(folder: Path) -> RecordedRun:
    """The finished requests of a run that was killed: interrupted, and without the client's own health."""
    from bstar.measure.health import judge
    from bstar.measure.result import Window

    table, traffic = recover(folder)
    health = judge(table.sent_s - np.maximum(table.intended_s, table.allowed_s), [], [], latency_s=None, gap_s=None)
    run = BenchRun(table=table, traffic=traffic, health=health, interrupted=True,
                   window=Window(warmup_requests=traffic.warmup_requests))
    return RecordedRun(
        path=folder, table=table, measured=run.window.mask(table), traffic=traffic, summary=plain(run.to_dict()),
        config=_read_json(folder / "config.json"), environment=_read_json(folder / "environment.json"),
    )  # fmt: skip


def recover(path: str | Path) -> tuple[RequestTable, Traffic]:
    """What the journal of an unfinished run holds: its finished requests, and the load. Raises ConfigError."""
    folder = Path(path)
    pyarrow = _pyarrow()
    note = _read_json(folder / "journal.json")
    parts: dict[int, WorkerRows] = {}
    rows: dict[int, list[tuple[Any, ...]]] = {}
    try:
        file = (folder / "requests.journal").open("rb")
    except OSError as error:
        raise ConfigError(f"run: {folder}: no journal to recover ({error.strerror})") from None
    with file, contextlib.suppress(pyarrow.ArrowInvalid, OSError):  # the last batch may be cut
        for batch in pyarrow.ipc.open_stream(file):
            for row in zip(*[batch.column(i).to_pylist() for i in range(batch.num_columns)], strict=True):
                rows.setdefault(row[-2], []).append(row[:-2])
                parts[row[-2]] = WorkerRows(row[-2], ClockOffset(offset_s=row[-1]), rows[row[-2]])
    traffic = _traffic_of(read_table(folder / "traffic.parquet"), note, note)
    return request_table(parts.values(), traffic, float(note["origin_s"])), traffic


def runs_in(path: str | Path) -> list[Path]:
    """The folders of runs that a path names: itself, or those inside a sweep, a repeated run or a tuning.

    Raises ConfigError where there is none.
    """
    folder = Path(path)
    if is_run(folder):
        return [folder]
    _check_begun(folder)
    try:
        inside = sorted((p for p in folder.iterdir() if is_run(p) and not p.name.endswith(PARTIAL)), key=_in_order)
    except OSError as error:
        raise ConfigError(f"run: {str(folder)!r} cannot be read ({error.strerror})") from None
    kept = _kept_by_sweep(folder)
    if kept is not None:  # a load that was measured again after an interrupt has two folders
        inside = sorted((p for p in inside if p.name in kept), key=lambda p: kept[p.name])
    if not inside:
        raise ConfigError(f"run: {str(folder)!r} is no folder of bstar bench, and none is in it")
    return inside


def _kept_by_sweep(folder: Path) -> dict[str, int] | None:
    """The names of the runs that a sweep's points are and their places; None where its file says nothing."""
    file = folder / "sweep.json"
    if not file.is_file():
        return None
    points = _read_json(file).get("points")
    names = [p.get("folder") for p in points if isinstance(p, Mapping)] if isinstance(points, list) else []
    return {name: place for place, name in enumerate(names) if isinstance(name, str)} or None


def _check_begun(folder: Path) -> None:
    """Raises ConfigError for what a run leaves that was killed before its first answer."""
    if (folder / "journal.json").is_file() and not (folder / "requests.journal").is_file():
        raise ConfigError(f"run: {str(folder)!r} broke off before the first answer: it holds nothing; remove it")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, whole or unfinished."""
    return (folder / "requests.parquet").is_file() or is_unfinished(folder)


def _in_order(folder: Path) -> tuple[list[str], list[float]]:
    """Names with numbers in the order of those: concurrency-8 before concurrency-16."""
    numbers = re.findall(r"\d+(?:\.\d+)?", folder.name)
    return re.split(r"\d+(?:\.\d+)?", folder.name), [float(n) for n in numbers]


def run_name(moment: datetime | None = None) -> str:
    """A folder name of the time, UTC."""
    return (moment or datetime.now(UTC)).strftime("bench-%Y%m%d-%H%M%S")


def request_columns(table: RequestTable, measured: Any) -> dict[str, Any]:
    """A column per field, a list a request for its chunks."""
    columns: dict[str, Any] = {
        name: getattr(table, name) for name in table.__dataclass_fields__ if not name.startswith("chunk_")}
    columns["measured"] = measured
    columns["chunk_s"] = _Lists(table.chunk_offsets, table.chunk_s)
    columns["chunk_tokens"] = _Lists(table.chunk_offsets, table.chunk_tokens)
    return columns


def traffic_columns(traffic: Traffic) -> dict[str, Any]:
    """The arrays of a load."""
    columns: dict[str, Any] = {name: np.ascontiguousarray(getattr(traffic, name)) for name in _TRAFFIC}
    if traffic.block_hashes is not None:
        columns["block_ids"] = _Lists(traffic.block_hashes.offsets, traffic.block_hashes.ids)
        columns["tokens_per_block"] = np.full(traffic.num_requests, traffic.block_hashes.tokens_per_block)
    return columns


def plain(value: Any) -> Any:
    """JSON data: no nan, no numpy."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    return value


@dataclass(frozen=True, slots=True)
class _Lists:
    """A list a row: offsets and values."""

    offsets: Any
    values: Any


def _column(pyarrow: Any, value: Any) -> Any:
    if isinstance(value, _Lists):
        return pyarrow.LargeListArray.from_arrays(pyarrow.array(value.offsets, type=pyarrow.int64()),
                                                  pyarrow.array(value.values))
    array = np.asarray(value)
    if array.dtype.kind == "U":
        return pyarrow.array(array.tolist(), type=pyarrow.string())
    return pyarrow.array(array, mask=np.isnan(array) if array.dtype.kind == "f" else None)


def _table_of(columns: dict[str, Any]) -> RequestTable:
    chunks, counts = columns.pop("chunk_s"), columns.pop("chunk_tokens")
    sizes = np.asarray([len(c) for c in chunks], dtype=np.int64)
    return RequestTable(
        **columns, chunk_offsets=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes))),
        chunk_s=np.concatenate([np.asarray(c, dtype=float) for c in chunks]) if chunks else np.zeros(0),
        chunk_tokens=np.concatenate([np.asarray(c, dtype=np.int64) for c in counts]) if counts else np.zeros(0, int),
    )  # fmt: skip


def _traffic_of(columns: dict[str, Any], load: Mapping[str, Any], window: Mapping[str, Any]) -> Traffic:
    from bstar.traffic.load import BlockHashes

    ids, size = columns.pop("block_ids", None), columns.pop("tokens_per_block", None)
    hashes = None
    if ids is not None and size is not None:
        counts = np.cumsum([0, *(len(i) for i in ids)])
        hashes = BlockHashes(offsets=counts, ids=np.concatenate([np.asarray(i, dtype=np.int64) for i in ids]),
                             tokens_per_block=int(size[0]))  # fmt: skip
    return Traffic(
        **columns, block_hashes=hashes, concurrency=load.get("concurrency"), name=str(load.get("name", "")),
        seed=int(load.get("seed") or 0), warmup_requests=int(window.get("warmup_requests") or 0),
    )  # fmt: skip


def read_table(file: Path) -> dict[str, Any]:
    """The columns of a Parquet file of a run. Raises ConfigError where it cannot be read."""
    _pyarrow()
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except Exception as error:
        raise ConfigError(f"run: {file} cannot be read: {str(error).splitlines()[0]}") from None
    out: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name)
        kind = str(column.type)
        if "list" in kind:
            out[name] = column.to_pylist()
        elif "string" in kind:
            out[name] = np.asarray(column.to_pylist(), dtype=np.str_)
        else:
            values = column.to_numpy()
            out[name] = values.astype(float) if kind == "double" else values
    return out


def _read_json(file: Path) -> dict[str, Any]:
    from bstar.codec.safe_json import read_json

    return read_json(file, what="run")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise ConfigError("bench: runs are written as Parquet, which needs pyarrow; pip install 'bstar[bench]'"
                          ) from None
    return pyarrow
