"""Engine defaults as data by version: what a server takes where its user sets no flag.

`engines/<engine>.toml` lists releases, each with what it changed; the defaults of a version are the sum of
the releases up to it. Where a default depends on the device (memory, name, vendor) it is a list of rules,
and the first that the device meets decides, as in the engine's own source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, Literal

from bstar.errors import NotInCatalogError, SpecError
from bstar.specs.device import DeviceSpec
from bstar.units import GIB, MIB

ENGINES = ("vllm", "sglang", "trtllm")
_SPELLINGS = {"tensorrtllm": "trtllm", "trtllmserve": "trtllm", "tensorrt": "trtllm", "trt": "trtllm", "sgl": "sglang"}

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
    hybrid_prefix_caching         enable_prefix_caching's default holds for models with state layers too
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
    async_scheduling: bool
    cudagraph_memory_subtracted: bool
    cudagraph_cap: int
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

    def batch_limits(self, max_model_len: int) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens) for a model's length, both left to the engine."""
        tokens = self.max_num_batched_tokens
        if self.engine == "vllm":
            if not self.enable_chunked_prefill:
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
        sizes = {size for size in rule["first"] if size <= top} | set(_ladder(rule["steps"], top))
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
) -> EngineDefaults:
    """The defaults of `engine` at `version` (None: the newest known) on `device`.

    world_size is the ranks of one copy of the model: vLLM on a CPU and SGLang's memory fraction go by it;
    attention_dp and mla (latent attention) enter SGLang's memory fraction alone.
    Raises NotInCatalogError for an unknown engine, SpecError for a version that is not a number or older
    than the data. A version newer than the data gets the newest defaults and says so in `note`.
    """
    name = engine_name(engine)
    data = _data(name)
    wanted = version or str(data["newest"])
    merged = _merged(data, name, wanted)
    memory_bytes = _engine_memory_bytes(device, reported=data["unified_memory_reported"])

    def first(rules: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return next(rule for rule in rules if _meets(rule, device, memory_bytes, world_size))

    batch = first(merged["batch"])
    ranks = world_size if batch.get("per_rank") else 1
    max_num_seqs, max_num_batched_tokens = (int(value) * ranks for value in batch[usage])
    cap = int(first(merged["cudagraph"]["cap"])["size"])
    if "static_fraction" in merged:
        fraction = _static_fraction(
            merged["static_fraction"], memory_bytes=memory_bytes, tokens=max_num_batched_tokens, graph_size=cap,
            ranks=world_size, attention_dp=attention_dp, mla=mla,
        )  # fmt: skip
    else:
        fraction = float(merged["gpu_memory_utilization"])
    rules = tuple(r for r in merged["block_size"] if _meets(r, device, memory_bytes, world_size))
    newer = parse_version(wanted) > parse_version(data["newest"])
    plain = (
        "enable_prefix_caching", "hybrid_prefix_caching", "enable_chunked_prefill", "async_scheduling",
        "cudagraph_memory_subtracted", "long_prefill_token_threshold", "stream_interval", "scheduling_policy",
        "reserve_full_prompt", "source",
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
        note=f"{name} {wanted} is newer than the data: defaults of {data['newest']}" if newer else "",
        **{key: merged[key] for key in plain},
    )


def engine_name(text: str) -> str:
    """Canonical engine name: "vllm", "sglang" or "trtllm". Raises NotInCatalogError."""
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


# --- rules --------------------------------------------------------------------------------------------


def _merged(data: Mapping[str, Any], name: str, wanted: str) -> dict[str, Any]:
    number = parse_version(wanted)
    releases = [r for r in data["release"] if parse_version(r["from"]) <= number]
    if not releases:
        oldest = data["release"][0]["from"]
        raise SpecError(f"engine: {name} {wanted} is older than the data; {oldest} is the oldest version known")
    merged: dict[str, Any] = {}
    for release in releases:
        merged |= release
    return merged


def _meets(rule: Mapping[str, Any], device: DeviceSpec, memory_bytes: int, ranks: int) -> bool:
    """Whether a rule's conditions hold for a device; a condition that is absent holds."""
    name = device.name.lower()
    low, high = rule.get("compute_capability", (0, 9999))
    return (
        ("vendors" not in rule or device.vendor in rule["vendors"])
        and ("generations" not in rule or device.generation in rule["generations"])
        and ("names" not in rule or any(word in name for word in rule["names"]))
        and not any(word in name for word in rule.get("not_names", ()))
        and memory_bytes >= rule.get("min_memory_gib", 0) * GIB
        and memory_bytes < rule.get("max_memory_gib", float("inf")) * GIB
        and ranks >= rule.get("min_ranks", 1)
        and low <= (device.compute_capability or 0) <= high
    )


def _engine_memory_bytes(device: DeviceSpec, *, reported: bool) -> int:
    # NVML gives no total for a device that shares the host's memory: vLLM then takes its smallest class,
    # others ask the runtime instead.
    if device.unified_memory and not reported:
        return 0
    return device.nvml_memory_bytes or device.reported_memory_bytes


def _ladder(steps: Sequence[Sequence[int]], top: int) -> Iterable[int]:
    """From each [start, step] on in steps of `step`, until the next start; up to `top` inclusive."""
    ends = [start for start, _ in steps[1:]] + [top + 1]
    for (start, step), end in zip(steps, ends, strict=False):
        yield from range(start, min(end, top + 1), step)


def _static_fraction(
    rule: Mapping[str, Any], *, memory_bytes: int, tokens: int, graph_size: int, ranks: int, attention_dp: int,
    mla: bool,
) -> float:  # fmt: skip
    """SGLang's mem_fraction_static: what is left after activations and graphs, as its server_args computes it."""
    memory_mib = memory_bytes / MIB
    if rule["rule"] == "by-ranks":
        fraction: float = next(value for least, value in rule["ranks"] if ranks >= least)
        return fraction if memory_mib <= rule["large_above_mib"] else float(rule["large"])
    if rule["rule"] == "by-class":
        below = [(base, each) for limit, base, each in rule["classes"] if memory_mib < limit * 1024]
        base_gib, each_gib = below[0] if below else rule["largest"]
        reserved_mib = (base_gib + each_gib * ranks + (rule["attention_dp_gib"] if attention_dp > 1 else 0)) * 1024
    else:
        reserved_mib = (
            rule["base_mib"] + max(tokens, 2048) * rule["per_token_mib"] + graph_size * rule["per_graph_size_mib"]
            + ranks * rule["per_rank_mib"]
        )  # fmt: skip
        if attention_dp > 1:
            least, more_mib = rule["attention_dp_large_graph"]
            each_mib = rule["attention_dp_per_graph_mib"] + (more_mib if graph_size > least else 0)
            reserved_mib += graph_size * attention_dp * each_mib
        if "prefill_graph_mib" in rule:
            sizes = len(set(_ladder_inclusive(rule["prefill_graph_steps"], tokens)))
            reserved_mib += rule["prefill_graph_mla_mib"] if mla else sizes * rule["prefill_graph_mib"]
        if memory_mib > rule["floor_above_gib"] * 1024:
            reserved_mib = max(reserved_mib, rule["floor_mib"])
    return float(round((memory_mib - reserved_mib) / memory_mib, 3))


def _ladder_inclusive(steps: Sequence[Sequence[int]], top: int) -> Iterable[int]:
    """Each [start, step]: the multiples after `start` up to the next start inclusive, no further than `top`."""
    yield steps[0][0]
    for (start, step), (end, _) in pairwise([*steps, (top, 0)]):
        yield from range(start + step, min(end, top) + 1, step)


@cache
def _data(engine: str) -> dict[str, Any]:
    text = (files("bstar.catalog") / "engines" / f"{engine}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
