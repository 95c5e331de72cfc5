"""A closed loop of clients over a prefill and a decode pool: settings, arrays, and the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bstar.errors import SpecError
from bstar.sim.cluster.pool_cost import DecodeCost, PromptCost

if TYPE_CHECKING:
    from bstar.sim.cluster.pool_kernel import PoolRules, PoolState, PoolTimes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PoolRouter = Literal["in-turn", "least-outstanding"]
ShownFrom = Literal["prefill", "landing", "decode-step"]

_UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPool:
    """Workers that compute prompts.

    ranks     of attention data parallelism in a worker; they step together
    prompts   prompts (or parts) of one rank in a step at most; tokens: likewise
    chunked   prompts are cut where a step is full; else one that does not fit waits, and a longer one goes alone
    shared    the ranks of a worker have one queue: the rank with the fewest tokens in a step takes the next prompt;
              else a request gets its rank when it comes, in turn
    """

    workers: int
    ranks: int = 1
    prompts: int = _UNLIMITED
    tokens: int
    chunked: bool = False
    shared: bool = True
    router: PoolRouter = "in-turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    """Workers that make tokens.

    seats, room   sequences and tokens of cache of a rank at most; a sequence holds room for its whole answer
    shared        as of prompts: the rank with the fewest sequences takes the next
    ahead         steps are planned one ahead: who lands in a step joins after the next; a seat is free one step later
    """

    workers: int
    ranks: int = 1
    seats: int = _UNLIMITED
    room: int = _UNLIMITED
    shared: bool = True
    ahead: bool = True
    router: PoolRouter = "least-outstanding"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRequests:
    """What is asked: arrays by request.

    steps     decode steps of the answer (0: the prefill's token is all)
    hold      tokens of cache; moved_s: seconds of its transfer
    growth    tokens that a decode step adds to a context (above 1 with drafting)
    front_s   from a client to the prefill pool
    """

    prompt: Ints
    steps: Ints
    hold: Ints
    moved_s: Floats
    clients: int
    front_s: float = 0.0
    growth: float = 1.0

    @classmethod
    def of(
        cls, prompt: ArrayLike, steps: ArrayLike, moved_s: ArrayLike, *, clients: int, front_s: float = 0.0,
        growth: float = 1.0,
    ) -> PoolRequests:  # fmt: skip
        """Requests whose caches hold prompt and answer."""
        tokens, made = np.asarray(prompt, dtype=np.int64), np.asarray(steps, dtype=np.int64)
        if tokens.size == 0 or clients < 1 or tokens.size >= 1 << 22:
            raise SpecError(f"requests: 1 to {(1 << 22) - 1:,} requests and a client are needed")
        hold = tokens + np.ceil(made * growth).astype(np.int64)
        moved = np.broadcast_to(np.asarray(moved_s, dtype=np.float64), tokens.shape).copy()
        return cls(prompt=tokens, steps=made, hold=hold, moved_s=moved, clients=min(clients, tokens.size),
                   front_s=front_s, growth=growth)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRun:
    """Seconds by request, nan where it did not happen, and who decoded it.

    runs   with a log: kind (0 prompts, 1 decode), worker, start, steps, base, slope, sequences (tokens of prompts) of
           the slowest rank, of all ranks, Σ reach (prompt tokens) of the slowest; step j takes base + slope · j
    """

    arrival_s: Floats
    prefilled_s: Floats
    landed_s: Floats
    first_s: Floats
    finish_s: Floats
    worker: Ints
    rank: Ints
    runs: Floats


def run_pools(
    requests: PoolRequests, prefill: PromptPool, decode: DecodePool, prompts: PromptCost, steps: DecodeCost, *,
    shown: ShownFrom = "decode-step", log_rows: int = 0,
) -> PoolRun:  # fmt: skip
    """Every request through both pools, compiled.

    shown   who shows a client its first token: the prefill side, the decode side when it takes the cache in, or the
            decode side with its first step
    Raises SpecError where a request can never be served.
    """
    from bstar.sim.cluster import pool_kernel as k

    check(requests, decode)
    n, clients = requests.prompt.size, requests.clients
    rules = k.PoolRules(
        prefill_workers=prefill.workers, prefill_ranks=prefill.ranks, prompts=min(prefill.prompts, _UNLIMITED),
        budget=prefill.tokens, chunked=int(prefill.chunked), prompts_shared=int(prefill.shared),
        decode_workers=decode.workers, decode_ranks=decode.ranks, seats=decode.seats, room=decode.room,
        decode_shared=int(decode.shared), ahead=int(decode.ahead), prefill_router=_ROUTERS[prefill.router],
        decode_router=_ROUTERS[decode.router], first_token=_SHOWN[shown], clients=clients,
        front_s=float(requests.front_s), growth=float(requests.growth),
    )  # fmt: skip
    out = _times(n, clients)
    state = _state(rules, requests, prompts, steps, log_rows)
    load = k.PoolLoad(requests.prompt, requests.steps, requests.hold, requests.moved_s)
    done = k.serve_pools(rules, load, prompts, steps, state, out, n)
    if done < n:
        raise SpecError(f"pools: {n - done:,} requests can never be served with the decode pool's seats and room")
    return PoolRun(
        arrival_s=out.arrival_s, prefilled_s=out.prefilled_s, landed_s=out.landed_s, first_s=out.first_s,
        finish_s=out.finish_s, worker=out.worker, rank=out.rank, runs=state.runs[: min(state.n[k.RUNS], log_rows)],
    )  # fmt: skip


_ROUTERS = {"in-turn": 0, "least-outstanding": 1}
_SHOWN = {"prefill": 0, "landing": 1, "decode-step": 2}


def check(requests: PoolRequests, decode: DecodePool) -> None:
    """Raises SpecError where the largest request has no place."""
    largest = int(requests.hold.max())
    if decode.seats < 1 or largest > decode.room:
        raise SpecError(f"decode pool: a request of {largest:,} tokens has no place in {decode.room:,}")


def _times(n: int, clients: int) -> PoolTimes:
    from bstar.sim.cluster.pool_kernel import PoolTimes

    def never() -> Floats:
        return np.full(n, np.nan)

    arrival = never()
    arrival[:clients] = 0.0
    return PoolTimes(
        arrival_s=arrival, prefilled_s=never(), landed_s=never(), first_s=never(), finish_s=never(),
        worker=np.full(n, -1, dtype=np.int64), rank=np.full(n, -1, dtype=np.int64))


def _state(
    rules: PoolRules, requests: PoolRequests, prompts: PromptCost, steps: DecodeCost, log_rows: int
) -> PoolState:
    from bstar.sim.cluster import pool_kernel as k

    n, clients, groups = requests.prompt.size, requests.clients, len(steps.span_limit)
    wp, rp, wd, rd = rules.prefill_workers, rules.prefill_ranks, rules.decode_workers, rules.decode_ranks
    counts = np.zeros(9, np.int64)
    counts[k.TAIL] = counts[k.SENT] = clients
    order = np.zeros(n + 1, np.int64)
    order[:clients] = np.arange(clients)
    planned = min(clients, rp * min(rules.prompts, clients)) + rp

    def ints(*shape: int, value: int = 0) -> Ints:
        return np.full(shape, value, dtype=np.int64)

    return k.PoolState(
        n=counts, order=order, after=ints(n, value=-1), done=ints(n), p_end=np.full(wp, np.inf),
        p_head=ints(wp * rp, value=-1), p_tail=ints(wp * rp, value=-1), p_plan=ints(wp, planned),
        p_take=ints(wp, planned), p_count=ints(wp), p_turn=ints(wp), p_out=ints(wp),
        x=np.zeros((rp, len(prompts.own.linear))), tokens=ints(rp), prompts=ints(rp), landing=ints(clients + 1),
        fresh=ints(clients + 1), d_step=ints(wd), d_start=np.zeros(wd), d_run=ints(wd), d_base=np.zeros(wd),
        d_slope=np.zeros(wd), d_end=np.full(wd, np.inf), d_slow=ints(wd), d_active=ints(wd),
        d_head=ints(wd * rd, value=-1), d_tail=ints(wd * rd, value=-1), d_turn=ints(wd), d_out=ints(wd),
        b=ints(wd, rd), late=ints(wd, rd), room=ints(wd, rd, value=rules.room), late_room=ints(wd, rd),
        reach=np.zeros((wd, rd, groups)), growing=ints(wd, rd, groups), since=ints(n), ends=ints(wd, clients + 1),
        ends_count=ints(wd), crossings=ints(wd, (clients + 1) * groups + 1), crossings_count=ints(wd),
        line=np.zeros(rd), rise=np.zeros(rd), runs=np.zeros((log_rows, 9)),
    )  # fmt: skip
