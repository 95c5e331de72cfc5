"""`step_cost`: FLOPs, bytes read and bytes written of one step by component, per GPU (contract of design.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bstar.physics.batch import BatchShape
from bstar.physics.operators import Operator, step_operators
from bstar.specs.formats import KvFormat, kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec


def step_cost(
    model: ModelSpec,
    parallel: ParallelSpec | None = None,
    batch: Iterable[Sequence[float]] | BatchShape = (),
    *,
    kv: KvFormat | None = None,
) -> dict[str, dict[str, float]]:
    """FLOPs and bytes of one step on the busiest GPU.

    batch   (new_tokens, context_after, is_prefill) of each sequence; context_after includes the new tokens
    kv      format of the KV cache; None: what the checkpoint asks for, else the model's dtype
    Returns {"flops": {...}, "read_bytes": {...}, "write_bytes": {...}}, keys among embedding, qkv, attn,
    indexer, mixer, out, mlp, experts, shared_experts, router, norm, lm_head, allreduce, allgather,
    reducescatter, all_to_all, p2p (collectives: bytes over the link). Values are floats: expected experts
    are not whole.
    """
    shape = batch if isinstance(batch, BatchShape) else BatchShape.from_triples(batch)
    chosen = kv or kv_format(model.kv_cache_dtype or "auto", model_dtype=model.dtype)
    return totals_by_name(step_operators(model, parallel or ParallelSpec(), shape, chosen))


def totals_by_name(operators: Iterable[Operator]) -> dict[str, dict[str, float]]:
    """Add operators up by name; a component without FLOPs or bytes of a kind is left out of that table."""
    out: dict[str, dict[str, float]] = {"flops": {}, "read_bytes": {}, "write_bytes": {}}
    for op in operators:
        read = op.weight_bytes + op.read_bytes + op.kv_read_bytes
        for table, value in (("flops", op.flops), ("read_bytes", read), ("write_bytes", op.write_bytes)):
            if value:
                out[table][op.name] = out[table].get(op.name, 0.0) + value
    return out
