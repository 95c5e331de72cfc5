"""How the kernel's functions are compiled: cached on disk, without the interpreter lock, C's division.

    part        called from compiled code alone: no wrapper for Python, which would take as long to build as the function
    inlined     merged into the caller: what takes NamedTuples of many arrays would copy them at every call
    entry       called from Python
"""

from __future__ import annotations

from numba import njit

# Without the numba runtime no reference is counted: nothing is allocated in here, and arrays outlive the call.
_ALL = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
part = njit(no_cpython_wrapper=True, **_ALL)
inlined = njit(inline="always", **_ALL)
entry = njit(**_ALL)
