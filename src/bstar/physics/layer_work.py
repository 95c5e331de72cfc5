"""The operators of one decoder layer, of the embedding and of the head, on one rank.

GEMMs follow from the tensors that a layer lists: tensors of one role that read the same input are one fused
kernel (q, k, v; gate and up). Inputs and outputs are counted once each, at the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bstar.physics.collectives import Collective, expected_distinct_ranks
from bstar.physics.mixing import Rank, mixer_works
from bstar.physics.partition import rank_formats, rank_shape
from bstar.physics.statistics import count
from bstar.physics.weights import block_bytes, tensor_bytes
from bstar.physics.work import Coefficients, Routing, Work, collective_work
from bstar.specs.attention import GroupedQueryAttention, LatentAttention, NoMixer
from bstar.specs.ffn import MoeFfn
from bstar.specs.model import LayerGroup, ModelSpec, WeightFormats
from bstar.specs.tensors import WeightTensor

TOKENS, EXPERT_TOKENS, SAMPLED = count("tokens"), count("expert_tokens"), count("sampled")


@dataclass(slots=True)
class _Gemm:
    """Tensors that read the same input: one kernel."""

    role: str
    columns: int
    rows: int
    weight_bytes: float
    compute_dtype: str
    weight_format: str
    experts: bool


def layer_works(model: ModelSpec, group: LayerGroup, rank: Rank) -> list[Work]:
    """Every operator of ONE layer of `group`, in the order of the forward pass."""
    mixer, ffn = group.mixer, group.ffn
    in_mixer = mixer.tensors(model.hidden_size)
    in_ffn = ffn.tensors(model.hidden_size)
    works = _gemms(in_mixer, group.formats, rank)
    if isinstance(mixer, LatentAttention):
        works = _absorb(works, mixer, rank)
    works += _projection_traffic(in_mixer, rank)
    works += mixer_works(mixer, rank)
    if isinstance(mixer, GroupedQueryAttention) and mixer.qk_norm == "full" and rank.parallel.tp > 1:
        # The norm spans the heads of all ranks: two sums of squares a token are added up (vLLM's MiniMax and OLMo 2).
        reduce = Collective(kind="allreduce", ranks=rank.parallel.tp)
        works.append(collective_work("allreduce", reduce, {TOKENS: 8.0}))
    if not isinstance(mixer, NoMixer) and not (group.one_reduction and in_ffn):
        works += _reduce(model, rank)
    works += _norms(group.extra, model.hidden_size, group.formats, rank)
    works += _gemms(in_ffn, rank_formats(group, model.hidden_size, rank.parallel), rank,
                    ffn if isinstance(ffn, MoeFfn) else None)
    works += _activations(in_ffn, group, rank)
    works += _moe_exchange(model, group, ffn, rank) if isinstance(ffn, MoeFfn) else []
    if in_ffn and not (isinstance(ffn, MoeFfn) and rank.parallel.attention_dp > 1):
        works += _reduce(model, rank)
    extra = [t for t in group.extra if not _is_layer_norm(t, model.hidden_size)]
    for tensor in extra:
        # Each reads its own input (the residual streams of hyper-connections).
        works += _gemms([tensor], group.formats, rank)
    return _with_vectors(works, [*in_mixer, *in_ffn, *extra], group.formats, rank)


def _reduce(model: ModelSpec, rank: Rank) -> list[Work]:
    """The all-reduce after a row-parallel GEMM."""
    tp = rank.parallel.tp
    if tp == 1:
        return []
    message = {TOKENS: model.hidden_size * rank.activation_bytes}
    return [collective_work("allreduce", Collective(kind="allreduce", ranks=tp), message)]


def _gemms(
    tensors: Iterable[WeightTensor], formats: WeightFormats, rank: Rank, ffn: MoeFfn | None = None
) -> list[Work]:
    """One operator per group of matrices that share role, input and format."""
    fused: dict[tuple[object, ...], _Gemm] = {}
    for tensor in tensors:
        if not tensor.matmul:
            continue
        fmt = formats.of(tensor)
        rows, columns, copies = rank_shape(tensor, rank.parallel)
        key = (tensor.role, tensor.columns, tensor.shard == "row", tensor.shard == "expert", fmt)
        gemm = fused.setdefault(
            key, _Gemm(tensor.role, columns, 0, 0.0, fmt.compute_dtype, fmt.name, tensor.shard == "expert"))
        gemm.rows += rows
        gemm.weight_bytes += fmt.bytes_of(rows, columns) * copies
    return [_gemm_work(g, rank, ffn) for g in fused.values()]


def _gemm_work(gemm: _Gemm, rank: Rank, ffn: MoeFfn | None) -> Work:
    basis, scale, routing = TOKENS, 1.0, None
    if gemm.experts:
        assert ffn is not None, "expert tensors belong to a MoE"
        basis, scale = EXPERT_TOKENS, ffn.top_k / rank.parallel.ep
        routing = Routing(num_experts=ffn.num_experts, top_k=ffn.top_k, ranks=rank.parallel.ep)
    a = rank.activation_bytes * scale
    return Work(
        name=gemm.role, kind="moe_gemm" if gemm.experts else "gemm", rows=basis, routing=routing,
        flops={basis: 2.0 * gemm.rows * gemm.columns * scale}, weight_bytes=gemm.weight_bytes,
        reads={basis: gemm.columns * a}, writes={basis: gemm.rows * a}, compute_dtype=gemm.compute_dtype,
        weight_format=gemm.weight_format,
    )  # fmt: skip


def _absorb(works: list[Work], m: LatentAttention, rank: Rank) -> list[Work]:
    """kv_b_proj in the absorbed form: q·W_UK before and W_UV after attention, the FLOPs of the GEMM it replaces.

    Only the activations differ: per head nope → latent and latent → v, instead of latent → (nope + v).
    """
    heads, a = rank.heads(m.num_heads), rank.activation_bytes
    decode, prefill = count("decode_tokens"), count("prefill_tokens")
    out = []
    for work in works:
        made = heads * (m.qk_nope_head_dim + m.v_head_dim)
        if work.name == "qkv" and work.reads.get(TOKENS) == m.kv_lora_rank * a and work.writes.get(TOKENS) == made * a:
            read: Coefficients = {decode: heads * (m.qk_nope_head_dim + m.kv_lora_rank) * a,
                                  prefill: m.kv_lora_rank * a}
            write: Coefficients = {decode: heads * (m.kv_lora_rank + m.v_head_dim) * a, prefill: made * a}
            work = replace(work, reads=read, writes=write, launches=2)
        out.append(work)
    return out


def _projection_traffic(tensors: Iterable[WeightTensor], rank: Rank) -> list[Work]:
    """Positional encoding, q/k norms, gates and the cache write pass the projections' outputs once more."""
    width = sum(rank_shape(t, rank.parallel)[0] for t in tensors if t.matmul and t.role == "qkv")
    if not width:
        return []
    moved = {TOKENS: width * rank.activation_bytes}
    return [Work(name="norm", kind="elementwise", reads=moved, writes=moved, launches=2)]


