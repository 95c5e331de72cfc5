"""How one replica is cut into ranks: pipeline stages, and each tensor's share of the largest rank.

Follows vLLM (0.11 to 0.32): `distributed/utils.get_pp_indices` for the stages, the parallel linear
layers for the shares, `VocabParallelEmbedding` for the padding of the vocabulary. SGLang and
TensorRT-LLM cut dense layers the same way.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from bstar.errors import SpecError
from bstar.specs.attention import GatedDeltaNet, GroupedQueryAttention, LatentAttention, Mamba2
from bstar.specs.engine import EngineSettings
from bstar.specs.ffn import DenseFfn, MoeFfn
from bstar.specs.formats import TensorFormat
from bstar.specs.model import LayerGroup, ModelSpec, WeightFormats
from bstar.specs.parallel import ParallelSpec
from bstar.specs.tensors import WeightTensor

VOCAB_PADDING_ROWS = 64
# Scale blocks up to this size are padded by the kernels; larger ones have to divide.
PADDED_BLOCK = 32


def stage_bounds(num_layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """(first, end) layer of each pipeline stage: an even split, the remainder given to the stages before the last.

    Raises SpecError when there are more stages than layers.
    """
    if pp > num_layers:
        raise SpecError(f"pp: {pp} stages for {num_layers} layers; use at most {num_layers}")
    sizes = [num_layers // pp] * pp
    for back in range(2, num_layers % pp + 2):
        sizes[-back] += 1
    bounds, first = [], 0
    for size in sizes:
        bounds.append((first, first + size))
        first += size
    return tuple(bounds)


def layers_in_stage(group: LayerGroup, bounds: tuple[int, int]) -> int:
    """How many layers of `group` lie in the stage [first, end)."""
    first, end = bounds
    return sum(1 for index in group.indices if first <= index < end)


def padded_vocab_rows(rows: int) -> int:
    """Rows of a vocabulary table as the engine allocates them: the next multiple of 64."""
    return ceil(rows / VOCAB_PADDING_ROWS) * VOCAB_PADDING_ROWS


def rank_shape(tensor: WeightTensor, parallel: ParallelSpec) -> tuple[int, int, int]:
    """(rows, columns, copies) of `tensor` on the rank that holds most of it.

    Replicated tensors, and KV heads beyond min(tp, kv heads), count in full on every rank. Shares that
    do not divide are rounded up; whether the engine accepts them at all is `check_parallel`'s business.
    """
    rows, columns, copies = tensor.rows, tensor.columns, tensor.copies
    tp = parallel.tp
    if tensor.shard == "column":
        if rows == 1 and not tensor.matmul:
            return rows, ceil(columns / tp), copies
        return ceil(rows / tp), columns, copies
    if tensor.shard == "row":
        return rows, ceil(columns / tp), copies
    if tensor.shard == "kv":
        heads = max(tensor.heads, 1)
        return ceil(heads / min(tp, heads)) * (rows // heads), columns, copies
    if tensor.shard == "vocab":
        return ceil(padded_vocab_rows(rows) / tp), columns, copies
    if tensor.shard == "expert":
        return _expert_share(tensor, parallel)
    return rows, columns, copies


def _expert_share(tensor: WeightTensor, parallel: ParallelSpec) -> tuple[int, int, int]:
    """Experts go whole to EP ranks; what ranks are left share each expert's width."""
    rows, columns = tensor.rows, tensor.columns
    copies, width_ranks = ceil(tensor.copies / parallel.ep), parallel.moe_tp
    down = "down_proj" in tensor.name
    if not tensor.matmul:
        return rows, columns if down else ceil(columns / width_ranks), copies
    if down:
        return rows, ceil(columns / width_ranks), copies
    return ceil(rows / width_ranks), columns, copies


