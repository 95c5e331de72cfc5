"""Run in vLLM's environment: when its bench client would send 40 requests. Prints JSON.

    python tests/traffic/vllm_arrivals.py > tests/data/traffic/vllm_arrivals.json

The clock is simulated; the delays are those of vllm/benchmarks/serve.py, drawn after np.random.seed(7).
"""

import asyncio
import json
import types

import numpy as np
from vllm.benchmarks import serve


def send_times(burstiness, **ramp):
    np.random.seed(7)  # noqa: NPY002 (vLLM draws from the global generator)
    now = [0.0]

    async def sleep(seconds):
        now[0] += seconds

    async def run():
        return [now[0] async for _ in serve.get_request([object()] * 40, 4.0, burstiness, **ramp)]

    serve.time = types.SimpleNamespace(time=lambda: now[0])
    serve.asyncio = types.SimpleNamespace(sleep=sleep)
    return asyncio.run(run())


ramp = {"ramp_up_start_rps": 2, "ramp_up_end_rps": 10}
print(
    json.dumps(
        {
            "rescaled": send_times(0.5),
            "even": send_times(float("inf")),
            "linear": send_times(0.5, ramp_up_strategy="linear", **ramp),
            "exponential": send_times(0.5, ramp_up_strategy="exponential", **ramp),
        }
    )
)
