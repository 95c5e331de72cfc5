"""Start-up logs: real ones of vLLM 0.32 on the CPU (tests/data/engine_logs), and the wordings of other versions.

The lines of other versions are single lines as the engines' sources print them (vLLM 0.6 worker.py, 0.8 to 0.28
v1/worker/gpu_worker.py and v1/core/kv_cache_utils.py; SGLang 0.5 model_runner.py and memory_pool.py), with numbers
from public issue reports.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.codec.engine_log import parse_log
from bstar.errors import ConfigError
from bstar.units import GIB

LOGS = Path(__file__).parent.parent / "data" / "engine_logs"


def gib(value: float) -> int:
    return round(value * GIB)


V0 = """\
INFO 11-21 06:35:11 config.py:905] Defaulting to use mp for distributed inference
INFO 11-21 06:35:11 llm_engine.py:237] Initializing an LLM engine (v0.6.4) with config: model='meta-llama/Llama-3.1-8B', speculative_config=None
INFO 11-21 06:36:01 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-21 06:36:02 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.37GiB peak_torch_memory=17.98GiB memory_usage_post_profile=15.50GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB gpu_memory_utilization=0.90
INFO 11-21 06:36:02 gpu_executor.py:113] # GPU blocks: 1478, # CPU blocks: 2048
INFO 11-21 06:36:02 gpu_executor.py:117] Maximum concurrency for 20000 tokens per request: 1.18x
ERROR ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""  # noqa: E501

V0_7 = """\
INFO 02-10 worker.py:266] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.90) = 21.22GiB
INFO 02-10 worker.py:266] model weights take 14.99GiB; non_torch_memory takes 0.06GiB; PyTorch activation peak memory takes 1.21GiB; the rest of the memory reserved for KV Cache is 4.97GiB.
INFO 02-10 executor_base.py:111] # CUDA blocks: 2543, # CPU blocks: 2048
"""  # noqa: E501

V1_0_8 = """\
INFO 03-24 04:03:22 [core.py:53] Initializing a V1 LLM engine (v0.8.1) with config: model='meta-llama/Llama-Guard-3-8B', speculative_config=None
INFO 03-24 04:03:55 [gpu_model_runner.py:1176] Model loading took 14.9888 GB and 28.719376 seconds
INFO 03-24 04:05:10 [kv_cache_utils.py:537] GPU KV cache size: 43,536 tokens
INFO 03-24 04:05:10 [kv_cache_utils.py:540] Maximum concurrency for 8,192 tokens per request: 5.31x
INFO 03-24 04:05:40 [gpu_model_runner.py:1442] Graph capturing finished in 21 secs, took 0.49 GiB
"""  # noqa: E501

V1_0_19 = """\
(APIServer pid=1) INFO 05-06 20:59:01 [utils.py:233] non-default args: {'model_tag': 'Qwen/Qwen3-32B', 'model': 'Qwen/Qwen3-32B', 'max_model_len': 32768, 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.88, 'compilation_config': <CompilationMode.X: 3>}
(EngineCore_DP0 pid=2) INFO 05-06 20:59:09 [core.py:104] Initializing a V1 LLM engine (v0.19.0) with config: model='Qwen/Qwen3-32B', speculative_config=None, tensor_parallel_size=2
(Worker_TP0 pid=3) INFO 05-06 20:59:59 [gpu_model_runner.py:4879] Model loading took 30.59 GiB memory and 31.657031 seconds
(Worker_TP1 pid=4) INFO 05-06 20:59:59 [gpu_model_runner.py:4879] Model loading took 30.61 GiB memory and 31.9 seconds
(Worker_TP0 pid=3) INFO 05-06 21:01:02 [gpu_worker.py:425] Available KV cache memory: 36.52 GiB
(Worker_TP1 pid=4) INFO 05-06 21:01:02 [gpu_worker.py:425] Available KV cache memory: 36.40 GiB
(EngineCore_DP0 pid=2) INFO 05-06 21:01:02 [kv_cache_utils.py:1314] GPU KV cache size: 298,192 tokens
(EngineCore_DP0 pid=2) INFO 05-06 21:01:02 [kv_cache_utils.py:1319] Maximum concurrency for 32,768 tokens per request: 9.10x
(Worker_TP0 pid=3) INFO 05-06 21:01:30 [gpu_model_runner.py:5361] Graph capturing finished in 19 secs, took 0.72 GiB
(Worker_TP0 pid=3) INFO 05-06 21:01:30 [gpu_worker.py:560] Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.88, 69.69 GiB). Actual usage is 30.59 GiB for weight, 2.31 GiB for peak activation, 0.22 GiB for non-torch memory, and 0.72 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=38010` (35.4 GiB) to fit into requested memory.
"""  # noqa: E501

