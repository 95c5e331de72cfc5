"""State-space decoders: Mamba 1 and 2 alone, beside or between attention layers."""

from __future__ import annotations

from collections.abc import Sequence

from bstar.codec.hf_config.decoder import NO_LIMIT, Decoder, Layer, decoder, max_context, norm_vectors, table
from bstar.codec.hf_config.ffns import EXPERT_KEYS, dense, experts_ffn
from bstar.codec.hf_config.hybrids import hybrid_types
from bstar.codec.hf_config.mixers import (
    gqa,
    head_count,
    head_width,
    kv_head_count,
    mamba2,
    model_bits,
    per_head,
    window_size,
)
from bstar.codec.hf_config.reader import MAX_EXPERTS, MAX_LAYERS, Reader
from bstar.specs.attention import GroupedQueryAttention, Mamba1, Mamba2, Mixer, NoMixer, ParallelMixers
from bstar.specs.ffn import DenseFfn, Ffn, NoFfn

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCKS = {"linear_attention": "mamba", "mamba": "mamba", "full_attention": "attention", "attention": "attention",
           "mlp": "mlp", "moe": "moe"}


def nemotron_h(r: Reader) -> Decoder:
    """Nemotron-H, Nemotron 3: each layer is one of Mamba 2, attention, FFN or experts, behind one norm."""
    h = r.hidden_size()
    kinds = _nemotron_kinds(r)
    r.unused("mamba_num_heads", "ssm_state_size", *EXPERT_KEYS, "moe_intermediate_size", "moe_latent_size",
             "n_shared_experts")
    mixers: dict[str, Mixer] = {"mlp": NoMixer(), "moe": NoMixer()}
    ffns: dict[str, Ffn] = {"mamba": NoFfn(), "attention": NoFfn()}
    if "attention" in kinds:
        heads = head_count(r)
        dim = head_width(r, heads, "head_dim", "attention_head_dim")
        r.find("attention_bias", "mamba_proj_bias")
        mixers["attention"] = GroupedQueryAttention(
            num_heads=heads, num_kv_heads=kv_head_count(r, heads), head_dim=dim, v_head_dim=dim,
            window=window_size(r))
    if "mamba" in kinds:
        mixers["mamba"] = mamba2(
            r, heads=r.size("mamba_num_heads"), head_dim=r.size("mamba_head_dim"), state=r.size("ssm_state_size"),
            groups=r.size("mamba_n_groups", "n_groups"), kernel=r.size("mamba_d_conv", "conv_kernel"),
            conv_bias=r.flag("mamba_conv_bias", "use_conv_bias"), proj_bias=r.flag("use_bias"),
            out_bias=r.flag("use_bias"), default_bits=32)
    if "mlp" in kinds:
        ffns["mlp"] = DenseFfn(width=r.size("intermediate_size"), gated=False, bias=r.flag("mlp_bias"))
    if "moe" in kinds:
        ffns["moe"] = experts_ffn(
            r, count=r.size(*EXPERT_KEYS, high=MAX_EXPERTS), top_k=r.size("num_experts_per_tok"),
            width=r.size("moe_intermediate_size"), gated=False, latent_size=r.optional_size("moe_latent_size"),
            shared_width=r.size("moe_shared_expert_intermediate_size"), shared_bias=r.flag("mlp_bias"))
    norm = norm_vectors("norm", h, "rms")
    layers = [Layer(mixer=mixers[k], ffn=ffns[k], extra=norm) for k in kinds]
    vocab = r.vocab_size()
    return Decoder(
        hidden_size=h, vocab_size=vocab, layers=layers, embedding=(table("embeddings", "embedding", vocab, h),),
        lm_head=(table("lm_head", "lm_head", vocab, h),), head_tensors=norm_vectors("norm_f", h, "rms"),
        tied=False, context=max_context(r))


