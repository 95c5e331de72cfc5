"""A model as engines see it: groups of layers by mechanism, an embedding, a head, and what rides along."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bstar.errors import SpecError
from bstar.specs.attention import Mixer
from bstar.specs.ffn import Ffn
from bstar.specs.formats import BF16, TensorFormat
from bstar.specs.tensors import Role, WeightTensor

# Roles that quantization leaves at the model's own dtype unless a checkpoint says otherwise.
UNQUANTIZED_ROLES: frozenset[Role] = frozenset(
    {"norm", "router", "embedding", "lm_head", "vision", "mtp", "attn", "mixer", "other"}
)


# GEMM weights that engines build without quantization whatever a recipe says; only a checkpoint that names
# them quantizes them.
UNQUANTIZED_TENSORS = frozenset({"mlp.shared_expert_gate", "self_attn.indexer.weights_proj"})
UNQUANTIZED_PREFIXES = ("self_attn.compressor.", "altup.", "laurel.", "hc_head.", "attn_hc.", "ffn_hc.")


def kept_unquantized(tensor: WeightTensor, fmt: TensorFormat) -> bool:
    """Whether the usual recipe for `fmt` leaves a GEMM weight in the model's dtype.

    NVFP4 recipes leave linear attention alone: published NVFP4 checkpoints of gated-delta hybrids keep its
    projections at 16 bits.
    """
    if tensor.name in UNQUANTIZED_TENSORS or tensor.name.startswith(UNQUANTIZED_PREFIXES):
        return True
    return fmt.name.startswith("nvfp4") and tensor.name.startswith("linear_attn.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormats:
    """Storage formats of a layer's tensors: `default` for every GEMM weight, `overrides` by tensor name.

    Tensors of an unquantized role, and every vector, are stored in `base` unless overridden.
    """

    base: TensorFormat = BF16
    default: TensorFormat = BF16
    overrides: tuple[tuple[str, TensorFormat], ...] = ()

    def of(self, tensor: WeightTensor) -> TensorFormat:
        for name, fmt in self.overrides:
            if name == tensor.name:
                return fmt
        if not tensor.matmul or tensor.role in UNQUANTIZED_ROLES:
            return self.base
        return self.default


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of one mechanism: the same mixer, FFN, extra tensors and formats.

    indices   positions in the stack, ascending (pipeline stages take a range of them)
    extra     norms and other tensors of each layer beside mixer and FFN
    one_reduction   tensor-parallel ranks add mixer and FFN up before they exchange: one all-reduce a layer, not two
    """

    indices: tuple[int, ...]
    mixer: Mixer
    ffn: Ffn
    extra: tuple[WeightTensor, ...] = ()
    formats: WeightFormats = WeightFormats()
    one_reduction: bool = False

    @property
    def count(self) -> int:
        return len(self.indices)

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        """The tensors of ONE layer of the group."""
        return self.mixer.tensors(hidden_size) + self.ffn.tensors(hidden_size) + self.extra


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraBlock:
    """Weights that are no decoder layer: a vision tower, an audio tower, MTP heads.

    streamed   whether a decode step reads them (a tower and an idle MTP head: no)
    in_total   whether `parameters.total` counts them (transformers' rule: towers mostly, MTP never)
    loaded     whether the engine loads them when it serves text
    tensors    what the block is made of where that is known tensor by tensor (MTP layers: `parameters` is their
               sum, and each is split over ranks and stored as `formats` say); else empty
    mixers     what of it keeps a cache while it runs, a layer each
    """

    name: str
    role: Role
    parameters: int
    format: TensorFormat = BF16
    streamed: bool = False
    in_total: bool = True
    loaded: bool = True
    tensors: tuple[WeightTensor, ...] = ()
    formats: WeightFormats = WeightFormats()
    mixers: tuple[Mixer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model, fully described; everything bstar says about a model is computed from this.

    dtype            of the checkpoint's unquantized tensors: "bf16", "fp16" or "fp32"
    head_tensors     final norm and other tensors outside the layers, embedding and head excluded
    embedding        lookup table(s): read by row, never streamed
    tied             the head is the embedding table (then it is streamed as the head, stored once)
    kv_cache_dtype   what the checkpoint asks the cache to be ("fp8", …), or None: engine's default
    converted_from   the checkpoint's own weight dtype where `weight_dtype` is not what it stores (the
                     engine has to quantize while loading, or another checkpoint is needed), else None
    source           where the description came from (catalog file, path)
    served_as        what an engine is told to serve: the Hub id or path that it was asked for by; None: the
                     catalog's Hub id of `name`
    engine_context_tokens  the engine's default max_model_len where it is not max_context_tokens (LongRoPE: the
                     original length)
    scaled_context_tokens  YaRN: original_max_position_embeddings · factor, where that is not max_context_tokens. vLLM
                     before 0.30 serves up to it; later releases take max_position_embeddings as already scaled
    rotary_positions  rows of the engine's rotary table where they are not max_context_tokens (linear scaling,
                     YaRN)
    counted_tied     whether `parameters.total` counts the head as the embedding, where transformers' class
                     and the engine disagree about it; None: as `tied`
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    layers: tuple[LayerGroup, ...]
    embedding: tuple[WeightTensor, ...]
    lm_head: tuple[WeightTensor, ...]
    tied: bool = False
    head_tensors: tuple[WeightTensor, ...] = ()
    blocks: tuple[ExtraBlock, ...] = ()
    outer_formats: WeightFormats = WeightFormats()
    dtype: str = "bf16"
    kv_cache_dtype: str | None = None
    weight_dtype: str = "bf16"
    num_mtp_layers: int = 0
    multimodal: bool = False
    checkpoint_weight_bytes: int | None = None
    converted_from: str | None = None
    source: str = ""
    notes: tuple[str, ...] = field(default=())
    counted_tied: bool | None = None
    engine_context_tokens: int | None = None
    scaled_context_tokens: int | None = None
    rotary_positions: int | None = None
    served_as: str | None = None

    def __post_init__(self) -> None:
        for label, value in (("hidden_size", self.hidden_size), ("vocab_size", self.vocab_size),
                             ("max_context_tokens", self.max_context_tokens)):
            if value <= 0:
                raise SpecError(f"{label}: must be positive, is {value}")
        seen = sorted(i for g in self.layers for i in g.indices)
        if seen != list(range(len(seen))) or not seen:
            raise SpecError("layers: every layer index must be in exactly one group")

    @property
    def head_in_total(self) -> bool:
        """Whether `parameters.total` counts the head beside the embedding."""
        return not (self.tied if self.counted_tied is None else self.counted_tied)

    @property
    def num_layers(self) -> int:
        return sum(g.count for g in self.layers)

    @property
    def is_moe(self) -> bool:
        return any(g.ffn.kind == "moe" for g in self.layers)

    def with_weight_format(self, fmt: TensorFormat) -> ModelSpec:
        """The same model with every GEMM weight that a recipe quantizes stored as `fmt` (an online quantization)."""

        def change(f: WeightFormats, tensors: tuple[WeightTensor, ...]) -> WeightFormats:
            kept = tuple((t.name, f.base) for t in tensors if t.matmul and kept_unquantized(t, fmt))
            return replace(f, default=fmt, overrides=kept if fmt.is_quantized else ())

        groups = tuple(replace(g, formats=change(g.formats, g.tensors(self.hidden_size))) for g in self.layers)
        blocks = tuple(
            replace(b, formats=change(b.formats, b.tensors), format=fmt) if b.tensors else b for b in self.blocks)
        return replace(self, layers=groups, blocks=blocks, outer_formats=change(self.outer_formats, self.head_tensors),
                       weight_dtype=fmt.name, checkpoint_weight_bytes=None)
