"""The closed loop over two pools step by step: what `pool_kernel` computes from event to event, to be read.

Every decode step of every worker is taken by itself; the compiled form must give the same times.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bstar.sim.cluster.pool_run import DecodePool, PoolRequests, PoolRun, PromptPool, ShownFrom

# Seconds of a prompt step: per rank, its chunks as (new tokens, tokens computed before).
PromptSeconds = Callable[[list[list[tuple[int, int]]]], float]
# Seconds of a decode step: per rank, the contexts of its sequences (the new token included).
DecodeSeconds = Callable[[list[list[float]]], float]


@dataclass(slots=True)
class _PromptWorker:
    queues: list[deque[int]]
    plan: list[tuple[int, int]] = field(default_factory=list)
    end_s: float = math.inf
    turn: int = 0
    outstanding: int = 0


@dataclass(slots=True)
class _DecodeWorker:
    queues: list[deque[int]]
    ranks: list[dict[int, int]]  # request -> steps made
    late: list[list[int]]  # requests whose seat is free one step later
    end_s: float = math.inf
    start_s: float = math.nan
    turn: int = 0
    outstanding: int = 0


class StepwisePools:
    """One run; `run` gives the times."""

    def __init__(
        self, requests: PoolRequests, prefill: PromptPool, decode: DecodePool, prompt_s: PromptSeconds,
        decode_s: DecodeSeconds, shown: ShownFrom = "decode-step",
    ) -> None:  # fmt: skip
        self.requests, self.prefill, self.decode = requests, prefill, decode
        self.prompt_s, self.decode_s, self.shown = prompt_s, decode_s, shown
        n = requests.prompt.size
        self.arrival, self.prefilled, self.landed, self.first, self.finish = (np.full(n, np.nan) for _ in range(5))
        self.worker, self.rank = np.full(n, -1), np.full(n, -1)
        self.done = [0] * n
        self.coming = deque(range(requests.clients))
        self.arrival[: requests.clients] = 0.0
        self.sent, self.prompt_turn, self.decode_turn = requests.clients, 0, 0
        self.moving: list[tuple[float, int]] = []
        width = 1 if prefill.shared else prefill.ranks
        self.p = [_PromptWorker([deque() for _ in range(width)]) for _ in range(prefill.workers)]
        width = 1 if decode.shared else decode.ranks
        self.d = [_DecodeWorker([deque() for _ in range(width)], [{} for _ in range(decode.ranks)],
                                [[] for _ in range(decode.ranks)]) for _ in range(decode.workers)]  # fmt: skip

    def run(self) -> PoolRun:
        """Everything, in order of time; at one time: decode steps end, prompt steps end, caches land, requests come."""
        while np.isnan(self.finish).any():
            d, p = min(self.d, key=lambda w: w.end_s), min(self.p, key=lambda w: w.end_s)
            lands = self.moving[0][0] if self.moving else math.inf
            comes = self.arrival[self.coming[0]] + self.requests.front_s if self.coming else math.inf
            at = min(d.end_s, p.end_s, lands, comes)
            if at == math.inf:
                raise ValueError("some can never be served")
            if d.end_s == at:
                self._decode_step_ends(d, at)
            elif p.end_s == at:
                self._prompt_step_ends(p, at)
            elif lands == at:
                self._land(heapq.heappop(self.moving)[1], at)
            else:
                self._come(self.coming.popleft(), at)
        return PoolRun(
            arrival_s=self.arrival, prefilled_s=self.prefilled, landed_s=self.landed, first_s=self.first,
            finish_s=self.finish, worker=self.worker, rank=self.rank, runs=np.zeros((0, 9)))

    def _come(self, request: int, at: float) -> None:
        if self.prefill.router == "in-turn":
            p = self.p[self.prompt_turn % len(self.p)]
            self.prompt_turn += 1
        else:
            p = min(self.p, key=lambda w: w.outstanding)
        queue = p.queues[p.turn % len(p.queues)]
        p.turn += 1
        p.outstanding += 1
        queue.append(request)
        if p.end_s == math.inf:
            self._plan_prompts(p, at)

    def _plan_prompts(self, p: _PromptWorker, at: float) -> None:
        pool, chunks = self.prefill, [list[tuple[int, int]]() for _ in range(self.prefill.ranks)]
        p.plan = []

        def full(r: int, left: int) -> bool:
            tokens = sum(new for new, _ in chunks[r])
            if len(chunks[r]) >= pool.prompts:
                return True
            return tokens >= pool.tokens if pool.chunked else tokens > 0 and tokens + left > pool.tokens

        for k, queue in enumerate(p.queues):
            while queue:
                request = queue[0]
                left = int(self.requests.prompt[request]) - self.done[request]
                open_ranks = [r for r in (range(pool.ranks) if pool.shared else [k]) if not full(r, left)]
                if not open_ranks:
                    break
                rank = min(open_ranks, key=lambda r: sum(new for new, _ in chunks[r]))
                room = pool.tokens - sum(new for new, _ in chunks[rank])
                new = min(left, room) if pool.chunked else left
                chunks[rank].append((new, self.done[request]))
                p.plan.append((request, new))
                if new < left:
                    break
                queue.popleft()
        p.end_s = at + self.prompt_s(chunks) if p.plan else math.inf

    def _prompt_step_ends(self, p: _PromptWorker, at: float) -> None:
        for request, new in p.plan:
            self.done[request] += new
            if self.done[request] < self.requests.prompt[request]:
                continue
            p.outstanding -= 1
            self.prefilled[request] = at
            if self.shown == "prefill" or self.requests.steps[request] == 0:
                self.first[request] = at
            if self.requests.steps[request] == 0:
                self._finish(request, at)
                continue
            if self.decode.router == "in-turn":
                number = self.decode_turn % len(self.d)
                self.decode_turn += 1
            else:
                number = min(range(len(self.d)), key=lambda i: self.d[i].outstanding)
            self.worker[request] = number
            self.d[number].outstanding += 1
            self.landed[request] = at + self.requests.moved_s[request]
            heapq.heappush(self.moving, (float(self.landed[request]), request))
        self._plan_prompts(p, at)

    def _land(self, request: int, at: float) -> None:
        d = self.d[self.worker[request]]
        d.queues[d.turn % len(d.queues)].append(request)
        d.turn += 1
        if d.end_s == math.inf:
            self._decode_step(d, at, math.inf)

    def _decode_step(self, d: _DecodeWorker, at: float, seen: float) -> None:
        """Admit those that landed before `seen`, then run a step."""
        pool, fresh = self.decode, []
        for k, queue in enumerate(d.queues):
            while queue and self.landed[queue[0]] < seen:
                hold = self.requests.hold[queue[0]]
                places = range(pool.ranks) if pool.shared else [k]

                def free(r: int, hold: int = hold) -> bool:
                    held = [*d.ranks[r], *d.late[r]]
                    return len(held) < pool.seats and pool.room - sum(self.requests.hold[held]) >= hold

                places = [r for r in places if free(r)]
                if not places:
                    break
                rank = min(places, key=lambda r: len(d.ranks[r]))
                request = queue.popleft()
                d.ranks[rank][request] = 0
                self.rank[request] = rank
                fresh.append(request)
        if not any(d.ranks):
            d.end_s = math.inf
            return
        growth, prompt = self.requests.growth, self.requests.prompt
        contexts = [[prompt[r] + growth * (made + 1) for r, made in rank.items()] for rank in d.ranks]
        d.start_s, d.end_s = at, at + self.decode_s(contexts)
        for request in fresh:
            if self.shown != "prefill":
                self.first[request] = at if self.shown == "landing" else d.end_s

    def _decode_step_ends(self, d: _DecodeWorker, at: float) -> None:
        d.late = [[] for _ in d.ranks]
        ended = []
        for r, rank in enumerate(d.ranks):
            for request in list(rank):
                rank[request] += 1
                if rank[request] == self.requests.steps[request]:
                    del rank[request]
                    ended.append((d.end_s, request))
                    if self.decode.ahead:
                        d.late[r].append(request)
        for _, request in sorted(ended):
            d.outstanding -= 1
            self._finish(request, at)
        if not any(d.ranks):
            d.late = [[] for _ in d.ranks]
        idle = not any(d.ranks)
        self._decode_step(d, at, d.start_s if self.decode.ahead and not idle else math.inf)

    def _finish(self, request: int, at: float) -> None:
        self.finish[request] = at
        if self.sent < self.requests.prompt.size:
            self.arrival[self.sent] = at
            self.coming.append(self.sent)
            self.sent += 1
