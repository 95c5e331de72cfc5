"""The simulator against queueing theory: with a step time that makes it a textbook queue, means and tails agree.

A request with a prompt of one token and O answer tokens is served in O steps. Steps of equal seconds and one seat make
a single server; several seats, several servers; steps as long as the batch is large, processor sharing. A step is a
thousandth of a service, so that waiting for its end does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from bstar import queueing
from bstar.sim.arrays import kernel_load
from bstar.sim.decisions import unit_cost
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.settings import SchedulerSettings
from bstar.traffic import Traffic

Floats = NDArray[np.float64]
MEAN_TOKENS = 1000
STEP_S = 1.0 / MEAN_TOKENS  # a mean service of one second
REQUESTS = 200_000


@dataclass(frozen=True)
class Outcome:
    """Waiting and residence of the requests after a warm-up."""

    wait_s: Floats
    residence_s: Floats


def queue(seats: int, load: float, tokens: str, *, sharing: bool = False, seed: int = 0) -> Outcome:
    """A queue of `seats` servers, each loaded by `load`."""
    settings = SchedulerSettings(
        block_size=16, num_blocks=10_000_000, max_num_seqs=seats, max_num_batched_tokens=max(seats, 64),
        max_model_len=1_000_000,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / (load * (1 if sharing else seats)), REQUESTS))
    answers = {
        "equal": lambda: np.full(REQUESTS, MEAN_TOKENS),
        "geometric": lambda: rng.geometric(STEP_S, REQUESTS),
        "two": lambda: np.where(rng.random(REQUESTS) < 0.9, MEAN_TOKENS // 2, 11 * MEAN_TOKENS // 2),
    }[tokens]()
    traffic = Traffic(arrival_s=arrival, input_tokens=np.ones(REQUESTS, np.int64), output_tokens=answers)
    engine = KernelEngine(settings, cost_of(settings, sharing=sharing), kernel_load(settings, traffic))
    engine.advance()
    out, first = engine.out, REQUESTS // 20
    return Outcome(wait_s=(out.scheduled_s - arrival)[first:], residence_s=(out.finish_s - arrival)[first:])


def cost_of(settings: SchedulerSettings, *, sharing: bool) -> StepCost:
    """Every step takes STEP_S; sharing: per sequence in it."""
    cost = unit_cost(settings)
    batch = np.arange(len(cost.decode_s), dtype=float)
    if not sharing:
        return cost._replace(decode_s=np.full_like(batch, STEP_S), step_s=STEP_S)
    return cost._replace(decode_s=STEP_S * batch, sampled_s=STEP_S * np.arange(len(cost.sampled_s)), step_s=0.0)


def agrees(values: Floats, expected: float, *, slack: float = 2 * STEP_S) -> None:
    """The mean of correlated values is within its confidence interval (batch means, 4.5 standard errors)."""
    means = np.array([part.mean() for part in np.array_split(values, 40)])
    error = means.std(ddof=1) / np.sqrt(len(means))
    assert abs(values.mean() - expected) < 4.5 * error + slack, (values.mean(), expected, error)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_m_m_1(load: float) -> None:
    found = queue(1, load, "geometric")
    agrees(found.wait_s, load / (1 - load))
    agrees(found.residence_s, queueing.mm1_mean_residence_s(load, 1.0))
    for beyond in (1.0, 3.0):
        agrees((found.wait_s > beyond).astype(float), queueing.mm1_wait_tail(load, 1.0, beyond), slack=4 * STEP_S)


def test_m_d_1() -> None:
    agrees(queue(1, 0.7, "equal").wait_s, queueing.md1_mean_wait_s(0.7, 1.0))


def test_m_g_1() -> None:
    """Two kinds of service, Pollaczek–Khinchine."""
    second = 0.9 * 0.5**2 + 0.1 * 5.5**2
    agrees(queue(1, 0.6, "two").wait_s, 0.6 * second / (2 * (1 - 0.6)))


@pytest.mark.parametrize(("seats", "load"), [(2, 0.8), (8, 0.85)])
def test_m_m_c(seats: int, load: float) -> None:
    found = queue(seats, load, "geometric")
    rate = load * seats
    agrees(found.wait_s, queueing.mmc_mean_wait_s(rate, 1.0, seats))
    agrees((found.wait_s > STEP_S).astype(float), queueing.mmc_wait_tail(rate, 1.0, seats, 0.0), slack=0.005)


@pytest.mark.parametrize("tokens", ["geometric", "two"])
def test_m_g_1_processor_sharing(tokens: str) -> None:
    """The mean residence depends on the mean service alone."""
    found = queue(400, 0.6, tokens, sharing=True)
    agrees(found.residence_s, 1.0 / (1 - 0.6), slack=0.02)


def test_no_request_starves_under_fcfs() -> None:
    """First come, first seated."""
    out = queue(4, 0.9, "geometric")
    arrival = np.cumsum(np.random.default_rng(0).exponential(1.0 / (0.9 * 4), REQUESTS))[REQUESTS // 20 :]
    seated = arrival + out.wait_s
    assert all(a <= b + 1e-9 for a, b in pairwise(seated))


def test_work_conservation() -> None:
    """With one seat the server never idles while somebody waits: the end is that of the recursion by Lindley."""
    rng = np.random.default_rng(3)
    arrival, answers = np.cumsum(rng.exponential(0.9, 2000)), rng.geometric(0.5, 2000)
    settings = SchedulerSettings(
        block_size=4, num_blocks=1000, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=2000
    )
    cost = unit_cost(settings)._replace(step_s=0.4, decode_s=np.full(3, 0.4))
    traffic = Traffic(arrival_s=arrival, input_tokens=np.ones(2000, np.int64), output_tokens=answers)
    engine = KernelEngine(settings, cost, kernel_load(settings, traffic))
    engine.advance()
    free = 0.0
    for i in range(2000):
        free = max(free, arrival[i]) + 0.4 * answers[i]
        assert engine.out.finish_s[i] == pytest.approx(free, rel=1e-9)
