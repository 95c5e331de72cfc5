"""`bstar tune --serve` on real vLLM: a planted wall, an interruption, a value for which the server does not start.

Structure only: no figure of this machine's speed. `benchmarks/tune_vllm.py` has the figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT, free_port

pytest.importorskip("httptools")

pytestmark = [pytest.mark.vllm, pytest.mark.full]
PATIENCE_S = 400.0


def living(port: int) -> list[str]:
    """Commands of processes that have this port among their words."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = place.read_bytes().split(b"\0")
            if str(port).encode() in words and b"tune" not in words:
                found.append(" ".join(map(os.fsdecode, words)))
    return found


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as err:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err,
                                env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


def test_walls_interruption_and_a_value_without_a_server(vllm_python, tiny_model, tmp_path):
    """19 blocks of 128 tokens for sequences that grow into a second one: 4 fit always, 16 preempt. 512 tokens a step
    are too few for 1,024 sequences: vLLM refuses to start."""
    port, out = free_port(), tmp_path / "tuned"
    serve = (
        f"HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE=1 PYTHONPATH= {vllm_python} -m "
        f"vllm.entrypoints.openai.api_server --model {tiny_model} --load-format dummy --enforce-eager --host 127.0.0.1 "
        f"--port {port} --max-model-len 512 --no-enable-prefix-caching --num-gpu-blocks-override 20 "
        "--max-num-batched-tokens 512 --max-num-seqs {max_num_seqs}"
    )  # fmt: skip
    command = [
        sys.executable, "-m", "bstar", "tune", "--serve", serve, "--values", "4,16,1024", "--input", "100",
        "--output", "100", "--concurrency", "20", "--num-requests", "60", "--no-check", "--no-refine",
        "--allow-client-limited", "--out", str(out), "--json",
    ]  # fmt: skip
    first = _interrupted_after_one_point(command, out, tmp_path / "log", port)
    process = start(command, tmp_path / "log")
    answer, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert not living(port)
    found: dict[str, Any] = json.loads(answer)
    assert [p["value"] for p in found["points"]] == [4, 16]
    assert found["points"][0] == first, "what was measured before the interruption is measured once"
    few, many = (p["server"] for p in found["points"])
    assert few["preemptions"] == 0 < many["preemptions"]
    assert (few["running_max"], few["kv_usage_max"] < 1.0) == (4, True)
    assert found["preemption"] == {"load": 16.0, "low": 4.0, "high": 16.0, "edge": None}
    assert found["recommended"]["value"] == 4
    assert all(batch <= 4 for batch, _, _ in found["points"][0]["decode"])
    assert list(found["failed"]) == ["seqs-1024"]
    assert "max_num_batched_tokens" in found["failed"]["seqs-1024"]


def _interrupted_after_one_point(command: list[str], out: Path, log: Path, port: int) -> dict[str, Any]:
    """Ctrl-C once the first point is on disk and the next server is being started; the point."""
    process = start(command, log)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (out / "seqs-16.log").exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130
    assert not living(port)
    state = json.loads((out / "tune.json").read_text())
    assert [p["value"] for p in state["points"]] == [4]
    assert not state["failed"]
    point: dict[str, Any] = state["points"][0]
    return point
