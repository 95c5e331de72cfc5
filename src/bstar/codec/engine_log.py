"""Start-up logs of engines: what they loaded, what they left for the KV cache, why they did not start.

Wordings of vLLM 0.5 to 0.32 (V0 and V1 engines) and SGLang 0.3 to 0.5; a term that a log does not state is
None. Both engines write "GB" for 2**30 bytes. With several ranks the largest weights and the smallest KV
space count, because the engine takes the smallest for all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bstar.errors import ConfigError
from bstar.units import GIB

MAX_CHARACTERS = 16 << 20
_LONGEST_LINE = 4000  # the configuration line of vLLM has about 3,000 characters; what counts is at its start


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """Terms of one start, per GPU; bytes, tokens, blocks.

    activation_bytes         peak of the profiling run beyond the weights
    runtime_bytes            what is neither torch's nor the KV cache's (CUDA context, NCCL)
    consumed_bytes           weights + runtime where the log gives only their sum (vLLM ≥ 0.22)
    cudagraph_bytes          what capturing took; cudagraph_estimate_bytes what was reserved before
    failure                  the engine's own reason where it did not start
    settings                 flags that the log states, as keywords of `bstar.deployment`
    lines                    term -> the line it was read from
    """

    engine: str
    version: str | None = None
    model: str | None = None
    total_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    runtime_bytes: int | None = None
    consumed_bytes: int | None = None
    cudagraph_bytes: int | None = None
    cudagraph_estimate_bytes: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    needed_kv_cache_bytes: int | None = None
    estimated_max_model_len: int | None = None
    failure: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))
        object.__setattr__(self, "lines", MappingProxyType(dict(self.lines)))


@dataclass(frozen=True, slots=True)
class _Term:
    """One number of a log line: where it goes, how it is read, what several of them make."""

    name: str
    pattern: re.Pattern[str]
    read: Callable[[str], float]
    combine: Callable[[Any, Any], Any]


def _gib(text: str) -> int:
    return round(float(text) * GIB)


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _last(_old: Any, new: Any) -> Any:
    return new


def _sum(old: Any, new: Any) -> Any:
    return old + new


_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_COUNT = r"(\d[\d,]{0,17})"
_TABLE: tuple[tuple[str, str, Callable[[str], float], Callable[[Any, Any], Any]], ...] = (
    # weights. 0.5-0.7: "Loading model weights took 14.9888 GB"; 0.8: "Model loading took 14.9889 GB and 28.7
    # seconds"; 0.9+: "… GiB and …"; 0.13+: "… GiB memory and …"; SGLang: "Load weight end. … mem usage=15.0 GB"
    ("weight_bytes", rf"(?:Loading model weights|Model loading) took {_NUMBER} Gi?B", _gib, max),
    ("weight_bytes", rf"[Mm]odel weights take {_NUMBER} ?GiB", _gib, max),
    ("weight_bytes", rf"Load weight end\..*mem usage={_NUMBER} GB", _gib, max),
    # V0 profiling
    ("total_bytes", rf"total_gpu_memory \({_NUMBER} ?GiB\)", _gib, _last),
    ("total_bytes", rf"total_gpu_memory={_NUMBER} ?GiB", _gib, _last),
    ("gpu_memory_utilization", rf"gpu_memory_utilization \({_NUMBER}\)", float, _last),
    ("gpu_memory_utilization", rf"gpu_memory_utilization={_NUMBER}", float, _last),
    ("runtime_bytes", rf"non_torch_memory (?:takes )?{_NUMBER} ?GiB", _gib, max),
    ("runtime_bytes", rf"non_torch_memory={_NUMBER} ?GiB", _gib, max),
    ("activation_bytes", rf"PyTorch activation peak memory takes {_NUMBER} ?GiB", _gib, max),
    ("kv_cache_bytes", rf"reserved for KV Cache is {_NUMBER} ?GiB", _gib, min),
    ("kv_cache_bytes", rf"kv_cache_size={_NUMBER} ?GiB", _gib, min),
    # V1: "Actual usage is 14.99 GiB for weight, 1.2 GiB for peak activation, 0.1 GiB for non-torch memory, and
    # 0.56 GiB for CUDAGraph memory"; later "… GiB for consumed memory (weights + non-torch), …"
    ("total_bytes", rf"Free memory on device \S* ?\({_NUMBER}/{_NUMBER} GiB\) on startup", _gib, _last),
    ("gpu_memory_utilization", rf"Desired GPU memory utilization is \({_NUMBER},", float, _last),
    ("activation_bytes", rf"{_NUMBER} GiB for peak activation", _gib, max),
    ("runtime_bytes", rf"{_NUMBER} GiB for non-torch memory", _gib, max),
    ("consumed_bytes", rf"{_NUMBER} GiB for consumed memory", _gib, max),
    ("cudagraph_bytes", rf"{_NUMBER} GiB for CUDAGraph memory", _gib, max),
    ("kv_cache_bytes", rf"Available KV cache memory: {_NUMBER} Gi?B", _gib, min),
    ("kv_cache_bytes", rf"Explicitly set \({_NUMBER}/[\d.]+\) GiB for KV cache", _gib, min),  # vLLM on the CPU
    ("kv_cache_tokens", rf"KV cache size: {_COUNT} tokens", _count, min),
    ("num_blocks", rf"# (?i:gpu|cpu|cuda|xpu|hpu|tpu|rocm|neuron) blocks: {_COUNT}", _count, min),
    ("num_blocks", rf"num_gpu_blocks is: {_COUNT}", _count, min),
    ("num_blocks", rf"with num_gpu_blocks_override={_COUNT}", _count, _last),
    ("max_concurrency", rf"Maximum concurrency for {_COUNT} tokens per request: {_NUMBER}x", float, min),
    ("max_model_len", rf"Maximum concurrency for {_COUNT} tokens per request", _count, _last),
    ("cudagraph_bytes", rf"Graph capturing finished in {_NUMBER} secs?, took {_NUMBER} GiB", _gib, max),
    ("cudagraph_estimate_bytes", rf"Estimated CUDA graph memory: {_NUMBER} GiB", _gib, max),
    ("cudagraph_estimate_bytes", rf"CUDA graph pool memory: .*, {_NUMBER} GiB \(estimated\)", _gib, max),
    ("block_size", rf"Setting attention block size to {_COUNT} tokens", _count, _last),
    ("block_size", rf"block_size={_COUNT}\b", _count, _last),
    # failures
    ("max_model_len", rf"max seq len \({_COUNT}\)", _count, _last),
    ("needed_kv_cache_bytes", rf"\({_NUMBER} ?GiB KV cache is needed", _gib, max),
    ("kv_cache_bytes", rf"available KV cache memory \({_NUMBER} ?GiB\)", _gib, min),
    ("estimated_max_model_len", rf"estimated maximum model length is {_COUNT}", _count, min),
    ("kv_cache_tokens", rf"tokens that can be stored in KV cache \({_COUNT}\)", _count, min),
    # SGLang
    ("kv_cache_tokens", rf"KV Cache is allocated\..*#tokens: {_COUNT}", _count, min),
    ("kv_cache_tokens", rf"max_total_num_tokens={_COUNT}", _count, min),
    ("max_model_len", rf"context_len={_COUNT}", _count, _last),
    ("cudagraph_bytes", rf"Capture cuda graph end\..*mem usage={_NUMBER} GB", _gib, max),
)
_TERMS = tuple(_Term(n, re.compile(p), r, c) for n, p, r, c in _TABLE)
# K and V are logged apart; a latent cache as one "KV size".
_SGLANG_KV = re.compile(
    rf"KV Cache is allocated\..*?(?:K size: {_NUMBER} GB, V size: {_NUMBER} GB|KV size: {_NUMBER} GB)")

_VERSION = (
    re.compile(r"Initializing (?:a V1 |an |a V0 )?LLM engine \(v([^)]+)\)"),
    re.compile(r"vLLM API server version v?(\S+)"),
    re.compile(r"\] .*\bversion v?(\d+\.\d+\S*)\s*$"),
)
_MODEL = re.compile(r"with config: (?:VllmConfig\()?model='([^']+)'|\bmodel_path='([^']+)'|\s{2,}model\s+(\S+)\s*$")
_ARGS = re.compile(r"(?:non-default args|args): (\{.*\})")
_NAMESPACE = re.compile(r"\bargs: Namespace\((.*)\)")
_CONFIG = re.compile(r"LLM engine \(v[^)]*\) with config: (.*)")
_PAIR = re.compile(r"\b(\w+)=('[^']*'|[\w.\-]+)")
_FAILURES = (
    re.compile(r"(No available memory for the cache blocks\..*)"),
    re.compile(r"(To serve at least one request with the model'?s'?s? max seq len.*)"),
    re.compile(r"(The model's max seq len \(\d+\) is larger than the maximum number of tokens.*)"),
    re.compile(r"(Free memory on device .*is less than desired GPU memory utilization.*)"),
    re.compile(r"(max_num_seqs .* exceeds available Mamba cache blocks.*)"),
    re.compile(r"((?:torch\.|torch\.cuda\.)?OutOfMemoryError: .*|CUDA out of memory\..*)"),
    re.compile(r"(Not enough memory\. Please try to increase --mem-fraction-static.*)"),
)  # fmt: skip
_SETTINGS = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "max_model_len": "max_model_len", "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens", "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_dtype": "kv_cache_dtype", "block_size": "block_size", "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching", "enable_chunked_prefill": "enable_chunked_prefill",
    "async_scheduling": "async_scheduling", "num_gpu_blocks_override": "num_gpu_blocks_override",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes", "enable_expert_parallel": "enable_expert_parallel",
}  # fmt: skip
# The engine's configuration line has every value as resolved, under names of its own.
_CONFIG_SETTINGS = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "max_seq_len": "max_model_len", "kv_cache_dtype": "kv_cache_dtype", "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching", "chunked_prefill_enabled": "enable_chunked_prefill",
    "enable_chunked_prefill": "enable_chunked_prefill", "quantization": "weight_dtype", "dtype": "dtype",
}  # fmt: skip
_CONFIG_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_PREFIX = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:\([^)]*pid=\d+\)\s*)?(?:\x1b\[[0-9;]*m)*")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def parse_log(text: str) -> EngineLog:
    """The terms that a start-up log states. Raises ConfigError where none of its lines is an engine's."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"log: {len(text)} characters are more than a start-up log; cut it to the start")
    found: dict[str, Any] = {}
    lines: dict[str, str] = {}
    settings: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    for line in _lines_of_last_start(text):
        _read_terms(line, found, lines)
        _read_identity(line, found, settings)
        resolved |= _resolved_settings(line)
    if not lines and "failure" not in found and "version" not in found:
        raise ConfigError("log: no line of a vLLM or SGLang start-up log is in it; give the log from the first line "
                          "to the one that says the server is up")
    if "Explicitly set" in lines.get("kv_cache_bytes", ""):
        settings["kv_cache_memory_bytes"] = found["kv_cache_bytes"]
    if "max_model_len" in found:
        resolved.setdefault("max_model_len", found["max_model_len"])
    settings = resolved | settings
    engine = found.pop("engine", None) or ("sglang" if _is_sglang(lines) else "vllm")
    return EngineLog(engine=engine, settings=settings, lines=lines, **found)


