"""Servers that misbehave: the run ends, every request has its kind of end, latencies are of whole answers only."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_server import Answer, FakeServer, choice, delta, good, usage

from bstar.errors import ConfigError
from bstar.measure import (
    BodyOptions,
    Observation,
    RunOptions,
    ServerError,
    Timeouts,
    bench,
    parse_endpoint,
    prepare,
    read_run,
)
from bstar.measure.connection import Pool
from bstar.measure.folder import RunFolder, recover, runs_in
from bstar.specs.slo import Slo
from bstar.traffic import closed_loop, constant, poisson

HERE = Path(__file__).parent
QUICK = Timeouts(connect_s=20.0, stall_s=1.5, request_s=3.0)


def measured(behave, traffic=None, *, check=False, timeouts=QUICK, api="completions", out=None, context=None,
             verify=True, **options):
    """A run against a fake server, in this process."""
    with FakeServer(behave, context=context) as server:
        endpoint = parse_endpoint(server.url, model="fake", timeouts=timeouts, api=api, verify=verify)
        ready = prepare(endpoint, check=check)
        load = traffic if traffic is not None else poisson(200, 8, 4, 12)
        return bench(ready, load, RunOptions(**({"workers": 0} | options)), out=out)


def errors(run):
    return {kind: facts["count"] for kind, facts in run.to_dict()["errors"].items()}


def every_other(bad):
    """A server whose every other answer goes wrong in the way of `bad`."""
    count = [0]

    async def behave(answer: Answer, body):
        count[0] += 1
        await (bad if count[0] % 2 else good)(answer, body)

    return behave


async def cut(answer: Answer, body):
    await answer.head()
    await answer.event(choice(" a"))
    answer.writer.transport.close()


async def reset_midway(answer: Answer, body):
    await answer.head()
    await answer.event(choice(" a"))
    await asyncio.sleep(0.02)
    answer.reset()


async def stall(answer: Answer, body):
    await answer.head()
    await answer.event(choice(" a"))
    await asyncio.sleep(30)


async def fail_500(answer: Answer, body):
    await answer.reply(500, b'{"error": "boom"}')


async def busy_429(answer: Answer, body):
    await answer.reply(429, b"slow down", retry_after="0.2")


async def no_json(answer: Answer, body):
    await answer.head()
    await answer.event("{broken")
    await answer.end()


async def no_events(answer: Answer, body):
    await answer.head()
    await answer.body(b"<html>\n\n</html>\n\n")
    await answer.end()


async def no_http(answer: Answer, body):
    await answer.raw(b"220 smtp ready\r\n\r\n")


async def error_inside(answer: Answer, body):
    await answer.head()
    await answer.event(choice(" a"))
    await answer.event({"error": {"message": "engine died", "code": 500}})
    await answer.event("[DONE]")
    await answer.end()


async def endless(answer: Answer, body):
    await answer.head()
    for _ in range(100_000):
        await answer.event(choice(" a"))


async def pings(answer: Answer, body):
    await answer.head()
    while True:
        await answer.body(b": ping\n\n")
        await asyncio.sleep(0.05)


async def one_piece(answer: Answer, body):
    await answer.reply(200, b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}')


async def nothing(answer: Answer, body):
    await answer.head()
    await answer.event("[DONE]")
    await answer.end()


async def no_end(answer: Answer, body):
    await answer.head()
    await answer.event(choice(" a"))
    await answer.event(choice(" a"))
    await answer.end()


@pytest.mark.parametrize(("bad", "kind"), [
    (cut, "closed_early"), (reset_midway, "reset"), (stall, "stalled"), (fail_500, "http_500"),
    (busy_429, "http_429"), (no_json, "malformed_sse"), (no_events, "malformed_sse"), (no_http, "malformed_http"),
    (error_inside, "server_error"), (endless, "overrun"), (pings, "timeout"), (one_piece, "not_streaming"),
    (nothing, "empty"), (no_end, "truncated"),
])
def test_every_way_to_fail_has_its_name(bad, kind, tmp_path):
    run = measured(every_other(bad), out=tmp_path / "run")
    assert errors(run) == {kind: 6}
    found = run.to_dict()
    assert found["num_finished"] == 6
    assert found["ttft_s"]["count"] == found["tpot_s"]["count"] == found["e2e_s"]["count"] == 6
    assert found["slo_attainment_fraction"] == 0.5
    assert run.exit_code == 1
    assert any("6 of 12 requests failed" in reason for reason in found["verdict"]["reasons"])
    assert any(kind in note for note in found["verdict"]["notes"])
    kept = read_run(tmp_path / "run")
    assert (kept.table.error == kind).sum() == 6
    assert kept.summary["errors"][kind]["count"] == 6


def test_a_broken_answer_counts_neither_in_e2e_nor_in_throughput():
    run = measured(every_other(cut))
    records = run.records
    assert np.isnan(records.e2e_s[run.measured.error != ""]).all()
    assert run.summary.output_tokens == 6 * 4


def test_done_may_be_missing_and_the_connection_may_stay_open():
    async def no_done(answer, body):
        await answer.head()
        for i in range(4):
            await answer.event(choice(" a", "length" if i == 3 else None))
        await answer.end()

    async def stays_open(answer, body):
        await answer.head()
        await answer.event(choice(" a", "stop"))
        await answer.event("[DONE]")
        await asyncio.sleep(30)

    run = measured(no_done)
    assert errors(run) == {}
    assert run.to_dict()["tokens"]["done_missing"] == 12
    run = measured(stays_open, poisson(200, 8, 1, 3), timeouts=Timeouts(stall_s=20.0, request_s=20.0))
    assert errors(run) == {}
    assert (run.table.end_s - run.table.sent_s).max() < 4.0


def test_an_answer_may_end_with_its_connection():
    async def until_closed(answer, body):
        await answer.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await answer.event(choice(" a", "stop"))
        await answer.event("[DONE]")
        answer.writer.transport.close()

    run = measured(until_closed, poisson(200, 8, 1, 6))
    assert errors(run) == {}


def test_a_connection_that_was_closed_while_idle_is_no_failure():
    """Servers close idle connections; a request on one is sent again on another, once, and counted."""
    count = [0]

    async def behave(answer, body):
        count[0] += 1
        if count[0] == 3:
            answer.reset()  # as if closed before the request came
            return
        await good(answer, body)

    run = measured(behave, closed_loop(1, 8, 2, 6))
    assert errors(run) == {}
    assert run.table.retries.sum() == 1


def test_closed_loop_clients_wait_as_long_as_retry_after_says():
    started = time.monotonic()
    run = measured(every_other(busy_429), closed_loop(1, 8, 2, 6))
    assert errors(run) == {"http_429": 3}
    assert time.monotonic() - started > 3 * 0.2
    assert run.to_dict()["errors"]["http_429"]["retry_after_s"] == pytest.approx(0.2)


def test_a_server_that_is_gone_does_not_eat_a_closed_loop_at_once():
    """Clients wait longer after each failure, so that a restart of a second does not cost the whole load."""
    with FakeServer(good) as server:
        ready = prepare(parse_endpoint(server.url, model="fake", timeouts=QUICK))
    started = time.monotonic()
    run = bench(ready, closed_loop(2, 8, 2, 20), RunOptions(workers=0, stop_after_s=1.0))
    assert time.monotonic() - started > 0.9
    assert set(errors(run)) == {"refused"}
    assert len(run.table) < 20
    assert run.exit_code == 1


def test_a_closed_loop_ends_where_nothing_listens_any_more(monkeypatch):
    monkeypatch.setattr("bstar.measure.driver._GONE_S", 0.5)
    with FakeServer(good) as server:
        ready = prepare(parse_endpoint(server.url, model="fake", timeouts=QUICK))
    run = bench(ready, closed_loop(2, 8, 2, 1000), RunOptions(workers=0))
    assert 2 <= len(run.table) < 1000
    assert "requests failed" in run.verdict.reasons[0] or "no request" in run.verdict.reasons[0]
    assert (f"the server refused {len(run.table)} connections in a row: {1000 - len(run.table)} requests were not sent"
            in run.verdict.reasons)


def test_what_was_not_sent_has_its_reason():
    from bstar.traffic import sessions

    stopped = measured(good, closed_loop(2, 8, 2, 10_000), stop_after_s=0.2)
    left = 10_000 - len(stopped.table)
    assert f"{left:,} requests were not sent: --stop-after ended the load" in stopped.verdict.notes
    broken = measured(fail_500, sessions(50, 3, 8, 2, 4), api="chat")
    assert "8 requests were not sent: their conversations broke off at a turn that failed" in broken.verdict.notes
    assert not any("not sent" in note for note in measured(good).verdict.notes)


def test_wrong_counts_are_reported():
    async def too_few(answer, body):
        await answer.head()
        for i in range(4):
            await answer.event(choice(" a", "length" if i == 3 else None))
        await answer.event(usage(8, 2))
        await answer.event("[DONE]")
        await answer.end()

    run = measured(too_few)
    assert run.to_dict()["tokens"]["mismatch"] == 12
    assert any("contradicts" in note for note in run.verdict.notes)


def test_shorter_answers_and_refused_options_are_reported():
    """A server that knows neither ignore_eos nor min_tokens and stops early."""
    async def stops(answer, body):
        if "ignore_eos" in body or "min_tokens" in body:
            await answer.reply(400, b'{"error": {"message": "Unrecognized request argument"}}')
            return
        await answer.head()
        await answer.event(choice(" a"))
        await answer.event(choice("", "stop"))
        await answer.event(usage(len(body["prompt"]), 2))
        await answer.event("[DONE]")
        await answer.end()

    run = measured(stops, check=True)
    assert errors(run) == {}
    assert run.environment["server"]["dropped"] == ["ignore_eos"]
    tokens = run.to_dict()["tokens"]
    assert (tokens["shorter_than_asked"], tokens["finish_reasons"]) == (12, {"stop": 12})
    assert any("12 answers are shorter than asked: 12 ended at the server's end token" in note
               for note in run.verdict.notes)


def test_shorter_answers_have_the_reason_that_the_server_gave():
    """Every third ends at a limit, every third at its end token, every third is as long as asked."""
    count = [0]

    async def behave(answer, body):
        count[0] += 1
        long, finish = ((4, "length"), (2, "length"), (2, "stop"))[count[0] % 3]
        await answer.head()
        for i in range(long):
            await answer.event(choice(" a", finish if i == long - 1 else None))
        await answer.event(usage(8, long))
        await answer.event("[DONE]")
        await answer.end()

    run = measured(behave)
    (note,) = (note for note in run.verdict.notes if "shorter than asked" in note)
    assert note.startswith("8 answers are shorter than asked: 4 ended at a length limit (max_tokens in --extra-body")
    assert note.endswith("4 ended at the server's end token or a stop text")
    assert run.to_dict()["tokens"]["shorter_finish_reasons"] == {"length": 4, "stop": 4}


@pytest.mark.parametrize("timeout_s", [0.03, 0.3])
def test_an_answer_after_its_deadline_is_a_timeout_whenever_the_sweep_runs(timeout_s, monkeypatch):
    """Half of the answers come 50 ms after they are due, which is less than the time between two sweeps."""
    monkeypatch.setattr("bstar.measure.driver._LEAST_SWEEP_S", 0.1)
    count = [0]

    async def behave(answer, body):
        count[0] += 1
        await good(answer, body, first_s=timeout_s + 0.05 if count[0] % 2 else 0.0)

    run = measured(behave, poisson(40, 8, 4, 20), timeouts=Timeouts(request_s=timeout_s))
    table = run.table
    assert errors(run)["timeout"] >= 10
    assert run.to_dict()["errors"]["timeout"]["example"] == f"after {timeout_s:g} s"
    assert (table.end_s - table.sent_s)[table.succeeded].max() <= timeout_s


def test_a_connection_that_ends_an_answer_after_its_deadline_is_a_timeout():
    """All tokens and a finish reason in time, but the answer is not whole until much later."""
    async def lingers(answer, body):
        await answer.head()
        for i in range(4):
            await answer.event(choice(" a", "length" if i == 3 else None))
        await asyncio.sleep(0.25)
        await answer.end()

    assert errors(measured(lingers, timeouts=Timeouts(request_s=0.2))) == {"timeout": 12}


def test_a_server_without_token_ids_gets_text():
    async def text_only(answer, body):
        if isinstance(body["prompt"], list):
            await answer.reply(422, b"prompt must be a string")
        else:
            await good(answer, body)

    run = measured(text_only, check=True)
    assert errors(run) == {}
    assert not run.config["prompts"]["as_token_ids"]
    assert run.to_dict()["tokens"]["input_tokens_off"] == 0  # this server counts words


def test_tls_that_cannot_be_verified_is_refused_and_may_be_allowed():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(HERE / "data" / "self-signed.pem")
    run = measured(good, context=context)
    assert errors(run) == {"tls": 12}
    assert run.exit_code == 1
    assert errors(measured(good, context=context, verify=False)) == {}
    with FakeServer(good, context=context) as server, pytest.raises(ServerError, match=r"TLS.*--ca-file.*--insecure"):
        prepare(parse_endpoint(server.url, model="fake"))


def test_https_to_a_server_without_tls_says_what_to_do():
    """One that answers the handshake with "400 Bad Request", as servers do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer():
            while True:
                try:
                    with listener.accept()[0] as link:
                        if link.recv(1000):
                            link.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ServerError, match="does not speak TLS there: use http://"):
            prepare(parse_endpoint(f"https://127.0.0.1:{listener.getsockname()[1]}"))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_running_out_of_ports_is_the_clients_fault(monkeypatch):
    opened = [0]
    whole = Pool.open

    async def exhausted(self):
        opened[0] += 1
        if opened[0] > 4:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return await whole(self)

    async def slow(answer, body):
        await good(answer, body, gap_s=0.1)

    monkeypatch.setattr(Pool, "open", exhausted)
    run = measured(slow, timeouts=Timeouts())
    assert set(errors(run)) == {"client_ports"}
    assert run.health.client_limited
    assert run.exit_code == 1
    assert any("ran out of ports" in reason for reason in run.verdict.reasons)


