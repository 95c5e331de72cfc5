"""Traces as loads: every format, hash ids, sessions, slices, speeds, repetitions, and the way back to a file."""

import json
import sys
import types
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from bstar import traffic
from bstar.errors import ConfigError, InputError, SpecError
from bstar.traffic import from_trace, read_trace, write_trace
from bstar.traffic.trace_rows import _clock

DATA = Path(__file__).parent.parent / "data" / "traces"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "traces"
MOONCAKE = DATA / "mooncake_conversation.jsonl.gz"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(time, source, ids, **more):
    return {"timestamp": time, "input_length": source, "output_length": 5, "hash_ids": ids} | more


@pytest.mark.parametrize(("name", "form"), [("azure_conv_2023.csv", "azure"), ("burstgpt_columns.csv", "burstgpt"),
                                            ("mooncake_conversation.jsonl.gz", "mooncake")])  # fmt: skip
def test_a_trace_is_replayed_as_it_is(name, form):
    trace, load = read_trace(DATA / name), from_trace(DATA / name)
    assert load.source.startswith(form)
    for column in ("arrival_s", "input_tokens", "output_tokens"):
        assert (getattr(load, column) == getattr(trace, column)).all()
    assert load.is_open_loop
    assert not load.has_sessions


def test_mooncake_says_what_prompts_hold():
    load = from_trace(MOONCAKE)
    hashes = load.block_hashes
    assert hashes.tokens_per_block == 512
    assert (np.diff(hashes.offsets) == -(-load.input_tokens // 512)).all()
    assert (hashes.of(0)[0], hashes.of(1)[0]) == (0, 0)  # one system prompt
    assert load.has_prefixes
    ids = [set(hashes.of(r).tolist()) for r in range(load.num_requests)]
    assert hashes.repeated_fraction == pytest.approx(1 - len(set.union(*ids)) / hashes.ids.size)


@pytest.mark.skipif(not SHARED.exists(), reason="the full traces are not part of the project")
def test_the_whole_mooncake_trace_repeats_36_6_percent_of_its_blocks():
    load = from_trace(SHARED / "mooncake_conversation_trace.jsonl.gz")
    assert (load.num_requests, load.block_hashes.tokens_per_block) == (12_031, 512)
    assert load.block_hashes.repeated_fraction == pytest.approx(0.366, abs=0.0005)


def test_timed_traces_are_in_seconds_with_16_token_ids(tmp_path):
    rows = [request(0, 40, [7, 8, 9]), request(2, 33, [7, 8, 10]), request(5, 16, [11])]
    trace = read_trace(write(tmp_path / "a.jsonl", rows))
    assert (trace.format, trace.block_hashes.tokens_per_block) == ("timed", 16)
    assert trace.arrival_s.tolist() == [0.0, 2.0, 5.0]
    assert trace.block_hashes.ids.tolist() == [0, 1, 2, 0, 1, 3, 4]
    in_ms = read_trace(tmp_path / "a.jsonl", time_unit="ms")
    assert in_ms.arrival_s.tolist() == [0.0, 0.002, 0.005]
    # Fractions of a millisecond are seconds; whole numbers without ids are Mooncake's milliseconds.
    plain = [{"timestamp": t, "input_length": 5, "output_length": 5} for t in (0, 1.5)]
    assert read_trace(write(tmp_path / "b.jsonl", plain)).format == "timed"
    assert read_trace(write(tmp_path / "c.jsonl", [plain[0], plain[0] | {"timestamp": 2000}])).arrival_s[1] == 2.0
    # Only full blocks named: 40 tokens, 2 ids of 16.
    full = [request(0.5, 40, [1, 2]), request(1.5, 15, []), request(2.0, 64, [1, 2, 3, 4])]
    assert read_trace(write(tmp_path / "d.jsonl", full)).block_hashes.tokens_per_block == 16


def test_chats_are_sessions(tmp_path):
    rows = [request(0.5, 16, [1], chat_id=10, parent_chat_id=-1), request(1.0, 16, [2], chat_id=11, parent_chat_id=-1),
            request(1.5, 32, [1, 3], chat_id=12, parent_chat_id=10),
            request(2.0, 48, [1, 3, 4], chat_id=13, parent_chat_id=12)]  # fmt: skip
    load = from_trace(write(tmp_path / "a.jsonl", rows))
    assert load.session.tolist() == [0, 1, 0, 0]
    assert not load.has_sessions  # replayed at its own times
    table = tmp_path / "b.csv"
    table.write_text("timestamp,isl,osl,priority,session_id\n0,5,5,2,x\n1,5,5,0,\n2,5,5,0,y\n3,5,5,1,x\n")
    load = from_trace(table)
    assert (load.session.tolist(), load.priority.tolist()) == ([0, -1, 1, 0], [2, 0, 0, 1])


@pytest.mark.parametrize(("rows", "says"), [
    ([request(0, 40, [7, 8, 9]), request(1, 40, [7])], "no block size"),
    ([request(0, 40, 5)], "line 1: hash_ids 5 is not a list"),
    ([request(0, 40, [1, 2, 3]), request(0, 40, [1, "x", 2])], "line 2: hash id x is"),
    ([request(0, 40, [1, 2, 3]), request(0, 40, [1, 2**70, 2])], "line 2: hash id"),
    ([request(0, 40, [1, 2, 3]), request(0, 40, [1, True, 2])], "line 2: hash id"),
    ([request(0, 40, [1, 2, 3]), {"timestamp": 1, "input_length": 4, "output_length": 4}], "line 2: has no 'hash_ids'"),
    ([request(0, 40, [1, 2, 3], priority="x")], "line 1: priority x is"),
    ([request(0, 40, [1, 2, 3], priority=1.5)], "line 1: priority"),
    ([request("soon", 40, [1, 2, 3])], "line 1: soon is not an arrival time"),
])  # fmt: skip
def test_malformed_hash_ids_name_the_line(tmp_path, rows, says):
    with pytest.raises(ConfigError, match=says) as error:
        from_trace(write(tmp_path / "a.jsonl", rows))
    assert "\n" not in str(error.value)


def test_a_given_block_size_is_held_against_the_prompts(tmp_path):
    file = write(tmp_path / "a.jsonl", [request(0, 40, [7, 8, 9]), request(1, 40, [7])])
    assert read_trace(file, hash_block_tokens=16).block_hashes.tokens_per_block == 16
    with pytest.raises(ConfigError, match="line 1: 3 hash_ids of 32 tokens are more than its 40 input tokens hold"):
        read_trace(file, hash_block_tokens=32)
    with pytest.raises(ConfigError, match="has no hash_ids"):
        read_trace(DATA / "azure_conv_2023.csv", hash_block_tokens=16)
    with pytest.raises(ConfigError, match="has dates"):
        read_trace(DATA / "azure_conv_2023.csv", time_unit="ms")


def test_slices_and_speeds():
    trace = read_trace(DATA / "azure_conv_2023.csv")
    part = from_trace(trace, start_s=5.0, end_s=10.0)
    inside = (trace.arrival_s >= 5) & (trace.arrival_s < 10)
    assert part.arrival_s == pytest.approx(trace.arrival_s[inside] - 5.0)
    assert (part.input_tokens == trace.input_tokens[inside]).all()
    twice = from_trace(trace, rate_scale=2.0)
    assert twice.arrival_s == pytest.approx(trace.arrival_s / 2)
    paced = from_trace(trace, rate_per_s=10.0)
    gaps = np.diff(paced.arrival_s)
    assert gaps.mean() == pytest.approx(0.1)
    assert gaps / gaps.mean() == pytest.approx(np.diff(trace.arrival_s) / np.diff(trace.arrival_s).mean())
    assert from_trace(trace, num_requests=7).num_requests == 7


def test_a_short_trace_starts_again():
    load = from_trace(MOONCAKE, num_requests=50)
    once = from_trace(MOONCAKE)
    assert (load.input_tokens[20:40] == once.input_tokens).all()
    assert (np.diff(load.arrival_s) >= 0).all()
    assert load.arrival_s[20:40] - load.arrival_s[20] == pytest.approx(once.arrival_s, abs=1e-9)
    shift = once.block_hashes.ids.max() + 1
    assert (load.block_hashes.of(20) == once.block_hashes.of(0) + shift).all()  # new text


def test_other_arrivals_and_closed_loops_for_the_same_requests():
    drawn = from_trace(MOONCAKE, rate_per_s=5.0, burstiness=0.5, num_requests=5000)
    gaps = np.diff(drawn.arrival_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.08)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(2.0, rel=0.2)
    lengths_only = from_trace(DATA / "arxiv_lengths.csv", rate_per_s=2.0)
    assert lengths_only.is_open_loop
    closed = from_trace(DATA / "arxiv_lengths.csv", concurrency=4, think_s="1s")
    assert (closed.concurrency, closed.num_scheduled, closed.think_s[0]) == (4, 4, 1.0)
    assert (closed.input_tokens == lengths_only.input_tokens).all()
    resampled = traffic.poisson(1.0, num_requests=100, lengths=read_trace(MOONCAKE).lengths)
    assert set(resampled.input_tokens) <= set(read_trace(MOONCAKE).input_tokens)


@pytest.mark.parametrize(("options", "says"), [
    ({"start_s": 1e6}, "start_s: no request"),
    ({"rate_scale": 0.0}, "rate_scale"), ({"rate_per_s": -1.0}, "rate_per_s"),
    ({"rate_scale": 2.0, "rate_per_s": 1.0}, "rate_scale"), ({"num_requests": 0}, "num_requests"),
    ({"concurrency": 0}, "concurrency"), ({"concurrency": 2, "rate_per_s": 1.0}, "concurrency"),
    ({"burstiness": -1.0}, "burstiness"), ({"warmup_requests": 40}, "warm-up"),
])  # fmt: skip
def test_bad_replays_are_one_line(options, says):
    with pytest.raises(SpecError) as error:
        from_trace(DATA / "azure_conv_2023.csv", **options)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_a_trace_without_arrivals_needs_a_rate():
    for options, says in (({}, "has no arrivals; give a rate"), ({"start_s": 1.0}, "has no arrivals to slice")):
        with pytest.raises(SpecError, match=says):
            from_trace(DATA / "arxiv_lengths.csv", **options)


def test_what_is_written_is_read_back(tmp_path):
    load = traffic.poisson(5.0, "lognormal:mean=500,cv=1", 80, 300, priority=3)
    write_trace(load, tmp_path / "a.csv")
    again = from_trace(tmp_path / "a.csv")
    assert again.arrival_s == pytest.approx(load.arrival_s - load.arrival_s[0], abs=1e-12)
    assert (again.input_tokens == load.input_tokens).all()
    assert (again.priority == 3).all()
    hashed = from_trace(MOONCAKE, rate_scale=3.0)
    write_trace(hashed, tmp_path / "a.jsonl")
    again = from_trace(tmp_path / "a.jsonl", time_unit="s")
    assert again.arrival_s == pytest.approx(hashed.arrival_s)
    assert (again.block_hashes.ids == hashed.block_hashes.ids).all()
    for bad, file in ((traffic.closed_loop(2, 1, 1), "b.csv"), (load, "b.txt"), (load, "missing/b.csv")):
        with pytest.raises(InputError, match="trace"):
            write_trace(bad, tmp_path / file)


def test_parquet(tmp_path, monkeypatch):
    table = {"arrival_ms": [1000, 0], "input_tokens": [5, 6], "output_tokens": [1, 2], "priority": [0, 1]}
    file = tmp_path / "a.parquet"
    try:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(table), file)
    except ImportError:  # a stand-in with the few calls that are used
        file.write_bytes(b"PAR1")
        columns = {k: types.SimpleNamespace(to_pylist=lambda v=v: v) for k, v in table.items()}
        read = types.SimpleNamespace(column_names=list(table), num_rows=2, column=columns.get)
        module = types.ModuleType("pyarrow.parquet")
        module.read_table = lambda handle: read
        package = types.ModuleType("pyarrow")
        package.parquet = module
        monkeypatch.setitem(sys.modules, "pyarrow", package)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    load = from_trace(file)
    assert load.arrival_s.tolist() == [0.0, 1.0]
    assert (load.input_tokens.tolist(), load.priority.tolist()) == ([6, 5], [1, 0])


@pytest.mark.parametrize("zone", [None, UTC])
def test_dates_are_times(zone):
    # 2024-03-10 02:30 does not exist in New York: what a local clock would make of it is no arrival.
    before, after = (datetime(2024, 3, 10, hour, 30, tzinfo=zone) for hour in (1, 3))
    assert _clock(after) - _clock(before) == 7200.0
    assert _clock(str(after)) == _clock(after)
    late, sharp = _clock("2024-05-10 00:00:00.009930+00:00"), _clock("2024-05-10 00:00:00+00:00")
    assert late - sharp == pytest.approx(0.00993, abs=2e-7)


def test_parquet_without_pyarrow_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="needs pyarrow; install it"):
        from_trace(file)
