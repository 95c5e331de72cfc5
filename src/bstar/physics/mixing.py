"""What token mixers compute beside their GEMMs, per layer and rank: attention, index scores, state updates.

    attention        2·heads·(d_k + d_v) FLOPs per (query, key) pair; K and V of every key are read once per step
    MLA, decode      absorbed: 2·heads·(2·kv_lora_rank + rope) per pair over the latent, 242 FLOP/byte at bf16
    MLA, prefill     unabsorbed: 2·heads·(nope + rope + v) per pair; K and V of all keys are made from latents
    sparse           index scores over all keys, attention over the top k (absorbed in both phases)
    states           read and written once per sequence and step, a few FLOPs per element and token
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from bstar.physics.collectives import Collective
from bstar.physics.kv_cache import entry_bytes, heads_per_rank, state_bytes
from bstar.physics.statistics import FULL, Span, Statistic, count
from bstar.physics.work import Work, collective_work
from bstar.specs.attention import (
    CacheEntry,
    CompressedAttention,
    CrossAttention,
    GatedDeltaNet,
    GroupedQueryAttention,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mixer,
    NoMixer,
    ParallelMixers,
    ShortConvolution,
    SparseIndexer,
)
from bstar.specs.formats import KvFormat
from bstar.specs.parallel import ParallelSpec

PHASES = ("decode", "prefill")


class Rank:
    """What a mixer needs to know about the rank: split, cache format, activation width and dtype."""

    def __init__(self, parallel: ParallelSpec, kv: KvFormat, dtype: str) -> None:
        self.parallel, self.kv, self.dtype = parallel, kv, dtype
        self.activation_bytes = 4.0 if dtype == "fp32" else 2.0

    def heads(self, heads: int) -> int:
        """Query heads on this rank."""
        return ceil(heads / self.parallel.tp)

    def cached(self, entry: CacheEntry) -> float:
        """Bytes of one cache entry on this rank (its share of the entries under decode-context parallelism)."""
        return entry_bytes(entry, self.kv, self.parallel.tp) / self.parallel.dcp


def mixer_works(mixer: Mixer, rank: Rank) -> tuple[Work, ...]:
    """The operators of one mixer beside its GEMMs. Raises TypeError on a mixer that has no rule here."""
    rule = _RULES.get(type(mixer))
    if rule is None:
        raise TypeError(f"mixer {type(mixer).__name__} has no rule in bstar.physics.mixing")
    return rule(mixer, rank)


def _attention(
    rank: Rank, *, phase: str, span: Span, flops_per_pair: float, entry: float, query: float, cache_write: float = 0.0,
    form: str = "",
) -> Work:
    """Attention of one phase. `entry` bytes per key; `query` elements per token. Its output: `_handover`."""
    tokens: Statistic = (f"{phase}_tokens", None)  # type: ignore[assignment]
    pairs: Statistic = (f"pairs_{phase}", span)  # type: ignore[assignment]
    keys: Statistic = (f"keys_{phase}", span)  # type: ignore[assignment]
    a = rank.activation_bytes
    return Work(
        name="attn", kind="attention_decode" if phase == "decode" else "attention_prefill", rows=tokens,
        flops={pairs: flops_per_pair}, kv_reads={keys: entry}, reads={tokens: query * a},
        writes={tokens: cache_write}, compute_dtype=rank.dtype, form=form,
    )  # fmt: skip


def _handover(rank: Rank, *, decode: float, prefill: float) -> Work:
    """What attention writes for the output projection to read, elements per token. No kernel of its own."""
    a = rank.activation_bytes
    return Work(name="norm", kind="elementwise", launches=0,
                writes={count("decode_tokens"): decode * a, count("prefill_tokens"): prefill * a})


def _context_exchange(rank: Rank, *, query: float, output: float) -> list[Work]:
    """Decode-context parallelism: ranks gather their group's queries and scatter the partial outputs, per token."""
    ranks, a = rank.parallel.dcp, rank.activation_bytes
    if ranks == 1:
        return []
    tokens = count("tokens")
    return [
        collective_work("allgather", Collective(kind="allgather", ranks=ranks), {tokens: ranks * query * a}),
        collective_work("reducescatter", Collective(kind="reducescatter", ranks=ranks), {tokens: ranks * output * a}),
    ]