def slow_until(count, then):
    """A slow server that does `then()` when so many requests have come."""
    seen = [0]

    async def behave(answer, body):
        seen[0] += 1
        if seen[0] == count:
            threading.Thread(target=then).start()
        await good(answer, body, gap_s=0.02)

    return behave


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_keeps_what_was_measured(workers, tmp_path):
    """As a terminal does it: SIGINT to this process while the load runs."""
    behave = slow_until(20, lambda: os.kill(os.getpid(), signal.SIGINT))
    run = measured(behave, constant(30, 8, 4, 300), workers=workers, out=tmp_path / "run")
    assert run.interrupted
    assert run.exit_code == 130
    assert 5 < run.summary.num_finished < 300
    assert set(errors(run)) <= {"interrupted"}
    # What was in flight counts neither way, unless it had broken a limit by then.
    assert run.summary_for(Slo(ttft_s=5.0, e2e_s=60.0)).slo_attainment_fraction == 1.0
    assert run.summary_for(Slo(e2e_s=1e-6)).slo_attainment_fraction == 0.0
    kept = read_run(tmp_path / "run")
    assert kept.summary["interrupted"]
    assert len(kept.table) == len(run.table)


def test_ctrl_c_before_the_first_answer_leaves_no_folder(tmp_path):
    async def never(answer, body):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    run = measured(never, constant(30, 8, 4, 30), out=tmp_path / "new" / "run")
    assert run.interrupted
    assert run.holds_nothing
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_after_the_last_answer_loses_nothing_and_is_told(tmp_path):
    """While the run is written: it is whole, and whoever measures more is told to end."""
    class Watch:
        def start(self, origin_s):
            pass

        def stop(self):
            signal.raise_signal(signal.SIGINT)
            return Observation(name="watched", summary={})

    run = measured(good, out=tmp_path / "run", observers=(Watch(),))
    assert (run.interrupted, run.stop_asked) == (False, True)
    assert len(read_run(tmp_path / "run").table) == 12
    assert not measured(good).stop_asked


