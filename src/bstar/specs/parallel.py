"""How one engine instance is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass

from bstar.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Degrees of parallelism of one replica of the engine.

    tp            tensor-parallel ranks of attention and dense layers
    pp            pipeline stages
    dp            independent copies of the whole (tp · pp) group behind one endpoint
    attention_dp  data-parallel attention groups that share one set of experts (vLLM: --data-parallel-size
                  with a MoE model; SGLang: --enable-dp-attention)
    ep            expert-parallel ranks: whole experts are spread over them. 1: each expert is sharded
                  by width over tp · attention_dp ranks. Otherwise it must divide tp · attention_dp
    dcp           decode-context parallel ranks: shards the KV cache of a TP group by token
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    attention_dp: int = 1
    ep: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "attention_dp", "ep", "dcp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}: must be a whole number of at least 1, is {value!r}")
        if (self.tp * self.attention_dp) % self.ep:
            raise SpecError(f"ep: {self.ep} does not divide tp · attention_dp = {self.tp * self.attention_dp}")
        if self.tp % self.dcp:
            raise SpecError(f"dcp: {self.dcp} does not divide tp = {self.tp}")

    @property
    def moe_tp(self) -> int:
        """Ranks over which the width of one expert is sharded."""
        return self.tp * self.attention_dp // self.ep

    @property
    def devices_per_copy(self) -> int:
        return self.tp * self.pp * self.attention_dp

    @property
    def num_devices(self) -> int:
        return self.devices_per_copy * self.dp
