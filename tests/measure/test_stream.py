"""Streams as servers really write them: what is a token, when it came, what ends an answer."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.measure import deltas
from bstar.measure.exchange import retry_after_s
from bstar.measure.outcome import BLANK, FINAL, ROLE, TEXT, Outcome
from bstar.measure.sse import SseError, SseParser
from bstar.measure.tokens import settle, token_gaps

EVENTS = st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=20),
                  min_size=1, max_size=8)


@given(events=EVENTS, end=st.sampled_from(["\n", "\r\n", "\r"]), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_events_are_the_same_however_the_bytes_are_cut(events, end, cuts):
    stream = "".join(f": ping{end}data: {e}{end}{end}" for e in events).encode()
    places = sorted({min(c, len(stream)) for c in cuts} | {0, len(stream)})
    parser, found = SseParser(), []
    for low, high in pairwise(places):
        found += parser.feed(stream[low:high])
    found += parser.flush()
    assert [f.decode() for f in found] == events


def test_data_of_several_lines_is_joined_and_other_fields_are_left_out():
    parser = SseParser()
    assert parser.feed(b"event: x\nid: 1\nretry: 5\ndata: a\ndata:b\ndata\n\n: ping\n\n") == [b"a\nb\n"]


def test_what_is_no_event_stream_is_refused():
    with pytest.raises(SseError):
        SseParser().feed(b"<html>\n<body>\n\n")


def taken(*events, **settings):
    outcome = Outcome(0, 0.0, 0.0)
    for name, value in settings.items():
        setattr(outcome, name, value)
    for i, event in enumerate(events):
        deltas.take((event if isinstance(event, str) else json.dumps(event)).encode(), outcome, float(i))
    return outcome


def text(value, finish=None, **more):
    return {"id": "x", "choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]}


def chat(finish=None, **delta):
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def used(n, **more):
    return {"id": "x", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": n, **more}}


def settled(outcome, text_tokens=None):
    return settle(np.asarray(outcome.chunk_s), bytes(outcome.chunk_kind), np.asarray(outcome.chunk_tokens),
                  outcome.completion_tokens, text_tokens)


def test_kinds_of_chunks():
    outcome = taken(chat(role="assistant", content=""), chat(reasoning_content="hm"), chat(content=""),
                    chat(content="a"), chat(tool_calls=[{"function": {"arguments": "{"}}]), chat("stop"), "[DONE]")
    assert list(outcome.chunk_kind) == [ROLE, TEXT, BLANK, TEXT, TEXT, FINAL]
    assert outcome.done
    assert outcome.finish_reason == "stop"


def test_a_role_chunk_is_no_token():
    """vLLM sends it with the first token; clients that take it for the token see a gap of 0 and a shorter TTFT."""
    found = settled(taken(chat(role="assistant", content=""), chat(content="a"), chat("length", content="b"), used(2)))
    assert (found.total, found.times_s.tolist(), found.mismatch) == (2, [1.0, 2.0], False)


def test_a_role_with_text_is_a_token():
    found = settled(taken(chat(role="assistant", content="a"), chat(role="assistant", content="b"), used(2)))
    assert found.times_s.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("tokens", "times"), [
    (3, [0.0, 1.0, 2.0]),   # the blank is half a character
    (2, [0.0, 2.0]),        # it is nothing
    (4, [0.0, 1.0, 2.0, 3.0]),  # and the last, with the finish reason, is the end token
])
def test_chunks_without_text_are_tokens_where_the_count_needs_them(tokens, times):
    found = settled(taken(text("a"), text(""), text("b"), text("", "stop"), used(tokens)))
    assert (found.total, found.times_s.tolist(), found.source, found.mismatch) == (tokens, times, "usage", False)


def test_several_tokens_in_a_chunk_come_together():
    found = settled(taken(text("a b"), text("c d"), text("e"), used(5)))
    assert found.spread
    assert found.per_chunk.sum() == found.total == 5
    gaps = token_gaps(found.times_s, found.per_chunk)
    assert sorted(gaps.tolist()) == [0.0, 0.0, 1.0, 1.0]
    assert gaps.sum() == found.times_s[-1] - found.times_s[0]


def test_ids_and_running_counts_say_how_many_tokens_a_chunk_holds():
    by_ids = settled(taken(text("a", token_ids=[1, 2, 3]), text("", token_ids=[]), text("b", token_ids=[4]), used(4)))
    assert (by_ids.per_chunk.tolist(), by_ids.spread, by_ids.source) == ([3, 1], False, "usage")
    running = [{**text("a"), "usage": {"prompt_tokens": 5, "completion_tokens": n}} for n in (2, 2, 5)]
    by_usage = settled(taken(*running))
    assert (by_usage.per_chunk.tolist(), by_usage.times_s.tolist(), by_usage.total) == ([2, 3], [0.0, 2.0], 5)


def test_wrong_counts_are_told():
    assert settled(taken(text("a"), text("b"), text("c"), used(2))).mismatch
    assert settled(taken(text("a", token_ids=[1, 2]), used(5))).mismatch
    nothing = settled(taken(text("a"), text("b"), used(0)))
    assert (nothing.total, nothing.source, nothing.mismatch) == (2, "chunks", True)


def test_without_usage_the_tokenizer_counts_and_else_the_chunks():
    stream = taken(text("a b"), text("c"))
    assert (settled(stream).total, settled(stream).source) == (2, "chunks")
    assert (settled(stream, 3).total, settled(stream, 3).source) == (3, "tokenizer")


def test_usage_may_come_in_the_last_chunk_with_text():
    outcome = taken({**text("a", "length"), "usage": {"prompt_tokens": 4, "completion_tokens": 1,
                                                      "prompt_tokens_details": {"cached_tokens": 3}}})
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (4, 1, 3)


@pytest.mark.parametrize("event", ['{"error": {"message": "boom"}}', '{"error": "boom"}',
                                   '{"object": "error", "message": "boom"}'])
def test_errors_inside_the_stream(event):
    with pytest.raises(deltas.StreamError, match="boom"):
        taken(event)


@pytest.mark.parametrize("event", ["{", "[1]", "null", '"a"', '{"choices": 3}', '{"choices": [1]}', "{}"])
def test_events_that_are_no_completion(event):
    with pytest.raises(deltas.ChunkError):
        taken(event)


@given(st.lists(st.tuples(st.sampled_from([TEXT, BLANK, FINAL, ROLE]), st.integers(-1, 4)), max_size=12),
       st.integers(-1, 30), st.none() | st.integers(0, 30))
def test_whatever_comes_the_count_is_whole(chunks, total, by_text):
    """Tokens in chunks add up to the total wherever a chunk could hold one, times ascend, gaps fit."""
    found = settle(np.arange(len(chunks), dtype=float), bytes(k for k, _ in chunks),
                   np.asarray([t for _, t in chunks], dtype=np.int64), total, by_text)
    assert found.total >= 0
    assert (np.diff(found.times_s) > 0).all()
    if found.times_s.size and found.per_chunk.sum():
        assert found.per_chunk.sum() == found.total
        assert token_gaps(found.times_s, found.per_chunk).size == found.total - 1


@pytest.mark.parametrize(("value", "seconds"), [(b"3", 3.0), (b"0.5", 0.5), (b"-1", 0.0), (b"x", None),
                                                (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0)])
def test_retry_after(value, seconds):
    found = retry_after_s(value)
    assert np.isnan(found) if seconds is None else found == seconds
