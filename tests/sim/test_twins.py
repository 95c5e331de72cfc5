"""The kernel and the readable scheduler: the same decisions at the same times, on random engines and loads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from engines import Case, by_kernel, by_reference, cases, quietly
from hypothesis import HealthCheck, given, settings

from bstar.errors import SpecError
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.state import (
    RUN_BASE_S,
    RUN_FREE,
    RUN_PROMPT,
    RUN_REGULAR,
    RUN_RUNNING,
    RUN_SAMPLED,
    RUN_SLOPE_S,
    RUN_START_S,
    RUN_STEPS,
)
from bstar.sim.reference import Times

EXAMPLES = int(os.environ.get("BSTAR_TWIN_EXAMPLES", "120"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_kernel_equals_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@settings(max_examples=10 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_kernel_equals_reference_at_length(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Both on one case: decisions, times, logs; and the kernel again with pauses and without logs."""
    try:
        want = by_reference(case)
    except SpecError:
        with pytest.raises(SpecError):
            by_kernel(case)
        return
    steps, engine = by_kernel(case)
    same_decisions(steps, want)
    same_times(engine, want)
    run_log_adds_up(case, engine)
    pauses = sorted(float(s.start_s) for s in want.steps[:: max(len(want.steps) // 5, 1)])
    same_times(quietly(case, [p for p in pauses if p > 0]), want)


def same_decisions(steps: list[dict[str, Any]], want: Times) -> None:
    for ours, theirs in zip(steps, want.steps, strict=False):
        assert ours["scheduled"] == theirs.scheduled
        assert ours["preempted"] == theirs.preempted
        assert ours["free_blocks"] == theirs.free_blocks
        if ours["start_s"] is not None:
            assert ours["start_s"] == pytest.approx(theirs.start_s, rel=1e-9, abs=1e-12)
    assert len(steps) == len(want.steps)


def same_times(engine: KernelEngine, want: Times) -> None:
    assert engine.now_s == pytest.approx(want.end_s, rel=1e-9)
    for name in ("scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(engine.out, name), getattr(want, name), rtol=1e-9, err_msg=name)
    np.testing.assert_array_equal(engine.out.preemptions, want.preemptions)
    np.testing.assert_array_equal(engine.out.cached_tokens, want.cached_tokens)


def run_log_adds_up(case: Case, engine: KernelEngine) -> None:
    """Tokens, gaps and blocks are conserved; time does not run backwards."""
    runs, out = engine.runs, engine.out
    steps = runs[:, RUN_STEPS]
    seconds = steps * runs[:, RUN_BASE_S] + runs[:, RUN_SLOPE_S] * steps * (steps + 1) / 2
    made = np.maximum(np.minimum(case.output, case.settings.max_model_len - case.prompt), 1)
    assert (steps * runs[:, RUN_SAMPLED]).sum() == made.sum()
    gaps = (seconds * runs[:, RUN_REGULAR]).sum() + engine.gaps_s.sum()
    assert gaps == pytest.approx((out.finish_s - out.first_token_s).sum(), rel=1e-9, abs=1e-12)
    assert (steps * runs[:, RUN_REGULAR]).sum() + len(engine.gaps_s) == (made - 1).sum()
    assert (runs[:, RUN_FREE] >= 0).all() and engine.least_free_blocks >= 0
    assert engine.free_blocks == case.settings.num_blocks - 1
    assert (np.diff(runs[:, RUN_START_S]) >= 0).all()
    if not out.preemptions.any():  # Little: the time integral of how many run is the sum of how long each runs
        assert runs[:, RUN_RUNNING] @ seconds == pytest.approx((out.finish_s - out.scheduled_s).sum(), rel=1e-9)
    if not case.settings.enable_prefix_caching and not out.preemptions.any():
        assert runs[:, RUN_PROMPT].sum() == case.prompt.sum()
