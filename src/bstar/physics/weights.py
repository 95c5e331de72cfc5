"""Parameters and weight bytes: of the model, of a rank, and of what one decode step reads.

Everything is a sum over the tensors that the model's mechanisms list (`bstar.specs`): there is one list
and one rule of sharding (`bstar.physics.partition`), so counts, bytes and FLOPs cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from bstar.physics.partition import check_parallel, layers_in_stage, rank_formats, rank_shape, stage_bounds
from bstar.specs.attention import LatentAttention
from bstar.specs.ffn import MoeFfn
from bstar.specs.model import ExtraBlock, LayerGroup, ModelSpec, WeightFormats
from bstar.specs.parallel import ParallelSpec
from bstar.specs.tensors import WeightTensor

__all__ = [
    "ParameterCounts", "absorbed_weight_bytes", "check_parallel", "draft_weight_bytes", "expected_distinct_experts",
    "parameter_counts",
    "rank_shape", "stage_streamed_weight_bytes", "stage_weight_bytes", "streamed_weight_bytes", "weight_bytes",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Logical parameters (quantization aside) of a whole model.

    total      what transformers builds (towers by their `in_total`, MTP layers never)
    active     what one text token passes: all but the experts it is not routed to, towers and MTP apart
    experts    routed experts, all of them
    by_role    of the decoder, by operator
    """

    total: int
    active: int
    embedding: int
    lm_head: int
    experts: int
    vision: int
    mtp: int
    by_role: Mapping[str, int]


def parameter_counts(model: ModelSpec) -> ParameterCounts:
    """Count a model's parameters. A tied head is the embedding: it counts once, and 0 as `lm_head`."""
    roles: dict[str, int] = {}
    idle = 0
    for group in model.layers:
        for tensor in group.tensors(model.hidden_size):
            roles[tensor.role] = roles.get(tensor.role, 0) + tensor.parameters * group.count
            if tensor.shard == "expert" and isinstance(group.ffn, MoeFfn):
                skipped = tensor.copies - min(group.ffn.top_k, tensor.copies)
                idle += tensor.rows * tensor.columns * skipped * group.count
    for tensor in model.head_tensors + model.embedding + (model.lm_head if model.head_in_total else ()):
        roles[tensor.role] = roles.get(tensor.role, 0) + tensor.parameters
    decoder = sum(roles.values())
    towers = {role: sum(b.parameters for b in model.blocks if b.role == role) for role in ("vision", "mtp")}
    return ParameterCounts(
        total=decoder + sum(b.parameters for b in model.blocks if b.in_total),
        active=decoder - idle,
        embedding=sum(t.parameters for t in model.embedding),
        lm_head=0 if not model.head_in_total else sum(t.parameters for t in model.lm_head),
        experts=roles.get("experts", 0),
        vision=towers["vision"],
        mtp=towers["mtp"],
        by_role=MappingProxyType(roles),
    )


def weight_bytes(model: ModelSpec, parallel: ParallelSpec | None = None) -> int:
    """Bytes of weights on the most loaded rank, as stored in the checkpoint (`stage_weight_bytes`, largest stage)."""
    return max(stage_weight_bytes(model, parallel))


def stage_weight_bytes(model: ModelSpec, parallel: ParallelSpec | None = None) -> tuple[int, ...]:
    """Bytes of weights per rank of each pipeline stage.

    The embedding (and the towers) sit on the first stage, final norm and head on the last; a tied head
    makes the last stage hold a copy of the table. Engine-specific padding is added by `bstar.physics.loading`.
    """
    split = parallel or ParallelSpec()
    layer = [_layer_bytes(group, model.hidden_size, split) for group in model.layers]
    bounds = stage_bounds(model.num_layers, split.pp)
    stages = [
        sum(bytes_ * layers_in_stage(group, stage) for group, bytes_ in zip(model.layers, layer, strict=True))
        for stage in bounds
    ]
    formats = model.outer_formats
    stages[0] += _tables_bytes(model.embedding, formats, split)
    for block in model.blocks:
        if block.loaded:
            stages[-1 if block.role == "mtp" else 0] += block_bytes(block, split)
    stages[-1] += _tables_bytes(model.head_tensors, formats, split)
    if not model.tied:
        stages[-1] += _tables_bytes(model.lm_head, formats, split)
    elif split.pp > 1:
        stages[-1] += _tables_bytes(model.embedding, formats, split)
    return tuple(stages)


def block_bytes(block: ExtraBlock, parallel: ParallelSpec) -> int:
    """Bytes of an extra block (a tower, an MTP head) on one rank: by its tensors, else by TP as decoder layers are."""
    if block.tensors:
        return _tables_bytes(block.tensors, block.formats, parallel)
    return ceil(block.parameters * block.format.bits / 8 / parallel.tp)


