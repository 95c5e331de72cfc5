"""What the prompts hold: token ids or text for every request of a `Traffic`, with the parts that they share.

    own tokens          drawn for the request alone
    prefix group        the same for all requests of the group
    block hashes        equal ids are equal text (traces)
    session             the parent's prompt, its answer, and new tokens

Draws come from (salt, kind, number), so a request's text depends on nothing else and any worker can make it. A fresh
salt for every run keeps a server from finding last run's prompts in its prefix cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.measure.tokenizers import Tokenizer, text_of_length
from bstar.traffic.load import Traffic

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token ids that prompts are drawn from: first to last, both included."""

    first: int
    last: int

    def draw(self, salt: str, kind: str, number: int, count: int) -> Ints:
        """`count` ids, always the same for (salt, kind, number)."""
        digest = hashlib.blake2b(f"{salt}/{kind}/{number}".encode(), digest_size=16).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        return rng.integers(self.first, self.last + 1, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A prompt that a data set gives: a text, token ids, or chat messages."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is sent: one of the three."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a parent answered, for the next turn."""

    text: str = ""
    ids: tuple[int, ...] = ()


class Contents:
    """The prompts of a traffic, one by one.

    as_ids    prompts are token ids (only for completions); else text by `tokenizer`
    overhead_tokens   what the chat template adds to one message: taken off the drawn tokens
    """

    def __init__(
        self, traffic: Traffic, vocabulary: Vocabulary, *, salt: str, chat: bool = False, as_ids: bool = True,
        tokenizer: Tokenizer | None = None, overhead_tokens: int = 0, given: Sequence[Given] | None = None,
    ) -> None:  # fmt: skip
        self._traffic, self._vocabulary, self._salt = traffic, vocabulary, salt
        self._chat, self._as_ids = chat, as_ids and not chat
        self._tokenizer, self._overhead = tokenizer, overhead_tokens
        self._given = given
        self._texts: dict[tuple[str, int], str] = {}

    def ids(self, request: int) -> Ints:
        """The token ids of a request without a parent; shape (input_tokens,)."""
        traffic = self._traffic
        total = int(traffic.input_tokens[request])
        hashes = traffic.block_hashes
        if hashes is not None:
            size = hashes.tokens_per_block
            blocks = [self._vocabulary.draw(self._salt, "block", int(h), size) for h in hashes.of(request)]
            found = np.concatenate(blocks)[:total] if blocks else np.zeros(0, dtype=np.int64)
            missing = total - found.size
            return np.concatenate((found, self._own(request, missing))) if missing else found
        group, shared = int(traffic.prefix_group[request]), int(traffic.prefix_tokens[request])
        if group < 0 or shared == 0:
            return self._own(request, total)
        prefix = self._vocabulary.draw(self._salt, "prefix", group, shared)
        return np.concatenate((prefix, self._own(request, total - shared)))

    def prompt(self, request: int, before: Prompt | None = None, answer: Answer | None = None) -> Prompt:
        """The prompt of a request; `before` and `answer` are its parent's."""
        if self._given is not None:
            return self._of_given(self._given[request % len(self._given)])
        if before is not None:
            return self._next_turn(request, before, answer or Answer())
        if self._as_ids:
            return Prompt(ids=self.ids(request).tolist())
        text = self._first_text(request)
        return Prompt(messages=[{"role": "user", "content": text}]) if self._chat else Prompt(text=text)

    def _next_turn(self, request: int, before: Prompt, answer: Answer) -> Prompt:
        traffic = self._traffic
        parent = int(traffic.parent[request])
        total, said = int(traffic.input_tokens[request]), int(traffic.output_tokens[parent])
        new = total - int(traffic.input_tokens[parent]) - said
        if before.ids is not None:
            spoken = list(answer.ids) or self._vocabulary.draw(self._salt, "answer", parent, said).tolist()
            own = self._own(request, max(new, 0)).tolist()
            return Prompt(ids=(before.ids + spoken + own)[:max(total, 1)])
        added = self._text_of(self._own(request, max(new - self._overhead, 1)))
        if before.messages is not None:
            reply = {"role": "assistant", "content": answer.text}
            return Prompt(messages=[*before.messages, reply, {"role": "user", "content": added}])
        return Prompt(text=f"{before.text}{answer.text}{added}")

    def _first_text(self, request: int) -> str:
        """A text of the request's tokens; a shared prefix is the same text for the whole group."""
        traffic = self._traffic
        ids = self.ids(request)
        if self._overhead:
            ids = ids[: max(ids.size - self._overhead, 1)]
        shared = int(traffic.prefix_tokens[request]) if int(traffic.prefix_group[request]) >= 0 else 0
        if not 0 < shared < ids.size or traffic.block_hashes is not None:
            return self._text_of(ids)
        key = ("prefix", int(traffic.prefix_group[request]))
        if key not in self._texts:
            self._texts[key] = self._text_of(ids[:shared])
        return self._texts[key] + self._text_of(ids[shared:])

    def _text_of(self, ids: Ints) -> str:
        assert self._tokenizer is not None
        return text_of_length(self._tokenizer, ids.tolist(), ids.size)

    def _of_given(self, given: Given) -> Prompt:
        if self._chat:
            if given.messages is not None:
                return Prompt(messages=[dict(m) for m in given.messages])
            text = given.text
            if text is None:
                assert self._tokenizer is not None and given.ids is not None
                text = self._tokenizer.decode(list(given.ids))
            return Prompt(messages=[{"role": "user", "content": text}])
        if given.ids is not None:
            return Prompt(ids=list(given.ids))
        if given.text is not None:
            return Prompt(text=given.text)
        return Prompt(text="\n".join(str(m.get("content", "")) for m in given.messages or ()))

    def _own(self, request: int, count: int) -> Ints:
        return self._vocabulary.draw(self._salt, "own", request, count)


def expected_cached_fraction(traffic: Traffic) -> float:
    """Share of prompt tokens that an endless prefix cache, empty at the start, would find."""
    inputs = traffic.input_tokens
    if traffic.block_hashes is not None:
        return traffic.block_hashes.repeated_fraction
    found = np.zeros(inputs.size)
    group = np.asarray(traffic.prefix_group)
    for number in np.unique(group[group >= 0]):
        members = np.flatnonzero(group == number)
        found[members[1:]] = np.asarray(traffic.prefix_tokens)[members[1:]]
    parents = np.asarray(traffic.parent)
    child = np.flatnonzero(parents >= 0)
    known = inputs[parents[child]] + traffic.output_tokens[parents[child]]
    found[child] = np.minimum(known, inputs[child])
    return float(found.sum() / inputs.sum())
