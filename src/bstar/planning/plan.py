"""`bstar plan`: which GPUs, how many, split how, with which flags, at what cost, for a load and an SLO.

This module reads the question; `planning.search` answers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bstar.calibration.profile import Profile, as_profile
from bstar.catalog.devices import get_device
from bstar.codec.resolve import resolve_model, with_weight_dtype
from bstar.errors import SpecError
from bstar.planning.results import PlanResult
from bstar.planning.search import MOST_CANDIDATES, Question, Tell, answer
from bstar.planning.space import EngineChoice, as_sequence
from bstar.specs.device import DeviceSpec
from bstar.specs.formats import kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.slo import Slo, parse_slo
from bstar.specs.workload import LengthDistribution, Workload
from bstar.traffic.lengths import fixed, parse_lengths


def plan(
    model: str | ModelSpec,
    gpus: str | DeviceSpec | Sequence[str | DeviceSpec],
    workload: Workload | None = None,
    slo: Slo | str | None = None,
    *,
    input_tokens: int | str | None = None,
    output_tokens: int | str | None = None,
    rate_per_s: float | None = None,
    concurrency: int | None = None,
    burstiness: float = 1.0,
    prefix_tokens: int = 0,
    prefix_hit_fraction: float | None = None,
    trace: str | Path | None = None,
    attainment_fraction: float | None = None,
    max_gpus: int | None = None,
    prices: Mapping[str, float] | None = None,
    weight_dtypes: str | Sequence[str] | None = None,
    kv_cache_dtypes: str | Sequence[str] | None = None,
    max_model_len: int | None = None,
    peak_factor: float = 1.0,
    headroom_fraction: float = 0.0,
    most_candidates: int = MOST_CANDIDATES,
    engine: str = "vllm",
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    gpu_memory_utilization: float | None = None,
    block_size: int | None = None,
    enable_prefix_caching: bool | None = None,
    enable_chunked_prefill: bool | None = None,
    async_scheduling: bool | None = None,
    enforce_eager: bool = False,
    profile: Profile | str | Path | None = None,
    simulate: int = 0,
    tell: Tell | None = None,
) -> PlanResult:
    """Candidates for serving `model` on any of `gpus`, best first, and what was rejected and why.

    workload        or its parts: input_tokens and output_tokens (a number or "lognormal:mean=512,cv=1.2") with
                    rate_per_s or concurrency, or a trace file. Without a rate: what one replica carries
    slo             an Slo, "ttft=500ms,tpot=50ms" or a preset's name; None asks for nothing (throughput)
    max_gpus        GPUs of all replicas together, at most
    prices          USD per GPU and hour by GPU name, over the catalog's; unknown prices rank by number of GPUs
    weight_dtypes   "fp8,bf16": exactly these ("auto" is the checkpoint's own); None: the checkpoint's own
    kv_cache_dtypes the same for the cache ("auto", "fp8", …)
    peak_factor     the load is sized for rate · peak_factor, at least 1; latencies are those of the peak, costs per
                    token those of the mean rate
    headroom_fraction  share of the capacity that is kept free
    profile         of `bstar.calibrate`, or its file: predicts the candidates that it is of
    simulate        so many of the best candidates are simulated request by request: their capacity, replicas, cost and
                    order are then those of the simulation (seconds; the first time on a machine it compiles)
    tell            called with the number and the name of each candidate before it is simulated
    Raises InputError for input that cannot be used. No feasible answer is a result with `feasible` False.
    """
    load = workload if workload is not None else _workload(
        input_tokens, output_tokens, trace, rate_per_s=rate_per_s, concurrency=concurrency, burstiness=burstiness,
        prefix_tokens=prefix_tokens, prefix_hit_fraction=prefix_hit_fraction)  # fmt: skip
    _check(max_gpus, peak_factor, headroom_fraction, max_num_seqs, max_num_batched_tokens)
    if simulate < 0:
        raise SpecError(f"simulate: is a number of candidates, must not be negative, is {simulate}")
    own = resolve_model(model) if isinstance(model, str) else model
    kv_dtypes = tuple(dict.fromkeys(as_sequence(kv_cache_dtypes) or ("auto",)))
    for name in kv_dtypes:
        kv_format(name, model_dtype=own.dtype)
    return answer(Question(
        model=own, devices=_devices(gpus), slo=_slo(slo, attainment_fraction), prices=prices or {},
        workload=replace(load, prefix_hit_fraction=0.0) if enable_prefix_caching is False else load,
        variants=_variants(own, as_sequence(weight_dtypes) or ("auto",)), kv_cache_dtypes=kv_dtypes,
        max_model_len=max_model_len, max_gpus=max_gpus, peak_factor=peak_factor,
        headroom_fraction=headroom_fraction, most_candidates=max(most_candidates, simulate), simulate=simulate,
        choice=EngineChoice(
            engine=engine, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization, block_size=block_size,
            enable_prefix_caching=enable_prefix_caching, enable_chunked_prefill=enable_chunked_prefill,
            async_scheduling=async_scheduling, enforce_eager=enforce_eager,
            profile=None if profile is None else as_profile(profile)),
    ), tell)  # fmt: skip


def _variants(own: ModelSpec, dtypes: Sequence[str]) -> tuple[ModelSpec, ...]:
    """The model at each weight dtype, those that come to the same once."""
    found: list[ModelSpec] = []
    for dtype in dtypes:
        one = own if dtype == "auto" else with_weight_dtype(own, dtype)
        if one not in found:
            found.append(one)
    return tuple(found)


def _workload(
    input_tokens: int | str | None, output_tokens: int | str | None, trace: str | Path | None, *,
    rate_per_s: float | None, concurrency: int | None, burstiness: float, prefix_tokens: int,
    prefix_hit_fraction: float | None,
) -> Workload:  # fmt: skip
    if trace is not None:
        from bstar.traffic.traces import read_trace

        return read_trace(trace).workload(rate_per_s=rate_per_s, concurrency=concurrency)
    if input_tokens is None or output_tokens is None:
        missing = "input" if input_tokens is None else "output"
        raise SpecError(f"{missing}: the load needs its {missing} length; give --{missing} 512 or a distribution")
    if concurrency is not None and burstiness != 1.0:
        raise SpecError("burstiness: clients of a closed loop send when they are answered; leave out --burstiness or "
                        "give --rate")
    hits = prefix_hit_fraction if prefix_hit_fraction is not None else (1.0 if prefix_tokens else 0.0)
    return Workload(
        input_tokens=_lengths(input_tokens, "input"), output_tokens=_lengths(output_tokens, "output"),
        rate_per_s=rate_per_s, concurrency=concurrency, burstiness=burstiness, prefix_tokens=prefix_tokens,
        prefix_hit_fraction=hits,
    )  # fmt: skip


def _lengths(value: int | str, field: str) -> LengthDistribution:
    return parse_lengths(value, field=field) if isinstance(value, str) else fixed(value)


def _slo(slo: Slo | str | None, attainment_fraction: float | None) -> Slo:
    if isinstance(slo, str):
        return parse_slo(slo, attainment_fraction=attainment_fraction)
    found = slo if slo is not None else Slo()
    return found if attainment_fraction is None else replace(found, attainment_fraction=attainment_fraction)


def _devices(gpus: str | DeviceSpec | Sequence[str | DeviceSpec]) -> tuple[DeviceSpec, ...]:
    listed: Sequence[str | DeviceSpec] = (
        as_sequence(gpus) if isinstance(gpus, str) else (gpus,) if isinstance(gpus, DeviceSpec) else gpus
    )
    found = {d.id: d for d in (get_device(g) if isinstance(g, str) else g for g in listed)}
    if not found:
        raise SpecError("gpu: name at least one, like --gpu h100-sxm-80gb,l40s")
    return tuple(found.values())


def _check(
    max_gpus: int | None, peak_factor: float, headroom_fraction: float, max_num_seqs: int | None, budget: int | None
) -> None:
    for name, value in (("max_gpus", max_gpus), ("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", budget)):
        if value is not None and value < 1:
            raise SpecError(f"{name}: must be at least 1, is {value}")
    if not 1 <= peak_factor < float("inf"):
        raise SpecError(f"peak_factor: the peak is at least the mean load, is {peak_factor}; say 1 or more")
    if not 0 <= headroom_fraction < 1:
        raise SpecError(f"headroom: must be in [0, 1), is {headroom_fraction}")
