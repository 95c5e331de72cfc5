"""Caches of several page sizes side by side in one block: compressed attention (DeepSeek V4).

Its layers keep a window, compressed latents, index keys and pending inputs, whose pages differ. They cannot be
made equal without waste, so vLLM packs them: a block id belongs to one group at a time, and a block is as large
as the group that needs most. How the block is laid out changed:

    tuples   0.20 – 0.22   every group reserves the same number of tuples (one page of each growing size)
    slots    0.23 – 0.26   per page size, as many slots as the group with most
    padded   0.27, 0.28    the widest group, its windowed pages still padded to the growing sizes
    widest   since 0.29    the widest group

Until 0.28 the check of max_model_len still reckons with tuples, until 0.26 the concurrency with the growing group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from bstar.physics.kv_pages import Page

Packing = Literal["tuples", "slots", "padded", "widest"]
Cache = tuple[int, Page]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShare:
    """A packed block before 0.29: its bytes, what the check reckons per block, and the growing group's bytes."""

    block_bytes: int
    checked_bytes: int
    full_bytes: int


def packed_share(groups: Sequence[Sequence[int]], full: Sequence[bool], packing: Packing) -> PackedShare:
    """The share from each group's page sizes (bytes) and which group grows with the sequence."""
    counts = [Counter(pages) for pages in groups]
    growing = next(c for c, grows in zip(counts, full, strict=True) if grows)
    tuples = max(max(c.values()) for c in counts)
    checked = tuples * sum(growing)
    sizes = {size for c in counts for size in c}
    block = {
        "tuples": checked,
        "slots": sum(size * max(c[size] for c in counts) for size in sizes),
        "padded": max(sum(pages) for pages in groups),
        "widest": max(sum(pages) for pages in groups),
    }[packing]
    return PackedShare(block_bytes=block, checked_bytes=checked,
                       full_bytes=sum(size * n for size, n in growing.items()))


def packed_members(
    caches: Sequence[Cache], one_family: Callable[[Sequence[Page]], bool]
) -> list[list[Cache]]:
    """Mixed page sizes side by side in one block: kinds with one page size are split down to the pattern's repeats."""
    buckets: list[list[Cache]] = []
    for cache in caches:
        for bucket in buckets:
            if one_family([p for _, p in bucket] + [cache[1]]):
                bucket.append(cache)
                break
        else:
            buckets.append([cache])
    counted = [Counter(p.page_bytes for _, p in bucket) for bucket in buckets]
    balanced = [len(set(c.values())) == 1 for c in counted]
    repeats = [max(c.values()) for c in counted]
    floor = max((r for r, c, even in zip(repeats, counted, balanced, strict=True) if even and len(c) > 1), default=0)
    target = _least_padding([r for r, even in zip(repeats, balanced, strict=True) if even], floor) if floor else 0
    numbers = [
        ceil(r / target) if even and target else 1 for r, even in zip(repeats, balanced, strict=True)
    ]

    def is_state(bucket: list[Cache]) -> bool:
        kind = bucket[0][1].kind
        return kind == "state" or (not target and kind == "sliding")

    anchor = max(
        sum(ceil(n / (len(bucket) if is_state(bucket) else number)) * size for size, n in count.items())
        for bucket, count, number in zip(buckets, counted, numbers, strict=True)
    )
    groups: list[list[Cache]] = []
    for bucket, count, number in zip(buckets, counted, numbers, strict=True):
        if is_state(bucket):
            number = max(number, ceil(len(bucket) / max(anchor // bucket[0][1].page_bytes, 1)))
        if number == 1:
            groups.append(bucket)
            continue
        columns = [[c for c in bucket if c[1].page_bytes == size] for size in count]
        rows = list(zip(*columns, strict=False))
        groups += [[c for row in rows[i::number] for c in row] for i in range(number)]
    return groups


def _least_padding(values: Sequence[int], floor: int) -> int:
    """The chunk size ≥ floor that pads `values` least when each is rounded up to a multiple (ties: larger)."""
    return min(range(max(floor, 1), max([*values, floor]) + 1), key=lambda d: (sum(-v % d for v in values), -d))
