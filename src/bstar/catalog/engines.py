"""Engine defaults as data by version: what a server takes where its user sets no flag.

`engines/<engine>.toml` lists releases, each with what it changed; the defaults of a version are the sum of
the releases up to it. Where a default depends on the device (memory, name, vendor) it is a list of rules,
and the first that the device meets decides, as in the engine's own source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from bstar.catalog.engine_rules import engine_memory_bytes, ladder, meets, static_fraction
from bstar.errors import NotInCatalogError, SpecError
from bstar.specs.device import DeviceSpec
from bstar.specs.engine import CudagraphMode

ENGINES = ("vllm", "sglang", "trtllm", "llamacpp", "transformers")
_SPELLINGS = {
    "tensorrtllm": "trtllm", "trtllmserve": "trtllm", "tensorrt": "trtllm", "trt": "trtllm", "sgl": "sglang",
    "llamaserver": "llamacpp", "ggml": "llamacpp", "hf": "transformers", "huggingface": "transformers",
}  # fmt: skip
# "nightly-5b8c30d", "main", "0.1.dev20073" (what a build without tags calls itself); not "0.21.0rc1.dev3".
_DEVELOPMENT = re.compile(r"^(nightly|main|master|dev)\b|^0\.(0\.)?1\.dev")

Usage = Literal["server", "offline"]
AttentionKind = Literal["gqa", "mla", "sparse-mla", "compressed"]
MemoryRule = Literal["fraction-of-total", "static-fraction-of-free", "fraction-of-free-after-load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDefaults:
    """The settings that one engine version takes on one device where no flag is given.

    engine, version               as asked for (version: the newest known where none was)
    known_version                 the newest release of the data that `version` builds on
    max_num_seqs                  sequences in a step (SGLang: the least it sets; by KV space up to 4,096)
    max_num_batched_tokens        token budget of a step (SGLang: chunked prefill size)
    gpu_memory_utilization        fraction of what `memory_rule` names:
        "fraction-of-total"             of the device's memory, everything included (vLLM)
        "static-fraction-of-free"       of the memory free at start: weights and KV cache (SGLang)
        "fraction-of-free-after-load"   of the memory free after loading: KV cache alone (TensorRT-LLM)
    block_size                    tokens per KV block of plain attention; `kv_block_size` for other kinds
    cudagraph_mode                what is replayed from CUDA graphs (`EngineSettings.cudagraph_mode`)
    hybrid_prefix_caching         enable_prefix_caching's default holds for models with state layers too
    chunked_prefill_above_model_len   longer models chunk their prefill although it is off (vLLM's V0 engine)
    cudagraph_memory_subtracted   memory for CUDA graphs is left out of the KV space beforehand
    reserve_full_prompt           a request is admitted only where its whole prompt has room
    mixes_prefill_and_decode      one step may hold both (SGLang runs a prefill step by itself)
    source, note                  where the figures come from; what the reader should know (may be empty)
    """

    engine: str
    version: str
    known_version: str
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    memory_rule: MemoryRule
    block_size: int
    enable_prefix_caching: bool
    hybrid_prefix_caching: bool
    enable_chunked_prefill: bool
    chunked_prefill_above_model_len: int | None
    async_scheduling: bool
    cudagraph_memory_subtracted: bool
    cudagraph_cap: int
    cudagraph_mode: CudagraphMode
    long_prefill_token_threshold: int
    stream_interval: int
    scheduling_policy: Literal["fcfs", "priority"]
    reserve_full_prompt: bool
    mixes_prefill_and_decode: bool
    source: str
    note: str = ""
    cudagraph_rule: Mapping[str, Any] = field(hash=False, repr=False)
    block_size_rules: tuple[Mapping[str, Any], ...] = field(hash=False, repr=False)

    def kv_block_size(self, attention: AttentionKind = "gqa", *, quantized_cache: bool = False) -> int:
        """Tokens per KV block for an attention kind and cache, as the engine's default backend wants them.

        Hybrid models widen the block further, until a page holds a state: that depends on the model.
        """
        for rule in self.block_size_rules:
            if rule.get("attention", attention) == attention and rule.get("quantized_cache", quantized_cache) is (
                quantized_cache
            ):
                return int(rule["tokens"])
        return self.block_size

    def prefix_caching(self, *, hybrid: bool) -> bool:
        """Whether prefix caching is on where no flag is given; `hybrid`: the model has state layers."""
        return self.enable_prefix_caching and (self.hybrid_prefix_caching or not hybrid)

    def chunked_prefill(self, max_model_len: int) -> bool:
        """Whether prompts are split over steps where no flag is given, for a model of that length."""
        above = self.chunked_prefill_above_model_len
        return self.enable_chunked_prefill or (above is not None and max_model_len > above)

    def batch_limits(self, max_model_len: int) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens) for a model's length, both left to the engine.

        vLLM raises the budget to the model's length where prompts are not split; TensorRT-LLM does not, and
        refuses longer prompts.
        """
        tokens = self.max_num_batched_tokens
        if self.engine == "vllm":
            if not self.chunked_prefill(max_model_len):
                tokens = max(tokens, max_model_len)
            tokens = min(tokens, self.max_num_seqs * max_model_len)
        return min(self.max_num_seqs, tokens), tokens

    def cudagraph_sizes(
        self, max_num_seqs: int, max_num_batched_tokens: int, *, query_tokens: int = 1
    ) -> tuple[int, ...]:
        """Batch sizes captured as CUDA graphs, ascending, in tokens.

        query_tokens is the tokens of one sequence in a decode step (1 + speculative tokens).
        """
        rule = self.cudagraph_rule
        top = min(self.cudagraph_cap, max_num_batched_tokens)
        if rule["seqs_factor"]:
            top = min(top, max_num_seqs * query_tokens * rule["seqs_factor"])
        sizes = {size for size in rule["first"] if size <= top} | set(ladder(rule["steps"], top))
        extra = {"tokens": max_num_batched_tokens, "seqs": max_num_seqs, "cap": top}
        sizes.update(extra[name] for name in rule["include"] if 0 < extra[name] <= top)
        return tuple(sorted(sizes))

    def cudagraph_max_size(self, max_num_seqs: int, max_num_batched_tokens: int, *, query_tokens: int = 1) -> int:
        """The largest captured batch (0: none)."""
        return max(self.cudagraph_sizes(max_num_seqs, max_num_batched_tokens, query_tokens=query_tokens), default=0)


def engine_defaults(
    engine: str,
    version: str | None,
    device: DeviceSpec,
    *,
    usage: Usage = "server",
    world_size: int = 1,
    attention_dp: int = 1,
    mla: bool = False,
    strict: bool = True,
) -> EngineDefaults:
    """The defaults of `engine` at `version` (None: the newest known) on `device`.

    world_size is the ranks of one copy of the model: vLLM on a CPU and SGLang's memory fraction go by it;
    attention_dp and mla (latent attention) enter SGLang's memory fraction alone.
    A version newer than the data, and a development build, gets the newest defaults and says so in `note`.
    Raises NotInCatalogError for an unknown engine, SpecError for a version that is not one or older than the
    data; with strict=False (records that others wrote down) the nearest known release and a note instead.
    """
    name = engine_name(engine)
    data = _data(name)
    wanted = version or str(data["newest"])
    number, note = _known_version(data, name, wanted, strict=strict)
    merged: dict[str, Any] = {}
    for release in data["release"]:
        if parse_version(release["from"]) <= number:
            merged |= release
    memory_bytes = engine_memory_bytes(device, reported=data["unified_memory_reported"])

    def first(rules: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return next(rule for rule in rules if meets(rule, device, memory_bytes, world_size))

    batch = first(merged["batch"])
    ranks = world_size if batch.get("per_rank") else 1
    max_num_seqs, max_num_batched_tokens = (int(value) * ranks for value in batch[usage])
    cap = int(first(merged["cudagraph"]["cap"])["size"])
    if "static_fraction" in merged:
        fraction = static_fraction(
            merged["static_fraction"], memory_bytes=memory_bytes, tokens=max_num_batched_tokens, graph_size=cap,
            ranks=world_size, attention_dp=attention_dp, mla=mla,
        )  # fmt: skip
    else:
        fraction = float(merged["gpu_memory_utilization"])
    rules = tuple(r for r in merged["block_size"] if meets(r, device, memory_bytes, world_size))
    plain = (
        "enable_prefix_caching", "hybrid_prefix_caching", "enable_chunked_prefill", "async_scheduling",
        "cudagraph_memory_subtracted", "cudagraph_mode", "long_prefill_token_threshold", "stream_interval",
        "scheduling_policy", "reserve_full_prompt", "source",
    )  # fmt: skip
    return EngineDefaults(
        engine=name,
        version=wanted,
        known_version=merged["from"],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=fraction,
        memory_rule=data["memory_rule"],
        mixes_prefill_and_decode=data["mixes_prefill_and_decode"],
        block_size=next(int(r["tokens"]) for r in rules if "attention" not in r),
        block_size_rules=rules,
        cudagraph_cap=cap,
        cudagraph_rule=merged["cudagraph"],
        chunked_prefill_above_model_len=merged.get("chunked_prefill_above_model_len") or None,
        note=note,
        **{key: merged[key] for key in plain},
    )


def engine_name(text: str) -> str:
    """Canonical engine name, one of ENGINES. Raises NotInCatalogError."""
    key = re.sub(r"[^a-z]", "", text.lower())
    name = _SPELLINGS.get(key, key)
    if name not in ENGINES:
        close = difflib.get_close_matches(key, ENGINES, n=2, cutoff=0.5)
        raise NotInCatalogError("engine", text, suggestions=close, remedy=f"engines: {', '.join(ENGINES)}")
    return name


def parse_version(text: str) -> tuple[int, int, int]:
    """(0, 21, 0) of "0.21", "v0.21.0rc1", "0.21.0+cu129". Raises SpecError on anything else."""
    match = re.match(r"^v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", text.strip())
    if match is None:
        raise SpecError(f"engine version: {text!r} is not a version; write it like 0.32 or 0.32.0")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def engine_releases(engine: str) -> tuple[tuple[str, str], ...]:
    """(version, source) of every release whose defaults are known, oldest first."""
    return tuple((str(r["from"]), str(r["source"])) for r in _data(engine_name(engine))["release"])


def _known_version(
    data: Mapping[str, Any], name: str, wanted: str, *, strict: bool
) -> tuple[tuple[int, int, int], str]:
    """The version whose defaults answer for `wanted`, and what to tell the reader about it."""
    newest, oldest = data["newest"], data["release"][0]["from"]
    if _DEVELOPMENT.search(wanted.lower()):
        return parse_version(newest), f"{name} {wanted} is a development build: defaults of {newest}"
    try:
        number = parse_version(wanted)
    except SpecError:
        if strict:
            raise
        return parse_version(newest), f"{name} {wanted!r} is not a version: defaults of {newest}"
    if number > parse_version(newest):
        return number, f"{name} {wanted} is newer than the data: defaults of {newest}"
    if number < parse_version(oldest):
        if strict:
            raise SpecError(f"engine: {name} {wanted} is older than the data; {oldest} is the oldest version known")
        return parse_version(oldest), f"{name} {wanted} is older than the data: defaults of {oldest}"
    return number, ""


def engine_scheduling(engine: str) -> str:
    """The simulator's policy that schedules as `engine` does (`bstar.sim.policies`)."""
    return str(_data(engine_name(engine))["scheduling"])


@cache
def _data(engine: str) -> dict[str, Any]:
    text = (files("bstar.catalog") / "engines" / f"{engine}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
