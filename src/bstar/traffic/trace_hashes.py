"""Hash ids of a trace: how many tokens each covers, and the ids as dense numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from bstar.codec.safe_json import shown
from bstar.errors import ConfigError
from bstar.traffic.lengths import Ints
from bstar.traffic.load import BlockHashes


def block_hashes(
    file: Path, lines: list[int], input_tokens: Ints, hashes: list[list[Any]], tokens_per_block: int | None
) -> BlockHashes:
    """The ids of all requests, numbered 0, 1, …; ids that were equal stay equal.

    lines             line of each request, for errors
    tokens_per_block  None: what fits every prompt's count of ids
    Raises ConfigError where an id is no whole number or a count does not fit its prompt.
    """
    counts = np.fromiter((len(ids) for ids in hashes), dtype=np.int64, count=len(hashes))
    flat = _flat(file, lines, hashes)
    if tokens_per_block is None:
        tokens_per_block = _fitting(counts, input_tokens)
        if tokens_per_block is None:
            raise ConfigError(
                f"trace: {file}: no block size makes the number of hash_ids fit every input_length; "
                "say how many tokens an id covers by hash_block_tokens"
            )
    if tokens_per_block < 1:
        raise ConfigError(f"hash_block_tokens: must be at least 1, is {tokens_per_block}")
    surplus = np.flatnonzero((counts - 1) * tokens_per_block >= input_tokens)
    if surplus.size:
        row = int(surplus[0])
        raise ConfigError(
            f"trace: {file} line {lines[row]}: {counts[row]} hash_ids of {tokens_per_block} tokens are more than "
            f"its {input_tokens[row]} input tokens hold"
        )
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    return BlockHashes(offsets=offsets, ids=np.unique(flat, return_inverse=True)[1].astype(np.int64),
                       tokens_per_block=tokens_per_block)  # fmt: skip


def _flat(file: Path, lines: list[int], hashes: list[list[Any]]) -> Ints:
    for line, ids in zip(lines, hashes, strict=True):
        for value in ids:
            if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
                raise ConfigError(f"trace: {file} line {line}: hash id {shown(value)} is not a whole number of 64 bits")
    return np.fromiter((value for ids in hashes for value in ids), dtype=np.int64)


def _fitting(counts: Ints, input_tokens: Ints) -> int | None:
    """The block size with which each prompt has ⌈input/size⌉ ids, or else ⌊input/size⌋ of full blocks only."""
    some = counts > 0
    if some.all():  # ⌈i/c⌉ = n  ⇔  i/n ≤ c < i/(n - 1)
        more = counts > 1
        low = float((input_tokens / counts).max())
        high = float((input_tokens[more] / (counts[more] - 1)).min(initial=math.inf))
        found = _roundest(math.ceil(low), math.ceil(high) - 1 if high < math.inf else None)
        if found is not None:
            return found
    # ⌊i/c⌋ = n  ⇔  i/(n + 1) < c ≤ i/n
    low = float((input_tokens / (counts + 1)).max())
    high = float((input_tokens[some] / counts[some]).min(initial=math.inf))
    return _roundest(math.floor(low) + 1, math.floor(high) if high < math.inf else None)


def _roundest(low: int, high: int | None) -> int | None:
    """The first power of two in low … high, else low; None where the range is empty."""
    power = 1 << max(low - 1, 0).bit_length()
    if high is None or power <= high:
        return power
    return low if low <= high else None
