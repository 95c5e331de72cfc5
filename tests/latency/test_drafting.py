"""Speculative steps: what drafts cost, and what they save."""

from __future__ import annotations

import pytest

import bstar
from bstar.errors import SpecError
from bstar.latency import decode_step_time
from bstar.latency.drafting import speculative_step
from bstar.specs.deployment import Deployment


def deploy(model: str, tp: int) -> Deployment:
    made: Deployment = bstar.deployment(model=model, gpu="h200-sxm-141gb", tp=tp)
    return made


def test_without_drafts_it_is_a_decode_step() -> None:
    for model, tp in (("llama-3.1-8b", 1), ("deepseek-r1", 8)):
        d = deploy(model, tp)
        found = speculative_step(d, 8, 3000, drafts=0)
        assert found.drafting_s == 0.0
        assert found.total_s == pytest.approx(decode_step_time(d, 8, 3000).expected_s, rel=1e-12)
    with pytest.raises(SpecError, match="drafts"):
        speculative_step(d, 8, 3000, drafts=-1)


def test_a_draft_takes_about_a_layers_share_of_a_step() -> None:
    d = deploy("deepseek-r1", 8)
    step = decode_step_time(d, 16, 3000).expected_s
    one = speculative_step(d, 16, 3000, drafts=1)
    assert step / 61 < one.drafting_s < 4 * step / 61
    assert speculative_step(d, 16, 3000, drafts=3).drafting_s == pytest.approx(3 * one.drafting_s)


def test_verifying_is_nearly_free_while_weights_bound_the_step_and_not_beyond() -> None:
    """Mission §10: one read of the weights advances several tokens; the gain falls as the batch nears B_gemm."""
    d = deploy("llama-3.1-70b", 8)
    few, many = (
        speculative_step(d, batch, 1000, drafts=3).verifying_s / decode_step_time(d, batch, 1000).expected_s
        for batch in (4, 400))
    assert 1.0 < few < 1.15
    assert many > 1.6
    times = [speculative_step(d, 32, 1000, drafts=k).total_s for k in range(5)]
    assert times == sorted(times)
