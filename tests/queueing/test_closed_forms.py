"""Closed forms against textbook values, identities between them, and brute-force simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar import queueing as q
from bstar.errors import SpecError


def simulate_fcfs(rng, gaps, service, servers=1):
    """Waits of a FCFS queue, customer by customer (Kiefer–Wolfowitz)."""
    free_at = np.zeros(servers)
    waits = np.empty(len(gaps))
    now = 0.0
    for i, (gap, work) in enumerate(zip(gaps, service, strict=True)):
        now += gap
        server = int(free_at.argmin())
        waits[i] = max(free_at[server] - now, 0.0)
        free_at[server] = now + waits[i] + work
    return waits[len(waits) // 10:]


def test_little_is_the_missions_example():
    assert q.concurrency(10.0, 500 * 0.020) == 100.0
    assert q.residence_s(100.0, 10.0) == 10.0
    assert q.rate_of(100.0, 10.0) == 10.0
    with pytest.raises(SpecError):
        q.residence_s(1.0, 0.0)


def test_erlang_known_values():
    # Tables of Erlang B and C: 10 erlangs on 10 servers block 21.46 %; 8 on 10 make 40.92 % wait.
    assert q.erlang_b(10, 10.0) == pytest.approx(0.2146, abs=5e-5)
    assert q.erlang_c(10, 8.0) == pytest.approx(0.4092, abs=5e-5)
    assert q.erlang_c(1, 0.7) == pytest.approx(0.7)
    assert q.erlang_c(4, 4.0) == 1.0


@given(servers=st.integers(1, 60), rho=st.floats(0.01, 0.99))
def test_erlang_c_is_the_sum_of_its_definition(servers, rho):
    a = servers * rho
    head = sum(a**k / math.factorial(k) for k in range(servers))
    tail = a**servers / math.factorial(servers) / (1 - rho)
    assert q.erlang_c(servers, a) == pytest.approx(tail / (head + tail), rel=1e-9)


def test_mm1_is_mmc_with_one_server_and_mg1_with_exponential_service():
    rate, service = 0.8, 1.0
    assert q.mmc_mean_wait_s(rate, service, 1) == pytest.approx(4.0)
    assert q.mm1_mean_residence_s(rate, service) == pytest.approx(5.0)
    assert float(q.mg1_mean_wait_s(rate, service, 2 * service**2)) == pytest.approx(4.0)
    assert float(q.kingman_mean_wait_s(rate, service, 1.0, 1.0)) == pytest.approx(4.0)
    assert float(q.md1_mean_wait_s(rate, service)) == pytest.approx(2.0)
    exact = q.mm1_wait_quantile_s(rate, service, 0.99)
    assert float(q.mg1_wait_quantile_s(rate * service, 4.0, 0.99)) == pytest.approx(exact)
    assert q.mm1_wait_tail(rate, service, exact) == pytest.approx(0.01)
    assert float(q.mg1_wait_tail(rate, 4.0, exact)) == pytest.approx(0.01)


def test_unstable_queues_wait_for_ever():
    assert q.mm1_mean_residence_s(2.0, 1.0) == math.inf
    assert q.mmc_mean_wait_s(5.0, 1.0, 4) == math.inf
    assert q.mmc_wait_quantile_s(5.0, 1.0, 4, 0.5) == math.inf
    assert float(q.mg1_mean_wait_s(1.0, 1.0, 1.0)) == math.inf
    assert float(q.kingman_mean_wait_s(1.5, 1.0, 1.0)) == math.inf
    assert float(q.mg1_wait_quantile_s(1.0, 1.0, 0.5)) == math.inf
    assert q.ps_mean_residence_s(1.0, 1.0) == math.inf


def lindley(gaps, service):
    """Waits of a one-server FCFS queue, all at once: the walk above its running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    return walk - np.minimum.accumulate(walk)


