"""The kernel and the readable scheduler: the same decisions at the same times, on random engines and loads."""

from __future__ import annotations

import os

import numpy as np
import pytest
from engines import Case, by_kernel, by_reference, cases
from hypothesis import HealthCheck, given, settings

from bstar.errors import SpecError

EXAMPLES = int(os.environ.get("BSTAR_TWIN_EXAMPLES", "150"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_kernel_equals_reference(case: Case) -> None:
    try:
        want = by_reference(case)
    except SpecError:
        with pytest.raises(SpecError):
            by_kernel(case)
        return
    steps, out, end_s = by_kernel(case)
    for ours, theirs in zip(steps, want.steps, strict=False):
        assert ours["scheduled"] == theirs.scheduled
        assert ours["preempted"] == theirs.preempted
        assert ours["free_blocks"] == theirs.free_blocks
        if ours["start_s"] is not None:
            assert ours["start_s"] == pytest.approx(theirs.start_s, rel=1e-9, abs=1e-12)
    assert len(steps) == len(want.steps)
    assert end_s == pytest.approx(want.end_s, rel=1e-9)
    for name in ("scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(out, name), getattr(want, name), rtol=1e-9, err_msg=name)
    np.testing.assert_array_equal(out.preemptions, want.preemptions)
    np.testing.assert_array_equal(out.cached_tokens, want.cached_tokens)
