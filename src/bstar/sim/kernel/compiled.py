"""How the kernel's functions are compiled: cached on disk, without the interpreter lock, C's division.

    part        called from compiled code alone: no wrapper for Python, which would take as long to build as the function
    inlined     merged into the caller: what takes NamedTuples of many arrays would copy them at every call
    entry       called from Python
"""

from __future__ import annotations

from numba import njit

part = njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True)
inlined = njit(cache=True, nogil=True, error_model="numpy", inline="always")
entry = njit(cache=True, nogil=True, error_model="numpy")
