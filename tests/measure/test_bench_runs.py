"""Runs against a good server: loads are sent as they are, figures are what happened, folders hold all of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
from fake_server import FakeServer, choice, good, usage

import bstar
from bstar.calibration.sources import of_run
from bstar.errors import SpecError
from bstar.interfaces.cli.bench_sweep import point_of as sweep_point
from bstar.measure import (
    BodyOptions,
    Counters,
    Observation,
    RunOptions,
    Window,
    bench,
    parse_endpoint,
    prepare,
    read_run,
)
from bstar.measure.contents import Contents, Given, Vocabulary, expected_cached_fraction
from bstar.measure.datasets import read_dataset
from bstar.measure.health import judge
from bstar.measure.job import Job, owners, split
from bstar.measure.repeats import parse_precision, repeat
from bstar.measure.sharing import expected_fraction, num_distinct
from bstar.specs.slo import parse_slo
from bstar.traffic import closed_loop, constant, poisson, prefix_groups, sessions
from bstar.tuning.points import point_of


def run(traffic, behave=good, *, api="completions", check=False, out=None, body=None, **options):
    with FakeServer(behave) as server:
        ready = prepare(parse_endpoint(server.url, model="fake", api=api), check=check, body=body)
        found = bench(ready, traffic, RunOptions(**({"workers": 0} | options)), out=out)
    return found, server


async def timed(answer, body):
    await good(answer, body, first_s=0.03, gap_s=0.02)


@pytest.mark.parametrize("workers", [0, 2])
def test_open_loop_requests_go_out_when_the_load_says(workers, tmp_path):
    """No request early, none held back by a slow answer, and the same on two processes with one clock."""
    load = poisson(60, 10, 4, 60, seed=3)
    found, _ = run(load, timed, workers=workers, out=tmp_path / "run")
    table = found.table
    assert table.index.tolist() == list(range(60))
    assert np.allclose(table.intended_s, load.arrival_s, atol=1e-6)
    assert (table.sent_s >= table.intended_s).all()
    assert (table.first_token_s - table.sent_s >= 0.03).all()
    assert found.summary.e2e_s.min >= 0.03 + 3 * 0.02
    assert found.summary.output_tokens == 240
    assert len({c["round_trips"] for c in found.clocks}) == 1
    assert all(abs(c["offset_s"]) < 0.01 for c in found.clocks)


def test_closed_loop_clients_send_one_at_a_time_in_the_order_of_the_load():
    load = closed_loop(3, 10, 3, 20, think_s=0.01)
    found, _ = run(load, timed)
    table = found.table
    for moment in table.sent_s:
        assert ((table.sent_s <= moment) & (table.end_s > moment)).sum() <= 3
    assert (np.argsort(table.sent_s, kind="stable") == table.index).all()
    nth = np.sort(table.end_s)[: len(table) - 3] + 0.01
    assert np.allclose(np.sort(table.intended_s[3:]), nth)


def test_turns_wait_for_their_parents_and_carry_the_conversation():
    load = sessions(rate_per_s=20, turns=3, input_tokens=10, output_tokens=4, num_sessions=4, think_s=0.02)
    found, server = run(load, api="chat", check=True)
    table = found.table
    child = np.flatnonzero(load.parent >= 0)
    assert (table.sent_s[child] >= table.end_s[load.parent[child]] + 0.019).all()
    last = [b for b in server.bodies if len(b["messages"]) == 5]
    assert len(last) == 4
    assert [m["role"] for m in last[0]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert last[0]["messages"][1]["content"] == " a a a a"
    before = next(b for b in server.bodies if b["messages"] == last[0]["messages"][:3])
    assert before["max_tokens"] == 4


def test_a_conversation_in_token_ids_begins_with_its_parents_prompt_and_answer():
    async def with_ids(answer, body):
        await answer.head()
        await answer.event(choice("a", token_ids=[7, 8]))
        await answer.event(choice("b", "length", token_ids=[9]))
        await answer.event(usage(len(body["prompt"]), 3))
        await answer.event("[DONE]")
        await answer.end()

    load = sessions(rate_per_s=50, turns=2, input_tokens=10, output_tokens=3, num_sessions=1, think_s=0.0)
    found, server = run(load, with_ids, body=BodyOptions(return_token_ids=True))
    first, second = (b["prompt"] for b in server.bodies)
    assert second[:13] == [*first, 7, 8, 9]
    assert len(second) == 23
    assert found.table.output_tokens.tolist() == [3, 3]


def test_a_cap_on_requests_in_flight_shows_coordinated_omission():
    """Two in flight of a load that needs six: users wait in the client, and only the intended moment tells."""
    async def slow(answer, body):
        await good(answer, body, first_s=0.1)

    found, _ = run(constant(60, 10, 2, 60), slow, max_in_flight=2)
    table = found.table
    assert (table.allowed_s - table.intended_s).max() > 0.5
    assert found.from_intended.ttft_s.p99 > found.summary.ttft_s.p99 + 0.5
    assert any("coordinated omission" in note for note in found.verdict.notes)
    assert (table.sent_s - table.allowed_s).max() < (table.sent_s - table.intended_s).max()


def test_the_window_leaves_out_the_start_and_the_end():
    found, _ = run(constant(50, 10, 2, 50), window=Window(warmup_s=0.2, cooldown_s=0.3))
    kept = found.measured
    assert kept.intended_s.min() >= 0.2
    assert kept.intended_s.max() <= 1.0 - 0.3 + 1e-6
    assert found.to_dict()["num_outside_window"] == 50 - len(kept)
    nothing, _ = run(constant(50, 10, 2, 5), window=Window(warmup_s=9.0))
    assert (nothing.verdict.valid, nothing.exit_code) == (False, 1)
    warm, _ = run(closed_loop(2, 10, 2, 20, warmup_requests=5))
    assert warm.measured.index.tolist() == list(range(5, 20))


@pytest.mark.parametrize("start_s", [0.0, 0.2], ids=["at once", "one by one"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 8, 20])
def test_rates_obey_littles_law_with_any_warm_up(warmup, start_s):
    """Eight clients and answers of 0.2 s: 40 requests/s while the load is on, whatever of it is measured.

    Clients that start one by one also end one by one: without a warm-up the whole run counts, its ends included.
    """
    async def constant_time(answer, body):
        await good(answer, body, first_s=0.02, gap_s=0.02)

    load = closed_loop(8, 10, 10, 48, warmup_requests=warmup, start="even" if start_s else "burst", start_s=start_s)
    found, _ = run(load, constant_time, slo=parse_slo("e2e=5s"))
    summary, table = found.summary, found.table
    start, end = found.rates.start_s, found.rates.end_s
    inside = np.clip(np.minimum(table.last_token_s, end) - np.maximum(table.sent_s, start), 0.0, None)
    in_flight = inside.sum() / (end - start)
    assert summary.requests_per_s * summary.e2e_s.mean == pytest.approx(in_flight, rel=0.06)
    if warmup or not start_s:
        assert in_flight == pytest.approx(8, rel=0.06)
    else:
        assert summary.output_tokens_per_s == pytest.approx(480 / table.last_token_s.max(), rel=0.01)
    assert summary.output_tokens_per_s == pytest.approx(10 * summary.requests_per_s)
    assert summary.goodput_requests_per_s == pytest.approx(summary.requests_per_s)
    tuned = point_of(8, found)
    assert tuned.throughput_per_s == pytest.approx(10 * tuned.goodput_per_s)
    swept = sweep_point(8, found, None).detail
    assert swept["output_tokens_per_s"] == pytest.approx(10 * swept["requests_per_s"])
    if warmup:
        assert tuned.throughput_per_s == swept["output_tokens_per_s"] == summary.output_tokens_per_s


def test_a_calibration_compares_rates_that_are_defined_alike(tmp_path):
    """The simulator's rate is of the measured requests alone: so is the one that it is compared with."""
    found, _ = run(closed_loop(4, 10, 5, 24, warmup_requests=6, start="even", start_s=0.1), timed, out=tmp_path / "r")
    seen = of_run(tmp_path / "r").measured["output_tokens_per_s"]
    assert seen == pytest.approx(found.records.output_tokens.sum() / found.records.duration_s)
    assert seen < 0.95 * found.summary.output_tokens_per_s


