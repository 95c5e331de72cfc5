"""Text output: plain in a pipe, complete, the same every time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
G = ("--gpu", "h100-sxm-80gb")

COMMANDS = [
    ("model", "llama-3.1-8b"), ("model", "qwen3.5-397b-a17b", "--tp", "4", "--units", "iec"),
    ("memory", "llama-3.1-8b", *G), ("memory", "llama-3.1-70b", *G),
    ("explain", "llama-3.1-8b", *G, "--context", "8192", "--slo", "tpot=20ms"),
    ("explain", "deepseek-r1", "--gpu", "h200", "--tp", "8", "--context", "4096", "--no-formulas", "--units", "si"),
    ("curve", "llama-3.1-8b", *G, "--context", "512,8192"),
    ("curve", "llama-2-7b", "llama-2-13b", "llama-2-70b", "--gpu", "a100", "--tp", "4", "--context", "512,2048,8192"),
    ("plan", "llama-3.1-70b", "--gpu", "h100,h200", "--input", "2000", "--output", "300", "--rate", "5",
     "--slo", "ttft=1s,tpot=40ms", "--weight-dtype", "auto,fp8"),
    ("plan", "llama-3.1-8b", "--gpu", "h100,l40s", "--input", "1000", "--output", "200", "--rate", "30",
     "--slo", "ttft=1s,tpot=40ms", "--simulate", "2", "--top", "4"),
    ("plan", "llama-3.1-405b", "--gpu", "l40s", "--input", "9", "--output", "9", "--max-gpus", "1"),
    ("catalog",), ("catalog", "devices"), ("catalog", "models", "qwen"), ("catalog", "engines"),
    ("catalog", "devices", "b200"), ("catalog", "models", "llama-3.1-8b"),
]  # fmt: skip


@pytest.mark.parametrize("args", COMMANDS, ids=[" ".join(a)[:50] for a in COMMANDS])
def test_text_is_plain_and_fits(bstar: Run, args: tuple[str, ...]) -> None:
    first = bstar(*args)
    assert first.exit_code in (0, 1)
    assert "\x1b" not in first.stdout
    for line in first.stdout.splitlines():
        assert len(line) <= 120 or "serve" in line, line
        assert line == line.rstrip()
    assert "nan" not in first.stdout.lower().replace("nanbeige", "").split()


def test_the_sheet_can_be_checked_by_hand(bstar: Run) -> None:
    text = bstar("explain", "llama-3.1-8b", *G, "--context", "8192").stdout
    assert "B* = W / kv" in text
    assert "15009849344 / 1073741824 = 13.979 sequences" in text


def test_both_conventions_are_printable(bstar: Run) -> None:
    assert "16.06 GB" in bstar("model", "llama-3.1-8b", "--units", "si").stdout
    assert "GiB" not in bstar("model", "llama-3.1-8b", "--units", "si").stdout.replace("KiB", "")
    assert " GB" not in bstar("model", "llama-3.1-8b", "--units", "iec").stdout


def test_a_context_beyond_what_is_served_is_said(bstar: Run) -> None:
    for args in (("explain", "llama-2-7b", *G, "--context", "8192"),
                 ("curve", "llama-2-7b", *G, "--context", "512,8192")):
        result = bstar(*args)
        assert result.exit_code == 0
        assert "beyond the 4,096 tokens" in result.stderr


def test_a_curve_is_drawn(bstar: Run, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    path = tmp_path / "c.json"
    result = bstar("curve", "llama-3.1-8b", *G, "--context", "512", "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_text().startswith("{")


def test_a_launch_command_is_one_line(bstar: Run) -> None:
    text = bstar("plan", "llama-3.1-8b", *G, "--input", "512", "--output", "64", "--rate", "2").stdout
    (line,) = [line for line in text.splitlines() if "vllm serve" in line]
    assert line.strip().startswith("vllm serve meta-llama/")
    assert "--gpu-memory-utilization" in line


@pytest.mark.skipif(not Path("/dev/ptmx").exists(), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("args", [
    ("plan", "llama-3.3-70b", *G, "--weight-dtype", "auto,fp8", "--input", "1000", "--output", "200", "--rate", "5",
     "--kv-cache-dtype", "auto,fp8", "--slo", "chat", "--top", "3"),
    ("memory", "llama-3.1-8b", *G), ("curve", "llama-3.1-8b", *G, "--context", "512"), ("model", "deepseek-v3"),
], ids=lambda args: args[0])
def test_no_figure_is_cropped_in_a_narrow_terminal(args: tuple[str, ...]) -> None:
    wide = _figures(_in_terminal(132, *args))
    for width in (80, 40):
        narrow = _figures(_in_terminal(width, *args))
        assert narrow <= wide
        assert len(narrow) >= 0.75 * len(wide)


def _figures(text: str) -> set[str]:
    """The numbers with their units; what ends at a line's edge may go on in the next one."""
    return set(re.findall(r"(?<![\w.,])\d[\d,.]*\d(?![\w.,])", " ".join(text.split())))


def _in_terminal(width: int, *args: str) -> str:
    """What a command writes to a terminal of `width` columns."""
    import fcntl
    import pty
    import struct
    import subprocess
    import sys
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-m", "bstar.interfaces.cli", *args], stdout=theirs, stderr=theirs,
                          env=env) as job:
        os.close(theirs)
        read = bytearray()
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            read += part
        assert job.wait(60) == 0
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", read.decode())
