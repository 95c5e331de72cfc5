"""Peak activation memory of vLLM's profile run: one step of max_num_batched_tokens, then the sampler.

The engine measures it at start-up and leaves that much out of the KV cache. Two moments compete:

    layers     tokens · (FFN or expert workspace + attention + a few hidden states), sharded by TP
    sampler    max_num_seqs · vocabulary · bytes per logit + hidden states, on every TP rank in full, last stage only
    compile    since 0.12 the compiler tries kernels on copies of their arguments: the embedding table is the largest

The sampler often wins: 1,024 sequences on 152,000 words took 5.6 GiB in 0.11 (it sorted all logits), 2.2 GiB in
0.19. With few tokens and sequences the compiler wins: 1.18 GiB for Qwen3-8B on an empty compile cache, 0.19 GiB
on a filled one; the budget is for an empty one. Sizes follow from the shapes; constants are in `data/memory.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from bstar.physics.partition import stage_bounds
from bstar.specs.attention import (
    CompressedAttention,
    GatedDeltaNet,
    GroupedQueryAttention,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mixer,
    ParallelMixers,
)
from bstar.specs.deployment import Deployment
from bstar.specs.ffn import DenseFfn, MoeFfn
from bstar.specs.model import LayerGroup, ModelSpec
from bstar.specs.parallel import ParallelSpec
from bstar.units import GIB, MIB

ActivationTerm = Literal["sampler", "layers", "compile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPeak:
    """Bytes of the competing moments on one rank; `bytes` is the largest of them, beside what stays.

    compile      kernels tried on copies of the embedding table (0 without compiling)
    persistent   allocated once and held (the penalty counts of model runner V2)
    """

    layers: int
    sampler: int
    persistent: int
    compile: int = 0

    @property
    def bytes(self) -> int:
        return max(self.layers, self.sampler, self.compile) + self.persistent

    @property
    def set_by(self) -> ActivationTerm:
        if self.compile > max(self.layers, self.sampler):
            return "compile"
        return "sampler" if self.sampler >= self.layers else "layers"


@cache
def constants() -> Mapping[str, Any]:
    """The parsed `data/memory.toml`."""
    import tomllib

    text = (files("bstar.physics") / "data" / "memory.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def by_version(table: list[dict[str, Any]], version: tuple[int, ...], **match: Any) -> dict[str, Any]:
    """The newest entry of `table` at or before `version` whose other keys match (an empty version is the newest)."""
    number = version or (99,)
    rows = [r for r in table if tuple(r["from"]) <= number and all(r.get(k) == v for k, v in match.items())]
    return max(rows, key=lambda r: tuple(r["from"]))


def model_runner(model: ModelSpec, version: tuple[int, ...]) -> int:
    """1 or 2: which GPU model runner vLLM takes by default (config/vllm.py `use_v2_model_runner`).

    2 for dense models without states since 0.25 (unquantized ones since 0.23), for all since 0.29.
    """
    v = version or (99,)
    states = any(e.kind == "state" for g in model.layers for e in g.mixer.cache())
    dense = not model.is_moe and not states
    quantized = any(g.formats.default.is_quantized for g in model.layers)
    return 2 if v >= (0, 29) or (dense and v >= (0, 25)) or (dense and not quantized and v >= (0, 23)) else 1


def peak_activations(deployment: Deployment) -> tuple[ActivationPeak, ...]:
    """Activation peak of each pipeline stage, per rank, as vLLM's profile run would find it."""
    model, parallel, engine = deployment.model, deployment.parallel, deployment.engine
    settings = constants()["vllm"]
    units = settings["activations"]
    element = 4 if model.dtype == "fp32" else 2
    tokens = engine.max_num_batched_tokens
    hidden = tokens * model.hidden_size * element
    width = max(_layer_width(g, model.hidden_size, parallel) for g in model.layers)
    layers = round(tokens * element * (width + units["layer_units"] * _residual_width(model)))
    runner = model_runner(model, engine.version_tuple)
    sequences = min(engine.max_num_seqs, tokens)
    logits = sequences * model.vocab_size
    per_logit = by_version(settings["sampler"], engine.version_tuple, runner=runner)["bytes_per_logit"]
    # With fp32 weights the logits are fp32 already: their 16-bit copy is the fp32 one.
    per_logit -= 2.0 if element == 4 else 0.0
    sampler = round(logits * per_logit + units["sampler_units"] * hidden)
    version = engine.version_tuple or (99,)
    if version >= (0, 14):
        # The experts' work spaces outlive their layer since they come from one manager (v1/worker/workspace.py).
        sampler += round(tokens * element * max(_held_width(g, model.hidden_size, parallel) for g in model.layers))
    # Counts (int32) and a bit mask per request and word; 0.27 began to count what was held before the profile run.
    held = round(logits * 4.125) if runner == 2 and version >= (0, 27) else 0
    # A multimodal model's encoder outputs, one hidden state a token, wait in their cache while the model runs.
    waiting = hidden if model.multimodal and runner == 1 else 0
    compiling = _compile_bytes(deployment)
    last = len(stage_bounds(model.num_layers, parallel.pp)) - 1
    return tuple(
        ActivationPeak(
            layers=layers + waiting, sampler=sampler + waiting if stage == last else 0,
            persistent=held if stage == last else 0, compile=compiling if stage == 0 else 0)
        for stage in range(last + 1)
    )


