"""Bytes that collectives move between the ranks of one replica; no seconds.

    kind            what each rank sends (and receives) for a message of m bytes over n ranks
    allreduce       2·(n − 1)/n · m      ring and switch-reduced forms move this much over the link
    allgather       (n − 1)/n · m        m is the gathered message
    reducescatter   (n − 1)/n · m
    all_to_all      m                    m is what one rank sends, its own share left out
    p2p             m                    one hop
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["allreduce", "allgather", "reducescatter", "all_to_all", "p2p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of `ranks` ranks; `sent_bytes(message)` is what a rank puts on its link."""

    kind: CollectiveKind
    ranks: int

    def sent_bytes(self, message_bytes: float) -> float:
        """Bytes that one rank sends for a message of `message_bytes`."""
        return message_bytes * self.link_factor

    @property
    def link_factor(self) -> float:
        """Bytes on the link per message byte."""
        if self.kind in ("all_to_all", "p2p"):
            return 1.0
        share = (self.ranks - 1) / self.ranks
        return 2.0 * share if self.kind == "allreduce" else share


def expected_distinct_ranks(ranks: int, top_k: int) -> float:
    """Ranks that the top_k experts of one token live on, uniform routing: n·(1 − (1 − 1/n)^k)."""
    return ranks * (1.0 - (1.0 - 1.0 / ranks) ** top_k)
