"""Random engines and loads, and both simulators on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from bstar.sim.arrays import Floats, Ints, kernel_load
from bstar.sim.decisions import unfold
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.reference import Times, simulate_stepwise
from bstar.sim.replay import block_keys
from bstar.sim.scheduler import Request
from bstar.sim.settings import SchedulerSettings
from bstar.traffic.load import Traffic


@dataclass(frozen=True)
class Case:
    """An engine and what is sent to it."""

    settings: SchedulerSettings
    arrival_s: Floats
    prompt: Ints
    output: Ints
    priority: Ints
    group: Ints
    shared: Ints
    clients: int
    think_s: Floats
    cost: StepCost


@st.composite
def costs(draw: st.DrawFn, settings: SchedulerSettings) -> StepCost:
    """Step times with windows, chunks, rounded corners: anything the kernel can evaluate."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spans = draw(st.sampled_from([[(0, 0)], [(0, 0), (24, 0)], [(0, 0), (40, 1), (16, 0)], [(10, 0)], []]))
    prompts = draw(st.sampled_from([
        [(0, 0, 0, 1.0)], [(0, 0, 0, 1.0), (24, 0, 0, 2.0)], [(16, 1, 0, 1.0), (8, 0, 1, 4.0)]]))  # fmt: skip
    width, rows = 4 + 2 * len(prompts), draw(st.integers(0, 2))
    seats, tokens = settings.seat_limit + 2, settings.max_num_batched_tokens + 2
    scale = draw(st.sampled_from([1e-3, 1.0]))
    per_token = np.cumsum(rng.uniform(0, 1e-3, tokens)) * scale
    cost = StepCost(
        decode_s=np.cumsum(rng.uniform(1e-3, 1e-2, seats)) * scale, span_rate=rng.uniform(0, 1e-4, len(spans)) * scale,
        span_limit=np.array([s[0] for s in spans], dtype=np.int64),
        span_restarts=np.array([s[1] for s in spans], dtype=np.int64),
        token_s=per_token, sampled_s=np.cumsum(rng.uniform(0, 1e-4, seats)) * scale,
        linear=rng.uniform(0, 1e-5, width) * scale, prompt_fixed_s=float(rng.uniform(0, 1e-2)) * scale,
        decode_fixed_s=float(rng.uniform(0, 1e-2)) * scale, step_s=float(rng.uniform(1e-3, 1e-1)) * scale,
        row_compute=rng.uniform(0, 1e-5, (rows, width)) * scale, row_memory=rng.uniform(0, 1e-5, (rows, width)) * scale,
        row_base=rng.uniform(0, 1e-2, rows) * scale, row_phase=rng.integers(0, 3, rows),
        power=draw(st.sampled_from([3.0, 2.5])),
        prompt_limit=np.array([p[0] for p in prompts], dtype=np.int64),
        prompt_restarts=np.array([p[1] for p in prompts], dtype=np.int64),
        prompt_gathers=np.array([p[2] for p in prompts], dtype=np.int64),
        prompt_stride=np.array([p[3] for p in prompts]), row_compute_base=rng.uniform(0, 1e-3, rows) * scale,
        host_s=float(rng.uniform(0, 1e-2)) * scale, host_sequence_s=float(rng.uniform(0, 1e-4)) * scale,
        launch_s=draw(st.sampled_from([0.0, 3e-2])) * scale, piece_s=draw(st.sampled_from([0.0, 1e-2])) * scale,
        graph_tokens=draw(st.sampled_from([0, 20])),
    )  # fmt: skip
    if draw(st.integers(0, 3)) == 0:  # whole seconds: ties between arrivals and steps
        zero = {name: np.zeros_like(getattr(cost, name)) for name in
                ("span_rate", "token_s", "sampled_s", "linear", "row_compute", "row_memory", "row_base",
                 "row_compute_base")}  # fmt: skip
        cost = cost._replace(**zero, decode_s=np.ones(seats), prompt_fixed_s=0.0, decode_fixed_s=0.0, step_s=1.0,
                             host_s=0.0, host_sequence_s=0.0, launch_s=0.0, piece_s=0.0)  # fmt: skip
    return cost


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small engines under every kind of pressure."""
    block = draw(st.sampled_from([1, 4, 8, 16]))
    longest = draw(st.sampled_from([48, 96, 160]))
    seats = draw(st.sampled_from([1, 2, 4, 8, 12]))
    tight = draw(st.booleans())
    need = -(-longest // block)
    chunked = draw(st.sampled_from([True, True, True, False]))
    tokens = max(draw(st.sampled_from([8, 16, 40, 128])), seats) if chunked else longest + seats
    settings = SchedulerSettings(
        block_size=block, num_blocks=1 + (need + draw(st.integers(0, need)) if tight else need * seats),
        max_num_seqs=seats, max_num_batched_tokens=tokens, max_model_len=longest,
        enable_prefix_caching=draw(st.booleans()), enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 0, 6, 20])) if chunked else 0,
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])), scheduler_reserve_full_isl=draw(st.booleans()),
        max_num_active_seqs=draw(st.sampled_from([None, None, max(seats - 1, 1)])),
        max_num_scheduled_tokens=draw(st.sampled_from([None, None, max(tokens // 2, 1)])) if chunked else None,
        watermark_fraction=draw(st.sampled_from([0.0, 0.0, 0.05])), async_scheduling=draw(st.booleans()),
    )  # fmt: skip
    count = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompt = rng.integers(1, max(longest // draw(st.sampled_from([2, 4])), 2), count)
    output = rng.integers(1, draw(st.sampled_from([2, 20, longest + 10])) + 1, count)
    cost = draw(costs(settings))
    mean = float(cost.decode_s[min(seats, len(cost.decode_s) - 1)]) * draw(st.sampled_from([0.0, 2.0, 30.0]))
    gaps = rng.exponential(mean, count) if cost.step_s != 1.0 else rng.integers(0, 4, count) * float(mean > 0)
    shared = np.minimum(rng.integers(0, longest // 2, 3)[rng.integers(0, 3, count)], prompt)
    return Case(
        settings=settings, arrival_s=np.cumsum(gaps).astype(float), prompt=prompt, output=output,
        priority=rng.integers(0, 3, count), group=rng.integers(0, 2, count), shared=shared,
        clients=draw(st.sampled_from([0, 0, 1, 3, 40])),
        think_s=rng.exponential(mean or 1.0, count) * draw(st.sampled_from([0.0, 1.0])), cost=cost,
    )  # fmt: skip


def by_reference(case: Case) -> Times:
    """Step by step."""
    requests = [
        Request(
            rank=i, prompt_tokens=int(case.prompt[i]), output_tokens=int(case.output[i]),
            priority=int(case.priority[i]),
            block_key=block_keys(("own", i), ("group", int(case.group[i])), int(case.shared[i]),
                                 case.settings.block_size),
        )
        for i in range(len(case.prompt))
    ]  # fmt: skip
    return simulate_stepwise(
        case.settings, requests, case.arrival_s, case.cost, clients=case.clients, think_s=case.think_s
    )


def traffic_of(case: Case) -> Traffic:
    """The load as `Traffic`."""
    arrival = case.arrival_s.copy()
    if case.clients:
        arrival[case.clients :] = np.nan
    return Traffic(
        arrival_s=arrival,
        input_tokens=case.prompt,
        output_tokens=case.output,
        priority=case.priority,
        prefix_group=case.group,
        prefix_tokens=case.shared,
        think_s=case.think_s,
        concurrency=case.clients or None,
    )


def by_kernel(case: Case) -> tuple[list[dict[str, Any]], KernelEngine]:
    """From event to event, with both logs."""
    engine = KernelEngine(
        case.settings, case.cost, kernel_load(case.settings, traffic_of(case)), keep_decisions=True, keep_runs=True
    )
    engine.advance()
    return unfold(*engine.decisions, case.settings.block_size), engine


def quietly(case: Case, pauses_s: list[float]) -> KernelEngine:
    """Without logs, with pauses: nothing may change."""
    engine = KernelEngine(case.settings, case.cost, kernel_load(case.settings, traffic_of(case)))
    for until_s in pauses_s:
        engine.advance(until_s)
    assert engine.advance()
    return engine
