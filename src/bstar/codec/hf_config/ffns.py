"""Feed-forward networks from config keys: dense and mixture-of-experts builders shared by all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bstar.codec.hf_config.mixers import Switch, switch
from bstar.codec.hf_config.reader import MAX_EXPERTS, Reader
from bstar.specs.ffn import DenseFfn, Ffn, MoeFfn

SparseRule = Callable[[Reader, int], Sequence[bool]]

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


def dense(*, width: tuple[str, ...] = ("intermediate_size",), gated: bool = True, bias: Switch = False,
          ratio: int | None = None) -> Callable[[Reader, int], Sequence[Ffn]]:
    """A dense FFN in every layer; `ratio`: width where the key is null, in hidden sizes (GPT-2: 4)."""

    def build(r: Reader, n: int) -> Sequence[Ffn]:
        given = r.optional_size(*width) if ratio is not None else r.size(*width)
        size = given if given is not None else (ratio or 1) * r.hidden_size()
        return [DenseFfn(width=size, gated=gated, bias=switch(r, bias))] * n

    return build


# -- which layers are sparse -----------------------------------------------------------------------


def every_layer(r: Reader, n: int) -> Sequence[bool]:
    return [True] * n


MLP_TYPES = ("dense", "sparse", "moe", "mlp", "hash_moe")


def typed_or(rule: SparseRule) -> SparseRule:
    """mlp_layer_types where the config has them, else `rule`."""

    def build(r: Reader, n: int) -> Sequence[bool]:
        types = r.words("mlp_layer_types", length=n, allowed=MLP_TYPES)
        return rule(r, n) if types is None else [t not in ("dense", "mlp") for t in types]

    return build


def after_first(default: int | None = None) -> SparseRule:
    """The first first_k_dense_replace layers are dense (DeepSeek); moe_layer_freq is 1 in every known model."""

    def build(r: Reader, n: int) -> Sequence[bool]:
        first = r.size("first_k_dense_replace", default=default, low=0)
        frequency = r.find("moe_layer_freq")
        if isinstance(frequency, list):
            return [bool(x) for x in r.numbers("moe_layer_freq", length=n) or ()]
        if frequency is not None and r.whole("moe_layer_freq", frequency, low=1) != 1:
            raise r.fail("moe_layer_freq", f"is {frequency}; only 1 (every layer after the dense ones) is understood")
        return [i >= first for i in range(n)]

    return build


def stepped(r: Reader, n: int) -> Sequence[bool]:
    """Qwen MoE: every decoder_sparse_step-th layer, mlp_only_layers excepted."""
    step = r.size("decoder_sparse_step", default=1)
    only = set(r.numbers("mlp_only_layers") or ())
    experts = r.size(*EXPERT_KEYS, low=0, high=MAX_EXPERTS)
    return [experts > 0 and (i + 1) % step == 0 and i not in only for i in range(n)]


# -- experts ---------------------------------------------------------------------------------------


def moe(
    *, experts: tuple[str, ...] = EXPERT_KEYS, top_k: tuple[str, ...] = TOP_K_KEYS,
    width: tuple[str, ...] = ("moe_intermediate_size",), sparse: SparseRule = every_layer,
    dense_width: tuple[str, ...] = ("intermediate_size",), dense_bias: Switch = False, gated: bool = True,
    shared_count: tuple[str, ...] = (), shared_width: tuple[str, ...] = (), shared_gate: bool = False,
    router_bias: Switch = False, expert_bias: Switch = False, shared_bias: Switch = False,
    parallel_dense: tuple[str, ...] = (),
) -> Callable[[Reader, int], Sequence[Ffn]]:
    """A builder of FFNs, sparse where `sparse` says so.

    shared_count    key with the number of shared experts of the routed experts' width
    shared_width    key with the width of the shared expert; with shared_count: of one of them
    """

    def build(r: Reader, n: int) -> Sequence[Ffn]:
        flags = list(sparse(r, n))
        routed = _routed(r) if any(flags) else None
        if routed is None and r.find(*experts):
            r.unused(*experts, *top_k, *width, *shared_count, *shared_width)
        plain = None
        if not all(flags):
            plain = DenseFfn(width=r.size(*dense_width), gated=gated, bias=switch(r, dense_bias))
        return [x for x in (routed if s else plain for s in flags) if x is not None]

    def _routed(r: Reader) -> MoeFfn:
        one = r.size(*width)
        shared = r.size(*shared_width, default=0, low=0) if shared_width else one
        if shared_count:
            shared *= r.size(*shared_count, default=0, low=0)
        elif not shared_width:
            shared = 0
        return experts_ffn(
            r, count=r.size(*experts, high=MAX_EXPERTS), top_k=r.size(*top_k, high=MAX_EXPERTS), width=one,
            shared_width=shared, shared_gate=shared_gate and shared > 0, router_bias=switch(r, router_bias),
            expert_bias=switch(r, expert_bias), shared_bias=switch(r, shared_bias), gated=gated,
            parallel_dense_width=r.size(*parallel_dense) if parallel_dense else 0)

    return build


def experts_ffn(r: Reader, *, count: int, top_k: int, width: int, shared_width: int = 0, shared_gate: bool = False,
                router_bias: bool = False, expert_bias: bool = False, shared_bias: bool = False, gated: bool = True,
                latent_size: int | None = None, parallel_dense_width: int = 0) -> MoeFfn:
    """A mixture of experts; a token cannot take more experts than there are."""
    if top_k > count:
        raise r.fail("num_experts_per_tok", f"is {top_k}, more than the {count} experts; it must be at most {count}")
    return MoeFfn(num_experts=count, top_k=top_k, width=width, shared_width=shared_width, shared_gate=shared_gate,
                  router_bias=router_bias, expert_bias=expert_bias, gated=gated, latent_size=latent_size,
                  parallel_dense_width=parallel_dense_width, shared_bias=shared_bias)
