"""The KV cache of a prompt on its way from a prefill to a decode replica: bytes, and seconds on the link.

    content     what the model keeps of a prompt of L tokens (windows applied, states included), once
    on a rank   the part that one rank holds; ranks send side by side, each over its own link
    whole       the cache leaves when the prompt is done:          latency + bytes / bandwidth
    by layer    layer i leaves while layer i + 1 is computed:      latency + max(T/n, T − C·(n − 1)/n)
                after the first token, T = bytes / bandwidth, C = seconds of the prompt's computation, n layers

A link carries one cache after another, on the sending as on the receiving side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.physics.kv_cache import kv_bytes_per_sequence, state_bytes_per_sequence
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLink:
    """The link between the pools, per rank (per GPU). An infinite bandwidth moves any cache at once.

    layerwise   layers are sent while the prompt is still computed
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    layerwise: bool = False

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise SpecError("kv link: bandwidth must be positive and latency at least 0")


def link_of(deployment: Deployment, *, layerwise: bool = False) -> KvLink:
    """The link between nodes of the deployment's devices. Raises SpecError where none is known."""
    link = deployment.device.inter_node
    if link is None:
        raise SpecError(f"kv link: {deployment.device.id} has no link between nodes; give its bandwidth")
    return KvLink(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s, layerwise=layerwise)


class Transfers:
    """Seconds and bytes of the caches that are moved."""

    def __init__(self, link: KvLink, deployment: Deployment) -> None:
        self.link, self.deployment = link, deployment
        self.layers = deployment.model.num_layers
        self.free_s: dict[tuple[str, int], float] = {}

    def content_bytes(self, tokens: int, kept_tokens: int = 0) -> float:
        """Bytes of the cache of `tokens` tokens without that of the first `kept_tokens`, of the whole model.

        States are not split by token: they go whole.
        """
        d = self.deployment
        whole, kept = (kv_bytes_per_sequence(d.model, d.kv_format, float(t)) for t in (tokens, kept_tokens))
        return max(whole - kept, 0.0) + state_bytes_per_sequence(d.model)

    def rank_bytes(self, tokens: int, kept_tokens: int = 0) -> float:
        """The same on the rank that holds most."""
        d = self.deployment
        whole, kept = (kv_bytes_per_sequence(d.model, d.kv_format, float(t), d.parallel) for t in (tokens, kept_tokens))
        return max(whole - kept, 0.0) + state_bytes_per_sequence(d.model, d.parallel)

    def arrival_s(
        self, sender: int, receiver: int, at_s: float, computed_s: float, tokens: int, kept_tokens: int
    ) -> float:
        """When a cache is there whose prompt was done at `at_s` after `computed_s` of computation."""
        wire_s = self.rank_bytes(tokens, kept_tokens) / self.link.bandwidth_bytes_per_s
        ends = ("out", sender), ("in", receiver)
        left_s = wire_s
        if self.link.layerwise:
            left_s = max(wire_s / self.layers, wire_s - computed_s * (self.layers - 1) / self.layers)
        # What is sent before the first token could only be sent while the link was free.
        free_s = max(self.free_s.get(end, 0.0) for end in ends)
        done_s = max(at_s + left_s, free_s + wire_s)
        for end in ends:
            self.free_s[end] = done_s
        return done_s + self.link.latency_s
