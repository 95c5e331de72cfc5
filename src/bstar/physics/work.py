"""The work of one operator of one layer, as coefficients over batch statistics. No seconds, no model names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from bstar.physics.collectives import Collective
from bstar.physics.statistics import Statistic

# What kind of kernel runs, which decides the efficiency that `bstar.latency` uses.
Kind = Literal[
    "gemm", "moe_gemm", "attention_decode", "attention_prefill", "state", "elementwise", "lookup", "collective"
]
Coefficients = Mapping[Statistic, float]


def _nothing() -> Coefficients:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routed experts: the expected number of distinct ones decides the weights that are read."""

    num_experts: int
    top_k: int
    ranks: int = 1  # that share the experts whole (expert parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operator of one layer on one rank; `layers` such layers run it one after another.

    name           the operator it counts for (a key of `step_cost`)
    flops, reads, writes, kv_reads   coefficients per statistic; kv_reads (cache) are not in `reads`
    weight_bytes   read once per step whatever the batch (all experts, where `routing` is set)
    compute_dtype  dtype of its arithmetic, None where there is none to speak of
    weight_format  name of the TensorFormat of a GEMM's weights, "" elsewhere
    rows           the statistic that is the row count M of its GEMM
    launches       kernels
    form           what sets its kernel apart from others of its kind ("latent": absorbed MLA, "index": index scores)
    collective     for kind "collective": `reads` is then what a rank receives over the link
    message        bytes of the collective's message, per statistic
    """

    name: str
    kind: Kind
    flops: Coefficients = field(default_factory=_nothing)
    reads: Coefficients = field(default_factory=_nothing)
    writes: Coefficients = field(default_factory=_nothing)
    kv_reads: Coefficients = field(default_factory=_nothing)
    weight_bytes: float = 0.0
    compute_dtype: str | None = None
    weight_format: str = ""
    rows: Statistic = ("tokens", None)
    launches: int = 1
    layers: int = 1
    form: str = ""
    routing: Routing | None = None
    collective: Collective | None = None
    message: Coefficients = field(default_factory=_nothing)

    @property
    def statistics(self) -> set[Statistic]:
        """Every statistic that it depends on."""
        found: set[Statistic] = {self.rows}
        for table in (self.flops, self.reads, self.writes, self.kv_reads, self.message):
            found |= set(table)
        return found

    def repeated(self, layers: int) -> Work:
        """The same operator in `layers` layers."""
        return replace(self, layers=layers)

    def same_as(self, other: Work) -> bool:
        """Equal but for the number of layers."""
        return replace(self, layers=1) == replace(other, layers=1)


def collective_work(name: str, collective: Collective, message: Coefficients) -> Work:
    """A collective over the link; nothing where there is only one rank."""
    moved = {s: collective.sent_bytes(b) for s, b in message.items()}
    return Work(name=name, kind="collective", collective=collective, message=message, reads=moved, writes=moved)
