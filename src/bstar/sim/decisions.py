"""The kernel's decision log, unfolded into steps: what it decided, in the form of `replay_schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.arrays import blocks_of, limits_of, load_of, outcome_of
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.loop import simulate
from bstar.sim.kernel.state import ENDED, LOG_CACHED, LOG_FULL, LOG_PREEMPTED, LOG_SCHEDULED, Load, Outcome
from bstar.sim.replay import case_requests, case_settings
from bstar.sim.settings import SchedulerSettings

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


def run_logged(
    settings: SchedulerSettings, load: Load, keys: int, cost: StepCost, *, empty_step_s: float = 0.0
) -> tuple[Ints, Floats, Outcome, float]:
    """The kernel with its log kept: (log rows, their times, per-request results, the clock at the end)."""
    rows = 1 << 14
    while True:
        log, log_s, out = np.full((rows, 3), -1, dtype=np.int64), np.zeros(rows), outcome_of(len(load.prompt))
        fresh = load._replace(order=load.order.copy(), arrival_s=load.arrival_s.copy())
        status, request, clock, _ = simulate(
            limits_of(settings), fresh, cost, blocks_of(settings, load, keys), out, log, log_s, empty_step_s, np.inf)
        if status == LOG_FULL:
            rows *= 4
            continue
        if status != ENDED:
            raise SpecError(f"request {request}: can never be scheduled or never ends with these settings")
        used = int((log[:, 0] >= 0).sum())
        return log[:used], log_s[:used], out, clock


def run_quiet(settings: SchedulerSettings, load: Load, keys: int, cost: StepCost) -> tuple[Outcome, float]:
    """The kernel without a log: (per-request results, the clock at the end)."""
    out = outcome_of(len(load.prompt))
    fresh = load._replace(order=load.order.copy(), arrival_s=load.arrival_s.copy())
    status, request, clock, _ = simulate(
        limits_of(settings), fresh, cost, blocks_of(settings, load, keys), out, np.zeros((0, 3), np.int64),
        np.zeros(0), 0.0, np.inf,
    )  # fmt: skip
    if status != ENDED:
        raise SpecError(f"request {request}: can never be scheduled or never ends with these settings")
    return out, clock


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
) -> list[dict[str, Any]]:
    """`count` equal steps, `free` blocks after the last; before it, those that later steps take are free too."""
    taken = np.zeros(count, dtype=np.int64)
    for request, tokens in scheduled:
        start = computed.get(request, 0)
        if count > 1:
            taken[(-start) % block_size :: block_size] += 1
        computed[request] = start + tokens * count
    later = taken.sum() - np.cumsum(taken)
    return [
        {"start_s": None if i else start_s, "scheduled": scheduled, "preempted": sorted(preempted), "free_blocks": int(free + later[i])}
        for i in range(count)
    ]


def replay_with_kernel(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`replay_schedule` by the kernel: rows of step, scheduled, preempted, free_blocks. Synchronous cases only."""
    settings = case_settings(case)
    if settings.async_scheduling:
        raise SpecError("async_scheduling: cases count steps; asynchronous schedules are compared by the clock")
    requests, raw = case_requests(case, settings.block_size), case["requests"]
    prompt = np.array([r.prompt_tokens for r in requests], dtype=np.int64)
    output = np.array([r.output_tokens for r in requests], dtype=np.int64)
    arrival = np.array([r["arrival_step"] for r in raw], dtype=np.float64)
    groups = [r.get("prefix") or (0, 0) for r in raw]
    shared = np.array([g[1] for g in groups], dtype=np.int64)
    names = {g: i for i, g in enumerate(dict.fromkeys(g[0] for g in groups))}
    longest = int(shared.max(initial=0)) // settings.block_size + 1
    start = np.array([names[g[0]] * longest for g in groups], dtype=np.int64)
    load, keys = load_of(
        settings, arrival, prompt, output, priority=np.array([r.priority for r in requests], dtype=np.int64),
        prefix_ids=(start, np.arange(len(names) * longest, dtype=np.int64), 1), prefix_tokens=shared,
    )  # fmt: skip
    log, log_s, _, _ = run_logged(settings, load, keys, unit_cost(settings), empty_step_s=1.0)
    ids, steps, step = [r["id"] for r in raw], list[dict[str, Any]](), 0
    for row in unfold(log, log_s, settings.block_size):
        step = step + 1 if row["start_s"] is None else round(row["start_s"])
        steps.append({
            "step": step, "scheduled": [[ids[r], t] for r, t in row["scheduled"]],
            "preempted": sorted(ids[r] for r in row["preempted"]), "free_blocks": row["free_blocks"],
        })  # fmt: skip
    return steps
