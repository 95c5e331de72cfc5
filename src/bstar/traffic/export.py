"""Loads as files that other tools replay, and that `from_trace` reads back."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bstar.errors import ConfigError, SpecError
from bstar.traffic.load import Traffic

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
_OPTIONAL = ("priority", "session")


def write_trace(load: Traffic, path: str | Path) -> None:
    """Write an open loop as .csv, or as .jsonl in the keys of vLLM's timed trace.

    CSV     arrival_s, input_tokens, output_tokens and, where they are set, priority and session
    JSONL   timestamp (s), input_length, output_length and, where the load has them, hash_ids: for
            `vllm bench serve --dataset-name timed_trace` (`--timed-trace-chunk-hash-size` is then the
            load's block_hashes.tokens_per_block)
    Raises SpecError for a load whose arrivals the run decides (closed loop, sessions), ConfigError where the
    file cannot be written.
    """
    file = Path(path)
    if not load.is_open_loop:
        raise SpecError("trace: only a load whose arrivals are all given can be written; this one's depend on the run")
    if file.suffix not in (".csv", ".jsonl"):
        raise SpecError(f"trace: {file} must end in .csv or .jsonl")
    try:
        with file.open("w", encoding="utf-8", newline="") as stream:
            if file.suffix == ".csv":
                names = [*_COLUMNS, *(name for name in _OPTIONAL if _is_set(load, name))]
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(names)
                writer.writerows(zip(*(getattr(load, name).tolist() for name in names), strict=True))
            else:
                stream.writelines(json.dumps(row) + "\n" for row in _timed(load))
    except OSError as error:
        raise ConfigError(f"trace: {file} cannot be written ({error.strerror}); give another path") from error


def _is_set(load: Traffic, name: str) -> bool:
    column: np.ndarray[Any, Any] = getattr(load, name)
    return bool((column > 0).any() or (column < -1).any())


def _timed(load: Traffic) -> Iterator[dict[str, Any]]:
    columns = (getattr(load, name).tolist() for name in _COLUMNS)
    for request, (time, source, target) in enumerate(zip(*columns, strict=True)):
        row = {"timestamp": time, "input_length": source, "output_length": target}
        if load.block_hashes is not None:
            row["hash_ids"] = load.block_hashes.of(request).tolist()
        yield row
