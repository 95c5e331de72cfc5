"""What an engine's flags mean to bstar: keywords of `build_deployment`, and a list of what is not modelled.

A handler answers the settings that a flag sets; a flag without one, or whose value only a part of is
understood, is listed as it was written. Nothing is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from bstar.codec.engine_effects import matters
from bstar.codec.engine_flags import Argument
from bstar.codec.engine_values import engine_float, engine_int, max_model_len
from bstar.codec.masking import masked
from bstar.errors import ConfigError, SpecError
from bstar.specs.engine import CudagraphMode
from bstar.units import GIB

Settings = dict[str, Any]
# A handler gets the settings so far and the argument; it returns False where the flag has to be listed too.
Handler = Callable[[Settings, Argument], bool]

_INTEGERS = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "decode_context_parallel_size": "dcp", "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens", "block_size": "block_size",
    "num_gpu_blocks_override": "num_gpu_blocks_override", "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "long_prefill_token_threshold": "long_prefill_token_threshold", "max_cudagraph_capture_size": "cudagraph_max_size",
    "num_speculative_tokens": "num_speculative_tokens", "stream_interval": "stream_interval",
}  # fmt: skip
_SWITCHES = {
    "enable_prefix_caching": "enable_prefix_caching", "enable_chunked_prefill": "enable_chunked_prefill",
    "async_scheduling": "async_scheduling", "enforce_eager": "enforce_eager",
    "enable_expert_parallel": "enable_expert_parallel",
}  # fmt: skip
# Quantizations that the engine does while loading; the others say what the checkpoint already is.
ONLINE_QUANTIZATION = {
    "fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_channel": "fp8_channel", "fp8_per_block": "fp8_block",
    "mxfp8": "mxfp8", "nvfp4_per_token": "nvfp4", "int8_per_channel_weight_only": "w8a16",
}  # fmt: skip
_CHECKPOINT_QUANTIZATION = {
    "awq": "w4a16", "awq_marlin": "w4a16", "auto_awq": "w4a16", "gptq": "w4a16", "gptq_marlin": "w4a16",
    "auto_gptq": "w4a16", "modelopt_fp4": "nvfp4", "mxfp4": "mxfp4", "w8a8_fp8": "fp8_channel", "w8a8_int8": "int8",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "fp16": "fp16",
           "float32": "fp32", "float": "fp32"}  # fmt: skip


def integer(key: str) -> Handler:
    """A handler that stores a whole number under `key`."""

    def handle(settings: Settings, argument: Argument) -> bool:
        settings[key] = engine_int(_text(argument), field=_name(argument))
        return True

    return handle


def number(key: str) -> Handler:
    """A handler that stores a decimal number under `key`."""

    def handle(settings: Settings, argument: Argument) -> bool:
        settings[key] = engine_float(_text(argument), field=_name(argument))
        return True

    return handle


def truth(key: str, *, negate: bool = False) -> Handler:
    """A handler that stores a switch (or its opposite) under `key`."""

    def handle(settings: Settings, argument: Argument) -> bool:
        value = argument.value
        if isinstance(value, str):
            value = value.strip().lower() in ("true", "1", "yes")
        settings[key] = bool(value) != negate
        return True

    return handle


def text(key: str) -> Handler:
    """A handler that stores the value as written under `key`."""

    def handle(settings: Settings, argument: Argument) -> bool:
        settings[key] = _text(argument)
        return True

    return handle


def _elsewhere(settings: Settings, argument: Argument) -> bool:
    """A flag that names a file, read by `parse_command`."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What the arguments came to: settings, and as written what bstar does not model or the engine does not have.

    without_effect  the part of `unmodelled` that changes neither memory nor speed
    """

    settings: Settings = field(default_factory=dict)
    unmodelled: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def apply(handlers: Mapping[str, Handler], arguments: Iterable[Argument]) -> Applied:
    """The arguments' settings, the last of a flag winning; secrets are masked in what is kept as written."""
    out = Applied()
    for argument in arguments:
        if not argument.known:
            out.unknown.append(masked(argument.text))
            continue
        handler = handlers.get(argument.dest)
        if handler is None or not handler(out.settings, argument):
            out.unmodelled.append(masked(argument.text))
            if not matters(argument.dest):
                out.without_effect.append(out.unmodelled[-1])
    return out


def _name(argument: Argument) -> str:
    return argument.text.split(" ", 1)[0]


def _text(argument: Argument) -> str:
    if isinstance(argument.value, str):
        return argument.value
    raise ConfigError(f"{_name(argument)}: needs a value in the engine command; write {_name(argument)} VALUE")


