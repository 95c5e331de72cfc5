"""What a worker process needs to send its share of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bstar.measure.contents import Contents, Given, Vocabulary
from bstar.measure.endpoint import Endpoint
from bstar.measure.payloads import BodyOptions
from bstar.measure.tokenizers import LocalTokenizer, Tokenizer, WordTokenizer
from bstar.traffic.load import Traffic

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """How prompts are made.

    as_ids           token ids (completions of servers that take them)
    tokenizer_file   a tokenizer.json for exact texts; None: words, `tokens_per_word` of them by the server's count
    overhead_tokens  of the chat template
    salt             of the drawn contents
    """

    as_ids: bool = True
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(first=100, last=31_000))
    tokenizer_file: str | None = None
    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    salt: str = "0"

    def tokenizer(self) -> Tokenizer:
        if self.tokenizer_file is not None:
            return LocalTokenizer(self.tokenizer_file)
        return WordTokenizer(self.tokens_per_word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A share of a load.

    share          which requests of the traffic, in their order
    addresses      (address, port) of the server, looked up once
    given          prompts of a data set, instead of drawn ones
    max_in_flight  an open loop waits with more than so many; None: no cap
    stop_after_s   nothing is sent later than that; None: to the end of the load
    keep_text      keep answers (to count their tokens where the server does not)
    """

    endpoint: Endpoint
    addresses: tuple[tuple[str, int], ...]
    body: BodyOptions
    traffic: Traffic
    share: Ints
    text: TextSource = field(default_factory=TextSource)
    given: tuple[Given, ...] | None = None
    max_in_flight: int | None = None
    stop_after_s: float | None = None
    keep_text: bool = False
    worker: int = 0

    def contents(self) -> Contents:
        text = self.text
        tokenizer = None if text.as_ids and self.body.api == "completions" else text.tokenizer()
        return Contents(
            self.traffic, text.vocabulary, salt=text.salt, chat=self.body.api == "chat", as_ids=text.as_ids,
            tokenizer=tokenizer, overhead_tokens=text.overhead_tokens, given=self.given,
        )  # fmt: skip


def split(job: Job, workers: int) -> list[Job]:
    """The jobs of so many workers: requests in turn, the turns of a session together, clients and caps shared out."""
    traffic = job.traffic
    clients = traffic.num_scheduled if traffic.concurrency is not None else workers
    count = max(1, min(workers, clients, int(np.count_nonzero(np.asarray(traffic.parent) < 0))))
    owner = owners(traffic, count)
    caps = _shares(job.max_in_flight, count)
    return [
        replace(job, share=np.flatnonzero(owner == w), worker=w, max_in_flight=caps[w]) for w in range(count)
    ]


def owners(traffic: Traffic, workers: int) -> Ints:
    """Which worker sends each request: the k-th without a parent goes to worker k mod workers, turns follow."""
    parents = np.asarray(traffic.parent)
    roots = parents < 0
    owner = np.where(roots, (np.cumsum(roots) - 1) % workers, -1)
    for request in np.flatnonzero(~roots):  # parents come first
        owner[request] = owner[parents[request]]
    return np.asarray(owner, dtype=np.int64)


def _shares(total: int | None, count: int) -> Sequence[int | None]:
    if total is None:
        return [None] * count
    return [max(total // count + (1 if w < total % count else 0), 1) for w in range(count)]
