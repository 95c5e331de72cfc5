"""What vLLM's own V1 scheduler decides on scheduler cases (run inside the vLLM environment).

    VENV/bin/python vllm_schedule_oracle.py MODEL_FOLDER CASES.json ANSWERS.json

Cases as in `bstar.sim.replay`; the answer of each is the list of its steps that scheduled or preempted something. No
model runs: a request that a step brings up to date is handed a token of its own. With `async_scheduling` step k + 1
is scheduled before the outputs of step k are given, as vLLM's engine core does with two batches in flight.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

# Token ids that no two meanings share: groups, then prompts, then answers.
GROUP, PROMPT, ANSWER = 10**7, 10**10, 10**11
SCHEDULER_SETTINGS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive", "enable_chunked_prefill", "policy", "scheduler_reserve_full_isl",
    "max_num_active_seqs", "max_num_scheduled_tokens", "watermark",
)  # fmt: skip


def scheduler_for(engine: dict[str, Any], folder: str) -> Scheduler:
    """vLLM's scheduler with one group of full-attention layers."""
    block, blocks = engine["block_size"], engine["num_blocks"]
    pipelined = bool(engine.get("async_scheduling", False))
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, tokenizer=folder, dtype="bfloat16", seed=0, max_model_len=engine["max_model_len"]),
        scheduler_config=SchedulerConfig(
            is_encoder_decoder=False, async_scheduling=pipelined,
            **{name: engine[name] for name in SCHEDULER_SETTINGS if engine.get(name) is not None}),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=engine.get("enable_prefix_caching", False)),
        device_config=DeviceConfig(device="cpu"),
    )  # fmt: skip
    config.cache_config.block_size = block
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    kind = AsyncScheduler if pipelined else Scheduler
    return kind(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=block, log_stats=False,
    )  # fmt: skip


class Replay:
    """One case through one scheduler."""

    def __init__(self, case: dict[str, Any], folder: str) -> None:
        self.scheduler = scheduler_for(case["engine"], folder)
        self.pipelined = bool(case["engine"].get("async_scheduling", False))
        self.hasher = get_request_block_hasher(case["engine"]["block_size"], sha256)
        self.rows = list(enumerate(case["requests"]))
        self.made = dict.fromkeys((str(r["id"]) for r in case["requests"]), 0)
        self.place = {str(r["id"]): i for i, r in self.rows}

    def request(self, place: int, row: dict[str, Any]) -> Request:
        group, shared = row.get("prefix") or (0, 0)
        prompt = [GROUP * (group + 1) + i for i in range(shared)]
        prompt += [PROMPT + GROUP * place + i for i in range(row["prompt_tokens"] - shared)]
        sampling = SamplingParams(max_tokens=row["output_tokens"], ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        return Request(
            request_id=str(row["id"]), sampling_params=sampling, pooling_params=None, arrival_time=float(place),
            prompt_token_ids=prompt, priority=row.get("priority", 0), block_hasher=self.hasher,
        )  # fmt: skip

    def tokens(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """A new token for every request that the step brought up to date (asked right after it was scheduled)."""
        ids, sampled = list(plan.num_scheduled_tokens), []
        for name in ids:
            if self.scheduler.requests[name].is_prefill_chunk:
                sampled.append([])
                continue
            self.made[name] += 1
            sampled.append([ANSWER + GROUP * self.place[name] + self.made[name]])
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=sampled,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        scheduler, step, out = self.scheduler, 0, []
        coming = sorted(self.rows, key=lambda p: (p[1]["arrival_step"], p[0]))
        flying: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        while coming or scheduler.has_unfinished_requests() or flying:
            while coming and coming[0][1]["arrival_step"] <= step:
                scheduler.add_request(self.request(*coming.pop(0)))
            plan = scheduler.schedule()
            row = {
                "step": step, "scheduled": [[int(a), b] for a, b in plan.num_scheduled_tokens.items()],
                "preempted": sorted(int(a) for a in plan.preempted_req_ids or ()),
                "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            }  # fmt: skip
            if row["scheduled"] or row["preempted"]:
                out.append(row)
            flight = (plan, self.tokens(plan))
            if self.pipelined:
                flight, flying = flying, flight if plan.num_scheduled_tokens else None
            if flight is not None:
                scheduler.update_from_output(*flight)
            step += 1
            if step > 500_000:
                raise SystemExit("a case has no end")
        return out


def main(folder: str, cases: str, answers: str) -> None:
    init_none_hash(sha256)
    found = [Replay(case, folder).steps() for case in json.loads(Path(cases).read_text())]
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