def test_a_cold_start_is_no_part_of_the_goodput_and_little_load_is_measured_whole():
    """The first answers of a server are slow: they are warm-up, and miss no SLO."""
    count = [0]

    async def cold(answer, body):
        count[0] += 1
        await good(answer, body, first_s=0.3 if count[0] <= 4 else 0.05)

    found, _ = run(closed_loop(4, 10, 5, 40, warmup_requests=4), cold, slo=parse_slo("e2e=0.2s"))
    assert found.summary.slo_attainment_fraction == 1.0
    assert found.summary.goodput_requests_per_s == found.summary.requests_per_s
    short, _ = run(poisson(400, 10, 5, 20, seed=1, warmup_requests=5), timed)
    assert short.to_dict()["steady"]["output_tokens_per_s"] is None
    assert short.rates.end_s == short.records.finish_s.max()
    assert short.summary.output_tokens_per_s == pytest.approx(5 * short.summary.requests_per_s)
    assert short.summary.requests_per_s > 15 / short.summary.duration_s


def test_the_load_stops_after_a_while():
    found, _ = run(closed_loop(2, 10, 2, 10_000), timed, stop_after_s=0.5)
    assert found.table.intended_s.max() <= 0.5
    assert found.to_dict()["num_not_sent"] == 10_000 - len(found.table)
    assert found.table.succeeded.all()


