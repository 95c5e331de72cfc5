"""`bstar plan`: which GPUs, how many, split how, with which flags, at what cost, for a load and an SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bstar.catalog.devices import get_device
from bstar.codec.resolve import resolve_model, with_weight_dtype
from bstar.errors import SpecError
from bstar.planning.cost import gpu_price
from bstar.planning.draws import length_needs, request_draws
from bstar.planning.evaluate import Sized, finish, refined, size
from bstar.planning.feasibility import NoAnswerError, needed_model_len
from bstar.planning.rank import bound_key, sized_key, with_pareto
from bstar.planning.results import PlanResult, Rejected
from bstar.planning.screen import Screened, Spot, Task, screen
from bstar.planning.space import EngineChoice, Layout, as_sequence, build, layouts
from bstar.specs.device import DeviceSpec
from bstar.specs.formats import kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.slo import Slo, parse_slo
from bstar.specs.workload import LengthDistribution, Workload
from bstar.traffic.lengths import fixed, parse_lengths

# What is shown at most; every layout is screened, only those that can be among the best are worked out.
MOST_CANDIDATES = 20
# Other token budgets are tried for this many of the best.
REFINED = 2


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
) -> PlanResult:
    """Candidates for serving `model` on any of `gpus`, best first, and what was rejected and why.

    workload        or its parts: input_tokens and output_tokens (a number or "lognormal:mean=512,cv=1.2") with
                    rate_per_s or concurrency, or a trace file. Without a rate: what one replica carries
    slo             an Slo, "ttft=500ms,tpot=50ms" or a preset's name; None asks for nothing (throughput)
    max_gpus        GPUs of all replicas together, at most
    prices          USD per GPU and hour by GPU name, over the catalog's; unknown prices rank by number of GPUs
    weight_dtypes   "fp8,bf16": exactly these ("auto" is the checkpoint's own); None: the checkpoint's own
    kv_cache_dtypes the same for the cache ("auto", "fp8", …)
    peak_factor     the load is sized for rate · peak_factor; costs per token are for the mean rate
    headroom_fraction  share of the capacity that is kept free
    Raises InputError for input that cannot be used. No feasible answer is a result with `feasible` False.
    """
    load = workload if workload is not None else _workload(
        input_tokens, output_tokens, trace, rate_per_s=rate_per_s, concurrency=concurrency, burstiness=burstiness,
        prefix_tokens=prefix_tokens, prefix_hit_fraction=prefix_hit_fraction)  # fmt: skip
    if enable_prefix_caching is False:
        load = replace(load, prefix_hit_fraction=0.0)
    limits = _slo(slo, attainment_fraction)
    _check(max_gpus, peak_factor, headroom_fraction, max_num_seqs, max_num_batched_tokens)
    devices = _devices(gpus)
    own = resolve_model(model) if isinstance(model, str) else model
    draws = request_draws(load)
    needs = length_needs(load, draws)
    length, note = needed_model_len(own, needs.longest_tokens, needs.p99_tokens)
    task = Task(
        workload=load, slo=limits, draws=draws, context=load.mean_decode_context_tokens,
        max_model_len=_model_len(max_model_len, length, needs.p99_tokens),
        peak_factor=peak_factor, headroom_fraction=headroom_fraction,
        max_gpus=max_gpus,
        choice=EngineChoice(
            engine=engine, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization, block_size=block_size,
            enable_prefix_caching=enable_prefix_caching, enable_chunked_prefill=enable_chunked_prefill,
            async_scheduling=async_scheduling, enforce_eager=enforce_eager),
    )  # fmt: skip
    models = [own if dtype == "auto" else with_weight_dtype(own, dtype)
              for dtype in as_sequence(weight_dtypes) or ("auto",)]
    kv_dtypes = as_sequence(kv_cache_dtypes) or ("auto",)
    for name in kv_dtypes:
        kv_format(name, model_dtype=own.dtype)
    # Flags that no layout could have are the user's to mend, not a layout's.
    for device in devices:
        build(models[0], device, Layout(), task.choice, kv_cache_dtype=kv_dtypes[0], max_model_len=task.max_model_len,
              max_num_seqs=max_num_seqs or 1, max_num_batched_tokens=max_num_batched_tokens)  # fmt: skip
    screened, rejected = _screen(task, models, devices, kv_dtypes, prices or {})
    sized, refused = _size_best(task, screened, most_candidates)
    left = len(screened) - len(sized) - len(refused)
    return PlanResult(
        model=own.name, workload=load, slo=limits, max_model_len=task.max_model_len,
        candidates=with_pareto([finish(task, one) for one in sized]), rejected=(*rejected, *refused),
        notes=tuple(n for n in (note, _more(left)) if n),
    )  # fmt: skip


def _screen(
    task: Task, models: Sequence[ModelSpec], devices: Sequence[DeviceSpec], kv_dtypes: Sequence[str],
    prices: Mapping[str, float],
) -> tuple[list[Screened], list[Rejected]]:  # fmt: skip
    """Every layout, screened or rejected. Replicas over more than one node only where no smaller one works."""
    screened: list[Screened] = []
    rejected: list[Rejected] = []
    for device in devices:
        price = gpu_price(device, prices)
        for model in models:
            for kv in kv_dtypes:
                found = 0
                for layout in layouts(model, device, max_gpus=task.max_gpus or 1 << 30):
                    if found and layout.num_gpus > min(device.devices_per_node, 8):
                        break
                    spot = Spot(model=model, device=device, layout=layout, kv_cache_dtype=kv, price=price)
                    try:
                        screened.append(screen(task, spot))
                        found += 1
                    except NoAnswerError as no:
                        rejected.append(_rejected(spot, no))
    return screened, rejected


def _size_best(task: Task, screened: Sequence[Screened], most: int) -> tuple[list[Sized], list[Rejected]]:
    """The best `most` layouts, sized; a layout is left out when even its bound is behind all of them."""
    sized: list[Sized] = []
    refused: list[Rejected] = []
    for one in sorted(screened, key=lambda s: bound_key(s, task)):
        if len(sized) >= most and bound_key(one, task)[:2] > sized_key(sized[most - 1], task)[:2]:
            break
        try:
            sized.append(size(task, one))
        except NoAnswerError as no:
            refused.append(_rejected(one.spot, no))
        sized.sort(key=lambda s: sized_key(s, task))
    done: list[Sized] = []
    for place, found in enumerate(sized):
        # Another token budget cannot help where even the bound of the layout is behind the best found.
        hopeful = place < REFINED or bound_key(found.screened, task)[:2] < sized_key(done[0], task)[:2]
        done.append(refined(task, found) if hopeful else found)
        done.sort(key=lambda s: sized_key(s, task))
    return done[:most], refused


def _rejected(spot: Spot, no: NoAnswerError) -> Rejected:
    kv = kv_format(spot.kv_cache_dtype, model_dtype=spot.model.dtype)
    return Rejected(
        gpu=spot.device.id, layout=spot.layout, weight_dtype=spot.model.weight_dtype, kv_dtype=kv.name,
        reason=str(no), kind=no.kind,
    )  # fmt: skip


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
    hits = prefix_hit_fraction if prefix_hit_fraction is not None else (1.0 if prefix_tokens else 0.0)
    return Workload(
        input_tokens=_lengths(input_tokens, "input"), output_tokens=_lengths(output_tokens, "output"),
        rate_per_s=rate_per_s, concurrency=concurrency, burstiness=burstiness, prefix_tokens=prefix_tokens,
        prefix_hit_fraction=hits,
    )  # fmt: skip


def _model_len(asked: int | None, needed: int, p99_tokens: int) -> int:
    if asked is None:
        return needed
    if asked < p99_tokens:
        raise SpecError(f"max_model_len: {asked:,} is too short, 1 % of the requests reach {p99_tokens:,}; raise it")
    return asked


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
    if not 0 < peak_factor < float("inf"):
        raise SpecError(f"peak_factor: must be positive and finite, is {peak_factor}")
    if not 0 <= headroom_fraction < 1:
        raise SpecError(f"headroom: must be in [0, 1), is {headroom_fraction}")


def _more(left: int) -> str | None:
    return f"{left} more layouts fit and cannot be better than the last one shown" if left > 0 else None
