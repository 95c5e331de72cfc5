"""Gaps between tokens: quantiles from runs of steps are those of the expanded list, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar.metrics import Distribution, TokenGaps

RUNS = st.lists(
    st.tuples(
        st.floats(1e-4, 0.5), st.one_of(st.just(0.0), st.floats(1e-12, 1e-3)), st.integers(0, 60), st.integers(0, 9)
    ),
    max_size=8,
)
SINGLE = st.lists(st.floats(1e-6, 30.0), max_size=6)


def gaps_of(runs: list[tuple[float, float, int, int]], single: list[float]) -> TokenGaps:
    columns = [np.array([r[i] for r in runs], dtype=float) for i in range(4)]
    return TokenGaps(base_s=columns[0], slope_s=columns[1], steps=columns[2].astype(np.int64),
                     weight=columns[3].astype(np.int64), single_s=np.array(single, dtype=float))


@given(RUNS, SINGLE, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_quantiles_are_those_of_every_gap(
    runs: list[tuple[float, float, int, int]], single: list[float], fractions: list[float]
) -> None:
    gaps = gaps_of(runs, single)
    every = gaps.expanded()
    assert gaps.count == every.size
    if every.size == 0:
        assert gaps.quantile(0.5) is None
        assert gaps.distribution() == Distribution(count=0)
        return
    assert gaps.quantiles(fractions) == np.quantile(every, fractions).tolist()
    found, expected = gaps.distribution(), Distribution.of(every)
    for name in ("p50", "p90", "p95", "p99", "p999", "min", "max"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.mean == pytest.approx(expected.mean, rel=1e-12)
    assert found.std == pytest.approx(expected.std, rel=1e-6, abs=1e-9)
    assert gaps.total_s == pytest.approx(float(every.sum()), rel=1e-12)


def test_a_hand_example() -> None:
    # Three steps of 11, 12, 13 ms with two sequences, and one gap of 500 ms.
    gaps = gaps_of([(0.010, 0.001, 3, 2)], [0.5])
    assert gaps.count == 7
    assert gaps.quantile(0.5) == pytest.approx(0.012)
    assert gaps.quantile(1.0) == 0.5
    assert gaps.mean_s == pytest.approx((2 * 0.036 + 0.5) / 7)


def test_a_million_runs_are_quick_and_joined_runs_add_up() -> None:
    rng = np.random.default_rng(1)
    n = 200_000
    gaps = TokenGaps(base_s=rng.uniform(0.005, 0.02, n), slope_s=rng.uniform(0, 1e-6, n),
                     steps=rng.integers(1, 50, n), weight=rng.integers(1, 200, n))
    twice = gaps.joined(gaps)
    assert twice.count == 2 * gaps.count
    assert twice.quantile(0.99) == pytest.approx(gaps.quantile(0.99), rel=1e-6)


def test_measured_token_times() -> None:
    gaps = TokenGaps.of_token_times([[1.0, 1.5, 1.75], [2.0]])
    assert (gaps.count, gaps.total_s) == (2, 0.75)