def test_the_folder_holds_everything_and_its_summary_fits_the_schema(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    slo = parse_slo("ttft=1s,tpot=1s")
    load = poisson(100, 10, 4, 30, prefix=prefix_groups(4, 2))
    found, _ = run(load, out=tmp_path / "run", slo=slo)
    kept = read_run(tmp_path / "run")
    assert kept.traffic.fingerprint() == load.fingerprint() == kept.summary["load"]["fingerprint"]
    for name in ("index", "sent_s", "first_token_s", "last_token_s", "output_tokens", "chunk_s", "chunk_tokens",
                 "error", "token_source"):
        assert np.array_equal(getattr(kept.table, name), getattr(found.table, name)), name
    assert kept.measured.all()
    assert kept.table.take(kept.measured).gaps().count == found.gaps.count == 90
    assert kept.summary["itl_s"]["mean"] == pytest.approx(found.summary.itl_s.mean)
    assert kept.environment["server"]["model"] == "fake"
    schema = json.loads((resources.files("bstar.measure") / "data" / "summary.schema.json").read_text())
    jsonschema.validate(kept.summary, schema)
    assert set(schema["required"]) == set(kept.summary)
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == [
        "config.json", "environment.json", "requests.parquet", "series.parquet", "summary.json", "traffic.parquet"]


def test_the_same_traffic_drives_simulator_and_client(tmp_path):
    load = poisson(100, 10, 4, 30)
    deployment = bstar.deployment(model="llama-3.1-8b", gpu="h100")
    simulated = bstar.simulate(deployment, load)
    found, _ = run(load)
    assert (simulated.input_tokens == found.table.asked_input_tokens).all()
    assert set(simulated.summary.to_dict()) <= set(found.to_dict())


def test_observers_and_counters_are_asked_around_the_load(tmp_path):
    class Watch:
        def start(self, origin_s):
            self.origin_s = origin_s

        def stop(self):
            return Observation(name="watched", summary={"seen": 3}, tables={"watched": {"time_s": [0.0, 1.0]}})

    class Reader:
        def __init__(self):
            self.asked = 0

        def read(self):
            self.asked += 1
            return Counters(prefix_hit_tokens=270.0 * (self.asked - 1), prefix_query_tokens=300.0 * (self.asked - 1))

    found, _ = run(poisson(100, 10, 2, 30), observers=(Watch(),), counters=Reader(), out=tmp_path / "run")
    assert found.to_dict()["watched"] == {"seen": 3}
    assert (tmp_path / "run" / "watched.parquet").is_file()
    assert found.prefix_hit_fraction == 0.9
    assert any("prefix cache was warm: 90%" in note for note in found.verdict.notes)


def test_prompts_are_new_in_every_run_unless_the_salt_is_given():
    load = poisson(200, 20, 2, 5, seed=1)
    prompts = []
    for salt in (None, None, "x", "x"):
        _, server = run(load, content_salt=salt)
        prompts.append(sorted(tuple(b["prompt"]) for b in server.bodies))
    assert prompts[0] != prompts[1]
    assert prompts[2] == prompts[3]


def test_prompts_share_exactly_what_the_load_shares():
    load = poisson(10, 40, 4, 30, prefix=prefix_groups(16, 3, fraction=0.7), seed=5)
    contents = Contents(load, Vocabulary(first=10, last=30_000), salt="s")
    ids = [contents.ids(r) for r in range(30)]
    assert all(i.size == 40 for i in ids)
    for a in range(30):
        for b in range(a):
            same = load.prefix_group[a] >= 0 and load.prefix_group[a] == load.prefix_group[b]
            assert np.array_equal(ids[a][:16], ids[b][:16]) == same
            assert not np.array_equal(ids[a][16:32], ids[b][16:32])
    groups = load.prefix_group[load.prefix_group >= 0]
    repeats = groups.size - np.unique(groups).size
    assert expected_cached_fraction(load) == pytest.approx(16 * repeats / (40 * 30))


def test_a_trace_with_block_hashes_repeats_its_blocks(tmp_path):
    rows = [{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
            {"timestamp": 10, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in rows))
    load = bstar.traffic.from_trace(file)
    contents = Contents(load, Vocabulary(first=10, last=30_000), salt="s")
    a, b = contents.ids(0), contents.ids(1)
    assert (a.size, b.size) == (1000, 700)
    assert np.array_equal(a[:512], b[:512])
    assert not np.array_equal(a[512:700], b[512:])


def test_work_is_shared_out_whole():
    load = sessions(rate_per_s=10, turns=3, input_tokens=10, output_tokens=4, num_sessions=10)
    owner = owners(load, 3)
    child = np.flatnonzero(load.parent >= 0)
    assert (owner[child] == owner[load.parent[child]]).all()
    job = Job(endpoint=parse_endpoint("http://x"), addresses=(("x", 1),), body=BodyOptions(), traffic=load,
              share=np.arange(load.num_requests), max_in_flight=7)
    parts = split(job, 3)
    assert sorted(np.concatenate([p.share for p in parts]).tolist()) == list(range(load.num_requests))
    assert sum(p.max_in_flight for p in parts) == 7
    assert len(split(Job(endpoint=job.endpoint, addresses=job.addresses, body=job.body,
                         traffic=closed_loop(2, 8, 2, 20), share=np.arange(20)), 8)) == 2


def test_a_load_that_the_server_cannot_take_is_refused():
    models = {"data": [{"id": "fake", "owned_by": "vllm", "max_model_len": 100}]}
    with FakeServer(good, models=models) as server:
        ready = prepare(parse_endpoint(server.url))
        with pytest.raises(SpecError, match="at most 100"):
            bench(ready, poisson(100, 90, 20, 3))


def test_a_late_client_is_no_server():
    quick, slow = np.full(1000, 0.001), np.full(1000, 0.3)
    fine = judge(quick, [quick], [np.full(9, 0.5)], latency_s=0.05, gap_s=0.02)
    assert not fine.client_limited
    assert not fine.strained
    late = judge(slow, [quick], [np.full(9, 0.5)], latency_s=0.05, gap_s=0.02)
    assert "sent" in late.limited[0]
    strained = judge(np.full(1000, 0.008), [quick], [np.full(9, 0.5)], latency_s=0.05, gap_s=0.02)
    assert strained.strained
    assert not strained.client_limited
    busy = judge(quick, [quick, quick], [np.full(9, 0.2), np.full(9, 0.99)], latency_s=0.05, gap_s=0.02)
    assert "--workers" in busy.limited[0]
    assert judge(quick, [], [], latency_s=0.05, gap_s=None, sent_fraction=0.5).client_limited
    assert judge(slow, [slow], [], latency_s=60.0, gap_s=0.5).limited == ()


@pytest.mark.parametrize(("held_s", "run_s"), [(0.36, 0.04), (0.1, 0.1)])
def test_a_client_that_stands_still_makes_its_own_latencies(held_s, run_s):
    """As under a CPU quota: every answer is read when the process may run again."""
    ticks = round(run_s / 0.01)
    lags = np.tile([held_s, *[0.0] * (ticks - 1)], 100)
    waits = np.maximum(held_s - np.random.default_rng(0).uniform(0.0, held_s + run_s, 100_000), 0.0)
    found = judge(np.zeros(9), [np.zeros(500), lags], [], latency_s=held_s + 0.01, gap_s=0.02)
    assert found.read_delay_s == pytest.approx(waits.mean(), rel=0.15)  # ticks are ten milliseconds wide
    assert found.read_delay_s == found.to_dict()["read_delay_s"]
    short = judge(np.zeros(9), [lags], [], latency_s=2.0 * found.read_delay_s, gap_s=0.02)
    assert any("until the client reads it" in reason for reason in short.limited)
    assert not judge(np.zeros(9), [lags], [], latency_s=60.0, gap_s=0.5).limited


def test_a_client_that_is_held_up_refuses_its_own_run(monkeypatch):
    """The event loop is blocked for 0.2 s again and again: what it measures is not the server."""
    import time

    from bstar.measure.driver import Driver

    whole = Driver._flush_later

    def blocks(self):
        time.sleep(0.2)
        whole(self)
        self._arm("flush", 0.1, self._flush_later)

    monkeypatch.setattr(Driver, "_flush_later", blocks)
    found, _ = run(poisson(100, 10, 2, 60))
    assert found.health.client_limited
    assert found.exit_code == 1


def test_repeated_until_the_figure_is_known():
    class Run:
        interrupted = stop_asked = holds_nothing = False

        def __init__(self, value):
            self.value = value

        def figure(self, name):
            return self.value

    values = [10.0, 11.0, 10.5, 10.4, 10.6, 10.5, 10.5]
    asked = parse_precision("tpot_s=5%", most_runs=7)
    result = repeat(lambda n: Run(values[n]), precision=asked)
    used = values[: len(result.runs)]
    assert result.reached
    assert result.interval.mean == pytest.approx(np.mean(used))
    assert result.interval.relative_half_width <= 0.05
    before = repeat(lambda n: Run(values[n]), runs=len(used) - 1)
    assert (before.reached, len(before.runs)) == (None, len(used) - 1)
    hopeless = repeat(lambda n: Run(10.0 + n % 2), precision=parse_precision("ttft_s.p99=0.01%", most_runs=4))
    assert (len(hopeless.runs), hopeless.reached) == (4, False)

    def pressed(number):
        if number == 2:
            raise KeyboardInterrupt
        return Run(values[number])

    cut = repeat(pressed, runs=5)
    assert (len(cut.runs), cut.interrupted) == (2, True)
    with pytest.raises(KeyboardInterrupt):
        repeat(lambda n: pressed(2), runs=5)
    for text in ("tpot_s", "tpot_s=x", "magic=2%", "tpot_s.p42=2%", "tpot_s=200%"):
        with pytest.raises(SpecError, match="--until"):
            parse_precision(text)


def test_repeated_runs_say_which_is_no_result():
    runs = [SimpleNamespace(interrupted=False, stop_asked=False, holds_nothing=False,
                            verdict=SimpleNamespace(reasons=reasons)) for reasons in ((), ("too late",), ())]
    assert repeat(lambda n: runs[n], runs=3).reasons == ("run 2: too late",)


def test_lengths_of_a_file_without_a_tokenizer_are_guesses_and_said_to_be(tmp_path):
    """Words of one letter: a token for four characters is half of what this server counts."""
    file = tmp_path / "share.json"
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "a " * 20 + "b"},
                                                   {"from": "gpt", "value": "c d e f g h"}]}] * 3))
    data = read_dataset(file)
    with FakeServer(good) as server:
        ready = prepare(parse_endpoint(server.url), given=data.prompts)
        found = bench(ready, data.load(closed_loop(1, 1, 1, 6)),
                      RunOptions(workers=0, settings={"dataset": data.to_dict()}))
    assert found.mean_tokens == (21.0, 3.0)
    assert any("prompts are 21 tokens on average where 10 were asked for" in note and "--tokenizer" in note
               for note in found.verdict.notes)
    assert any("3 answers of the file are text" in note and "--tokenizer" in note for note in found.verdict.notes)
    file.write_text('{"prompt_token_ids": [5, 6, 7], "output_tokens": 2}\n')
    exact = read_dataset(file)
    assert exact.to_dict()["guessed_answers"] == 0