def tensor_bytes(tensor: WeightTensor, formats: WeightFormats, parallel: ParallelSpec) -> int:
    """Stored bytes of one tensor on the rank that holds most of it, scales included."""
    rows, columns, copies = rank_shape(tensor, parallel)
    return formats.of(tensor).bytes_of(rows, columns) * copies


def _tables_bytes(tensors: tuple[WeightTensor, ...], formats: WeightFormats, parallel: ParallelSpec) -> int:
    return sum(tensor_bytes(t, formats, parallel) for t in tensors)


def _layer_bytes(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> int:
    return _tables_bytes(group.tensors(hidden_size), rank_formats(group, hidden_size, parallel), parallel)


def absorbed_weight_bytes(model: ModelSpec, parallel: ParallelSpec | None = None) -> tuple[int, ...]:
    """Extra bytes per stage that MLA's absorbed decode keeps: 16-bit copies of kv_b_proj beside the original.

    vLLM builds W_UK and W_UV after loading and keeps kv_b_proj for prefill
    (`MLAAttention.process_weights_after_loading`).
    """
    split = parallel or ParallelSpec()
    out = []
    for stage in stage_bounds(model.num_layers, split.pp):
        total = 0
        for group in model.layers:
            if isinstance(group.mixer, LatentAttention):
                total += layers_in_stage(group, stage) * _absorbed_bytes(group.mixer, split)
        out.append(total)
    return tuple(out)


def _absorbed_bytes(mixer: LatentAttention, parallel: ParallelSpec) -> int:
    width = ceil(mixer.num_heads / parallel.tp) * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    return width * mixer.kv_lora_rank * 2


def draft_weight_bytes(model: ModelSpec, parallel: ParallelSpec) -> int:
    """Bytes per rank (of the last stage) of the checkpoint's own prediction layers, which draft tokens."""
    blocks = [b for b in model.blocks if b.role == "mtp" and not b.loaded]
    absorbed = sum(_absorbed_bytes(m, parallel) for b in blocks for m in b.mixers if isinstance(m, LatentAttention))
    return sum(block_bytes(b, parallel) for b in blocks) + absorbed


def expected_distinct_experts(num_experts: int, top_k: int, tokens: float) -> float:
    """Expected experts that `tokens` tokens touch under uniform routing: n·(1 − (1 − k/n)^tokens)."""
    return float(num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens))


def streamed_weight_bytes(
    model: ModelSpec, parallel: ParallelSpec | None = None, *, tokens: float | None = None
) -> float:
    """Weight bytes that one decode step reads on the most loaded rank (largest pipeline stage).

    tokens   tokens of the batch of ONE attention-data-parallel rank (each rank's experts see
             `attention_dp` times as many). None: every expert is read (a large batch).
    The embedding is looked up, not streamed, but a tied head streams the table; towers and MTP layers are
    not read. Routed experts count by the expected number of distinct ones, shared experts always.
    """
    return max(stage_streamed_weight_bytes(model, parallel, tokens=tokens))


def stage_streamed_weight_bytes(
    model: ModelSpec, parallel: ParallelSpec | None = None, *, tokens: float | None = None
) -> tuple[float, ...]:
    """`streamed_weight_bytes` of each pipeline stage, per rank."""
    split = parallel or ParallelSpec()
    layer = [
        sum(
            tensor_bytes(tensor, formats, split) * fraction
            for tensor, fraction in _touched(group, model.hidden_size, split, tokens)
        )
        for group in model.layers for formats in [rank_formats(group, model.hidden_size, split)]
    ]
    stages = [
        float(sum(bytes_ * layers_in_stage(g, stage) for g, bytes_ in zip(model.layers, layer, strict=True)))
        for stage in stage_bounds(model.num_layers, split.pp)
    ]
    head = model.lm_head or (model.embedding if model.tied else ())
    stages[-1] += _tables_bytes(model.head_tensors, model.outer_formats, split)
    stages[-1] += sum(tensor_bytes(t, model.outer_formats, split) for t in head if t.rows > 1)
    stages[-1] += sum(block_bytes(b, split) for b in model.blocks if b.streamed)
    return tuple(stages)


def _touched(
    group: LayerGroup, hidden_size: int, parallel: ParallelSpec, tokens: float | None
) -> Iterator[tuple[WeightTensor, float]]:
    """Each tensor of one layer with the fraction of it that a step reads."""
    ffn = group.ffn
    fraction = 1.0
    if isinstance(ffn, MoeFfn) and tokens is not None:
        seen = tokens * parallel.attention_dp
        fraction = expected_distinct_experts(ffn.num_experts, ffn.top_k, seen) / ffn.num_experts
    for tensor in group.tensors(hidden_size):
        yield tensor, fraction if tensor.shard == "expert" else 1.0
