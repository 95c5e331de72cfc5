"""A Deployment from names and flags, each unset flag resolved to the engine version's default.

The rules follow vLLM's engine/arg_utils.py and config/ (0.32): what is unset depends on the device, the
model and the flags that are set; what contradicts itself is refused as the engine would refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from bstar.codec.engine_limits import batch_limits, check_figures, checked_block_size, max_model_len_of
from bstar.codec.masking import masked
from bstar.errors import SpecError
from bstar.specs.deployment import Deployment
from bstar.specs.engine import CudagraphMode, EngineSettings
from bstar.specs.formats import FP32, TensorFormat, kv_format, tensor_format
from bstar.specs.model import ModelSpec, WeightFormats
from bstar.specs.parallel import ParallelSpec

if TYPE_CHECKING:
    from bstar.catalog.engines import AttentionKind, EngineDefaults
    from bstar.specs.device import DeviceSpec


def build_deployment(
    model: str | ModelSpec,
    gpu: str | DeviceSpec,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    attention_dp: int = 1,
    ep: int | None = None,
    dcp: int = 1,
    enable_expert_parallel: bool = False,
    weight_dtype: str | None = None,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    model_overrides: Mapping[str, int] | None = None,
    gpu_memory_bytes: int | None = None,
    bandwidth_bytes_per_s: float | None = None,
    price_usd_per_hour: float | None = None,
    engine: str = "vllm",
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    block_size: int | None = None,
    enable_prefix_caching: bool | None = None,
    enable_chunked_prefill: bool | None = None,
    async_scheduling: bool | None = None,
    enforce_eager: bool = False,
    cudagraph_max_size: int | None = None,
    cudagraph_mode: CudagraphMode | None = None,
    long_prefill_token_threshold: int | None = None,
    scheduling_policy: Literal["fcfs", "priority"] | None = None,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_speculative_tokens: int = 0,
    speculative_method: str | None = None,
    cpu_offload_bytes: int = 0,
    estimate_cudagraph_memory: bool | None = None,
    stream_interval: int | None = None,
    scheduler_recv_interval: int = 1,
    max_prefill_tokens: int | None = None,
    schedule_conservativeness: float = 1.0,
    enable_mixed_chunk: bool = False,
    batch_wait_timeout_iters: int = 0,
    batch_wait_max_tokens_ratio: float = 0.0,
    hf_overrides: Mapping[str, Any] | None = None,
    allow_long_max_model_len: bool = False,
    performance_mode: str | None = None,
    strict_version: bool = True,
    unmodelled: Sequence[str] = (),
) -> Deployment:
    """One replica of `engine` ("vllm", "sglang@0.5.3", …) serving `model` on `gpu`.

    model, gpu              names (see `resolve_model`, `get_device`) or specs
    ep                      expert-parallel ranks; None: tp · attention_dp with `enable_expert_parallel`, else 1
    dp                      with vLLM and a MoE model this is attention_dp: the engine shares the experts
    dtype                   of unquantized tensors and of the cache: bf16, fp16, fp32
    strict_version          False: an engine version that is none, or too old, gets the nearest known defaults
    max_model_len           tokens; None the engine's default for the model, -1 that too (the caller fits it to the
                            memory)
    hf_overrides            keys that replace those of the model's config.json (vLLM's --hf-overrides)
    allow_long_max_model_len  accept a max_model_len beyond the config (VLLM_ALLOW_LONG_MAX_MODEL_LEN)
    gpu_memory_bytes, …     replace the catalog's figure of the device
    Raises SpecError, NotInCatalogError or ConfigError, each naming the flag and the remedy.
    """
    from bstar.catalog.devices import get_device, with_overrides
    from bstar.catalog.engines import engine_defaults
    from bstar.codec.resolve import resolve_model, with_weight_dtype

    if isinstance(model, str):
        spec = resolve_model(model, weight_dtype=weight_dtype, overrides=model_overrides,
                             config_overrides=hf_overrides)
    else:
        if hf_overrides:
            raise SpecError("hf_overrides: need the model's config; give the model by its name or path")
        spec = model if weight_dtype is None else with_weight_dtype(model, weight_dtype)
    if dtype is not None and dtype != "auto":
        spec = with_dtype(spec, dtype)
    check_figures(gpu_memory_bytes, bandwidth_bytes_per_s)
    device = with_overrides(
        get_device(gpu) if isinstance(gpu, str) else gpu, memory_bytes=gpu_memory_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s, price_usd_per_hour=price_usd_per_hour)
    spec, notes = _without_bf16(spec, device, asked=dtype)
    name, at, version = engine.partition("@")
    if at and not version:
        raise SpecError(f"engine: {engine!r} names no version after the @; say {name}@0.12.0, or {name} for the newest")
    kind = _attention_kind(spec)
    defaults = engine_defaults(
        name, version or None, device, world_size=max(1, tp * pp), attention_dp=max(1, attention_dp),
        mla=kind in ("mla", "sparse-mla"), strict=strict_version)
    parallel = _parallel(spec, defaults.engine, tp=tp, pp=pp, dp=dp, attention_dp=attention_dp, ep=ep, dcp=dcp,
                         enable_expert_parallel=enable_expert_parallel)
    length, of_length = max_model_len_of(spec, defaults, max_model_len, allow_longer=allow_long_max_model_len)
    notes += of_length
    chunked = defaults.chunked_prefill(length) if enable_chunked_prefill is None else enable_chunked_prefill
    seqs, budget = batch_limits(
        defaults, length, max_num_seqs, max_num_batched_tokens, chunked=chunked,
        factor=2 if performance_mode == "throughput" else 1)
    kv_name = kv_cache_dtype or "auto"
    kv_format(kv_name, model_dtype=spec.dtype)
    settings = EngineSettings(
        name=defaults.engine,  # type: ignore[arg-type]
        version=defaults.version,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=length,
        gpu_memory_utilization=(
            defaults.gpu_memory_utilization if gpu_memory_utilization is None else gpu_memory_utilization),
        block_size=(default_block_size(spec, defaults, kv_name) if block_size is None
                    else checked_block_size(defaults.engine, block_size)),
        kv_cache_dtype=kv_name,
        enable_prefix_caching=(
            defaults.prefix_caching(hybrid=_has_state(spec)) if enable_prefix_caching is None
            else enable_prefix_caching),
        enable_chunked_prefill=chunked,
        async_scheduling=defaults.async_scheduling if async_scheduling is None else async_scheduling,
        enforce_eager=enforce_eager,
        cudagraph_max_size=_cudagraph_max_size(
            defaults, seqs, budget, enforce_eager=enforce_eager, asked=cudagraph_max_size,
            query_tokens=1 + num_speculative_tokens),
        cudagraph_mode=defaults.cudagraph_mode if cudagraph_mode is None else cudagraph_mode,
        long_prefill_token_threshold=(
            defaults.long_prefill_token_threshold if long_prefill_token_threshold is None
            else long_prefill_token_threshold),
        scheduling_policy=scheduling_policy or defaults.scheduling_policy,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_speculative_tokens=num_speculative_tokens,
        speculative_method=speculative_method,
        cpu_offload_bytes=cpu_offload_bytes,
        estimate_cudagraph_memory=estimate_cudagraph_memory,
        stream_interval=defaults.stream_interval if stream_interval is None else stream_interval,
        scheduler_recv_interval=scheduler_recv_interval,
        max_prefill_tokens=max_prefill_tokens,
        schedule_conservativeness=schedule_conservativeness,
        enable_mixed_chunk=enable_mixed_chunk,
        batch_wait_timeout_iters=batch_wait_timeout_iters,
        batch_wait_max_tokens_ratio=batch_wait_max_tokens_ratio,
        unmodelled=tuple(masked(flag) for flag in unmodelled),
        config_overrides=json.dumps(dict(hf_overrides)) if hf_overrides else None,
        notes=notes,
    )
    settings = _with_speculation_note(settings)
    return Deployment(model=spec, device=device, parallel=parallel, engine=settings)


def _with_speculation_note(settings: EngineSettings) -> EngineSettings:
    if settings.num_speculative_tokens == 0:
        return settings
    note = ("the memory of the checkpoint's own prediction layers is counted, what they gain in speed is not"
            if settings.drafts_with_mtp else "neither the draft's memory nor what it gains in speed is counted")
    return replace(settings, notes=(*settings.notes, f"speculative decoding: {note}"))


def with_dtype(model: ModelSpec, dtype: str) -> ModelSpec:
    """`model` with its unquantized tensors in `dtype` ("bf16", "fp16", "fp32" or an engine's spelling)."""
    fmt = tensor_format(dtype)
    if fmt.is_quantized:
        raise SpecError(f"dtype: {dtype!r} is no dtype of unquantized tensors; use bf16, fp16 or fp32, "
                        "or --weight-dtype for quantized weights")
    if fmt.name == model.dtype:
        return model

    def plain(found: TensorFormat) -> TensorFormat:
        return found if found.is_quantized or found == FP32 else fmt

    def change(formats: WeightFormats) -> WeightFormats:
        return replace(formats, base=plain(formats.base), default=plain(formats.default),
                       overrides=tuple((name, plain(f)) for name, f in formats.overrides))

    return replace(
        model, dtype=fmt.name, layers=tuple(replace(g, formats=change(g.formats)) for g in model.layers),
        outer_formats=change(model.outer_formats), checkpoint_weight_bytes=None,
        blocks=tuple(replace(b, format=plain(b.format), formats=change(b.formats)) for b in model.blocks),
        weight_dtype=fmt.name if model.weight_dtype in ("bf16", "fp16") else model.weight_dtype)


def _without_bf16(model: ModelSpec, device: DeviceSpec, *, asked: str | None) -> tuple[ModelSpec, tuple[str, ...]]:
    """(model, notes): in fp16 on an NVIDIA device before Ampere, which has no bf16; vLLM (dtype auto) casts there.

    Raises SpecError where bf16 was asked for: the engine refuses.
    """
    capability = device.compute_capability
    if model.dtype != "bf16" or device.vendor.lower() != "nvidia" or capability is None or capability >= _BF16_SINCE:
        return model, ()
    if asked not in (None, "auto"):
        raise SpecError(f"dtype: {device.name} has no bf16 (compute capability {capability / 10:.1f}); "
                        "say --dtype half in the command, or leave it out")
    cast = replace(with_dtype(model, "fp16"), checkpoint_weight_bytes=model.checkpoint_weight_bytes)
    return cast, (f"{device.name} has no bf16: what is unquantized is cast to fp16, as the engine does",)


_BF16_SINCE = 80  # compute capability × 10


def _parallel(
    model: ModelSpec, engine: str, *, tp: int, pp: int, dp: int, attention_dp: int, ep: int | None, dcp: int,
    enable_expert_parallel: bool,
) -> ParallelSpec:
    """The layout as the engine makes it of its flags."""
    if model.is_moe and engine == "vllm" and dp > 1:
        if attention_dp > 1:
            raise SpecError("dp: give --dp or --attention-dp, not both: vLLM's --data-parallel-size of a MoE model "
                            "is data-parallel attention over shared experts")
        dp, attention_dp = 1, dp
    if attention_dp > 1 and engine == "vllm" and not model.is_moe:
        raise SpecError(f"attention_dp: {model.name} has no experts that ranks could share; say --dp {attention_dp} "
                        "for copies behind one endpoint")
    if engine in ("llamacpp", "transformers") and tp * attention_dp * dp > 1:
        raise SpecError(f"tp: {engine} holds layers on each GPU in turn; say --pp {tp * attention_dp * dp} instead")
    if engine == "trtllm" and attention_dp > 1 and tp > 1:
        raise SpecError("attention_dp: TensorRT-LLM's attention data parallelism (enable_attention_dp) is over all "
                        f"{tp * attention_dp} ranks; say --attention-dp {tp * attention_dp} --tp 1, or leave it out")
    if enable_expert_parallel and not model.is_moe and engine == "vllm":
        raise SpecError(f"enable_expert_parallel: {model.name} has no experts and vLLM refuses the flag; leave it out")
    if ep is None:
        ep = tp * attention_dp if enable_expert_parallel and model.is_moe else 1
    if ep > 1 and not model.is_moe:
        raise SpecError(f"ep: {model.name} has no experts to spread; leave --ep out")
    return ParallelSpec(tp=tp, pp=pp, dp=dp, attention_dp=attention_dp, ep=ep, dcp=dcp)


def _has_state(model: ModelSpec) -> bool:
    return any(e.kind == "state" for g in model.layers for e in g.mixer.cache())


def _attention_kind(model: ModelSpec) -> AttentionKind:
    """The kind that decides the engine's default KV block size."""
    entries = [e for g in model.layers for e in g.mixer.cache()]
    if any(e.tokens_per_entry > 1 for e in entries):
        return "compressed"
    if any(e.kind == "index" for e in entries):
        return "sparse-mla"
    return "mla" if any(e.kind == "latent" for e in entries) else "gqa"


def default_block_size(model: ModelSpec, defaults: EngineDefaults, kv_cache_dtype: str) -> int | None:
    """Tokens per KV block where no flag is given; None: the engine chooses."""
    # With state layers vLLM grows the attention block until its page is as large as a state.
    if _has_state(model) and defaults.engine == "vllm":
        return None
    asked = kv_cache_dtype == "auto" and model.kv_cache_dtype is not None
    cache = kv_format(model.kv_cache_dtype or "auto" if asked else kv_cache_dtype, model_dtype=model.dtype)
    return defaults.kv_block_size(_attention_kind(model), quantized_cache=cache.bits < 16)


def _cudagraph_max_size(
    defaults: EngineDefaults, max_num_seqs: int, max_num_batched_tokens: int, *, enforce_eager: bool,
    asked: int | None, query_tokens: int,
) -> int:
    if enforce_eager:
        return 0
    if asked is not None:
        return min(asked, max_num_batched_tokens)
    return defaults.cudagraph_max_size(max_num_seqs, max_num_batched_tokens, query_tokens=query_tokens)
