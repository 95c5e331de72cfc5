"""SGLang's scheduler (0.5.9, `managers/scheduler.py`, `schedule_policy.py`), to be read beside it.

Prompts come first: as long as some wait and are let in, steps hold prompt chunks alone and nobody decodes. With
mixed chunks the decoding requests ride along in every prompt step.

Admission looks at tokens, not at blocks at hand: what is free (or only cached) must hold the new prompt, its whole
answer, and a share of what the running answers may still grow to. That share, `ratio`, starts at
0.7 · conservativeness and falls a little with every decode step. When it was too small and memory runs out,
requests are retracted (fewest tokens made first), join the END of the queue, and the share is set anew.

Admission and retraction were held against the engine's own PrefillAdder and retract_decode, run on the same states.
Where a prompt that was begun finds no memory (the engine then stops with an error) the chunk is cut to what there is.

Once a request does not fit, nobody looks at the queue again until a running one ends: `full`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bstar.errors import SpecError
from bstar.sim.policies.plan import PolicyPlan
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Server arguments (and, from `initial_ratio` on, environment variables) with SGLang 0.5.9's defaults.

    chunked_prefill_size   prompt tokens of a step; None: max_num_batched_tokens; 0: prompts are not split
    max_prefill_tokens     prompt tokens of a step, for all but its first prompt
    conservativeness       schedule_conservativeness
    recv_interval          decode steps between two looks at newly arrived requests
    clip_tokens            an answer counts as no longer than this in the estimate
    answer_tokens          what requests allow their answers (max_new_tokens); None: exactly what they get
    """

    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    conservativeness: float = 1.0
    mixed_chunk: bool = False
    recv_interval: int = 1
    answer_tokens: int | None = None
    initial_ratio: float = 0.7
    least_ratio_factor: float = 0.14
    decay_steps: int = 600
    retract_steps: int = 20
    clip_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.conservativeness < 0:
            raise SpecError(f"schedule_conservativeness: must be at least 0, is {self.conservativeness}")
        if self.recv_interval < 1:
            raise SpecError(f"scheduler_recv_interval: must be at least 1, is {self.recv_interval}")
        if self.max_prefill_tokens < 1 or (self.chunked_prefill_size or 0) < 0:
            raise SpecError("max_prefill_tokens, chunked_prefill_size: must be positive (0: prompts are not split)")

    @property
    def first_ratio(self) -> float:
        return min(self.initial_ratio * self.conservativeness, 1.0)

    @property
    def least_ratio(self) -> float:
        return min(self.first_ratio * self.least_ratio_factor, 1.0)

    @property
    def decay(self) -> float:
        """What a decode step takes off the ratio."""
        return (self.first_ratio - self.least_ratio) / self.decay_steps

    def chunk(self, settings: SchedulerSettings) -> int:
        """Prompt tokens of a step; 0: no limit."""
        if self.chunked_prefill_size is not None:
            return self.chunked_prefill_size
        return settings.token_budget if settings.enable_chunked_prefill else 0

    def grants(self, request: Request, settings: SchedulerSettings) -> int:
        """Tokens that the answer of a request may have, as far as the engine lets it."""
        asked = request.output_tokens if self.answer_tokens is None else max(self.answer_tokens, request.output_tokens)
        pool = (settings.num_blocks - 1) * settings.block_size
        longest = min(settings.max_model_len, pool) - 1
        return max(min(asked, longest - request.prompt_tokens - 1), 1)


