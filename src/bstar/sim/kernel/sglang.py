"""`bstar.sim.policies.sglang` in arrays, without prefix caching. The readable one says why."""

from __future__ import annotations

from bstar.sim.kernel.compiled import inlined, part
from bstar.sim.kernel.policy_queue import enter, pop_first, push_first, push_last
from bstar.sim.kernel.policy_state import (
    ALIVE,
    ARRIVED,
    AT_FAULT,
    BATCH,
    CHUNKED,
    DECAYS,
    FLIGHT,
    FREE,
    FULL_BATCH,
    HEAD,
    LOOKED,
    POLLS,
    PREFILLED,
    RATIO,
    STEP,
    VICTIMS,
    WAITING,
    PolicyState,
    Requests,
    Rules,
)


@inlined
def ratio_of(rules: Rules, s: PolicyState) -> float:
    """Share of the running answers' room that admission keeps free."""
    decays = s.n[DECAYS]
    if decays == 0:
        return s.t[RATIO]
    return max(s.t[RATIO] - decays * rules.decay, rules.least_ratio)


@part
def look(s: PolicyState) -> None:
    """The scheduler learns of everybody who has arrived."""
    s.n[POLLS] = 0
    while s.n[LOOKED] < s.n[ARRIVED]:
        push_last(s, s.order[s.n[LOOKED]])
        s.n[LOOKED] += 1


@part
def plan_sglang(rules: Rules, requests: Requests, s: PolicyState) -> int:
    """Fill s.step and s.take; returns 1 where a request outgrows the cache."""
    n = s.n
    n[POLLS] += 1000 if n[PREFILLED] > 0 else 1
    if n[POLLS] >= rules.recv_interval:
        n[POLLS] = 0
        if n[LOOKED] < n[ARRIVED]:
            look(s)
    shrunk = False
    for i in range(n[PREFILLED]):
        r = s.prefilled[i]
        if r == n[CHUNKED]:
            continue
        if s.gone[r]:
            shrunk = True
            continue
        s.batch[n[BATCH]] = r
        n[BATCH] += 1
    n[PREFILLED] = 0
    if shrunk:
        n[FULL_BATCH] = 0
    for attempt in range(2):
        if attempt == 1:
            if n[STEP] > 0 or n[VICTIMS] > 0:
                break
            look(s)  # the batch was found empty: the loop comes round at once
        if _prefill(rules, requests, s):
            break
        if attempt == 0 and _decode(rules, requests, s):
            return 1
    return 0


@inlined
def _prefill(rules: Rules, requests: Requests, s: PolicyState) -> bool:
    n = s.n
    if (n[FULL_BATCH] or n[WAITING] == 0) and n[CHUNKED] < 0:
        return False
    seats = rules.seats - n[BATCH]
    if seats <= 0 and n[CHUNKED] >= 0:
        n[FULL_BATCH] = 1
        return False
    size = rules.block_size
    riders = n[BATCH] if rules.mixed else 0
    growth = 0
    for i in range(n[BATCH]):
        r = s.batch[i]
        if not s.gone[r]:
            growth += min(requests.grants[r] - (s.known[r] - requests.prompt[r]), rules.clip)
    free_tokens = n[FREE] * size
    later = riders + growth * ratio_of(rules, s)
    now = riders
    left_input = rules.max_prefill - riders
    left_chunk = (rules.chunk if rules.chunk > 0 else 1 << 60) - riders
    chosen = 0
    if n[CHUNKED] >= 0:
        r = n[CHUNKED]
        rest = s.known[r] - s.computed[r]
        most = min(left_chunk, int(free_tokens - later))
        tokens = min(rest, most if most > 0 else left_chunk)
        paged = (tokens + size - 1) // size * size
        now += paged
        later += paged + (min(requests.grants[r], rules.clip) if tokens == rest else 0)
        left_input -= paged
        left_chunk -= paged
        s.fit[0], s.fit_tokens[0] = r, tokens
        chosen = 1
    while n[WAITING] > 0:
        if chosen >= seats:
            n[FULL_BATCH] = 1
        if n[FULL_BATCH]:
            break
        r = s.queue[n[HEAD]]
        extend = s.known[r]
        total = extend + min(max(requests.grants[r] - (s.known[r] - requests.prompt[r]), 0), rules.clip)
        paged = (extend + size - 1) // size * size
        if total >= free_tokens - later:
            n[FULL_BATCH] = 1
            break
        if paged >= left_input and chosen > 0:
            break
        tokens = extend
        if paged > left_chunk:
            tokens = left_chunk // size * size
        if tokens <= 0:
            break
        paged = (tokens + size - 1) // size * size
        now += paged
        later += paged + (min(requests.grants[r], rules.clip) if tokens == extend else 0)
        left_input -= paged
        left_chunk -= paged
        pop_first(s)
        n[ALIVE] += 1
        s.computed[r], s.held[r], s.target[r] = 0, 0, s.known[r]
        s.fit[chosen], s.fit_tokens[chosen] = r, tokens
        chosen += 1
        if free_tokens - later <= 0 or free_tokens - now <= 0:
            n[FULL_BATCH] = 1
            break
        if left_input <= 0 or left_chunk <= 0:
            break
    return _fill(rules, s, chosen)


