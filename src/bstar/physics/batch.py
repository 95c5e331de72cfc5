"""The shape of one engine step: which sequences take how many new tokens at which context.

    row of a shape      count sequences, each with
        new_tokens      q, tokens computed in this step (1 for a plain decode)
        context_after   k + q, tokens of the sequence when the step is done
        is_prefill      prompt tokens (only the last one is sampled) or generated ones (all are)

Rows may stand for many sequences (`count`) and for means (fractional contexts), so that a decode batch of
10,000 is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchShape:
    """One step of a whole replica (all attention-data-parallel ranks together); four arrays of equal length."""

    new_tokens: FloatArray
    context_after: FloatArray
    count: FloatArray
    is_prefill: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if np.any(self.new_tokens < 0) or np.any(self.count < 0):
            raise SpecError("batch: new tokens and counts must not be negative")
        if np.any(self.context_after < self.new_tokens):
            raise SpecError("batch: the context after a step includes its new tokens; it cannot be smaller than them")

    @classmethod
    def decode(cls, batch: float, context: float, *, tokens_per_sequence: float = 1.0) -> BatchShape:
        """`batch` sequences that each make `tokens_per_sequence` tokens at `context` tokens (these included).

        tokens_per_sequence above 1 is a verification step of speculative decoding.
        """
        q = float(tokens_per_sequence)
        return cls.from_rows([(q, max(float(context), q), float(batch), False)])

    @classmethod
    def prefill(cls, new_tokens: float, cached_tokens: float = 0.0, *, count: float = 1.0) -> BatchShape:
        """`count` prompt chunks of `new_tokens` on `cached_tokens` each."""
        return cls.from_rows([(float(new_tokens), float(new_tokens + cached_tokens), float(count), True)])

    @classmethod
    def from_triples(cls, triples: Iterable[Sequence[float]]) -> BatchShape:
        """From (new_tokens, context_after, is_prefill) a sequence, as `step_cost` takes them."""
        rows = []
        for triple in triples:
            if len(triple) != 3:
                raise SpecError(f"batch: {triple!r} is not (new_tokens, context_after, is_prefill)")
            rows.append((float(triple[0]), float(triple[1]), 1.0, bool(triple[2])))
        return cls.from_rows(rows)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[float, float, float, bool]]) -> BatchShape:
        """From (new_tokens, context_after, count, is_prefill) rows."""
        table = np.array(rows, dtype=float).reshape(-1, 4)
        return cls(
            new_tokens=table[:, 0], context_after=table[:, 1], count=table[:, 2], is_prefill=table[:, 3].astype(bool)
        )

    def __add__(self, other: BatchShape) -> BatchShape:
        """Both in one step (mixed batch)."""
        return BatchShape(
            new_tokens=np.concatenate([self.new_tokens, other.new_tokens]),
            context_after=np.concatenate([self.context_after, other.context_after]),
            count=np.concatenate([self.count, other.count]),
            is_prefill=np.concatenate([self.is_prefill, other.is_prefill]),
        )

    @property
    def tokens(self) -> float:
        """New tokens of the step."""
        return float(self.count @ self.new_tokens)

    @property
    def decode_sequences(self) -> float:
        return float(self.count @ ~self.is_prefill)

    @property
    def prefill_sequences(self) -> float:
        return float(self.count @ self.is_prefill)

    @property
    def sampled_tokens(self) -> float:
        """Positions that need logits: the last one of each prompt chunk, every generated one."""
        return float(self.count @ np.where(self.is_prefill, 1.0, self.new_tokens))
