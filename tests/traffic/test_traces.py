"""Traces: every format is detected, what is malformed is named by its line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bstar.errors import ConfigError, InputError
from bstar.traffic.replay import from_trace
from bstar.traffic.traces import read_trace

DATA = Path(__file__).parent.parent / "data" / "traces"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "traces"


def test_azure():
    trace = read_trace(DATA / "azure_conv_2023.csv")
    assert (trace.format, trace.num_requests) == ("azure", 40)
    # 18:15:46.6805900 and 18:15:50.9951690: the digits beyond microseconds count.
    assert trace.arrival_s[:2] == pytest.approx([0.0, 4.314579], abs=5e-8)
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (374, 44)


def test_mooncake_is_in_milliseconds():
    trace = read_trace(DATA / "mooncake_conversation.jsonl.gz")
    assert (trace.format, trace.num_requests) == ("mooncake", 20)
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (6758, 500)
    assert trace.arrival_s[-1] < 100


def test_burstgpt_drops_failures():
    trace = read_trace(DATA / "burstgpt_columns.csv")
    assert (trace.format, trace.num_requests, trace.dropped) == ("burstgpt", 4, 1)
    assert trace.arrival_s.tolist() == [0.0, 30.0, 90.0, 750.0]


def test_lengths_only_has_no_rate():
    trace = read_trace(DATA / "arxiv_lengths.csv")
    assert (trace.format, trace.arrival_s, trace.rate_per_s, trace.gap_cv_squared) == ("csv", None, None, None)
    load = trace.workload(rate_per_s=2.0)
    assert load.rate_per_s == 2.0
    assert load.joint[0] == (3772, 54)


def test_own_csv_and_jsonl(tmp_path):
    table = tmp_path / "own.csv"
    table.write_text("arrival_ms,input_tokens,output_tokens,user\n2000,10,5,a\n\n1000,20,6,b\n")
    trace = read_trace(table)
    assert trace.arrival_s.tolist() == [0.0, 1.0]
    assert trace.input_tokens.tolist() == [20, 10]
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"arrival_s": 1, "prompt_tokens": 7, "completion_tokens": 3}\n')
    assert read_trace(lines).input_tokens.tolist() == [7]
    packed = tmp_path / "own.csv.gz"
    packed.write_bytes(gzip.compress(table.read_bytes()))
    assert read_trace(packed).output_tokens.tolist() == [6, 5]


def test_workload_of_a_trace_carries_rate_burstiness_and_pairs(tmp_path):
    rng = np.random.default_rng(0)
    gaps = rng.gamma(0.5, 2.0, 4000)
    rows = "\n".join(f"{t:.6f},{i % 50 + 1},{i % 7 + 1}" for i, t in enumerate(np.cumsum(gaps)))
    file = tmp_path / "t.csv"
    file.write_text("timestamp,isl,osl\n" + rows + "\n")
    load = read_trace(file).workload()
    assert load.rate_per_s == pytest.approx(1.0, rel=0.1)
    assert load.burstiness == pytest.approx(0.5, rel=0.15)
    assert len(load.joint) == 4000
    closed = read_trace(file).workload(concurrency=8)
    assert (closed.rate_per_s, closed.concurrency) == (None, 8)


@pytest.mark.parametrize(("name", "text", "says"), [
    ("a.csv", "", "is empty"),
    ("b.csv", "foo,bar\n1,2\n", "no input-token column"),
    ("c.csv", "input_tokens,foo\n1,2\n", "no output-token column"),
    ("d.csv", "time,input_tokens,output_tokens\n1,2,3\n2,x,3\n", "line 3"),
    ("e.csv", "time,input_tokens,output_tokens\n1,2,3\n2,3\n", "line 3"),
    ("f.csv", "time,input_tokens,output_tokens\nsoon,2,3\n", "line 2"),
    ("g.csv", "time,input_tokens,output_tokens\nnan,2,3\n", "line 2"),
    ("h.csv", "time,input_tokens,output_tokens\n1,-2,3\n", "line 2"),
    ("i.csv", "time,input_tokens,output_tokens\n1,2.5,3\n", "line 2"),
    ("j.csv", "time,input_tokens,output_tokens\n1,0,0\n", "no request"),
    ("k.csv", "time,input_tokens,output_tokens\n1,1e300,3\n", "line 2"),
    ("l.jsonl", '{"input_tokens": 1, "output_tokens": 2}\n{bad\n', "line 2"),
    ("m.jsonl", '{"input_tokens": 1, "output_tokens": 2}\n[1]\n', "line 2"),
    ("n.jsonl", '{"input_tokens": 1, "output_tokens": 2}\n{"input_tokens": 1}\n', "line 2"),
    ("o.jsonl", '{"input_tokens": true, "output_tokens": 2}\n', "line 1"),
    ("p.jsonl", '{"input_tokens": ' + "[" * 50_000 + "\n", "line 1"),
    ("q.json", "[1, 2]", "one JSON array"),
])  # fmt: skip
def test_malformed_traces_name_the_line(tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        read_trace(file)
    assert "\n" not in str(error.value)


def test_files_that_are_no_traces(tmp_path):
    binary = tmp_path / "x.csv"
    binary.write_bytes(bytes(range(256)))
    fake = tmp_path / "x.csv.gz"
    fake.write_bytes(b"no gzip")
    cut = tmp_path / "y.csv.gz"
    cut.write_bytes(gzip.compress(b"time,input_tokens,output_tokens\n" * 99)[:-20])
    table = tmp_path / "x.parquet"
    table.write_bytes(b"PAR1")
    loop = tmp_path / "loop.csv"
    loop.symlink_to(loop)
    for file in (binary, fake, cut, table, loop, tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(ConfigError) as error:
            read_trace(file)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not SHARED.exists(), reason="the full traces are not part of the project")
def test_full_public_traces():
    conv = read_trace(SHARED / "AzureLLMInferenceTrace_conv_2023.csv")
    assert conv.num_requests == 19366
    assert conv.rate_per_s == pytest.approx(5.53, abs=0.01)
    assert conv.gap_cv_squared**0.5 == pytest.approx(1.09, abs=0.01)
    code = read_trace(SHARED / "AzureLLMInferenceTrace_code_2023.csv")
    assert code.gap_cv_squared**0.5 == pytest.approx(13, abs=0.3)
    assert read_trace(SHARED / "mooncake_conversation_trace.jsonl.gz").num_requests == 12031


CELLS = st.one_of(
    st.integers(-5, 10**6), st.floats(), st.none(), st.booleans(), st.text(max_size=6),
    st.lists(st.one_of(st.integers(-3, 9), st.text(max_size=2), st.floats()), max_size=5),
    st.sampled_from(["2024-05-10 00:00:00.009930+00:00", "1e9", 10**400, 2**80]),
)  # fmt: skip
KEYS = st.sampled_from(
    ["timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id", "priority", "session_id",
     "arrival_ms", "isl", "osl"]
)  # fmt: skip


@given(st.lists(st.dictionaries(KEYS, CELLS, min_size=1), max_size=4), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_are_a_trace_or_one_line(tmp_path, rows, as_csv):
    file = tmp_path / ("a.csv" if as_csv else "a.jsonl")
    if as_csv:
        names = sorted({key for row in rows for key in row})
        cells = "\n".join(",".join(str(row.get(k, "")).replace("\n", "") for k in names) for row in rows)
        file.write_text(",".join(names) + "\n" + cells + "\n")
    else:
        base = {"timestamp": 1, "input_length": 40, "output_length": 3}
        file.write_text("".join(json.dumps(base | row) + "\n" for row in rows))
    try:
        load = from_trace(file, rate_per_s=1.0, burstiness=1.0)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert load.num_requests == read_trace(file).num_requests
