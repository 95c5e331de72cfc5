"""FLOPs and bytes by operator against vLLM's own performance metrics (tests/data/step_cost_oracle.json.gz).

vLLM counts some things in another convention; the test restates OUR operators in that convention (never the
other way round) and then asks for equality. Each difference is named here and argued in docs/physics.md:

    square        prefill attention as q·(k + q) pairs, also inside a window
    min_experts   experts read as min(tokens·k, n), not the expected number of distinct ones
    unabsorbed    MLA decode counted as if K and V were made per head; kv_b_proj of cached tokens not repeated
    fused_inputs  MLA's q_a and kv_a read the hidden state once (one fused kernel); vLLM counts it twice
    extra         router, norms and other glue (operator "norm": positional encoding, the write of attention's
                  output, the weighted sum over experts), collectives: absent there
    scales        quantization scales of the stored weights: absent there
    by_method     Kimi's int4 is counted for every weight there, though only its experts are int4: its weights
                  are left out of the comparison
    shared        activations of several shared experts, counted per expert there
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bstar.catalog.models import get_entry
from bstar.codec.hf_config import model_from_config
from bstar.physics.batch import BatchShape
from bstar.physics.operators import CompiledStep, compiled_step
from bstar.specs.attention import LatentAttention
from bstar.specs.formats import kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

DATA = Path(__file__).parents[1] / "data"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress((DATA / "step_cost_oracle.json.gz").read_bytes()))["cases"]
FLOPS = {
    "qkv": ("attn.qkv_proj", "mla_attn.q_proj", "mla_attn.q_a_proj", "mla_attn.q_b_proj", "mla_attn.kv_a_proj",
            "mla_attn.kv_b_proj"),
    "attn": ("attn.attn_qk", "attn.attn_av", "mla_attn.attn_qk", "mla_attn.attn_av"),
    "out": ("attn.out_proj", "mla_attn.out_proj"),
    "mlp": ("ffn.dense_ffn",), "experts": ("ffn.routed_ffn",), "shared_experts": ("ffn.shared_ffn",),
    "lm_head": ("unembed.unembed",),
}  # fmt: skip
# Prefix of vLLM's read and write components -> our operator.
BYTES = {
    "attn.qkv": "qkv", "attn.attn_input": "attn", "attn.kv_cache": "attn", "attn.out": "out",
    "mla_attn.q_": "qkv", "mla_attn.kv_a": "qkv", "mla_attn.kv_b": "qkv", "mla_attn.attn_input": "attn",
    "mla_attn.kv_cache": "attn", "mla_attn.out": "out", "ffn.dense": "mlp", "ffn.routed": "experts",
    "ffn.shared": "shared_experts", "unembed": "lm_head",
}  # fmt: skip


def load(config: str) -> ModelSpec:
    path = DATA / "model_configs" / f"{config}_config.json"
    if path.exists():
        return model_from_config(json.loads(path.read_text(encoding="utf-8")), name=config)
    entry = get_entry(config)
    assert entry is not None, config
    return model_from_config(entry.config, name=config)


def vllm_values(step: CompiledStep, shape: BatchShape, ratio: float) -> np.ndarray[Any, Any]:
    """Our statistics in vLLM's convention: `square`, and `unabsorbed` (`ratio` of FLOPs per decode pair)."""
    q, after, prompt = shape.new_tokens, shape.context_after, shape.is_prefill
    out = step.values(shape)
    for i, (name, span) in enumerate(step.statistics):
        if name == "cached_prefill":
            out[i] = 0.0
        if span is None:
            continue
        seen = after if span.limit is None else np.minimum(after, span.limit)
        mask = prompt if name.endswith("prefill") else ~prompt
        if name.startswith("pairs"):
            out[i] = float((mask * q) @ seen) * (ratio if name == "pairs_decode" else 1.0)
        else:
            out[i] = float(mask @ seen)
    return out


