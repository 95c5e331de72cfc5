"""Conversations, shared prefixes, block hashes, closed loops: the kernel and the step-by-step engine agree."""

from __future__ import annotations

import numpy as np
import pytest

from bstar.physics.batch import BatchShape
from bstar.sim.arrays import kernel_load
from bstar.sim.decisions import unit_cost
from bstar.sim.deployed import StepFigures
from bstar.sim.engine import KernelEngine
from bstar.sim.settings import SchedulerSettings
from bstar.sim.stepwise import ReferenceEngine
from bstar.traffic import Traffic, closed_loop, poisson, prefix_groups, sessions
from bstar.traffic.load import BlockHashes

SEED_COUNT = 6


def engine_settings(rng: np.random.Generator) -> SchedulerSettings:
    seats, block = int(rng.integers(2, 12)), int(rng.choice([4, 16]))
    return SchedulerSettings(
        block_size=block, num_blocks=int(2400 / block * rng.choice([1.0, 1.5, 6.0])), max_num_seqs=seats,
        max_num_batched_tokens=int(rng.choice([64, 300])), max_model_len=2000, enable_prefix_caching=True,
        async_scheduling=bool(rng.integers(2)), scheduler_reserve_full_isl=bool(rng.integers(2)),
        policy=str(rng.choice(["fcfs", "priority"])),
    )  # fmt: skip


def hashed(seed: int) -> Traffic:
    """Prompts whose text a trace names, 32 tokens an id, in chains."""
    rng = np.random.default_rng(seed)
    n = 60
    lengths = rng.integers(20, 400, n)
    counts = -(-lengths // 32)
    ids, known, offsets = [], {}, np.concatenate(([0], np.cumsum(counts)))
    for count in counts:
        path: tuple[int, ...] = ()
        for _ in range(count):
            path = (*path, int(rng.integers(2)))
            ids.append(known.setdefault(path, len(known)))
    return Traffic(
        arrival_s=np.cumsum(rng.exponential(40.0, n)), input_tokens=lengths, output_tokens=rng.integers(1, 80, n),
        block_hashes=BlockHashes(offsets=offsets, ids=np.array(ids, dtype=np.int64), tokens_per_block=32),
    )  # fmt: skip


def load_of(kind: str, seed: int) -> Traffic:
    if kind == "hashes":
        return hashed(seed)
    if kind == "groups":
        groups = prefix_groups(150, 4, popularity=1.0)
        return poisson(0.02, "uniform:160-400", "uniform:1-90", 60, prefix=groups, seed=seed)
    if kind == "closed":
        return closed_loop(5, "uniform:1-300", "uniform:1-90", 60, think_s="exponential:mean=30s", seed=seed)
    clients = 4 if kind == "closed sessions" else None
    return sessions(
        None if clients else 0.01, 4, "uniform:5-80", "uniform:5-60", 20, think_s="exponential:mean=60s",
        concurrency=clients, max_context_tokens=1500, prefix=prefix_groups(60, 3), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(SEED_COUNT))
@pytest.mark.parametrize("kind", ["sessions", "closed sessions", "groups", "closed", "hashes"])
def test_same_times(kind: str, seed: int) -> None:
    settings, traffic = engine_settings(np.random.default_rng(seed)), load_of(kind, seed)

    def figures(shape: BatchShape) -> StepFigures:
        return StepFigures(seconds=1.0, flops=0.0, compute_s=0.0, memory_s=0.0)

    want = ReferenceEngine(settings, traffic, figures).run()
    engine = KernelEngine(settings, unit_cost(settings), kernel_load(settings, traffic))
    engine.advance()
    np.testing.assert_allclose(engine.load.arrival_s, want.arrival_s, rtol=1e-9)
    for name in ("scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(engine.out, name), getattr(want, name), rtol=1e-9, err_msg=name)
    assert engine.out.preemptions.tolist() == want.preemptions.tolist()
    assert engine.out.cached_tokens.tolist() == want.cached_tokens.tolist()
    if kind != "closed":
        assert engine.out.cached_tokens.sum() > 0