class SglangScheduler(Scheduler):
    """`running` holds everybody who was let in; `batch` those who decode.

    Under async_scheduling (SGLang's overlap schedule) the end of a request is noticed a step late, and it takes part
    in that step for nothing.
    """

    def __init__(self, settings: SchedulerSettings, options: SglangOptions) -> None:
        super().__init__(settings)
        self.options = options
        self.waiting: deque[Request] = deque()
        self.inbox: deque[Request] = deque()  # arrived, not looked at yet
        self.batch: list[Request] = []
        self.prefilled: list[Request] = []  # those of the last step, if it was a prompt step
        self.chunked: Request | None = None  # its prompt is not done
        self.gone: set[Request] = set()  # finished, and perhaps still in a batch
        self.full = False
        self.start_ratio = options.first_ratio
        self.decays = 0  # decode steps since the ratio was set
        self.polls = 0
        self.last = PolicyPlan({}, [])

    @property
    def ratio(self) -> float:
        """Share of the room for running answers that admission keeps free."""
        if not self.decays:
            return self.start_ratio
        return max(self.start_ratio - self.decays * self.options.decay, self.options.least_ratio)

    def add(self, request: Request) -> None:
        self.inbox.append(request)
        if not self.running:
            self._look()

    def schedule(self) -> PolicyPlan:
        plan = PolicyPlan({}, [])
        self.polls += 1000 if self.prefilled else 1
        if self.polls >= self.options.recv_interval:
            self._look()
        joining = [r for r in self.prefilled if r is not self.chunked]
        self.prefilled = [r for r in joining if r not in self.gone]
        self.full = self.full and len(self.prefilled) == len(joining)
        self.batch += self.prefilled
        self.prefilled = []
        if not self._prefill(plan):
            self._decode(plan)
        if not plan.tokens and not plan.preempted:  # the batch was found empty: the loop comes round at once
            self._look()
            self._prefill(plan)
        for request, tokens in plan.tokens.items():
            request.computed += tokens
            if request.lacking == 0 and not self._ending(request) and request not in self.gone:
                plan.samples.append(request)
                request.promised += 1
        self.last = plan
        return plan

    def update(self, plan: Plan) -> list[Request]:
        finished = []
        for request in plan.samples:
            request.num_tokens += 1
            request.promised -= 1
            if request.stopped(self.settings.max_model_len):
                finished.append(request)
                self.gone.add(request)
                self._free(request)
        if finished:
            self.running = [r for r in self.running if r not in self.gone]
        if not self.running:
            self._look()
        return finished

    def _ending(self, request: Request) -> bool:
        """Whether its last token is being made: what it computes meanwhile is for nothing."""
        after = request.num_tokens + request.promised
        return request.promised > 0 and (
            after >= request.prompt_tokens + request.output_tokens or after >= self.settings.max_model_len
        )

    def _look(self) -> None:
        self.polls = 0
        self.waiting += self.inbox
        self.inbox.clear()

    def _prefill(self, plan: PolicyPlan) -> bool:
        """A prompt step, if there is one to make."""
        if (self.full or not self.waiting) and self.chunked is None:
            return False
        seats = self.settings.seat_limit - len(self.batch)
        if seats <= 0 and self.chunked is not None:
            self.full = True
            return False
        riders = [r for r in self.batch if r not in self.gone] if self.options.mixed_chunk else []
        room = _Room(self, len(self.batch) if self.options.mixed_chunk else 0)
        chosen: list[tuple[Request, int]] = []
        if self.chunked is not None:
            tokens = room.continued(self.chunked)
            chosen.append((self.chunked, tokens))
        while self.waiting:
            if len(chosen) >= seats:
                self.full = True
            if self.full:
                break
            request = self.waiting[0]
            hits = self._prefix_hits(request)
            tokens, no_token = room.admitted(request, hits, first=not chosen)
            if tokens:
                self.waiting.popleft()
                self.running.append(request)
                self._seat(request, hits)
                chosen.append((request, tokens))
            if not tokens or room.exhausted:
                self.full = no_token or (tokens > 0 and room.no_token)
                break
        return self._fill(plan, chosen, riders)

    def _seat(self, request: Request, hits: list[int]) -> None:
        request.blocks, request.named = list(hits), len(hits)
        request.computed = len(hits) * self.settings.block_size
        request.target = request.num_tokens
        if not request.preemptions:
            request.cached_tokens = request.computed

    def _fill(self, plan: PolicyPlan, chosen: list[tuple[Request, int]], riders: list[Request]) -> bool:
        """Blocks for a prompt step; what finds none is left for another step."""
        if riders and self._pages(riders) > len(self.pool.free):
            riders = []
        for request in riders:
            self._allocate(request, 1)
        self.chunked = None
        for at, (request, wanted) in enumerate(chosen):
            if self.chunked is not None:  # the one before it did not get all: the rest goes back
                self._put_back([r for r, _ in chosen[at:]])
                break
            room = (len(request.blocks) + len(self.pool.free)) * self.settings.block_size - request.computed
            tokens = min(wanted, room)
            if tokens > 0:
                self._allocate(request, tokens)
                plan.tokens[request] = tokens
                self.prefilled.append(request)
            if request.computed + max(tokens, 0) < request.num_tokens:
                self.chunked = request
        if not plan.tokens:
            return False
        plan.tokens |= dict.fromkeys(riders, 1)
        if riders:
            self.prefilled += riders
            self.gone -= set(self.batch)
            self.batch = []
        return True

    def _put_back(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            self._free(request)
            request.computed = 0
            self.running.remove(request)
            self.waiting.appendleft(request)

    def _pages(self, requests: list[Request]) -> int:
        """Blocks that one more token for each takes."""
        return sum(r.computed == len(r.blocks) * self.settings.block_size for r in requests)

    def _decode(self, plan: PolicyPlan) -> None:
        """A token for everybody in the batch, after retracting those for whom there is no room."""
        before = len(self.batch)
        left = [r for r in self.batch if r not in self.gone]
        self.gone -= set(self.batch)
        self.batch = left
        if not left:
            self.full = False
            return
        if self._pages(left) > len(self.pool.free):
            self._retract(plan)
        else:
            self.decays += 1
        self.full = self.full and len(self.batch) == before
        for request in self.batch:
            self._allocate(request, 1)
            plan.tokens[request] = 1

    def _retract(self, plan: PolicyPlan) -> None:
        """Give up requests, those with the fewest tokens made first (of these the longest prompt), at least one."""
        order = sorted(self.batch, key=lambda r: (r.num_tokens - r.prompt_tokens, -r.prompt_tokens), reverse=True)
        while len(order) > 1 and (not plan.preempted or self._pages(order) > len(self.pool.free)):
            victim = order.pop()
            if victim in self.last.samples and victim.promised:
                self.last.samples.remove(victim)  # its token of the step that runs is lost
            self._free(victim)
            victim.computed = victim.promised = 0
            victim.preemptions += 1
            plan.preempted.append(victim)
            self.running.remove(victim)
            self.waiting.append(victim)
        if self._pages(order) > len(self.pool.free):
            raise SpecError(
                f"num_blocks: a request of {order[0].num_tokens} tokens outgrows the whole cache and never ends; "
                "give the engine more blocks or a smaller max_model_len"
            )
        kept = set(order)
        self.batch = [r for r in self.batch if r in kept]
        made = sum(r.num_tokens - r.prompt_tokens for r in self.batch)
        asked = sum(self.options.grants(r, self.settings) for r in self.batch)
        self.start_ratio = min(1.0, (made + self.options.retract_steps * len(self.batch)) / (asked + 1))
        self.decays = 0


class _Room:
    """What a prompt step may still take: prompt tokens, a chunk, and memory now and later (PrefillAdder)."""

    def __init__(self, scheduler: SglangScheduler, riders: int) -> None:
        self.scheduler, self.options, self.settings = scheduler, scheduler.options, scheduler.settings
        chunk = self.options.chunk(self.settings)
        self.input = self.options.max_prefill_tokens - riders
        self.chunk: float = chunk - riders if chunk else float("inf")
        self.now: float = riders
        self.later: float = riders + sum(map(self._grows, scheduler.batch)) * scheduler.ratio

    def _grows(self, request: Request) -> int:
        left = self.options.grants(request, self.settings) - (request.num_tokens - request.prompt_tokens)
        return 0 if request in self.scheduler.gone else min(left, self.options.clip_tokens)

    @property
    def _free_tokens(self) -> int:
        return len(self.scheduler.pool.free) * self.settings.block_size

    @property
    def no_token(self) -> bool:
        return self._free_tokens - self.later <= 0 or self._free_tokens - self.now <= 0

    @property
    def exhausted(self) -> bool:
        return self.no_token or self.input <= 0 or self.chunk <= 0

    def _take(self, tokens: int, answer: int) -> None:
        paged = self._paged(tokens)
        self.now += paged
        self.later += paged + answer
        self.input -= paged
        self.chunk -= paged

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size) * self.settings.block_size

    def _answer(self, request: Request) -> int:
        return min(self.options.grants(request, self.settings), self.options.clip_tokens)

    def continued(self, request: Request) -> int:
        """Tokens for the prompt that the last step began."""
        rest = request.num_tokens - request.computed
        most = min(self.chunk, int(self._free_tokens - self.later))
        tokens = int(min(rest, most if most > 0 else self.chunk))
        self._take(tokens, self._answer(request) if tokens == rest else 0)
        return tokens

    def admitted(self, request: Request, hits: list[int], *, first: bool) -> tuple[int, bool]:
        """(tokens for a waiting request, 0: not now; whether memory is what it lacks). Its hits are held."""
        extend = request.num_tokens - len(hits) * self.settings.block_size
        left = max(self.options.grants(request, self.settings) - (request.num_tokens - request.prompt_tokens), 0)
        total = extend + min(left, self.options.clip_tokens)
        if total >= self._free_tokens - self.later:
            return 0, True
        if self._paged(extend) >= self.input and not first:
            return 0, False
        pool = self.scheduler.pool
        pool.touch(hits)
        if total >= self._free_tokens - self.later:
            pool.release(reversed(hits))
            return 0, True
        tokens = extend
        if self._paged(extend) > self.chunk:
            tokens = int(self.chunk) // self.settings.block_size * self.settings.block_size
        if tokens <= 0:
            pool.release(reversed(hits))
            return 0, False
        self._take(tokens, self._answer(request) if tokens == extend else 0)
        return tokens, False
