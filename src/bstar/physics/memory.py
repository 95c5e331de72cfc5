"""What fits: how an engine divides a GPU's memory, and how many tokens and sequences are left room for.

vLLM        usable = reported · gpu_memory_utilization
            KV     = usable − weights − activation peak of the profile run − context and NCCL (− CUDA graphs since 0.20)
SGLang      KV     = reported · mem_fraction_static − weights − what was taken before (activations use the rest)
TensorRT    KV     = free after loading and a profile run · free_gpu_memory_fraction

A budget is per GPU. With pipeline stages the tightest one decides, and is the one described; every GPU then
gets that many blocks. `fits` and `reason` mean what the engine means: it starts, or it refuses and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from bstar.physics.activation import (
    ActivationPeak,
    ActivationTerm,
    constants,
    cuda_graph_bytes,
    graphs_subtracted,
    model_runner,
    non_torch_bytes,
    peak_activations,
)
from bstar.physics.arithmetic import missing_kernel
from bstar.physics.kv_blocks import (
    BlockPlan,
    RequestShape,
    block_groups,
    block_plan,
    kv_rules,
    longest_context,
)
from bstar.physics.kv_cache import kv_bytes_per_sequence, kv_bytes_per_token, state_bytes_per_sequence
from bstar.physics.kv_pages import attention_block_tokens, layer_pages
from bstar.physics.loading import loaded_weight_bytes, offloaded_weight_bytes
from bstar.physics.partition import check_parallel
from bstar.physics.weights import draft_weight_bytes
from bstar.specs.attention import LatentAttention
from bstar.specs.deployment import Deployment
from bstar.units import GIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of one GPU of the tightest pipeline stage, in bytes, as the engine accounts for it.

    total_bytes            what the driver reports
    usable_bytes           what the engine may take
    weight_bytes           after loading (the engine's padding, copies and tables included)
    activation_bytes       peak of one full step; activation_set_by says which moment sets it
    runtime_bytes          context, NCCL, all-reduce buffers
    cuda_graph_bytes       estimate; taken from the KV space only where cuda_graphs_subtracted
    kv_cache_bytes         what is left; not positive where nothing is
    kv_cache_tokens        "KV cache size" as the engine's version logs it
    block_size             tokens of a block of full attention (states force large ones)
    max_concurrency        requests of max_model_len tokens at once, per pool
    pools                  independent pools behind the endpoint (data-parallel ranks)
    needed_bytes           KV that one request of max_model_len tokens needs
    longest_request_tokens the largest max_model_len that would start
    """

    total_bytes: int
    usable_bytes: int
    weight_bytes: int
    activation_bytes: int
    activation_set_by: ActivationTerm
    runtime_bytes: int
    cuda_graph_bytes: int
    cuda_graphs_subtracted: bool
    kv_cache_bytes: int
    kv_cache_tokens: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    blocks_per_request: int
    max_concurrency: float
    pools: int
    needed_bytes: int
    longest_request_tokens: int
    fits: bool
    reason: str | None
    stage: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `bstar memory`."""
        per_gpu = (
            "total_bytes", "usable_bytes", "weight_bytes", "activation_bytes", "runtime_bytes", "cuda_graph_bytes",
            "kv_cache_bytes",
        )  # fmt: skip
        others = (
            "kv_cache_tokens", "num_blocks", "block_size", "bytes_per_block", "blocks_per_request", "max_concurrency",
            "pools", "needed_bytes", "longest_request_tokens", "activation_set_by", "cuda_graphs_subtracted", "fits",
            "reason", "stage",
        )  # fmt: skip
        out: dict[str, Any] = {"per_gpu": {name: getattr(self, name) for name in per_gpu}}
        out |= {name: getattr(self, name) for name in others}
        return out | {"notes": list(self.notes)}


def memory_budget(deployment: Deployment) -> MemoryBudget:
    """How `deployment`'s engine divides each GPU's memory, and whether it would start."""
    if deployment.engine.name == "vllm":
        return _vllm(deployment)
    return _pool_of_tokens(deployment)


def kv_block_plan(deployment: Deployment, available_bytes: tuple[int, ...]) -> tuple[BlockPlan, RequestShape]:
    """vLLM's block pool for a KV space per pipeline stage, and the full-length request it was computed for."""
    model, engine, parallel = deployment.model, deployment.engine, deployment.parallel
    rules = kv_rules(engine.version_tuple)
    device = deployment.device
    tokens = engine.block_size or attention_block_tokens(
        model, compute_capability=device.compute_capability, cpu=device.vendor == "cpu")
    pages = layer_pages(model, deployment.kv_format, tp=parallel.tp, block_tokens=tokens,
                        num_speculative_tokens=engine.num_speculative_tokens, drafts_with_mtp=engine.drafts_with_mtp)
    batches = _batches_in_flight(deployment) if rules.in_flight_batches else 1
    states = (2 if engine.enable_prefix_caching else 1) + engine.num_speculative_tokens
    request = RequestShape(
        max_model_len=engine.max_model_len,
        in_flight_tokens=engine.max_num_batched_tokens * batches,
        dcp=parallel.dcp,
        state_blocks=states if rules.state_checkpoints else 1,
        checkpoints=engine.enable_prefix_caching and rules.prefill_checkpoints,
    )
    plan = block_plan(block_groups(pages, rules), available_bytes, request, rules, num_layers=model.num_layers,
                      num_blocks_override=engine.num_gpu_blocks_override)
    return plan, request


