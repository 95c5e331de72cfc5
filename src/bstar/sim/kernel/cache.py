"""The block pool of `bstar.sim.blocks` in arrays, with blocks for decoding dealt late.

A decoding slot's new blocks leave the free queue when the step that needs them is run (what they cached is
forgotten then), but lie in a stash until the slot is freed: blocks without a key are all alike.
"""

from __future__ import annotations

from bstar.sim.kernel.compiled import part
from bstar.sim.kernel.state import Blocks, Keys, Load


@part
def _unlink(blocks: Blocks, block: int) -> None:
    after, before = blocks.after[block], blocks.before[block]
    blocks.after[before] = after
    blocks.before[after] = before


@part
def _forget(blocks: Blocks, block: int) -> None:
    key = blocks.key[block]
    if key < 0:
        return
    younger, older = blocks.younger[block], blocks.older[block]
    if younger == block:
        blocks.first[key] = 0
    else:
        blocks.older[younger] = older
        blocks.younger[older] = younger
        if blocks.first[key] == block:
            blocks.first[key] = younger
    blocks.key[block] = -1


@part
def _take(blocks: Blocks) -> int:
    """The first of the free queue."""
    block = blocks.after[0]
    _unlink(blocks, block)
    _forget(blocks, block)
    blocks.references[block] = 1
    return block


@part
def stash(blocks: Blocks, count: int) -> None:
    """Take `count` blocks for decoding slots."""
    n = blocks.sizes[0]
    for i in range(count):
        blocks.stash[n + i] = _take(blocks)
    blocks.sizes[0] = n + count


@part
def take_for(blocks: Blocks, slot: int, count: int) -> None:
    """Take `count` blocks for a prefilling slot."""
    held = blocks.held[slot]
    for i in range(count):
        blocks.table[slot, held + i] = _take(blocks)
    blocks.held[slot] = held + count


@part
def block_key(keys: Keys | Load, request: int, i: int) -> int:
    if i < keys.shared_blocks[request]:
        per = keys.blocks_per_hash
        return keys.hashes[keys.hash_start[request] + i // per] * per + i % per
    return keys.own_key[request] + i


@part
def name_upto(blocks: Blocks, keys: Keys | Load, request: int, slot: int, count: int) -> None:
    """The first `count` blocks of a slot are full: those without a key get theirs."""
    for i in range(blocks.named[slot], count):
        block, key = blocks.table[slot, i], block_key(keys, request, i)
        blocks.key[block] = key
        oldest = blocks.first[key]
        if oldest == 0:
            blocks.first[key] = block
            blocks.younger[block] = block
            blocks.older[block] = block
        else:
            youngest = blocks.older[oldest]
            blocks.younger[youngest] = block
            blocks.older[block] = youngest
            blocks.younger[block] = oldest
            blocks.older[oldest] = block
    if count > blocks.named[slot]:
        blocks.named[slot] = count


@part
def find_hits(blocks: Blocks, keys: Keys | Load, request: int, limit: int) -> tuple[int, int]:
    """(cached blocks from the start, those of them that nobody refers to), at most `limit`."""
    hits, unused = 0, 0
    while hits < limit:
        block = blocks.first[block_key(keys, request, hits)]
        if block == 0:
            break
        unused += blocks.references[block] == 0
        hits += 1
    return hits, unused


@part
def adopt_hits(blocks: Blocks, keys: Keys | Load, request: int, slot: int, hits: int) -> None:
    """A new slot starts from `hits` cached blocks."""
    for i in range(hits):
        block = blocks.first[block_key(keys, request, i)]
        if blocks.references[block] == 0:
            _unlink(blocks, block)
        blocks.references[block] += 1
        blocks.table[slot, i] = block
    blocks.held[slot] = hits
    blocks.named[slot] = hits


@part
def release(blocks: Blocks, keys: Keys | Load, request: int, slot: int, held: int, full: int) -> int:
    """Free a slot that has `held` blocks, the first `full` of them full; returns how many became free."""
    have, n = blocks.held[slot], blocks.sizes[0]
    while have < held:
        n -= 1
        blocks.table[slot, have] = blocks.stash[n]
        have += 1
    blocks.sizes[0] = n
    name_upto(blocks, keys, request, slot, full)
    freed = 0
    # Last block first. Those with a key go to the end of the queue …
    for i in range(held - 1, -1, -1):
        block = blocks.table[slot, i]
        blocks.references[block] -= 1
        if blocks.references[block] == 0:
            freed += 1
            if blocks.key[block] >= 0:
                last = blocks.before[0]
                blocks.after[last] = block
                blocks.before[block] = last
                blocks.after[block] = 0
                blocks.before[0] = block
    # … and those without to its front, the last one first of all.
    for i in range(blocks.named[slot], held):
        block = blocks.table[slot, i]
        head = blocks.after[0]
        blocks.after[0] = block
        blocks.before[block] = 0
        blocks.after[block] = head
        blocks.before[head] = block
    blocks.held[slot] = 0
    blocks.named[slot] = 0
    return freed
