"""First pass over a layout: does it fit, is the SLO in reach, and what is the most that it could carry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstar.errors import BstarError
from bstar.planning.cost import GpuPrice
from bstar.planning.draws import RequestDraws
from bstar.planning.feasibility import NoAnswerError, check_floors, fitting_deployment, room_sequences
from bstar.planning.outcomes import saturated_rate_per_s
from bstar.planning.replica import Replica, mean_prefill_s, secure_room
from bstar.planning.sizing import MOST_UTILISED, replicas_needed
from bstar.planning.space import EngineChoice, Layout, lanes
from bstar.planning.steps import cache_cv, replica_of
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec
from bstar.specs.model import ModelSpec
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload

Ints = NDArray[np.int64]

# max_num_seqs stays this far below the walls of the memory; mission §7 gives 0.8–0.9.
MEMORY_SHARE = 0.9
# A default token budget below this is raised to it where it is what misses the SLO.
RAISED_BUDGET = 8192
_MOST_LANES = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What a plan is asked: everything that is the same for every layout."""

    workload: Workload
    slo: Slo
    draws: RequestDraws
    context: float
    max_model_len: int
    choice: EngineChoice
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

    lanes            values of max_num_seqs (over all ranks) worth trying
    bound_per_s      no replica of it carries more requests per second
    """

    spot: Spot
    deployment: Deployment
    replica: Replica
    lanes: Ints
    bound_per_s: float

    def least_replicas(self, task: Task) -> int:
        """Replicas that the load takes at the very least."""
        load = task.load
        if load is None:
            return 1
        if task.workload.concurrency is not None:
            # Each client has a request in the system all the time: no more of them than places, if it is to be quick.
            return 1
        return replicas_needed(load, self.bound_per_s)


def screen(task: Task, spot: Spot, *, token_budget: int | None = None) -> Screened:
    """Fit, floors and upper bound of a layout, at the engine's default token budget unless one is given.

    A default that cuts prompts into so many chunks that the SLO is missed is raised once. Raises NoAnswerError
    with the reason where the layout is no answer.
    """
    free = task.choice.max_num_batched_tokens is None
    asked = token_budget if token_budget is not None else task.choice.max_num_batched_tokens
    deployment, _ = fitting_deployment(
        spot.model, spot.device, spot.layout, replace(task.choice, max_num_batched_tokens=asked),
        kv_cache_dtype=spot.kv_cache_dtype, max_model_len=task.max_model_len,
    )  # fmt: skip
    try:
        return _screened(task, spot, deployment)
    except NoAnswerError as no:
        used = deployment.engine.max_num_batched_tokens
        if no.kind != "slo" or not free or token_budget is not None or used >= RAISED_BUDGET:
            raise
        try:
            return screen(task, spot, token_budget=RAISED_BUDGET)
        except NoAnswerError:
            raise no from None


def _screened(task: Task, spot: Spot, deployment: Deployment) -> Screened:
    load = task.workload
    room = room_sequences(deployment, task.context, shared_tokens=load.prefix_tokens * load.prefix_hit_fraction)
    if room < 1:
        raise NoAnswerError("memory", f"the KV cache has no room for one sequence of {task.context:,.0f} tokens")
    try:
        spread = cache_cv(deployment, task.draws)
        places = _places(task, spot, deployment, room, spread)
        replica = replica_of(
            deployment, task.draws, context=task.context, room_sequences=room, largest_batch=int(places[-1]),
            context_cv=spread,
        )  # fmt: skip
    except BstarError as error:
        raise NoAnswerError("dtype" if "peak" in str(error) else "layout", str(error)) from None
    check_floors(deployment, replica, task.draws, task.slo, task.context)
    rate = saturated_rate_per_s(replica, task.draws)
    kept = _worth_trying(task, replica, rate, places)
    last = int(kept[-1])
    cut = replace(replica, decode_step_s=replica.decode_step_s[:last], floor_step_s=replica.floor_step_s[:last])
    bound = float(rate[:last].max()) * (1.0 if task.load is None and task.slo.is_empty else MOST_UTILISED)
    return Screened(spot=spot, deployment=deployment, replica=cut, lanes=kept, bound_per_s=bound)


def _places(task: Task, spot: Spot, deployment: Deployment, room: float, context_cv: float) -> Ints:
    """Values of max_num_seqs times the data-parallel ranks, up to what the memory holds in 99 % of the moments."""
    ranks = spot.layout.attention_dp
    secure = secure_room(room, context_cv)
    if task.choice.max_num_seqs is not None:
        # More places than the cache has room for are not taken: the rest waits, or is preempted.
        return np.array([max(min(task.choice.max_num_seqs * ranks, int(secure)), 1)], dtype=np.int64)
    most = max(int(min(MEMORY_SHARE * room, secure) / ranks), 1)
    return np.array([n * ranks for n in lanes(min(most, deployment.engine.max_num_batched_tokens))], dtype=np.int64)


def _worth_trying(task: Task, replica: Replica, rate: NDArray[np.float64], places: Ints) -> Ints:
    """Lanes up to twice B_slo: beyond it the extra places are never taken inside the SLO."""
    decode = task.draws.mean_decode_tokens
    if task.slo.tpot_s is None or decode <= 0:
        return places[-_MOST_LANES:]
    batch = np.arange(1, replica.largest_batch + 1)
    cost = mean_prefill_s(replica, task.draws, rate)
    within = replica.decode_step_s + batch * cost / decode <= task.slo.tpot_s
    b_slo = int(batch[within][-1]) if within.any() else 1
    return places[: int(np.searchsorted(places, 2 * b_slo)) + 1][-_MOST_LANES:]