def _grouped_query(m: GroupedQueryAttention, rank: Rank) -> tuple[Work, ...]:
    heads = rank.heads(m.num_heads)
    entry = CacheEntry(kind="kv", heads=m.num_kv_heads, elements=m.head_dim + m.v_head_dim)
    cached = rank.cached(entry)
    works = [
        _attention(
            rank, phase=phase, span=Span(limit=m.window, chunked=m.chunked), entry=cached,
            flops_per_pair=2.0 * heads * (m.head_dim + m.v_head_dim), query=heads * m.head_dim,
            cache_write=0.0 if m.shares_kv else cached,
        )
        for phase in PHASES
    ]  # fmt: skip
    width = heads * m.v_head_dim
    works.append(_handover(rank, decode=width, prefill=width))
    return (*works, *_context_exchange(rank, query=heads * m.head_dim, output=width))


def _latent(m: LatentAttention, rank: Rank) -> tuple[Work, ...]:
    heads, latent = rank.heads(m.num_heads), m.kv_lora_rank + m.qk_rope_head_dim
    entries = m.cache()
    cached = rank.cached(entries[0])
    sparse = m.indexer is not None
    span = Span(limit=m.indexer.top_k, gather=True) if m.indexer is not None else FULL

    def absorbed(phase: str) -> Work:
        return _attention(
            rank, phase=phase, span=span, flops_per_pair=2.0 * heads * (latent + m.kv_lora_rank), entry=cached,
            query=heads * latent, cache_write=cached, form="latent",
        )  # fmt: skip

    works = [absorbed("decode"), absorbed("prefill") if sparse else _unabsorbed(m, rank, heads, cached)]
    if m.indexer is not None and not m.indexer.shared:
        works += _index_scores(m.indexer, rank, rank.cached(entries[1]), Span())
    width = heads * (m.kv_lora_rank if sparse else m.v_head_dim)
    works.append(_handover(rank, decode=heads * m.kv_lora_rank, prefill=width))
    return (*works, *_context_exchange(rank, query=heads * latent, output=heads * m.kv_lora_rank))


def _unabsorbed(m: LatentAttention, rank: Rank, heads: int, cached: float) -> Work:
    """MLA prefill: kv_b_proj makes K and V per head; those of cached tokens are made again for every chunk."""
    qk, a = m.qk_nope_head_dim + m.qk_rope_head_dim, rank.activation_bytes
    made = heads * (m.qk_nope_head_dim + m.v_head_dim)
    again = count("cached_prefill")
    base = _attention(
        rank, phase="prefill", span=FULL, flops_per_pair=2.0 * heads * (qk + m.v_head_dim),
        entry=heads * (qk + m.v_head_dim) * a, query=heads * qk, cache_write=cached,
    )  # fmt: skip
    return Work(
        name=base.name, kind=base.kind, rows=base.rows, compute_dtype=base.compute_dtype, kv_reads=base.kv_reads,
        flops={**base.flops, again: 2.0 * m.kv_lora_rank * made},
        reads={**base.reads, again: cached}, writes={**base.writes, again: made * a},
    )  # fmt: skip


def _index_scores(ix: SparseIndexer, rank: Rank, entry: float, span: Span) -> list[Work]:
    """Scores of every query against every fp8 index key. The indexer is replicated: no rank computes less."""
    out = []
    for phase in PHASES:
        pairs: Statistic = (f"pairs_{phase}", span)  # type: ignore[assignment]
        keys: Statistic = (f"keys_{phase}", span)  # type: ignore[assignment]
        tokens: Statistic = (f"{phase}_tokens", None)  # type: ignore[assignment]
        out.append(Work(
            name="indexer", kind="attention_decode" if phase == "decode" else "attention_prefill", rows=tokens,
            flops={pairs: 2.0 * ix.num_heads * ix.head_dim}, kv_reads={keys: entry},
            reads={tokens: float(ix.num_heads * ix.head_dim)}, writes={tokens: entry, pairs: 4.0},
            compute_dtype="fp8", form="index",
        ))  # fmt: skip
    return out