def _is_layer_norm(tensor: WeightTensor, hidden_size: int) -> bool:
    return tensor.role == "norm" and tensor.columns == hidden_size and not tensor.name.endswith("bias")


def _norms(tensors: Iterable[WeightTensor], hidden_size: int, formats: WeightFormats, rank: Rank) -> list[Work]:
    """Norms of the residual stream: input and residual are read, both are written (fused add and norm)."""
    moved = {TOKENS: 2.0 * hidden_size * rank.activation_bytes}
    return [
        Work(name="norm", kind="elementwise", reads=moved, writes=moved,
             weight_bytes=formats.of(t).bytes_of(1, t.columns))
        for t in tensors if _is_layer_norm(t, hidden_size)
    ]  # fmt: skip


def _activations(tensors: Iterable[WeightTensor], group: LayerGroup, rank: Rank) -> list[Work]:
    """The activation between the two GEMMs of an FFN: up (and gate) outputs read, their product written."""
    ups: dict[str, float] = {}
    downs: dict[str, float] = {}
    for t in tensors:
        if t.matmul and t.role in ("mlp", "experts", "shared_experts") and "latent" not in t.name and t.rows > 1:
            rows, columns, _ = rank_shape(t, rank.parallel)
            if t.name.endswith("down_proj"):
                downs[t.role] = downs.get(t.role, 0.0) + columns
            else:
                ups[t.role] = ups.get(t.role, 0.0) + rows
    out = []
    for role, up in ups.items():
        basis, scale = TOKENS, rank.activation_bytes
        if role == "experts" and isinstance(group.ffn, MoeFfn):
            basis, scale = EXPERT_TOKENS, rank.activation_bytes * group.ffn.top_k / rank.parallel.ep
        out.append(Work(name=role, kind="elementwise", reads={basis: up * scale},
                        writes={basis: downs.get(role, up) * scale}, rows=basis))
    return out


