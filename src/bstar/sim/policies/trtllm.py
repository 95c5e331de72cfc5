"""TensorRT-LLM's in-flight batching (`batch_manager/capacityScheduler.cpp`, `microBatchScheduler.cpp`; 1.2).

Two schedulers, one after the other. The capacity scheduler says who may be in flight at all:

    guaranteed-no-evict   a request is let in when the blocks of its whole prompt AND its longest answer are left
                          beside those that the requests in flight may still need: nobody is ever thrown out
    max-utilization       who needs blocks in this step gets them in the order of arrival; when they run out, the last
                          request in flight is paused (its cache is given up and computed again later)

The micro-batch scheduler then fills a step: generation tokens and prompts up to max_num_tokens. Without chunked
context a prompt that does not fit ends the step; with it prompts are cut, in multiples of a unit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from bstar.errors import SpecError
from bstar.sim.policies.plan import PolicyPlan
from bstar.sim.scheduler import Request, Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.traffic.load import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions:
    """capacity_scheduler_policy; max_batch_size and max_num_tokens are max_num_seqs and max_num_batched_tokens.

    chunk_unit      chunks that do not end a prompt are multiples of it; None: a block
    answer_tokens   what requests allow their answers (max_tokens); None: exactly what they get
    wait_iters, wait_ratio   batch_wait_timeout_iters and batch_wait_max_tokens_ratio: beside generation, prompts wait
                    for up to so many steps until the step would hold this share of max_num_tokens (0 and 0: never)
    """

    capacity: Literal["guaranteed-no-evict", "max-utilization"] = "guaranteed-no-evict"
    chunk_unit: int | None = None
    answer_tokens: int | None = None
    wait_iters: int = 0
    wait_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity not in ("guaranteed-no-evict", "max-utilization"):
            raise SpecError(
                f"capacity_scheduler_policy: must be guaranteed-no-evict or max-utilization, is {self.capacity!r}"
            )
        if self.chunk_unit is not None and self.chunk_unit < 1:
            raise SpecError(f"chunk_unit: must be at least 1, is {self.chunk_unit}")
        if self.wait_iters < 0 or not 0 <= self.wait_ratio <= 1:
            raise SpecError("batch_wait_timeout_iters must be at least 0, batch_wait_max_tokens_ratio between 0 and 1")


def check_prompts(settings: SchedulerSettings, load: Traffic) -> None:
    """Raises SpecError where a prompt fits no step: TensorRT-LLM refuses it unless context is chunked."""
    longest = int(load.input_tokens.max())
    if not settings.enable_chunked_prefill and longest > settings.token_budget:
        raise SpecError(
            f"max_num_batched_tokens: TensorRT-LLM takes no prompt longer than a step ({settings.token_budget:,} "
            f"tokens) without chunked context; the longest here has {longest:,}: raise it, or enable chunked prefill"
        )


class TrtllmScheduler(Scheduler):
    """settings.enable_chunked_prefill is TensorRT-LLM's enable_chunked_prefill (chunked context)."""

    def __init__(self, settings: SchedulerSettings, options: TrtllmOptions) -> None:
        super().__init__(settings)
        self.options = options
        self.waiting: deque[Request] = deque()
        self.waited = 0  # steps that prompts have been kept waiting for others

    def schedule(self) -> PolicyPlan:
        plan = PolicyPlan({}, [])
        active = [r for r in self.running if not self._ending(r)]
        if self.options.capacity == "guaranteed-no-evict":
            fitting = self._no_evict(active)
        else:
            fitting = self._max_utilization(active, plan)
        self._fill(plan, fitting)
        for request, tokens in plan.tokens.items():
            request.computed += tokens
            if request.lacking == 0:
                plan.samples.append(request)
                request.promised += 1
        return plan

    def _ending(self, request: Request) -> bool:
        """Whether its last token is being made (async scheduling)."""
        after = request.num_tokens + request.promised
        return request.promised > 0 and (
            after >= request.prompt_tokens + request.output_tokens or after >= self.settings.max_model_len
        )

    def _blocks(self, tokens: int) -> int:
        return -(-min(tokens, self.settings.max_model_len) // self.settings.block_size)

    def _to_completion(self, request: Request) -> int:
        """Blocks that a request may still take until its answer is as long as it may be."""
        allowed = self.options.answer_tokens
        answer = request.output_tokens if allowed is None else max(allowed, request.output_tokens)
        return max(self._blocks(request.prompt_tokens + answer) - len(request.blocks), 0)

    def _no_evict(self, active: list[Request]) -> list[Request]:
        left = len(self.pool.free)
        fitting = [r for r in active if r.computed >= r.target]
        left -= sum(map(self._to_completion, fitting))
        contexts = [r for r in active if r.computed < r.target]
        for request in [*contexts, *self.waiting]:
            needed = self._to_completion(request)
            if len(fitting) >= self.settings.seat_limit or needed > left:
                break
            fitting.append(request)
            left -= needed
        return fitting

    def _max_utilization(self, active: list[Request], plan: PolicyPlan) -> list[Request]:
        fitting: list[Request] = []
        in_flight, waiting = list(active), list(self.waiting)
        at, taken = 0, 0
        while at < len(in_flight):
            request = in_flight[at]
            needed = max(self._blocks(max(request.computed + 1, request.target)) - len(request.blocks), 0)
            if len(fitting) < self.settings.seat_limit and taken + needed <= len(self.pool.free):
                fitting.append(request)
                taken += needed
                at += 1
                continue
            victim = in_flight.pop()
            self.running.remove(victim)
            self._preempt(victim, plan)
        if plan.preempted:
            return fitting
        for request in waiting:
            needed = self._blocks(request.num_tokens)
            if len(fitting) >= self.settings.seat_limit or taken + needed > len(self.pool.free):
                break
            fitting.append(request)
            taken += needed
        return fitting

    def _fill(self, plan: PolicyPlan, fitting: list[Request]) -> None:
        """The micro-batch: who of the fitting is in this step, with how many tokens."""
        s, used = self.settings, 0
        prompts: list[Request] = []
        for request in fitting:
            tokens = 1 if request.blocks and request.computed >= request.target else 0
            if not tokens and s.enable_chunked_prefill:
                prompts.append(request)
            else:
                if used + (tokens or request.num_tokens) > s.token_budget:
                    break
                if not tokens:
                    prompts.append(request)
                else:
                    self._take(request, request.computed + 1)
                    plan.tokens[request] = 1
                used += tokens or request.num_tokens
        room = s.token_budget - used if s.enable_chunked_prefill else s.token_budget
        chosen: list[tuple[Request, int, list[int]]] = []
        for request in prompts:
            hits = [] if request.blocks else self._prefix_hits(request)
            computed = request.computed if request.blocks else len(hits) * s.block_size
            rest = request.num_tokens - computed
            tokens = min(rest, room)
            if tokens < rest:
                unit = self.options.chunk_unit or s.block_size
                tokens = tokens // unit * unit
            if tokens > 0:
                chosen.append((request, tokens, hits))
                room -= tokens
        if self._wait(len(plan.tokens), sum(request.num_tokens for request, _, _ in chosen)):
            return
        for request, tokens, hits in chosen:
            if not request.blocks:
                self._start(request, hits)
            plan.tokens[request] = tokens
            self._name_blocks(request, request.computed + tokens)

    def _wait(self, generation: int, prompts: int) -> bool:
        """Whether prompts wait for more of them, beside `generation` tokens (`PyExecutor._waiting_requests`)."""
        o = self.options
        if not (generation and prompts) or not (o.wait_iters or o.wait_ratio):
            return False
        if self.waited >= o.wait_iters or generation + prompts >= o.wait_ratio * self.settings.token_budget:
            self.waited = 0
            return False
        self.waited += 1
        return True

    def _start(self, request: Request, hits: list[int]) -> None:
        """A waiting request is in flight from now on, with the blocks of its whole prompt."""
        self.waiting.remove(request)
        self.running.append(request)
        self.pool.touch(hits)
        request.blocks, request.named = list(hits), len(hits)
        request.computed = len(hits) * self.settings.block_size
        request.target = request.num_tokens
        if not request.preemptions:
            request.cached_tokens = request.computed
        self._take(request, request.num_tokens)

    def _take(self, request: Request, tokens: int) -> None:
        needed = self._blocks(tokens) - len(request.blocks)
        if needed > 0:
            request.blocks += self.pool.take(needed)
        if request.computed >= request.target:
            self._name_blocks(request, min(tokens, request.num_tokens))
