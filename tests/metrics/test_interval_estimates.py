"""Confidence intervals: they hold what they should as often as they say, and say nothing from too little."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np
import pytest

from bstar.metrics import batch_means, quantile_interval, rate_interval, replications, share_interval
from bstar.metrics.intervals import FEWEST_BATCHES, Interval, effective_size, student_t

Z_95 = 1.6448536


def draws(size: int, *, hang: float = 0.0, runs: int = 200, seed: int = 4) -> Iterator[np.ndarray]:
    """Standard normal values, each `hang` of the one before."""
    rng = np.random.default_rng(seed)
    for _ in range(runs):
        x = np.empty(size + 50)
        last = 0.0
        for i, noise in enumerate(rng.standard_normal(size + 50)):
            last = x[i] = hang * last + noise * math.sqrt(1 - hang**2)
        yield x[50:]


def test_student_t_and_intervals() -> None:
    assert student_t(9) == pytest.approx(2.262157, abs=1e-6)
    found = replications([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert replications([1.0]).half_width is None
    assert replications([]).mean is None
    assert found.holds(4.0)
    assert not found.holds(5.0)


def test_batch_means_cover_the_mean() -> None:
    inside = sum(batch_means(x).holds(0.0) for x in draws(4000, hang=0.8))
    assert 175 <= inside <= 200
    assert batch_means([1.0] * 5).half_width is None


def test_few_batches_have_no_width() -> None:
    """With one degree of freedom Student's t is 12.7: such an interval says nothing."""
    values = np.linspace(0.743, 0.945, 40)
    assert batch_means(values, least=10).half_width is None
    assert batch_means(values, least=10).mean == pytest.approx(values.mean())
    assert batch_means(values, least=8).batches == FEWEST_BATCHES
    assert batch_means(values, least=8).half_width is not None


@pytest.mark.parametrize(("size", "hang", "quantile", "at"), [
    (40, 0.0, 0.5, 0.0), (200, 0.0, 0.95, Z_95), (200, 0.5, 0.5, 0.0), (1500, 0.8, 0.95, Z_95),
])  # fmt: skip
def test_ranks_cover_a_quantile(size: int, hang: float, quantile: float, at: float) -> None:
    found = [quantile_interval(x, quantile) for x in draws(size, hang=hang)]
    known = [one for one in found if one.half_width is not None]
    assert len(known) > 190
    assert sum(one.holds(at) for one in known) / len(known) > 0.91


def test_an_interval_of_a_quantile_is_inside_the_data() -> None:
    for size in (6, 40, 100, 400):
        for x in draws(size, hang=0.5, runs=20):
            for quantile in (0.5, 0.95, 0.99):
                found = quantile_interval(x, quantile)
                if found.ends is None:
                    continue
                assert x.min() <= found.ends[0] <= np.quantile(x, quantile) <= found.ends[1] <= x.max()
                assert found.half_width == pytest.approx((found.ends[1] - found.ends[0]) / 2)


def test_a_quantile_that_may_be_beyond_the_data_has_no_width() -> None:
    """Of n independent values none is above the 99th percentile with 0.99^n: 2.5 % at 367."""
    assert quantile_interval(np.arange(6.0), 0.5).ends == (0.0, 5.0)
    assert quantile_interval(np.arange(5.0), 0.5).half_width is None
    (x,) = draws(368, runs=1)
    assert quantile_interval(x, 0.99).half_width is not None
    assert quantile_interval(x[:367], 0.99).half_width is None
    assert quantile_interval(np.array([math.nan]), 0.5).mean is None


def test_values_that_hang_together_count_for_less() -> None:
    assert effective_size(np.repeat([0.0, 1.0, 0.5, 0.2, 0.9] * 20, 4)) < 400 / 2
    sizes = [effective_size(x) for x in draws(2000, hang=0.8, runs=50)]
    assert np.mean(sizes) == pytest.approx(2000 / 9, rel=0.3)  # (1 + 0.8) / (1 − 0.8)
    assert np.mean([effective_size(x) for x in draws(400, runs=50)]) > 0.97 * 400
    assert effective_size(np.ones(9)) == 9.0


def test_a_share_stays_between_none_and_all() -> None:
    everything = share_interval(np.ones(40, dtype=bool))
    assert everything.ends == (pytest.approx(1 - 0.0881, abs=1e-3), 1.0)  # Clopper and Pearson: 1 − 0.025^(1/40)
    some = share_interval(np.arange(36) % 12 == 0)
    assert some.ends is not None
    assert 0.0 < some.ends[0] < 3 / 36 < some.ends[1] < 0.25
    assert everything.is_apart_from(some)
    assert share_interval([]).mean is None


def closed_loop(clients: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(sent, finished) of `count` requests that take 1 s on average; a client sends the next when it has its answer."""
    took = np.random.default_rng(seed).gamma(6.0, 1 / 6, count)
    free = [0.0] * clients
    sent, finished = np.empty(count), np.empty(count)
    for i in range(count):
        sent[i] = heapq.heappop(free)
        finished[i] = sent[i] + took[i]
        heapq.heappush(free, finished[i])
    return sent, finished


def test_slices_cover_a_rate() -> None:
    inside = 0
    for seed in range(200):
        sent, finished = closed_loop(8, 160, seed)
        found = rate_interval(sent, finished, np.ones(sent.size), from_s=1.0, to_s=sent.max(), request_s=1.0)
        inside += found.holds(8.0)
    assert 182 <= inside <= 200


def test_a_rate_of_few_answers_or_little_time_has_no_width() -> None:
    sent, finished = closed_loop(8, 160, 0)
    ask = {"from_s": 1.0, "to_s": float(sent.max()), "request_s": 1.0}
    assert rate_interval(sent, finished, np.ones(sent.size), **ask).half_width is not None
    assert rate_interval(sent[:39], finished[:39], np.ones(39), **ask).half_width is None
    assert rate_interval(sent, finished, np.ones(sent.size), **ask | {"to_s": 5.0}).half_width is None
    assert rate_interval(sent, finished, np.ones(sent.size), **ask | {"to_s": 1.0}).half_width is None
    nothing = np.full(sent.size, math.nan)
    assert rate_interval(sent, nothing, np.ones(sent.size), **ask).half_width is None


def test_two_intervals_are_apart_or_touch() -> None:
    one = Interval(mean=1.0, half_width=0.1, confidence=0.95, batches=9)
    other = Interval(mean=1.15, half_width=0.1, confidence=0.95, batches=9, low=1.12, high=1.32)
    assert one.is_apart_from(other)
    assert other.is_apart_from(one)
    assert not one.is_apart_from(Interval(mean=1.2, half_width=0.1, confidence=0.95, batches=9))
    assert one.is_apart_from(Interval(mean=1.2, half_width=None, confidence=0.95, batches=1)) is None
    assert "low" not in one.to_dict()
    assert other.to_dict()["low"] == 1.12