@pytest.mark.parametrize(("cv", "rho", "p99_error"), [
    (0.0, 0.5, 0.17), (0.0, 0.7, 0.09), (0.0, 0.9, 0.02), (0.5, 0.5, 0.08), (0.5, 0.7, 0.05), (0.5, 0.9, 0.01),
    (1.0, 0.5, -0.12), (1.0, 0.7, -0.09), (2.0, 0.5, -0.33), (2.0, 0.7, -0.32),
])  # fmt: skip
def test_wait_tail_of_mg1_errs_as_much_as_it_says(cv, rho, p99_error):
    rng = np.random.default_rng(1)
    n = 1_000_000
    sigma = math.sqrt(math.log1p(cv * cv))
    service = rng.lognormal(-sigma * sigma / 2, sigma, n)
    waits = lindley(rng.exponential(1 / rho, n), service)
    mean = float(q.mg1_mean_wait_s(rho, 1.0, 1 + cv * cv))
    assert waits.mean() == pytest.approx(mean, rel=0.08)
    estimate = float(q.mg1_wait_quantile_s(rho, mean, 0.99))
    assert estimate / np.quantile(waits, 0.99) - 1 == pytest.approx(p99_error, abs=0.06)


def test_mmc_tail_against_simulation():
    rng = np.random.default_rng(3)
    n, servers, rho = 200_000, 5, 0.8
    waits = simulate_fcfs(rng, rng.exponential(1 / (servers * rho), n), rng.exponential(1.0, n), servers)
    assert waits.mean() == pytest.approx(q.mmc_mean_wait_s(servers * rho, 1.0, servers), rel=0.08)
    assert (waits > 1.0).mean() == pytest.approx(q.mmc_wait_tail(servers * rho, 1.0, servers, 1.0), rel=0.08)


def test_kingman_bounds_regular_and_follows_bursty_arrivals():
    rng = np.random.default_rng(4)
    n, rho = 300_000, 0.9
    for shape in (4.0, 0.25):
        gaps = rng.gamma(shape, 1 / (rho * shape), n)
        waits = simulate_fcfs(rng, gaps, rng.exponential(1.0, n))
        estimate = float(q.kingman_mean_wait_s(rho, 1.0, 1.0, 1 / shape))
        assert estimate == pytest.approx(waits.mean(), rel=0.15)


@pytest.mark.parametrize(("rate", "limit"), [(0.5, 4), (2.0, 4), (3.6, 4), (0.6, 1)])
def test_bulk_service_bounds_hold(rate, limit):
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / rate, 60_000))
    waits, clock, i = [], 0.0, 0
    while i < len(arrivals):
        clock = max(clock, arrivals[i])
        taken = min(limit, int(np.searchsorted(arrivals, clock, side="right")) - i)
        waits.extend(clock - arrivals[i:i + taken])
        i += taken
        clock += 1.0
    lower, upper = q.bulk_service_wait_s(rate, limit, 1.0)
    assert lower * 0.97 <= np.mean(waits) <= upper


def test_static_batch_slots():
    assert q.static_batch_slot_utilisation([20, 500]) == pytest.approx(0.52)
    with pytest.raises(SpecError):
        q.static_batch_slot_utilisation([])


# -- processor sharing with a state-dependent rate ----------------------------------------------------


def simulate_sharing(rng, rate, work, step_of, cap, n):
    """(time share by number in flight, waits) of a replica: each of n in flight progresses at 1/step(n)."""
    arrivals = np.cumsum(rng.exponential(1 / rate, n))
    left, queue = np.zeros(0), []
    time_at = np.zeros(cap + 1)
    waits = np.zeros(n)
    now, i, started = 0.0, 0, 0
    while i < n:
        pace = step_of(max(len(left), 1))
        finish = now + left.min() * pace if len(left) else math.inf
        moment = min(arrivals[i], finish)
        time_at[len(left)] += moment - now
        left = left - (moment - now) / pace
        now = moment
        if moment == arrivals[i]:
            queue.append(i)
            i += 1
        else:
            left = np.delete(left, left.argmin())
        while queue and len(left) < cap:
            first = queue.pop(0)
            waits[first] = now - arrivals[first]
            left = np.append(left, work[first])
            started += 1
    return time_at / time_at.sum(), waits[: started]


