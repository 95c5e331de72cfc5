"""The environment with real vLLM (BSTAR_VLLM_VENV, else .vllm in the repository), a tiny model, a server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import HERE, ROOT, Server, environment, free_port, stop, wait_until_ready


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    python = Path(os.environ.get("BSTAR_VLLM_VENV") or ROOT / ".vllm") / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with vLLM: make vllm, or set BSTAR_VLLM_VENV")
    return python


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([vllm_python, HERE / "make_tiny_model.py", folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def server(vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests: random weights, one gibibyte of KV cache."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    port = free_port()
    flags = {"--max-model-len": "2048", "--max-num-seqs": "8", "--max-num-batched-tokens": "1024"}
    command = [
        str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model),
        "--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1",
        "--port", str(port), *(word for flag in flags.items() for word in flag),
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield Server(url=f"http://127.0.0.1:{port}", log=log, model=tiny_model, settings=flags)
    finally:
        stop(process)
