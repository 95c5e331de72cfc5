"""The waiting queue of the policy kernel, a ring, and a request's entry into a step."""

from __future__ import annotations

from bstar.sim.kernel.compiled import inlined
from bstar.sim.kernel.policy_state import FREE, HEAD, STEP, WAITING, PolicyState, Rules


@inlined
def push_last(s: PolicyState, request: int) -> None:
    """At the end of the queue."""
    at = s.n[HEAD] + s.n[WAITING]
    if at >= s.queue.size:
        at -= s.queue.size
    s.queue[at] = request
    s.n[WAITING] += 1


@inlined
def push_first(s: PolicyState, request: int) -> None:
    """At the head of the queue."""
    at = s.n[HEAD] - 1
    if at < 0:
        at += s.queue.size
    s.queue[at] = request
    s.n[HEAD] = at
    s.n[WAITING] += 1


@inlined
def pop_first(s: PolicyState) -> int:
    """Take the head of the queue."""
    request = s.queue[s.n[HEAD]]
    s.n[HEAD] += 1
    if s.n[HEAD] == s.queue.size:
        s.n[HEAD] = 0
    s.n[WAITING] -= 1
    return request


@inlined
def enter(rules: Rules, s: PolicyState, request: int, tokens: int) -> None:
    """`tokens` for a request in the step being planned, with the blocks they need."""
    after = min(s.computed[request] + tokens, rules.max_model_len)
    needed = (after + rules.block_size - 1) // rules.block_size - s.held[request]
    if needed > 0:
        s.n[FREE] -= needed
        s.held[request] += needed
    s.step[s.n[STEP]] = request
    s.take[s.n[STEP]] = tokens
    s.n[STEP] += 1
