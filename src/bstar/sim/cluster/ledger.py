"""What has become of every request of the cluster: arrays that all replicas write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.sim.blocks import Key
from bstar.sim.load_keys import block_keys
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Ledger:
    """Per request: seconds (nan where it did not happen) and counts.

    last_s     its latest token
    made       tokens delivered
    replica    the engine that has it or had it last (decode pool), prefill_replica the one that made its first token
    retries    times its replica failed under it
    moved_bytes, moved_s   KV cache sent from a prefill to a decode replica, and the seconds from the end of the prefill
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
    input_tokens: list[int]
    output_tokens: list[int]
    priority: list[int]

    @classmethod
    def bare(cls, traffic: Traffic) -> Ledger:
        """A ledger for compiled engines, which keep their own accounts; `retries` is written here."""
        ledger = cls.of(traffic.take(np.arange(1)) if traffic.is_open_loop else traffic, 1)
        ledger.retries = np.zeros(traffic.num_requests, dtype=np.int64)
        return ledger

    @classmethod
    def of(cls, traffic: Traffic, block_size: int) -> Ledger:
        """An empty ledger for a load. Arrivals are filled in as they happen."""
        n = traffic.num_requests

        def never() -> Floats:
            return np.full(n, np.nan)

        def none(value: int = 0) -> Ints:
            return np.full(n, value, dtype=np.int64)

        return cls(
            traffic=traffic, keys=block_keys(traffic, block_size), arrival_s=never(), scheduled_s=never(),
            first_token_s=never(), finish_s=never(), last_s=never(), moved_s=never(), moved_bytes=np.zeros(n),
            made=none(), preemptions=none(), cached_tokens=none(), replica=none(-1), prefill_replica=none(-1),
            retries=none(), input_tokens=traffic.input_tokens.tolist(), output_tokens=traffic.output_tokens.tolist(),
            priority=traffic.priority.tolist(),
        )  # fmt: skip
