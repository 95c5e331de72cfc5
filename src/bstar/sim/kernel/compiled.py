"""How the kernel's functions are compiled: cached on disk, without the interpreter lock, C's division.

    entry       called from Python
    part        called from compiled code alone (from Python it would crash): a wrapper takes as long to build as the
                function itself
    inlined     merged into the caller: what takes NamedTuples of many arrays would copy them at every call

numba notices a changed file of a function, not of those it calls: a cached function is taken for stale when any file
of the kernel has changed.

Nothing is allocated in compiled code and arrays outlive the call, so the numba runtime is off: no references are
counted, which would cost more than the work between two events.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
_ALL: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
_PART: dict[str, Any] = {**_ALL, "no_cpython_wrapper": True}
_INLINED: dict[str, Any] = {**_ALL, "inline": "always"}


def entry(function: F) -> F:
    """Compile a function that Python calls."""
    compiled: F = _watched(njit(**_ALL)(function))
    return compiled


def part(function: F) -> F:
    """Compile a function that only compiled functions call."""
    compiled: F = _watched(njit(**_PART)(function))
    return compiled


def inlined(function: F) -> F:
    """Compile a function into each of its callers."""
    compiled: F = njit(**_INLINED)(function)
    return compiled


def _watched(compiled: Any) -> Any:
    """The function with a cache that is as old as the youngest file it can depend on."""
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if file is not None and hasattr(file, "_source_stamp"):
        folder = Path(inspect.getfile(compiled.py_func)).parent
        file._source_stamp = (file._source_stamp, _stamp(Path(__file__).parent), _stamp(folder))
    return compiled


@lru_cache(maxsize=8)
def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the Python files of a folder; under JIT-free runs and in archives there may be none."""
    found = [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)
