"""Engine defaults as data by version: what a server takes where its user sets no flag.

`engines/<engine>.toml` lists releases, each with what it changed; the defaults of a version are the sum of
the releases up to it. Where a default depends on the device (memory, name, vendor) it is a list of rules,
the first that the device meets decides, as in the engine's own source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from bstar.errors import NotInCatalogError, SpecError
from bstar.specs.device import DeviceSpec
from bstar.units import GIB

ENGINES = ("vllm", "sglang", "trtllm")
_SPELLINGS = {"tensorrtllm": "trtllm", "trtllmserve": "trtllm", "tensorrt": "trtllm", "sgl": "sglang"}

Usage = Literal["server", "offline"]
AttentionKind = Literal["gqa", "mla", "sparse-mla", "compressed"]
MemoryRule = Literal["fraction-of-total", "static-fraction-of-free", "fraction-of-free-after-load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDefaults:
    """The settings that one engine version takes on one device where no flag is given.

    engine, version               the version whose defaults these are, as asked for
    known_version                 the newest release of the data that `version` builds on
    max_num_seqs                  sequences in a step (SGLang: running requests at most)
    max_num_batched_tokens        token budget of a step (SGLang: chunked prefill size)
    gpu_memory_utilization        fraction of what `memory_rule` names:
        "fraction-of-total"             of the device's memory, everything included (vLLM)
        "static-fraction-of-free"       of the memory free at start: weights and KV cache (SGLang)
        "fraction-of-free-after-load"   of the memory free after loading: KV cache alone (TensorRT-LLM)
    block_size                    tokens per KV block of plain attention; `kv_block_size` for other kinds
    hybrid_prefix_caching         enable_prefix_caching's default holds for models with state layers too
    cudagraph_memory_subtracted   CUDA-graph memory is estimated and taken from the KV space
    reserve_full_prompt           a request is admitted only where its whole prompt has room
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
    cudagraph_seqs_factor: int
    cudagraph_fine_until: int
    long_prefill_token_threshold: int
    stream_interval: int
    scheduling_policy: Literal["fcfs", "priority"]
    reserve_full_prompt: bool
    block_size_rules: tuple[Mapping[str, Any], ...]
    source: str
    note: str = ""

    def kv_block_size(self, attention: AttentionKind = "gqa") -> int:
        """Tokens per KV block for an attention kind, as the engine's default backend wants them."""
        for rule in self.block_size_rules:
            if rule.get("attention", attention) == attention:
                return int(rule["tokens"])
        return self.block_size

    def cudagraph_sizes(
        self, max_num_seqs: int, max_num_batched_tokens: int, *, query_tokens: int = 1
    ) -> tuple[int, ...]:
        """Batch sizes captured as CUDA graphs, ascending; the last is `max_cudagraph_capture_size`.

        query_tokens is the tokens of one sequence in a decode step (1 + speculative tokens).
        """
        top = min(self.cudagraph_cap, max_num_batched_tokens)
        if self.cudagraph_seqs_factor:
            top = min(top, max_num_seqs * query_tokens * self.cudagraph_seqs_factor)
        if top < 1:
            return ()
        sizes = {size for size in (1, 2, 4) if size <= top}
        sizes.update(range(8, min(top + 1, self.cudagraph_fine_until), 8))
        sizes.update(range(max(self.cudagraph_fine_until, 8), top + 1, 16))
        return tuple(sorted(sizes))

    def cudagraph_max_size(self, max_num_seqs: int, max_num_batched_tokens: int, *, query_tokens: int = 1) -> int:
        """The largest captured batch (0: none)."""
        sizes = self.cudagraph_sizes(max_num_seqs, max_num_batched_tokens, query_tokens=query_tokens)
        return sizes[-1] if sizes else 0


