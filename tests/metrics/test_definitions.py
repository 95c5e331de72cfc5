"""The definitions, against numbers worked out by hand, and the laws between them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.errors import SpecError
from bstar.metrics import (
    METRICS,
    Distribution,
    RequestRecords,
    TokenGaps,
    metric,
    summarize,
)
from bstar.specs.slo import Slo


def records(*rows: tuple[float, float, float, int, int]) -> RequestRecords:
    sent, first, last, prompt, made = (np.array(c) for c in zip(*rows, strict=True))
    return RequestRecords(sent_s=sent.astype(float), first_token_s=first.astype(float), finish_s=last.astype(float),
                          input_tokens=prompt.astype(np.int64), output_tokens=made.astype(np.int64))


# sent, first, last, input, output
RUN = records((0.0, 0.5, 2.5, 100, 5), (1.0, 1.25, 1.25, 50, 1), (2.0, 4.0, 10.0, 200, 31),
              (3.0, math.nan, math.nan, 10, 8))
GAPS = TokenGaps.of_token_times([[0.5, 1.0, 1.5, 2.0, 2.5], [1.25], np.linspace(4.0, 10.0, 31)])


def test_the_definitions_by_hand() -> None:
    assert RUN.ttft_s[:3].tolist() == [0.5, 0.25, 2.0]
    assert RUN.tpot_s[0] == 0.5
    assert math.isnan(RUN.tpot_s[1])  # one token: there is no TPOT, and it is not 0
    assert RUN.tpot_s[2] == pytest.approx(0.2)
    assert RUN.e2e_s[:3].tolist() == [2.5, 0.25, 8.0]
    assert RUN.duration_s == 10.0


def test_slo_is_met_jointly() -> None:
    assert RUN.meets(None).tolist() == [True, True, True, False]
    assert RUN.meets(Slo(tpot_s=0.3)).tolist() == [False, True, True, False]
    assert RUN.meets(Slo(tpot_s=0.3, ttft_s=1.0)).tolist() == [False, True, False, False]
    assert RUN.meets(Slo(e2e_s=2.5)).tolist() == [True, True, False, False]


def test_the_summary_by_hand() -> None:
    found = summarize(RUN, GAPS, Slo(tpot_s=0.3, ttft_s=1.0))
    assert (found.num_requests, found.num_finished) == (4, 3)
    assert (found.input_tokens, found.output_tokens) == (350, 37)
    assert found.output_tokens_per_s == 3.7
    assert found.total_tokens_per_s == 38.7
    assert found.requests_per_s == 0.3
    assert found.goodput_requests_per_s == pytest.approx(0.1)
    assert found.goodput_output_tokens_per_s == 0.1
    assert found.slo_attainment_fraction == 0.25
    assert found.meets_slo is False
    assert found.tpot_s.count == 2
    assert found.itl_s.count == 34
    assert found.itl_s.mean == pytest.approx(8.0 / 34)


def test_nothing_finished() -> None:
    found = summarize(records((0.0, math.nan, math.nan, 1, 1)), TokenGaps())
    assert found.duration_s == found.output_tokens_per_s == 0.0
    assert found.ttft_s.mean is None
    assert found.meets_slo is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.floats(0, 50), st.integers(1, 40)), min_size=1))
def test_e2e_is_ttft_and_the_rest(rows: list[tuple[float, float, float, int]]) -> None:
    run = records(*[(s, s + t, s + t + (d if n > 1 else 0.0), 1, n) for s, t, d, n in rows])
    rest = np.where(run.output_tokens > 1, (run.output_tokens - 1) * np.nan_to_num(run.tpot_s), 0.0)
    np.testing.assert_allclose(run.ttft_s + rest, run.e2e_s, rtol=1e-9, atol=1e-9)


def test_every_metric_says_what_it_is() -> None:
    for name, found in METRICS.items():
        assert found.name == name
        assert found.formula
        assert found.label
        assert not name.endswith("_s") or found.unit
    assert metric("tpot_s").better == "lower"
    with pytest.raises(SpecError, match="tpot_s"):
        metric("tpott")


def test_records_have_equal_lengths() -> None:
    with pytest.raises(SpecError, match="equal length"):
        RequestRecords(sent_s=np.zeros(2), first_token_s=np.zeros(1), finish_s=np.zeros(2),
                       input_tokens=np.ones(2, np.int64), output_tokens=np.ones(2, np.int64))


def test_percentiles_interpolate() -> None:
    found = Distribution.of([1.0, 2.0, 3.0, 4.0, math.nan])
    assert (found.count, found.mean, found.p50) == (4, 2.5, 2.5)
    assert found.p95 == pytest.approx(3.85)
