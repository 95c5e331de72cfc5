"""Which settings move a wall, what each is predicted to do under the load that was seen, and the command for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from bstar.codec.engine_launch import format_command
from bstar.errors import BstarError
from bstar.sim.result import SimResult
from bstar.sim.run import simulate
from bstar.specs.deployment import Deployment
from bstar.specs.engine import EngineSettings
from bstar.traffic import Traffic, closed_loop
from bstar.tuning.evidence import Evidence
from bstar.tuning.walls import Wall

# Enough requests that a mean settles, few enough that a diagnosis takes a second.
_FEWEST, _MOST, _ROUNDS = 64, 2_000, 6
_UTILIZATION_STEP, _MOST_UTILIZATION = 0.04, 0.95
_MOST_CAPTURED: Final = 512
_LEAST_CACHE_BYTES: Final = 1.5  # per element: a narrower cache is narrow already
_GAIN: Final = 0.01  # what is less is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A change of settings, and what it is predicted to do.

    change    "max_num_seqs 64 → 128"
    reason    why it would help at this wall
    command   launches the changed deployment; "" where the change is not one of the server
    throughput, ttft, tpot   predicted, times today's prediction; None: not simulated (`failed` says why)
    """

    change: str
    reason: str
    command: str = ""
    throughput: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    failed: str = ""

    def helps(self, *, requests_wait: bool) -> bool:
        """Whether what suffers gets better: TTFT, at no loss of throughput, where requests wait; else throughput."""
        if self.throughput is None:
            return False
        if not requests_wait:
            return self.throughput > 1.0 + _GAIN
        return self.ttft is not None and self.ttft < 1.0 - _GAIN and self.throughput >= 1.0 - _GAIN

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A change to try; `apply` gives the changed deployment, None: it is a change outside the server."""

    change: str
    reason: str
    apply: Callable[[Deployment], Deployment] | None = None


def load_seen(
    seen: Evidence, *, input_tokens: float | None = None, output_tokens: float | None = None
) -> Traffic | None:
    """The load of a window as a closed loop of the requests that were there; None where lengths are not known."""
    prompt = input_tokens if input_tokens is not None else seen.mean_of("input_tokens")
    answer = output_tokens if output_tokens is not None else seen.mean_of("output_tokens")
    if math.isnan(prompt):
        requests = seen.seen.count("requests")
        prompt = seen.seen.count("prompt_tokens") / requests if requests > 0 else math.nan
        answer = seen.seen.count("generated_tokens") / requests if requests > 0 else math.nan
    clients = 0 if math.isnan(seen.in_flight) else round(seen.in_flight)
    if math.isnan(prompt) or math.isnan(answer) or clients < 1:
        return None
    count = min(max(_ROUNDS * clients, _FEWEST), max(_MOST, 2 * clients))
    return closed_loop(clients, max(round(prompt), 1), max(round(answer), 1), count, seed=0,
                       warmup_requests=min(clients, count // 3))


def effects(
    deployment: Deployment, wall: Wall, load: Traffic | None, *, requests_wait: bool = False
) -> tuple[Effect, ...]:
    """The knobs of a wall that can be set here, simulated against today's settings, best first.

    requests_wait   the best one is that of the lowest TTFT; else that of the highest throughput
    """
    base: SimResult | None = None
    if load is not None:
        try:
            base = simulate(deployment, load)
        except BstarError:
            base = None
    found = [_effect(deployment, knob, load, base) for knob in knobs(deployment, wall)]

    def rank(effect: Effect) -> tuple[bool, float]:
        by = effect.ttft if requests_wait else None if effect.throughput is None else -effect.throughput
        return (not effect.helps(requests_wait=requests_wait), math.inf if by is None else by)

    return tuple(sorted((e for e in found if e is not None), key=rank))


def _effect(deployment: Deployment, knob: Knob, load: Traffic | None, base: SimResult | None) -> Effect | None:
    """None where the deployment cannot be changed so (one GPU is no two)."""
    if knob.apply is None:
        return Effect(change=knob.change, reason=knob.reason)
    try:
        changed = knob.apply(deployment)
        command = format_command(changed)
        if load is None or base is None:
            return Effect(change=knob.change, reason=knob.reason, command=command,
                          failed="the server does not show the lengths of requests")
        result = simulate(changed, load)
    except BstarError:
        return None
    return Effect(
        change=knob.change, reason=knob.reason, command=command,
        throughput=_ratio(result.summary.output_tokens_per_s, base.summary.output_tokens_per_s),
        ttft=_ratio(result.summary.ttft_s.mean, base.summary.ttft_s.mean),
        tpot=_ratio(result.summary.tpot_s.mean, base.summary.tpot_s.mean),
    )  # fmt: skip


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def knobs(d: Deployment, wall: Wall) -> Iterator[Knob]:
    """What moves a wall, in the order of how cheap it is to try."""
    e = d.engine
    if wall == "max_num_seqs":
        yield from (_engine("max_num_seqs", e.max_num_seqs, e.max_num_seqs * k, "seats are what requests wait for")
                    for k in (2, 4))
    if wall == "token_budget":
        yield from (_engine("max_num_batched_tokens", e.max_num_batched_tokens, e.max_num_batched_tokens * k,
                            "steps are filled to it with prompts") for k in (2, 4))
    if wall in ("kv_capacity", "kv_bandwidth", "saturating") and d.kv_format.bits >= 8 * _LEAST_CACHE_BYTES:
        yield _engine("kv_cache_dtype", e.kv_cache_dtype, "fp8", "half the bytes of every cached token")
    if wall == "kv_capacity":
        more = min(e.gpu_memory_utilization + _UTILIZATION_STEP, _MOST_UTILIZATION)
        if more > e.gpu_memory_utilization + 1e-9:
            yield _engine("gpu_memory_utilization", e.gpu_memory_utilization, round(more, 3), "more room for the cache")
        if e.max_num_seqs > 1:
            yield _fewer_seats(d)
        yield _wider(d, "its share of the weights leaves each GPU more room for the cache")
    if wall in ("compute_bound", "saturating", "kv_bandwidth"):
        yield _wider(d, "each GPU reads and computes a share of each step")
    if wall == "overhead_bound":
        if e.enforce_eager:
            yield _engine("enforce_eager", True, False, "CUDA graphs replay a step without launching its kernels")
        if not e.async_scheduling:
            yield _engine("async_scheduling", False, True, "the next step is planned while this one runs")
        yield Knob(change="more requests at a time", reason="a step takes about as long for a larger batch")
    if wall in ("weight_bound", "idle"):
        yield Knob(change="more load on each replica, or fewer replicas",
                   reason="a larger batch is nearly free: weights are read once for all")
    if wall == "client_limited":
        yield Knob(change="more clients, or more workers of theirs (bstar bench --workers N)",
                   reason="the server is not the limit")
    if wall in ("kv_capacity", "max_num_seqs", "token_budget", "compute_bound", "kv_bandwidth"):
        yield Knob(change="another replica (bstar plan --rate … says how many)", reason="half the load for each")


def _engine(name: str, today: Any, value: Any, reason: str) -> Knob:
    def apply(d: Deployment) -> Deployment:
        return replace(d, engine=_changed(d.engine, name, value))

    return Knob(change=f"{name} {_shown(today)} → {_shown(value)}", reason=reason, apply=apply)


def _changed(engine: EngineSettings, name: str, value: Any) -> EngineSettings:
    more: dict[str, Any] = {}
    if name == "max_num_seqs":
        more["max_num_batched_tokens"] = max(engine.max_num_batched_tokens, value)
        if engine.cudagraph_max_size > 0:  # engines capture larger batches where more seats are asked for
            more["cudagraph_max_size"] = max(engine.cudagraph_max_size, min(2 * value, _MOST_CAPTURED))
    return replace(engine, **more, **{name: value})


def _fewer_seats(d: Deployment) -> Knob:
    fewer = max(d.engine.max_num_seqs // 2, 1)
    return _engine("max_num_seqs", d.engine.max_num_seqs, fewer, "fewer sequences at a time fit without preemption")


def _wider(d: Deployment, reason: str) -> Knob:
    tp = d.parallel.tp * 2

    def apply(deployment: Deployment) -> Deployment:
        ep = deployment.parallel.ep
        return replace(deployment, parallel=replace(deployment.parallel, tp=tp, ep=ep * 2 if ep > 1 else ep))

    return Knob(change=f"tensor parallel {d.parallel.tp} → {tp}", reason=reason, apply=apply)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
