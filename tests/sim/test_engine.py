"""One engine in the kernel: one compilation for all loads, pauses, requests handed over one by one."""

from __future__ import annotations

import numpy as np
import pytest

from bstar.errors import SpecError
from bstar.sim.arrays import kernel_load
from bstar.sim.decisions import unit_cost
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.loop import advance
from bstar.sim.settings import SchedulerSettings
from bstar.traffic import Traffic, closed_loop, poisson, prefix_groups, sessions

SETTINGS = SchedulerSettings(
    block_size=16, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2000
)


def ran(settings: SchedulerSettings, traffic: Traffic) -> KernelEngine:
    engine = KernelEngine(settings, unit_cost(settings), kernel_load(settings, traffic))
    assert engine.advance()
    return engine


def test_every_load_runs_the_same_machine_code() -> None:
    """A second compilation would cost every user ten seconds."""
    if not hasattr(advance, "signatures"):
        pytest.skip("the JIT is off")
    cached = SchedulerSettings(**{**{n: getattr(SETTINGS, n) for n in SETTINGS.__dataclass_fields__},
                                  "enable_prefix_caching": True, "policy": "priority"})  # fmt: skip
    ran(SETTINGS, poisson(1.0, 50, 5, 20))
    compiled = len(advance.signatures)
    ran(SETTINGS, closed_loop(3, 50, 5, 20, think_s="exponential:mean=3s"))
    ran(cached, sessions(0.1, 3, 30, 10, 8))
    ran(cached, poisson(1.0, 100, 5, 20, prefix=prefix_groups(64, 2)))
    engine = KernelEngine(SETTINGS, unit_cost(SETTINGS), kernel_load(SETTINGS, poisson(1.0, 50, 5, 20)), keep_runs=True)
    engine.advance(5)
    engine.advance()
    assert len(advance.signatures) == compiled


def test_requests_handed_over_are_the_load() -> None:
    load = poisson(0.3, "uniform:10-300", "uniform:1-60", 100, seed=4)
    want = ran(SETTINGS, load)
    engine = KernelEngine(
        SETTINGS, unit_cost(SETTINGS), kernel_load(SETTINGS, load), expects_order=False, list_finished=True
    )
    for request, at_s in enumerate(load.arrival_s):
        engine.advance(float(at_s))
        assert engine.now_s <= at_s + 1.0 + 1e-6  # a step takes one second
        engine.submit(request, float(at_s))
    assert engine.advance()
    for name in ("scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(engine.out, name), getattr(want.out, name), rtol=1e-12)
    assert sorted(engine.finished.tolist()) == list(range(100))
    assert (np.diff(engine.out.finish_s[engine.finished]) >= 0).all()
    assert engine.running == engine.waiting == 0 and engine.free_blocks == 399


def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    traffic = Traffic(arrival_s=np.zeros(1), input_tokens=np.array([2000]), output_tokens=np.array([1]))
    with pytest.raises(SpecError, match="max_model_len"):
        kernel_load(SETTINGS, traffic)


def test_a_request_that_outgrows_the_cache_is_named() -> None:
    small = SchedulerSettings(
        block_size=16, num_blocks=5, max_num_seqs=2, max_num_batched_tokens=256, max_model_len=2000
    )
    grows = Traffic(arrival_s=np.zeros(1), input_tokens=np.array([50]), output_tokens=np.array([500]))
    with pytest.raises(SpecError, match="request 0"):
        ran(small, grows)
