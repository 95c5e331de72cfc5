"""Engine settings: the flags of one server, resolved (no None where the engine has a default)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from bstar.errors import SpecError

EngineName = Literal["vllm", "sglang", "trtllm", "llamacpp", "transformers"]
CudagraphMode = Literal["full_and_piecewise", "full_decode_only", "piecewise", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the scheduler and the memory manager of one engine instance are told.

    gpu_memory_utilization  fraction of the reported memory the engine may take (vLLM), or of what is
                            free after loading (SGLang, TensorRT-LLM: `memory_rule`)
    max_num_batched_tokens  token budget of one step
    block_size              tokens per KV block; None: the engine chooses (hybrid models)
    cudagraph_max_size      largest captured batch; 0 with enforce_eager
    cudagraph_mode          what is replayed: decode steps whole and others in pieces between their attentions, decode
                            steps alone, all steps in pieces, nothing
    num_gpu_blocks_override / kv_cache_memory_bytes  take the KV space from here instead of profiling
    estimate_cudagraph_memory  whether CUDA-graph memory is estimated and taken from the KV space
                            (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); None: as the version does
    speculative_method      what drafts where num_speculative_tokens is set, as the engine names it ("mtp",
                            "ngram", "eagle3", …); None: the checkpoint's own prediction layers
    cpu_offload_bytes       weights of each GPU that stay in host memory and are read over the bus every step
                            (vLLM --cpu-offload-gb)
    stream_interval         tokens between two messages to the client
    scheduler_recv_interval SGLang: decode steps between two looks at newly arrived requests
    max_prefill_tokens      SGLang: prompt tokens of a step, for all but its first prompt; None: the engine's default
    schedule_conservativeness  SGLang: share of the running answers' room that admission keeps free, times 0.7
    enable_mixed_chunk      SGLang: decoding requests ride along in prompt steps
    batch_wait_timeout_iters, batch_wait_max_tokens_ratio   TensorRT-LLM: prompts wait for up to so many steps until
                            those that wait fill this share of max_num_batched_tokens (0: they do not wait)
    unmodelled              flags that were given and that bstar does not model, as written
    config_overrides        JSON of the keys that replace the model's config (--hf-overrides), already applied
    notes                   what the engine would say of these settings, one line each
    """

    name: EngineName = "vllm"
    version: str = "0.32.0"
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory_utilization: float = 0.92
    block_size: int | None = 16
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    enforce_eager: bool = False
    cudagraph_max_size: int = 512
    cudagraph_mode: CudagraphMode = "full_and_piecewise"
    long_prefill_token_threshold: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_speculative_tokens: int = 0
    estimate_cudagraph_memory: bool | None = None
    speculative_method: str | None = None
    cpu_offload_bytes: int = 0
    stream_interval: int = 1
    scheduler_recv_interval: int = 1
    max_prefill_tokens: int | None = None
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    unmodelled: tuple[str, ...] = ()
    config_overrides: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}: must be a whole number of at least 1, is {value!r}")
        for name, least in (
            ("cudagraph_max_size", 0), ("long_prefill_token_threshold", 0), ("num_speculative_tokens", 0),
            ("cpu_offload_bytes", 0), ("num_gpu_blocks_override", 1), ("kv_cache_memory_bytes", 1),
            ("stream_interval", 1), ("scheduler_recv_interval", 1), ("max_prefill_tokens", 1),
            ("batch_wait_timeout_iters", 0), ("schedule_conservativeness", 0), ("batch_wait_max_tokens_ratio", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(f"{name}: must be at least {least}, is {value}")
        if self.cudagraph_mode not in get_args(CudagraphMode):
            raise SpecError(f"cudagraph_mode: must be one of {', '.join(get_args(CudagraphMode))}, "
                            f"is {self.cudagraph_mode!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SpecError(f"gpu_memory_utilization: must be in (0, 1], is {self.gpu_memory_utilization}")
        if self.block_size is not None and self.block_size < 1:
            raise SpecError(f"block_size: must be at least 1, is {self.block_size}")

    @property
    def drafts_with_mtp(self) -> bool:
        """Whether the checkpoint's prediction layers are loaded to draft tokens."""
        method = (self.speculative_method or "mtp").lower()
        return self.num_speculative_tokens > 0 and (method.endswith("mtp") or method == "nextn")

    @property
    def version_tuple(self) -> tuple[int, ...]:
        """(0, 32, 0); empty where the version is not a dotted number."""
        return _numbers(self.version)


@lru_cache(maxsize=64)
def _numbers(version: str) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
