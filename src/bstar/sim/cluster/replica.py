"""One engine of many, advanced action by action: the readable scheduler on a clock that others can stop.

    sync     at τ: the step that ran ends, its tokens are out; the next step is planned and starts
    async    at τ: the step that ran ends; the next one, planned with what was there when that one started, starts

Tokens are out when their step has ended: a router that looks, or a failure that strikes, between two actions sees
what is there at that time. A request that comes within 1e-9 (relative) of a planning joins it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bstar.errors import SpecError
from bstar.physics.batch import BatchShape
from bstar.sim.cluster.ledger import Ledger
from bstar.sim.deployed import StepFigures
from bstar.sim.replay import check_progress
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.sim.steps import StepRows

TIE = 1.0 + 1e-9

Figures = Callable[[BatchShape], StepFigures]
Finished = Callable[[int, float], None]  # rank, when


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step that is planned or runs. `table`: what it computes; decodes and prompts apart."""

    plan: Plan
    table: list[tuple[float, float, float, bool]]
    start_s: float = math.nan
    end_s: float = math.nan
    row: int = -1


class Replica:
    """An engine. `give` it requests, let it `act` at `due_s`.

    takes_prompts   whether arrivals may be sent to it

    output      tokens that it makes of a request, None: all (a prefill replica makes one)
    scheduler   makes its scheduler (None: vLLM's), anew after a failure
    """

    takes_prompts: bool = True

    def __init__(
        self, number: int, settings: SchedulerSettings, figures: Figures, ledger: Ledger, finished: Finished, *,
        ready_s: float = 0.0, output: int | None = None, scheduler: Callable[[], Scheduler] | None = None,
    ) -> None:  # fmt: skip
        self.number, self.settings, self.figures, self.ledger, self.finished = (
            number, settings, figures, ledger, finished)  # fmt: skip
        self.new_scheduler = scheduler if scheduler is not None else lambda: Scheduler(settings)
        self.scheduler = self.new_scheduler()
        self.rows = StepRows()
        self.output = output
        self.now = ready_s
        self.requests: dict[int, Request] = {}  # given and not finished
        self.incoming: deque[tuple[float, int]] = deque()  # when and who, in the order given
        self.decoding: set[int] = set()
        self.running: _Step | None = None
        self.prompt_tokens = 0  # computed here, recomputed ones included

    # What a router may look at.

    @property
    def outstanding(self) -> int:
        """Requests given and not finished."""
        return len(self.requests)

    @property
    def used_blocks(self) -> int:
        return self.settings.num_blocks - 1 - len(self.scheduler.pool.free)

    def cached_blocks(self, rank: int) -> int:
        """Blocks of a prompt that the prefix cache has."""
        if not self.settings.enable_prefix_caching:
            return 0
        full = (self.ledger.input_tokens[rank] - 1) // self.settings.block_size
        return len(self.scheduler.pool.hits(map(self.ledger.keys[rank], range(full))))

    @property
    def due_s(self) -> float:
        """When it acts next; inf: when it is given something."""
        if self.running is not None:
            return self.running.end_s
        if self.scheduler.running or self.scheduler.waiting:
            return self.now
        return max(self.now, self.incoming[0][0]) if self.incoming else math.inf

    # What happens to it.

    def give(self, rank: int, at_s: float) -> None:
        """A request comes in. Tokens that it made elsewhere are recomputed with its prompt."""
        self.requests[rank] = self._request(rank)
        self.ledger.replica[rank] = self.number
        self.incoming.append((at_s, rank))

    def act(self, until_s: float) -> None:
        """What is due by `until_s`; a step that an arrival at `until_s` could join is not planned yet."""
        at, ended = self.due_s, self.running
        if ended is not None:
            if at > until_s:
                return
            self.now, self.running = at, None
            if self.settings.async_scheduling and self._has_work(ended.start_s):
                step = self._plan()
                if step.plan.tokens:
                    self._start(step, at)
            self._end(ended, at)
            if self.running is not None:
                return
        if at * TIE >= until_s:
            return
        self.now = at
        while self._has_work(at):
            step = self._plan()
            if step.plan.tokens:
                self._start(step, at)
                return
            if not step.plan.preempted:
                self._nothing_fits()
                return

    def lose(self) -> list[int]:
        """It fails: requests that it had, in the order they came to it. What ran is lost."""
        lost = list(self.requests)
        self.requests.clear()
        self.incoming.clear()
        self.decoding.clear()
        self.running = None
        self.scheduler = self.new_scheduler()
        return lost

    def _request(self, rank: int) -> Request:
        ledger = self.ledger
        made = int(ledger.made[rank])
        output = ledger.output_tokens[rank] if self.output is None else made + self.output
        request = Request(rank=rank, prompt_tokens=ledger.input_tokens[rank], output_tokens=output,
                          priority=ledger.priority[rank], block_key=ledger.keys[rank])  # fmt: skip
        request.num_tokens += made
        return request

    def _has_work(self, seen_s: float) -> bool:
        """Whether there is anything to plan, of what had come by `seen_s`."""
        scheduler = self.scheduler
        while self.incoming and self.incoming[0][0] <= seen_s * TIE:
            scheduler.add(self.requests[self.incoming.popleft()[1]])
        return bool(scheduler.running or scheduler.waiting)

    def _plan(self) -> _Step:
        """The next step."""
        plan = self.scheduler.schedule()
        check_progress(self.scheduler, plan)
        for request in plan.preempted:
            self.decoding.discard(request.rank)
            self.ledger.preemptions[request.rank] += 1
        table = []
        for request, tokens in plan.tokens.items():
            table.append((float(tokens), float(request.computed), 1.0, request.rank not in self.decoding))
        self.decoding.update(r.rank for r in plan.samples)
        return _Step(plan=plan, table=table)

    def _start(self, step: _Step, at: float) -> None:
        ledger = self.ledger
        for request in step.plan.tokens:
            if math.isnan(ledger.scheduled_s[request.rank]):
                ledger.scheduled_s[request.rank] = at
                ledger.cached_tokens[request.rank] = request.cached_tokens
        prompt = int(sum(tokens for tokens, _, _, is_prompt in step.table if is_prompt))
        figures, scheduler = self.figures(BatchShape.from_rows(step.table)), self.scheduler
        made = sum(tokens_of(step.plan, request) for request in step.plan.samples)
        took = figures.seconds + float(getattr(step.plan, "extra_s", 0.0))
        self.prompt_tokens += prompt
        step.start_s, step.end_s = at, at + took
        step.row = self.rows.add(
            start_s=at, steps=1, base_s=took, slope_s=0.0, made=made, sequences=len(step.table),
            running=len(scheduler.running), waiting=len(scheduler.waiting), used_blocks=self.used_blocks,
            preempted=len(step.plan.preempted), prompt_tokens=prompt, flops=figures.flops,
            compute_s=figures.compute_s, memory_s=figures.memory_s,
        )  # fmt: skip
        self.running = step

    def _end(self, step: _Step, at: float) -> None:
        """The tokens of a step are out."""
        ledger = self.ledger
        for request in step.plan.samples:
            rank, tokens = request.rank, tokens_of(step.plan, request)
            ledger.made[rank] += tokens
            self.rows.single_gap_s += [0.0] * (tokens - 1)  # they come together
            if math.isnan(ledger.first_token_s[rank]):
                ledger.first_token_s[rank] = at
            elif ledger.last_s[rank] == step.start_s:
                self.rows.regular[step.row] += 1
            else:
                self.rows.single_gap_s.append(at - float(ledger.last_s[rank]))
            ledger.last_s[rank] = at
        for request in self.scheduler.update(step.plan):
            del self.requests[request.rank]
            self.decoding.discard(request.rank)
            self.finished(request.rank, at)

    def _nothing_fits(self) -> None:
        request, s = [*self.scheduler.running, *self.scheduler.waiting][0], self.settings
        raise SpecError(
            f"request {request.rank}: {request.num_tokens} tokens can never be scheduled with {s.num_blocks} blocks of "
            f"{s.block_size} and {s.token_budget} tokens a step (max_num_batched_tokens)"
        )


def tokens_of(plan: Plan, request: Request) -> int:
    """Tokens that a step makes for a request that it samples (several, with speculation)."""
    made: dict[Request, int] | None = getattr(plan, "made", None)
    return 1 if made is None else made[request]