def _lines_of_last_start(text: str) -> Iterator[str]:
    """The lines from the last server start on (a log may hold several)."""
    lines = [line[:_LONGEST_LINE] for line in _ANSI.sub("", text).splitlines()]
    starts = [i for i, line in enumerate(lines) if "non-default args:" in line
              or "args: Namespace(" in line or "server_args=ServerArgs(" in line]
    yield from lines[starts[-1] if len(starts) > 1 else 0:]


def _read_terms(line: str, found: dict[str, Any], lines: dict[str, str]) -> None:
    for term in _TERMS:
        match = term.pattern.search(line)
        if match is None:
            continue
        value = term.read(match.group(match.lastindex or 1))
        old = found.get(term.name)
        # "Available KV cache memory" repeats in later messages; an earlier, exact term is not blurred by them.
        found[term.name] = value if old is None else term.combine(old, value)
        lines.setdefault(term.name, _PREFIX.sub("", line).strip()[:400])
    kv = _SGLANG_KV.search(line)
    if kv is not None:
        size = sum(_gib(g) for g in kv.groups() if g is not None)
        found["kv_cache_bytes"] = min(found.get("kv_cache_bytes", size), size)
        lines.setdefault("kv_cache_bytes", line.strip()[:400])


def _read_identity(line: str, found: dict[str, Any], settings: dict[str, Any]) -> None:
    for pattern in _VERSION:
        match = pattern.search(line)
        if match is not None:
            found["version"] = match.group(1).rstrip(",;")
            found.setdefault("engine", "vllm")
    model = _MODEL.search(line)
    if model is not None:
        found["model"] = next(g for g in model.groups() if g is not None)
    if "server_args=ServerArgs(" in line:
        found["engine"] = "sglang"
        settings.update(_sglang_settings(line))
    arguments = _ARGS.search(line)
    if arguments is not None:
        settings.update(_vllm_settings(arguments.group(1), found))
    namespace = _NAMESPACE.search(line)
    if namespace is not None:
        given = {m.group(1): _literal(m.group(2)) for m in _PAIR.finditer(namespace.group(1))}
        settings.update({_SETTINGS[k]: v for k, v in given.items()
                         if k in _SETTINGS and isinstance(v, bool | int | float | str)})
        if isinstance(given.get("model"), str):
            found.setdefault("model", given["model"])
    for pattern in _FAILURES:
        match = pattern.search(line)
        if match is not None and "failure" not in found:
            found["failure"] = " ".join(match.group(1).split())[:600]


