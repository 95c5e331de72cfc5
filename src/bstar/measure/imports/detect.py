"""Which tool wrote a file, and its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from bstar.errors import BstarError, ConfigError
from bstar.measure.imports import aiperf, guidellm, inference_perf, vllm_serve
from bstar.measure.imports.run import ImportedRun

_IN_FOLDERS: Final = ("profile_export_aiperf.json", "per_request_lifecycle_metrics.json",
                      "summary_lifecycle_metrics.json")  # fmt: skip
_KNOWN: Final = "vllm bench serve --save-result, GuideLLM's JSON, AIPerf's profile_export_aiperf.json, inference-perf"


def is_foreign_result(path: str | Path) -> bool:
    """Whether a file or folder is the result of one of the other tools."""
    place = _file(Path(path))
    if place is None:
        return False
    try:
        return _tool(_content(place)) is not None
    except BstarError:
        return False


def read_results(path: str | Path) -> list[ImportedRun]:
    """The runs of a file of another tool, or of the folder that it wrote.

    vLLM's --append-result files hold a run a line. Raises ConfigError where the file is of none of them.
    """
    place = _file(Path(path))
    if place is None:
        raise ConfigError(f"{path}: no result is here; bstar reads {_KNOWN}")
    content = _content(place)
    if isinstance(content, _Lines) and content:
        return [run for i, one in enumerate(content, 1) for run in _read(one, place, f"{place.name}:{i}")]
    return _read(content, place, place.name)


class _Lines(list[Any]):
    """The values of a file with one JSON value a line."""


def _read(content: Any, place: Path, name: str) -> list[ImportedRun]:
    tool = _tool(content)
    if tool is None:
        raise ConfigError(f"{place}: no result that bstar knows; it reads {_KNOWN}")
    try:
        if tool is aiperf:
            return aiperf.read(content, name, place.parent)
        found: list[ImportedRun] = tool.read(content, name)
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{place}: looks like {tool.TOOL} but {type(error).__name__}: {error}; "
                          "was it cut, or changed by hand?") from None


def _file(path: Path) -> Path | None:
    if path.is_dir():
        return next((path / name for name in _IN_FOLDERS if (path / name).is_file()), None)
    return path if path.is_file() else None


def _content(place: Path) -> Any:
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from None
    try:
        return json.loads(text)
    except ValueError as whole:
        try:
            return _Lines(json.loads(line) for line in text.splitlines() if line.strip())
        except ValueError:
            raise ConfigError(f"{place}: not JSON: {whole}; bstar reads {_KNOWN}") from None


def _tool(content: Any) -> Any:
    if isinstance(content, _Lines):
        content = content[0] if content else None
    return next((t for t in (vllm_serve, guidellm, aiperf, inference_perf) if t.matches(content)), None)
