"""`Traffic`: the requests that a run is given, as arrays, one entry per request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bstar.errors import SpecError
from bstar.traffic.lengths import Floats, Ints


def _zero() -> Ints:
    return np.zeros(1, dtype=np.int64)


def _none() -> Ints:
    return np.full(1, -1, dtype=np.int64)


def _no_time() -> Floats:
    return np.zeros(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockHashes:
    """What the prompts hold, in blocks of `tokens_per_block` tokens: equal ids are equal text up to there.

    offsets   shape (n + 1,): request r has ids[offsets[r]:offsets[r + 1]]
    ids       whole numbers from 0; the last block of a prompt may be partly filled
    """

    offsets: Ints
    ids: Ints
    tokens_per_block: int

    @property
    def repeated_fraction(self) -> float:
        """Share of blocks that an earlier request (or this one) already had: the hits of an endless cache."""
        return 1.0 - np.unique(self.ids).size / self.ids.size if self.ids.size else 0.0

    def of(self, request: int) -> Ints:
        """The ids of one request."""
        return self.ids[self.offsets[request] : self.offsets[request + 1]]

    def take(self, index: Ints) -> BlockHashes:
        """The hashes of the requests `index`, in that order."""
        counts = np.diff(self.offsets)[index]
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        where = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][index] - offsets[:-1], counts)
        return replace(self, offsets=offsets, ids=self.ids[where])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Requests; request r is entry r of every array. Equal arrivals are served in the order of r.

    arrival_s       seconds; ascending, then nan for every request whose arrival the run itself decides:
                    a later turn of a session, and in a closed loop all but each client's first
    input_tokens    the whole prompt, shared prefix and history included; at least 1
    output_tokens   at least 1, the first of them made by the prefill
    priority        as in vLLM: the smaller, the sooner (0 unless given)
    prefix_group    requests of one group begin with the same `prefix_tokens` tokens (-1: none)
    prefix_tokens   how many, at most input_tokens (0 unless given)
    session         turns of one conversation have one number (-1: none). With a parent, the prompt begins
                    with the parent's prompt and answer
    turn            0 for the first turn
    parent          the request that must finish before this one is sent; always an earlier entry (-1: none)
    think_s         from the end of the parent (closed loop: of the client's last answer) to this arrival
    concurrency     closed loop with that many clients: whoever is free sends the next request without a
                    parent in the order of the entries. None: open loop
    warmup_requests the first so many entries are load, not measurement: metrics leave them out
    block_hashes    what the prompts hold, where a trace says so; None: see prefix_group and session

    Arrays that were not given are constant views without memory of their own; np.ascontiguousarray fills them.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    priority: Ints = field(default_factory=_zero)
    prefix_group: Ints = field(default_factory=_none)
    prefix_tokens: Ints = field(default_factory=_zero)
    session: Ints = field(default_factory=_none)
    turn: Ints = field(default_factory=_zero)
    parent: Ints = field(default_factory=_none)
    think_s: Floats = field(default_factory=_no_time)
    concurrency: int | None = None
    warmup_requests: int = 0
    block_hashes: BlockHashes | None = None
    name: str = ""
    source: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        count = np.size(self.input_tokens)
        if count < 1:
            raise SpecError("traffic: holds no request; ask for at least one")
        for name, kind in _ARRAYS.items():
            object.__setattr__(self, name, _column(name, getattr(self, name), kind, count))
        self._check_lengths()
        self._check_order()
        if self.concurrency is not None and self.concurrency < 1:
            raise SpecError(f"concurrency: must be at least 1, is {self.concurrency}")
        if not 0 <= self.warmup_requests < count:
            raise SpecError(f"warm-up: must leave some of the {count} requests, is {self.warmup_requests}")
        if self.block_hashes is not None and self.block_hashes.offsets.size != count + 1:
            raise SpecError("traffic: block_hashes needs one more offset than there are requests")

    def _check_lengths(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            low = int(getattr(self, name).min())
            if low < 1:
                raise SpecError(f"{name}: a request has at least 1 token, one has {low}")
        shared = self.prefix_tokens[:1] if is_constant(self.prefix_tokens) else self.prefix_tokens
        longest = self.input_tokens.min() if shared.size == 1 else self.input_tokens
        if ((shared < 0) | (shared > longest)).any():
            raise SpecError("prefix_tokens: must be between 0 and the request's input_tokens")
        if (self.think_s < 0).any() or np.isnan(self.think_s).any():
            raise SpecError("think_s: a think time is at least 0")

    def _check_order(self) -> None:
        times, given = self.arrival_s, self.num_scheduled
        if given == 0:
            raise SpecError("arrival_s: at least one request must have an arrival")
        head = times[:given]
        if np.isnan(head).any() or not np.isfinite(head[-1]) or head[0] < 0 or (head[1:] < head[:-1]).any():
            raise SpecError("arrival_s: must be finite, at least 0 and ascending, with the undecided (nan) ones last")
        if self.has_sessions or int(self.parent.min()) < -1:
            bad = self.parent >= np.arange(self.num_requests)
            if bad.any() or int(self.parent.min()) < -1:
                raise SpecError("parent: must be an earlier request, or -1")
        if given < self.num_requests and self.concurrency is None and (self.parent[given:] < 0).any():
            raise SpecError("arrival_s: in an open loop only a request with a parent may be without an arrival")

    @property
    def num_requests(self) -> int:
        return int(self.input_tokens.size)

    @property
    def num_scheduled(self) -> int:
        """Requests whose arrival is given; they come first."""
        return int(self.num_requests - np.count_nonzero(np.isnan(self.arrival_s)))

    @property
    def is_open_loop(self) -> bool:
        """Whether every arrival is given."""
        return self.num_scheduled == self.num_requests

    @property
    def span_s(self) -> float:
        """Last given arrival, in seconds from 0."""
        return float(self.arrival_s[self.num_scheduled - 1])

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of the given arrivals from 0 to the last; None for a closed loop or one instant."""
        if self.concurrency is not None or self.span_s <= 0:
            return None
        return self.num_scheduled / self.span_s

    @property
    def mean_input_tokens(self) -> float:
        return float(self.input_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        return float(self.output_tokens.mean())

    def head(self, count: int) -> Traffic:
        """The first `count` requests of an open or closed loop without sessions."""
        if self.has_sessions:
            raise SpecError("traffic: the first requests of sessions are not a load of their own; draw fewer sessions")
        return self.take(np.arange(min(count, self.num_requests)))

    def take(self, index: ArrayLike) -> Traffic:
        """The requests `index`, in that order; arrivals stay as they are. Not for sessions with parents."""
        chosen = np.asarray(index, dtype=np.int64)
        columns: dict[str, Any] = {name: _pick(getattr(self, name), chosen) for name in _ARRAYS}
        hashes = self.block_hashes.take(chosen) if self.block_hashes is not None else None
        return replace(self, **columns, block_hashes=hashes, warmup_requests=0)

    @property
    def has_sessions(self) -> bool:
        """Whether some request waits for another to finish."""
        return _any_numbered(self.parent)

    @property
    def has_prefixes(self) -> bool:
        """Whether prompts share text: by group, by session or by block."""
        grouped = _any_numbered(self.prefix_group) and int(self.prefix_tokens.max()) > 0
        return grouped or self.has_sessions or self.block_hashes is not None

    def scaled(self, factor: float) -> Traffic:
        """The same requests coming `factor` times as fast (think times stay)."""
        if not 0 < factor < float("inf"):
            raise SpecError(f"rate scale: must be positive and finite, is {factor}")
        return replace(self, arrival_s=self.arrival_s / factor)

    def fingerprint(self) -> str:
        """SHA-256 of everything a run depends on; equal loads have equal ones."""
        digest = hashlib.sha256()
        for name, kind in _ARRAYS.items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(getattr(self, name), dtype=kind).astype(f"<{kind[1:]}").tobytes())
        digest.update(f"{self.concurrency} {self.warmup_requests}".encode())
        if self.block_hashes is not None:
            digest.update(str(self.block_hashes.tokens_per_block).encode())
            digest.update(self.block_hashes.offsets.astype("<i8").tobytes())
            digest.update(self.block_hashes.ids.astype("<i8").tobytes())
        return digest.hexdigest()


