"""The kernel's run log as a `StepLog`, chunk by chunk while the kernel runs, with the work of every run.

FLOPs and bytes of a step are linear in its counts (`bstar.physics.statistics`) but for the weights that it touches,
and the counts of a run grow linearly: one small matrix product gives the work of a chunk of runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from bstar.latency.step_model import StepModel
from bstar.physics.statistics import Statistic
from bstar.sim.steps import StepLog

if TYPE_CHECKING:
    from bstar.sim.kernel.cost import StepCost

Floats = NDArray[np.float64]

# Columns of the kernel's run log; pairs and keys per prompt span follow, then reach and growth per decode span.
(_START, _STEPS, _BASE, _SLOPE, _REGULAR, _SAMPLED, _RUNNING, _WAITING, _FREE, _PREEMPTED, _CONTEXT, _DECODES, _PROMPT,
 _CACHED, _CHUNKS, _SPANS) = range(16)  # fmt: skip

_SECONDS: Final = {"start_s": _START, "base_s": _BASE, "slope_s": _SLOPE}
_COUNTS: Final = {
    "steps": _STEPS, "regular": _REGULAR, "made": _SAMPLED, "running": _RUNNING, "waiting": _WAITING,
    "preempted": _PREEMPTED, "prompt_tokens": _PROMPT,
}  # fmt: skip


_PIECE: Final = 1024
_NAMES: Final = (*_SECONDS, *_COUNTS, "sequences", "used_blocks", "flops", "compute_s", "memory_s")


class LogFold:
    """Takes chunks of a run log (`fold`), gives the whole as a `StepLog`. Room for rows is doubled as they come."""

    def __init__(
        self, model: StepModel, cost: StepCost, *, kv_blocks: int, block_size: int, expected_rows: int = 1024
    ) -> None:
        self.kv_blocks, self.block_size = kv_blocks, block_size
        self.work = RunWork(model, cost)
        self.rows = 0
        self._columns = {name: np.empty(expected_rows, _kind(name)) for name in _NAMES}
        self._gaps: list[Floats] = []

    def fold(self, runs: Floats, gaps_s: Floats) -> None:
        """Add a chunk; neither array is kept."""
        first, last = self.rows, self.rows + len(runs)
        room = len(self._columns["steps"])
        if last > room:  # all columns at once: an interrupt leaves the fold as it was
            larger = {name: np.empty(max(last, 2 * room), column.dtype) for name, column in self._columns.items()}
            for name, column in self._columns.items():
                larger[name][:first] = column[:first]
            self._columns = larger
        out = {name: column[first:last] for name, column in self._columns.items()}
        for name, at in (*_SECONDS.items(), *_COUNTS.items()):
            out[name][:] = runs[:, at]
        out["sequences"][:] = runs[:, _DECODES] + runs[:, _CHUNKS]
        out["used_blocks"][:] = self.kv_blocks - runs[:, _FREE]
        out["flops"][:], out["compute_s"][:], out["memory_s"][:] = self.work.of(runs)
        self._gaps.append(gaps_s.copy())
        self.rows = last

    def log(self) -> StepLog:
        """All chunks so far."""
        columns = {name: column[: self.rows] for name, column in self._columns.items()}
        return StepLog(
            **columns, replica=np.broadcast_to(np.zeros(1, np.int32), (self.rows,)),  # type: ignore[arg-type]
            single_gap_s=np.concatenate([*self._gaps, np.zeros(0)]), kv_blocks=self.kv_blocks,
            block_size=self.block_size,
        )  # fmt: skip


def _kind(name: str) -> type[np.float64] | type[np.int32]:
    return np.float64 if name.endswith("_s") or name == "flops" else np.int32


class RunWork:
    """FLOPs, seconds at peak FLOP/s and seconds at full bandwidth of runs of steps, on one rank."""

    def __init__(self, model: StepModel, cost: StepCost) -> None:
        self.prompts, self.spans = cost.prompt_limit.size, cost.span_limit.size
        self.width = _SPANS + 2 * self.prompts + 2 * self.spans
        self.stages = float(model.pipeline_stages)
        rows = [_weights_of(statistic, model, cost, self.width) for statistic in model.step.statistics]
        counts = np.array(rows)  # statistics per unit of each column
        flops, compute, memory = model.step.flops, model.rates[3], model.rates[4]
        # Weights, by what makes them active and by the routing that decides which are missed (None: all are read).
        routing = dict(zip(model.routed.tolist(), zip(model.load.experts, model.load.top_k, strict=True), strict=True))
        groups: dict[tuple[int, tuple[float, float] | None], float] = {}
        for i, (row, seconds) in enumerate(zip(model.row_index.tolist(), model.light_weights_s.tolist(), strict=True)):
            key = row, routing.get(i)
            groups[key] = groups.get(key, 0.0) + seconds
        self.weights = [
            (seconds, None if kind is None else replace(
                model.load, experts=np.array([kind[0]]), top_k=np.array([kind[1]]), ranks=np.ones(1)))
            for (_, kind), seconds in groups.items()
        ]  # fmt: skip
        # One product of a chunk's columns: FLOPs, compute and memory seconds, expert tokens, what activates weights.
        self.linear = np.stack([
            counts.T @ flops.sum(axis=0), counts.T @ compute.sum(axis=0) / self.stages,
            counts.T @ memory.sum(axis=0) / self.stages, counts[model.step.expert_tokens_index] / self.stages,
            *(counts[row] for row, _ in groups),
        ], axis=1)  # fmt: skip

    def of(self, runs: Floats) -> tuple[Floats, Floats, Floats]:
        """(FLOPs, compute seconds, memory seconds) of each run: sums over its steps."""
        steps, mean = runs[:, _STEPS], runs.copy()
        for g in range(self.spans):  # reach halfway through the run
            at = _SPANS + 2 * self.prompts + 2 * g
            mean[:, at] += runs[:, at + 1] * ((steps - 1.0) / 2.0)
        work = np.empty((len(mean), self.linear.shape[1]))
        for first in range(0, len(mean), _PIECE):  # small enough that the product does not start threads
            np.matmul(mean[first : first + _PIECE], self.linear, out=work[first : first + _PIECE])
        memory_s = work[:, 2]
        for g, (seconds, load) in enumerate(self.weights):
            active = work[:, 4 + g] > 0
            touched = active if load is None else active * (1.0 - load.missed(work[:, 3])[0])
            memory_s = memory_s + seconds * touched
        return steps * work[:, 0], steps * work[:, 1], steps * memory_s


def _weights_of(statistic: Statistic, model: StepModel, cost: StepCost, width: int) -> Floats:
    """A statistic of `bstar.physics`, on one rank, as weights of the log's columns."""
    name, span = statistic
    out = np.zeros(width)
    if span is None:
        tokens = float(model.step.attention_dp) if name == "expert_tokens" else 1.0
        columns = {
            "tokens": (_DECODES, _PROMPT), "decode_tokens": (_DECODES,), "prefill_tokens": (_PROMPT,),
            "expert_tokens": (_DECODES, _PROMPT), "sampled": (_DECODES, _CHUNKS), "sequences": (_DECODES, _CHUNKS),
            "cached_prefill": (_CACHED,),
        }  # fmt: skip
        out[list(columns[name])] = tokens
        return out
    limit, restarts = span.limit or 0, bool(span.chunked and span.limit)
    prompts = cost.prompt_limit.size
    if name.endswith("_prefill"):
        for g in range(prompts):
            if (cost.prompt_limit[g], bool(cost.prompt_restarts[g]), bool(cost.prompt_gathers[g]),
                    cost.prompt_stride[g]) == (limit, restarts, span.gather, span.stride):  # fmt: skip
                out[_SPANS + 2 * g + (name == "keys_prefill")] = 1.0
                break
        return out
    for g in range(cost.span_limit.size):
        if (cost.span_limit[g], bool(cost.span_restarts[g])) == (limit, restarts):
            out[_SPANS + 2 * prompts + 2 * g] = 1.0 / span.stride
            break
    return out
