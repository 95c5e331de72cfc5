"""The paged KV cache of one engine, block by block: vLLM 0.32's `v1/core/block_pool.py` and `kv_cache_manager.py`.

    held            blocks that a running request refers to (a shared prefix once)
    free queue      every other block, next to be reused first; those with a key still serve prefix hits
    null block      never handed out, never counted
    held + free + 1 = num_blocks

A key names the content of a full block and of everything before it; equal keys mean equal KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Key = tuple[object, int]


class BlockPool:
    """Blocks by number; block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.references = [0] * num_blocks
        self.key_of: list[Key | None] = [None] * num_blocks
        self.cached: dict[Key, OrderedDict[int, None]] = {}

    def take(self, count: int) -> list[int]:
        """The first `count` of the free queue; what they cached is forgotten."""
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            key = self.key_of[block]
            if key is not None:
                same = self.cached[key]
                del same[block]
                if not same:
                    del self.cached[key]
                self.key_of[block] = None
            self.references[block] = 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more request refers to `blocks`; those in the free queue leave it."""
        for block in blocks:
            if self.references[block] == 0:
                del self.free[block]
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """A request lets go of `blocks`, in the order given.

        What nobody refers to goes to the end of the free queue if it has a key, else to its front: a block
        without a key can serve no hit.
        """
        keyless = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block]:
                continue
            if self.key_of[block] is None:
                keyless.append(block)
            else:
                self.free[block] = None
        for block in reversed(keyless):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def name(self, block: int, key: Key) -> None:
        """`block` is full and holds `key` from now on. Copies of one key live side by side, the oldest is hit."""
        self.key_of[block] = key
        self.cached.setdefault(key, OrderedDict())[block] = None

    def hits(self, keys: Iterable[Key]) -> list[int]:
        """Blocks of the longest cached run from the start of `keys`."""
        found: list[int] = []
        for key in keys:
            same = self.cached.get(key)
            if same is None:
                break
            found.append(next(iter(same)))
        return found
