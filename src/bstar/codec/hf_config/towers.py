"""What vision and audio towers are counted from: linear layers, transformer blocks, sizes that may be pairs."""

from __future__ import annotations

from collections.abc import Callable

from bstar.codec.hf_config.reader import MAX_LAYERS, Reader

# (the tower's config, the whole config, the text model's hidden size) -> parameters
Tower = Callable[[Reader, Reader, int], int]


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """Parameters of a linear layer."""
    return inputs * outputs + (outputs if bias else 0)


def square(r: Reader, key: str, *, default: int | None = None) -> int:
    """Area of a size that is a number or a [height, width] pair."""
    value = r.find(key)
    if isinstance(value, list):
        if len(value) != 2:
            raise r.fail(key, "must be a number or a pair of numbers")
        return r.whole(key, value[0], low=1, high=1 << 16) * r.whole(key, value[1], low=1, high=1 << 16)
    return r.size(key, default=default, high=1 << 16) ** 2


def scalar(r: Reader, key: str, *, default: int | None = None) -> int:
    """A size that may be written as a list of one or two equal numbers."""
    value = r.find(key)
    if isinstance(value, list) and value:
        return r.whole(key, value[0], low=1, high=1 << 16)
    return r.size(key, default=default, high=1 << 16)


def transformer_block(
    h: int, width: int, *, norm_bias: bool = True, attention_bias: bool = True, out_bias: bool | None = None,
    gated: bool = False, ffn_bias: bool = True, norms: int = 2,
) -> int:
    """One transformer block: norms, q k v and output, a gated or plain FFN."""
    attention = 3 * linear(h, h, attention_bias) + linear(h, h, attention_bias if out_bias is None else out_bias)
    ffn = (2 if gated else 1) * linear(h, width, ffn_bias) + linear(width, h, ffn_bias)
    return attention + ffn + norms * (2 * h if norm_bias else h)


def layer_count(r: Reader, *keys: str) -> int:
    """A tower's number of layers."""
    return r.size(*keys, low=0, high=MAX_LAYERS)
