"""What servers show at /metrics, read into one set of names."""

from __future__ import annotations

import http.server
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_server import FakeServer, good
from hypothesis import given
from hypothesis import strategies as st

from bstar.errors import ConfigError
from bstar.measure import RunOptions, bench, prepare
from bstar.measure.clock import now
from bstar.measure.endpoint import parse_endpoint
from bstar.measure.observers import hit_fraction
from bstar.measure.server.histogram import Histogram
from bstar.measure.server.scraper import MetricsSource, ServerCounters, ServerObserver, metrics_of
from bstar.measure.server.snapshot import Snapshot, Window, read_snapshot, restarts, window
from bstar.traffic import closed_loop
from bstar.tuning.recorded import evidence_in

pytest.importorskip("prometheus_client")


def vllm_text(
    *, running: int = 3, preempted: int = 0, generated: int = 1000, steps: int = 100, engines: int = 1
) -> str:
    lines = ["# TYPE vllm:num_requests_running gauge"]
    lines += [f'vllm:num_requests_running{{engine="{e}",model_name="m"}} {running}.0' for e in range(engines)]
    lines += ["# TYPE vllm:num_requests_waiting gauge", 'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0']
    lines += ["# TYPE vllm:num_requests_waiting_by_reason gauge",
              'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0',
              'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1.0']
    lines += ["# TYPE vllm:kv_cache_usage_perc gauge"]
    lines += [f'vllm:kv_cache_usage_perc{{engine="{e}"}} 0.5' for e in range(engines)]
    lines += ["# TYPE vllm:num_preemptions_total counter", f'vllm:num_preemptions_total{{engine="0"}} {preempted}',
              "# TYPE vllm:generation_tokens_total counter", f'vllm:generation_tokens_total{{engine="0"}} {generated}',
              "# TYPE vllm:prefix_cache_queries_total counter", 'vllm:prefix_cache_queries_total{engine="0"} 400.0',
              "# TYPE vllm:prefix_cache_hits_total counter", 'vllm:prefix_cache_hits_total{engine="0"} 100.0']
    lines += ["# TYPE vllm:iteration_tokens_total histogram"]
    lines += [f'vllm:iteration_tokens_total_bucket{{le="{le}"}} {c}' for le, c in (("8", steps), ("+Inf", steps))]
    lines += [f"vllm:iteration_tokens_total_sum {generated}", f"vllm:iteration_tokens_total_count {steps}"]
    lines += ["# TYPE vllm:cache_config_info gauge",
              'vllm:cache_config_info{block_size="16",num_gpu_blocks="4000",cache_dtype="auto",'
              'num_gpu_blocks_override="None"} 1.0']
    return "\n".join(lines) + "\n"


def test_vllm_names() -> None:
    seen = read_snapshot(vllm_text(), 1.0)
    assert seen.engine == "vllm"
    assert (seen.gauge("running"), seen.gauge("waiting"), seen.gauge("waiting_capacity")) == (3.0, 2.0, 1.0)
    assert seen.gauge("kv_usage_fraction") == 0.5
    assert seen.counter("generated_tokens") == 1000.0
    assert seen.info == {"block_size": "16", "num_gpu_blocks": "4000", "cache_dtype": "auto"}
    assert math.isnan(seen.gauge("kv_used_tokens"))


def test_data_parallel_engines_are_added_up_and_shares_averaged() -> None:
    seen = read_snapshot(vllm_text(engines=2), 0.0)
    assert (seen.engines, seen.gauge("running"), seen.gauge("kv_usage_fraction")) == (2, 6.0, 0.5)