def _compile_bytes(deployment: Deployment) -> int:
    """Copies of the embedding table, beside its output, that the compiler times fused kernels on.

    Inductor's combo kernels are timed since 0.12 (config/compilation.py, `benchmark_combo_kernel`). Multimodal models
    look embeddings up outside what is compiled.
    """
    engine, model, device = deployment.engine, deployment.model, deployment.device
    version = engine.version_tuple or (99,)
    if engine.enforce_eager or device.vendor != "nvidia" or model.multimodal or version < (0, 12):
        return 0
    copies = float(by_version(constants()["vllm"]["compile"], (device.compute_capability or 0,))["embedding_copies"])
    table = sum(t.rows * t.columns for t in model.embedding) / deployment.parallel.tp
    element = 4 if model.dtype == "fp32" else 2
    return round(element * copies * (table + engine.max_num_batched_tokens * model.hidden_size))


def _held_width(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> float:
    """Elements per token that the experts' work spaces keep (mxfp4 kernels bring their own, and free them)."""
    if not isinstance(group.ffn, MoeFfn) or any(
        group.formats.of(t).name.startswith("mxfp4") for t in group.ffn.tensors(hidden_size) if t.shard == "expert"
    ):
        return 0.0
    return _expert_width(group.ffn, hidden_size, parallel)


def _residual_width(model: ModelSpec) -> int:
    """Elements of the residual stream per token: several hidden states wide where hyper-connections mix them."""
    mixing = [
        t.columns for g in model.layers for t in g.extra
        if t.matmul and t.rows > 1 and t.columns % model.hidden_size == 0
    ]
    return max([model.hidden_size, *mixing])


def _layer_width(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> float:
    """Elements per token that one layer holds at once beside the residual stream: the wider of mixer and FFN."""
    return max(_ffn_width(group, hidden_size, parallel), _mixer_width(group.mixer, parallel.tp))


def _ffn_width(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> float:
    """Gate and up outputs together with their product; experts: the fused kernel's two work spaces."""
    ffn = group.ffn
    if isinstance(ffn, DenseFfn):
        return ffn.width * (3 if ffn.gated else 2) / parallel.tp
    if isinstance(ffn, MoeFfn):
        shared = (ffn.shared_width + ffn.parallel_dense_width) * (3 if ffn.gated else 2) / parallel.tp
        return _expert_width(ffn, hidden_size, parallel) + shared
    return 0.0


def _expert_width(ffn: MoeFfn, hidden_size: int, parallel: ParallelSpec) -> float:
    """The fused kernel's two work spaces: every token of every data-parallel rank, once per expert it goes to."""
    width = ffn.width / parallel.moe_tp
    up = width * (2 if ffn.gated else 1)
    return ffn.top_k * parallel.attention_dp * (max(up, ffn.latent_size or hidden_size) + width)


def _mixer_width(mixer: Mixer, tp: int) -> float:
    """Query, key, value and output of one token on one rank."""
    if isinstance(mixer, ParallelMixers):
        return sum(_mixer_width(branch, tp) for branch in mixer.branches)
    if isinstance(mixer, GroupedQueryAttention):
        kv = max(mixer.num_kv_heads / tp, 1) * (mixer.head_dim + mixer.v_head_dim)
        gate = 2 if mixer.output_gate else 1
        return mixer.num_heads / tp * (mixer.head_dim * gate + mixer.v_head_dim) + kv
    if isinstance(mixer, LatentAttention):
        qk = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        return mixer.num_heads / tp * (2 * qk + 2 * mixer.v_head_dim + mixer.qk_nope_head_dim)
    if isinstance(mixer, CompressedAttention):
        # Query, its rotated and padded copies, output and its regrouped copies.
        return mixer.num_heads / tp * mixer.head_dim * 7
    if isinstance(mixer, GatedDeltaNet):
        key, value = mixer.num_k_heads * mixer.k_head_dim, mixer.num_v_heads * mixer.v_head_dim
        return (4 * key + 6 * value) / tp
    if isinstance(mixer, Mamba2):
        return (2 * mixer.inner_size + 2 * mixer.conv_width) / tp
    if isinstance(mixer, Mamba1):
        return 4 * mixer.inner_size / tp
    if isinstance(mixer, KimiDeltaAttention | LightningAttention):
        return 6 * mixer.num_heads * mixer.head_dim / tp
    return 0.0


def non_torch_bytes(deployment: Deployment) -> int:
    """Context, NCCL and all-reduce buffers of one rank; a CPU has none."""
    if deployment.device.vendor == "cpu":
        return 0
    settings, parallel = constants()["vllm"], deployment.parallel
    version = deployment.engine.version_tuple
    gib = float(by_version(settings["non_torch"], version)["single_gib"])
    buffers = by_version(settings["communication"], version)
    if parallel.tp > 1:
        link = deployment.device.link_between(parallel.tp)
        switched = link is not None and link.kind in ("nvlink", "nvswitch", "infinity-fabric")
        gib += buffers["tensor_parallel_switch_gib" if switched else "tensor_parallel_pcie_gib"]
    return int(gib * GIB)


def graphs_subtracted(deployment: Deployment) -> bool:
    """Whether the engine takes its estimate of the CUDA graphs from the KV space.

    Model runner V1 since 0.20; V2 returned an estimate of 0 until 0.28 (v1/worker/gpu/model_runner.py,
    `profile_cudagraph_memory`).
    """
    asked = deployment.engine.estimate_cudagraph_memory
    version = deployment.engine.version_tuple or (99,)
    able = version >= (0, 29) or model_runner(deployment.model, version) == 1
    return able and (version >= (0, 20) if asked is None else asked)


def cuda_graph_bytes(deployment: Deployment) -> int:
    """vLLM's estimate of its CUDA graphs: piecewise ones up to the capture limit, full ones up to max_num_seqs.

    Graphs are captured per batch size; every layer of every graph holds kernel nodes and their parameters.
    """
    engine = deployment.engine
    if engine.enforce_eager or engine.cudagraph_max_size < 1 or deployment.device.vendor == "cpu":
        return 0
    numbers = constants()["vllm"]["cuda_graphs"]
    model = deployment.model
    with_state = sum(len(g.indices) for g in model.layers if any(e.kind == "state" for e in g.mixer.cache()))
    nodes = (model.num_layers - with_state) * numbers["per_graph_and_layer_mib"]
    nodes += with_state * numbers["per_graph_and_state_layer_mib"]
    largest_decode = engine.max_num_seqs * (1 + engine.num_speculative_tokens)
    graphs = capture_count(engine.cudagraph_max_size) + capture_count(min(engine.cudagraph_max_size, largest_decode))
    return int(numbers["base_gib"] * GIB + graphs * nodes / deployment.parallel.pp * MIB)


def capture_count(largest: int) -> int:
    """Captured batch sizes up to `largest`: 1, 2, 4, then every 8 to 256, then every 16."""
    sizes = {s for s in (1, 2, 4) if s <= largest}
    sizes.update(range(8, min(largest, 256) + 1, 8))
    sizes.update(range(272, largest + 1, 16))
    return len(sizes)
