"""`bstar.sim.policies.trtllm` in arrays, without prefix caching. The readable one says why."""

from __future__ import annotations

from bstar.sim.kernel.compiled import inlined, part
from bstar.sim.kernel.policy_queue import enter, pop_first, push_first
from bstar.sim.kernel.policy_state import (
    ALIVE,
    ARRIVED,
    BATCH,
    FREE,
    HEAD,
    HELD_BACK,
    LOOKED,
    MAX_UTILIZATION,
    STEP,
    VICTIMS,
    WAITED,
    WAITING,
    PolicyState,
    Requests,
    Rules,
)


@part
def plan_trtllm(rules: Rules, requests: Requests, s: PolicyState) -> None:
    """Fill s.step and s.take. s.batch holds the requests in flight, in order."""
    n = s.n
    at = n[HEAD] + n[WAITING]
    while n[LOOKED] < n[ARRIVED]:
        place = at if at < s.queue.size else at - s.queue.size
        s.queue[place] = s.order[n[LOOKED]]
        n[WAITING] += 1
        n[LOOKED] += 1
        at = n[HEAD] + n[WAITING]
    fitting = _max_utilization(rules, requests, s) if rules.scheme == MAX_UTILIZATION else _no_evict(
        rules, requests, s)
    _fill(rules, s, fitting)


@inlined
def ending(requests: Requests, s: PolicyState, r: int) -> bool:
    """Whether its last token is being made."""
    return s.promised[r] > 0 and s.known[r] + s.promised[r] >= requests.prompt[r] + requests.output[r]


@inlined
def _blocks(rules: Rules, tokens: int) -> int:
    return (min(tokens, rules.max_model_len) + rules.block_size - 1) // rules.block_size


@inlined
def _to_completion(rules: Rules, requests: Requests, s: PolicyState, r: int) -> int:
    return max(_blocks(rules, requests.prompt[r] + requests.grants[r]) - s.held[r], 0)


@inlined
def _no_evict(rules: Rules, requests: Requests, s: PolicyState) -> int:
    n, left, fitting = s.n, s.n[FREE], 0
    for i in range(n[BATCH]):
        r = s.batch[i]
        if s.computed[r] >= s.target[r] and not ending(requests, s, r):
            left -= _to_completion(rules, requests, s, r)
            s.fit[fitting] = r
            fitting += 1
    for i in range(n[BATCH]):
        r = s.batch[i]
        if s.computed[r] < s.target[r]:
            needed = _to_completion(rules, requests, s, r)
            if fitting >= rules.seats or needed > left:
                return fitting
            left -= needed
            s.fit[fitting] = r
            fitting += 1
    for i in range(n[WAITING]):
        place = n[HEAD] + i
        r = s.queue[place if place < s.queue.size else place - s.queue.size]
        needed = _to_completion(rules, requests, s, r)
        if fitting >= rules.seats or needed > left:
            break
        left -= needed
        s.fit[fitting] = r
        fitting += 1
    return fitting


@inlined
def _max_utilization(rules: Rules, requests: Requests, s: PolicyState) -> int:
    n, fitting, taken, at = s.n, 0, 0, 0
    last = n[BATCH]
    while at < last:
        r = s.batch[at]
        if ending(requests, s, r):
            at += 1
            continue
        needed = max(_blocks(rules, max(s.computed[r] + 1, s.target[r])) - s.held[r], 0)
        if fitting < rules.seats and taken + needed <= n[FREE]:
            s.fit[fitting] = r
            fitting += 1
            taken += needed
            at += 1
            continue
        while ending(requests, s, s.batch[last - 1]):
            last -= 1
        last -= 1
        victim = s.batch[last]
        n[FREE] += s.held[victim]
        s.held[victim], s.computed[victim], s.promised[victim] = 0, 0, 0
        s.preemptions[victim] += 1
        s.victims[n[VICTIMS]] = victim
        n[VICTIMS] += 1
        n[ALIVE] -= 1
        push_first(s, victim)
        for i in range(last, n[BATCH] - 1):
            s.batch[i] = s.batch[i + 1]
        n[BATCH] -= 1
    if n[VICTIMS] > 0:
        return fitting
    for i in range(n[WAITING]):
        place = n[HEAD] + i
        r = s.queue[place if place < s.queue.size else place - s.queue.size]
        needed = _blocks(rules, s.known[r])
        if fitting >= rules.seats or taken + needed > n[FREE]:
            break
        taken += needed
        s.fit[fitting] = r
        fitting += 1
    return fitting


@inlined
def _fill(rules: Rules, s: PolicyState, fitting: int) -> None:
    used, prompts = 0, 0
    for i in range(fitting):
        r = s.fit[i]
        decodes = s.held[r] > 0 and s.computed[r] >= s.target[r]
        if not decodes and rules.chunk > 0:
            s.fit_tokens[prompts] = r
            prompts += 1
            continue
        tokens = 1 if decodes else s.known[r]
        if used + tokens > rules.budget:
            break
        used += tokens
        if decodes:
            enter(rules, s, r, 1)
        else:
            s.fit_tokens[prompts] = r
            prompts += 1
    room = rules.budget - used if rules.chunk > 0 else rules.budget
    chosen, asked = 0, 0
    for i in range(prompts):
        r = s.fit_tokens[i]
        rest = s.known[r] - (s.computed[r] if s.held[r] > 0 else 0)
        tokens = min(rest, room)
        if tokens < rest:
            tokens = tokens // rules.chunk * rules.chunk
        if tokens <= 0:
            continue
        s.fit_tokens[chosen] = r
        s.fit[chosen] = tokens
        chosen += 1
        room -= tokens
        asked += s.known[r]
    if _waits(rules, s, s.n[STEP], asked):
        return
    for i in range(chosen):
        r = s.fit_tokens[i]
        if s.held[r] == 0:
            _start(rules, s, r)
        enter(rules, s, r, s.fit[i])


@inlined
def _waits(rules: Rules, s: PolicyState, generation: int, prompts: int) -> bool:
    """Whether prompts wait for more of them, beside `generation` tokens."""
    n = s.n
    n[HELD_BACK] = 0
    if generation == 0 or prompts == 0 or (rules.wait_iters == 0 and rules.wait_tokens == 0.0):
        return False
    if n[WAITED] >= rules.wait_iters or generation + prompts >= rules.wait_tokens:
        n[WAITED] = 0
        return False
    n[WAITED] += 1
    n[HELD_BACK] = 1
    return True


@part
def _start(rules: Rules, s: PolicyState, r: int) -> None:
    """A waiting request is in flight from now on; those passed over keep their order."""
    n = s.n
    at = 0
    while True:
        place = n[HEAD] + at
        if s.queue[place if place < s.queue.size else place - s.queue.size] == r:
            break
        at += 1
    while at > 0:
        place, before = n[HEAD] + at, n[HEAD] + at - 1
        s.queue[place if place < s.queue.size else place - s.queue.size] = s.queue[
            before if before < s.queue.size else before - s.queue.size]
        at -= 1
    pop_first(s)
    s.batch[n[BATCH]] = r
    n[BATCH] += 1
    n[ALIVE] += 1
    s.computed[r], s.target[r] = 0, s.known[r]
    s.held[r] = _blocks(rules, s.known[r])
    n[FREE] -= s.held[r]
