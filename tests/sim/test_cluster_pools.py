"""Prefill and decode in separate pools."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cluster_helpers import mixed, small

from bstar.errors import SpecError
from bstar.physics.kv_cache import kv_bytes_per_sequence
from bstar.sim.cluster import Failure, KvLink, simulate_cluster
from bstar.sim.cluster.transfer import Transfers
from bstar.sim.run import simulate
from bstar.traffic import poisson

ENDLESS = KvLink(bandwidth_bytes_per_s=math.inf)
SLOW = KvLink(bandwidth_bytes_per_s=2e9, latency_s=1e-3)


def load(count: int = 60, seed: int = 0, rate: float = 20.0):
    return poisson(rate_per_s=rate, input_tokens="lognormal:mean=900,cv=1", output_tokens="uniform:1-60",
                   num_requests=count, seed=seed)  # fmt: skip


def test_with_an_endless_link_the_prefill_pool_is_a_queue_of_prompts():
    traffic = load()
    run = simulate_cluster(small(), traffic, prefill_replicas=1, decode_replicas=1, kv_link=ENDLESS)
    prompts = replace(traffic, output_tokens=np.ones(60, dtype=np.int64))
    alone = simulate(small(), prompts, engine="reference")
    assert np.array_equal(run.first_token_s, alone.first_token_s)
    assert np.array_equal(run.output_tokens, traffic.output_tokens)
    sent = traffic.output_tokens > 1
    assert (run.moved_s[sent] == 0).all() and np.isnan(run.moved_s[~sent]).all()
    # The decode replica never computes a prompt, and makes all but the first tokens.
    there = run.steps.replica == 1
    assert run.steps.prompt_tokens[there].sum() == 0
    assert (run.steps.made * run.steps.steps)[there].sum() == (traffic.output_tokens - 1).sum()
    assert run.steps.prompt_tokens[~there].sum() == traffic.input_tokens.sum()


def test_decode_is_not_stalled_by_prompts():
    """What the pools are for: gaps between tokens have no prompt in them."""
    traffic = load(count=100, rate=15.0)
    apart = simulate_cluster(small(), traffic, prefill_replicas=1, decode_replicas=1, kv_link=ENDLESS)
    mixed_up = simulate_cluster(small(), traffic, replicas=2)
    assert apart.summary.itl_s.p99 < mixed_up.summary.itl_s.p99


def test_bytes_that_are_moved_are_those_of_the_prompts():
    traffic = load()
    d = small()
    run = simulate_cluster(d, traffic, prefill_replicas=2, decode_replicas=2, kv_link=SLOW)
    sent = traffic.output_tokens > 1
    each = [kv_bytes_per_sequence(d.model, d.kv_format, float(t)) for t in traffic.input_tokens]
    assert np.array_equal(run.moved_bytes[sent], np.array(each)[sent])
    assert not run.moved_bytes[~sent].any()
    assert set(run.prefill_replica[sent]) == {0, 1} and set(run.replica[sent]) == {2, 3}
    assert (run.moved_s[sent] >= np.array(each)[sent] / 2e9 + 1e-3 - 1e-12).all()


def test_a_link_carries_one_cache_after_another():
    d = small()
    transfers = Transfers(KvLink(bandwidth_bytes_per_s=1e9), d)
    size = transfers.rank_bytes(1000)
    first = transfers.arrival_s(0, 2, 1.0, 0.5, 1000, 0)
    second = transfers.arrival_s(0, 3, 1.0, 0.5, 1000, 0)
    other = transfers.arrival_s(1, 4, 1.0, 0.5, 1000, 0)
    assert first == other == 1.0 + size / 1e9
    assert second == pytest.approx(1.0 + 2 * size / 1e9)


@pytest.mark.parametrize(("compute_s", "left"), [(0.0, 1.0), (1e9, 1 / 32), (0.5, None)])
def test_layers_leave_while_the_prompt_is_computed(compute_s, left):
    d = small()
    transfers = Transfers(KvLink(bandwidth_bytes_per_s=1e9, layerwise=True), d)
    wire_s, n = transfers.rank_bytes(8000) / 1e9, d.model.num_layers
    after = transfers.arrival_s(0, 1, 1e9, compute_s, 8000, 0) - 1e9
    # One layer after another through two stations: n layers computed in C, sent in T.
    computed = np.arange(1, n + 1) * compute_s / n
    done = 0.0
    for at in computed:
        done = max(done, at) + wire_s / n
    assert after == pytest.approx(done - compute_s, abs=1e-6)
    if left is not None:
        assert after == pytest.approx(left * wire_s, abs=1e-6)


def test_layerwise_is_never_later():
    traffic = load()
    whole, layers = (
        simulate_cluster(small(), traffic, prefill_replicas=1, decode_replicas=1, kv_link=replace(SLOW, layerwise=by))
        for by in (False, True)
    )
    assert layers.e2e_s.mean() < whole.e2e_s.mean()
    assert (layers.first_token_s <= whole.first_token_s).all() and (layers.first_token_s < whole.first_token_s).any()
    assert layers.moved_bytes.sum() == whole.moved_bytes.sum()


def test_the_first_token_is_seen_with_the_cache_or_before_it():
    traffic = load()
    there, here = (
        simulate_cluster(small(), traffic, prefill_replicas=1, decode_replicas=1, kv_link=SLOW, first_token_from=by)
        for by in ("decode", "prefill")
    )
    sent = traffic.output_tokens > 1
    assert there.first_token_s[sent] == pytest.approx((here.first_token_s + here.moved_s)[sent])
    assert np.array_equal(there.first_token_s[~sent], here.first_token_s[~sent])
    assert np.array_equal(there.finish_s, here.finish_s)
    assert np.allclose(there.placed_s, here.placed_s)
    for run in (there, here):
        between = (run.finish_s - run.first_token_s).sum() / (traffic.output_tokens - 1).sum()
        assert run.steps.gaps.mean_s == pytest.approx(between)


def test_what_the_decode_replica_has_cached_is_not_sent():
    traffic = mixed(40, 5.0, 1)
    traffic = replace(traffic, input_tokens=traffic.input_tokens + 1024, prefix_group=np.zeros(40, dtype=np.int64),
                      prefix_tokens=np.full(40, 1024), output_tokens=traffic.output_tokens + 1)  # fmt: skip
    d = small(enable_prefix_caching=True)
    run = simulate_cluster(d, traffic, prefill_replicas=1, decode_replicas=1, kv_link=SLOW)
    kept = kv_bytes_per_sequence(d.model, d.kv_format, 1024.0)
    whole = np.array([kv_bytes_per_sequence(d.model, d.kv_format, float(t)) for t in traffic.input_tokens])
    assert run.moved_bytes[0] == whole[0]
    assert (run.moved_bytes[10:] == whole[10:] - kept).all()
    cold = simulate_cluster(small(enable_prefix_caching=False), traffic, prefill_replicas=1, decode_replicas=1,
                            kv_link=SLOW)  # fmt: skip
    assert np.array_equal(cold.moved_bytes, whole)


def test_more_decode_replicas_never_hurt_and_pools_lose_nothing_in_failures():
    traffic = load(count=80, rate=40.0)
    one, two = (simulate_cluster(small(max_num_seqs=8), traffic, prefill_replicas=1, decode_replicas=y, kv_link=SLOW)
                for y in (1, 2))  # fmt: skip
    assert two.e2e_s.mean() < one.e2e_s.mean()
    quiet = simulate_cluster(small(), traffic, prefill_replicas=2, decode_replicas=2, kv_link=SLOW)
    computed_s = quiet.first_token_s - np.nan_to_num(quiet.moved_s)
    last = {0: computed_s[quiet.prefill_replica == 0][20], 3: quiet.finish_s[quiet.replica == 3][20]}
    for number, at_s in last.items():  # a prefill and a decode replica, a moment before it is done
        run = simulate_cluster(small(), traffic, prefill_replicas=2, decode_replicas=2, kv_link=SLOW,
                               failures=[Failure(replica=number, at_s=at_s - 1e-3)])  # fmt: skip
        assert np.array_equal(run.output_tokens, traffic.output_tokens)
        assert run.retries.any() and not np.isnan(run.finish_s).any()


def test_a_decode_pool_short_of_memory_waits_and_preempts():
    traffic = poisson(rate_per_s=200, input_tokens=2000, output_tokens=200, num_requests=60, seed=0)
    tight = small(gpu_memory_utilization=0.27, max_model_len=8192, enable_prefix_caching=False)
    run = simulate_cluster(tight, traffic, prefill_replicas=3, decode_replicas=1, kv_link=ENDLESS)
    assert np.array_equal(run.output_tokens, traffic.output_tokens)
    assert np.nanmax(run.moved_s) > 0.5  # they wait for room there
    assert run.steps.max_kv_usage() <= 1.0


def test_bad_input_is_one_line():
    lone = replace(small(), device=replace(small().device, inter_node=None))
    with pytest.raises(SpecError, match="kv link: h100"):
        simulate_cluster(lone, load(), prefill_replicas=1, decode_replicas=1)
    with pytest.raises(SpecError, match="bandwidth"):
        KvLink(bandwidth_bytes_per_s=0.0)