def test_what_the_prompts_of_a_file_share_is_the_loads_own(tmp_path):
    """One prompt for 20 requests: 19 are found, and nobody has sent them before."""
    async def cached(answer, body):
        await answer.head()
        await answer.event(choice(" a", "length"))
        await answer.event(usage(40, 1, prompt_tokens_details={"cached_tokens": 0 if len(seen) == 0 else 32}))
        seen.append(body["prompt"])
        await answer.event("[DONE]")
        await answer.end()

    seen: list[str] = []
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": "a long question " * 10, "output_tokens": 1}))
    data = read_dataset(file)
    with FakeServer(cached) as server:
        ready = prepare(parse_endpoint(server.url, model="fake"), given=data.prompts, check=False)
        found = bench(ready, data.load(closed_loop(1, 1, 1, 20)), RunOptions(workers=0))
    assert found.prefix_hit_fraction == pytest.approx(0.76)
    assert found.expected_hit_fraction == 0.95
    assert not any("sent before" in note for note in found.verdict.notes)
    assert any("1 different prompt for 20 requests: they repeat" in note for note in found.verdict.notes)


def test_common_beginnings_of_a_file_are_counted_by_ids_or_characters():
    load = closed_loop(1, 10, 1, 4)
    every = np.arange(4)
    texts = [Given(text=t) for t in ("abcdefgh--", "xyz", "abcdefgh..", "abcdefgh--")]
    assert num_distinct(texts) == 3
    assert expected_fraction(load, every, texts) == pytest.approx((0.8 + 1.0) / 4)
    assert expected_fraction(load, every[:2], texts) == 0.0
    ids = [Given(ids=(1, 2, 3, 4)), Given(ids=(9,)), Given(ids=(1, 2, 7, 7)), Given(ids=(1, 2, 7, 8))]
    assert expected_fraction(load, every, ids) == pytest.approx((0.5 + 0.75) / 4)
    chats = [Given(messages=({"role": "system", "content": "s" * 96}, {"role": "user", "content": c})) for c in "abab"]
    assert expected_fraction(load, every, chats) == pytest.approx((2 + 110 / 112) / 4, rel=0.01)
    assert expected_fraction(load, every, [Given(text="a b c")]) == 0.75


