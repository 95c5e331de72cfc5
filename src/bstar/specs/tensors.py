"""Weight tensors: what a mechanism stores, how it is split over ranks, and what it is part of.

A mechanism (an attention kind, an FFN kind) lists its tensors; everything about weights is a sum over
that one list: parameter counts, bytes per rank, bytes streamed, FLOPs of the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How tensor parallelism splits a tensor.
#   column      output features over all TP ranks
#   row         input features over all TP ranks
#   kv          output features by KV head: over min(TP, kv heads) ranks, replicated beyond
#   expert      whole experts over EP ranks, or (EP = 1) each expert's width over TP ranks
#   vocab       vocabulary rows over TP ranks (padded by the engine)
#   replicated  on every rank
Shard = Literal["column", "row", "kv", "expert", "vocab", "replicated"]

# The operator a tensor belongs to; also the keys of `step_cost`.
Role = Literal[
    "qkv", "out", "attn", "indexer", "mixer", "mlp", "experts", "shared_experts", "router", "norm",
    "embedding", "lm_head", "vision", "mtp", "other",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One weight tensor of one layer (or of the model), before any parallelism.

    name      module name inside its layer as the checkpoint spells it ("self_attn.q_proj",
              "mlp.experts.*.down_proj", "input_layernorm"): quantization patterns match against it
    rows      output features (1 for a vector)
    columns   input features (the length of a vector)
    copies    how many of these a layer holds (experts)
    heads     for shard="kv": number of KV heads the rows are made of
    matmul    whether a token multiplies with it (False: norms, biases, lookup tables)
    """

    name: str
    role: Role
    rows: int
    columns: int
    shard: Shard = "replicated"
    copies: int = 1
    heads: int = 0
    matmul: bool = True

    @property
    def parameters(self) -> int:
        """Logical parameters, all copies."""
        return self.rows * self.columns * self.copies


def vector(name: str, role: Role, length: int, *, shard: Shard = "replicated", copies: int = 1) -> WeightTensor:
    """A norm weight, bias or other 1-d tensor."""
    return WeightTensor(
        name=name, role=role, rows=1, columns=length, shard=shard, copies=copies, matmul=False
    )