V1_0_28 = """\
(EngineCore pid=2) INFO 09-01 10:00:09 [core.py:133] Initializing a V1 LLM engine (v0.28.0) with config: model='a/b', speculative_config=None
(Worker pid=3) INFO 09-01 10:01:00 [gpu_model_runner.py:6475] Estimated CUDA graph memory: 1.12 GiB total
(Worker pid=3) INFO 09-01 10:01:01 [gpu_worker.py:759] Available KV cache memory: 55.21 GiB
(EngineCore pid=2) INFO 09-01 10:01:02 [kv_cache_utils.py:2327] GPU KV cache size: 452,256 tokens, Maximum concurrency for 131,072 tokens per request: 3.45x
(Worker pid=3) INFO 09-01 10:01:20 [gpu_worker.py:970] CUDA graph pool memory: 0.86 GiB (actual), 1.12 GiB (estimated), difference: 0.26 GiB (30.2%).
(Worker pid=3) INFO 09-01 10:01:20 [gpu_worker.py:1050] Free memory on device (78.6/79.19 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB). Actual usage is 15.24 GiB for consumed memory (weights + non-torch), 1.57 GiB for peak activation, and 0.86 GiB for CUDAGraph memory.
"""  # noqa: E501

TOO_LITTLE = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."  # noqa: E501

