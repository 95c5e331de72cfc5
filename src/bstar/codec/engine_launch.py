"""The launch command of a deployment, for each engine: what differs from the engine version's defaults."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from bstar.codec.build import default_block_size
from bstar.codec.engine_settings import ONLINE_QUANTIZATION
from bstar.errors import SpecError
from bstar.specs.deployment import Deployment
from bstar.units import GIB

if TYPE_CHECKING:
    from bstar.catalog.engines import EngineDefaults

# Before it the flag was --cuda-graph-sizes.
_CAPTURE_SIZE_SINCE = (0, 12, 0)
_OVERRIDES = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
_ALLOW_LONGER = {
    "vllm": ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",), "sglang": ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",),
}  # fmt: skip
_ONLINE = {fmt: method for method, fmt in reversed(ONLINE_QUANTIZATION.items())}


def format_command(deployment: Deployment, *, model: str | None = None) -> str:
    """The command that launches `deployment`, on one line.

    model   what to serve; default: what the model was asked for by, the catalog entry's Hub id, or its name. A
            weight format that the engine cannot make while loading is left as a comment: it needs a checkpoint of
            its own.
    """
    online, comment = _quantization(deployment)
    name = model or deployment.model.served_as or _hub_id(deployment.model.name)
    if comment is not None and model is None:
        checkpoint = _checkpoint_of(deployment.model.name, deployment.model.weight_dtype)
        name, comment = (checkpoint, None) if checkpoint is not None else (name, comment)
    if deployment.engine.name == "transformers":
        return f"# model.generate() of {name} on batches of {deployment.engine.max_num_seqs} prompts"
    builders = {"llamacpp": _llamacpp, "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
    words = builders[deployment.engine.name](deployment, name)
    if online is not None:
        words += ["--quantization", online]
    if deployment.engine.estimate_cudagraph_memory is not None and deployment.engine.name == "vllm":
        words.insert(0, f"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS={int(deployment.engine.estimate_cudagraph_memory)}")
    if deployment.engine.notes and deployment.engine.max_model_len > deployment.model.max_context_tokens:
        words = [*_ALLOW_LONGER.get(deployment.engine.name, ()), *words]
    if deployment.engine.config_overrides and deployment.engine.name in _OVERRIDES:
        words += [_OVERRIDES[deployment.engine.name], deployment.engine.config_overrides]
    words += deployment.engine.unmodelled
    if deployment.engine.name == "trtllm" and deployment.parallel.attention_dp > 1:
        remark = "with `enable_attention_dp: true` in the file of --extra_llm_api_options"
        comment = remark if comment is None else f"{comment}; {remark}"
    command = " ".join(word if " " in word and word.startswith("-") else shlex.quote(word) for word in words)
    return f"{command}  # {comment}" if comment else command


def _hub_id(name: str) -> str:
    """The Hub id of a catalog model; a name that says its own quantization stays as it is."""
    from bstar.catalog.models import get_entry

    entry = get_entry(name)
    return entry.hub_id if entry is not None and entry.weight_format_hint is None else name


def _checkpoint_of(name: str, weight_dtype: str) -> str | None:
    """The Hub id of a catalog entry that is `name` stored as `weight_dtype`, where there is one."""
    from bstar.catalog.models import get_entry

    entry = get_entry(f"{name}-{weight_dtype}")
    return entry.hub_id if entry is not None and entry.weight_format_hint is None and entry.id != name else None


def _quantization(deployment: Deployment) -> tuple[str | None, str | None]:
    """(--quantization value, remark) where the weights are not as the checkpoint stores them."""
    wanted = deployment.model.weight_dtype
    if deployment.model.converted_from is None or wanted in ("bf16", "fp16"):
        return None, None
    # Engines quantize while loading from 16-bit weights only, and 4 bits only with a calibrated checkpoint.
    plain = deployment.model.converted_from in ("bf16", "fp16", "fp32") and wanted != "nvfp4"
    method = _ONLINE.get(wanted) if plain and deployment.engine.name == "vllm" else None
    if plain and deployment.engine.name == "sglang" and wanted == "fp8":
        method = "fp8"
    return (method, None) if method is not None else (None, f"needs a {wanted} checkpoint")


def _llamacpp(d: Deployment, model: str) -> list[str]:
    """A slot has its share of the context: -c is for all of them."""
    engine = d.engine
    return ["llama-server", "-hf", model, "-np", str(engine.max_num_seqs),
            "-c", str(engine.max_num_seqs * engine.max_model_len), "-b", str(engine.max_num_batched_tokens)]


def _vllm(d: Deployment, model: str) -> list[str]:
    from bstar.catalog.engines import engine_defaults

    e, p = d.engine, d.parallel
    defaults = engine_defaults(e.name, e.version, d.device, world_size=p.tp * p.pp, strict=False)
    words = ["vllm", "serve", model]
    dp = p.dp * p.attention_dp
    for flag, value in (("tensor-parallel-size", p.tp), ("pipeline-parallel-size", p.pp),
                        ("data-parallel-size", dp), ("decode-context-parallel-size", p.dcp)):
        if value > 1:
            words += [f"--{flag}", str(value)]
    if p.ep > 1:
        if p.ep != p.tp * p.attention_dp:
            raise SpecError(f"ep: vLLM spreads experts over all tp · dp = {p.tp * p.attention_dp} ranks or none, "
                            f"not over {p.ep}")
        words.append("--enable-expert-parallel")
    words += ["--max-model-len", str(e.max_model_len), "--max-num-seqs", str(e.max_num_seqs),
              "--max-num-batched-tokens", str(e.max_num_batched_tokens),
              "--gpu-memory-utilization", f"{e.gpu_memory_utilization:g}"]
    if e.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", e.kv_cache_dtype]
    if e.block_size is not None and e.block_size != default_block_size(d.model, defaults, e.kv_cache_dtype):
        words += ["--block-size", str(e.block_size)]
    for name, wanted, default in (
        ("enable-prefix-caching", e.enable_prefix_caching, defaults.enable_prefix_caching),
        ("enable-chunked-prefill", e.enable_chunked_prefill, defaults.enable_chunked_prefill),
        ("async-scheduling", e.async_scheduling, defaults.async_scheduling),
    ):
        if wanted != default:
            words.append(f"--{name}" if wanted else f"--no-{name}")
    words += _vllm_graphs(d, defaults)
    if e.long_prefill_token_threshold != defaults.long_prefill_token_threshold:
        words += ["--long-prefill-token-threshold", str(e.long_prefill_token_threshold)]
    if e.stream_interval != defaults.stream_interval:
        words += ["--stream-interval", str(e.stream_interval)]
    if e.scheduling_policy != defaults.scheduling_policy:
        words += ["--scheduling-policy", e.scheduling_policy]
    if e.num_gpu_blocks_override is not None:
        words += ["--num-gpu-blocks-override", str(e.num_gpu_blocks_override)]
    if e.kv_cache_memory_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(e.kv_cache_memory_bytes)]
    if e.cpu_offload_bytes:
        words += ["--cpu-offload-gb", f"{e.cpu_offload_bytes / GIB:g}"]
    if e.drafts_with_mtp and not any(flag.startswith("--speculative-config") for flag in e.unmodelled):
        config = {"method": e.speculative_method or "mtp", "num_speculative_tokens": e.num_speculative_tokens}
        words += ["--speculative-config", json.dumps(config)]
    return words


def _vllm_graphs(d: Deployment, defaults: EngineDefaults) -> list[str]:
    from bstar.catalog.engines import parse_version

    e = d.engine
    if e.enforce_eager:
        return ["--enforce-eager"]
    default = defaults.cudagraph_max_size(
        e.max_num_seqs, e.max_num_batched_tokens, query_tokens=1 + e.num_speculative_tokens)
    if e.cudagraph_max_size == 0 and default:
        return ["--compilation-config", '{"cudagraph_mode": "NONE"}']
    words = []
    if e.cudagraph_mode != defaults.cudagraph_mode:
        words += ["--compilation-config", json.dumps({"cudagraph_mode": e.cudagraph_mode.upper()})]
    if e.cudagraph_max_size != default:
        new = parse_version(defaults.known_version) >= _CAPTURE_SIZE_SINCE
        words += ["--max-cudagraph-capture-size" if new else "--cuda-graph-sizes", str(e.cudagraph_max_size)]
    return words


def _sglang(d: Deployment, model: str) -> list[str]:
    e, p = d.engine, d.parallel
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    ranks = p.tp * p.attention_dp
    if ranks > 1:
        words += ["--tp-size", str(ranks)]
    if p.pp > 1:
        words += ["--pp-size", str(p.pp)]
    if p.attention_dp > 1:
        words += ["--dp-size", str(p.attention_dp), "--enable-dp-attention"]
    elif p.dp > 1:
        words += ["--dp-size", str(p.dp)]
    if p.ep > 1:
        words += ["--ep-size", str(p.ep)]
    words += ["--context-length", str(e.max_model_len), "--max-running-requests", str(e.max_num_seqs),
              "--chunked-prefill-size", str(e.max_num_batched_tokens if e.enable_chunked_prefill else -1),
              "--mem-fraction-static", f"{e.gpu_memory_utilization:g}"]
    if e.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", "fp8_e4m3" if e.kv_cache_dtype == "fp8" else e.kv_cache_dtype]
    if e.block_size not in (None, 1):
        words += ["--page-size", str(e.block_size)]
    if not e.enable_prefix_caching:
        words.append("--disable-radix-cache")
    if not e.async_scheduling:
        words.append("--disable-overlap-schedule")
    if e.enforce_eager:
        words.append("--disable-cuda-graph")
    if e.num_gpu_blocks_override is not None:
        words += ["--max-total-tokens", str(e.num_gpu_blocks_override * (e.block_size or 1))]
    return words + _sglang_scheduler(d)


def _sglang_scheduler(d: Deployment) -> list[str]:
    e = d.engine
    words = ["--enable-mixed-chunk"] if e.enable_mixed_chunk else []
    for flag, value, default in (
        ("max-prefill-tokens", e.max_prefill_tokens, None), ("stream-interval", e.stream_interval, 1),
        ("scheduler-recv-interval", e.scheduler_recv_interval, 1),
        ("schedule-conservativeness", e.schedule_conservativeness, 1.0),
    ):
        if value != default:
            words += [f"--{flag}", f"{value:g}"]
    return words


def _trtllm(d: Deployment, model: str) -> list[str]:
    e, p = d.engine, d.parallel
    words = ["trtllm-serve", "serve", model]
    ranks = p.tp * p.attention_dp
    for flag, value in (("tp_size", ranks), ("pp_size", p.pp), ("ep_size", p.ep)):
        if value > 1:
            words += [f"--{flag}", str(value)]
    words += ["--max_batch_size", str(e.max_num_seqs), "--max_num_tokens", str(e.max_num_batched_tokens),
              "--max_seq_len", str(e.max_model_len),
              "--kv_cache_free_gpu_memory_fraction", f"{e.gpu_memory_utilization:g}"]
    if e.kv_cache_dtype != "auto":
        words += ["--kv_cache_dtype", e.kv_cache_dtype]
    return words
