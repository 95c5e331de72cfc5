"""Data-parallel attention: ranks with a scheduler and a cache each, whose steps start together.

The layers between attention belong to all ranks, so nobody starts a step before everybody is through the last: a step
takes as long as the slowest rank's, and a rank without work runs a dummy step beside the others. A request goes to the
rank with the least to do when it arrives (vLLM's rule: 4 · waiting + running; ties to the lowest number).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bstar.errors import SpecError
from bstar.latency.step_model import StepModel
from bstar.physics.batch import BatchShape
from bstar.sim.deployed import StepFigures, step_figures
from bstar.sim.policies.plan import PolicyPlan
from bstar.sim.replay import check_progress
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings


class LockStepScheduler(Scheduler):
    """Looks like one scheduler; plan.parts holds the ranks' own plans."""

    def __init__(
        self, settings: SchedulerSettings, ranks: int, make: Callable[[SchedulerSettings], Scheduler] = Scheduler
    ) -> None:
        """`settings` are those of one rank."""
        if ranks < 1:
            raise SpecError(f"ranks: must be at least 1, is {ranks}")
        super().__init__(settings)
        self.ranks = [make(settings) for _ in range(ranks)]
        self.pool.free = _FreeOfAll(self.ranks)
        self.parts: list[Plan] = []  # of the step that was planned last
        self.rank_steps = 0  # steps · ranks
        self.dummy_steps = 0  # of these without work

    def add(self, request: Request) -> None:
        min(self.ranks, key=lambda s: 4 * len(s.waiting) + len(s.running)).add(request)
        self._gather()

    def schedule(self) -> PolicyPlan:
        plan = PolicyPlan({}, [])
        for rank in self.ranks:
            part = rank.schedule()
            check_progress(rank, part)
            plan.parts.append(part)
            plan.tokens |= part.tokens
            plan.preempted += part.preempted
            plan.samples += part.samples
        self.parts = plan.parts
        if plan.tokens:
            self.rank_steps += len(self.ranks)
            self.dummy_steps += sum(not part.tokens for part in plan.parts)
        self._gather()
        return plan

    def update(self, plan: Plan) -> list[Request]:
        parts = plan.parts if isinstance(plan, PolicyPlan) and plan.parts else []
        finished = [r for rank, part in zip(self.ranks, parts, strict=False) for r in rank.update(part)]
        self._gather()
        return finished

    def _gather(self) -> None:
        self.running = [r for rank in self.ranks for r in rank.running]
        self.waiting = [r for rank in self.ranks for r in rank.waiting]


class _FreeOfAll(OrderedDict[int, None]):
    """As long as the free queues of all ranks together (and their null blocks but one)."""

    def __init__(self, ranks: list[Scheduler]) -> None:
        super().__init__()
        self.ranks = ranks

    def __len__(self) -> int:
        return sum(len(rank.pool.free) for rank in self.ranks) + len(self.ranks) - 1


def shape_of(plan: Plan) -> BatchShape:
    """The batch of a plan."""
    rows = [
        (float(tokens), float(request.computed), 1.0, request.computed - tokens < request.target)
        for request, tokens in plan.tokens.items()
    ]
    return BatchShape.from_rows(rows)


def lock_step_figures(model: StepModel, scheduler: LockStepScheduler) -> Callable[[BatchShape], StepFigures]:
    """Figures of the step that `scheduler` planned last: the seconds are those of its slowest rank.

    A rank's attention works on its own batch; the experts see the tokens of all ranks.
    """
    if model.pipeline_stages > 1:
        raise SpecError("policy: lock-step is not simulated with pipeline stages; use pp=1")

    def figures(shape: BatchShape) -> StepFigures:
        whole = step_figures(model, replace(shape, count=shape.count / model.step.attention_dp))
        tokens = model.step.values(shape)[model.step.expert_tokens_index]
        slowest = 0.0
        for part in scheduler.parts:
            if not part.tokens:
                continue  # a dummy step is no longer than that of any rank with work
            alike = shape_of(part)
            alike = replace(alike, count=alike.count * len(scheduler.ranks))  # the model takes all ranks' batches
            values = np.array(model.step.values(alike))
            values[model.step.expert_tokens_index] = tokens
            slowest = max(slowest, float(model.times(model.work_of(values)).total_s))
        return replace(whole, seconds=slowest)

    return figures
