"""The closed forms against a step-by-step simulation with the same step times, and the laws they keep."""

from dataclasses import replace

import numpy as np
import pytest
from batching import closed_loop, open_loop

from bstar.planning.arrivals import Stream
from bstar.planning.capacity import capacity_of
from bstar.planning.draws import request_draws
from bstar.planning.feasibility import NoAnswerError
from bstar.planning.lanes import lanes_of
from bstar.planning.outcomes import closed_outcomes, open_outcomes, saturated_rate_per_s
from bstar.planning.replica import Replica, mean_prefill_s, secure_room
from bstar.planning.sizing import fewest, replicas_needed
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload
from bstar.traffic.lengths import parse_lengths, quantile


def toy(context=1400.0, *, batch=256, budget=8192, lag=1.0, bandwidth=3.0e12, **changes):
    """About Llama-3.1-8B on an H100: weights and KV over bandwidth, prompts at 47,000 tokens/s."""
    n = np.arange(1, batch + 1)
    grid = np.unique(np.round(np.geomspace(1, budget, 24)))
    decode = 0.002 + (16e9 + n * context * 131072) / bandwidth
    fields = {
        "decode_step_s": decode, "floor_step_s": decode * 0.7, "token_grid": grid,
        "token_step_s": 0.002 + np.maximum(16e9 / bandwidth, grid / 47_000),
        "pair_s": 1e-9, "token_budget": budget, "room_sequences": 1e4, "context_cv": 0.8, "prefill_lag_steps": lag,
    }  # fmt: skip
    return Replica(**{**fields, **changes})


def load_of(inputs, outputs, **fields):
    return Workload(input_tokens=parse_lengths(inputs), output_tokens=parse_lengths(outputs), **fields)


def requests(load, count, seed=1):
    """Lengths in random order with the exact quantiles of their distributions."""
    rng = np.random.default_rng(seed)
    ranks = (np.arange(count) + 0.5) / count
    return tuple(rng.permutation(quantile(d, ranks)) for d in (load.input_tokens, load.output_tokens))


CASES = [
    # inputs, outputs, share of the saturated rate, relative error allowed: TTFT mean, p99, TPOT mean, p99
    ("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1", 0.2, 0.05, 0.15, 0.03, 0.05),
    ("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1", 0.5, 0.06, 0.22, 0.03, 0.12),
    ("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1", 0.8, 0.10, 0.28, 0.06, 0.18),
    ("1000", "250", 0.5, 0.06, 0.15, 0.04, 0.13),
    ("1000", "250", 0.8, 0.10, 0.15, 0.07, 0.16),
    ("4000", "50", 0.5, 0.06, 0.40, 0.10, 0.25),
    ("200", "600", 0.8, 0.04, 0.10, 0.03, 0.05),
]


@pytest.mark.parametrize(("inputs", "outputs", "share", "ttft", "ttft99", "tpot", "tpot99"), CASES)
def test_open_loop_against_simulation(inputs, outputs, share, ttft, ttft99, tpot, tpot99):
    load = load_of(inputs, outputs)
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    rate = share * float(saturated_rate_per_s(replica, draws)[-1])
    n = 4000
    arrivals = np.cumsum(np.random.default_rng(2).exponential(1 / rate, n))
    simulated = open_loop(replica, arrivals, *requests(load, n), cap=256)
    found = open_outcomes(replica, draws, np.array([rate]), np.array([256]))
    for name, values, seen, mean_error, tail_error in (
        ("ttft", found.ttft_s[0], simulated[0], ttft, ttft99), ("tpot", found.tpot_s[0], simulated[1], tpot, tpot99),
    ):  # fmt: skip
        assert values.mean() == pytest.approx(seen.mean(), rel=mean_error), name
        assert np.quantile(values, 0.99) == pytest.approx(np.quantile(seen, 0.99), rel=tail_error), name
    # Little's law: λ · mean time in decode is what decodes, λ · mean time in the system what is in flight.
    assert rate * (found.e2e_s - found.ttft_s).mean() == pytest.approx(float(found.decoding[0]), rel=0.06)
    assert rate * found.e2e_s.mean() == pytest.approx(float(found.in_flight[0]))


CLOSED = [
    ("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1", 1),
    ("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1", 64),
    ("uniform:800-1000", "uniform:800-1000", 16), ("uniform:6500-8192", "uniform:800-1024", 32),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "outputs", "clients"), CLOSED)
def test_closed_loop_against_simulation(inputs, outputs, clients):
    load = load_of(inputs, outputs)
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    rate, simulated = closed_loop(replica, clients, *requests(load, 12 * clients + 300), cap=256)
    found = closed_outcomes(replica, draws, np.array([float(clients)]), np.array([256]))
    assert float(found.rate_per_s[0]) == pytest.approx(rate, rel=0.06)
    assert found.tpot_s.mean() == pytest.approx(simulated[1].mean(), rel=0.04)
    assert found.ttft_s.mean() == pytest.approx(simulated[0].mean(), rel=0.30)


