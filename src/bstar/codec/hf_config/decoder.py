"""A decoder while it is being read: per-layer mechanisms, then groups of equal layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bstar.codec.hf_config.reader import MAX_CONTEXT, Reader
from bstar.specs.attention import Mixer
from bstar.specs.ffn import Ffn
from bstar.specs.model import ExtraBlock
from bstar.specs.tensors import Role, WeightTensor, vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: mixer, FFN and the norms and gates beside them. one_reduction: see LayerGroup."""

    mixer: Mixer
    ffn: Ffn
    extra: tuple[WeightTensor, ...] = ()
    one_reduction: bool = False


@dataclass(slots=True, kw_only=True)
class Decoder:
    """The text model of a config, before quantization.

    mtp_layer   what a prediction layer is made of, where it is not the last layer's mechanisms
    """

    hidden_size: int
    vocab_size: int
    layers: list[Layer]
    embedding: tuple[WeightTensor, ...]
    lm_head: tuple[WeightTensor, ...]
    head_tensors: tuple[WeightTensor, ...]
    tied: bool
    context: int
    blocks: tuple[ExtraBlock, ...] = ()
    mtp_layer: Layer | None = None
    multimodal: bool = False
    kv_cache_dtype: str | None = None
    notes: tuple[str, ...] = field(default=())


LayerMixers = Callable[[Reader, int], Sequence[Mixer]]
LayerFfns = Callable[[Reader, int], Sequence[Ffn]]


def norm_vectors(name: str, width: int, kind: str) -> tuple[WeightTensor, ...]:
    """A norm's weights: "rms" (weight), "layer" (weight and bias), "none" (no parameters)."""
    if kind == "none":
        return ()
    weight = vector(name, "norm", width)
    return (weight, vector(f"{name}.bias", "norm", width)) if kind == "layer" else (weight,)


def table(name: str, role: Role, rows: int, columns: int) -> WeightTensor:
    """An embedding table or a head: split by vocabulary rows."""
    return WeightTensor(name=name, role=role, rows=rows, columns=columns, shard="vocab", matmul=role == "lm_head")


TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


NO_LIMIT = 1 << 20  # context of models that have no positions (state-space models)


_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len",
                "max_context_length", "max_target_positions")


def max_context(r: Reader, *, default: int | None = None) -> int:
    """Positions the model was made for; `default` where the config need not say.

    As vLLM decides between several (derive_max_model_len_and_key): model_max_length where it is stated (Command R,
    whose max_position_embeddings is what it was trained at), else the smallest of those that are.
    """
    if r.has("model_max_length"):
        return r.size("model_max_length", high=MAX_CONTEXT)
    stated = [r.size(key, high=MAX_CONTEXT) for key in _LENGTH_KEYS if r.has(key)]
    return min(stated) if stated else r.size(*_LENGTH_KEYS, "model_max_length", default=default, high=MAX_CONTEXT)


def decoder(
    r: Reader, *, mixers: LayerMixers, ffns: LayerFfns,
    norms: Sequence[str] = TWO_NORMS, norm: str = "rms", final_norm: bool = True,
    layer_extra: Callable[[Reader, int], Sequence[tuple[WeightTensor, ...]]] | None = None,
    tied: bool | None = None, head_bias: bool = False, positions: int = 0,
    layer_keys: tuple[str, ...] = (), context_default: int | None = None,
) -> Decoder:
    """A decoder of `mixers` and `ffns` with the same norms in every layer.

    positions    rows of a learned position table (0: none)
    layer_extra  further tensors of each layer
    """
    n = r.layer_count(*layer_keys)
    h, vocab = r.hidden_size(), r.vocab_size()
    shared = tuple(t for name in norms for t in norm_vectors(name, h, norm))
    extras = layer_extra(r, n) if layer_extra else [()] * n
    layers = [Layer(mixer=m, ffn=f, extra=shared + tuple(x))
              for m, f, x in zip(mixers(r, n), ffns(r, n), extras, strict=True)]
    embedding = [table("embed_tokens", "embedding", vocab, h)]
    if positions:
        embedding.append(WeightTensor(name="embed_positions", role="embedding", rows=positions, columns=h,
                                      matmul=False))
    head = [table("lm_head", "lm_head", vocab, h)]
    is_tied = r.flag("tie_word_embeddings", default=False) if tied is None else tied
    final = list(norm_vectors("norm", h, norm)) if final_norm else []
    if head_bias:
        final.append(vector("lm_head.bias", "other", vocab))
    return Decoder(hidden_size=h, vocab_size=vocab, layers=layers, embedding=tuple(embedding), lm_head=tuple(head),
                   head_tensors=tuple(final), tied=is_tied,
                   context=max_context(r, default=context_default))


def with_extra(layers: Sequence[Layer], extra: tuple[WeightTensor, ...]) -> list[Layer]:
    """The layers with further tensors each."""
    return [replace(layer, extra=layer.extra + extra) for layer in layers]
