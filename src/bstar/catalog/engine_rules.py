"""Rules of the engine data files: which of them a device meets, and the formulas that are not tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from bstar.specs.device import DeviceSpec
from bstar.units import GIB, MIB


def meets(rule: Mapping[str, Any], device: DeviceSpec, memory_bytes: int, ranks: int) -> bool:
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


def engine_memory_bytes(device: DeviceSpec, *, reported: bool) -> int:
    """Bytes by which an engine chooses its defaults; `reported`: it asks the runtime where NVML is silent."""
    # NVML gives no total for a device that shares the host's memory (GB10): vLLM then takes its smallest class.
    if device.unified_memory and device.vendor == "nvidia" and not reported:
        return 0
    return device.nvml_memory_bytes or device.reported_memory_bytes


def ladder(steps: Sequence[Sequence[int]], top: int) -> Iterable[int]:
    """From each [start, step] on in steps of `step`, until the next start; up to `top` inclusive."""
    ends = [start for start, _ in steps[1:]] + [top + 1]
    for (start, step), end in zip(steps, ends, strict=False):
        yield from range(start, min(end, top + 1), step)


def static_fraction(
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
            sizes = len(set(ladder_inclusive(rule["prefill_graph_steps"], tokens)))
            reserved_mib += rule["prefill_graph_mla_mib"] if mla else sizes * rule["prefill_graph_mib"]
        if memory_mib > rule["floor_above_gib"] * 1024:
            reserved_mib = max(reserved_mib, rule["floor_mib"])
    return float(round((memory_mib - reserved_mib) / memory_mib, 3))


def ladder_inclusive(steps: Sequence[Sequence[int]], top: int) -> Iterable[int]:
    """Each [start, step]: the multiples after `start` up to the next start inclusive, no further than `top`."""
    yield steps[0][0]
    for (start, step), (end, _) in pairwise([*steps, (top, 0)]):
        yield from range(start + step, min(end, top) + 1, step)