def _batches_in_flight(deployment: Deployment) -> int:
    """Steps scheduled before the first is finished (config/vllm.py `max_concurrent_batches`)."""
    pp = deployment.parallel.pp
    if not deployment.engine.async_scheduling:
        return pp
    if model_runner(deployment.model, deployment.engine.version_tuple) == 2:
        return pp + 1
    return 2 if pp == 1 else pp


def _own_indexers(deployment: Deployment) -> Deployment:
    """Before 0.24 vLLM built an indexer, its weights and its cache, also in layers that reuse another's picks.

    models/deepseek_v2.py: `is_v32` alone until 0.23, `not _skip_topk` since.
    """
    if (deployment.engine.version_tuple or (99,)) >= (0, 24):
        return deployment
    groups = []
    for group in deployment.model.layers:
        mixer = group.mixer
        if isinstance(mixer, LatentAttention) and mixer.indexer is not None and mixer.indexer.shared:
            mixer = replace(mixer, indexer=replace(mixer.indexer, shared=False))
        groups.append(replace(group, mixer=mixer))
    return replace(deployment, model=replace(deployment.model, layers=tuple(groups)))


def _vllm(deployment: Deployment) -> MemoryBudget:
    deployment = _own_indexers(deployment)
    engine, parallel = deployment.engine, deployment.parallel
    total = deployment.device.reported_memory_bytes
    usable = ceil(total * engine.gpu_memory_utilization)
    weights = _weights(deployment)
    activations = peak_activations(deployment)
    runtime = non_torch_bytes(deployment)
    graphs = cuda_graph_bytes(deployment)
    subtracted = graphs_subtracted(deployment)
    available = tuple(
        usable - w - a.bytes - runtime - (graphs if subtracted else 0)
        for w, a in zip(weights, activations, strict=True)
    )
    if engine.kv_cache_memory_bytes is not None:
        available = (engine.kv_cache_memory_bytes,) * len(available)
    plan, request = kv_block_plan(deployment, available)
    stage = min(range(len(available)), key=lambda i: available[i])
    if engine.num_gpu_blocks_override is not None:
        available = (plan.num_blocks * plan.bytes_per_block,) * len(available)
    longest = engine.max_model_len
    if not plan.holds_one_request:
        longest = longest_context(plan, request, upper=longest)
    reason = _refusal(deployment, weights[stage], available[stage], plan, longest) or _overcommitted(
        deployment, weights[stage] + activations[stage].bytes + runtime, available[stage])
    return MemoryBudget(
        total_bytes=total, usable_bytes=usable, weight_bytes=weights[stage],
        activation_bytes=activations[stage].bytes, activation_set_by=activations[stage].set_by,
        runtime_bytes=runtime, cuda_graph_bytes=graphs, cuda_graphs_subtracted=subtracted,
        kv_cache_bytes=available[stage], kv_cache_tokens=plan.kv_cache_tokens, num_blocks=plan.num_blocks,
        block_size=plan.attention_block_tokens, bytes_per_block=plan.bytes_per_block,
        blocks_per_request=plan.blocks_per_request, max_concurrency=plan.max_concurrency,
        pools=parallel.dp * parallel.attention_dp, needed_bytes=plan.needed_bytes, longest_request_tokens=longest,
        fits=reason is None, reason=reason, stage=stage, notes=_notes(deployment) + _compile_note(activations[stage]))


