"""Starting and stopping a real vLLM server on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READY_SECONDS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running vLLM server; `settings` are the flags it was started with."""

    url: str
    log: Path
    model: Path
    settings: dict[str, str]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            body: bytes = answer.read()
        return body.decode()


def environment() -> dict[str, str]:
    """For a vLLM server on this CPU. One processor is left to the client, whose clock would else be late."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_COLOR": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus[:-1] or cpus)),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server was not ready after {READY_SECONDS} s:\n{log.read_text(errors='replace')[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: they are one process group."""
    for how, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=seconds)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait(timeout=10)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
