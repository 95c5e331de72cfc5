"""Loads hold what they say: closed loops, sessions, shared prefixes, joint lengths, mixtures, workloads."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar import traffic
from bstar.errors import InputError, SpecError
from bstar.specs.workload import Workload
from bstar.traffic import Traffic
from bstar.traffic.lengths import fixed, parse_lengths
from bstar.traffic.load import is_constant
from bstar.traffic.prefixes import parse_prefix_groups
from bstar.traffic.times import as_times, sample_times


def test_columns_that_were_not_given_cost_nothing():
    load = traffic.poisson(10.0, 512, "uniform:1-9", 1000)
    assert all(
        is_constant(getattr(load, name)) for name in ("priority", "prefix_group", "session", "parent", "think_s")
    )
    assert load.priority.shape == (1000,)
    assert (load.is_open_loop, load.has_sessions, load.has_prefixes, load.num_scheduled) == (True, False, False, 1000)
    assert load.scaled(2.0).rate_per_s == pytest.approx(2 * load.rate_per_s)
    assert load.fingerprint() == traffic.poisson(10.0, 512, "uniform:1-9", 1000).fingerprint()
    assert load.fingerprint() != traffic.poisson(10.0, 512, "uniform:1-9", 1000, priority=1).fingerprint()


def test_closed_loop():
    load = traffic.closed_loop(8, 512, 128, 100, think_s="exponential:mean=5s", warmup_requests=16)
    assert (load.concurrency, load.num_scheduled, load.warmup_requests) == (8, 8, 16)
    assert (load.arrival_s[:8] == 0).all()
    assert np.isnan(load.arrival_s[8:]).all()
    assert load.rate_per_s is None
    even = traffic.closed_loop(8, 512, 128, 100, start="even", start_s=4.0)
    assert even.arrival_s[:8].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    spread = traffic.closed_loop(8, 512, 128, 100, start="random", start_s=4.0).arrival_s[:8]
    assert (np.diff(spread) > 0).all()
    assert 0 < spread[-1] < 4
    assert traffic.closed_loop(8, 1, 1).num_requests == 80
    assert traffic.closed_loop(8, 1, 1, 3).num_scheduled == 3


@pytest.mark.parametrize(("text", "mean", "cv"), [
    ("5s", 5.0, 0.0), ("exponential:mean=5s", 5.0, 1.0), ("lognormal:mean=2s,cv=1.5", 2.0, 1.5),
    ("uniform:1s-3s", 2.0, 1 / math.sqrt(12)), ("fixed:500ms", 0.5, 0.0),
])  # fmt: skip
def test_think_times(text, mean, cv):
    law = as_times(text, field="think time")
    draws = sample_times(law, 200_000, np.random.default_rng(0))
    assert (law.mean_s, law.cv) == pytest.approx((mean, cv))
    assert draws.mean() == pytest.approx(mean, rel=0.02)
    assert draws.std() / draws.mean() == pytest.approx(cv, rel=0.05, abs=1e-12)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "gauss:1s", "exponential:5s", "exponential:mean=5s,cv=2",
                                  "lognormal:mean=5s", "uniform:5s", "uniform:5s-1s", "infs"])  # fmt: skip
def test_bad_think_times_are_one_line(text):
    with pytest.raises(InputError) as error:
        as_times(text, field="think time")
    assert str(error.value).startswith("think time")
    assert "\n" not in str(error.value)


@given(
    st.integers(1, 40), st.integers(1, 9), st.sampled_from(["1", "uniform:1-6", "exponential:mean=3"]),
    st.sampled_from([None, 3]), st.booleans(), st.sampled_from([None, 700]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_sessions_grow_turn_by_turn(count, added, turns, users, prefixed, longest, seed):
    prefix = traffic.prefix_groups(100, 4, popularity=1.0, added=True) if prefixed else None
    load = traffic.sessions(None if users else 2.0, turns, added, "uniform:1-200", count, concurrency=users,
                            prefix=prefix, max_context_tokens=longest, first_input_tokens=7, seed=seed)  # fmt: skip
    child = np.flatnonzero(load.parent >= 0)
    parent = load.parent[child]
    assert (parent < child).all()
    assert (load.session[child] == load.session[parent]).all()
    assert (load.turn[child] == load.turn[parent] + 1).all()
    assert (load.input_tokens[child] == load.input_tokens[parent] + load.output_tokens[parent] + added).all()
    assert (load.prefix_group[child] == load.prefix_group[parent]).all()
    first = load.turn == 0
    assert (load.input_tokens[first] == 7 + (100 if prefixed else 0)).all()
    assert np.isnan(load.arrival_s[~first]).all()
    assert (load.think_s[first] == 0).all()
    assert load.num_scheduled == (min(3, first.sum()) if users else first.sum())
    assert (np.diff(load.turn) >= 0).all()
    if longest:
        assert (load.input_tokens + load.output_tokens <= longest).all()


def test_sessions_have_the_turns_and_the_thinking_that_were_asked_for():
    load = traffic.sessions(5.0, "uniform:2-6", 50, 20, 20_000, think_s="exponential:mean=8s", seed=1)
    assert load.num_requests / 20_000 == pytest.approx(4.0, rel=0.02)
    assert load.think_s[load.turn > 0].mean() == pytest.approx(8.0, rel=0.03)
    assert load.num_scheduled / load.span_s == pytest.approx(5.0, rel=0.03)


@pytest.mark.parametrize("options", [
    {"rate_per_s": 1.0, "concurrency": 2}, {}, {"rate_per_s": 1.0, "num_sessions": 0},
    {"rate_per_s": 1.0, "max_context_tokens": 10}, {"rate_per_s": -1.0}, {"rate_per_s": 1.0, "turns": "0"},
])  # fmt: skip
def test_bad_sessions_are_one_line(options):
    with pytest.raises(InputError) as error:
        traffic.sessions(input_tokens=50, output_tokens=20, **options)
    assert "\n" not in str(error.value)


def test_prefix_groups_are_as_popular_as_their_law():
    groups = parse_prefix_groups("200,hit=0.7,groups=20,zipf=1.2")
    load = traffic.poisson(10.0, "uniform:100-900", 1, 100_000, prefix=groups)
    share = np.bincount(load.prefix_group + 1, minlength=21) / 100_000
    expected = np.concatenate(([0.3], 0.7 * np.arange(1, 21) ** -1.2 / (np.arange(1, 21) ** -1.2).sum()))
    assert np.abs(share - expected).max() < 4.5 * math.sqrt(0.25 / 100_000)
    with_one = load.prefix_group >= 0
    assert (load.prefix_tokens[with_one] == np.minimum(200, load.input_tokens[with_one])).all()
    assert (load.prefix_tokens[~with_one] == 0).all()
    assert load.has_prefixes
    plain = traffic.poisson(10.0, "uniform:100-900", 1, 100_000)
    assert (plain.input_tokens == load.input_tokens).all()
    added = traffic.poisson(10.0, "uniform:100-900", 1, 100_000, prefix=parse_prefix_groups("200,added"))
    assert (added.input_tokens == plain.input_tokens + 200).all()


@pytest.mark.parametrize("text", ["", "x", "100,hit", "100,hit=2", "100,groups=0", "100,groups=1.5", "100,zipf=-1",
                                  "100,hit=a", "100,hit=0.5,hit=0.6", "100,groups=nan", "100,zipf=inf"])  # fmt: skip
def test_bad_prefixes_are_one_line(text):
    with pytest.raises(InputError) as error:
        parse_prefix_groups(text)
    assert "\n" not in str(error.value)


def test_joint_lengths():
    pair = traffic.pairs([100, 200, 300], [10, 20, 30])
    load = traffic.poisson(1.0, num_requests=30_000, lengths=pair)
    assert (load.input_tokens == 10 * load.output_tokens).all()
    assert load.mean_input_tokens == pytest.approx(200, rel=0.01)
    texts = ("lognormal:mean=500,cv=1", "lognormal:mean=100,cv=0.5")
    for correlation in (-0.8, 0.0, 0.6, 1.0):
        load = traffic.poisson(1.0, num_requests=50_000, lengths=traffic.correlated(*texts, correlation))
        logs = np.log(load.input_tokens), np.log(load.output_tokens)
        assert np.corrcoef(*logs)[0, 1] == pytest.approx(correlation, abs=0.02)
        assert load.mean_input_tokens == pytest.approx(500, rel=0.03)
        assert load.output_tokens.std() == pytest.approx(50, rel=0.05)
    calls = (
        lambda: traffic.pairs([1], [1, 2]),
        lambda: traffic.pairs([0], [1]),
        lambda: traffic.pairs([], []),
        lambda: traffic.correlated(1, 1, 2),
        lambda: traffic.poisson(1.0, 5, None, 3, lengths=pair),
    )
    for call in calls:
        with pytest.raises(SpecError):
            call()


def test_merged_loads_keep_their_own_sessions_and_groups():
    chat = traffic.sessions(2.0, "uniform:1-5", 50, 20, 30, prefix=traffic.prefix_groups(9, 3), seed=1)
    batch = traffic.poisson(5.0, 900, 300, 50, priority=5, prefix=traffic.prefix_groups(100, 2), seed=2)
    both = traffic.merge(batch, chat)
    assert both.num_requests == chat.num_requests + 50
    assert (np.diff(both.arrival_s[: both.num_scheduled]) >= 0).all()
    assert (both.session[both.priority == 5] == -1).all()
    assert set(both.prefix_group[both.priority == 5]) == {0, 1}
    assert set(both.prefix_group[both.priority == 0]) == {2, 3, 4}
    child = np.flatnonzero(both.parent >= 0)
    assert (both.session[child] == both.session[both.parent[child]]).all()
    assert (both.turn[child] == both.turn[both.parent[child]] + 1).all()
    assert child.size == np.count_nonzero(chat.parent >= 0)
    for bad in ((), (traffic.closed_loop(2, 1, 1),), (batch, traffic.poisson(1, 1, 1, 5, warmup_requests=2))):
        with pytest.raises(SpecError, match="merge"):
            traffic.merge(*bad)


def test_workloads_become_loads():
    lengths = {"input_tokens": parse_lengths("uniform:100-900"), "output_tokens": fixed(50)}
    plain = traffic.from_workload(Workload(**lengths, rate_per_s=5.0), num_requests=500, seed=3)
    assert plain.fingerprint() == traffic.poisson(5.0, "uniform:100-900", 50, 500, seed=3).fingerprint()
    bursty = traffic.from_workload(Workload(**lengths, rate_per_s=5.0, burstiness=0.5), num_requests=500, rescale=True)
    assert bursty.span_s == pytest.approx(100.0)
    closed = traffic.from_workload(Workload(**lengths, concurrency=4), num_requests=40)
    assert (closed.concurrency, closed.num_requests) == (4, 40)
    shared = traffic.from_workload(Workload(**lengths, rate_per_s=5.0, prefix_tokens=80, prefix_hit_fraction=0.5),
                                   num_requests=10_000)  # fmt: skip
    assert (shared.prefix_tokens == 80).mean() == pytest.approx(0.5, abs=0.03)
    joint = Workload(**lengths, rate_per_s=5.0, joint=((10, 1), (20, 2)))
    assert set(traffic.from_workload(joint, num_requests=99).input_tokens) == {10, 20}
    with pytest.raises(SpecError, match="neither a rate"):
        traffic.from_workload(Workload(**lengths), num_requests=5)


@pytest.mark.parametrize(("columns", "says"), [
    ({"input_tokens": []}, "holds no request"),
    ({"input_tokens": [0, 5]}, "input_tokens"),
    ({"output_tokens": [5, 0]}, "output_tokens"),
    ({"input_tokens": [1.5, 2.5]}, "input_tokens"),
    ({"arrival_s": [2.0, 1.0]}, "arrival_s"),
    ({"arrival_s": [-1.0, 1.0]}, "arrival_s"),
    ({"arrival_s": [0.0, np.inf]}, "arrival_s"),
    ({"arrival_s": [np.nan, 1.0]}, "arrival_s"),
    ({"arrival_s": [0.0, np.nan]}, "arrival_s"),
    ({"arrival_s": [0.0, 1.0, 2.0]}, "arrival_s"),
    ({"arrival_s": [np.nan, np.nan], "concurrency": 1}, "arrival_s"),
    ({"parent": [1, -1]}, "parent"),
    ({"parent": [-1, -2]}, "parent"),
    ({"prefix_tokens": [6, 0]}, "prefix_tokens"),
    ({"prefix_tokens": 6}, "prefix_tokens"),
    ({"parent": 0}, "parent"),
    ({"think_s": [0.0, -1.0]}, "think_s"),
    ({"concurrency": 0}, "concurrency"),
    ({"warmup_requests": 2}, "warm-up"),
    ({"priority": ["a", "b"]}, "priority"),
])  # fmt: skip
def test_what_is_no_load_is_refused(columns, says):
    with pytest.raises(SpecError) as error:
        Traffic(**{"arrival_s": [0.0, 1.0], "input_tokens": [5, 5], "output_tokens": [1, 1]} | columns)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_ten_million_requests_are_drawn_in_seconds():
    import time
    import tracemalloc

    tracemalloc.start()
    start = time.process_time()
    load = traffic.poisson(6.45, "lognormal:mean=900,cv=1.2", "lognormal:mean=200,cv=0.8", 1_000_000)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert load.num_requests == 1_000_000
    assert seconds < 1.0  # 0.1 s; a tenth of the ten million
    assert peak < 60e6  # three columns of 8 MB, a check's flags, a chunk


def test_a_load_can_be_sent_to_another_process():
    import pickle

    for load in (traffic.poisson(1.0, 5, 5, 50), traffic.sessions(1.0, 3, 5, 5, 9)):
        again = pickle.loads(pickle.dumps(load))
        assert again.fingerprint() == load.fingerprint()
        assert again.has_sessions == load.has_sessions
        assert again.has_prefixes == load.has_prefixes
