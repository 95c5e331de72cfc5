"""The pages that vLLM's cache manager keeps for each layer: its unit of allocation.

A page is one block of one layer: `block_tokens` tokens of keys and values (or of a latent, or of index
keys), or the whole recurrent state of one sequence. Block sizes follow the attention kind; where a model
has states, attention blocks grow until their page holds a state (vLLM `platforms/interface.py`
`_align_hybrid_block_size`, before 0.20 `models/config.py` HybridAttentionMambaModelConfig).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from bstar.physics.kv_cache import entry_bytes, state_bytes
from bstar.specs.attention import CacheEntry, CompressedAttention, LatentAttention, Mamba2, Mixer, ParallelMixers
from bstar.specs.formats import KvFormat
from bstar.specs.model import ModelSpec

PageKind = Literal["full", "sliding", "chunked", "state"]

# Compressed attention (DeepSeek V4, vLLM models/deepseek_v4): the window cache has blocks of 64 tokens, the
# compressor's pending inputs blocks of 4 (ratio 4) or 8; a packed page is rounded up to the kernel's stride.
COMPRESSED_WINDOW_BLOCK = 64
COMPRESSED_PAGE_ALIGNMENT = {True: 576, False: 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One layer's cache as the manager sees it; equal pages can share a group.

    kind          "full" grows with the sequence, "sliding" and "chunked" stop at `window`, "state" is constant
    block_tokens  tokens of one block (0 for a state)
    page_bytes    bytes of one block of this layer on one rank, padding included
    shape         what must agree beside the size before two layers are the same to the manager
    latent        an MLA cache: its page cannot be padded to an arbitrary size
    checkpoints   blocks more of a state whose kernel can export it inside a prefill (Mamba 2, prefix caching)
    """

    kind: PageKind
    block_tokens: int
    page_bytes: int
    window: int | None = None
    shape: tuple[int, ...] = ()
    latent: bool = False
    checkpoints: int = 0


def attention_block_tokens(model: ModelSpec, *, compute_capability: int | None, cpu: bool = False) -> int:
    """Tokens per block that vLLM's default attention backend wants for this model's attention kind."""
    mixers = [m for g in model.layers for m in _branches(g.mixer)]
    if any(isinstance(m, CompressedAttention) for m in mixers):
        return 256
    latent = [m for m in mixers if isinstance(m, LatentAttention)]
    if any(m.indexer is not None for m in latent):
        return 64
    if latent and not cpu and compute_capability is not None and compute_capability // 10 == 10:
        return 32
    return 128 if cpu and not latent else 16


def layer_pages(
    model: ModelSpec, kv: KvFormat, *, tp: int, block_tokens: int, num_speculative_tokens: int = 0,
    drafts_with_mtp: bool = False,
) -> tuple[tuple[Page, ...], ...]:
    """The pages of every layer, by layer index; block sizes are aligned to the states where there are any.

    drafts_with_mtp   the checkpoint's prediction layers run too: their caches follow the decoder's
    """
    by_layer: dict[int, tuple[Page, ...]] = {}
    for group in model.layers:
        pages = _mixer_pages(group.mixer, kv, model, tp, block_tokens, num_speculative_tokens)
        by_layer.update(dict.fromkeys(group.indices, pages))
    ordered = [by_layer[i] for i in range(model.num_layers)]
    if drafts_with_mtp:
        ordered += [_mixer_pages(mixer, kv, model, tp, block_tokens, num_speculative_tokens)
                    for block in model.blocks if block.role == "mtp" for mixer in block.mixers]
    return _align_to_states(tuple(ordered))


def _branches(mixer: Mixer) -> tuple[Mixer, ...]:
    return mixer.branches if isinstance(mixer, ParallelMixers) else (mixer,)


def _mixer_pages(
    mixer: Mixer, kv: KvFormat, model: ModelSpec, tp: int, block_tokens: int, lookahead: int
) -> tuple[Page, ...]:
    out: list[Page] = []
    for branch in _branches(mixer):
        states = state_bytes(branch, model_dtype=model.dtype, tp=tp, lookahead=lookahead)
        if states:
            out.append(Page(kind="state", block_tokens=0, page_bytes=sum(states), shape=states,
                            checkpoints=1 if isinstance(branch, Mamba2) else 0))
        out += [
            _entry_page(branch, entry, kv, tp, block_tokens)
            for entry in branch.cache()
            if entry.kind != "state" and not entry.needs_encoder
        ]
    return tuple(out)


def _entry_page(mixer: Mixer, entry: CacheEntry, kv: KvFormat, tp: int, block_tokens: int) -> Page:
    size = entry_bytes(entry, kv, tp)
    tokens = max(block_tokens, entry.tokens_per_entry)
    if isinstance(mixer, CompressedAttention) and entry.window is not None:
        pending = entry.bits is not None
        tokens = (4 if mixer.compress_ratio == 4 else 8) if pending else COMPRESSED_WINDOW_BLOCK
    page = size * (tokens // entry.tokens_per_entry)
    if isinstance(mixer, CompressedAttention):
        unit = COMPRESSED_PAGE_ALIGNMENT[kv.bits == 8]
        page = ceil(page / unit) * unit
    kind: PageKind = "full" if entry.window is None else "chunked" if entry.chunked else "sliding"
    heads = min(entry.heads, ceil(entry.heads / min(tp, entry.heads)))
    return Page(
        kind=kind, block_tokens=tokens, page_bytes=page, window=entry.window, latent=entry.kind in ("latent", "index"),
        shape=(heads, entry.elements, entry.tokens_per_entry, entry.bits or 0, 1 if entry.kind == "index" else 0))


def _align_to_states(layers: tuple[tuple[Page, ...], ...]) -> tuple[tuple[Page, ...], ...]:
    """Grow attention blocks until their page holds the largest state, and pad states to that page."""
    states = [p for pages in layers for p in pages if p.kind == "state"]
    attention = [p for pages in layers for p in pages if p.kind == "full"] or [
        p for pages in layers for p in pages if p.kind != "state"
    ]
    if not states or not attention:
        return layers
    largest = max(p.page_bytes for p in states)
    unit = attention[0]
    step = 128 if unit.latent else unit.block_tokens
    per_token = unit.page_bytes // unit.block_tokens
    tokens = max(step * ceil(largest / (step * per_token)), unit.block_tokens)
    page_bytes = tokens * per_token

    def aligned(page: Page) -> Page:
        if page.kind == "state":
            return replace(page, page_bytes=max(page_bytes, page.page_bytes))
        grown = page.page_bytes // page.block_tokens * tokens
        return replace(page, block_tokens=tokens, page_bytes=grown)

    return tuple(tuple(aligned(p) for p in pages) for pages in layers)