@pytest.mark.parametrize(("inputs", "outputs"), [
    ("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1"), ("100", "2000"), ("131000", "72"), ("4000", "50"),
    ("500", "1"),
])  # fmt: skip
@pytest.mark.parametrize("cap", [4, 256])
def test_closed_loops_keep_littles_law(inputs, outputs, cap):
    """rate · mean E2E = clients, whatever the prompts, with and without a queue at the door."""
    load = load_of(inputs, outputs)
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    clients = np.array([1.0, 2.5, 5.0, 40.0, 250.0])
    found = closed_outcomes(replica, draws, clients, np.full(5, cap))
    assert found.rate_per_s * found.e2e_s.mean(axis=1) == pytest.approx(clients, rel=0.01)
    assert found.in_flight == pytest.approx(clients, rel=0.01)
    # More clients never make less, but for the error of the forms where prefill is all there is.
    assert (np.diff(found.rate_per_s) > -0.08 * found.rate_per_s[:-1]).all()
    assert (found.decoding <= np.minimum(clients, cap) + 1e-9).all()


def test_more_clients_than_places_wait_at_the_door():
    load = load_of("uniform:800-1000", "uniform:800-1000")
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    found = closed_outcomes(replica, draws, np.array([256.0]), np.array([128]))
    rate, simulated = closed_loop(replica, 256, *requests(load, 2500), cap=128)
    assert float(found.rate_per_s[0]) == pytest.approx(rate, rel=0.05)
    assert found.ttft_s.mean() == pytest.approx(simulated[0].mean(), rel=0.10)
    assert float(found.queued_fraction[0]) == 1.0


def test_every_request_is_worse_off_at_a_higher_rate():
    load = load_of("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1")
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    rates = np.array([1.0, 4.0, 8.0, 12.0, 15.0])
    found = open_outcomes(replica, draws, rates, np.full(5, 256))
    assert (np.diff(found.ttft_s.mean(axis=1)) > 0).all()
    assert (np.diff(found.tpot_s.mean(axis=1)) > 0).all()
    for slo in (Slo(ttft_s=0.1), Slo(tpot_s=0.012), Slo(e2e_s=4.0), Slo(ttft_s=0.1, tpot_s=0.012)):
        assert (np.diff(found.attainment(slo)) <= 0).all()


def test_joint_attainment_is_at_most_each_one():
    load = load_of("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1")
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    found = open_outcomes(replica, draws, np.array([10.0]), np.array([256]))
    both = found.attainment(Slo(ttft_s=0.08, tpot_s=0.0125))[0]
    assert both <= min(found.attainment(Slo(ttft_s=0.08))[0], found.attainment(Slo(tpot_s=0.0125))[0])
    assert found.attainment(Slo())[0] == 1.0


def test_one_token_answers_have_no_tpot_and_meet_any_limit():
    load = load_of("500", "1")
    replica, draws = toy(500.0), request_draws(load)
    found = open_outcomes(replica, draws, np.array([5.0]), np.array([16]))
    assert np.isnan(found.tpot_s).all()
    assert found.attainment(Slo(tpot_s=1e-9))[0] == 1.0
    assert (found.e2e_s == found.ttft_s).all()
    closed = closed_outcomes(replica, draws, np.array([4.0]), np.array([16]))
    assert 0 < float(closed.rate_per_s[0]) < 200


def test_an_unstable_lane_meets_nothing():
    load = load_of("1000", "250")
    replica, draws = toy(), request_draws(load)
    found = open_outcomes(replica, draws, np.array([1000.0, 5.0]), np.array([256, 256]))
    assert found.stable.tolist() == [False, True]
    assert found.attainment(Slo())[0] == 0.0


def lanes(replica, draws, slo, caps, budgets=None):
    """The lanes of a toy replica: the same places at each budget."""
    places = {budget: [c for c in caps if c <= budget] for budget in budgets or (replica.token_budget,)}
    return lanes_of(replica, draws, slo, dict.fromkeys(places, 1e4), places, utilisation=0.95)


def capacity(replica, draws, load, slo, caps, budgets=None, total=None):
    return capacity_of(replica, draws, load, slo, lanes(replica, draws, slo, caps, budgets), total)


