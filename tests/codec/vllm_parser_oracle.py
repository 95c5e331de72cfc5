"""Run in an environment with real vLLM: read argv lists (JSON) on stdin, print what its own parser makes of them.

Answers a list of objects: the values of the flags that bstar models, or {"error": true} where the parser refuses.
"""

import contextlib
import io
import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

NAMES = (
    "model", "model_tag", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "decode_context_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size",
    "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling",
    "enforce_eager", "enable_expert_parallel", "num_gpu_blocks_override", "kv_cache_memory_bytes",
    "long_prefill_token_threshold", "scheduling_policy", "max_cudagraph_capture_size",
)

stdout, sys.stdout = sys.stdout, sys.stderr
parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
answers = []
for argv in json.load(sys.stdin):
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = vars(parser.parse_args(argv))
        answers.append({name: found.get(name) for name in NAMES})
    except (SystemExit, Exception):
        answers.append({"error": True})
json.dump(answers, stdout)
