"""The kernel's decision log, unfolded into steps: what it decided, in the form of `replay_schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.arrays import kernel_load
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.state import LOG_CACHED, LOG_PREEMPTED, LOG_SCHEDULED
from bstar.sim.replay import case_requests, case_settings
from bstar.sim.settings import SchedulerSettings
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def unit_cost(settings: SchedulerSettings) -> StepCost:
    """Every step takes one second: the clock counts steps."""
    none, zero = np.zeros(0), np.zeros(0, dtype=np.int64)
    return StepCost(
        decode_s=np.ones(settings.seat_limit + 2), span_rate=none, span_limit=zero, span_restarts=zero,
        token_s=np.zeros(settings.max_num_batched_tokens + settings.max_model_len + 2),
        sampled_s=np.zeros(settings.seat_limit + 2), linear=np.zeros(4), prompt_fixed_s=0.0, decode_fixed_s=0.0,
        step_s=1.0, row_compute=np.zeros((0, 4)), row_memory=np.zeros((0, 4)), row_base=none, row_phase=zero,
        power=3.0, prompt_limit=zero, prompt_restarts=zero, prompt_gathers=zero, prompt_stride=none,
    )  # fmt: skip


def unfold(log: Ints, log_s: Floats, block_size: int) -> list[dict[str, Any]]:
    """Steps of a log: {start_s, scheduled, preempted, free_blocks}; a run's later steps have start_s None."""
    steps: list[dict[str, Any]] = []
    computed: dict[int, int] = {}
    scheduled: list[list[int]] = []
    preempted: list[int] = []
    for (kind, a, b), start_s in zip(log.tolist(), log_s.tolist(), strict=True):
        if kind == LOG_SCHEDULED:
            scheduled.append([a, b])
        elif kind == LOG_PREEMPTED:
            preempted.append(a)
            computed[a] = 0
        elif kind == LOG_CACHED:
            computed[a] = b
        else:
            steps += _run(start_s, scheduled, preempted, a, b, computed, block_size)
            scheduled, preempted = [], []
    return steps


def _run(
    start_s: float, scheduled: list[list[int]], preempted: list[int], count: int, free: int,
    computed: dict[int, int], block_size: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """`count` equal steps, `free` blocks after the last; before it, those that later steps take are free too."""
    taken = np.zeros(count, dtype=np.int64)
    for request, tokens in scheduled:
        start = computed.get(request, 0)
        if count > 1:
            taken[(-start) % block_size :: block_size] += 1
        computed[request] = start + tokens * count
    later = taken.sum() - np.cumsum(taken)
    return [
        {"start_s": None if i else start_s, "scheduled": scheduled, "preempted": sorted(preempted),
         "free_blocks": int(free + later[i])}
        for i in range(count)
    ]  # fmt: skip


def replay_with_kernel(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`replay_schedule` by the kernel: rows of step, scheduled, preempted, free_blocks. Synchronous cases only."""
    settings = case_settings(case)
    if settings.async_scheduling:
        raise SpecError("async_scheduling: cases count steps; asynchronous schedules are compared by the clock")
    requests, raw = case_requests(case, settings.block_size), case["requests"]
    groups = [r.get("prefix") or (0, 0) for r in raw]
    names = {g: i for i, g in enumerate(dict.fromkeys(g[0] for g in groups))}
    arrival = np.array([r["arrival_step"] for r in raw], dtype=np.float64)
    queue = np.argsort(arrival, kind="stable")
    ids = [raw[i]["id"] for i in queue]
    # Ties of priority go by the place in the file, which is not the order of arrival: ranks say both.
    priority = np.array([requests[i].priority * len(raw) + i for i in queue], dtype=np.int64)
    traffic = Traffic(
        arrival_s=arrival[queue], input_tokens=np.array([requests[i].prompt_tokens for i in queue]),
        output_tokens=np.array([requests[i].output_tokens for i in queue]), priority=priority,
        prefix_group=np.array([names[groups[i][0]] for i in queue]),
        prefix_tokens=np.array([groups[i][1] for i in queue]),
    )  # fmt: skip
    engine = KernelEngine(
        settings, unit_cost(settings), kernel_load(settings, traffic), keep_decisions=True, empty_step_s=1.0
    )
    engine.advance()
    steps, step = list[dict[str, Any]](), 0
    for row in unfold(*engine.decisions, settings.block_size):
        step = step + 1 if row["start_s"] is None else round(row["start_s"])
        steps.append({
            "step": step, "scheduled": [[ids[r], t] for r, t in row["scheduled"]],
            "preempted": sorted(ids[r] for r in row["preempted"]), "free_blocks": row["free_blocks"],
        })  # fmt: skip
    return steps
