"""vLLM's scheduler with swap preemption (`bstar.sim.policies.swap`) in arrays, without prefix caching, fcfs.

Swapped requests are the first n[SWAPPED] of the queue; host memory is as large as they need.
"""

from __future__ import annotations

from bstar.sim.kernel.compiled import part
from bstar.sim.kernel.policy_queue import enter, pop_first, push_first
from bstar.sim.kernel.policy_state import (
    ALIVE,
    ARRIVED,
    BATCH,
    EXTRA,
    FREE,
    HEAD,
    LOOKED,
    MOVED,
    SWAPPED,
    VICTIMS,
    WAITING,
    PolicyState,
    Requests,
    Rules,
)


@part
def plan_swapping(rules: Rules, requests: Requests, s: PolicyState) -> None:
    """Fill s.step and s.take; t[EXTRA] gets the seconds of the transfers."""
    n, size = s.n, rules.block_size
    while n[LOOKED] < n[ARRIVED]:
        place = n[HEAD] + n[WAITING]
        s.queue[place if place < s.queue.size else place - s.queue.size] = s.order[n[LOOKED]]
        n[WAITING] += 1
        n[LOOKED] += 1
    swapped = n[SWAPPED]
    competing = n[BATCH] + (0 if swapped > 0 else n[WAITING])
    longest = rules.max_model_len + rules.batched_tokens
    if rules.threshold > 0 and competing > 1:
        longest = rules.threshold
        if rules.adaptive:
            longest = max(longest, rules.batched_tokens // competing)
    left, out = _running(rules, requests, s, longest)
    moved = 0
    if n[VICTIMS] == 0 and swapped == 0:
        while n[WAITING] > 0 and left > 0 and n[BATCH] < rules.seats:
            r = s.queue[n[HEAD]]
            tokens = min(s.known[r], longest)
            if tokens > left and not rules.chunked:
                break
            tokens = min(tokens, left)
            fit = max(tokens, s.known[r]) if rules.reserve else tokens
            fit = (min(fit, rules.max_model_len) + size - 1) // size
            if fit + (rules.watermark if n[BATCH] > 0 else 0) > n[FREE]:
                break
            pop_first(s)
            s.batch[n[BATCH]] = r
            n[BATCH] += 1
            n[ALIVE] += 1
            s.computed[r], s.held[r], s.target[r] = 0, 0, s.known[r]
            enter(rules, s, r, tokens)
            left -= tokens
    elif n[VICTIMS] == 0:
        while n[SWAPPED] > 0 and n[BATCH] < rules.seats:
            r = s.queue[n[HEAD]]
            kept = s.kept[r]
            tokens = min(s.known[r] - kept, left)
            spare = rules.watermark if n[BATCH] > 0 else 0
            if tokens <= 0 or (kept + tokens + size - 1) // size + spare > n[FREE]:
                break
            pop_first(s)
            n[SWAPPED] -= 1
            s.batch[n[BATCH]] = r
            n[BATCH] += 1
            n[ALIVE] += 1
            s.kept[r] = 0
            s.computed[r], s.held[r], s.target[r] = kept, (kept + size - 1) // size, min(s.target[r], s.known[r])
            n[FREE] -= s.held[r]
            moved += s.held[r]
            enter(rules, s, r, tokens)
            left -= tokens
    n[MOVED] = moved + out
    s.t[EXTRA] = _seconds(rules, moved) + _seconds(rules, out)


@part
def _seconds(rules: Rules, blocks: int) -> float:
    return rules.latency_s + blocks * rules.block_s if blocks > 0 else 0.0


@part
def _running(rules: Rules, requests: Requests, s: PolicyState, longest: int) -> tuple[int, int]:
    """Those that run, with preemption; returns (tokens left, blocks moved out)."""
    n, size, left, out, at = s.n, rules.block_size, rules.budget, 0, 0
    while at < n[BATCH] and left > 0:
        r = s.batch[at]
        at += 1
        if s.promised[r] > 0 and s.known[r] + s.promised[r] >= requests.prompt[r] + requests.output[r]:
            continue
        tokens = min(min(s.known[r] + s.promised[r] - s.computed[r], longest), left)
        tokens = min(tokens, rules.max_model_len - s.computed[r] - 1)
        if tokens <= 0:
            continue
        needed = (s.computed[r] + tokens + size - 1) // size - s.held[r]
        own = False
        while needed > n[FREE] and not own:
            n[BATCH] -= 1
            victim = s.batch[n[BATCH]]
            own = victim == r
            if rules.swap and s.computed[victim] > 0:
                s.kept[victim] = s.computed[victim]
                n[SWAPPED] += 1
                out += (s.computed[victim] + size - 1) // size
            n[FREE] += s.held[victim]
            s.held[victim], s.computed[victim], s.promised[victim] = 0, 0, 0
            s.preemptions[victim] += 1
            s.victims[n[VICTIMS]] = victim
            n[VICTIMS] += 1
            n[ALIVE] -= 1
            push_first(s, victim)
        if own:
            break
        enter(rules, s, r, tokens)
        left -= tokens
    return left, out