def test_figures_against_vllms_client_differ_by_the_role_chunk_alone():
    """With chat vLLM's client takes the role-only chunk for the first token: one gap of ~0 more a request."""
    async def like_vllm(answer, body):
        await asyncio.sleep(0.02)
        await good(answer, body, gap_s=0.02)

    found, _ = run(constant(50, 10, 6, 10), like_vllm, api="chat")
    per_request = np.diff(found.table.chunk_offsets)
    assert per_request.tolist() == [6] * 10
    gaps = found.table.chunk_gaps_s()
    assert gaps.size == 50
    theirs = gaps.sum() / (gaps.size + 10)  # the same time over a gap more a request
    assert theirs * 6 / 5 == pytest.approx(gaps.mean())


def test_import_of_the_room_is_light():
    code = ("import sys, bstar.measure; from bstar.measure import parse_endpoint; "
            "assert not {'httptools', 'uvloop', 'pyarrow', 'scipy', 'numba'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_hiccup_of_a_short_run_is_no_limit():
    """One in a hundred, three at least: 40 requests of which one was held up are still the server's."""
    delays = np.full(40, 0.0005)
    delays[7] = 0.2
    assert not judge(delays, [], [], latency_s=0.03, gap_s=None).limited
    delays[[9, 11]] = 0.1
    assert judge(delays, [], [], latency_s=0.03, gap_s=None).limited == (
        "3 of 40 requests are sent 100.0 ms late or more, more than the median TTFT of 30.0 ms",)
