"""Named random streams: one generator per purpose, so that drawing more of one thing never changes another.

A stream is fixed by (seed, name) alone. Adding a stream, or drawing a different count from one, leaves
the bits of all others as they were; a common seed therefore pairs two loads that differ in one respect
(the same arrivals with longer answers, the same requests under another policy).
"""

from __future__ import annotations

import hashlib

import numpy as np

from bstar.errors import SpecError

# The names in use. A new purpose takes a new name; a name is never renamed, or its draws change.
ARRIVALS, INPUT, OUTPUT, JOINT = "arrivals", "input", "output", "joint"
PREFIX_GROUP, PREFIX_LENGTH = "prefix-group", "prefix-length"
TURNS, THINK, START, FIRST_INPUT = "turns", "think", "start", "first-input"


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator of purpose `name` under `seed`, at its start.

    PCG64 over a SeedSequence of the seed, with the 128-bit BLAKE2 digest of the name as its spawn key.
    Raises SpecError for a seed that is no whole number of at least 0.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    words = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(check_seed(seed), spawn_key=words)))


def check_seed(seed: int) -> int:
    """`seed` as a plain int. Raises SpecError where it is none, or negative."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SpecError(f"seed: must be a whole number of at least 0, is {seed!r}")
    return int(seed)
