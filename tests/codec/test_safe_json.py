"""Files that users hand in: whatever is wrong with them is one line, and nothing hangs."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar.codec.safe_json import open_regular, parse_json, read_json, read_text, shown
from bstar.errors import ConfigError


def refuses(path: Path, *parts: str, **options: int) -> str:
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        read_json(path, what="model config", **options)
    assert time.perf_counter() - started < 1.0
    message = str(caught.value)
    assert "\n" not in message and message.startswith("model config: ")
    assert len(message) < 700
    for part in parts:
        assert part in message, message
    return message


def write(tmp_path: Path, data: bytes | str) -> Path:
    path = tmp_path / "config.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_an_object_is_read(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, '{"a": [1, 2.5, null, true], "b": {"c": "한"}}'), what="x") == {
        "a": [1, 2.5, None, True],
        "b": {"c": "한"},
    }


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, b"\xef\xbb\xbf{}"), what="x") == {}


def test_non_finite_numbers_pass_the_parser(tmp_path: Path) -> None:
    # Nemotron configs hold "time_step_limit": [0.0, Infinity].
    found = read_json(write(tmp_path, '{"time_step_limit": [0.0, Infinity], "n": NaN}'), what="x")
    assert found["time_step_limit"][1] == math.inf and math.isnan(found["n"])


def test_a_key_twice_with_one_value_is_no_error_with_two_values_it_is(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, '{"a": 1, "a": 1}'), what="x") == {"a": 1}
    refuses(write(tmp_path, '{"x": {"hidden_size": 1, "hidden_size": 2}}'), "'hidden_size'", "two values")


@pytest.mark.parametrize(("data", "part"), [
    (b"", "empty"),
    (b"  \n\t ", "empty"),
    (b"[1, 2]", "not a JSON object"),
    (b'"text"', "not a JSON object"),
    (b"12", "not a JSON object"),
    (b"null", "not a JSON object"),
    (b"not json", "not a JSON object"),
    (b"{'a': 1}", "line 1, column 2"),
    (b'{"a": 1,}', "not valid JSON"),
    (b'{"a": 1} x', "not valid JSON"),
    (b'{"a": ', "not valid JSON"),
    (b'{"a": tru}', "not valid JSON"),
    (b'{"a": "\x01"}', "not valid JSON"),
    (b'\xff\xfe{\x00"\x00', "not UTF-8"),
    (b"{\x80}", "not UTF-8"),
    (b"\x00\x00\x00", "not a JSON object"),
    (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
    (b'{"a": -' + b"9" * 2_000_000 + b"}", "digits"),
    (b'{"a": "\\ud800"}', "surrogate"),
    (b'{"\\udfff": 1}', "surrogate"),
    (b'{"a":' * 150 + b"1" + b"}" * 150, "deeper than 100"),
    (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "deeper than 100"),
    (b'{"a":' * 200_000, "deeper than 100"),
    (b'{"a":' + b"[" * 1_000_000, "deeper than 100"),
])  # fmt: skip
def test_what_is_not_a_json_object_is_one_line(tmp_path: Path, data: bytes, part: str) -> None:
    refuses(write(tmp_path, data), part)


def test_a_depth_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, '{"a":' * 99 + "1" + "}" * 99)
    assert read_json(path, what="x")
    refuses(path, "deeper than 50", max_depth=50)


def test_a_missing_file_a_folder_and_a_file_used_as_a_folder(tmp_path: Path) -> None:
    refuses(tmp_path / "none.json", "none.json", "does not exist")
    refuses(tmp_path, "is a folder")
    refuses(write(tmp_path, "{}") / "config.json", "does not exist")


def test_links(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to("loop.json")
    refuses(loop, "leads back to itself")
    one, two = tmp_path / "one", tmp_path / "two"
    one.symlink_to(two)
    two.symlink_to(one)
    refuses(one, "leads back to itself")
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "gone")
    refuses(dangling, "does not exist")
    good = tmp_path / "good"
    good.symlink_to(write(tmp_path, "{}"))
    assert read_json(good, what="x") == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_pipe_and_a_device_do_not_hang(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    refuses(fifo, "not a regular file")
    refuses(Path("/dev/zero"), "not a regular file")
    refuses(Path("/dev/null"), "not a regular file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path, "{}")
    path.chmod(0)
    refuses(path, "permission denied")


def test_a_100_mb_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as handle:
        handle.truncate(100_000_000)
    started = time.perf_counter()
    refuses(path, "too large", "100.00 MB")
    assert time.perf_counter() - started < 0.05


def test_a_size_that_stat_does_not_tell_is_bounded_too() -> None:
    proc = Path("/proc/self/maps")
    if not proc.exists():
        pytest.skip("no /proc")
    with pytest.raises(ConfigError, match="too large"):
        read_text(proc, what="log", max_bytes=100)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "new\nline.json", "\x1b[31mred"])
def test_a_strange_name_is_shown_printably(name: str) -> None:
    message = refuses(Path(name))
    assert message.isprintable()


def test_logs_are_read_even_where_they_are_not_utf_8(tmp_path: Path) -> None:
    path = write(tmp_path, b"GPU KV cache size: 1,000 tokens \xff\n")
    assert "1,000 tokens" in read_text(path, what="log", strict=False)
    with pytest.raises(ConfigError, match="UTF-8"):
        read_text(path, what="log")


def test_the_size_is_the_files(tmp_path: Path) -> None:
    handle, size = open_regular(write(tmp_path, b"x" * 123), what="x")
    with handle:
        assert size == 123


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=6))
@settings(max_examples=100, deadline=None)
def test_what_json_writes_is_read_back(value: dict[str, object]) -> None:
    text = json.dumps(value)
    assert json.dumps(parse_json(text.encode(), what="x", where="memory")) == text


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: ("{" + t).encode("utf-8", "surrogatepass")))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_an_object_or_one_line(data: bytes) -> None:
    try:
        assert isinstance(parse_json(data, what="x", where="memory"), dict)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_shown_is_one_short_printable_line() -> None:
    assert shown("plain") == "plain"
    assert shown("") == "(empty)"
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 1000)) < 250