def test_capacity_is_where_attainment_ends():
    load = load_of("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1")
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    slo, caps = Slo(ttft_s=0.5, tpot_s=0.02), [16, 64, 256]
    found, _ = capacity(replica, draws, load, slo, caps)
    cap = np.array([found.cap])
    assert open_outcomes(replica, draws, np.array([found.load]), cap).attainment(slo)[0] >= 0.99
    assert open_outcomes(replica, draws, np.array([found.load * 1.03]), cap).attainment(slo)[0] < 0.99
    tighter, _ = capacity(replica, draws, load, replace(slo, tpot_s=0.015), caps)
    assert tighter.load <= found.load
    with pytest.raises(NoAnswerError, match="only when it is idle"):
        capacity(replica, draws, load, Slo(tpot_s=0.001), [16, 64])
    faster, _ = capacity(toy(load.mean_decode_context_tokens, bandwidth=6e12), draws, load, slo, caps)
    assert faster.load >= found.load


def test_closed_capacity_is_where_attainment_ends():
    load = load_of("uniform:800-1000", "uniform:800-1000", concurrency=100)
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    slo = Slo(tpot_s=0.015)
    found, _ = capacity(replica, draws, load, slo, [64, 256])
    cap = np.array([found.cap])
    assert closed_outcomes(replica, draws, np.array([found.load]), cap).attainment(slo)[0] >= 0.99
    assert closed_outcomes(replica, draws, np.array([found.load * 1.05]), cap).attainment(slo)[0] < 0.99


BUDGETS = (256, 512, 1024, 2048, 4096, 8192)


@pytest.mark.parametrize("slo", [
    Slo(ttft_s=0.5, tpot_s=0.02), Slo(tpot_s=0.012), Slo(ttft_s=0.2), Slo(e2e_s=15.0), Slo(),
])  # fmt: skip
@pytest.mark.parametrize("total", [3.0, 30.0, 95.0])
def test_more_settings_never_take_more_replicas(slo, total):
    load = load_of("lognormal:mean=1000,cv=1", "lognormal:mean=250,cv=1", rate_per_s=total)
    replica, draws, caps = toy(load.mean_decode_context_tokens), request_draws(load), [8, 32, 64, 96, 128, 192, 256]
    _, free = capacity(replica, draws, load, slo, caps, BUDGETS, total)
    for budget in BUDGETS:
        for cap in caps:
            if cap > budget:
                continue
            try:
                assert free <= capacity(replica, draws, load, slo, [cap], (budget,), total)[1]
            except NoAnswerError:
                continue


def test_the_fewest_replicas_are_found_without_doubling_past_them():
    for answer in (1, 2, 3, 7, 11, 12, 63, 64, 65):
        asked = []
        assert fewest(lambda n, a=answer, seen=asked: seen.append(n) or n >= a, at_least=1, at_most=1000) == answer
        assert len(asked) <= 14
    assert fewest(lambda n: False, at_least=3, at_most=50) is None


def test_bursts_cost_capacity_and_routers_smooth_them():
    load = load_of("1000", "250", rate_per_s=5.0, burstiness=0.1)
    replica, draws = toy(load.mean_decode_context_tokens), request_draws(load)
    slo = Slo(ttft_s=0.3, tpot_s=0.03)
    carried = [capacity(replica, draws, replace(load, burstiness=1 / g), slo, [64, 256])[0].load for g in (1, 4, 10)]
    assert carried[0] > carried[1] > carried[2]
    counts = [capacity(replica, draws, replace(load, burstiness=1 / g), slo, [64, 256], None, 60.0)[1]
              for g in (1, 4, 10, 40)]  # fmt: skip
    assert counts == sorted(counts)
    for replicas, seen in ((1, 10.0), (9, 2.0)):
        stream = Stream(gap_cv_squared=load.gap_cv_squared, replicas=replicas)
        assert float(stream.dispersion(np.ones(1), np.ones(1))[0, 0]) == pytest.approx(seen)


def test_a_prompt_token_is_nearly_free_below_the_ridge():
    draws = request_draws(load_of("32", "100"))
    replica = toy()
    few = float(replica.marginal_prefill_s(np.array([8.0]), np.array([32.0]))[0])
    many = float(replica.marginal_prefill_s(np.array([8.0]), np.array([4096.0]))[0])
    assert few < 0.05 * many
    # … and not free once many of them share a step.
    cost = mean_prefill_s(replica, draws, np.array([1.0, 1000.0])[:, None])
    assert cost[1, 0] > 5 * cost[0, 0]


def test_secure_room_is_below_the_mean_room():
    assert secure_room(100.0, 0.0) == pytest.approx(100.0)
    assert 75 < secure_room(100.0, 1.0) < 85
    rng = np.random.default_rng(0)
    n = int(secure_room(100.0, 0.5))
    held = rng.gamma(4.0, 0.25, (20_000, n)).sum(axis=1)
    assert 0.97 < (held <= 100.0).mean() < 0.999


def test_replicas():
    assert replicas_needed(10.0, 5.0) == 2
    assert replicas_needed(10.1, 5.0) == 3
    assert replicas_needed(0.1, 5.0) == 1