@pytest.mark.parametrize(("text", "engine", "expected"), [
    ("sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\nsglang:token_usage 0.25\nsglang:num_used_tokens 10\n"
     "# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total 7\n",
     "sglang", {"running": 4.0, "waiting": 1.0, "kv_usage_fraction": 0.25, "kv_used_tokens": 10.0}),
    ('nv_trt_llm_request_metrics{request_type="scheduled"} 4\nnv_trt_llm_request_metrics{request_type="waiting"} 9\n'
     'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"} 3\n'
     'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64\n',
     "trtllm", {"running": 4.0, "waiting": 9.0, "kv_used_tokens": 192.0}),
    ("tgi_batch_current_size 4\ntgi_queue_size 1\n", "tgi", {"running": 4.0, "waiting": 1.0}),
    ("llamacpp:requests_processing 2\nllamacpp:requests_deferred 3\n# TYPE llamacpp:n_decode_total counter\n"
     "llamacpp:n_decode_total 12\n", "llamacpp", {"running": 2.0, "waiting": 3.0}),
    ("trtllm_kv_cache_utilization 0.62\n", "trtllm", {"kv_usage_fraction": 0.62}),
    ('[{"iter": 5, "iterLatencyMS": 8.0, "numActiveRequests": 3, "numQueuedRequests": 1, "kvCacheStats": '
     '{"usedNumBlocks": 5, "maxNumBlocks": 20, "tokensPerBlock": 32}}]',
     "trtllm", {"running": 3.0, "waiting": 1.0, "kv_usage_fraction": 0.25, "kv_used_tokens": 160.0, "step_s": 0.008}),
])  # fmt: skip
def test_other_engines(text: str, engine: str, expected: dict[str, float]) -> None:
    seen = read_snapshot(text, 0.0)
    assert seen.engine == engine
    assert {name: seen.gauge(name) for name in expected} == expected


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>", "{}", "[1]", "[{]"])
def test_what_is_no_engine_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics: ") as error:
        read_snapshot(text, 0.0)
    assert "\n" not in str(error.value)


def test_window_counts_what_happened() -> None:
    after = read_snapshot(vllm_text(preempted=5, generated=3000, steps=300), 3.0)
    seen = window([read_snapshot(vllm_text(), 1.0), after])
    assert (seen.count("preemptions"), seen.rate("generated_tokens"), seen.steps) == (5.0, 1000.0, 200.0)
    assert seen.histograms["step_tokens"].mean == 10.0
    assert not seen.restarted


def test_a_restart_between_two_readings_is_seen() -> None:
    seen = window([read_snapshot(vllm_text(generated=5000), 0.0), read_snapshot(vllm_text(generated=50), 1.0)])
    assert seen.restarted
    assert (seen.duration_s, seen.count("generated_tokens")) == (0.0, 0.0)  # nobody knows what was made in that time
    assert math.isnan(seen.rate("generated_tokens"))


@pytest.mark.parametrize("ends_at", [1, 5, 40])  # below and above what was counted before
def test_a_window_counts_around_restarts(ends_at: int) -> None:
    """200 tokens and 20 steps a second; nothing answers for 3 s, then all counters begin at 0."""
    before = [read_snapshot(vllm_text(generated=1000 + 200 * t, steps=20 * t), t) for t in range(4)]
    after = [read_snapshot(vllm_text(generated=200 * t, steps=20 * t), 6 + t) for t in range(ends_at + 1)]
    seen = window([*before, *after])
    assert seen.restarted
    assert seen.duration_s == 3 + ends_at
    assert seen.rate("generated_tokens") == pytest.approx(200.0)
    assert seen.histograms["step_tokens"].count == 20 * (3 + ends_at)
    twice = window([*before, *after, *(replace(s, time_s=s.time_s + 100) for s in after)])
    assert (twice.duration_s, twice.rate("generated_tokens")) == (3 + 2 * ends_at, pytest.approx(200.0))


def test_a_restart_is_seen_where_counters_are_gone_or_only_histograms_fall() -> None:
    """Some engines show a counter from its first use on; others have hardly any."""
    first = read_snapshot(vllm_text(), 0.0)
    for after in (replace(first, counters={}), replace(first, histograms={}),
                  read_snapshot(vllm_text(steps=20), 1.0)):
        assert restarts([first, after]) == [1]
    assert restarts([first, first, read_snapshot(vllm_text(generated=9000, steps=900), 1.0)]) == []
    assert restarts([replace(first, counters={}, histograms={}), first]) == []


@pytest.mark.parametrize(("text", "names"), [
    (vllm_text(), ("m",)),
    (vllm_text().replace("model_name", "other"), ()),
    ('sglang:num_running_reqs{model_name="tiny"} 4\n', ("tiny",)),
    ('trtllm_kv_cache_utilization{model_name="/models/tiny"} 0.62\n', ("/models/tiny",)),
    ('nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting"} 9\n', ()),
    ('vllm:num_requests_running{model_name="a"} 1\nvllm:num_requests_running{model_name="b"} 1\n'
     'up{model_name="c"} 1\n', ("a", "b")),
])  # fmt: skip
def test_the_served_model_is_read_where_it_is_a_label(text: str, names: tuple[str, ...]) -> None:
    seen = read_snapshot(text, 0.0)
    assert seen.served == names
    assert window([seen, seen]).served == names


@given(st.lists(st.floats(0.001, 99.0), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_quantiles_lie_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    bounds = [0.01, 0.1, 1.0, 10.0, 100.0, math.inf]
    found = Histogram.of_cumulative({b: float(sum(v <= b for v in values)) for b in bounds}, sum(values))
    low, high = found.resolution(q)
    true = float(np.quantile(values, q, method="inverted_cdf"))
    assert low <= found.quantile(q) <= high
    assert low * (1 - 1e-12) <= true <= high
    assert found.mean == pytest.approx(np.mean(values))


@given(st.lists(st.floats(0.001, 99.0), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_percentiles_are_given_where_buckets_tell_them(values: list[float], q: float) -> None:
    """Within their own size of the true one, and never beyond what the mean allows."""
    bounds = [0.0, *(0.001 * 1.5**i for i in range(30)), math.inf]
    found = Histogram.of_cumulative({b: float(sum(v <= b for v in values)) for b in bounds}, sum(values))
    value = found.known_quantile(q)
    if not math.isnan(value):
        true = float(np.quantile(values, q, method="inverted_cdf"))
        assert abs(true - value) <= value * (1 + 1e-9)
        assert value <= found.mean / (1.0 - q)


def test_one_bucket_tells_but_the_mean() -> None:
    """Eight observations of 17 µs, all in the bucket to 0.3 s: no median of 150 ms."""
    one = Histogram(bounds=(0.3, 0.5, math.inf), counts=(8.0, 0.0, 0.0), total=8 * 17e-6)
    assert one.to_dict() == {"count": 8.0, "mean": pytest.approx(17e-6), "p50": None, "p90": None, "p95": None,
                             "p99": None}  # fmt: skip
    two = replace(one, counts=(8.0, 92.0, 0.0), total=92 * 0.4)
    assert two.to_dict()["p50"] == pytest.approx(0.391, abs=1e-3)
    assert two.to_dict()["buckets"]["p50"] == [0.3, 0.5]
    wide = replace(one, counts=(90.0, 0.0, 10.0), total=100.0)
    assert (wide.to_dict()["p50"], wide.to_dict()["buckets"]["p50"]) == (None, [0.0, 0.3])
    assert (wide.to_dict()["p99"], wide.to_dict()["buckets"]["p99"]) == (None, [0.5, None])


def test_a_window_holds_requests_by_littles_law() -> None:
    """Five requests of 4 s in 10 s: two at a time."""
    e2e = Histogram(bounds=(math.inf,), counts=(5.0,), total=20.0)
    seen = Window(duration_s=10.0, engine="vllm", restarted=False, counters={}, histograms={"e2e_s": e2e})
    assert seen.held("e2e_s") == 2.0
    assert math.isnan(seen.held("queue_s"))


def test_histograms_add_and_subtract() -> None:
    one = Histogram(bounds=(1.0, math.inf), counts=(3.0, 1.0), total=4.0)
    two = Histogram(bounds=(0.5, 1.0, math.inf), counts=(1.0, 1.0, 0.0), total=1.0)
    assert one.plus(one).minus(one) == one
    assert one.plus(two) == Histogram(bounds=(1.0, math.inf), counts=(5.0, 1.0), total=5.0)
    assert one.plus(one).count == 8.0


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server that shows the texts of a list, the last one for ever."""
    texts = [vllm_text()]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            body = (texts.pop(0) if len(texts) > 1 else texts[0]).encode()
            self.send_response(200 if body else 500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http_server.server_address[1]}/v1", texts
    http_server.shutdown()
    http_server.server_close()


def test_a_run_is_watched(server: tuple[str, list[str]]) -> None:
    url, texts = server
    texts[:] = [vllm_text(), vllm_text(preempted=1, generated=1500, steps=150),
                vllm_text(preempted=3, generated=2000, steps=200)]
    observer = ServerObserver(MetricsSource(url=url), interval_s=0.02)
    observer.start(now())
    while len(observer.snapshots) < 4:
        pass
    seen = observer.stop()
    assert seen.summary["counters"]["preemptions"] == 3.0
    assert seen.summary["gauges"]["running"] == {"mean": 3.0, "max": 3.0}
    assert seen.summary["waiting_share"] == 1.0
    table = seen.tables["server"]
    assert len({len(c) for c in table.values()}) == 1
    assert np.isnan(table["preemptions_per_s"][0])


def test_scrapes_before_and_after_the_load_are_not_of_it(server: tuple[str, list[str]]) -> None:
    """Four run while the load is on, none at the scrapes around it."""
    url, texts = server
    texts[:] = [vllm_text(running=0), vllm_text(running=4, generated=1100), vllm_text(running=4, generated=1200)]
    observer = ServerObserver(MetricsSource(url=url), interval_s=0.02)
    observer.start(now() + 0.01)
    while len(observer.snapshots) < 4:
        pass
    texts[:] = [vllm_text(running=0, generated=1300)] * 2
    seen = observer.stop().summary
    assert seen["scrapes"] - seen["scrapes_inside"] >= 2
    assert seen["gauges"]["running"]["mean"] > 3.0
    assert seen["counters"]["generated_tokens"] == 300.0
    assert seen["load_s"] < seen["duration_s"]
    short = ServerObserver(MetricsSource(url=url), interval_s=10.0)
    short.start(now() + 0.01)
    seen = short.stop().summary
    assert seen["scrapes_inside"] == 0
    assert seen["gauges"]["running"] == {"mean": None, "max": None}
    assert seen["waiting_share"] is None


def test_https_of_an_http_server_is_told(server: tuple[str, list[str]]) -> None:
    url = server[0].replace("http://", "https://")
    with pytest.raises(ConfigError, match=r"does not speak TLS .*; use http://") as error:
        MetricsSource(url=url).read()
    assert "\n" not in str(error.value)


def test_a_server_that_fails_costs_no_run(server: tuple[str, list[str]]) -> None:
    url, texts = server
    observer = ServerObserver(MetricsSource(url=url), interval_s=10.0)
    observer.start(now())
    texts[:] = [""]
    seen = observer.stop()
    assert (seen.summary["scrapes"], seen.summary["failures"]) == (1, 1)
    gone = ServerObserver(MetricsSource(url="http://127.0.0.1:9"), interval_s=10.0)
    gone.start(now())
    assert gone.stop().summary["scrapes"] == 0


def test_prefix_hits_are_read(server: tuple[str, list[str]]) -> None:
    url, _ = server
    reader = ServerCounters(MetricsSource(url=url))
    before, after = reader.read(), reader.read()
    assert before is not None
    assert before.prefix_hit_tokens == 100.0
    assert hit_fraction(before, after) is None  # nothing was looked up in between
    assert ServerCounters(MetricsSource(url="http://127.0.0.1:9")).read() is None


def test_a_server_without_metrics_is_one_line(server: tuple[str, list[str]]) -> None:
    url, texts = server
    texts[:] = ["<html>"]
    with pytest.raises(ConfigError, match=r"metrics: /metrics and .*; give the URL") as error:
        MetricsSource(url=url).read()
    assert "\n" not in str(error.value)


def test_no_metrics_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"metrics: nothing answers at .*is the server up") as error:
        MetricsSource(url="http://127.0.0.1:9").read()
    assert "\n" not in str(error.value)


def test_metrics_are_asked_for_as_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its key and headers, at its own address or another."""
    asked: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = {k: v for k, v in self.headers.items() if k in ("Authorization", "X-A")}
            asked.append({"path": self.path, **told})
            body = vllm_text().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("MY_KEY", "sk-1")
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    try:
        place = f"127.0.0.1:{http_server.server_address[1]}"
        endpoint = parse_endpoint(place, headers=("X-A: b",), key_variable="MY_KEY")
        for url in (None, f"{place}/other/metrics", f"http://{place}"):
            assert metrics_of(endpoint, url).read().engine == "vllm"
        assert metrics_of(parse_endpoint(f"{place}/metrics")).read().engine == "vllm"
    finally:
        http_server.shutdown()
        http_server.server_close()
    told = {"Authorization": "Bearer sk-1", "X-A": "b"}
    assert asked == [{"path": p, **told} for p in ("/metrics", "/other/metrics", "/metrics")] + [{"path": "/metrics"}]


def test_a_restart_in_a_run_is_said_and_not_counted(tmp_path: Path) -> None:
    """The first process makes 100 tokens and is gone for two scrapes; the next one ends above it."""
    counts = [0, 100, None, None, 40]

    class Source(MetricsSource):
        def read(self) -> Snapshot:
            made = counts.pop(0) if counts else 400
            if made is None:
                raise ConfigError("metrics: nothing answers")
            return read_snapshot(vllm_text(generated=made, steps=made), now())

    observer = ServerObserver(Source(url="unused"), interval_s=0.05)
    with FakeServer(partial(good, gap_s=0.05)) as server:
        ready = prepare(parse_endpoint(server.url, model="fake"), check=False)
        options = RunOptions(workers=0, observers=(observer,))
        found = bench(ready, closed_loop(1, 2, 12, 1), options, out=tmp_path / "run")
    shown = found.to_dict()["server"]
    assert shown["restarted"]
    assert shown["failures"] == 2
    assert shown["counters"]["generated_tokens"] == 100 + 400 - 40
    assert shown["counted_s"] < shown["duration_s"] - 0.1
    (note,) = (n for n in found.verdict.notes if "restarted" in n)
    assert note.startswith("the server was restarted between 0.") and note.endswith("do not cover that time")
    seen = evidence_in(tmp_path / "run")
    assert seen.seen.restarted
    assert seen.duration_s < shown["load_s"] - 0.1
