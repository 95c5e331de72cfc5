"""What a GPU holds once weights are loaded, where that is not what the checkpoint stores.

Engines pad quantized experts to their kernel's tiles, keep copies (the absorbed matrices of MLA) and
tables (rotary embedding). All of it is in the "model loading took N GiB" line of the engine's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from bstar.physics.partition import layers_in_stage, rank_formats, rank_shape, stage_bounds
from bstar.physics.weights import absorbed_weight_bytes, stage_weight_bytes, tensor_bytes
from bstar.specs.attention import CompressedAttention, GroupedQueryAttention, LatentAttention, Mixer, ParallelMixers
from bstar.specs.device import DeviceSpec
from bstar.specs.model import LayerGroup, ModelSpec
from bstar.specs.parallel import ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Multiples that a kernel rounds an expert's sizes up to.

    value_columns   a further multiple for the packed values alone (not their scales)
    """

    hidden: int = 1
    width: int = 1
    value_columns: int = 1


def mxfp4_tiles(device: DeviceSpec | None) -> ExpertTiles:
    """Padding of mxfp4 experts by vLLM's default kernel on a device (quantization/mxfp4.py, 0.11 to 0.32).

    Hopper: Triton, whose value layout pads the summed dimension to 256 (64.38 GiB for gpt-oss-120b; the scales
    are not padded); Blackwell data-centre: TRT-LLM; everything else Marlin (65.97 GiB).
    """
    if device is None or device.vendor != "nvidia":
        return ExpertTiles(hidden=256, width=256) if device is not None and device.vendor == "amd" else ExpertTiles()
    generation = (device.compute_capability or 0) // 10
    if generation == 9:
        return ExpertTiles(width=64, value_columns=256)
    if generation == 10:
        return ExpertTiles(hidden=256, width=256)
    return ExpertTiles(hidden=256, width=128)


def loaded_weight_bytes(
    model: ModelSpec, parallel: ParallelSpec | None = None, device: DeviceSpec | None = None
) -> tuple[int, ...]:
    """Bytes that the engine reports after loading, per rank, for each pipeline stage."""
    split = parallel or ParallelSpec()
    bounds = stage_bounds(model.num_layers, split.pp)
    tiles = mxfp4_tiles(device)
    stored = stage_weight_bytes(model, split)
    absorbed = absorbed_weight_bytes(model, split)
    padding = [
        sum(_expert_padding(g, model.hidden_size, split, tiles) * layers_in_stage(g, b) for g in model.layers)
        for b in bounds
    ]
    rope = _rotary_table_bytes(model)
    return tuple(s + a + p + rope for s, a, p in zip(stored, absorbed, padding, strict=True))


def offloaded_weight_bytes(model: ModelSpec, parallel: ParallelSpec, limit: int) -> tuple[int, ...]:
    """Bytes of weights per rank of each stage that stay in host memory under `limit` bytes (vLLM --cpu-offload-gb).

    vLLM moves whole parameters, in the order of a stage's layers, until at least `limit` bytes are moved
    (model_executor/offloader/uva.py); embedding and head never move.
    """
    if not limit:
        return (0,) * parallel.pp
    by_layer = {i: parameters for g in model.layers for parameters in [_fused(g, model.hidden_size, parallel)]
                for i in g.indices}
    out = []
    for first, end in stage_bounds(model.num_layers, parallel.pp):
        moved = 0
        for size in (size for i in range(first, end) for size in by_layer[i]):
            if moved >= limit:
                break
            moved += size
        out.append(moved)
    return tuple(out)


def _fused(group: LayerGroup, hidden_size: int, parallel: ParallelSpec) -> list[int]:
    """Bytes of each parameter of a layer as engines build them: q, k and v in one, gate and up in one."""
    sizes: dict[str, int] = {}
    formats = rank_formats(group, hidden_size, parallel)
    for tensor in group.tensors(hidden_size):
        parent, _, leaf = tensor.name.rpartition(".")
        fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        name = f"{parent}.{fused.get(leaf, leaf)}"
        sizes[name] = sizes.get(name, 0) + tensor_bytes(tensor, formats, parallel)
    return list(sizes.values())


def _round_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple


def _expert_padding(group: LayerGroup, hidden_size: int, parallel: ParallelSpec, tiles: ExpertTiles) -> int:
    """Extra bytes of one layer's experts on one rank when they are mxfp4."""
    extra = 0
    for tensor in group.ffn.tensors(hidden_size):
        fmt = group.formats.of(tensor)
        if tensor.shard != "expert" or not fmt.name.startswith("mxfp4"):
            continue
        if not tensor.matmul:
            continue
        rows, columns, copies = rank_shape(tensor, parallel)
        down = "down_proj" in tensor.name
        # Gate and up are padded one by one.
        halves = 2 if "gate_up" in tensor.name and rows % 2 == 0 else 1
        padded_rows = _round_up(rows, tiles.hidden) if down else halves * _round_up(rows // halves, tiles.width)
        padded_columns = _round_up(columns, tiles.width if down else tiles.hidden)
        total = fmt.bytes_of(padded_rows, padded_columns)
        total += padded_rows * (_round_up(padded_columns, tiles.value_columns) - padded_columns) * fmt.bits // 8
        extra += (total - fmt.bytes_of(rows, columns)) * copies
    return extra


def _rotary_table_bytes(model: ModelSpec) -> int:
    """cos and sin of every position: one table of (positions × rotary width) 16-bit values per rotary width."""
    widths = {w for g in model.layers for m in _branches(g.mixer) if (w := _rotary_width(m))}
    positions = getattr(model, "rotary_positions", None) or model.max_context_tokens
    return sum(positions * width * 2 for width in widths)


def _branches(mixer: Mixer) -> tuple[Mixer, ...]:
    return mixer.branches if isinstance(mixer, ParallelMixers) else (mixer,)


def _rotary_width(mixer: Mixer) -> int:
    if isinstance(mixer, GroupedQueryAttention):
        return mixer.head_dim
    if isinstance(mixer, LatentAttention):
        return mixer.qk_rope_head_dim
    if isinstance(mixer, CompressedAttention):
        return mixer.rope_head_dim
    return 0
