"""What one layer keeps in the cache, as a list of entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """What one layer keeps in the cache.

    kind            "kv" (K and V per head) · "latent" (one vector per token, no heads) ·
                    "index" (sparse-attention key cache) · "state" (constant per sequence)
    heads           KV heads (1 for a latent): what tensor parallelism can split
    elements        elements per token and head (d_k + d_v, or the latent's width); for a state the
                    elements of the whole state of one sequence
    window          tokens after which the entry stops growing (sliding window or chunk), or None
    chunked         the window is a chunk that restarts, not a sliding one
    tokens_per_entry  tokens that share one entry (compressed attention), 1 otherwise
    bits            fixed element width where the KV dtype does not apply (states, packed caches), or None
    packed_fp8_bytes  bytes per token of the engine's packed fp8 layout where it has one (sparse MLA:
                    656), or None: elements × the KV format's bits
    fp8_capable     False where the engine keeps this entry at its own width even with an fp8 KV cache
    needs_encoder   filled from an encoder (cross attention): empty when the request is text only

    A state (and every entry with `bits`) has its own dtype; `heads` is what tensor parallelism splits it
    by, replicated beyond, exactly as K and V heads are.
    """

    kind: Literal["kv", "latent", "index", "state"]
    heads: int
    elements: int
    window: int | None = None
    chunked: bool = False
    tokens_per_entry: int = 1
    bits: int | None = None
    packed_fp8_bytes: int | None = None
    fp8_capable: bool = True
    needs_encoder: bool = False
