"""Ask real vLLM (CPU build) for the FLOPs and bytes of random steps, and store the answers for the tests.

    VENV/bin/python tools/make_step_cost_oracle.py CONFIG_DIR OUT.json.gz [SEED]

VENV holds vLLM 0.32 (`tools/setup_vllm.sh`). CONFIG_DIR holds `org--name_config.json` files; other models are read
from the catalog (`src/bstar/catalog/models/data`). The answers are
those of `vllm.v1.metrics.perf.ModelMetrics`, per GPU, by component.
"""

import gzip
import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics

CATALOG = Path(__file__).parents[1] / "src" / "bstar" / "catalog" / "models" / "data"
MODELS = {
    "meta-llama--Meta-Llama-3.1-8B": (1, 2, 8, 16),
    "meta-llama--Meta-Llama-3.1-70B": (1, 4, 8, 16),
    "Qwen--Qwen3-1.7B": (1, 2, 8),
    "Qwen--Qwen3-8B": (1, 2, 4),
    "Qwen--Qwen3-32B": (1, 4, 16),
    "mistralai--Mixtral-8x7B-v0.1": (1, 2, 8, 16),
    "Qwen--Qwen3-30B-A3B": (1, 2, 4, 8),
    "Qwen--Qwen3-235B-A22B": (1, 4, 8, 16),
    "MiniMaxAI--MiniMax-M2.5": (1, 4, 8),
    "deepseek-ai--DeepSeek-R1": (1, 8, 16),
    "moonshotai--Kimi-K2.5": (1, 8),
    "qwen2.5-72b": (1, 8, 16),
    "mistral-7b-v0.1": (1, 2, 8, 16),
    "gemma-2-9b": (1, 8, 16),
    "command-r": (1, 4),
    "llama-3.2-1b": (1, 16),
    "mixtral-8x22b": (1, 8, 16),
    "olmoe-1b-7b": (1, 2, 16),
}


def random_step(rng: random.Random) -> list[list[object]]:
    """A batch of decodes, prompts (some on a cached prefix) or both."""
    rows: list[list[object]] = [[1, rng.randint(2, 20000), False] for _ in range(rng.choice([0, 1, 7, 64]))]
    for _ in range(rng.choice([0, 1, 3])):
        new = rng.randint(2, 4096)
        rows.append([new, new + rng.choice([0, rng.randint(1, 16000)]), True])
    return rows or [[1, 100, False]]


def metrics(folder: str, tp: int) -> ModelMetrics:
    """vLLM's model metrics for the config in `folder`, told that it runs on `tp` ranks."""
    model = ModelConfig(
        model=folder, tokenizer=folder, dtype="bfloat16", seed=0, max_model_len=131072, skip_tokenizer_init=True)
    scheduler = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=131072, max_model_len=131072, is_encoder_decoder=False)
    config = VllmConfig(
        model_config=model, cache_config=CacheConfig(block_size=32), device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(), scheduler_config=scheduler)
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.world_size = tp
    return ModelMetrics(config)


def read_config(name: str, config_dir: str) -> dict[str, object]:
    """The config.json of `name`, from the folder or from the catalog."""
    path = Path(config_dir) / f"{name}_config.json"
    if path.exists():
        return json.loads(path.read_text())
    return json.loads((CATALOG / f"{name}.json").read_text())["config"]


def main(config_dir: str, out: str, seed: int = 2) -> None:
    rng = random.Random(seed)
    cases = []
    for name, degrees in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = read_config(name, config_dir)
            config.pop("auto_map", None)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            for tp in degrees:
                try:
                    m = metrics(folder, tp)
                except Exception as error:  # a config that this vLLM does not load is left out, and said so
                    print(f"{name} tp={tp}: {type(error).__name__}: {str(error)[:150]}", file=sys.stderr)
                    continue
                for _ in range(4):
                    step = random_step(rng)
                    ctx = ExecutionContext()
                    for new, after, prefill in step:
                        ctx.add(new, after, prefill)
                    cases.append({
                        "config": name, "tp": tp, "batch": step, "flops": m.get_num_flops_breakdown(ctx),
                        "read_bytes": m.get_read_bytes_breakdown(ctx), "write_bytes": m.get_write_bytes_breakdown(ctx),
                    })
                print(f"{name} tp={tp}: {len(cases)} cases", file=sys.stderr)
    body = json.dumps({"source": "vLLM 0.32 v1/metrics/perf.py", "seed": seed, "cases": cases}, sort_keys=True)
    Path(out).write_bytes(gzip.compress(body.encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(a) for a in sys.argv[3:4]))