def test_a_run_that_was_killed_before_the_first_answer_is_named(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin({}, {}, poisson(10, 8, 4, 5), 0.0)
    for read in (read_run, runs_in):
        with pytest.raises(ConfigError, match="broke off before the first answer"):
            read(tmp_path / "run.partial")


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_the_others_results(tmp_path, monkeypatch):
    from bstar.measure import fleet

    made = []

    class Watched(fleet.ProcessWorker):
        def __init__(self, number):
            super().__init__(number)
            made.append(self)

    monkeypatch.setattr("bstar.measure.run.ProcessWorker", Watched)
    behave = slow_until(20, lambda: made[1]._process.kill())
    run = measured(behave, constant(40, 8, 4, 80), workers=2, out=tmp_path / "run")
    assert run.health.lost_workers == 1
    assert run.exit_code == 1
    assert run.summary.num_finished >= 40
    assert read_run(tmp_path / "run").summary["health"]["lost_workers"] == 1


def test_a_full_disk_ends_no_run_and_loses_nothing_but_the_files(tmp_path, monkeypatch):
    """The disk fills while the requests are written: the folder keeps the journal, the run has all figures."""
    from pyarrow import parquet

    whole = parquet.write_table

    def full(table, file, **settings):
        if "requests" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(table, file, **settings)

    monkeypatch.setattr(parquet, "write_table", full)
    run = measured(good, out=tmp_path / "run")
    assert run.exit_code == 2
    assert "No space left" in run.write_error
    assert run.summary.num_finished == 12
    assert not (tmp_path / "run").exists()
    table, traffic = recover(tmp_path / "run.partial")
    assert len(table) == traffic.num_requests == 12
    assert np.array_equal(table.first_token_s, run.table.first_token_s)
    assert not list((tmp_path / "run.partial").glob(".*.tmp"))


def test_a_full_disk_from_the_start_costs_no_load(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with FakeServer(good) as server:
        ready = prepare(parse_endpoint(server.url, model="fake"), check=False)
        with pytest.raises(ConfigError, match="No space left"):
            bench(ready, poisson(200, 8, 4, 12), RunOptions(workers=0), out=tmp_path / "run")
        assert not server.bodies
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "finish", lambda self, run, summary: self._file.close())
    measured(good, closed_loop(2, 8, 2, 300), out=tmp_path / "run")
    journal = tmp_path / "run.partial" / "requests.journal"
    journal.write_bytes(journal.read_bytes()[:-5000])
    table, _ = recover(tmp_path / "run.partial")
    assert 100 < len(table) < 300
    assert table.succeeded.all()
    kept = read_run(tmp_path / "run.partial")
    assert len(kept.table) == kept.summary["num_finished"] == len(table)
    assert kept.summary["interrupted"]


def test_a_run_never_overwrites_another(tmp_path):
    from bstar.errors import SpecError

    (tmp_path / "run").mkdir()
    with pytest.raises(SpecError, match="exists"):
        measured(good, out=tmp_path / "run")


def test_what_cannot_be_measured_is_refused_before_the_load():
    with FakeServer(good) as server:
        closed = parse_endpoint(server.url)
        with pytest.raises(ServerError, match="does not serve 'other'"):
            prepare(parse_endpoint(server.url, model="other"))
    with pytest.raises(ServerError, match="nothing answers"):
        prepare(closed)
    with pytest.raises(ServerError, match="no host"):
        prepare(parse_endpoint("http://no-such-host.invalid"))
    with FakeServer(fail_500) as server, pytest.raises(ServerError, match="http_500"):
        prepare(parse_endpoint(server.url))

    async def refuses(answer, body):
        await answer.reply(400, b"no, thanks")

    with FakeServer(refuses) as server, pytest.raises(ServerError, match="no, thanks"):
        prepare(parse_endpoint(server.url))


def test_chat_streams_with_reasoning_and_usage_last():
    async def thinks(answer, body):
        await answer.head()
        await answer.event(delta(role="assistant", content=""))
        await answer.event(delta(reasoning_content="hm"))
        await answer.event(delta(content=""))
        await answer.event(delta(content="a"))
        await answer.event(delta("stop", content="b"))
        await answer.event(usage(20, 3))
        await answer.event("[DONE]")
        await answer.end()

    run = measured(thinks, poisson(200, 8, 3, 5), api="chat")
    assert errors(run) == {}
    assert run.table.output_tokens.tolist() == [3] * 5
    assert np.diff(run.table.chunk_offsets).tolist() == [3] * 5


def test_body_options_leave_out_what_is_not_wanted():
    body = BodyOptions(model="m", ignore_eos=False, min_tokens=False, include_usage=False, extra={"top_p": 0.5})
    assert body.tail(7) == {"max_tokens": 7, "stream": True, "temperature": 0.0, "top_p": 0.5}
