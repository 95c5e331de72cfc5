"""What a RoPE scaling makes of max_position_embeddings: the longest context and the rows of the rotary table.

Follows vLLM 0.32 (`_get_and_verify_max_len` in config/model.py): a scaled kind multiplies the positions by its
factor, except where max_position_embeddings already is the extended length. YaRN is among the exceptions since
0.30; until then vLLM took original_max_position_embeddings · factor. The tables are those of
model_executor/layers/rotary_embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bstar.codec.hf_config.reader import MAX_CONTEXT, Reader

_LONGROPE = ("longrope", "su")
# Kinds that state the extended length as max_position_embeddings.
_EXTENDED = (*_LONGROPE, "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "telechat3-yarn")
_YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Tokens a model is described for.

    longest       the largest max_model_len of the current engine
    default       its max_model_len where none is asked for, if another
    scaled        YaRN: original length · factor, if another than `longest`
    rotary_rows   rows of the rotary table, if another number than `longest`
    """

    longest: int
    default: int | None = None
    scaled: int | None = None
    rotary_rows: int | None = None


def positions_of(text: Reader, positions: int) -> Positions:
    """The positions of a config that states `positions` (max_position_embeddings)."""
    longest, default, scaled, rows = positions, None, None, None
    gemma3 = text.model_type.startswith("gemma3")  # its 131,072 are scaled already
    for rope in _ropes(text):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        factor = _factor(text, rope)
        if kind in _LONGROPE:
            original = text.optional_size("original_max_position_embeddings", high=MAX_CONTEXT)
            default = original if original is not None and original < positions else None
        elif kind in _YARN:
            extended = int(_original(text, rope, positions) * factor)
            rows = extended if extended != positions else None
            scaled = extended if kind == "yarn" and extended != positions else None
        elif kind not in _EXTENDED and factor != 1:
            longest = positions if gemma3 else int(positions * factor)
            rows = int(positions * factor) if kind == "linear" else None
    return Positions(longest=longest, default=default, scaled=scaled, rotary_rows=rows)


def _ropes(text: Reader) -> list[Mapping[str, Any]]:
    """The scalings of a config: one, or one for each kind of layer."""
    rope = text.raw.get("rope_scaling") or text.raw.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return []
    nested = [r for r in rope.values() if isinstance(r, Mapping)]
    return [rope] if "rope_type" in rope or "type" in rope or "factor" in rope or not nested else nested


def _factor(text: Reader, rope: Mapping[str, Any]) -> float:
    factor = rope.get("factor")
    if factor is None:
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor <= 4096:
        raise text.fail("rope_scaling.factor", "must be a number of 1 to 4096")
    return float(factor)


def _original(text: Reader, rope: Mapping[str, Any], positions: int) -> int:
    """The length before scaling; transformers takes max_position_embeddings where it is not stated."""
    value = rope.get("original_max_position_embeddings")
    if value is None:
        found = text.optional_size("original_max_position_embeddings", high=MAX_CONTEXT)
        return positions if found is None else found
    return text.whole("rope_scaling.original_max_position_embeddings", value, low=1, high=MAX_CONTEXT)
