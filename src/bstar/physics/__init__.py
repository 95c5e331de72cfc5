"""Bytes and FLOPs of a model on its ranks: no seconds in here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bstar.physics.kv_cache import cache_groups, kv_bytes_per_sequence, kv_bytes_per_token
    from bstar.physics.memory import memory_budget
    from bstar.physics.step_costs import step_cost
    from bstar.physics.weights import parameter_counts, streamed_weight_bytes, weight_bytes

_HOMES = {
    "cache_groups": "kv_cache",
    "kv_bytes_per_sequence": "kv_cache",
    "kv_bytes_per_token": "kv_cache",
    "parameter_counts": "weights",
    "streamed_weight_bytes": "weights",
    "weight_bytes": "weights",
    "memory_budget": "memory",
    "step_cost": "step_costs",
}

__all__ = [
    "cache_groups", "kv_bytes_per_sequence", "kv_bytes_per_token", "memory_budget", "parameter_counts",
    "step_cost", "streamed_weight_bytes", "weight_bytes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use, so that one formula does not load every module."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"bstar.physics.{home}"), name)
    globals()[name] = value
    return value