def _moe_exchange(model: ModelSpec, group: LayerGroup, ffn: MoeFfn, rank: Rank) -> list[Work]:
    """The weighted sum over each token's experts, and what attention data parallelism sends to reach them.

    Expert parallel: each token goes to the ranks of its experts and comes back (all-to-all; a TP group
    shares the sending). Without: all tokens are gathered on every rank and the sums scattered back.
    """
    p, a = rank.parallel, rank.activation_bytes
    width = ffn.latent_size or model.hidden_size
    moved = EXPERT_TOKENS
    works = [Work(name="norm", kind="elementwise", rows=moved,
                  reads={moved: ffn.top_k / p.ep * width * a}, writes={TOKENS: width * a})]
    if p.attention_dp == 1:
        return works
    if p.ep > 1:
        fmt = next(group.formats.of(t) for t in ffn.tensors(model.hidden_size) if t.shard == "expert")
        remote = expected_distinct_ranks(p.ep, ffn.top_k) * (p.ep - 1) / p.ep / p.tp * width
        for sent in (fmt.activation_bits / 8, a):
            exchange = Collective(kind="all_to_all", ranks=p.ep)
            works.append(collective_work("all_to_all", exchange, {TOKENS: remote * sent}))
        if p.tp > 1:
            gather = Collective(kind="allgather", ranks=p.tp)
            works.append(collective_work("allgather", gather, {TOKENS: model.hidden_size * a}))
        return works
    ranks = p.tp * p.attention_dp
    message = {EXPERT_TOKENS: width * a}
    works.append(collective_work("allgather", Collective(kind="allgather", ranks=ranks), message))
    works.append(collective_work("reducescatter", Collective(kind="reducescatter", ranks=ranks), message))
    return works


def _with_vectors(works: list[Work], tensors: Iterable[WeightTensor], formats: WeightFormats, rank: Rank) -> list[Work]:
    """Add the bytes of norms and other vectors to the first operator of their role, biases of GEMMs to "norm"."""
    bytes_by_name: dict[str, float] = {}
    for t in tensors:
        if not t.matmul:
            name = "norm" if t.role in ("qkv", "out", "mlp", "shared_experts") else str(t.role)
            bytes_by_name[name] = bytes_by_name.get(name, 0.0) + tensor_bytes(t, formats, rank.parallel)
    out = list(works)
    for name, extra in bytes_by_name.items():
        at = next((i for i, w in enumerate(out) if w.name == name), None)
        if at is None:
            out.append(Work(name=name, kind="elementwise", weight_bytes=extra))
        else:
            out[at] = replace(out[at], weight_bytes=out[at].weight_bytes + extra)
    return out


def embedding_works(model: ModelSpec, rank: Rank) -> list[Work]:
    """The lookup reads one row per token, never the table; sharded by vocabulary, its sum is all-reduced."""
    a = rank.activation_bytes
    row = sum(t.columns for t in model.embedding if t.rows > 1) * a
    out = [Work(name="embedding", kind="lookup", reads={TOKENS: row}, writes={TOKENS: model.hidden_size * a})]
    if any(t.shard == "vocab" for t in model.embedding):
        out += _reduce(model, rank)
    return out


def head_works(model: ModelSpec, rank: Rank) -> list[Work]:
    """Final norm, the head on the sampled positions only (a tied head streams the table), gathered logits."""
    formats, a, p = model.outer_formats, rank.activation_bytes, rank.parallel
    works = _norms(model.head_tensors, model.hidden_size, formats, rank)
    tables = [t for t in model.lm_head or (model.embedding if model.tied else ()) if t.rows > 1]
    logits = 0.0
    for t in tables:
        rows, columns, copies = rank_shape(t, p)
        fmt = formats.of(t)
        logits += rows
        works.append(Work(
            name="lm_head", kind="gemm", rows=SAMPLED, flops={SAMPLED: 2.0 * rows * columns * copies},
            weight_bytes=tensor_bytes(t, formats, p), reads={SAMPLED: columns * a},
            writes={SAMPLED: rows * a}, compute_dtype=fmt.compute_dtype, weight_format=fmt.name,
        ))  # fmt: skip
    if p.tp > 1 and logits:
        gather = Collective(kind="allgather", ranks=p.tp)
        works.append(collective_work("allgather", gather, {SAMPLED: logits * p.tp * a}))
    rest = [t for t in model.head_tensors if not _is_layer_norm(t, model.hidden_size)]
    works += _gemms(rest, formats, rank)
    extra = float(sum(tensor_bytes(t, formats, p) for t in rest if not t.matmul))
    streamed = float(sum(block_bytes(b, p) for b in model.blocks if b.streamed))
    if extra:
        works.append(Work(name="norm", kind="elementwise", weight_bytes=extra))
    if streamed:
        works.append(Work(name="other", kind="elementwise", weight_bytes=streamed))
    return works
