"""Cold start in a process of its own: what is imported, how long it takes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
BSTAR = [sys.executable, "-m", "bstar.interfaces.cli"]


def run(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BSTAR, *args], capture_output=True, text=True, env=ENV, timeout=60, **more)  # type: ignore[call-overload,no-any-return]


def imported(code: str) -> set[str]:
    """Modules that are loaded after `code` in a fresh interpreter."""
    program = f"{code}\nimport sys; print(chr(10).join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENV, check=True)
    return set(done.stdout.split())


def in_process(*args: str) -> str:
    """Code that runs one command as the entry point does, its output thrown away."""
    return (f"import sys, io\nfrom bstar.interfaces.cli.main import cli\nout, sys.stdout = sys.stdout, io.StringIO()\n"
            f"try:\n    cli.main({list(args)!r})\nexcept SystemExit as e:\n    assert e.code == 0, e.code\n"
            f"sys.stdout = out")


def test_importing_the_package_imports_no_room() -> None:
    loaded = imported("import bstar")
    assert not {m for m in loaded if m.startswith("bstar.")}
    assert not loaded & {"numpy", "scipy", "numba", "click", "rich", "yaml", "altair"}


@pytest.mark.parametrize("args", [
    ("model", "llama-3.1-8b", "--json"),
    ("memory", "llama-3.1-8b", "--gpu", "h100", "--json"),
    ("explain", "llama-3.1-8b", "--gpu", "h100", "--context", "8192", "--json"),
    ("plan", "llama-3.1-8b", "--gpu", "h100", "--input", "512", "--output", "64", "--rate", "2", "--json"),
])  # fmt: skip
def test_json_needs_neither_rich_nor_the_heavy_libraries(args: tuple[str, ...]) -> None:
    loaded = imported(in_process(*args))
    assert not loaded & {"rich", "numba", "scipy.stats", "scipy.optimize", "altair", "vl_convert"}


def test_cold_commands_answer_in_time() -> None:
    limits = {
        ("model", "llama-3.1-8b", "--json"): 0.5,
        ("memory", "llama-3.1-8b", "--gpu", "h100", "--json"): 1.0,
        ("explain", "llama-3.1-8b", "--gpu", "h100", "--context", "8192"): 1.0,
        ("plan", "llama-3.1-8b", "--gpu", "h100", "--input", "512", "--output", "64", "--rate", "2"): 1.0,
    }  # fmt: skip
    run("--version")  # compile and cache
    for args, limit in limits.items():
        # The processor's time, not the clock's: other work on the machine must not fail a test.
        before = os.times()
        assert run(*args).returncode == 0
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        assert spent < limit, f"{' '.join(args)}: {spent:.2f} s"


def test_stdout_is_json_and_stderr_is_notes() -> None:
    line = "vllm serve meta-llama/Llama-3.1-8B --enable-lora"
    done = run("memory", "--gpu", "h100", "--from-command", line, "--json")
    assert json.loads(done.stdout)["fits"] is True
    assert done.stderr == "note: not modelled: --enable-lora\n"


def test_exit_codes() -> None:
    assert run("model", "llama-3.1-8b").returncode == 0
    assert run("memory", "llama-3.1-70b", "--gpu", "h100").returncode == 1
    bad = run("model", "no such model at all", "--json")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_a_closed_pipe_is_quiet() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*BSTAR, "catalog", "devices"], env=ENV, **pipes) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.close()
        errors = job.stderr.read()
        assert job.wait(30) == 141
    assert errors == b""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_is_exit_code_130() -> None:
    code = ("import os, signal\nfrom bstar.interfaces.cli import model\n"
            "model.model_sheet = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
            "from bstar.interfaces.cli.main import cli\ncli.main(['model', 'llama-3.1-8b'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (130, "")
    assert signal.SIGINT == 2


def test_a_bug_keeps_its_traceback() -> None:
    code = ("from bstar.interfaces.cli import model\ndef broken(*a, **k): raise RuntimeError('a bug')\n"
            "model.model_sheet = broken\n"
            "from bstar.interfaces.cli.main import cli\ncli.main(['model', 'llama-3.1-8b'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: a bug" in done.stderr
