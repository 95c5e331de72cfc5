"""Random scheduler cases: engines under different kinds of pressure, for vLLM and bstar to answer.

    python tools/make_scheduler_cases.py SEED COUNT CASES.json [--async]

Kinds take turns: roomy, short of memory, shared prefixes, both, priorities, priorities with prefixes, long-prefill
threshold (plain and adaptive), unchunked, many requests, answers cut at max_model_len, admission limits.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

KINDS = (
    "roomy", "tight", "prefix", "tight prefix", "priority", "priority prefix", "threshold", "adaptive threshold",
    "unchunked", "crowd", "cut", "limits",
)  # fmt: skip


def draw_case(rng: random.Random, kind: str, *, pipelined: bool = False) -> dict[str, Any]:
    """One case of `kind`."""
    block = rng.choice((1, 4, 8, 16, 16, 32))
    longest = rng.choice((256, 512, 1024, 2048))
    tight = "tight" in kind or "priority" in kind
    seats = rng.choice((4, 8, 16, 32)) if tight else rng.choice((1, 2, 4, 8, 16, 32))
    tokens = max(rng.choice((32, 64, 128, 256, 1024)), seats)
    one = -(-longest // block)
    engine: dict[str, Any] = {
        "block_size": block, "max_num_seqs": seats, "max_num_batched_tokens": tokens, "max_model_len": longest,
        "num_blocks": 2 + (int(one * rng.uniform(1.0, 2.5)) if tight else one * rng.choice((6, 12, 30))),
        "enable_prefix_caching": "prefix" in kind, "enable_chunked_prefill": kind != "unchunked",
        "long_prefill_token_threshold": rng.choice((12, 30, 90)) if "threshold" in kind else 0,
        "policy": "priority" if "priority" in kind else "fcfs", "scheduler_reserve_full_isl": rng.random() < 0.75,
    }  # fmt: skip
    if kind == "adaptive threshold":
        engine["long_prefill_token_threshold_adaptive"] = True
    if kind == "unchunked":
        engine["max_num_batched_tokens"] = max(tokens, longest)
    if kind == "limits":
        engine["max_num_active_seqs"] = max(1, seats - rng.choice((1, 2)))
        engine["max_num_scheduled_tokens"] = max(tokens // 2, 1)
        engine["watermark"] = rng.choice((0.02, 0.1))
    if pipelined:
        engine["async_scheduling"] = True
    return {"kind": kind, "engine": engine, "requests": _requests(rng, kind, longest)}


def _requests(rng: random.Random, kind: str, longest: int) -> list[dict[str, Any]]:
    count = 150 if kind == "crowd" else rng.choice((15, 30, 50))
    prompt = longest // rng.choice((2, 4, 8))
    answer = min(rng.choice((10, 60, 250, longest // 2)), longest - prompt - 1)
    pace = rng.choice((0, 1, 4, 10))
    groups = [rng.randint(1, prompt) for _ in range(rng.choice((1, 2, 6)))]
    step, out = 0, []
    for number in range(count):
        row: dict[str, Any] = {
            "id": number, "arrival_step": step, "prompt_tokens": rng.randint(1, prompt),
            "output_tokens": rng.randint(1, answer),
        }  # fmt: skip
        if kind == "cut" and rng.random() < 0.5:
            row["output_tokens"] = 2 * longest
        if "prefix" in kind and rng.random() < 0.85:
            group = rng.randrange(len(groups))
            row["prefix"] = [group, min(groups[group], row["prompt_tokens"])]
        if "priority" in kind:
            row["priority"] = rng.randrange(3)
        out.append(row)
        step += rng.randint(0, 2 * pace)
    return out


def draw_cases(seed: int, count: int, *, pipelined: bool = False) -> list[dict[str, Any]]:
    """`count` cases, the kinds in turn."""
    rng = random.Random(seed)
    return [draw_case(rng, KINDS[i % len(KINDS)], pipelined=pipelined) for i in range(count)]


if __name__ == "__main__":
    numbers = [a for a in sys.argv[1:] if a != "--async"]
    drawn = draw_cases(int(numbers[0]), int(numbers[1]), pipelined="--async" in sys.argv)
    Path(numbers[2]).write_text(json.dumps(drawn), encoding="utf-8")