def _nemotron_kinds(r: Reader) -> list[str]:
    pattern = r.find("hybrid_override_pattern")
    words = r.words("layers_block_type", "layer_types", allowed=tuple(_BLOCKS))
    if words is None and pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_PATTERN):
            raise r.fail("hybrid_override_pattern", "must be letters M (Mamba), * (attention), - (FFN) and E (experts)")
        words = [_PATTERN[c] for c in pattern]
    if words is None:
        words = ["mamba", "moe", "attention", "mlp"]
    if not 1 <= len(words) <= MAX_LAYERS:
        raise r.fail("layers_block_type", f"has {len(words)} entries; a model has 1 to {MAX_LAYERS} layers")
    count = r.find("num_hidden_layers")
    if count is not None and r.layer_count("num_hidden_layers") != len(words):
        raise r.fail("num_hidden_layers", f"is {count}, but the pattern of blocks has {len(words)} entries")
    r.find("expand")
    return [_BLOCKS[w] for w in words]


def _mamba2_d(r: Reader, *, inner: int, gated_norm: bool = True) -> Mamba2:
    """Mamba 2 with the mamba_* keys of Bamba, Granite 4 and Falcon-H1."""
    heads = r.size("mamba_n_heads")
    given = r.find("mamba_d_head")
    dim = per_head(r, inner, heads) if given in (None, "auto") else r.whole("mamba_d_head", given, low=1)
    if dim * heads != inner:
        raise r.fail("mamba_d_head", f"× mamba_n_heads is {dim * heads}; the Mamba width is {inner}")
    return mamba2(
        r, heads=heads, head_dim=dim, state=r.size("mamba_d_state"), groups=r.size("mamba_n_groups"),
        kernel=r.size("mamba_d_conv"), conv_bias=r.flag("mamba_conv_bias"), proj_bias=r.flag("mamba_proj_bias"),
        out_bias=r.flag("projectors_bias" if "projectors_bias" in r.defaults else "mamba_proj_bias"),
        gated_norm=gated_norm)


def bamba(r: Reader) -> Decoder:
    """Bamba: Mamba 2 layers with attention at attn_layer_indices, a dense FFN in each."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        at = set(reader.numbers("attn_layer_indices") or ())
        state = _mamba2_d(reader, inner=reader.size("mamba_expand") * reader.hidden_size())
        attention = gqa(bias="attention_bias")(reader, n)
        return [attention[i] if i in at else state for i in range(n)]

    return decoder(r, mixers=mixers, ffns=dense(bias="mlp_bias"))


def granite_hybrid(r: Reader) -> Decoder:
    """Granite 4: Mamba 2 and attention layers, each with a shared FFN and, where there are any, experts."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        full = hybrid_types(reader, n, ["mamba"] * n)
        attention = gqa(bias="attention_bias")(reader, n)
        reader.unused("mamba_d_state", "mamba_n_heads")
        state: Mixer = NoMixer() if all(full) else _mamba2_d(
            reader, inner=reader.size("mamba_expand") * reader.hidden_size())
        return [attention[i] if f else state for i, f in enumerate(full)]

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        count = reader.size("num_local_experts", "num_experts", default=0, low=0, high=MAX_EXPERTS)
        shared = reader.size("shared_intermediate_size")
        if not count:
            return [DenseFfn(width=shared)] * n
        return [experts_ffn(reader, count=count, top_k=reader.size("num_experts_per_tok"),
                            width=reader.size("intermediate_size"), shared_width=shared)] * n

    return decoder(r, mixers=mixers, ffns=ffns)


def falcon_h1(r: Reader) -> Decoder:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        inner = reader.optional_size("mamba_d_ssm") or reader.size("mamba_expand") * reader.hidden_size()
        state = _mamba2_d(reader, inner=inner, gated_norm=reader.flag("mamba_rms_norm"))
        attention = gqa(bias="attention_bias")(reader, n)
        return [ParallelMixers(branches=(a, state)) for a in attention if isinstance(a, GroupedQueryAttention)]

    return decoder(r, mixers=mixers, ffns=dense(bias="mlp_bias"))


