"""What the KV blocks of each request hold, as keys: equal keys, equal content from the start of the prompt on."""

from __future__ import annotations

from collections.abc import Callable

from bstar.sim.blocks import Key
from bstar.traffic.load import Traffic

BlockKey = Callable[[int], Key]


def block_keys(traffic: Traffic, block_size: int) -> list[BlockKey]:
    """One function per request: block number → key.

    A prompt shares its start with its group, or with the prompt and answer of the turn before; where a trace says
    what prompts hold, an id stands for all text up to its block. Everything else is a request's own.
    """
    if traffic.block_hashes is not None:
        return _hashed(traffic, block_size)
    out: list[BlockKey] = []
    inputs, outputs = traffic.input_tokens.tolist(), traffic.output_tokens.tolist()
    rows = zip(traffic.parent.tolist(), traffic.prefix_group.tolist(), traffic.prefix_tokens.tolist(), strict=True)
    for rank, (parent, group, prefix) in enumerate(rows):
        if parent >= 0:
            shared = min(inputs[parent] + outputs[parent], inputs[rank])
            out.append(_joined(("own", rank), out[parent], shared // block_size))
        elif group >= 0:
            out.append(_joined(("own", rank), _named(("group", group)), prefix // block_size))
        else:
            out.append(_named(("own", rank)))
    return out


def _named(owner: object) -> BlockKey:
    return lambda i: (owner, i)


def _joined(owner: object, start: BlockKey, shared: int) -> BlockKey:
    return lambda i: start(i) if i < shared else (owner, i)


def _hashed(traffic: Traffic, block_size: int) -> list[BlockKey]:
    hashes = traffic.block_hashes
    assert hashes is not None
    unit = hashes.tokens_per_block

    def of(rank: int, ids: list[int], tokens: int) -> BlockKey:
        def key(i: int) -> Key:
            last = (i + 1) * block_size - 1
            if last >= tokens or last // unit >= len(ids):
                return (("own", rank), i)
            return (("id", ids[last // unit]), i)

        return key

    return [of(rank, hashes.of(rank).tolist(), tokens) for rank, tokens in enumerate(traffic.input_tokens.tolist())]