@pytest.mark.parametrize("shape", ["fixed", "exponential", "lognormal"])
def test_in_flight_does_not_depend_on_the_spread_of_outputs(shape):
    rng = np.random.default_rng(6)
    n, mean = 20_000, 100.0
    work = {"fixed": np.full(n, mean), "exponential": rng.exponential(mean, n),
            "lognormal": mean * rng.lognormal(-0.5, 1.0, n)}[shape]  # fmt: skip
    def step(k):
        return 0.005 + 0.0002 * k

    measured, _ = simulate_sharing(rng, 12.0, work, step, 60, n)
    found = q.in_flight_distribution(np.array(12.0 * mean), np.array([step(k) for k in range(1, 61)]))
    counts = np.arange(61)
    assert float(found.mean) == pytest.approx((measured * counts).sum(), rel=0.06)
    assert float(found.queued_fraction) < 1e-6
    assert float(found.probability.sum()) == pytest.approx(1.0, abs=1e-6)


def test_a_full_replica_queues_as_often_as_it_says():
    rng = np.random.default_rng(7)
    n, mean, cap, rate = 30_000, 100.0, 8, 10.0
    def step(k):
        return 0.005 + 0.0002 * k

    measured, waits = simulate_sharing(rng, rate, rng.exponential(mean, n), step, cap, n)
    found = q.in_flight_distribution(np.array(rate * mean), np.array([step(k) for k in range(1, cap + 1)]))
    assert float(found.queued_fraction) == pytest.approx((waits > 0).mean(), abs=0.03)
    assert float(found.mean) == pytest.approx((measured * np.arange(cap + 1)).sum(), rel=0.04)


def test_in_flight_limits_are_the_textbook_queues():
    rho = 0.7
    # s(n) ∝ n: M/G/1-PS is geometric; s constant: M/G/∞ is Poisson; cap 1: M/M/1 waits with probability ρ.
    sharing = q.in_flight_distribution(np.array(rho), np.arange(1.0, 401.0))
    assert sharing.probability[:4] == pytest.approx((1 - rho) * rho ** np.arange(4), rel=1e-9)
    assert float(sharing.mean) == pytest.approx(rho / (1 - rho), rel=1e-6)
    endless = q.in_flight_distribution(np.array(5.0), np.ones(400))
    assert endless.probability[:3] == pytest.approx(np.exp(-5.0) * np.array([1, 5, 12.5]), rel=1e-9)
    single = q.in_flight_distribution(np.array(rho), np.ones(1))
    assert float(single.queued_fraction) == pytest.approx(rho)
    servers = q.in_flight_distribution(np.array(4.0), np.ones(5))
    assert float(servers.queued_fraction) == pytest.approx(q.erlang_c(5, 4.0))


def test_in_flight_is_vectorised_and_marks_what_is_unstable():
    found = q.in_flight_distribution(np.array([0.5, 2.0]), np.ones(1))
    assert found.stable.tolist() == [True, False]
    assert found.queued_fraction.tolist() == [0.5, 1.0]


def test_fifo_waits_are_lindleys_recursion():
    rng = np.random.default_rng(5)
    server = np.sort(rng.integers(0, 4, 2000))
    arrival = np.concatenate([np.sort(rng.uniform(0, 100, int((server == k).sum()))) for k in range(4)])
    service = rng.gamma(2.0, 0.09, 2000)
    expected = np.empty(2000)
    for k in range(4):
        free = -np.inf
        for i in np.flatnonzero(server == k):
            expected[i] = max(free - arrival[i], 0.0)
            free = arrival[i] + expected[i] + service[i]
    assert q.fifo_waits_s(arrival, service, server) == pytest.approx(expected, abs=1e-8)
    # Poisson arrivals, exponential service: M/M/1.
    n = 200_000
    waits = q.fifo_waits_s(np.cumsum(rng.exponential(1.0, n)), rng.exponential(0.6, n))
    assert waits.mean() == pytest.approx(0.6 * 0.6 / 0.4, rel=0.05)
