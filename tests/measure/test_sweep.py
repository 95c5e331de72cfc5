"""Searches over the load, on servers whose answer is a formula."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fake_server import FakeServer, good
from hypothesis import given
from hypothesis import strategies as st

from bstar.errors import SpecError
from bstar.interfaces.cli.bench_sweep import run_sweep
from bstar.measure import RunOptions, bench, parse_endpoint, prepare
from bstar.measure.sweeps import Point, SweepPlan, boundary_of, knee_of, parse_sweep, sweep


def server(a: float, b: float, limit_s: float):
    """Step time a + b·n: throughput n/(a + b·n); the SLO is met while a step takes at most `limit_s`."""

    def measure(load: float) -> Point:
        step = a + b * load
        share = 1.0 if step <= limit_s else max(0.0, 1.0 - (step - limit_s) / limit_s)
        return Point(load=load, throughput_per_s=load / step, goodput_per_s=load / step * share / 100,
                     attainment_fraction=share)

    return measure


@given(a=st.floats(1e-3, 1.0), ratio=st.floats(2.0, 200.0), at=st.floats(1.5, 10.0))
def test_the_search_finds_boundary_and_knee(a, ratio, at):
    """n/(a + b·n) gains (a + b·n)/(a/2 + b·n) - 1 by a doubling: less than 5 % from n = 9.5·a/b on."""
    b = a / ratio
    limit = a * at
    found = sweep(server(a, b, limit), SweepPlan(axis="rate", search=True, most_points=60), target_fraction=0.99)
    edge = (limit * 1.01 - a) / b  # a share of 0.99
    boundary = found.boundary
    assert boundary.load is not None
    if edge >= 1.0 and not boundary.edge:
        assert boundary.low <= edge * 1.001
        assert boundary.high >= edge * 0.999
        assert boundary.high / boundary.low <= 1.11
    knee = found.knee
    if not knee.edge:
        assert knee.load == pytest.approx(9.5 * ratio, rel=0.15)


def test_the_knee_of_a_server_that_saturates_at_once_is_at_the_wall():
    """min(n, 20)/s: at 14 the double is 20, that gains 43 %; from 19.05 on the double gains less than 5 %."""
    points = [Point(load=n, throughput_per_s=min(n, 20.0), goodput_per_s=0, attainment_fraction=1)
              for n in (1, 2, 4, 8, 16, 18, 20, 24, 32, 64)]
    assert knee_of(points).load == pytest.approx(20 / 1.05, rel=0.01)


def test_best_goodput_is_at_the_slo_not_at_most_throughput():
    found = sweep(server(1.0, 0.01, 2.0), SweepPlan(axis="concurrency", search=True), target_fraction=0.9)
    assert found.best.load < found.points[-1].load
    assert found.boundary.load == pytest.approx(120, rel=0.12)  # 1 + 0.01·n = 2·1.1


def test_integers_are_never_measured_twice_and_the_search_ends():
    asked = []

    def measure(load):
        asked.append(load)
        return server(1.0, 1.0, 3.0)(load)

    sweep(measure, SweepPlan(axis="concurrency", search=True), target_fraction=0.99)
    assert len(asked) == len(set(asked))
    assert all(load == int(load) for load in asked)


def test_a_server_that_meets_no_slo_and_one_that_always_does():
    none = [Point(load=n, throughput_per_s=n, goodput_per_s=0, attainment_fraction=0.1) for n in (1, 2, 4)]
    assert (boundary_of(none, 0.99).load, boundary_of(none, 0.99).edge) == (None, "below")
    every = [Point(load=n, throughput_per_s=n, goodput_per_s=n, attainment_fraction=1.0) for n in (1, 2, 4)]
    assert (boundary_of(every, 0.99).load, boundary_of(every, 0.99).edge) == (4, "above")
    assert knee_of(every).edge == "above"


def test_an_interrupt_keeps_what_was_measured_and_a_sweep_resumes():
    base = server(1.0, 0.1, 3.0)

    def stops(load):
        point = base(load)
        return point if load < 8 else Point(load=load, throughput_per_s=0, goodput_per_s=0, attainment_fraction=0,
                                             interrupted=True)

    first = sweep(stops, parse_sweep("concurrency=1,2,4,8,16"))
    assert first.interrupted
    assert [p.load for p in first.points] == [1, 2, 4]
    asked = []
    whole = sweep(lambda n: asked.append(n) or base(n), parse_sweep("concurrency=1,2,4,8,16"), known=first.points)
    assert asked == [8, 16]
    assert len(whole.points) == 5


def test_a_client_limited_point_ends_the_doublings_and_is_no_result():
    base = server(1.0, 0.001, 10.0)

    def limited(load):
        point = base(load)
        return point if load < 32 else Point(load=load, throughput_per_s=1e9, goodput_per_s=1e9,
                                             attainment_fraction=1, valid=False)

    found = sweep(limited, SweepPlan(axis="concurrency"), target_fraction=0.9)
    assert found.points[-1].load == 32
    assert found.best.load == 16
    assert found.notes


@pytest.mark.parametrize(("text", "loads", "search"), [
    ("concurrency=1,2,8,4", (1, 2, 4, 8), False), ("rate=0.5..4", (0.5, 1, 2, 4), False),
    ("concurrency=1..100", (1, 2, 4, 8, 16, 32, 64, 100), False), ("rate=auto", (), True),
    ("concurrency=4..auto", (), True),
])
def test_sweeps_are_written_so(text, loads, search):
    plan = parse_sweep(text)
    assert (plan.loads, plan.search) == (loads, search)


@pytest.mark.parametrize("text", ["batch=1,2", "concurrency", "concurrency=", "rate=8..2", "concurrency=0,1",
                                  "concurrency=1.5", "rate=x"])
def test_sweeps_that_are_not_understood_are_refused(text):
    with pytest.raises((SpecError, Exception), match=r"--sweep"):
        parse_sweep(text)


@pytest.mark.parametrize("slo", [None, "ttft=5s"])
def test_ctrl_c_between_loads_says_what_was_whole_and_how_to_go_on(slo, tmp_path, capsys):
    """And without an SLO nothing is said of one."""
    from bstar.specs.slo import parse_slo
    from bstar.traffic import closed_loop

    loads = SimpleNamespace(at=lambda axis, load: closed_loop(int(load), 8, 2, 4), asked=lambda axis: {})

    def one_run(server, traffic, how, out, what):
        if traffic.concurrency == 4:
            raise KeyboardInterrupt
        return bench(server, traffic, how, out=out)

    limits = None if slo is None else parse_slo(slo)
    with FakeServer(good) as fake:
        code = run_sweep(prepare(parse_endpoint(fake.url)), loads, RunOptions(slo=limits, workers=0),
                         parse_sweep("concurrency=1,2,4"), limits, tmp_path / "s", False, one_run)
    said = capsys.readouterr().out
    assert code == 130
    assert f"--out {tmp_path / 's'} and --resume" in " ".join(said.split())
    assert [p["load"] for p in json.loads((tmp_path / "s" / "sweep.json").read_text())["points"]] == [1, 2]
    assert ("goodput" in said, "in SLO" in said) == (slo is not None, slo is not None)
