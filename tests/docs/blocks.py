"""Code blocks of Markdown files: found, run, and their shown output compared with what the command prints.

    ```console            `$ command` lines, each followed by its output. A line "…" stands for any lines.
    ```bash / ```sh       commands, one a line (a trailing "\\" continues it); output is not shown
    ```python             run with the blocks before it in the same file

A comment line right above the fence changes that:

    <!-- skip: reason -->     not run (network, hours, another machine); the tests count these
    <!-- exit: 1 -->          the last command ends with this code
    <!-- output: free -->     the shown output may differ (times, this machine)
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLUMNS = "110"
RUN = ("console", "bash", "sh", "shell", "python", "pycon")
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)")
_DIRECTIVE = re.compile(r"^\s*<!--\s*(skip|exit|output):\s*(.*?)\s*-->\s*$")
# What a shell would interpret; everything else runs in this process.
_SHELL = re.compile(r"[|;&<>$`*?~(){}]")
ELISION = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One code block; `line` is the number of its first line of code."""

    file: Path
    line: int
    language: str
    text: str
    skip: str = ""
    exit_code: int = 0
    free_output: bool = False

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a block; `shown` are the output lines that the document gives, None where it gives none."""

    line: int
    text: str
    shown: tuple[str, ...] | None
    exit_code: int = 0


def blocks(file: Path) -> Iterator[Block]:
    """The code blocks of a Markdown file that are to be run, in order; skipped ones are marked."""
    lines = file.read_text(encoding="utf-8").split("\n")
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        indent, mark, language = fence.groups()
        body, end = [], at + 1
        while end < len(lines) and not lines[end].strip().startswith(mark):
            body.append(lines[end].removeprefix(indent))
            end += 1
        if language in RUN:
            yield Block(file=file, line=at + 2, language=language, text="\n".join(body), **_directives(lines, at))
        at = end + 1


def _directives(lines: list[str], fence: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = fence - 1
    while at >= 0 and (match := _DIRECTIVE.match(lines[at])):
        kind, value = match.groups()
        if kind == "skip":
            found["skip"] = value or "no reason given"
        elif kind == "exit":
            found["exit_code"] = int(value)
        else:
            found["free_output"] = value == "free"
        at -= 1
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console or shell block."""
    prompt = block.language == "console"
    found: list[tuple[int, str, list[str]]] = []
    continued = False
    for number, line in enumerate(block.text.split("\n"), block.line):
        if continued:
            found[-1] = (found[-1][0], found[-1][1] + "\n" + line.removeprefix("> "), found[-1][2])
        elif prompt and line.startswith("$ "):
            found.append((number, line[2:], []))
        elif prompt and found:
            found[-1][2].append(line)
            continue
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append((number, line.removeprefix("$ "), []))
        else:
            continue
        continued = line.rstrip().endswith("\\")
    last = len(found) - 1
    return [
        Command(
            line=n,
            text=t,
            exit_code=block.exit_code if i == last else 0,
            shown=_stripped(out) if prompt and not block.free_output else None,
        )
        for i, (n, t, out) in enumerate(found)
    ]


def _stripped(lines: list[str]) -> tuple[str, ...] | None:
    kept = [line.rstrip() for line in lines]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept) or None


def run_command(text: str, folder: Path) -> tuple[int, str]:
    """(exit code, stdout and stderr) of one command in `folder`; bstar itself runs in this process where it can."""
    plain = " ".join(text.replace("\\\n", " ").split("\n"))
    with_quotes_removed = re.sub(r"'[^']*'|\"[^\"$`]*\"", "", plain)
    if plain.startswith("bstar ") and not _SHELL.search(with_quotes_removed):
        return _in_process(shlex.split(plain)[1:], folder)
    environment = {**os.environ, "COLUMNS": COLUMNS, "TERM": "dumb", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1",
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # fmt: skip
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, timeout=120, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return done.returncode, done.stdout


def _in_process(arguments: list[str], folder: Path) -> tuple[int, str]:
    from click.testing import CliRunner

    from bstar.interfaces.cli.main import cli

    with contextlib.chdir(folder):
        result = CliRunner().invoke(
            cli,
            arguments,
            prog_name="bstar",
            env={"COLUMNS": COLUMNS, "TERM": "dumb", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_python(block: Block, names: dict[str, Any], folder: Path) -> str:
    """Run a python block in `names`; what it prints. A pycon block is checked by doctest."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        if block.language == "pycon":
            _run_doctest(block, names)
        else:
            # Leading newlines keep the line numbers of the document in a traceback.
            exec(compile("\n" * (block.line - 1) + block.text, str(block.file), "exec"), names)
    return out.getvalue()


def _run_doctest(block: Block, names: dict[str, Any]) -> None:
    import doctest

    test = doctest.DocTestParser().get_doctest(block.text, names, block.name, str(block.file), block.line)
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    if runner.failures:
        raise AssertionError(report.getvalue())


def difference(shown: tuple[str, ...], printed: str) -> str:
    """ "" where the shown lines are those printed (with `…` for any lines), else what differs."""
    actual = [line.rstrip() for line in printed.split("\n")]
    at, skipping = 0, False
    for line in shown:
        if line.strip() == ELISION:
            skipping = True
            continue
        if skipping:
            while at < len(actual) and actual[at] != line:
                at += 1
            skipping = False
        if at >= len(actual) or actual[at] != line:
            found = actual[at] if at < len(actual) else "(nothing more)"
            return f"the document shows\n    {line}\nthe command prints\n    {found}"
        at += 1
    rest = [line for line in actual[at:] if line]
    return "" if skipping or not rest else f"the command prints more than the document shows:\n    {rest[0]}"
