"""The order of candidates, and which of them nothing else beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bstar.planning.evaluate import Sized
from bstar.planning.results import Candidate
from bstar.planning.screen import Screened, Spot, Task

Key = tuple[float, float, float, float]


def sized_key(sized: Sized, task: Task) -> Key:
    """Cheapest first; without prices fewest GPUs; at equal cost no pipeline, then the most headroom.

    Without a load to carry, what counts is the cost of a request: cost over capacity. Layouts of known price
    come before those of unknown price.
    """
    return _key(sized.spot, task, replicas=sized.replicas, carried_per_s=sized.carried_per_s)


def bound_key(screened: Screened, task: Task) -> Key:
    """No key of `sized_key` of this layout comes before this one in cost."""
    replicas = screened.least_replicas(task)
    return _key(screened.spot, task, replicas=replicas, carried_per_s=screened.bound_per_s * replicas)


def _key(spot: Spot, task: Task, *, replicas: int, carried_per_s: float) -> Key:
    gpus = replicas * spot.layout.num_gpus
    price = spot.price.usd_per_hour
    amount = float(gpus) if price is None else price * gpus
    unknown, pipelined = float(price is None), float(spot.layout.pp > 1)
    if task.load is None:
        return (unknown, amount / carried_per_s, float(gpus), pipelined)
    # A pipeline's bubbles are not modelled in full: at equal cost it comes after layouts without one.
    return (unknown, amount, pipelined, -carried_per_s / gpus)


def with_pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The same candidates, marked where no other costs less (or takes fewer GPUs) and answers faster (p95 E2E)."""
    def amount(c: Candidate) -> float:
        return float(c.num_gpus) if c.cost.usd_per_hour is None else c.cost.usd_per_hour

    def slow(c: Candidate) -> float:
        return c.expected.e2e_s.p95 or float("inf")

    out = []
    for one in candidates:
        same = [c for c in candidates if (c.cost.usd_per_hour is None) == (one.cost.usd_per_hour is None)]
        beaten = any(
            amount(c) <= amount(one) and slow(c) <= slow(one) and (amount(c), slow(c)) != (amount(one), slow(one))
            for c in same
        )
        out.append(replace(one, pareto=not beaten))
    return tuple(out)
