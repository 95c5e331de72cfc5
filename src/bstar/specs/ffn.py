"""Feed-forward networks: dense, mixture of experts, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bstar.specs.tensors import Role, WeightTensor, vector


def _projections(prefix: str, role: Role, hidden: int, width: int, *, gated: bool, bias: bool) -> list[WeightTensor]:
    """up (and gate) and down of a dense FFN."""
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    out = [WeightTensor(name=prefix + n, role=role, rows=width, columns=hidden, shard="column") for n in names]
    out.append(WeightTensor(name=prefix + "down_proj", role=role, rows=hidden, columns=width, shard="row"))
    if bias:
        out += [vector(f"{prefix}{n}.bias", role, width, shard="column") for n in names]
        out.append(vector(prefix + "down_proj.bias", role, hidden))
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn:
    """One FFN for every token; gated (SwiGLU, GeGLU: three matrices) or not (two)."""

    kind: ClassVar[str] = "dense"
    width: int
    gated: bool = True
    bias: bool = False

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        return tuple(_projections("mlp.", "mlp", hidden_size, self.width, gated=self.gated, bias=self.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn:
    """Routed experts, with optional shared experts that every token takes.

    width            intermediate size of one routed expert
    shared_width     intermediate size of all shared experts together (0: none)
    shared_gate      a sigmoid gate on the shared expert (one row)
    router_bias      router parameters beside the matrix: a bias or correction per expert
    latent_size      routed experts work on a down-projection of this size (Nemotron 3 Super), or None
    parallel_dense_width  a dense FFN of this width runs beside the experts (Gemma 4 MoE), 0: none
    shared_bias      biases on the shared expert and on the latent projections
    """

    kind: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    gated: bool = True
    latent_size: int | None = None
    parallel_dense_width: int = 0
    shared_bias: bool = False

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        h, n, w = hidden_size, self.num_experts, self.width
        e = self.latent_size or h
        up = 2 * w if self.gated else w
        # Where a dense FFN runs beside them, `mlp` is that one and the experts stand on their own.
        p = "" if self.parallel_dense_width else "mlp."
        out = [
            WeightTensor(name=p + "gate", role="router", rows=n, columns=h),
            WeightTensor(name=p + "experts.gate_up_proj", role="experts", rows=up, columns=e, copies=n, shard="expert"),
            WeightTensor(name=p + "experts.down_proj", role="experts", rows=e, columns=w, copies=n, shard="expert"),
        ]
        if self.router_bias:
            out.append(vector(p + "gate.bias", "router", n))
        if self.expert_bias:
            out += [
                vector(p + "experts.gate_up_proj.bias", "experts", up, copies=n, shard="expert"),
                vector(p + "experts.down_proj.bias", "experts", e, copies=n, shard="expert"),
            ]
        if self.latent_size is not None:
            out += [
                WeightTensor(name="mlp.fc1_latent_proj", role="shared_experts", rows=e, columns=h),
                WeightTensor(name="mlp.fc2_latent_proj", role="shared_experts", rows=h, columns=e),
            ]
            if self.shared_bias:
                out += [vector("mlp.fc1_latent_proj.bias", "shared_experts", e),
                        vector("mlp.fc2_latent_proj.bias", "shared_experts", h)]
        if self.shared_width:
            out += _projections(
                "mlp.shared_experts.", "shared_experts", h, self.shared_width, gated=self.gated, bias=self.shared_bias)
        if self.shared_gate:
            out.append(WeightTensor(name="mlp.shared_expert_gate", role="shared_experts", rows=1, columns=h))
        if self.parallel_dense_width:
            out += _projections("mlp.", "mlp", h, self.parallel_dense_width, gated=self.gated, bias=False)
        return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFfn:
    """A layer without a feed-forward network (the mixer-only layers of Nemotron-H)."""

    kind: ClassVar[str] = "none"

    def tensors(self, hidden_size: int) -> tuple[WeightTensor, ...]:
        return ()


Ffn = DenseFfn | MoeFfn | NoFfn
