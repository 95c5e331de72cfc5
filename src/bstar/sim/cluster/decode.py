"""A decode replica: prompts come with their KV cache, computed elsewhere.

    expected    the prompt is done; blocks are not taken yet, in order of coming
    reserved    blocks are taken (those that the prefix cache has are shared and not sent), the cache is on its way
    landed      it is there; the request joins those that run as soon as a seat is free

As vLLM's NIXL connector does: blocks are taken before the transfer starts. Preempted requests recompute here.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from bstar.errors import SpecError
from bstar.sim.cluster.replica import TIE, Replica
from bstar.sim.scheduler import Request

Reserved = Callable[[int, float, int], None]  # rank, when, tokens that need not be sent


class DecodeReplica(Replica):
    """An engine that is handed computed prompts (`expect`, `land`). `give` is for prompts to compute here."""

    takes_prompts = False

    def __init__(self, *args: Any, reserved: Reserved, **more: Any) -> None:
        super().__init__(*args, **more)
        self.on_reserved = reserved
        self.expected: deque[int] = deque()
        self.reserved: dict[int, Request] = {}
        self.landed: list[tuple[float, int]] = []

    @property
    def due_s(self) -> float:
        if self.running is None and self.landed and not self.scheduler.running:
            return max(self.now, self.landed[0][0])
        if self.running is None and self.reserved and not self.scheduler.running:
            return math.inf  # whoever waits here waits for blocks that a cache on its way holds
        return super().due_s

    def expect(self, rank: int, at_s: float) -> None:
        """A prompt is done elsewhere. Its blocks are taken as soon as there are enough."""
        self.requests[rank] = self._request(rank)
        self.ledger.replica[rank] = self.number
        self.expected.append(rank)
        self._reserve(at_s)

    def land(self, rank: int, at_s: float) -> None:
        """The cache of a request has arrived (nothing happens if the replica failed meanwhile)."""
        if rank in self.reserved:
            heapq.heappush(self.landed, (at_s, rank))

    def act(self, until_s: float) -> None:
        super().act(until_s)
        if self.expected:
            self._reserve(self.now)

    def lose(self) -> list[int]:
        self.expected.clear()
        self.reserved.clear()
        self.landed.clear()
        return super().lose()

    def _reserve(self, at_s: float) -> None:
        pool, size = self.scheduler.pool, self.settings.block_size
        while self.expected and not self.scheduler.waiting:
            rank = self.expected[0]
            request = self.requests[rank]
            known = request.num_tokens - 1  # with KV; the last token has none yet
            hits = []
            if self.settings.enable_prefix_caching:
                hits = pool.hits(map(request.block_key, range(known // size)))
            needed = -(-request.num_tokens // size) - len(hits)
            if needed + sum(pool.references[b] == 0 for b in hits) > len(pool.free):
                if len(pool.free) + 1 == self.settings.num_blocks:
                    raise SpecError(f"request {rank}: {request.num_tokens} tokens do not fit in the KV cache of a "
                                    "decode replica; give it more memory or a smaller max_model_len")  # fmt: skip
                return
            pool.touch(hits)
            request.blocks, request.named = [*hits, *pool.take(needed)], len(hits)
            self.reserved[self.expected.popleft()] = request
            self.on_reserved(rank, at_s, len(hits) * size)

    def _has_work(self, seen_s: float) -> bool:
        running, limit = self.scheduler.running, self.settings.seat_limit
        while self.landed and self.landed[0][0] <= seen_s * TIE and len(running) < limit:
            request = self.reserved.pop(heapq.heappop(self.landed)[1])
            request.computed = request.num_tokens - 1
            self.scheduler._name_blocks(request, request.computed)
            self.decoding.add(request.rank)
            running.append(request)
        return super()._has_work(seen_s)

    def _nothing_fits(self) -> None:
        if not self.reserved:
            super()._nothing_fits()
