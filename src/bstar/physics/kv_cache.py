"""Cache bytes: per token, per sequence and per block, on one rank.

Layers keep different things (`CacheEntry`): keys and values per head, one latent per token, an index
cache beside it, a constant state. Layers that behave alike are merged into a `CacheGroup`.

    bytes of a sequence at context L = Σ groups  min(L, window) · bytes_per_token   (+ states)

Tensor parallelism splits KV heads and replicates them beyond their number; a latent has no heads and is
replicated on every rank; decode-context parallelism (dcp) splits tokens instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, overload

from bstar.physics.partition import layers_in_stage, stage_bounds
from bstar.specs.attention import CacheEntry, Mamba2, Mixer
from bstar.specs.formats import KvFormat, kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

CacheKind = Literal["kv", "latent", "index", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers of one rank that keep the same thing.

    layers                    how many of them
    bytes_per_token           all these layers together, marginal, below the window (0 for states)
    window                    tokens after which the group stops growing, or None
    tokens_per_entry          tokens that share one cache entry (compressed attention)
    state_bytes_per_sequence  all these layers together, constant per sequence (0 but for states)
    """

    layers: int
    bytes_per_token: float
    window: int | None
    tokens_per_entry: int
    state_bytes_per_sequence: int
    kind: CacheKind
    chunked: bool = False

    @overload
    def bytes_at(self, context: float) -> float: ...
    @overload
    def bytes_at(self, context: FloatArray) -> FloatArray: ...
    def bytes_at(self, context: Any) -> Any:
        """Bytes that one sequence of `context` tokens keeps in this group, states excluded."""
        if self.window is None:
            return context * self.bytes_per_token
        if isinstance(context, int | float):
            return min(context, self.window) * self.bytes_per_token
        import numpy as np

        return np.minimum(context, self.window) * self.bytes_per_token


def heads_per_rank(heads: int, tp: int) -> int:
    """KV heads on one rank: split by TP, at least one (replicated) beyond their number."""
    return ceil(heads / min(tp, heads))


def entry_bytes(entry: CacheEntry, kv: KvFormat, tp: int = 1) -> int:
    """Bytes of one cache entry (`tokens_per_entry` tokens) of one layer on one rank; not for states."""
    if entry.kind == "latent" and kv.bits == 8 and entry.packed_fp8_bytes is not None:
        return entry.packed_fp8_bytes
    heads = heads_per_rank(entry.heads, tp)
    if entry.bits is not None:
        return heads * ceil(entry.elements * entry.bits / 8)
    fmt = kv if entry.fp8_capable or kv.bits >= 16 else kv_format("bf16")
    if entry.kind == "kv" and fmt.scale_bits and not fmt.scale_block:
        # One scale per token and head for K and one for V.
        return heads * (ceil(entry.elements * fmt.bits / 8) + 2 * ceil(fmt.scale_bits / 8))
    return heads * fmt.bytes_of(entry.elements)


def state_bytes(mixer: Mixer, *, model_dtype: str = "bf16", tp: int = 1, lookahead: int = 0) -> tuple[int, ...]:
    """Bytes per sequence of each state of one layer on one rank (convolution window, matrix state, …).

    lookahead   speculative tokens: the convolution window keeps as many more inputs
    """
    default = kv_format("auto", model_dtype=model_dtype).bits
    kernel = getattr(mixer, "conv_kernel", 1)
    out = []
    for index, entry in enumerate(e for e in mixer.cache() if e.kind == "state"):
        elements = ceil(entry.elements / entry.heads) * heads_per_rank(entry.heads, tp)
        if lookahead and kernel > 1 and index < _conv_states(mixer):
            elements = elements // (kernel - 1) * (kernel - 1 + lookahead)
        out.append(ceil(elements * (entry.bits if entry.bits is not None else default) / 8))
    return tuple(out)