_ARRAYS = {f.name: ("=f8" if f.name.endswith("_s") else "=i8") for f in fields(Traffic)
           if f.name in ("arrival_s", "input_tokens", "output_tokens", "priority", "prefix_group", "prefix_tokens",
                         "session", "turn", "parent", "think_s")}  # fmt: skip


def is_constant(column: np.ndarray[Any, Any]) -> bool:
    """Whether a column is one value seen n times (a view without memory of its own)."""
    return column.strides == (0,) or column.size == 1


def _any_numbered(column: Ints) -> bool:
    """Whether some entry is a number and not -1."""
    return bool(column[0] >= 0) if is_constant(column) else bool((column >= 0).any())


def _column(name: str, value: Any, kind: str, count: int) -> np.ndarray[Any, Any]:
    """`value` as an array of `count` entries; a single value becomes a constant view."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or (kind == "=i8" and array.dtype.kind == "f"):
        raise SpecError(f"{name}: must be {'whole ' if kind == '=i8' else ''}numbers, is {array.dtype}")
    array = array.astype(kind, copy=False)
    if array.shape == (count,):
        return array
    if array.size != 1:
        raise SpecError(f"{name}: must have one entry for each of the {count} requests, has {array.size}")
    single = array.reshape(1)
    return single.copy() if count == 1 else np.broadcast_to(single, (count,))


def _pick(column: np.ndarray[Any, Any], index: Ints) -> np.ndarray[Any, Any]:
    return column[:1] if is_constant(column) else column[index]
