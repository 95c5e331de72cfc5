"""Real vLLM with random weights on this CPU, and a client of token ids that keeps times: for benchmarks.

The server's worker computes on all cores but the last; the rest of the server and the client are held to the last one,
so that what a step takes does not depend on who happens to be scheduled beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
READY_S = 150
VOCABULARY = 512  # of tests/vllm/make_tiny_model.py
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Requests in order of sending; seconds from the start of the load on one monotonic clock.

    intended_s   when the load says it is sent (open loop: Poisson), or when its client was free (closed loop)
    sent_s, first_s, last_s   request written, first and last token read
    """

    input_tokens: Ints
    output_tokens: Ints
    intended_s: Floats
    sent_s: Floats
    first_s: Floats
    last_s: Floats

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.intended_s

    @property
    def tpot_s(self) -> Floats:
        return (self.last_s - self.first_s) / np.maximum(self.output_tokens - 1, 1)

    @property
    def e2e_s(self) -> Floats:
        return self.last_s - self.intended_s


@dataclass(frozen=True, slots=True)
class Server:
    """A running vLLM server: its port, and the first of its processes."""

    port: int
    leader: int

    def others_s(self) -> float:
        """Processor seconds so far of everybody else on this machine, what the hypervisor took included."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = (int(f) for f in fields[:8])
        ticks = user + nice + system + irq + soft + steal
        for stat in (Path("/proc/self"), *_group(self.leader)):
            with suppress(OSError):
                ticks -= sum(int(f) for f in _stat(stat)[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(folder: Path, config: dict[str, object], flags: list[str]) -> Iterator[Server]:
    """vLLM serving a Llama-shaped model of `config` from `folder`; ended whatever happens."""
    python = Path(os.environ.get("BSTAR_VLLM_VENV") or ROOT / ".vllm") / "bin" / "python"
    if not python.exists():
        raise SystemExit("no environment with vLLM: make vllm, or set BSTAR_VLLM_VENV")
    changes = [f"{key}={json.dumps(value)}" for key, value in config.items()]
    subprocess.run([python, ROOT / "tests/vllm/make_tiny_model.py", folder, *changes], check=True, timeout=120)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    cpus = sorted(os.sched_getaffinity(0))
    bind = ",".join(map(str, cpus[:-1] or cpus))
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_LOGGING_COLOR": "0",
    }  # fmt: skip
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny",
        "--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
        "--disable-uvicorn-access-log", *flags,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait(process, port, log)
        if len(cpus) > 1:
            _hold(process.pid, worker_cpus=set(cpus[:-1]), others=cpus[-1])
        yield Server(port, process.pid)
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise SystemExit(f"vLLM was not ready after {READY_S} s:\n{log.read_text(errors='replace')[-3000:]}")


def _stat(process: Path) -> list[str]:
    """/proc/PID/stat after the name: state, parent, group, …; 11 and 12 are user and system ticks."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _group(leader: int) -> list[Path]:
    """Folders in /proc of the processes of a process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(_stat(process)[2]) == leader:
                found.append(process)
    return found


def _hold(leader: int, *, worker_cpus: set[int], others: int) -> None:
    """Keep this process and the server's processes but its worker (the one with bound threads) on one core."""
    for process in _group(leader):
        threads = [int(task.name) for task in (process / "task").iterdir()]
        try:
            if any(os.sched_getaffinity(thread) <= worker_cpus for thread in threads):
                continue
            for thread in threads:
                os.sched_setaffinity(thread, {others})
        except ProcessLookupError:
            continue
    os.sched_setaffinity(0, {others})


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: they are one process group."""
    for how, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=seconds)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _ask(port: int, prompt: list[int], output_tokens: int) -> tuple[float, float, float]:
    """One streamed completion: (sent, first token, last token) on the monotonic clock. Raises where it is cut short."""
    body = json.dumps({
        "model": "tiny", "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" \
           f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = time.monotonic()
    writer.write(head.encode() + body)
    first, last, answer = 0.0, 0.0, b""
    try:
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                if b'"choices":[]' not in line:
                    last = time.monotonic()
                    first = first or last
                answer = line
            elif line.startswith(b"data: [DONE]"):
                break
    finally:
        writer.close()
    usage = json.loads(answer[6:] or b"{}").get("usage") or {}
    if usage.get("completion_tokens") != output_tokens or usage.get("prompt_tokens") != len(prompt):
        raise RuntimeError(f"asked for {len(prompt)} + {output_tokens} tokens, the server says {answer[:300]!r}")
    return sent, first, last


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send: at `arrival_s` (open loop), or by `clients` one after another for `seconds` (closed loop)."""

    input_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats | None = None
    clients: int = 0
    seconds: float = 0.0


def run_load(port: int, load: Load, seed: int) -> Measured:
    """Send a load and wait for its answers. A closed loop ends with the requests begun within `load.seconds`."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCABULARY, n).tolist() for n in load.input_tokens]
    rows = asyncio.run(_run(port, load, prompts))
    times = np.array(rows).T
    return Measured(
        input_tokens=load.input_tokens[: len(rows)], output_tokens=load.output_tokens[: len(rows)],
        intended_s=times[0], sent_s=times[1], first_s=times[2], last_s=times[3],
    )  # fmt: skip


async def _run(port: int, load: Load, prompts: list[list[int]]) -> list[tuple[float, ...]]:
    rows: dict[int, tuple[float, ...]] = {}
    begun = time.monotonic() + 0.05
    queue = iter(range(len(prompts)))

    async def one(r: int, intended: float) -> None:
        times = await _ask(port, prompts[r], int(load.output_tokens[r]))
        rows[r] = (intended - begun, *(t - begun for t in times))

    async def at(r: int, arrival: float) -> None:
        await asyncio.sleep(begun + arrival - time.monotonic())
        await one(r, begun + arrival)

    async def client() -> None:
        await asyncio.sleep(begun - time.monotonic())
        while time.monotonic() < begun + load.seconds and (r := next(queue, -1)) >= 0:
            await one(r, max(begun, time.monotonic()))

    if load.arrival_s is not None:
        await asyncio.gather(*(at(r, float(t)) for r, t in enumerate(load.arrival_s)))
    else:
        await asyncio.gather(*(client() for _ in range(load.clients)))
    return [rows[r] for r in sorted(rows)]