def _compile_note(peak: ActivationPeak) -> tuple[str, ...]:
    """What a second start gains: a filled compile cache tries no kernels."""
    spare = peak.compile - max(peak.layers, peak.sampler)
    if spare < 0.05 * GIB:
        return ()
    return (f"a start on a filled compile cache finds {spare / GIB:.2f} GiB more for the KV cache",)


def _weights(deployment: Deployment) -> tuple[int, ...]:
    """Loaded weights per stage, those in host memory left out; an MTP head that drafts is loaded too, on the last."""
    model, parallel = deployment.model, deployment.parallel
    loaded = loaded_weight_bytes(model, parallel, deployment.device)
    if deployment.engine.drafts_with_mtp:
        loaded = (*loaded[:-1], loaded[-1] + draft_weight_bytes(model, parallel))
    offloaded = offloaded_weight_bytes(model, parallel, deployment.engine.cpu_offload_bytes)
    return tuple(w - o for w, o in zip(loaded, offloaded, strict=True))


def _refusal(
    deployment: Deployment, weights: int, available: int, plan: BlockPlan, longest: int
) -> str | None:
    """Why vLLM would not start, in its own meaning; None where it starts."""
    engine = deployment.engine
    split = check_parallel(deployment.model, deployment.parallel, engine)
    if split:
        return split[0]
    for group in deployment.model.layers:
        missing = missing_kernel(deployment.device, group.formats.default.compute_dtype)
        if missing is not None:
            return missing
    total = deployment.device.reported_memory_bytes
    if weights > total:
        return f"weights alone take {format_bytes(weights)} of the {format_bytes(total)} that the GPU reports"
    if available <= 0:
        return (
            f"no available memory for the cache blocks ({available / GIB:.2f} GiB): raise gpu_memory_utilization, "
            "lower max_num_seqs or max_num_batched_tokens, or use more GPUs"
        )
    if not plan.groups:
        return None
    if not plan.holds_one_request:
        return (
            f"max_model_len {engine.max_model_len} needs {plan.needed_bytes / GIB:.2f} GiB of KV cache, "
            f"{available / GIB:.2f} GiB is available; the estimated maximum model length is {longest}"
        )
    if (
        plan.has_states and engine.max_num_seqs > plan.num_blocks and not engine.enforce_eager
        and kv_rules(engine.version_tuple).seqs_within_states
    ):
        return (
            f"max_num_seqs {engine.max_num_seqs} exceeds the {plan.num_blocks} blocks available for states; "
            f"lower max_num_seqs to at most {plan.num_blocks}"
        )
    return None


def _overcommitted(deployment: Deployment, others: int, given: int) -> str | None:
    """Why a KV space that is given, not computed, runs out of memory; None where it is computed or has its place.

    others   weights, context and the peak of a full step
    """
    engine, total = deployment.engine, deployment.device.reported_memory_bytes
    flag = "kv_cache_memory_bytes" if engine.num_gpu_blocks_override is None else "num_gpu_blocks_override"
    if getattr(engine, flag) is None or others + given <= total:
        return None
    return (f"{flag}: a KV cache of {format_bytes(given)} beside {format_bytes(others)} of weights, activations and "
            f"context is more than the {format_bytes(total)} that the GPU reports; at most "
            f"{format_bytes(max(total - others, 0))} are left for it")


