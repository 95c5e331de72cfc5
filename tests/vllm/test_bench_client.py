"""`bstar bench` against real vLLM: what the client says is what the server counted."""

from __future__ import annotations

import re

import numpy as np
import pytest
from servers import Server

pytest.importorskip("httptools")

from bstar.measure import BodyOptions, RunOptions, bench, parse_endpoint, prepare
from bstar.measure.job import TextSource
from bstar.traffic import closed_loop, poisson, prefix_groups, sessions

pytestmark = pytest.mark.vllm


def counter(server: Server, name: str) -> float:
    """Sum of a counter over its labels, from /metrics."""
    return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", server.get("/metrics"), re.M))


def exact(server: Server, api: str = "completions") -> TextSource:
    return TextSource(as_ids=api == "completions", tokenizer_file=str(server.model / "tokenizer.json"))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_tokens_requests_and_latencies_agree_with_the_servers_own_counters(server, api):
    pytest.importorskip("tokenizers")
    ready = prepare(parse_endpoint(server.url, api=api), text=exact(server, api))
    assert (ready.facts.engine, ready.facts.model, ready.facts.dropped) == ("vllm", "tiny", ())
    assert ready.facts.max_model_len == 2048
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
             "vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")  # fmt: skip
    before = {n: counter(server, n) for n in names}
    run = bench(ready, closed_loop(4, "uniform:20-60", "uniform:4-12", 16, seed=1), RunOptions(workers=1))
    seen = {n: counter(server, n) - before[n] for n in names}
    table, summary = run.table, run.summary
    assert summary.num_finished == 16, run.to_dict()["errors"]
    assert (table.output_tokens == table.asked_output_tokens).all()
    assert set(table.token_source.tolist()) == {"usage"}
    assert set(table.finish_reason.tolist()) == {"length"}
    assert not table.mismatch.any()
    assert seen["vllm:prompt_tokens_total"] == summary.input_tokens
    assert seen["vllm:generation_tokens_total"] == summary.output_tokens
    assert seen["vllm:request_success_total"] == 16
    if api == "completions":
        assert (table.input_tokens == table.asked_input_tokens).all()
    # The server's clock starts when it has read the request and stops when the token is made: the client sees more.
    assert summary.ttft_s.mean * 16 > seen["vllm:time_to_first_token_seconds_sum"] * 0.9
    assert summary.e2e_s.mean * 16 > seen["vllm:e2e_request_latency_seconds_sum"] * 0.9
    assert np.allclose(table.records().e2e_s, table.records().ttft_s + np.nan_to_num(table.records().tpot_s)
                       * (table.output_tokens - 1))  # fmt: skip


def test_token_ids_and_running_counts_agree_with_what_is_settled_without_them(server):
    """Tokens per chunk by the server's own word, and the rule that does without it: the same totals."""
    for body in (BodyOptions(return_token_ids=True), BodyOptions(continuous_usage=True)):
        ready = prepare(parse_endpoint(server.url), body=body)
        assert ready.facts.dropped == ()
        run = bench(ready, closed_loop(2, 20, 12, 4), RunOptions(workers=0))
        assert not run.table.spread.any()
        assert not run.table.mismatch.any()
        assert run.gaps.count == 4 * 11


def test_a_prompt_of_token_ids_is_shared_and_repeated_as_the_load_says(server):
    """Shared prefixes are found in the server's cache, other prompts are not; a salt that is used again is noticed."""
    ready = prepare(parse_endpoint(server.url))
    load = poisson(20, 513, 2, 12, prefix=prefix_groups(256, 1))  # blocks of 128 tokens
    hits, asked = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"

    def found(salt):
        before = counter(server, hits), counter(server, asked)
        run = bench(ready, load, RunOptions(workers=0, content_salt=salt))
        assert run.summary.num_finished == 12
        return (counter(server, hits) - before[0]) / (counter(server, asked) - before[1])

    fresh = found(None)
    assert 0.1 < fresh < 11 * 256 / (12 * 513) + 0.01  # requests of one step find nothing yet
    found("again")
    assert found("again") > 0.9


def test_conversations_find_their_past_in_the_cache(server):
    ready = prepare(parse_endpoint(server.url), body=BodyOptions(return_token_ids=True))
    load = sessions(rate_per_s=5, turns=3, input_tokens=64, output_tokens=16, num_sessions=3, think_s=0.05)
    hits = counter(server, "vllm:prefix_cache_hits_total")
    run = bench(ready, load, RunOptions(workers=0))
    assert run.summary.num_finished == 9
    assert (run.table.input_tokens == load.input_tokens).all()
    found = counter(server, "vllm:prefix_cache_hits_total") - hits
    known = (load.input_tokens[load.parent] + load.output_tokens[load.parent])[load.parent >= 0]
    # Whole blocks of 128 (this backend's), and the last answer token is never computed.
    assert found >= ((known - 1) // 128 * 128).sum()
    assert found > 0


def test_a_server_that_is_asked_for_too_much_says_so_once(server):
    from bstar.errors import SpecError

    ready = prepare(parse_endpoint(server.url))
    with pytest.raises(SpecError, match="max_model_len"):
        bench(ready, closed_loop(1, 2040, 20, 2), RunOptions(workers=0))
