"""The layouts worth trying: how one replica of a model can be spread over devices of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bstar.catalog.engines import engine_defaults
from bstar.codec.build import build_deployment
from bstar.planning.limits import floored
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec
from bstar.specs.model import ModelSpec

if TYPE_CHECKING:
    from bstar.calibration.profile import Profile

# A screening value: small enough for state caches, large enough to see the engine's graph memory.
SCREENING_SEQS = 256
_REPLAYS_PROMPTS = ("full_and_piecewise", "piecewise")
# Beyond one node a replica is only tried where no smaller one fits.
LARGEST_REPLICA_GPUS = 16
_DEGREES = (1, 2, 4, 8, 16)
_STAGES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one replica is spread. `ep` > 1 keeps experts whole, spread over tp · attention_dp ranks."""

    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    ep: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.attention_dp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"]
        parts += [f"{name}{value}" for name, value in (("PP", self.pp), ("DP-attention", self.attention_dp),
                                                       ("EP", self.ep)) if value > 1]  # fmt: skip
        return "·".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What the user fixes of the engine; None: the planner (or the engine's default) decides.

    profile   predicts the deployments that it is of (its model, GPU and engine)
    """

    engine: str = "vllm"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    profile: Profile | None = None


def layouts(model: ModelSpec, device: DeviceSpec, *, max_gpus: int) -> tuple[Layout, ...]:
    """Layouts of one replica, fewest GPUs first.

    Tensor parallelism stays inside a node; pipelining may cross nodes. A mixture of experts also gets
    data-parallel attention (experts shared) and expert parallelism. Layouts that the engine would refuse are
    kept: the refusal is a reason that the user should read.
    """
    limit = min(max_gpus, LARGEST_REPLICA_GPUS)
    node = max(device.devices_per_node, 1)
    found = [
        Layout(tp=tp, pp=pp) for tp in _DEGREES for pp in _STAGES
        if tp <= node and tp * pp <= limit and pp <= model.num_layers
    ]  # fmt: skip
    if model.is_moe:
        found += [replace(one, ep=one.tp) for one in found if one.tp > 1]
        groups = [(tp, dp) for tp in _DEGREES for dp in _DEGREES[1:] if tp * dp <= min(limit, node)]
        found += [Layout(tp=tp, attention_dp=dp, ep=tp * dp) for tp, dp in groups]
    return tuple(sorted(found, key=lambda one: (one.num_gpus, one.pp, one.attention_dp, one.ep)))


def build(
    model: ModelSpec, device: DeviceSpec, layout: Layout, choice: EngineChoice, *, kv_cache_dtype: str,
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int | None,
) -> Deployment:  # fmt: skip
    """The deployment of a layout. `max_num_seqs` counts per attention-data-parallel rank, as the flag does."""
    built = _with_wide_graphs(build_deployment(
        model, device, tp=layout.tp, pp=layout.pp, attention_dp=layout.attention_dp, ep=layout.ep,
        kv_cache_dtype=kv_cache_dtype, engine=choice.engine, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        gpu_memory_utilization=choice.gpu_memory_utilization, block_size=choice.block_size,
        enable_prefix_caching=choice.enable_prefix_caching, enable_chunked_prefill=choice.enable_chunked_prefill,
        async_scheduling=choice.async_scheduling, enforce_eager=choice.enforce_eager,
    ))  # fmt: skip
    if choice.profile is None:
        return built
    from bstar.calibration.profile import calibrated, holds_for

    return calibrated(built, choice.profile) if holds_for(choice.profile, built) else built


def _with_wide_graphs(built: Deployment) -> Deployment:
    """With CUDA graphs as for SCREENING_SEQS at least.

    vLLM captures up to twice max_num_seqs: with few seats, steps that hold a chunk of a prompt would be beyond it and
    launched kernel by kernel. One flag keeps them, and what a layout carries does not depend on the seats it gets.
    """
    engine = built.engine
    if engine.cudagraph_max_size == 0 or engine.cudagraph_mode not in _REPLAYS_PROMPTS:
        return built
    widest = engine_defaults(engine.name, engine.version, built.device, strict=False).cudagraph_max_size(
        max(engine.max_num_seqs, SCREENING_SEQS), engine.max_num_batched_tokens,
        query_tokens=1 + engine.num_speculative_tokens)
    return replace(built, engine=replace(engine, cudagraph_max_size=max(engine.cudagraph_max_size, widest)))


def lanes(largest: int) -> tuple[int, ...]:
    """Values of max_num_seqs to try up to `largest`: about 1.4 apart, and `largest` itself."""
    steps = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    last = floored(largest)
    below = tuple(s for s in steps if s < last)
    return (*below, last) if last <= steps[-1] else steps


def token_budgets(default: int, chosen: int | None) -> Iterator[int]:
    """Values of max_num_batched_tokens to try: the engine's default first, then smaller ones."""
    if chosen is not None:
        yield chosen
        return
    yield default
    yield from (b for b in (8192, 4096, 2048) if b < default)


def as_sequence(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """("a", "b") of "a,b" or of a sequence; empty of None."""
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())
