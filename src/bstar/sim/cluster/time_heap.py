"""A binary heap of requests by a time that each of them has; ties to the lower number. The caller keeps the count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bstar.sim.kernel.compiled import part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@part
def put(heap: Ints, count: int, key: Floats, request: int) -> int:
    """Insert; returns the new count. The array must have room."""
    at = count
    while at > 0:
        above = heap[(at - 1) >> 1]
        if key[above] < key[request] or (key[above] == key[request] and above < request):
            break
        heap[at] = above
        at = (at - 1) >> 1
    heap[at] = request
    return count + 1


@part
def take(heap: Ints, count: int, key: Floats) -> int:
    """Remove the first (heap[0]); returns the new count."""
    count -= 1
    request = heap[count]
    at, child = 0, 1
    while child < count:
        below = heap[child]
        if child + 1 < count:
            other = heap[child + 1]
            if key[other] < key[below] or (key[other] == key[below] and other < below):
                child, below = child + 1, other
        if key[request] < key[below] or (key[request] == key[below] and request < below):
            break
        heap[at] = below
        at = child
        child = 2 * at + 1
    heap[at] = request
    return count
