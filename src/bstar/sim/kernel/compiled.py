"""How the kernel's functions are compiled: cached on disk, without the interpreter lock, C's division.

    entry       called from Python
    part        called from compiled code alone (from Python it would crash): a wrapper takes as long to build as the
                function itself
    inlined     merged into the caller: what takes NamedTuples of many arrays would copy them at every call

Nothing is allocated in compiled code and arrays outlive the call, so the numba runtime is off: no references are
counted, which would cost more than the work between two events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
_ALL: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
_PART: dict[str, Any] = {**_ALL, "no_cpython_wrapper": True}
_INLINED: dict[str, Any] = {**_ALL, "inline": "always"}


def entry(function: F) -> F:
    """Compile a function that Python calls."""
    compiled: F = njit(**_ALL)(function)
    return compiled


def part(function: F) -> F:
    """Compile a function that only compiled functions call."""
    compiled: F = njit(**_PART)(function)
    return compiled


def inlined(function: F) -> F:
    """Compile a function into each of its callers."""
    compiled: F = njit(**_INLINED)(function)
    return compiled
