"""First pass over a layout: does it fit, is the SLO in reach, and what is the most that it could carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bstar.errors import BstarError
from bstar.planning.arrivals import Replay
from bstar.planning.cost import GpuPrice
from bstar.planning.draws import RequestDraws
from bstar.planning.feasibility import NoAnswerError, check_floors, fitting_deployment
from bstar.planning.lanes import Lanes, bound_per_s, lanes_of, places_of, room_by_budget, token_budgets
from bstar.planning.replica import Replica
from bstar.planning.sizing import MOST_UTILISED, replicas_needed
from bstar.planning.space import EngineChoice, Layout
from bstar.planning.steps import cache_cv, replica_of
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec
from bstar.specs.model import ModelSpec
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What a plan is asked: everything that is the same for every layout."""

    workload: Workload
    slo: Slo
    draws: RequestDraws
    context: float
    max_model_len: int
    choice: EngineChoice
    replay: Replay | None = None
    peak_factor: float = 1.0
    headroom_fraction: float = 0.0
    max_gpus: int | None = None

    @property
    def load(self) -> float | None:
        """Requests per second at the peak, or clients; None: whatever one replica carries."""
        if self.workload.concurrency is not None:
            return float(self.workload.concurrency) * self.peak_factor
        return None if self.workload.rate_per_s is None else self.workload.rate_per_s * self.peak_factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spot:
    """Where a replica would run: a layout on a device, with a cache format and a price."""

    model: ModelSpec
    device: DeviceSpec
    layout: Layout
    kv_cache_dtype: str
    price: GpuPrice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Screened:
    """A layout that fits and could meet the SLO.

    replica          at the token budget of `deployment`, steps up to the most places at any budget
    bound_per_s      no replica of it carries more requests per second
    """

    spot: Spot
    deployment: Deployment
    replica: Replica
    bound_per_s: float

    def least_replicas(self, task: Task) -> int:
        """Replicas that the load takes at the very least."""
        load = task.load
        if load is None or task.workload.concurrency is not None:
            return 1
        return replicas_needed(load, self.bound_per_s)


def screen(task: Task, spot: Spot) -> Screened:
    """Fit, floors and upper bound of a layout. Raises NoAnswerError with the reason where it is no answer."""
    deployment, _ = fitting_deployment(
        spot.model, spot.device, spot.layout, task.choice, kv_cache_dtype=spot.kv_cache_dtype,
        max_model_len=task.max_model_len,
    )  # fmt: skip
    budgets = token_budgets(deployment, free=task.choice.max_num_batched_tokens is None)
    # Room shrinks with the budget: the smallest one bounds them all.
    room = _room(task, deployment, sorted({budgets[0], deployment.engine.max_num_batched_tokens}))
    if not room:
        raise NoAnswerError("memory", f"the KV cache has no room for one sequence of {task.context:,.0f} tokens")
    try:
        spread = cache_cv(deployment, task.draws)
        replica = replica_of(
            deployment, task.draws, context=task.context, room_sequences=max(room.values()), context_cv=spread,
            largest_batch=_places(task, spot, budgets[-1], max(room.values()), spread)[-1],
        )  # fmt: skip
    except BstarError as error:
        raise NoAnswerError("dtype" if "peak" in str(error) else "layout", str(error)) from None
    check_floors(deployment, replica, task.draws, task.slo, task.context, np.array(budgets))
    bound = bound_per_s(replica, task.draws, task.slo, budgets) * _utilisation(task)
    return Screened(spot=spot, deployment=deployment, replica=replica, bound_per_s=bound)


def searched(task: Task, screened: Screened) -> Lanes:
    """The settings of a layout to search."""
    deployment = screened.deployment
    room = _room(task, deployment, token_budgets(deployment, free=task.choice.max_num_batched_tokens is None))
    spread = screened.replica.context_cv
    places = {budget: _places(task, screened.spot, budget, found, spread) for budget, found in room.items()}
    return lanes_of(screened.replica, task.draws, task.slo, room, places, utilisation=_utilisation(task))


def _room(task: Task, deployment: Deployment, budgets: Sequence[int]) -> dict[int, float]:
    shared = task.workload.prefix_tokens * task.workload.prefix_hit_fraction
    return room_by_budget(deployment, budgets, task.context, shared_tokens=shared)


def _places(task: Task, spot: Spot, budget: int, room: float, context_cv: float) -> list[int]:
    return places_of(
        budget, room, context_cv=context_cv, ranks=spot.layout.attention_dp, asked=task.choice.max_num_seqs
    )


def _utilisation(task: Task) -> float:
    return 1.0 if task.load is None and task.slo.is_empty else MOST_UTILISED
