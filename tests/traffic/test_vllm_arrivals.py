"""Arrivals against the times at which vLLM's own bench client sends, given the same random gaps."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bstar.traffic.arrivals import Gaps, arrivals, ramp_up

RECORDED = Path(__file__).parent.parent / "data" / "traffic" / "vllm_arrivals.json"
VLLM = Path(os.environ.get("BSTAR_VLLM_VENV", ".vllm")).absolute() / "bin" / "python"


def ours():
    gaps = Gaps(kind="gamma", shape=0.5)

    def same_draws():
        return np.random.RandomState(7)

    return {
        "rescaled": arrivals(gaps, 4.0, same_draws(), count=40, rescale=True),
        "even": arrivals(Gaps(kind="constant"), 4.0, same_draws(), count=40, rescale=True),
        "linear": ramp_up(gaps, 2.0, 10.0, same_draws(), count=40),
        "exponential": ramp_up(gaps, 2.0, 10.0, same_draws(), count=40, strategy="exponential"),
    }


def compare(theirs):
    for name, times in ours().items():
        assert times == pytest.approx(theirs[name], rel=1e-9), name


def test_the_bench_client_of_vllm_sends_at_these_times():
    compare(json.loads(RECORDED.read_text()))


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM.exists(), reason="no environment with vLLM (set BSTAR_VLLM_PYTHON)")
def test_it_still_does():
    script = Path(__file__).parent / "vllm_arrivals.py"
    answer = subprocess.run([VLLM, script], capture_output=True, text=True, check=True)
    compare(json.loads(answer.stdout.splitlines()[-1]))