TOO_LONG = """\
ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (4.88 GiB). Based on the available memory, the estimated maximum model length is 39968. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""  # noqa: E501

SGLANG = """\
[2025-10-16 09:04:00] server_args=ServerArgs(model_path='meta-llama/Llama-3.1-8B', tp_size=2, mem_fraction_static=0.88, max_running_requests=None, context_length=8192, page_size=1)
[2025-10-16 09:05:01 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=70.43 GB, mem usage=7.53 GB.
[2025-10-16 09:06:22 TP0] KV Cache is allocated. #tokens: 967404, K size: 29.53 GB, V size: 29.53 GB
[2025-10-16 09:06:22 TP1] KV Cache is allocated. #tokens: 967400, K size: 29.52 GB, V size: 29.52 GB
[2025-10-16 09:06:30 TP0] Capture cuda graph end. Time elapsed: 5.37 s. mem usage=1.44 GB. avail mem=8.05 GB.
[2025-10-16 09:06:31 TP0] max_total_num_tokens=967404, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=4096, context_len=8192
"""  # noqa: E501


def test_v0_profiling_in_one_line() -> None:
    log = parse_log(V0)
    assert (log.engine, log.version, log.model) == ("vllm", "0.6.4", "meta-llama/Llama-3.1-8B")
    assert log.weight_bytes == gib(14.9888)
    assert (log.total_bytes, log.runtime_bytes, log.kv_cache_bytes) == (gib(23.58), gib(0.35), gib(2.89))
    assert (log.num_blocks, log.kv_cache_tokens, log.gpu_memory_utilization) == (1478, 23648, 0.9)
    assert log.failure is not None
    assert "29000" in log.failure


def test_v0_profiling_in_words() -> None:
    log = parse_log(V0_7)
    assert (log.weight_bytes, log.runtime_bytes) == (gib(14.99), gib(0.06))
    assert (log.activation_bytes, log.kv_cache_bytes, log.num_blocks) == (gib(1.21), gib(4.97), 2543)
    assert log.failure is None


def test_v1_of_0_8() -> None:
    log = parse_log(V1_0_8)
    assert (log.version, log.weight_bytes, log.kv_cache_tokens) == ("0.8.1", gib(14.9888), 43536)
    assert (log.max_concurrency, log.max_model_len, log.cudagraph_bytes) == (5.31, 8192, gib(0.49))


def test_several_ranks_count_the_largest_weights_and_the_smallest_cache() -> None:
    log = parse_log(V1_0_19)
    assert (log.version, log.weight_bytes, log.kv_cache_bytes) == ("0.19.0", gib(30.61), gib(36.40))
    assert (log.activation_bytes, log.runtime_bytes, log.cudagraph_bytes) == (gib(2.31), gib(0.22), gib(0.72))
    assert (log.total_bytes, log.gpu_memory_utilization) == (gib(79.19), 0.88)
    assert dict(log.settings) == {"max_model_len": 32768, "tp": 2, "gpu_memory_utilization": 0.88}


def test_graph_estimate_and_actual_are_apart() -> None:
    log = parse_log(V1_0_28)
    assert (log.cudagraph_estimate_bytes, log.cudagraph_bytes) == (gib(1.12), gib(0.86))
    assert (log.kv_cache_tokens, log.max_concurrency, log.max_model_len) == (452256, 3.45, 131072)
    assert (log.consumed_bytes, log.runtime_bytes) == (gib(15.24), None)


def test_failures() -> None:
    assert (parse_log(TOO_LITTLE).failure or "").startswith("No available memory for the cache blocks")
    log = parse_log(TOO_LONG)
    assert (log.needed_kv_cache_bytes, log.kv_cache_bytes) == (gib(16), gib(4.88))
    assert (log.estimated_max_model_len, log.max_model_len) == (39968, 131072)
    assert (log.failure or "").startswith("To serve at least one request")


def test_sglang() -> None:
    log = parse_log(SGLANG)
    assert (log.engine, log.model) == ("sglang", "meta-llama/Llama-3.1-8B")
    assert (log.weight_bytes, log.kv_cache_tokens, log.kv_cache_bytes) == (gib(7.53), 967400, 2 * gib(29.52))
    assert log.cudagraph_bytes == gib(1.44)
    assert dict(log.settings) == {"tp": 2, "gpu_memory_utilization": 0.88, "max_model_len": 8192, "block_size": 1}


def test_a_real_log_of_0_32() -> None:
    log = parse_log((LOGS / "vllm-0.32.0-cpu.log").read_text())
    assert (log.version, log.model) == ("0.32.0", "/models/tiny")
    assert (log.kv_cache_tokens, log.max_concurrency, log.max_model_len) == (262144, 128.0, 2048)
    assert dict(log.settings) == {
        "max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 8, "kv_cache_memory_bytes": GIB}
    assert log.failure is None


def test_a_real_failed_start_of_0_32() -> None:
    log = parse_log((LOGS / "vllm-0.32.0-cpu-too-small.log").read_text())
    assert (log.num_blocks, log.estimated_max_model_len) == (4, 384)
    assert log.failure is not None


def test_the_last_start_of_a_log_counts() -> None:
    first = (LOGS / "vllm-0.32.0-cpu-too-small.log").read_text()
    log = parse_log(first + (LOGS / "vllm-0.32.0-cpu.log").read_text())
    assert (log.failure, log.kv_cache_tokens) == (None, 262144)


def test_colours_do_not_hide_a_line() -> None:
    log = parse_log("\x1b[36m(EngineCore pid=1)\x1b[0;0m INFO x] GPU KV cache size: 1,024 tokens")
    assert log.kv_cache_tokens == 1024


@pytest.mark.parametrize("text", ["", "hello\nworld", "Traceback (most recent call last):"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_log(text)


@given(st.text(max_size=300))
def test_any_text_gives_a_log_or_one_line(text: str) -> None:
    try:
        parse_log(text)
    except ConfigError as error:
        assert "\n" not in str(error)