def _notes(deployment: Deployment) -> tuple[str, ...]:
    out = []
    if deployment.model.multimodal:
        out.append("the encoder's share of the profile run is not modelled")
    if (deployment.model.is_moe and deployment.parallel.attention_dp > 1 and deployment.engine.name == "vllm"
            and graphs_subtracted(deployment)):
        out.append(
            "with data-parallel experts vLLM's CUDA-graph estimate can be tens of GiB more than is used; "
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 turns it off")
    offloaded = max(offloaded_weight_bytes(
        deployment.model, deployment.parallel, deployment.engine.cpu_offload_bytes))
    if offloaded:
        out.append(f"{offloaded / GIB:.2f} GiB of weights per GPU stay in host memory and are read over the bus in "
                   "every step")
    return tuple(out)


def _pool_of_tokens(deployment: Deployment) -> MemoryBudget:
    """SGLang and TensorRT-LLM: one pool of tokens, sized by a fraction; activations share what is left over."""
    engine, parallel, model = deployment.engine, deployment.parallel, deployment.model
    total = deployment.device.reported_memory_bytes
    weights = _weights(deployment)
    reserved = round(constants()[engine.name]["reserved_gib"] * GIB)
    if parallel.tp > 1:
        reserved = max(reserved, non_torch_bytes(deployment))
    peaks: tuple[ActivationPeak, ...] = peak_activations(deployment)
    layers = max(p.layers for p in peaks)
    if engine.name == "sglang":
        usable = round(total * engine.gpu_memory_utilization)
        available = [usable - w - reserved for w in weights]
    else:
        usable = total
        available = [round((total - w - reserved - layers) * engine.gpu_memory_utilization) for w in weights]
    stage = min(range(len(available)), key=lambda i: available[i])
    room = available[stage] if engine.kv_cache_memory_bytes is None else engine.kv_cache_memory_bytes
    length = engine.max_model_len
    if engine.name == "trtllm":  # its pool keeps whole sequences, windows or not, unless max_attention_window is set
        per_request = length * kv_bytes_per_token(model, deployment.kv_format, parallel)
    else:
        per_request = kv_bytes_per_sequence(model, deployment.kv_format, length, parallel)
    per_request += state_bytes_per_sequence(model, parallel)
    if engine.num_gpu_blocks_override is not None:  # SGLang's --max-total-tokens: the pool is no larger
        room = min(room, round(per_request / length * engine.num_gpu_blocks_override * (engine.block_size or 1)))
    concurrency = max(room, 0) / per_request if per_request else 0.0
    tokens, size = int(concurrency * length), engine.block_size or 1
    split = check_parallel(model, parallel, engine)
    reason = split[0] if split else None
    if reason is None and room <= 0:
        flag = "mem-fraction-static" if engine.name == "sglang" else "free_gpu_memory_fraction"
        reason = f"not enough memory for the KV pool ({room / GIB:.2f} GiB): raise {flag} or use more GPUs"
    if reason is None and engine.num_gpu_blocks_override is None:
        reason = _overcommitted(deployment, weights[stage] + reserved + layers, room)
    capped = (f"requests are capped at the {tokens} tokens of the pool",) if 0 < tokens < length else ()
    return MemoryBudget(
        total_bytes=total, usable_bytes=usable, weight_bytes=weights[stage], activation_bytes=layers,
        activation_set_by="layers", runtime_bytes=reserved, cuda_graph_bytes=cuda_graph_bytes(deployment),
        cuda_graphs_subtracted=False, kv_cache_bytes=room, kv_cache_tokens=tokens, num_blocks=tokens // size,
        block_size=size, bytes_per_block=round(per_request / length * size), blocks_per_request=ceil(length / size),
        max_concurrency=concurrency, pools=parallel.dp * parallel.attention_dp, needed_bytes=round(per_request),
        longest_request_tokens=min(length, tokens), fits=reason is None, reason=reason, stage=stage,
        notes=_notes(deployment) + capped)