def rank_formats(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> WeightFormats:
    """The formats of a layer on a rank: the groups or blocks of its experts halved until a rank's share is whole ones.

    Engines repeat the scales then: of AWQ and GPTQ (vLLM's layers/quantization/moe_wna16.py), and of block fp8 since
    vLLM 0.29 (layers/fused_moe/oracle/fp8.py). What the least group does not divide is refused (`check_parallel`).
    """
    ffn = group.ffn
    if not isinstance(ffn, MoeFfn) or parallel.moe_tp == 1:
        return group.formats
    changed: dict[str, TensorFormat] = {}
    for tensor in ffn.tensors(hidden_size):
        fmt = group.formats.of(tensor)
        size = fmt.scale_block[1]
        if tensor.shard != "expert" or not tensor.matmul or not fmt.least_group:
            continue
        while size > fmt.least_group and (ffn.width // parallel.moe_tp % size or hidden_size % size):
            size //= 2
        if size != fmt.scale_block[1]:
            changed[tensor.name] = replace(fmt, scale_block=(min(fmt.scale_block[0], size), size))
    if not changed:
        return group.formats
    kept = tuple(o for o in group.formats.overrides if o[0] not in changed)
    return replace(group.formats, overrides=(*changed.items(), *kept))


def _cuts(fmt: TensorFormat, engine: EngineSettings | None) -> bool:
    """Whether the engine (None: the newest vLLM) cuts the groups or blocks of experts that are stored as `fmt`."""
    if not fmt.least_group or engine is None:
        return bool(fmt.least_group)
    if fmt.scale_block[0] == 1:
        return engine.name in ("vllm", "sglang")
    return engine.name == "vllm" and (engine.version_tuple or (99,)) >= (0, 29)


def check_parallel(model: ModelSpec, parallel: ParallelSpec, engine: EngineSettings | None = None) -> tuple[str, ...]:
    """Why the engine (None: the newest vLLM) would refuse this split of this model; empty where it accepts it.

    Each reason is one line: the rule, with its numbers.
    """
    reasons: list[str] = []
    tp = parallel.tp
    if parallel.pp > model.num_layers:
        reasons.append(f"pp: {parallel.pp} stages for {model.num_layers} layers")
    for table in model.embedding + model.lm_head:
        if table.shard == "vocab":
            reasons += _divisible(padded_vocab_rows(table.rows), tp, "the padded vocabulary")
    for group in model.layers:
        reasons += _check_mixer(group, parallel)
        reasons += _check_output_blocks(group, model.hidden_size, parallel)
        reasons += _check_ffn(group, model.hidden_size, parallel, engine)
    return tuple(dict.fromkeys(reasons))


def _divisible(value: int, ranks: int, what: str, flag: str = "tp") -> list[str]:
    return [] if value % ranks == 0 else [f"{flag}: {what} {value} is not divisible by {ranks}"]


def _check_mixer(group: LayerGroup, parallel: ParallelSpec) -> list[str]:
    mixer, tp = group.mixer, parallel.tp
    if isinstance(mixer, GroupedQueryAttention):
        kv = mixer.num_kv_heads
        out = _divisible(mixer.num_heads, tp, "num_attention_heads")
        if kv % tp and tp % kv:
            out.append(f"tp: {tp} neither divides nor is a multiple of num_key_value_heads {kv}")
        if parallel.dcp > max(1, tp // kv):
            out.append(f"dcp: {parallel.dcp} exceeds the {max(1, tp // kv)} replicas of a KV head at tp = {tp}")
        return out
    if isinstance(mixer, LatentAttention):
        return _divisible(mixer.num_heads, tp, "num_attention_heads")
    if isinstance(mixer, GatedDeltaNet):
        return _divisible(mixer.num_k_heads, tp, "linear_num_key_heads") + _divisible(
            mixer.num_v_heads, tp, "linear_num_value_heads")
    if isinstance(mixer, Mamba2):
        out = _divisible(mixer.num_heads, tp, "mamba num_heads")
        if mixer.num_groups % tp and mixer.num_groups != 1:
            out.append(f"tp: mamba n_groups {mixer.num_groups} is neither 1 nor divisible by tp = {tp}")
        return out
    return []


def _check_output_blocks(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> list[str]:
    """A rank's heads must be whole scale blocks of the output projection, which is split by its inputs.

    vLLM refuses what is not (AWQ and GPTQ linear methods, `validate_fp8_block_shape`); small blocks are padded.
    """
    out: list[str] = []
    for tensor in group.mixer.tensors(hidden_size):
        fmt, ranks = group.formats.of(tensor), parallel.tp
        block = fmt.scale_block[1]
        if tensor.shard != "row" or not tensor.matmul or not fmt.is_quantized or block < PADDED_BLOCK * 2:
            continue
        if tensor.columns % ranks == 0 and ranks > 1 and tensor.columns // ranks % block:
            out.append(f"tp: the {tensor.columns} inputs of {tensor.name} / {ranks} = {tensor.columns // ranks} are no "
                       f"multiple of the scale block {block}")
    return out


def _check_ffn(
    group: LayerGroup, hidden_size: int, parallel: ParallelSpec, engine: EngineSettings | None
) -> list[str]:
    ffn, tp = group.ffn, parallel.tp
    out: list[str] = []
    if isinstance(ffn, DenseFfn):
        out += _divisible(ffn.width, tp, "intermediate_size")
    elif isinstance(ffn, MoeFfn):
        if parallel.ep > ffn.num_experts:
            out.append(f"ep: {parallel.ep} ranks for {ffn.num_experts} experts")
        out += _divisible(ffn.width, parallel.moe_tp, "moe_intermediate_size")
        if ffn.shared_width:
            out += _divisible(ffn.shared_width, tp, "shared expert intermediate size")
        if ffn.parallel_dense_width:
            out += _divisible(ffn.parallel_dense_width, tp, "intermediate_size")
    return out or _check_scale_blocks(group, hidden_size, parallel, engine)


def _check_scale_blocks(
    group: LayerGroup, hidden_size: int, parallel: ParallelSpec, engine: EngineSettings | None
) -> list[str]:
    """A rank's share of an FFN must be whole scale blocks where blocks are large.

    Engines refuse, for example, half a group of 128 int4 weights of a dense FFN, or 192 columns of an expert in fp8
    blocks of 128 unless they cut its blocks (`rank_formats`); the small blocks of the fp4 formats are padded instead.
    """
    ffn = group.ffn
    if not isinstance(ffn, DenseFfn | MoeFfn):
        return []
    moe = isinstance(ffn, MoeFfn)
    ranks = parallel.moe_tp if moe else parallel.tp
    if ranks == 1:
        return []
    share, what = ffn.width // ranks, "moe_intermediate_size" if moe else "intermediate_size"
    out: list[str] = []
    formats = rank_formats(group, hidden_size, parallel)
    for tensor in ffn.tensors(hidden_size):
        cuts = moe and _cuts(group.formats.of(tensor), engine)
        fmt = (formats if cuts else group.formats).of(tensor)
        if not tensor.matmul or not fmt.is_quantized or (tensor.shard != "expert") == moe:
            continue
        block = fmt.scale_block[1 if "down_proj" in tensor.name else 0]
        if block >= (PADDED_BLOCK if cuts else PADDED_BLOCK * 2) and share % block:
            remedy = "; expert parallelism keeps experts whole" if moe else ""
            if not moe and fmt.scale_block[0] == 1:
                remedy = "; some publishers pad the width before quantizing: then give the checkpoint's own config.json"
            out.append(f"tp: {what} {ffn.width} / {ranks} = {share} is no multiple of the scale block {block}{remedy}")
    return out