def ours(
    model: ModelSpec, case: dict[str, Any], *, with_weights: bool = True
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """FLOPs, bytes read and written by operator, in vLLM's convention."""
    mixer = model.layers[0].mixer
    ratio = 1.0
    if isinstance(mixer, LatentAttention):
        unabsorbed = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim
        ratio = unabsorbed / (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    step = compiled_step(model, ParallelSpec(tp=case["tp"]), kv_format("bf16"), "all")
    shape = BatchShape.from_triples(case["batch"])
    x = vllm_values(step, shape, ratio)
    weights = step.weight_bytes * with_weights
    for i, work in enumerate(step.works):
        if work.routing is not None:
            n, k = work.routing.num_experts, work.routing.top_k
            weights[i] *= min(shape.tokens * k, n) / n
    flops, read, write = step.flops @ x, step.reads @ x + step.kv_reads @ x + weights, step.writes @ x
    tables: tuple[dict[str, float], ...] = (defaultdict(float), defaultdict(float), defaultdict(float))
    for i, work in enumerate(step.works):
        for table, values in zip(tables, (flops, read, write), strict=True):
            table[work.name] += float(values[i])
    return tables  # type: ignore[return-value]


def mla_traffic(case: dict[str, Any], mixer: LatentAttention, layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """What turns our bytes read and written of MLA into vLLM's: `fused_inputs`, and the decode as if `unabsorbed`."""
    decode = float(sum(new for new, _, prefill in case["batch"] if not prefill))
    tokens = float(sum(new for new, _, _ in case["batch"]))
    heads, latent = -(-mixer.num_heads // case["tp"]), mixer.kv_lora_rank + mixer.qk_rope_head_dim
    nope, v, rank = mixer.qk_nope_head_dim, mixer.v_head_dim, mixer.kv_lora_rank
    hidden = 7168  # of both models here
    read = {
        "qkv": tokens * hidden + decode * (rank - heads * (nope + rank)),
        "attn": decode * heads * (nope + mixer.qk_rope_head_dim - latent),
    }
    write = {"qkv": decode * heads * (nope + v - rank - v)}
    return ({k: 2.0 * layers * x for k, x in read.items()}, {k: 2.0 * layers * x for k, x in write.items()})


def theirs(table: dict[str, float], *, with_weights: bool = True) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for key, value in table.items():
        if not with_weights and key.endswith(("weight", "weights")):
            continue
        out[next(name for prefix, name in BYTES.items() if key.startswith(prefix))] += value
    return out


MODELS = sorted({c["config"] for c in CASES})
EXACT = [m for m in MODELS if not m.startswith(("deepseek", "moonshotai", "MiniMax"))]


@pytest.mark.parametrize("config", MODELS)
def test_flops_are_vllms_in_its_convention(config: str) -> None:
    model = load(config)
    for case in (c for c in CASES if c["config"] == config):
        flops, _, _ = ours(model, case)
        for name, components in FLOPS.items():
            expected = sum(case["flops"].get(c, 0) for c in components)
            assert flops.get(name, 0.0) == pytest.approx(expected, rel=1e-12), (case["tp"], name)


@pytest.mark.parametrize("config", EXACT)
def test_bytes_are_vllms_in_its_convention(config: str) -> None:
    model = load(config)
    for case in (c for c in CASES if c["config"] == config):
        _, read, write = ours(model, case)
        for mine, reference in ((read, theirs(case["read_bytes"])), (write, theirs(case["write_bytes"]))):
            for name, value in reference.items():
                assert mine[name] == pytest.approx(value, rel=1e-12), (case["tp"], name)


@pytest.mark.parametrize("config", [m for m in MODELS if m not in EXACT])
def test_bytes_of_quantized_and_latent_models_are_vllms_after_the_named_differences(config: str) -> None:
    model, with_weights = load(config), not config.startswith("moonshotai")  # `by_method`
    mixer = model.layers[0].mixer
    for case in (c for c in CASES if c["config"] == config):
        _, read, write = ours(model, case, with_weights=with_weights)
        if isinstance(mixer, LatentAttention):
            more_read, more_write = mla_traffic(case, mixer, model.num_layers)
            for table, more in ((read, more_read), (write, more_write)):
                for name, value in more.items():
                    table[name] += value
        for mine, reference in ((read, theirs(case["read_bytes"], with_weights=with_weights)),
                                (write, theirs(case["write_bytes"]))):
            for name, value in reference.items():
                # `scales`: one fp32 per 128 × 128 block is 1/4096 of an fp8 weight's bytes (64 × 64, 1/1024,
                # where a rank's share of an expert cuts blocks).
                assert mine[name] == pytest.approx(value, rel=1e-3 if name == "experts" else 3e-4), (
                    case["tp"], name)


def test_the_oracle_covers_enough() -> None:
    assert len(MODELS) >= 8
    assert {c["tp"] for c in CASES} >= {1, 2, 4, 8, 16}
    assert any(new > 1 and after > new for c in CASES for new, after, _ in c["batch"])
