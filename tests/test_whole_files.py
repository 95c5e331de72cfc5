"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bstar.errors import ConfigError
from bstar.files import check_writable, whole_file, write_whole


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "x.json"
    write_whole(place, "one")
    with pytest.raises(RuntimeError), whole_file(place) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert place.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    write_whole(place, b"two")
    assert place.read_bytes() == b"two"


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^profile: .*cannot be written"):
        write_whole(tmp_path / "no" / "x", "", what="profile")
    for place in (tmp_path / "no" / "x", tmp_path):
        with pytest.raises(ConfigError, match=r"^--out: .*cannot be written"):
            check_writable(place, what="--out")
    check_writable(tmp_path / "x", what="--out")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 10) == b"text"
        assert pipe.is_fifo()
    finally:
        os.close(reader)
