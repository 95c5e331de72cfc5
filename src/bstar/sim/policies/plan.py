"""What a step does beside giving out tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from bstar.sim.scheduler import Plan, Request


@dataclass(slots=True)
class PolicyPlan(Plan):
    """A plan of a policy.

    extra_s   seconds that the step takes beside its batch (transfers over PCIe, drafting)
    made      tokens sampled for each request of `samples`; None: one each
    parts     the plans of the ranks that step together; empty: one rank
    """

    extra_s: float = 0.0
    made: dict[Request, int] | None = None
    parts: list[Plan] = field(default_factory=list)