def _compressed(m: CompressedAttention, rank: Rank) -> tuple[Work, ...]:
    """One shared K = V vector for all heads: a short window of tokens, and compressed groups beyond it."""
    heads, entries = rank.heads(m.num_heads), m.cache()
    flops, width = 4.0 * heads * m.head_dim, heads * m.head_dim
    window = rank.cached(entries[0])
    works = [
        _attention(rank, phase=p, span=Span(limit=m.window), flops_per_pair=flops, entry=window, query=width,
                   cache_write=window)
        for p in PHASES
    ]  # fmt: skip
    works.append(_handover(rank, decode=width, prefill=width))
    if not m.compress_ratio:
        return tuple(works)
    ratio = m.compress_ratio
    limit = m.indexer.top_k * ratio if m.indexer is not None else None
    span = Span(limit=limit, stride=ratio, gather=m.indexer is not None)
    group, pending = rank.cached(entries[1]), 4.0 * 2 * m.compressor_width
    works += [
        _attention(rank, phase=p, span=span, flops_per_pair=flops, entry=group, query=0,
                   cache_write=group / ratio + pending)
        for p in PHASES
    ]  # fmt: skip
    if m.indexer is not None:
        index = next(rank.cached(e) for e in entries if e.kind == "index")
        works += _index_scores(m.indexer, rank, index, Span(stride=ratio))
    return tuple(works)


def _state(mixer: Mixer, rank: Rank, flops_per_token: float) -> tuple[Work, ...]:
    """A recurrent state: read and written once per sequence, updated by every token."""
    size = float(sum(state_bytes(mixer, model_dtype=rank.dtype, tp=rank.parallel.tp)))
    return (Work(
        name="mixer", kind="state", flops={count("tokens"): flops_per_token}, compute_dtype=rank.dtype,
        kv_reads={count("sequences"): size}, writes={count("sequences"): size}, launches=2,
    ),)  # fmt: skip


def _gated_delta(m: GatedDeltaNet, rank: Rank) -> tuple[Work, ...]:
    # decay, S·k, rank-one update, S·q: 8 FLOPs per element of the state; and the short convolution.
    v_heads, k_heads = rank.heads(m.num_v_heads), heads_per_rank(m.num_k_heads, rank.parallel.tp)
    channels = 2 * k_heads * m.k_head_dim + v_heads * m.v_head_dim
    return _state(m, rank, 8.0 * v_heads * m.k_head_dim * m.v_head_dim + 2.0 * m.conv_kernel * channels)


def _kimi_delta(m: KimiDeltaAttention, rank: Rank) -> tuple[Work, ...]:
    heads = rank.heads(m.num_heads)
    conv = 2.0 * m.conv_kernel * 3 * heads * m.head_dim
    return _state(m, rank, 8.0 * heads * m.head_dim * m.head_dim + conv)


def _lightning(m: LightningAttention, rank: Rank) -> tuple[Work, ...]:
    return _state(m, rank, 4.0 * rank.heads(m.num_heads) * m.head_dim * m.head_dim)


def _mamba2(m: Mamba2, rank: Rank) -> tuple[Work, ...]:
    # decay, outer product, read: 6 FLOPs per element of the state.
    inner = rank.heads(m.num_heads) * m.head_dim
    width = inner + 2 * heads_per_rank(m.num_groups, rank.parallel.tp) * m.state_size
    return _state(m, rank, 6.0 * inner * m.state_size + 2.0 * m.conv_kernel * width)


def _mamba1(m: Mamba1, rank: Rank) -> tuple[Work, ...]:
    inner = rank.heads(m.inner_size)
    return _state(m, rank, 6.0 * inner * m.state_size + 2.0 * m.conv_kernel * inner)


def _short_convolution(m: ShortConvolution, rank: Rank) -> tuple[Work, ...]:
    # The convolution and the two elementwise gates.
    return _state(m, rank, (2.0 * m.conv_kernel + 2.0) * rank.heads(m.width))


def _parallel(m: ParallelMixers, rank: Rank) -> tuple[Work, ...]:
    return tuple(work for branch in m.branches for work in mixer_works(branch, rank))


def _nothing(mixer: Mixer, rank: Rank) -> tuple[Work, ...]:
    """No mixing: a layer without a mixer, or cross attention of a request without an image."""
    return ()


_RULES: dict[type, Callable[[Any, Rank], tuple[Work, ...]]] = {
    GroupedQueryAttention: _grouped_query,
    LatentAttention: _latent,
    CompressedAttention: _compressed,
    CrossAttention: _nothing,
    GatedDeltaNet: _gated_delta,
    KimiDeltaAttention: _kimi_delta,
    LightningAttention: _lightning,
    Mamba2: _mamba2,
    Mamba1: _mamba1,
    ShortConvolution: _short_convolution,
    ParallelMixers: _parallel,
    NoMixer: _nothing,
}
