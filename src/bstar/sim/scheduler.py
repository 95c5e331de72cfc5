"""The scheduler of vLLM 0.32 (`v1/core/sched/scheduler.py`), decision for decision, to be read beside it.

There is no prefill and no decode phase: every step gives each request as many tokens as it lacks to catch up with
what is known of it, as far as budget and blocks go. Requests that run come first, in the order they were admitted;
then waiting ones, while seats, tokens and blocks last.

The compiled kernel (`bstar.sim.kernel`) takes the same decisions without stepping; tests hold the two together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bstar.sim.blocks import BlockPool, Key
from bstar.sim.settings import SchedulerSettings


@dataclass(slots=True, eq=False)
class Request:
    """One request. `rank` orders it among others that arrived together or have equal priority."""

    rank: int
    prompt_tokens: int
    output_tokens: int
    block_key: Callable[[int], Key]  # content of its block number i, and of all blocks before it
    priority: int = 0
    num_tokens: int = 0  # known: prompt and generated
    computed: int = 0  # with KV in the cache
    promised: int = 0  # sampled by a step that still runs (async scheduling)
    target: int = 0  # known when it was admitted: the prompt it computes before it decodes
    blocks: list[int] = field(default_factory=list)
    named: int = 0  # leading blocks with a key
    preemptions: int = 0
    cached_tokens: int = 0  # prefix hit of the first admission

    def __post_init__(self) -> None:
        self.num_tokens = self.prompt_tokens

    def __lt__(self, other: Request) -> bool:
        return (self.priority, self.rank) < (other.priority, other.rank)

    @property
    def lacking(self) -> int:
        return self.num_tokens + self.promised - self.computed

    def stopped(self, max_model_len: int) -> bool:
        made = self.num_tokens - self.prompt_tokens
        return made >= self.output_tokens or self.num_tokens >= max_model_len


@dataclass(slots=True)
class Plan:
    """One step: tokens by request in the order given, whom it preempted, and who gets a token from it."""

    tokens: dict[Request, int]
    preempted: list[Request]
    samples: list[Request] = field(default_factory=list)


class Scheduler:
    """`add` requests, `schedule` a step, `update` with its end; under async scheduling a step late."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks)
        self.running: list[Request] = []
        self.waiting: deque[Request] | list[Request] = [] if settings.policy == "priority" else deque()

    def add(self, request: Request) -> None:
        if isinstance(self.waiting, deque):
            self.waiting.append(request)
        else:
            heapq.heappush(self.waiting, request)

    def schedule(self) -> Plan:
        """The next step. Nothing is computed yet; blocks are taken now."""
        s, plan, budget = self.settings, Plan({}, []), self.settings.token_budget
        longest = self._longest_chunk()

        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            at += 1
            if request.promised and request.num_tokens + request.promised >= request.prompt_tokens + (
                request.output_tokens
            ):
                continue  # its last token is being made
            tokens = min(request.lacking, longest, budget, s.max_model_len - request.computed - 1)
            if tokens <= 0:
                continue
            while not self._allocate(request, tokens):
                victim = self._victim()
                index = self.running.index(victim)
                del self.running[index]
                at -= index < at
                budget += plan.tokens.pop(victim, 0)
                self._preempt(victim, plan)
                if victim is request:
                    break
            else:
                plan.tokens[request] = tokens
                budget -= tokens
                continue
            break  # it preempted itself: nothing is left for those after it either

        while self.waiting and budget > 0 and not plan.preempted and len(self.running) < s.seat_limit:
            request = self.waiting[0]
            hits = self._prefix_hits(request)
            cached = len(hits) * s.block_size
            tokens = min(request.num_tokens - cached, longest)
            if tokens > budget and not s.enable_chunked_prefill:
                break
            tokens = min(tokens, budget)
            if not self._admit(request, hits, tokens):
                break
            self.running.append(self._next_waiting())
            if not request.preemptions:
                request.cached_tokens = cached
            request.computed, request.target = cached, request.num_tokens
            plan.tokens[request] = tokens
            budget -= tokens

        for request, tokens in plan.tokens.items():
            request.computed += tokens
            if request.lacking == 0:
                plan.samples.append(request)
                request.promised += 1
        return plan

    def update(self, plan: Plan) -> list[Request]:
        """The step has run: every request that it brought up to date has a new token. Returns the finished."""
        finished = []
        for request in plan.samples:
            request.num_tokens += 1
            if request.blocks:  # else it was preempted while the step ran; its token counts all the same
                request.promised -= 1
                if self.settings.async_scheduling:
                    self._name_blocks(request, request.computed - request.promised)
            if request.stopped(self.settings.max_model_len):
                finished.append(request)
                self._free(request)
        if finished:
            gone = set(finished)
            self.running = [r for r in self.running if r not in gone]
            if any(r in gone for r in self.waiting):
                left = [r for r in self.waiting if r not in gone]
                self.waiting = deque(left) if isinstance(self.waiting, deque) else left
                if isinstance(self.waiting, list):
                    heapq.heapify(self.waiting)
        return finished

    def _longest_chunk(self) -> int:
        """The long-prefill threshold protects others: a lone request has nobody to protect."""
        s, requests = self.settings, len(self.running) + len(self.waiting)
        longest = s.long_prefill_token_threshold
        if longest == 0 or requests <= 1:
            return s.max_model_len + s.max_num_batched_tokens
        fair = s.max_num_batched_tokens // requests if s.long_prefill_token_threshold_adaptive else 0
        return max(longest, fair)

    def _victim(self) -> Request:
        """Who makes room: the last admitted; by priority, the last in (priority, arrival)."""
        return max(self.running) if self.settings.policy == "priority" else self.running[-1]

    def _preempt(self, victim: Request, plan: Plan) -> None:
        """Its cache is given up; it will compute prompt and generated tokens again."""
        self._free(victim)
        victim.computed = victim.promised = 0
        victim.preemptions += 1
        plan.preempted.append(victim)
        if isinstance(self.waiting, deque):
            self.waiting.appendleft(victim)
        else:
            heapq.heappush(self.waiting, victim)

    def _next_waiting(self) -> Request:
        return self.waiting.popleft() if isinstance(self.waiting, deque) else heapq.heappop(self.waiting)

    def _prefix_hits(self, request: Request) -> list[int]:
        """Cached blocks to start from. One token at least is computed: a step must end in logits."""
        if not self.settings.enable_prefix_caching:
            return []
        full = (request.num_tokens - 1) // self.settings.block_size
        return self.pool.hits(map(request.block_key, range(full)))

    def _admit(self, request: Request, hits: list[int], tokens: int) -> bool:
        """Blocks for a waiting request, if those of its whole prompt are there."""
        s, pool = self.settings, self.pool
        must_fit = len(hits) * s.block_size + tokens
        if s.scheduler_reserve_full_isl:
            must_fit = max(must_fit, request.num_tokens)
        needed = -(-min(must_fit, s.max_model_len) // s.block_size) - len(hits)
        needed = max(needed, 0) + sum(pool.references[b] == 0 for b in hits)
        if needed + (s.watermark_blocks if self.running else 0) > len(pool.free):
            return False
        pool.touch(hits)
        request.blocks, request.named, request.computed = list(hits), len(hits), len(hits) * s.block_size
        return self._allocate(request, tokens)

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Blocks for `tokens` more; full ones get their key although the step has not run yet."""
        after = request.computed + tokens
        needed = -(-min(after, self.settings.max_model_len) // self.settings.block_size) - len(request.blocks)
        if needed > len(self.pool.free):
            return False
        if needed > 0:
            request.blocks += self.pool.take(needed)
        self._name_blocks(request, min(after, request.num_tokens))
        return True

    def _name_blocks(self, request: Request, tokens: int) -> None:
        if not self.settings.enable_prefix_caching:
            return
        for i in range(request.named, tokens // self.settings.block_size):
            self.pool.name(request.blocks[i], request.block_key(i))
            request.named = i + 1

    def _free(self, request: Request) -> None:
        """Last block first, so that the end of a chain is reused before its start."""
        self.pool.release(reversed(request.blocks))
        request.blocks, request.named = [], 0