@inlined
def _fill(rules: Rules, s: PolicyState, chosen: int) -> bool:
    n, size = s.n, rules.block_size
    riders, pages = 0, 0
    if rules.mixed:
        for i in range(n[BATCH]):
            r = s.batch[i]
            if not s.gone[r]:
                riders += 1
                pages += s.computed[r] == s.held[r] * size
        if pages > n[FREE]:
            riders = 0
    reserved = pages if riders > 0 else 0
    n[FREE] -= reserved
    n[CHUNKED] = -1
    for i in range(chosen):
        r = s.fit[i]
        if n[CHUNKED] >= 0:  # the one before it did not get all: the rest goes back
            for k in range(chosen - 1, i - 1, -1):
                push_first(s, s.fit[k])
                n[ALIVE] -= 1
            break
        tokens = min(s.fit_tokens[i], (s.held[r] + n[FREE]) * size - s.computed[r])
        if tokens > 0:
            enter(rules, s, r, tokens)
            s.prefilled[n[PREFILLED]] = r
            n[PREFILLED] += 1
        if s.computed[r] + max(tokens, 0) < s.known[r]:
            n[CHUNKED] = r
    if n[STEP] == 0:
        n[FREE] += reserved
        return False
    n[FREE] += reserved
    if riders > 0:
        for i in range(n[BATCH]):
            r = s.batch[i]
            if not s.gone[r]:
                enter(rules, s, r, 1)
                s.prefilled[n[PREFILLED]] = r
                n[PREFILLED] += 1
        n[BATCH] = 0
    return True


@inlined
def _decode(rules: Rules, requests: Requests, s: PolicyState) -> bool:
    n, size = s.n, rules.block_size
    before, left, pages = n[BATCH], 0, 0
    for i in range(before):
        r = s.batch[i]
        if not s.gone[r]:
            s.batch[left] = r
            left += 1
            pages += s.computed[r] == s.held[r] * size
    n[BATCH] = left
    if left == 0:
        n[FULL_BATCH] = 0
        return False
    if pages > n[FREE]:
        if _retract(rules, requests, s, pages):
            return True
    else:
        n[DECAYS] += 1
    if n[BATCH] < before:
        n[FULL_BATCH] = 0
    for i in range(n[BATCH]):
        enter(rules, s, s.batch[i], 1)
    return False


@part
def _retract(rules: Rules, requests: Requests, s: PolicyState, pages: int) -> bool:
    """Give up requests until the others have room; True where the last one has none."""
    n, size = s.n, rules.block_size
    left = n[BATCH]
    while left > 1 and (n[VICTIMS] == 0 or pages > n[FREE]):
        worst, fewest, longest = -1, 0, 0
        for i in range(n[BATCH]):  # the last of those that are alike
            r = s.batch[i]
            if r < 0:
                continue
            made = s.known[r] - requests.prompt[r]
            if worst < 0 or made < fewest or (made == fewest and requests.prompt[r] >= longest):
                worst, fewest, longest = i, made, requests.prompt[r]
        r = s.batch[worst]
        s.batch[worst] = -1
        left -= 1
        pages -= s.computed[r] == s.held[r] * size
        if s.promised[r] > 0:  # its token of the step that runs is lost
            for k in range(n[FLIGHT]):
                if s.flight[k] == r:
                    for j in range(k, n[FLIGHT] - 1):
                        s.flight[j] = s.flight[j + 1]
                    n[FLIGHT] -= 1
                    break
        n[FREE] += s.held[r]
        s.held[r], s.computed[r], s.promised[r] = 0, 0, 0
        s.preemptions[r] += 1
        s.victims[n[VICTIMS]] = r
        n[VICTIMS] += 1
        n[ALIVE] -= 1
        push_last(s, r)
    kept, made, asked = 0, 0, 0
    for i in range(n[BATCH]):
        r = s.batch[i]
        if r >= 0:
            s.batch[kept] = r
            kept += 1
            made += s.known[r] - requests.prompt[r]
            asked += requests.grants[r]
    n[BATCH] = kept
    if pages > n[FREE]:
        n[AT_FAULT] = s.batch[0]
        return True
    s.t[RATIO] = min(1.0, (made + rules.retract_steps * kept) / (asked + 1))
    n[DECAYS] = 0
    return False
