"""FLOPs and bytes of any engine step, by operator, on one rank.

`compiled_step` turns a model on its ranks into operators whose work is linear in a few sums over the batch
(`bstar.physics.statistics`); evaluating a step is then a handful of small matrix products, and a decode
batch costs the same to evaluate whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bstar.physics.batch import BatchShape
from bstar.physics.collectives import Collective
from bstar.physics.layer_work import TOKENS, embedding_works, head_works, layer_works
from bstar.physics.mixing import Rank
from bstar.physics.partition import layers_in_stage, stage_bounds
from bstar.physics.statistics import Statistic, count, statistic_values
from bstar.physics.work import Coefficients, Kind, Work, collective_work
from bstar.specs.formats import KvFormat
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec

FloatArray = NDArray[np.float64]
Stage = int | Literal["heaviest", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The work of one operator in one step, all its layers on one rank.

    weight_bytes, read_bytes (activations), kv_read_bytes are disjoint; their sum is what is read. For a
    collective read_bytes and write_bytes go over the link. `tokens` is the row count M of its GEMM.
    """

    name: str
    kind: Kind
    flops: float
    weight_bytes: float
    read_bytes: float
    write_bytes: float
    kv_read_bytes: float
    compute_dtype: str | None
    weight_format: str
    launches: int
    tokens: float
    comm: Collective | None = None

    @property
    def moved_bytes(self) -> float:
        """Everything read and written."""
        return self.weight_bytes + self.read_bytes + self.kv_read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledStep:
    """Operators of a rank as matrices: row i, column j is what operator i costs per unit of statistic j.

    weight_bytes is with every expert read; `routed` marks rows whose weights are scaled by the expected
    share of distinct experts at the step's expert tokens.
    """

    works: tuple[Work, ...]
    statistics: tuple[Statistic, ...]
    attention_dp: int
    flops: FloatArray
    reads: FloatArray
    writes: FloatArray
    kv_reads: FloatArray
    rows: FloatArray
    message: FloatArray
    weight_bytes: FloatArray
    launches: FloatArray
    miss_base: FloatArray  # 1 − k/n of a routed row; 1 elsewhere
    routed: NDArray[np.bool_]
    expert_tokens_index: int
    # Statistics of one decode: the counts, and per decode span its limit (inf), share and whether it is chunked.
    decode_base: FloatArray
    decode_index: NDArray[np.int64]
    decode_limit: FloatArray
    decode_scale: FloatArray
    decode_chunk: NDArray[np.bool_]

    def values(self, shape: BatchShape, *, chunks_as_windows: bool = False) -> FloatArray:
        """The statistics of one step. `chunks_as_windows`: a chunked layer counts at its fullest."""
        return statistic_values(self.statistics, shape, self.attention_dp, chunks_as_windows=chunks_as_windows)

    def decode_values(self, context: float) -> FloatArray:
        """The statistics of one plain decode of `context` tokens: `values(BatchShape.decode(1, context))`, faster."""
        seen = max(float(context), 1.0)
        out = self.decode_base.copy()
        reach = np.minimum(seen, self.decode_limit)
        if self.decode_chunk.any():
            reach = np.where(self.decode_chunk, np.fmod(seen - 1.0, self.decode_limit) + 1.0, reach)
        out[self.decode_index] = reach * self.decode_scale
        return out

    def touched_weights(self, expert_tokens: FloatArray | float) -> FloatArray:
        """Weight bytes read per row; with an array of expert tokens (m,) the result is (rows, m)."""
        tokens = np.asarray(expert_tokens, dtype=float)
        if tokens.ndim == 0:
            out = self.weight_bytes.copy()
            out[self.routed] *= 1.0 - self.miss_base[self.routed] ** tokens
            return out
        out = np.repeat(self.weight_bytes[:, None], tokens.size, axis=1)
        for miss in np.unique(self.miss_base[self.routed]):
            out[self.routed & (self.miss_base == miss)] *= 1.0 - miss**tokens
        return out


