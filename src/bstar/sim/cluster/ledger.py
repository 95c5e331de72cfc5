"""What has become of every request of the cluster: arrays that all replicas write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bstar.sim.blocks import Key
from bstar.sim.load_keys import block_keys
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Ledger:
    """Per request: seconds (nan where it did not happen) and counts.

    last_s     its latest token
    made       tokens delivered
    replica    the engine that has it or had it last (decode pool), prefill_replica the one that made its first token
    retries    times its replica failed under it
    moved_bytes, moved_s   KV cache sent from a prefill to a decode replica, and the seconds from the first token
               until it had arrived
    """

    traffic: Traffic
    keys: list[Callable[[int], Key]]
    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    last_s: Floats
    moved_s: Floats
    moved_bytes: Floats
    made: Ints
    preemptions: Ints
    cached_tokens: Ints
    replica: Ints
    prefill_replica: Ints
    retries: Ints
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, traffic: Traffic, block_size: int) -> Ledger:
        """An empty ledger for a load. Arrivals are filled in as they happen."""
        n = traffic.num_requests
        seconds = [np.full(n, np.nan) for _ in range(6)]
        return cls(
            traffic, block_keys(traffic, block_size), *seconds, np.zeros(n),
            *(np.zeros(n, dtype=np.int64) for _ in range(3)), *(np.full(n, -1, dtype=np.int64) for _ in range(2)),
            np.zeros(n, dtype=np.int64), traffic.input_tokens.tolist(), traffic.output_tokens.tolist(),
            traffic.priority.tolist(),
        )  # fmt: skip
