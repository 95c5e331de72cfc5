"""What the prompts of a file share with each other: repeated ones, and common beginnings.

Exactly, in the order of the file: of a prompt that was sent before all of it, of a new one the longest beginning that
an earlier one has too. In token ids where the file has them, else in characters: as a share of the prompt's tokens
nearly the same.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.measure.contents import Given, expected_cached_fraction
from bstar.traffic.load import Traffic

Ints = NDArray[np.int64]

Key = str | tuple[int, ...]


def key_of(given: Given) -> Key:
    """Equal for prompts that are the same to a server; beginnings of it are the prompt's."""
    if given.ids is not None:
        return given.ids
    if given.text is not None:
        return given.text
    return "".join(f"{m.get('role')}\0{_content(m.get('content'))}\0" for m in given.messages or ())


def num_distinct(given: Sequence[Given]) -> int:
    """How many different prompts there are."""
    return len({key_of(one) for one in given})


def expected_fraction(traffic: Traffic, requests: Ints, given: Sequence[Given] | None) -> float:
    """Share of prompt tokens that an endless prefix cache, empty at the start, would find.

    requests   numbers of those that were sent: request r has prompt r modulo the number of prompts
    given      None: prompts are drawn as the traffic shares them
    """
    if given is None:
        return expected_cached_fraction(traffic)
    tokens = np.asarray(traffic.input_tokens, dtype=float)[requests]
    prompts, first = np.unique(requests % len(given), return_index=True)
    found = np.ones(tokens.size)
    found[first] = _found_in_earlier([key_of(given[i]) for i in prompts.tolist()])
    return float(found @ tokens / tokens.sum()) if tokens.size else 0.0


def _found_in_earlier(keys: Sequence[Key]) -> list[float]:
    """Of each key the share that an earlier one begins with too."""
    earlier: dict[type, list[Any]] = {str: [], tuple: []}
    out = []
    for key in keys:
        known = earlier[type(key)]
        place = bisect_left(known, key)
        # Of all that are sorted before and after it the neighbours have most in common with it.
        common = max((_common(key, other) for other in known[max(place - 1, 0):place + 1]), default=0)
        out.append(common / max(len(key), 1))
        if common < len(key):
            known.insert(place, key)
    return out


def _common(one: Key, other: Key) -> int:
    """Length of the common beginning, by halving: slices are compared at memory's speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _content(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