def _resolved_settings(line: str) -> dict[str, Any]:
    """What vLLM's configuration line says: weaker than the flags, but there where a log has no flags."""
    config = _CONFIG.search(line)
    if config is None:
        return {}
    from bstar.codec.engine_settings import ONLINE_QUANTIZATION

    out: dict[str, Any] = {}
    for match in _PAIR.finditer(config.group(1)):
        key, value = _CONFIG_SETTINGS.get(match.group(1)), _literal(match.group(2))
        if key == "dtype":
            value = _CONFIG_DTYPES.get(str(value))
        elif key == "weight_dtype":
            value = ONLINE_QUANTIZATION.get(str(value))  # others are what the checkpoint is
        if key is not None and value not in (None, "auto") and isinstance(value, bool | int | float | str):
            out.setdefault(key, value)
    return out


def _vllm_settings(text: str, found: dict[str, Any]) -> dict[str, Any]:
    """Flags of a "non-default args: {…}" line; values that are no plain literals are left out."""
    try:
        raw = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raw = {m.group(1): _literal(m.group(2)) for m in re.finditer(r"'(\w+)': ('[^']*'|[\w.\-]+)", text)}
    if not isinstance(raw, dict):
        return {}
    for key in ("model", "model_tag"):
        if isinstance(raw.get(key), str):
            found["model"] = raw[key]
    return {_SETTINGS[k]: v for k, v in raw.items()
            if k in _SETTINGS and isinstance(v, bool | int | float | str)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _sglang_settings(line: str) -> dict[str, Any]:
    names = {"tp_size": "tp", "pp_size": "pp", "mem_fraction_static": "gpu_memory_utilization",
             "max_running_requests": "max_num_seqs", "context_length": "max_model_len", "page_size": "block_size",
             "chunked_prefill_size": "max_num_batched_tokens", "kv_cache_dtype": "kv_cache_dtype", "ep_size": "ep"}
    given = {m.group(1): _literal(m.group(2)) for m in re.finditer(r"\b(\w+)=('[^']*'|-?[\w.]+)", line)}
    return {names[k]: v for k, v in given.items()
            if k in names and isinstance(v, int | float | str) and v not in ("None", "auto")}


def _is_sglang(lines: Mapping[str, str]) -> bool:
    return any("KV Cache is allocated" in t or "max_total_num_tokens" in t or "Load weight end" in t
               for t in lines.values())
