"""Which chunks of a stream are tokens, and how many each holds: decided when the answer is whole.

A stream's own signs come first: `token_ids` or running counts in the chunks say it exactly. Else a chunk with text is
at least one token, and the total of `usage` decides about the others:

    chunks without text   are tokens where the total cannot be reached without them (half a character, an end token)
    a role-only chunk     never is
    total > chunks        several tokens came together; which chunks held them is unknown, so they are spread evenly
    total < text chunks   the two contradict each other: reported, and the server's total is used for rates
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bstar.measure.outcome import BLANK, FINAL, ROLE, TEXT

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Where a request's output tokens were counted.
USAGE, IDS, TOKENIZER, CHUNKS, NONE = "usage", "token_ids", "tokenizer", "chunks", "none"
SOURCES: Final = (USAGE, IDS, TOKENIZER, CHUNKS, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The tokens of one answer.

    times_s    of the chunks that hold tokens
    per_chunk  tokens in each of them
    total      output tokens
    source     where the total comes from
    spread     whether per_chunk is an even guess
    mismatch   whether the server's total contradicts its own stream
    """

    times_s: Floats
    per_chunk: Ints
    total: int
    source: str
    spread: bool = False
    mismatch: bool = False


_NOTHING = Counted(times_s=np.zeros(0), per_chunk=np.zeros(0, dtype=np.int64), total=0, source=NONE)


def settle(
    times_s: Floats, kinds: bytes, tokens: Ints, usage_total: int, text_tokens: int | None = None
) -> Counted:
    """The tokens of a stream.

    tokens        per chunk as the server says: 0 unknown, -1 none
    usage_total   completion_tokens of `usage`, -1 unknown
    text_tokens   what a tokenizer counted in the text, where there is no usage
    """
    if len(kinds) == 0:
        return _NOTHING if usage_total <= 0 else Counted(
            times_s=_NOTHING.times_s, per_chunk=_NOTHING.per_chunk, total=usage_total, source=USAGE)  # fmt: skip
    if tokens.size and (tokens != 0).all():
        return _said(times_s, tokens, usage_total)
    kind = np.frombuffer(kinds, dtype=np.uint8)
    texts = kinds.count(TEXT)
    known = usage_total if usage_total >= 0 else text_tokens
    source = USAGE if usage_total >= 0 else (TOKENIZER if text_tokens is not None else CHUNKS)
    chosen = kind == TEXT
    if known is not None:
        blanks = kinds.count(BLANK)
        if known > texts and blanks:
            chosen = chosen | (kind == BLANK)
        if known > texts + blanks and kinds.count(FINAL):
            chosen = chosen | (kind == FINAL)
    count = int(np.count_nonzero(chosen))
    if known is None:
        return Counted(times_s=times_s[chosen], per_chunk=np.ones(count, dtype=np.int64), total=count, source=CHUNKS)
    if count == 0:  # tokens without any chunk that could hold them: only role chunks
        return Counted(times_s=times_s[:0], per_chunk=np.zeros(0, dtype=np.int64), total=known, source=source,
                       mismatch=known > 0)
    if known == 0:
        return Counted(times_s=times_s[chosen], per_chunk=np.ones(count, dtype=np.int64), total=count, source=CHUNKS,
                       mismatch=source == USAGE)
    mismatch = known < texts
    if known <= count:
        return Counted(times_s=times_s[chosen], per_chunk=_ones(count, known), total=known, source=source,
                       mismatch=mismatch, spread=known < count)
    return Counted(times_s=times_s[chosen], per_chunk=_evenly(known, count), total=known, source=source, spread=True)


def _said(times_s: Floats, tokens: Ints, usage_total: int) -> Counted:
    """Where the chunks themselves say how many tokens they hold."""
    chosen = tokens > 0
    per_chunk = tokens[chosen].astype(np.int64)
    total = int(per_chunk.sum())
    wrong = usage_total >= 0 and usage_total != total
    return Counted(times_s=times_s[chosen], per_chunk=per_chunk, total=total,
                   source=IDS if wrong or usage_total < 0 else USAGE, mismatch=wrong)


def _ones(count: int, known: int) -> Ints:
    """One token a chunk, none in the last ones where there are fewer tokens than chunks."""
    found = np.ones(count, dtype=np.int64)
    found[known:] = 0
    return found


def _evenly(total: int, count: int) -> Ints:
    """`total` tokens over `count` chunks, as even as whole numbers are."""
    edges = np.arange(count + 1, dtype=np.int64) * total // count
    return np.diff(edges)


def token_gaps(times_s: Floats, per_chunk: Ints) -> Floats:
    """The gaps between the tokens of one answer, seconds: those that come together are 0 apart."""
    held = per_chunk > 0
    between = np.diff(times_s[held])
    extra = int(per_chunk[held].sum()) - int(np.count_nonzero(held))
    return np.concatenate((between, np.zeros(extra))) if extra else between


__all__ = ["CHUNKS", "IDS", "NONE", "ROLE", "SOURCES", "TOKENIZER", "USAGE", "Counted", "settle", "token_gaps"]