def _length(settings: Settings, argument: Argument) -> bool:
    settings["max_model_len"] = max_model_len(_text(argument), field=_name(argument))
    return True


def _quantization(settings: Settings, argument: Argument) -> bool:
    method = _text(argument).lower()
    found = ONLINE_QUANTIZATION.get(method) or _CHECKPOINT_QUANTIZATION.get(method)
    if found is not None:
        settings["weight_dtype"] = found
    return found is not None


def _dtype(settings: Settings, argument: Argument) -> bool:
    name = _text(argument).lower()
    if name == "auto":
        return True
    if name not in _DTYPES:
        raise SpecError(f"--dtype: {name[:40]!r} is not known; use auto, {', '.join(_DTYPES)}")
    settings["dtype"] = _DTYPES[name]
    return True


def _policy(settings: Settings, argument: Argument) -> bool:
    value = _text(argument)
    if value not in ("fcfs", "priority"):
        return False
    settings["scheduling_policy"] = value
    return True


def _json_object(argument: Argument) -> dict[str, Any]:
    raw = _text(argument)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise ConfigError(f"{_name(argument)}: {masked(raw)[:60]!r} is not JSON; "
                          "quote it like '{\"key\": 1}'") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{_name(argument)}: must be a JSON object, is {masked(raw)[:60]!r}")
    return found


def _config_keys(settings: Settings, argument: Argument) -> bool:
    """Keys of config.json that the command replaces (--hf-overrides, SGLang's --json-model-override-args)."""
    settings["hf_overrides"] = settings.get("hf_overrides", {}) | _json_object(argument)
    return True


def _rope_scaling(settings: Settings, argument: Argument) -> bool:
    settings["hf_overrides"] = settings.get("hf_overrides", {}) | {"rope_scaling": _json_object(argument)}
    return True


def _rope_theta(settings: Settings, argument: Argument) -> bool:
    theta = engine_float(_text(argument), field=_name(argument))
    settings["hf_overrides"] = settings.get("hf_overrides", {}) | {"rope_theta": theta}
    return True


def _speculative(settings: Settings, argument: Argument) -> bool:
    options = _json_object(argument)
    tokens, method = options.get("num_speculative_tokens"), options.get("method")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        settings["num_speculative_tokens"] = tokens
    if isinstance(method, str):
        settings["speculative_method"] = method
    elif "model" in options:
        settings["speculative_method"] = _DRAFT_MODEL
    # The checkpoint's own head is modelled in memory (its acceptance is not); another draft model is not: list it.
    return (isinstance(method, str) and method.lower().endswith("mtp") and "num_speculative_tokens" in settings
            and "model" not in options)


_DRAFT_MODEL = "draft_model"


def _draft_model(settings: Settings, argument: Argument) -> bool:
    settings.setdefault("speculative_method", "ngram" if _text(argument) == "[ngram]" else _DRAFT_MODEL)
    return False  # its weights are not modelled: list it


def _speculative_method(settings: Settings, argument: Argument) -> bool:
    settings["speculative_method"] = _text(argument)
    return _text(argument).lower().endswith("mtp")


def _cpu_offload(settings: Settings, argument: Argument) -> bool:
    gib = engine_float(_text(argument), field=_name(argument))
    if gib < 0:
        raise SpecError(f"{_name(argument)}: must be at least 0 GiB, is {gib:g}")
    settings["cpu_offload_bytes"] = round(gib * GIB)
    return True


