"""`plan(simulate=N)`: the best candidates by simulation of one replica at its share of the load."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import bstar
from bstar.errors import SpecError
from bstar.planning import simulated
from bstar.planning.draws import request_draws
from bstar.planning.screen import Task
from bstar.planning.simulated_load import closed_load, replica_load
from bstar.planning.space import EngineChoice
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload
from bstar.traffic import poisson
from bstar.traffic.lengths import fixed

LOAD = {"input_tokens": 1000, "output_tokens": 200}
SLO = "ttft=1s,tpot=40ms"


slow = pytest.mark.slow


def planned(gpu="h100,l40s", **more):
    return bstar.plan("llama-3.1-8b", gpu, **{**LOAD, "rate_per_s": 30.0, "slo": SLO, **more})


@pytest.fixture(scope="module")
def plan():
    return planned(simulate=2)


def seen_at(candidate, rate, count, slo=SLO, **load):
    requests = poisson(rate, load.get("input_tokens", 1000), load.get("output_tokens", 200), count, seed=77,
                       warmup_requests=count // 8, rescale=True)
    return bstar.simulate(candidate.deployment, requests, slo=slo)


def test_the_best_are_simulated_and_hold_with_other_requests(plan):
    assert [c.simulated is not None for c in plan.candidates[:2]] == [True, True]
    for candidate in plan.candidates[:2]:
        other = seen_at(candidate, 30.0 / candidate.replicas, 4000)
        assert other.summary.slo_attainment_fraction >= 0.985
        assert candidate.simulated.tpot_s.mean == pytest.approx(other.summary.tpot_s.mean, rel=0.06)
        assert candidate.expected is candidate.simulated


@slow
def test_one_replica_less_misses_the_slo_or_is_full(plan):
    for candidate in (c for c in plan.candidates if c.simulated and c.replicas > 1):
        rate = 30.0 / (candidate.replicas - 1)
        less = seen_at(candidate, rate, 20_000)
        full = bstar.simulate(candidate.deployment, bstar.traffic.closed_loop(
            candidate.deployment.engine.max_num_seqs, **LOAD, num_requests=6000)).summary.requests_per_s
        assert less.summary.slo_attainment_fraction < 0.99 or rate > 0.95 * full


def test_cost_order_and_capacity_are_those_of_the_simulation(plan):
    prices = [c.cost.usd_per_hour for c in plan.candidates]
    assert prices == sorted(prices)
    for c in (c for c in plan.candidates if c.simulated):
        assert c.capacity_requests_per_s >= 30.0
        assert c.goodput_requests_per_s == pytest.approx(30.0 * c.simulated.slo_attainment_fraction)
        assert c.slo_attainment_fraction == c.simulated.slo_attainment_fraction >= 0.99
        low, high = c.simulated.attainment_low, c.simulated.attainment_high
        assert low <= c.slo_attainment_fraction <= high
        assert c.headroom_fraction == pytest.approx(c.capacity_requests_per_s / 30.0 - 1.0)


def test_what_is_not_simulated_is_as_it_was(plan):
    plain = {(c.deployment.device.id, str(c.layout)): c.to_dict() for c in planned().candidates}
    for c in plan.candidates[2:]:
        assert c.simulated is None
        found, before = c.to_dict(), plain[c.deployment.device.id, str(c.layout)]
        assert {**found, "pareto": None} == {**before, "pareto": None}


def test_the_same_question_has_the_same_answer(plan):
    assert json.dumps(plan.to_dict()) == json.dumps(planned(simulate=2).to_dict())
    assert plan.to_dict()["candidates"][0]["simulated"]["num_requests"] >= 3500


def test_names_are_told_before_they_are_simulated():
    told = []
    planned("h100", simulate=1, tell=lambda number, name: told.append((number, name)))
    assert told[0][0] == 1
    assert "h100-sxm-80gb" in told[0][1]


@pytest.mark.parametrize("more", [
    {"rate_per_s": None, "slo": None}, {"slo": None}, {"rate_per_s": None, "concurrency": 200, "slo": None},
    {"burstiness": 0.25}, {"headroom_fraction": 0.3}, {"peak_factor": 2.0},
    *(pytest.param(more, marks=slow) for more in (
        {"rate_per_s": None, "slo": "tpot=20ms"}, {"rate_per_s": None, "concurrency": 200, "slo": "tpot=20ms"},
        {"prefix_tokens": 800}, {"output_tokens": 1, "slo": "ttft=1s"}, {"engine": "sglang"}, {"engine": "trtllm"})),
], ids=str)  # fmt: skip
def test_every_kind_of_load(more):
    found = planned("h100", simulate=1, **more)
    best = found.best
    assert best.simulated is not None
    json.dumps(found.to_dict(), allow_nan=False)
    assert best.slo_attainment_fraction >= 0.99
    assert best.requests_per_s > 0
    if more.get("concurrency"):
        assert best.clients_per_replica == pytest.approx(200 / best.replicas)
        assert best.requests_per_s == pytest.approx(best.simulated.requests_per_s * best.replicas)
    asked = 30.0 * more.get("peak_factor", 1.0) / (1.0 - more.get("headroom_fraction", 0.0))
    if "rate_per_s" not in more:
        assert best.capacity_requests_per_s >= asked * (1 - 1e-9)


@slow
def test_a_trace_brings_its_own_arrivals(tmp_path):
    rng = np.random.default_rng(0)
    moments = np.cumsum(rng.gamma(0.3, 1.0, 3000))
    rows = "\n".join(f"{t:.3f},{i},{o}" for t, i, o in zip(
        moments, rng.integers(100, 2000, 3000), rng.integers(20, 300, 3000), strict=True))
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    found = bstar.plan("llama-3.1-8b", "h100", trace=path, rate_per_s=40.0, slo=SLO, simulate=1)
    assert found.best.simulated.num_requests >= 3000 / found.best.replicas / 2
    assert found.best.slo_attainment_fraction >= 0.99
    assert not any("closed forms" in note for note in found.best.notes)


@slow
def test_too_many_gpus_as_simulated_is_a_rejection(monkeypatch):
    """What closed forms find to need few and the simulation finds to need many; others move up and are simulated."""
    monkeypatch.setattr(simulated._Probe, "capacity", lambda probe, wanted: probe.sized.capacity.load / 10.0)
    found = planned("h100", simulate=1, max_gpus=8)
    said = [r.reason for r in found.rejected if "as simulated" in r.reason]
    assert len(said) == 3  # so many are tried for one
    assert all("more than the 8 allowed" in reason for reason in said)
    assert all(c.simulated is None for c in found.candidates)


def test_out_of_reach_as_simulated_is_a_rejection(monkeypatch):
    monkeypatch.setattr(simulated._Probe, "_margin", lambda probe, load: -0.5)
    found = planned("h100", simulate=1)
    assert sum("of requests meet the SLO as simulated" in r.reason for r in found.rejected) == 3


def test_no_negative_number():
    with pytest.raises(SpecError, match="simulate"):
        planned("h100", simulate=-1)


def task(workload, **more):
    return Task(workload=workload, slo=Slo(tpot_s=0.04), draws=request_draws(workload), context=1000.0,
                max_model_len=4096, choice=EngineChoice(engine="vllm"), **more)


def test_what_one_of_several_replicas_gets():
    workload = Workload(input_tokens=fixed(100), output_tokens=fixed(10), rate_per_s=40.0, burstiness=0.2)
    alone, many = (replica_load(task(workload), 10.0, n, 20_000) for n in (1.0, 4.0))
    for load, square in ((alone, 5.0), (many, 2.0)):  # 1 + (5 − 1)/R
        gaps = np.diff(load.arrival_s)
        assert load.num_requests / load.arrival_s[-1] == pytest.approx(10.0)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(square, rel=0.1)
        assert load.warmup_requests == 2500
    closed = replica_load(task(replace(workload, rate_per_s=None, concurrency=40)), 13.3, 3.0, 500)
    assert closed.concurrency == 14
    assert closed_load(workload, 0.2, 10).concurrency == 1


def test_a_denser_load_is_the_same_load():
    """The same draws at every rate: what is probed differs by the rate alone."""
    workload = Workload(input_tokens=fixed(100), output_tokens=fixed(10), rate_per_s=40.0)
    slow, fast = (replica_load(task(workload), rate, 4.0, 100) for rate in (5.0, 10.0))
    assert slow.arrival_s == pytest.approx(2.0 * fast.arrival_s)
