"""Preemption by swapping: the cache of a preempted request goes to host memory over PCIe and comes back, instead of
being computed again. Everything else is vLLM's scheduler (which swapped until V1).

As in vLLM's V0 engine the copies are in line with the step: a step takes that much longer. Swapped requests come back,
oldest first, before anybody new is let in, and never in a step that preempted. Where host memory is full, a victim is
recomputed.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from bstar.errors import SpecError
from bstar.sim.policies.plan import PolicyPlan
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    """The way to host memory.

    block_bytes        of one KV block, on one GPU
    link_bytes_per_s   of that GPU's link, one direction
    latency_s          of each transfer
    host_blocks        that host memory holds; None: as many as needed
    """

    block_bytes: float
    link_bytes_per_s: float
    latency_s: float = 0.0
    host_blocks: int | None = None

    def __post_init__(self) -> None:
        if not self.link_bytes_per_s > 0 or self.block_bytes < 0 or self.latency_s < 0:
            raise SpecError("swap: link_bytes_per_s must be positive, block_bytes and latency_s not negative")

    def seconds(self, blocks: int) -> float:
        """To move `blocks` one way."""
        return self.latency_s + blocks * self.block_bytes / self.link_bytes_per_s if blocks else 0.0


class SwapScheduler(Scheduler):
    """A preempted request waits like any other; `kept` says how many of its tokens lie in host memory."""

    def __init__(self, settings: SchedulerSettings, options: SwapOptions) -> None:
        super().__init__(settings)
        self.options = options
        self.kept: dict[Request, int] = {}
        self.host_blocks = 0  # in use in host memory
        self.moved_blocks = 0  # over the link so far, both ways
        self._out = 0

    def schedule(self) -> PolicyPlan:
        self._out = 0
        back = [r for r in sorted(self.waiting) if r in self.kept] if self.kept else []
        if self.settings.policy == "fcfs":
            back = [r for r in self.waiting if r in self.kept] if self.kept else []
        others = [r for r in self.waiting if r not in self.kept] if back else []
        if back:
            self.waiting = [] if isinstance(self.waiting, list) else deque()
        inner = super().schedule()
        plan = PolicyPlan(inner.tokens, inner.preempted, inner.samples)
        blocks = 0
        while back and not plan.preempted and len(self.running) < self.settings.seat_limit:
            moved = self._bring_back(back[0], plan)
            if not moved:
                break
            back.pop(0)
            blocks += moved
        if back or others:
            waiting = [*self.waiting, *back, *others]
            self.waiting = waiting if isinstance(self.waiting, list) else deque(waiting)
            if isinstance(self.waiting, list):
                heapq.heapify(self.waiting)
        self.moved_blocks += blocks + self._out
        plan.extra_s = self.options.seconds(blocks) + self.options.seconds(self._out)
        return plan

    def update(self, plan: Plan) -> list[Request]:
        finished = super().update(plan)
        for request in finished:
            self.host_blocks -= self._blocks(self.kept.pop(request, 0))
        return finished

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size)

    def _preempt(self, victim: Request, plan: Plan) -> None:
        kept = victim.computed
        super()._preempt(victim, plan)
        room = self.options.host_blocks
        if kept and (room is None or self.host_blocks + self._blocks(kept) <= room):
            self.kept[victim] = kept
            self._out += self._blocks(kept)
            self.host_blocks += self._blocks(kept)

    def _bring_back(self, request: Request, plan: PolicyPlan) -> int:
        """Blocks moved for a request that runs again from now on; 0: it does not fit."""
        kept, budget = self.kept[request], self.settings.token_budget - sum(plan.tokens.values())
        spare = self.settings.watermark_blocks if self.running else 0
        tokens = min(request.num_tokens - kept, budget)
        if tokens <= 0 or self._blocks(kept + tokens) + spare > len(self.pool.free):
            return 0
        del self.kept[request]
        self.host_blocks -= self._blocks(kept)
        self.running.append(request)
        request.target = min(request.target, request.num_tokens)
        self._allocate(request, kept)
        request.computed = kept
        self._allocate(request, tokens)
        plan.tokens[request] = tokens
        request.computed += tokens
        if request.lacking == 0:
            plan.samples.append(request)
            request.promised += 1
        return self._blocks(kept)