def _compilation(settings: Settings, argument: Argument) -> bool:
    value = _text(argument)
    if value.isdigit():
        return _optimization(settings, argument)
    options = _json_object(argument)
    sizes, largest = options.get("cudagraph_capture_sizes"), options.get("max_cudagraph_capture_size")
    if isinstance(sizes, list) and sizes and all(isinstance(s, int) for s in sizes):
        settings["cudagraph_max_size"] = max(sizes)
    if isinstance(largest, int) and not isinstance(largest, bool):
        settings["cudagraph_max_size"] = largest
    mode = str(options.get("cudagraph_mode", "")).lower()
    if mode == "none":
        settings["cudagraph_max_size"] = 0
    elif mode in get_args(CudagraphMode):
        settings["cudagraph_mode"] = mode
    return not set(options) - {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_mode"}


def _optimization(settings: Settings, argument: Argument) -> bool:
    if _text(argument) == "0":  # -O0: no compilation and no CUDA graphs
        settings["cudagraph_max_size"] = 0
        return True
    return _text(argument) == "2"  # the default level; others are listed


def capture_sizes(settings: Settings, argument: Argument) -> bool:
    """The largest of a list of CUDA-graph batch sizes."""
    values = argument.value if isinstance(argument.value, tuple) else (_text(argument),)
    sizes = [engine_int(part, field=_name(argument)) for v in values for part in v.replace(",", " ").split()]
    if sizes:
        settings["cudagraph_max_size"] = max(sizes)
    return bool(sizes)


def _performance(settings: Settings, argument: Argument) -> bool:
    settings["performance_mode"] = _text(argument)
    return _text(argument) in ("balanced", "throughput")


def _kv_dtype(settings: Settings, argument: Argument) -> bool:
    settings["kv_cache_dtype"] = _text(argument)
    return True


VLLM: dict[str, Handler] = {
    **{dest: integer(key) for dest, key in _INTEGERS.items()},
    **{dest: truth(key) for dest, key in _SWITCHES.items()},
    "model": text("model"), "gpu_memory_utilization": number("gpu_memory_utilization"),
    "max_model_len": _length, "kv_cache_dtype": _kv_dtype, "quantization": _quantization, "dtype": _dtype,
    "scheduling_policy": _policy, "speculative_config": _speculative, "compilation_config": _compilation,
    "optimization_level": _optimization, "cudagraph_capture_sizes": capture_sizes, "performance_mode": _performance,
    "speculative_model": _draft_model, "spec_model": _draft_model, "spec_method": _speculative_method,
    "spec_tokens": integer("num_speculative_tokens"), "cpu_offload_gb": _cpu_offload,
    "compilation_config_old": capture_sizes,
    "hf_overrides": _config_keys, "rope_scaling": _rope_scaling, "rope_theta": _rope_theta,
}  # fmt: skip

SGLANG: dict[str, Handler] = {
    "model_path": text("model"), "tp_size": integer("tp"), "pp_size": integer("pp"), "dp_size": integer("dp"),
    "ep_size": integer("ep"), "enable_dp_attention": truth("enable_dp_attention"),
    "mem_fraction_static": number("gpu_memory_utilization"), "max_running_requests": integer("max_num_seqs"),
    "chunked_prefill_size": integer("max_num_batched_tokens"), "context_length": _length,
    "page_size": integer("block_size"), "kv_cache_dtype": _kv_dtype,
    "disable_radix_cache": truth("enable_prefix_caching", negate=True),
    "disable_cuda_graph": truth("enforce_eager"), "cuda_graph_max_bs": integer("cudagraph_max_size"),
    "cuda_graph_bs": capture_sizes, "disable_overlap_schedule": truth("async_scheduling", negate=True),
    "quantization": _quantization, "dtype": _dtype, "max_total_tokens": integer("max_total_tokens"),
    "json_model_override_args": _config_keys, "stream_interval": integer("stream_interval"),
    "scheduler_recv_interval": integer("scheduler_recv_interval"), "max_prefill_tokens": integer("max_prefill_tokens"),
    "schedule_conservativeness": number("schedule_conservativeness"), "enable_mixed_chunk": truth("enable_mixed_chunk"),
}  # fmt: skip

TRTLLM: dict[str, Handler] = {
    "tp_size": integer("tp"), "pp_size": integer("pp"), "ep_size": integer("ep"),
    "max_batch_size": integer("max_num_seqs"), "max_num_tokens": integer("max_num_batched_tokens"),
    "max_seq_len": _length, "free_gpu_memory_fraction": number("gpu_memory_utilization"),
    "kv_cache_dtype": _kv_dtype, "enable_chunked_prefill": truth("enable_chunked_prefill"),
    "disable_kv_cache_reuse": truth("enable_prefix_caching", negate=True), "extra_llm_api_options": _elsewhere,
}  # fmt: skip

HANDLERS: dict[str, dict[str, Handler]] = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM}


_ALLOW_LONG = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")


def from_environment(words: Iterable[str], settings: Settings) -> None:
    """The environment variables of the engines that change what fits or what is allowed; the flags win."""
    for word in words:
        name, _, value = word.partition("=")
        is_on = value.strip().lower() not in ("0", "false", "")
        if name == "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS":
            settings.setdefault("estimate_cudagraph_memory", is_on)
        elif name == "VLLM_CPU_KVCACHE_SPACE" and value.strip().isdigit() and int(value):
            settings.setdefault("kv_cache_memory_bytes", int(value) * GIB)
        elif name in _ALLOW_LONG and is_on:
            settings["allow_long_max_model_len"] = True
