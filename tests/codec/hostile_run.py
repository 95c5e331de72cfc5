"""Running bstar on hostile input, and files that are no JSON object, no model, no regular file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import hostile
from click.testing import CliRunner

from bstar.interfaces.cli.main import cli

LLAMA = hostile.load("meta-llama--Meta-Llama-3.1-8B")


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of bstar in this process; a traceback fails the test."""
    started = time.perf_counter()
    result = CliRunner().invoke(cli, list(arguments))
    assert time.perf_counter() - started < 2.0
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), (code, out[:200], err)
    # Notes (flags that are not modelled) may come before the one line that says what is wrong.
    *notes, error = err.removesuffix("\n").split("\n")
    assert error.startswith("error: ") and all(n.startswith("note: ") for n in notes) and len(notes) < 3
    assert all(line.isprintable() and len(line) < 1500 for line in (error, *notes))
    return error


def make_big(path: Path) -> None:
    with path.open("wb") as handle:
        handle.truncate(100_000_000)


FILES = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "not JSON": lambda path: path.write_text("hidden_size: 4096\n"),
    "cut off": lambda path: path.write_text(json.dumps(LLAMA)[:-20]),
    "a list": lambda path: path.write_text(json.dumps([LLAMA])),
    "UTF-16": lambda path: path.write_text(json.dumps(LLAMA), encoding="utf-16"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "100 MB": make_big,
    "100,000 nested objects": lambda path: path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "1,000 nested lists": lambda path: path.write_text('{"model_type":' + "[" * 1000 + "]" * 1000 + "}"),
    "a number of a million digits": lambda path: path.write_text('{"hidden_size": ' + "9" * 10**6 + "}"),
    "a key twice": lambda path: path.write_text('{"hidden_size": 1, "hidden_size": 2}'),
    "a link to itself": lambda path: path.symlink_to(path),
    "a dangling link": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a pipe": lambda path: os.mkfifo(path),
    "half a surrogate pair": lambda path: path.write_text('{"model_type": "\\ud800"}'),
    "an escape sequence": lambda path: path.write_text('{"model_type": "\\u001b[2J\\nerror: x"}'),
    "a Git LFS pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "an HTML page": lambda path: path.write_text("<!doctype html><html><body>404</body></html>"),
}  # fmt: skip
