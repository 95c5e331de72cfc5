"""docs/cli.md and the flag table are what the commands and the engine say now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("BSTAR_VLLM_VENV", ".vllm")).absolute() / "bin" / "python"


def test_the_command_line_reference_is_fresh() -> None:
    done = subprocess.run([sys.executable, "tools/make_cli_reference.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "docs/cli.md is old: python tools/make_cli_reference.py"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="real vLLM is not installed")
def test_the_flag_table_is_the_engines_parser() -> None:
    done = subprocess.run([str(VLLM_PYTHON), "tools/make_vllm_flags.py"], cwd=ROOT, capture_output=True, check=True)
    stored = (ROOT / "src/bstar/codec/data/vllm_flags.json").read_bytes()
    assert done.stdout == stored
