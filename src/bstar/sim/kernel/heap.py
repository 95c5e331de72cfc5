"""A binary heap of whole numbers in an array, smallest first. The caller keeps the count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bstar.sim.kernel.compiled import part

Ints = NDArray[np.int64]


@part
def push(heap: Ints, count: int, key: int) -> int:
    """Insert; returns the new count. The array must have room."""
    at = count
    while at > 0:
        parent = (at - 1) >> 1
        if heap[parent] <= key:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = key
    return count + 1


@part
def pop(heap: Ints, count: int) -> int:
    """Remove the smallest (heap[0]); returns the new count."""
    count -= 1
    key = heap[count]
    at = 0
    child = 1
    while child < count:
        if child + 1 < count and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
        child = 2 * at + 1
    heap[at] = key
    return count