@lru_cache(maxsize=128)
def compiled_step(model: ModelSpec, parallel: ParallelSpec, kv: KvFormat, stage: Stage = "all") -> CompiledStep:
    """Operators of one rank: of pipeline stage `stage`, of the heaviest one, or of all stages in sequence."""
    works = _merged(_stage_works(model, parallel, kv, stage))
    found: dict[Statistic, None] = dict.fromkeys([
        count("expert_tokens"), TOKENS, count("sequences"), count("decode_tokens"), count("prefill_tokens")])
    for work in works:
        found.update(dict.fromkeys(sorted(work.statistics, key=repr)))
    statistics = tuple(found)
    column = {s: j for j, s in enumerate(statistics)}

    def table(part: list[Coefficients]) -> FloatArray:
        out = np.zeros((len(works), len(statistics)))
        for i, coefficients in enumerate(part):
            for statistic, value in coefficients.items():
                out[i, column[statistic]] = value * works[i].layers
        return out

    rows = np.zeros((len(works), len(statistics)))
    for i, work in enumerate(works):
        rows[i, column[work.rows]] = 1.0
    layers = np.array([w.layers for w in works], dtype=float)
    spans = [(j, s) for j, (name, s) in enumerate(statistics) if s is not None and name.endswith("_decode")]
    return CompiledStep(
        works=works, statistics=statistics, attention_dp=parallel.attention_dp,
        flops=table([w.flops for w in works]), reads=table([w.reads for w in works]),
        writes=table([w.writes for w in works]), kv_reads=table([w.kv_reads for w in works]), rows=rows,
        message=table([w.message for w in works]),
        weight_bytes=np.array([w.weight_bytes for w in works]) * layers,
        launches=np.array([w.launches for w in works]) * layers,
        miss_base=np.array([1.0 - w.routing.top_k / w.routing.num_experts if w.routing else 1.0 for w in works]),
        routed=np.array([w.routing is not None for w in works]),
        expert_tokens_index=column["expert_tokens", None],
        decode_base=statistic_values(statistics, BatchShape.decode(1.0, 1.0), parallel.attention_dp),
        decode_index=np.array([j for j, _ in spans], dtype=np.int64),
        decode_limit=np.array([np.inf if s.limit is None else s.limit for _, s in spans], dtype=float),
        decode_scale=np.array([1.0 / s.stride / parallel.attention_dp for _, s in spans]),
        decode_chunk=np.array([s.chunked and s.limit is not None for _, s in spans], dtype=bool),
    )  # fmt: skip


def _stage_works(model: ModelSpec, parallel: ParallelSpec, kv: KvFormat, stage: Stage) -> list[Work]:
    rank = Rank(parallel, kv, model.dtype)
    bounds = stage_bounds(model.num_layers, parallel.pp)
    last = len(bounds) - 1
    if stage == "all":
        chosen, hops = (0, model.num_layers), last
        first_stage = last_stage = True
    else:
        # The last of the stages with most layers: it also has the head.
        at = max(range(len(bounds)), key=lambda i: (bounds[i][1] - bounds[i][0], i)) if stage == "heaviest" else stage
        chosen, hops = bounds[at], int(last > 0)
        first_stage, last_stage = at == 0, at == last
    works = embedding_works(model, rank) if first_stage else []
    for group in model.layers:
        layers = layers_in_stage(group, chosen)
        if layers:
            works += [w.repeated(layers) for w in layer_works(model, group, rank)]
    works += head_works(model, rank) if last_stage else []
    if hops:
        # Hidden state and residual go to the next stage.
        message: Coefficients = {TOKENS: 2.0 * model.hidden_size * rank.activation_bytes}
        works.append(collective_work("p2p", Collective(kind="p2p", ranks=2), message).repeated(hops))
    return works


def _merged(works: list[Work]) -> tuple[Work, ...]:
    """Equal operators of different layers (and groups) become one with the sum of their layers."""
    out: list[Work] = []
    for work in works:
        at = next((i for i, seen in enumerate(out) if seen.same_as(work)), None)
        if at is None:
            out.append(work)
        else:
            out[at] = out[at].repeated(out[at].layers + work.layers)
    return tuple(out)


def step_operators(
    model: ModelSpec, parallel: ParallelSpec, shape: BatchShape, kv: KvFormat, *, stage: Stage = "heaviest"
) -> tuple[Operator, ...]:
    """FLOPs and bytes of one step on one GPU, by operator (layers added up, attention phases apart).

    shape   the batch of the whole replica: each attention-data-parallel rank takes an equal share
    stage   which pipeline stage's GPU; "heaviest" by default, "all" adds every stage up
    """
    step = compiled_step(model, parallel, kv, stage)
    x = step.values(shape)
    weights = step.touched_weights(x[step.expert_tokens_index])
    flops, reads, writes, kv_reads = step.flops @ x, step.reads @ x, step.writes @ x, step.kv_reads @ x
    rows = step.rows @ x
    busy = rows > 0
    return tuple(
        Operator(
            name=work.name, kind=work.kind, flops=float(flops[i]), weight_bytes=float(weights[i] * busy[i]),
            read_bytes=float(reads[i]), write_bytes=float(writes[i]), kv_read_bytes=float(kv_reads[i]),
            compute_dtype=work.compute_dtype, weight_format=work.weight_format, launches=int(step.launches[i]),
            tokens=float(rows[i]), comm=work.collective,
        )
        for i, work in enumerate(step.works)
    )  # fmt: skip