def _mamba1(r: Reader, *, prefix: str, inner_norms: bool) -> Mamba1:
    """Mamba 1 with keys spelled `prefix`… (Jamba: mamba_) or as in Mamba's own config."""
    keys = {name: (f"{prefix}{name}",) for name in ("d_state", "d_conv", "expand", "dt_rank")} if prefix else {
        "d_state": ("state_size",), "d_conv": ("conv_kernel",), "expand": ("expand",), "dt_rank": ("time_step_rank",)}
    h = r.hidden_size()
    rank = r.find(*keys["dt_rank"])
    given = r.optional_size("intermediate_size") if not prefix else None
    bits = model_bits(r)
    return Mamba1(
        inner_size=given or r.size(*keys["expand"]) * h, state_size=r.size(*keys["d_state"]),
        dt_rank=-(-h // 16) if rank in (None, "auto") else r.whole(keys["dt_rank"][0], rank, low=1),
        conv_kernel=r.size(*keys["d_conv"]), inner_norms=inner_norms, conv_bits=bits, state_bits=bits,
        conv_bias=r.flag(f"{prefix}conv_bias" if prefix else "use_conv_bias"),
        proj_bias=r.flag(f"{prefix}proj_bias" if prefix else "use_bias"))


def jamba(r: Reader) -> Decoder:
    """Jamba: Mamba 1 with an attention layer per attn_layer_period, experts per expert_layer_period."""

    def positions(reader: Reader, name: str, n: int) -> list[bool]:
        period, offset = reader.size(f"{name}_period"), reader.size(f"{name}_offset", low=0)
        if offset >= period:
            raise reader.fail(f"{name}_offset", f"is {offset}; it must be below {name}_period {period}")
        return [i % period == offset for i in range(n)]

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        state = _mamba1(reader, prefix="mamba_", inner_norms=True)
        attention = gqa(derived_head_dim=True)(reader, n)
        return [attention[i] if f else state for i, f in enumerate(positions(reader, "attn_layer", n))]

    def ffns(reader: Reader, n: int) -> Sequence[Ffn]:
        width = reader.size("intermediate_size")
        count = reader.size(*EXPERT_KEYS, high=MAX_EXPERTS)
        plain = DenseFfn(width=width)
        if count == 1:
            return [plain] * n
        routed = experts_ffn(reader, count=count, top_k=reader.size("num_experts_per_tok"), width=width)
        return [routed if f else plain for f in positions(reader, "expert_layer", n)]

    return decoder(r, mixers=mixers, ffns=ffns)


def mamba1_model(r: Reader) -> Decoder:
    """Mamba, FalconMamba: Mamba 1 layers behind one norm, nothing else."""
    return decoder(r, mixers=lambda x, n: [_mamba1(x, prefix="", inner_norms=False)] * n,
                   ffns=lambda _, n: [NoFfn()] * n, norms=("norm",), context_default=NO_LIMIT)


def mamba2_model(r: Reader) -> Decoder:
    """Mamba 2 layers behind one norm."""

    def mixers(reader: Reader, n: int) -> Sequence[Mixer]:
        heads, dim = reader.size("num_heads"), reader.size("head_dim")
        inner = reader.size("expand") * reader.hidden_size()
        if heads * dim != inner:
            raise reader.fail("num_heads", f"× head_dim is {heads * dim}; expand × hidden_size is {inner}")
        return [mamba2(reader, heads=heads, head_dim=dim, state=reader.size("state_size"),
                       groups=reader.size("n_groups"), kernel=reader.size("conv_kernel"),
                       conv_bias=reader.flag("use_conv_bias"), proj_bias=reader.flag("use_bias"),
                       out_bias=reader.flag("use_bias"))] * n

    return decoder(r, mixers=mixers, ffns=lambda _, n: [NoFfn()] * n, norms=("norm",), context_default=NO_LIMIT)
