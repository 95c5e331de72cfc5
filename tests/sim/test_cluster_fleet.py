"""Failures, drains, start-up and autoscaling of replicas."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_helpers import QUICK, affine, cluster, in_flight, mixed, small, tight
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from bstar.errors import BstarError
from bstar.sim.cluster import Autoscaler, Drain, Failure, simulate_cluster
from bstar.sim.cluster.fleet import Stabilizer, parse_autoscaler, parse_drain, parse_failure
from bstar.traffic import closed_loop
from bstar.traffic.load import Traffic


@examples(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), at_s=st.floats(0.01, 2.0), pipelined=st.booleans(),
    router=st.sampled_from(["round-robin", "least-outstanding", "least-kv"]), back=st.booleans(),
)  # fmt: skip
def test_a_failure_loses_no_token(seed, at_s, pipelined, router, back):
    load = mixed(40, 40.0, seed)
    failure = Failure(replica=0, at_s=at_s, back_s=0.1 if back else None)
    run = cluster(load, 3, router, settings=tight(300, async_scheduling=pipelined), figures=affine,
                  failures=(failure,))  # fmt: skip
    ledger = run.ledger
    assert np.array_equal(ledger.made, load.output_tokens)
    assert not np.isnan(ledger.finish_s).any() and (ledger.finish_s >= ledger.first_token_s).all()
    assert ledger.retries.max() <= 1
    if not back:
        on_it = ledger.replica == 0
        assert (ledger.finish_s[on_it] <= at_s).all() and not ledger.retries[on_it].any()
        assert run.members[0].replica.rows.log(kv_blocks=1, block_size=1).start_s.max(initial=0.0) < at_s
    # A step that the failure cut short gave no tokens: tokens of all steps ≥ tokens delivered.
    steps = sum(m.replica.rows.log(kv_blocks=1, block_size=1).made.sum() for m in run.members)
    assert load.output_tokens.sum() <= steps <= load.output_tokens.sum() + 2 * 16


def test_only_what_the_failed_replica_had_is_computed_again():
    load = mixed(40, 40.0, 1)
    quiet = cluster(load, 3, "round-robin", settings=tight(300), figures=affine).ledger
    run = cluster(load, 3, "round-robin", settings=tight(300), figures=affine, failures=(Failure(replica=1, at_s=0.5),))
    had = (quiet.replica == 1) & (quiet.arrival_s < 0.5) & (quiet.finish_s > 0.5)
    assert np.array_equal(run.ledger.retries > 0, had) and had.any()
    # Tokens that the user has seen stay: the first token of those that had one does not move.
    seen = had & (quiet.first_token_s <= 0.5)
    assert np.array_equal(run.ledger.first_token_s[seen], quiet.first_token_s[seen])


def test_requests_wait_for_the_only_replica_to_come_back():
    load = mixed(20, 20.0, 2)
    failure = Failure(replica=0, at_s=0.3, back_s=2.0)
    run = cluster(load, 1, "round-robin", settings=tight(300), figures=affine, failures=(failure,), startup_s=5.0)
    finish = run.ledger.finish_s
    assert not np.isnan(finish).any() and not ((finish > 0.3) & (finish < 7.3)).any()
    stays = Failure(replica=0, at_s=0.3)
    gone = cluster(load, 1, "round-robin", settings=tight(300), figures=affine, failures=(stays,))
    assert np.isnan(gone.ledger.finish_s).sum() == len(gone.held) > 0


def test_a_failure_makes_a_closed_loop_wait_not_shrink():
    load = closed_loop(concurrency=6, input_tokens=200, output_tokens=20, num_requests=30, seed=2)
    run = simulate_cluster(small(), load, replicas=2, failures=[Failure(replica=0, at_s=0.2)])
    assert run.output_tokens.sum() == load.output_tokens.sum()
    assert in_flight(np.zeros(30, dtype=int), 0, run.arrival_s, run.finish_s) <= 6


def test_a_drained_replica_finishes_what_it_has():
    load = mixed(40, 40.0, 3)
    run = cluster(load, 2, "round-robin", settings=tight(300), figures=affine, drains=(Drain(replica=0, at_s=0.4),))
    ledger = run.ledger
    mine = ledger.replica == 0
    assert (ledger.arrival_s[mine] < 0.4).all() and (ledger.finish_s[mine] > 0.4).any()
    assert not np.isnan(ledger.finish_s).any() and not ledger.retries.any()
    assert run.members[0].gone_s == ledger.finish_s[mine].max()


def test_instant_replicas_keep_concurrency_at_its_target():
    load = mixed(150, 100.0, 4)
    run = cluster(load, 1, "least-outstanding", settings=tight(2000), figures=affine, autoscaler=QUICK)
    ledger = run.ledger
    assert len(run.members) > 2
    for member in run.members:
        number = member.replica.number
        assert in_flight(ledger.replica, number, ledger.arrival_s, ledger.finish_s) <= QUICK.target


def test_a_slow_start_is_felt_and_paid_for():
    load = mixed(150, 100.0, 4)
    scaler = Autoscaler(target=4, interval_s=0.1, stabilization_s=0.5)
    fast, slow = (
        cluster(load, 1, "least-outstanding", settings=tight(2000), figures=affine, autoscaler=scaler, startup_s=s)
        for s in (0.0, 1.0)
    )
    ttft = [float((c.ledger.first_token_s - c.ledger.arrival_s).mean()) for c in (fast, slow)]
    assert ttft[0] < ttft[1]
    ready = {n: t for t, n, state in slow.states if state == "ready" and n > 0}
    begun = {n: t for t, n, state in slow.states if state == "starting" and n > 0}
    assert ready and all(ready[n] == pytest.approx(begun[n] + 1.0) for n in ready)
    assert all(ready[n] <= slow.ledger.scheduled_s[slow.ledger.replica == n].min(initial=np.inf) for n in ready)


def test_replicas_leave_when_the_load_does():
    burst, calm = mixed(100, 200.0, 5), mixed(60, 4.0, 6)
    load = Traffic(
        arrival_s=np.concatenate([burst.arrival_s, burst.arrival_s[-1] + calm.arrival_s]),
        input_tokens=np.concatenate([burst.input_tokens, calm.input_tokens]),
        output_tokens=np.concatenate([burst.output_tokens, calm.output_tokens]))
    scaler = Autoscaler(target=4, interval_s=0.1, stabilization_s=2.0, most=10)
    run = cluster(load, 1, "least-outstanding", settings=tight(2000), figures=affine, autoscaler=scaler)
    change = {"starting": 1, "gone": -1}
    there = np.cumsum([change.get(state, 0) for _, _, state in run.states])
    assert 3 < there.max() <= 10 and there[-1] < 5
    assert not np.isnan(run.ledger.finish_s).any()
    kv = Autoscaler(metric="kv", target=0.2, interval_s=0.1, stabilization_s=2.0, most=10)
    run = cluster(load, 1, "least-kv", settings=tight(400), figures=affine, autoscaler=kv)
    assert len(run.members) > 1


def test_a_wish_downwards_waits_for_the_window():
    settle = Stabilizer(10.0)
    assert [settle.settle(t, w) for t, w in ((0, 1), (1, 5), (5, 2), (10, 3), (11, 2), (12, 1), (20.5, 1))] == [
        1, 5, 5, 5, 5, 3, 2]  # fmt: skip
    assert Autoscaler(target=10, tolerance_fraction=0.1).wanted(21, 2) == 2
    assert Autoscaler(target=10, tolerance_fraction=0.0).wanted(21, 2) == 3
    assert Autoscaler(target=0.1, metric="kv", tolerance_fraction=0.0).wanted(0.3, 1) == 3


def test_options_are_read_from_text():
    assert parse_autoscaler("concurrency=20,min=2,max=8,interval=5,stabilization=60,tolerance=0") == Autoscaler(
        target=20, least=2, most=8, interval_s=5, stabilization_s=60, tolerance_fraction=0)
    assert parse_autoscaler("kv=0.8").metric == "kv"
    assert parse_failure("1@30") == Failure(replica=1, at_s=30)
    assert parse_failure("1@30+60").back_s == 60
    assert parse_drain("0@1.5") == Drain(replica=0, at_s=1.5)
    assert parse_failure("0@500ms+2min") == Failure(replica=0, at_s=0.5, back_s=120)
    assert parse_drain("2@10s") == Drain(replica=2, at_s=10)
    assert parse_autoscaler("kv=0.8,interval=500ms,stabilization=5min") == Autoscaler(
        metric="kv", target=0.8, interval_s=0.5, stabilization_s=300)
    for text in ("x", "0@10x", "0@x", "0@1+2"):
        with pytest.raises(BstarError, match=r"^drain: "):
            parse_drain(text)
    for parse, text in ((parse_autoscaler, "20"), (parse_autoscaler, "kv=2"), (parse_autoscaler, "kv=1,concurrency=1"),
                        (parse_failure, "x@1"), (parse_failure, "1@nan"), (parse_drain, "1@2+3")):  # fmt: skip
        with pytest.raises(BstarError):
            parse(text)