def engine_defaults(
    engine: str, version: str | None, device: DeviceSpec, *, usage: Usage = "server", world_size: int = 1
) -> EngineDefaults:
    """The defaults of `engine` at `version` (None: the newest known) on `device`.

    world_size is the ranks of one copy of the model (tp · pp): some defaults are per rank.
    Raises NotInCatalogError for an unknown engine, SpecError for a version that is not a number or older
    than the data. A version newer than the data gets the newest defaults and says so in `note`.
    """
    name = engine_name(engine)
    data = _data(name)
    wanted = version or str(data["newest"])
    number = parse_version(wanted)
    releases = [r for r in data["release"] if parse_version(r["from"]) <= number]
    if not releases:
        oldest = data["release"][0]["from"]
        raise SpecError(f"engine: {name} {wanted} is older than the data; {oldest} is the oldest version known")
    merged: dict[str, Any] = {}
    for release in releases:
        merged |= release
    rule = _first(merged["batch"], device)
    max_num_seqs, max_num_batched_tokens = rule[usage]
    ranks = world_size if rule.get("per_rank") else 1
    newer = number > parse_version(data["newest"])
    cap = merged["cudagraph_cap_sm100"] if _capability(device) // 10 == 10 else merged["cudagraph_cap"]
    return EngineDefaults(
        engine=name,
        version=wanted,
        known_version=str(merged["from"]),
        max_num_seqs=int(max_num_seqs) * ranks,
        max_num_batched_tokens=int(max_num_batched_tokens) * ranks,
        gpu_memory_utilization=float(merged["gpu_memory_utilization"]),
        memory_rule=data["memory_rule"],
        block_size=int(merged["block_size"]),
        enable_prefix_caching=merged["enable_prefix_caching"],
        hybrid_prefix_caching=merged["hybrid_prefix_caching"],
        enable_chunked_prefill=merged["enable_chunked_prefill"],
        async_scheduling=merged["async_scheduling"],
        cudagraph_memory_subtracted=merged["cudagraph_memory_subtracted"],
        cudagraph_cap=int(cap),
        cudagraph_seqs_factor=int(merged["cudagraph_seqs_factor"]),
        cudagraph_fine_until=int(merged["cudagraph_fine_until"]),
        long_prefill_token_threshold=int(merged["long_prefill_token_threshold"]),
        stream_interval=int(merged["stream_interval"]),
        scheduling_policy=merged["scheduling_policy"],
        reserve_full_prompt=merged["reserve_full_prompt"],
        block_size_rules=tuple(r for r in data.get("block_size", ()) if _meets(r, device)),
        source=str(merged["source"]),
        note=f"{name} {wanted} is newer than the data; defaults of {data['newest']}" if newer else "",
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
    match = re.match(r"^v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if match is None:
        raise SpecError(f"engine version: {text!r} is not a version; write it like 0.32 or 0.32.0")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def _capability(device: DeviceSpec) -> int:
    return device.compute_capability or 0


def _first(rules: Sequence[Mapping[str, Any]], device: DeviceSpec) -> Mapping[str, Any]:
    return next(rule for rule in rules if _meets(rule, device))


def _meets(rule: Mapping[str, Any], device: DeviceSpec) -> bool:
    """Whether a rule's conditions hold for a device; a condition that is absent holds."""
    name = device.name.lower()
    low, high = rule.get("compute_capability", (0, 9999))
    return (
        ("vendors" not in rule or device.vendor in rule["vendors"])
        and ("names" not in rule or any(word in name for word in rule["names"]))
        and not any(word in name for word in rule.get("not_names", ()))
        and _engine_memory_bytes(device) >= rule.get("min_memory_gib", 0) * GIB
        and low <= _capability(device) <= high
    )


def _engine_memory_bytes(device: DeviceSpec) -> int:
    # A device that shares the host's memory reports no total of its own to NVML; vLLM then takes the
    # smallest class of defaults.
    return 0 if device.unified_memory else device.reported_memory_bytes


@cache
def _data(engine: str) -> dict[str, Any]:
    text = (files("bstar.catalog") / "engines" / f"{engine}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
