"""Speculative decoding on vLLM's scheduler: k tokens are drafted for every decoding request, one step verifies them.

    tokens of a step        1 + k for a decoding request, all of which take budget, blocks and time
    tokens made             1 + the drafts accepted before the first rejection
    expected                E = 1 + Σ_{i ≤ k} Π_{j ≤ i} p_j        p_j: acceptance at position j, given those before
    what is rejected        is taken back: its cache slots are written again

One number, drawn per (seed, request, tokens it has), decides how many drafts are accepted, so that a policy that
schedules otherwise still sees the same luck at the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from bstar.errors import SpecError
from bstar.sim.policies.plan import PolicyPlan
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.traffic.streams import stream

DraftSeconds = Callable[[int, float], float]

_MASK = (1 << 64) - 1
_UNIT = 1.0 / (1 << 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """acceptance        chance of each position, given that those before it were accepted; its length is k
    draft_s             seconds to draft one position for the batch (one forward pass of the draft model)
    draft_sequence_s    and for each sequence in it
    seed                of the stream "acceptance"
    """

    acceptance: tuple[float, ...]
    draft_s: float = 0.0
    draft_sequence_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 <= p <= 1 for p in self.acceptance):
            raise SpecError(f"acceptance: each must be a probability, is {self.acceptance!r}")
        if self.draft_s < 0 or self.draft_sequence_s < 0:
            raise SpecError("draft_s, draft_sequence_s: must not be negative")

    @property
    def reached(self) -> tuple[float, ...]:
        """Chance that the drafts up to each position are all accepted."""
        return tuple(accumulate(self.acceptance, mul))

    @property
    def key(self) -> int:
        """What the draws of a run start from."""
        return int(stream(self.seed, "acceptance").integers(0, 1 << 63))

    def drafting_s(self, sequences: int) -> float:
        """To draft k tokens for that many sequences."""
        return len(self.acceptance) * (self.draft_s + sequences * self.draft_sequence_s) if sequences else 0.0


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens that a verification step makes on average: 1 + Σ Π p."""
    return 1.0 + float(sum(accumulate(acceptance, mul)))


def uniform(key: int, rank: int, made: int) -> float:
    """A number in [0, 1) for a request that has made so many tokens: SplitMix64 of the three."""
    z = (key + rank * 0x9E3779B97F4A7C15 + made * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return float(z >> 11) * _UNIT


class SpeculativeScheduler(Scheduler):
    """Synchronous: what a step accepted is known before the next is planned.

    Space that the draft model's own cache takes is not counted here.
    """

    def __init__(
        self, settings: SchedulerSettings, options: SpeculationOptions, draft: DraftSeconds | None = None
    ) -> None:
        """`draft`: seconds to draft a position for so many sequences of so much context, beside the options'."""
        if settings.async_scheduling:
            raise SpecError("async_scheduling: speculation is simulated with synchronous scheduling; switch it off")
        super().__init__(settings)
        self.options, self.draft = options, draft
        self.reached = options.reached
        self.key = options.key
        self.drafts: dict[Request, int] = {}  # of the step being planned
        self.accepted = 0  # drafts, so far
        self.drafted = 0

    def schedule(self) -> PolicyPlan:
        for request in self.running:
            if request.computed >= request.target:
                left = self.settings.max_model_len - request.num_tokens - 1
                self.drafts[request] = max(min(len(self.reached), left), 0)
                request.num_tokens += self.drafts[request]  # to compute like any other token
        inner = super().schedule()
        made: dict[Request, int] = {}
        plan = PolicyPlan(inner.tokens, inner.preempted, made=made)
        plan.extra_s = self._drafting_s([r for r in self.drafts if r in plan.tokens])
        for request, drafts in self.drafts.items():
            request.num_tokens -= drafts
        for request, tokens in plan.tokens.items():
            drafts = 0
            if request.computed - tokens >= request.target:
                drafts = tokens - 1
            elif request.computed < request.num_tokens:
                continue
            request.promised = 0
            plan.samples.append(request)
            made[request] = self._made(request, drafts)
            self.drafted += drafts
        self.drafts.clear()
        return plan

    def _name_blocks(self, request: Request, tokens: int) -> None:
        """Drafts may be taken back: what they fill has no key."""
        super()._name_blocks(request, min(tokens, request.num_tokens - self.drafts.get(request, 0)))

    def _drafting_s(self, requests: list[Request]) -> float:
        total = self.options.drafting_s(len(requests))
        if self.draft is not None and requests and self.reached:
            context = sum(r.computed for r in requests) / len(requests)
            total += len(self.reached) * self.draft(len(requests), context)
        return total

    def _made(self, request: Request, drafts: int) -> int:
        made = request.num_tokens - request.prompt_tokens
        luck = uniform(self.key, request.rank, made)
        accepted = sum(luck < chance for chance in self.reached[:drafts])
        self.accepted += accepted
        left = min(request.output_tokens - made, self.settings.max_model_len - request.num_tokens)
        return min(1 + accepted, left)

    def update(self, plan: Plan) -> list[Request]:
        assert isinstance(plan, PolicyPlan) and plan.made is not None
        for request in plan.samples:
            request.num_tokens += plan.made[request] - 1
            request.promised = 1
        finished = super().update(plan)
        for request in plan.samples:
            request.computed = request.num_tokens - 1
        return finished
