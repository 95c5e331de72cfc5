"""Replayed disaggregated rows: the layout that a row leaves out, the load through its pools, what is said of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bstar.calibration.bundled import SERVING, bundled_points
from bstar.calibration.disaggregated import _Placed, deployments_of, disaggregated_replay, replay_disaggregated
from bstar.calibration.disaggregated_layouts import known_runs, layout_of
from bstar.calibration.point import Point, Pool
from bstar.errors import SpecError
from bstar.latency.experts import ExpertLoad


def side(workers: int | None, ranks: int, *, whole: bool = True, shared: bool = True) -> Pool:
    """`ranks` GPUs: with attention data parallelism (shared), or tensor parallelism."""
    tp, dp = (1, ranks) if shared else (ranks, 1)
    return Pool(workers=workers, tp=tp, pp=1, attention_dp=dp, moe_tp=1 if whole else ranks,
                moe_ep=ranks if whole else 1, batch_size=None)  # fmt: skip


POINT = Point(
    id="p", mode="disagg", harness="inferencex", engine="trtllm", engine_version="0.8.1.post2",
    model="deepseek-ai/DeepSeek-V3", gpu="b200_sxm", weight_dtype="fp8", input_tokens=1024, output_tokens=1024,
    concurrency=64, measured_on="2026-02-12", prefill=side(1, 8), decode=side(1, 8),
)  # fmt: skip


def test_a_known_run_is_completed() -> None:
    """4,096 clients of one worker each: the configuration has 512 seats a rank, prompts of 8,192 tokens a step."""
    layout = layout_of(replace(POINT, concurrency=4096))
    assert (layout.seats, layout.drafted, layout.prompt_tokens) == (512, 0, 8192)
    assert (layout.gpus, layout.notes) == (16, ())


def test_an_unknown_run_has_the_rows_own_layout() -> None:
    layout = layout_of(replace(POINT, concurrency=77))
    assert layout.decode.attention_dp == 8 and layout.decode.ep == 8 and layout.seats > 1 << 30


def test_a_run_is_identified_by_gpus_and_clients() -> None:
    """8 clients: one run alone has decode workers of 8 GPUs, it drafts three tokens and has eight such workers."""
    blank = replace(POINT, model="deepseek-ai/DeepSeek-R1", concurrency=64, prefill=side(None, 8),
                    decode=side(None, 8, whole=False, shared=False))  # fmt: skip
    layout = layout_of(blank)
    assert (layout.decode.workers, layout.decode.kind, layout.drafted, layout.seats) == (8, "tp", 3, 8)
    either = layout_of(replace(blank, concurrency=32))
    assert either.drafted == 3 and "runs of the harness fit the row" in either.notes[0]


def test_every_configuration_is_possible() -> None:
    for run in known_runs():
        layout = run.layout
        assert layout.seats > 0 and layout.prompts > 0 and (layout.prompt_tokens or 0) > 0
        assert 2 <= layout.gpus <= 512 and 0 <= layout.drafted <= 3, run


def test_dynamos_release_stands_for_the_engines() -> None:
    _, decode = deployments_of(POINT, layout_of(POINT))
    assert decode.engine.version is not None and decode.engine.version.startswith("1.2")
    rest = replace(POINT, engine="sglang", engine_version="0.5.8")
    assert deployments_of(rest, layout_of(rest))[0].engine.version == "0.5.8"


def test_clients_without_a_seat_wait_for_their_first_token() -> None:
    """With half as many seats as clients, half of each answer's time passes before its first token."""
    layout = replace(layout_of(POINT), seats=8)
    free = disaggregated_replay(POINT, layout=layout)
    few = disaggregated_replay(POINT, layout=replace(layout, seats=4))
    assert few.tpot_s is not None and free.tpot_s is not None
    assert few.ttft_s > free.ttft_s + 0.5 * 920 * few.tpot_s
    assert few.tpot_s < free.tpot_s
    assert few.run.first_s.max() <= few.run.finish_s.max()
    order = (few.run.arrival_s, few.run.prefilled_s, few.run.landed_s, few.run.first_s, few.run.finish_s)
    assert all((a <= b + 1e-12).all() for a, b in pairwise(order))


def test_more_prefill_workers_shorten_a_queue_for_prompts() -> None:
    point = replace(POINT, input_tokens=8192, concurrency=256)
    layout = layout_of(point)
    one, three = (
        disaggregated_replay(point, layout=replace(layout, prefill=replace(layout.prefill, workers=n))) for n in (1, 3)
    )
    assert three.ttft_s < 0.5 * one.ttft_s
    assert np.sum(three.run.finish_s - three.run.arrival_s) < np.sum(one.run.finish_s - one.run.arrival_s)


def test_drafting_shortens_the_time_between_tokens() -> None:
    layout = layout_of(POINT)
    plain, drafting = (disaggregated_replay(POINT, layout=replace(layout, drafted=n)).tpot_s for n in (0, 3))
    assert plain is not None and drafting is not None and 0.3 < drafting / plain < 0.9


def test_experts_placed_by_load_are_as_popular_and_better_spread() -> None:
    given: dict[str, Any] = {name: np.array([n]) for name, n in (("experts", 256.0), ("top_k", 8.0), ("ranks", 32.0))}
    given["skew"] = 1.2
    tokens = np.array([1.0, 64.0, 4096.0])
    placed, found = _Placed(**given).busiest(tokens), ExpertLoad(**given).busiest(tokens)
    np.testing.assert_array_equal(placed[0], found[0])
    assert (placed[1] < found[1]).all() and placed[1][0, -1] < 1.1 < 1.5 < found[1][0, -1]


def test_what_has_no_answer_says_why() -> None:
    with pytest.raises(SpecError, match="prefill"):
        layout_of(replace(POINT, prefill=None))
    assert "prefill" in replay_disaggregated(replace(POINT, prefill=None)).reason
    assert replay_disaggregated(replace(POINT, model="no/such-model")).reason
    assert replay_disaggregated(replace(POINT, gpu="abacus")).reason


def test_measured_rows_are_answered() -> None:
    points = [p for p in bundled_points(SERVING) if p.is_disaggregated]
    if not points:
        pytest.skip("no disaggregated rows among the bundled ones")
    for point in points[::25]:
        found = replay_disaggregated(point)
        assert not found.reason and found.ttft_s > 0 and found.tpot_s > 0, point.id