def _conv_states(mixer: Mixer) -> int:
    """How many of a mixer's first state entries are convolution windows (Mamba 2 lists B and C apart)."""
    return 2 if isinstance(mixer, Mamba2) else 1


def cache_groups(
    model: ModelSpec, kv: KvFormat, parallel: ParallelSpec | None = None, *, stage: int | None = None
) -> tuple[CacheGroup, ...]:
    """What one rank keeps per sequence, merged by equal behaviour; in order of the layers.

    stage   the pipeline stage; None: the one that keeps the most bytes of a full-length sequence.
    """
    split = parallel or ParallelSpec()
    bounds = stage_bounds(model.num_layers, split.pp)
    if stage is not None:
        return _stage_groups(model, kv, split, bounds[stage])
    candidates = [_stage_groups(model, kv, split, b) for b in bounds]
    full = float(model.max_context_tokens)
    return max(candidates, key=lambda gs: sum(g.bytes_at(full) + g.state_bytes_per_sequence for g in gs))


def _stage_groups(
    model: ModelSpec, kv: KvFormat, parallel: ParallelSpec, bounds: tuple[int, int]
) -> tuple[CacheGroup, ...]:
    merged: dict[tuple[Any, ...], list[float]] = {}
    for group in model.layers:
        layers = layers_in_stage(group, bounds)
        if not layers:
            continue
        states = sum(state_bytes(group.mixer, model_dtype=model.dtype, tp=parallel.tp))
        if states:
            row = merged.setdefault(("state", None, False, 1), [0, 0.0, 0])
            row[0] += layers
            row[2] += states * layers
        for entry in group.mixer.cache():
            if entry.kind == "state" or entry.needs_encoder:
                continue
            per_token = entry_bytes(entry, kv, parallel.tp) / entry.tokens_per_entry / parallel.dcp
            row = merged.setdefault((entry.kind, entry.window, entry.chunked, entry.tokens_per_entry), [0, 0.0, 0])
            row[0] += layers
            row[1] += per_token * layers
    return tuple(
        CacheGroup(kind=kind, window=window, chunked=chunked, tokens_per_entry=per_entry, layers=int(row[0]),
                   bytes_per_token=row[1], state_bytes_per_sequence=int(row[2]))
        for (kind, window, chunked, per_entry), row in merged.items()
    )


def kv_bytes_per_token(model: ModelSpec, kv: KvFormat, parallel: ParallelSpec | None = None) -> float:
    """Marginal bytes of one more token below every window, on one rank (the fullest pipeline stage)."""
    return float(sum(g.bytes_per_token for g in cache_groups(model, kv, parallel)))


@overload
def kv_bytes_per_sequence(
    model: ModelSpec, kv: KvFormat, context: float, parallel: ParallelSpec | None = None
) -> float: ...
@overload
def kv_bytes_per_sequence(
    model: ModelSpec, kv: KvFormat, context: FloatArray, parallel: ParallelSpec | None = None
) -> FloatArray: ...
def kv_bytes_per_sequence(
    model: ModelSpec, kv: KvFormat, context: Any, parallel: ParallelSpec | None = None
) -> Any:
    """Cache bytes of one sequence of `context` tokens on one rank: windows applied, states left out."""
    groups = cache_groups(model, kv, parallel)
    total = sum(g.bytes_at(context) for g in groups)
    return float(total) if isinstance(context, int | float) else total + 0.0 * context


def state_bytes_per_sequence(model: ModelSpec, parallel: ParallelSpec | None = None) -> int:
    """Bytes of the recurrent states (convolution windows and matrix states) of one sequence, on one rank."""
    split = parallel or ParallelSpec()
    return max(
        sum(
            sum(state_bytes(g.mixer, model_dtype=model.dtype, tp=split.tp)) * layers_in_stage(g, bounds)
            for g in model.layers
        )
        for bounds in stage_bounds(model.num_layers, split.pp)
    )
