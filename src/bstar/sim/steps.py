"""What an engine did in time, as runs of equal steps: the log that series, gaps and utilizations are made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.metrics.gaps import TokenGaps

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A merged log keeps the runs of every replica; these are per run, and added up by nothing else.
_COLUMNS = (
    "start_s", "steps", "base_s", "slope_s", "regular", "made", "sequences", "running", "waiting", "used_blocks",
    "preempted", "prompt_tokens", "flops", "compute_s", "memory_s", "replica",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLog:
    """Runs of equal steps in the order of time, one entry each (a step with prompt chunks is a run of one).

    start_s            when the first step starts
    steps              how many
    base_s, slope_s    step j = 1 … steps takes base_s + slope_s · j
    regular            sequences that get a token in each step and got one in the step before: the step is their gap
    made               tokens that each step samples
    sequences          sequences with tokens in the step
    running, waiting   requests with a place in the run, and without one when it starts
    used_blocks        KV blocks that running requests hold after the last step
    preempted          requests that were preempted in its first step
    prompt_tokens      prompt tokens (and recomputed ones) in each step
    flops              of the whole run
    compute_s, memory_s   seconds of the whole run at peak FLOP/s, and at full bandwidth (weights and cache)
    replica            which engine
    single_gap_s       gaps between tokens that are no single step, one by one
    kv_blocks          KV blocks that requests can have, of all replicas
    block_size         tokens of one
    replicas           engines in the log
    """

    start_s: Floats
    steps: Ints
    base_s: Floats
    slope_s: Floats
    regular: Ints
    made: Ints
    sequences: Ints
    running: Ints
    waiting: Ints
    used_blocks: Ints
    preempted: Ints
    prompt_tokens: Ints
    flops: Floats
    compute_s: Floats
    memory_s: Floats
    replica: Ints
    single_gap_s: Floats
    kv_blocks: int
    block_size: int
    replicas: int = 1

    def __len__(self) -> int:
        return int(self.start_s.size)

    @property
    def duration_s(self) -> Floats:
        """Seconds of each run."""
        m = self.steps.astype(float)
        return m * self.base_s + self.slope_s * (m * (m + 1.0) / 2.0)

    @property
    def end_s(self) -> Floats:
        return self.start_s + self.duration_s

    @property
    def num_steps(self) -> int:
        return int(self.steps.sum())

    @property
    def mean_used_blocks(self) -> Floats:
        """Blocks in use, averaged over the steps of each run: decodes fill blocks as they go."""
        grown = self.made * (self.steps - 1.0) / self.block_size
        return np.maximum(self.used_blocks - grown / 2.0, 0.0)

    @property
    def gaps(self) -> TokenGaps:
        """The gaps between tokens of all requests."""
        keep = self.regular > 0
        return TokenGaps(
            base_s=self.base_s[keep], slope_s=self.slope_s[keep], steps=self.steps[keep],
            weight=self.regular[keep], single_s=self.single_gap_s,
        )  # fmt: skip

    @property
    def busy_s(self) -> float:
        """Seconds in steps, over all replicas."""
        return float(self.duration_s.sum())

    @property
    def mbu(self) -> float | None:
        """Fraction of the bandwidth that reading weights and cache once per step takes, while busy."""
        return float(self.memory_s.sum()) / self.busy_s if self.busy_s > 0 else None

    @property
    def mfu(self) -> float | None:
        """Fraction of the peak FLOP/s (of each operator's dtype) that the model's arithmetic takes, while busy."""
        return float(self.compute_s.sum()) / self.busy_s if self.busy_s > 0 else None

    def kv_usage(self, start_s: float, end_s: float) -> float | None:
        """Mean over time of the fraction of KV blocks in use; idle time counts as unused."""
        spent = (end_s - start_s) * self.kv_blocks
        return float(self.mean_used_blocks @ self.duration_s) / spent if spent > 0 else None

    def max_kv_usage(self) -> float:
        """The most that one replica had in use."""
        per_replica = self.kv_blocks / self.replicas
        return float(self.used_blocks.max(initial=0)) / per_replica if per_replica > 0 else 0.0

    def after(self, start_s: float) -> StepLog:
        """The runs that start at `start_s` or later (single gaps are kept whole)."""
        keep = self.start_s >= start_s
        return replace(self, **{name: getattr(self, name)[keep] for name in _COLUMNS})


class StepRows:
    """Collects the rows of a log."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.regular: list[int] = []
        self.single_gap_s: list[float] = []

    def add(self, **row: float) -> int:
        """Add a run; returns its index. `regular` is counted later, in `self.regular`."""
        self.rows.append(tuple(row[name] for name in _COLUMNS if name not in ("regular", "replica")))
        self.regular.append(int(row.get("regular", 0)))
        return len(self.rows) - 1

    def log(self, *, kv_blocks: int, block_size: int, replica: int = 0) -> StepLog:
        names = [name for name in _COLUMNS if name not in ("regular", "replica")]
        table = np.array(self.rows, dtype=float).reshape(len(self.rows), len(names))
        columns: dict[str, Any] = {
            name: table[:, i] if name.endswith("_s") or name == "flops" else table[:, i].astype(np.int64)
            for i, name in enumerate(names)
        }
        return StepLog(
            **columns, regular=np.array(self.regular, dtype=np.int64),
            replica=np.full(len(self.rows), replica, dtype=np.int64),
            single_gap_s=np.array(self.single_gap_s, dtype=float), kv_blocks=kv_blocks, block_size=block_size,
        )  # fmt: skip


def merged(logs: list[StepLog]) -> StepLog:
    """The log of several replicas, in the order of time."""
    if len(logs) == 1:
        return logs[0]
    columns = {name: np.concatenate([getattr(log, name) for log in logs]) for name in _COLUMNS}
    order = np.argsort(columns["start_s"], kind="stable")
    return StepLog(
        **{name: column[order] for name, column in columns.items()},
        single_gap_s=np.concatenate([log.single_gap_s for log in logs]),
        kv_blocks=sum(log.kv_blocks for log in logs), block_size=logs[0].block_size,
        replicas=sum(log.replicas for log in logs),
    )  # fmt: skip
