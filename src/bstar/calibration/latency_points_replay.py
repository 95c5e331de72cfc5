"""What bstar predicts for a latency point: its load through its deployment, as its harness ran it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from bstar.calibration.latency_points import LatencyPoint
from bstar.calibration.latency_points_loads import request_load
from bstar.calibration.latency_points_static import static_times, with_identical_tokens
from bstar.catalog.devices import with_overrides
from bstar.errors import BstarError, InfeasibleError, SpecError
from bstar.latency.step_model import StepModel, step_model
from bstar.physics.batch import BatchShape
from bstar.sim.deployed import DeployedEngine, deployed_engine
from bstar.sim.ways import way_of
from bstar.specs.deployment import Deployment

if TYPE_CHECKING:
    from bstar.latency.constants import Constants
    from bstar.sim.stepwise import EngineRun
    from bstar.traffic import Traffic

Floats = NDArray[np.float64]

# Where the memory model says no and the row was measured: how much more memory to grant, the first that does.
_MEMORY_FACTORS: Final = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPrediction:
    """What is expected of a latency point; None where there is none (`reason` says why).

    floor_s           TPOT that physics allows at the batch it ran with: no engine is faster
    out_tokens_per_s  of the whole system
    batch             sequences that decode together, mean
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    out_tokens_per_s: float | None = None
    floor_s: float | None = None
    batch: float | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()


def replay_latency_point(
    point: LatencyPoint, deployment: Deployment, constants: Constants | None = None
) -> LatencyPrediction:
    """The prediction for `point` on `deployment`; never raises a BstarError.

    constants   latency constants that replace the deployment's own
    """
    try:
        if point.load == "static_batch":
            return _static(point, deployment, constants)
        if point.input_tokens is None or point.output_tokens is None:
            return _decode_rate(point, deployment, constants)
        return _served(point, deployment, constants)
    except BstarError as error:
        return LatencyPrediction(reason=" ".join(str(error).split()))


def _static(point: LatencyPoint, deployment: Deployment, constants: Constants | None) -> LatencyPrediction:
    if point.input_tokens is None or point.output_tokens is None or not math.isfinite(point.load_value):
        raise SpecError(f"{point.id}: a static batch needs its size, isl and osl")
    model, notes = step_model(deployment, constants), tuple[str, ...]()
    if "dummy" in point.dataset.lower() and model.routed.size:
        model = with_identical_tokens(model)
        notes = ("dummy inputs: all sequences are the same tokens, so a layer touches no more experts than one token",)
    found = static_times(
        model, batch=point.load_value, input_tokens=point.input_tokens, output_tokens=point.output_tokens)
    known = math.isfinite(found.tpot_s)
    return LatencyPrediction(
        ttft_s=found.ttft_s, tpot_s=found.tpot_s if known else None, e2e_s=found.e2e_s,
        out_tokens_per_s=point.load_value * point.output_tokens / found.e2e_s,
        floor_s=found.tpot_floor_s if known else None, batch=point.load_value, notes=notes,
    )  # fmt: skip


def _decode_rate(point: LatencyPoint, deployment: Deployment, constants: Constants | None) -> LatencyPrediction:
    """A row without lengths: a decode step of its batch at a short context (what a chat line of test prompts has)."""
    if not math.isfinite(point.load_value):
        raise SpecError(f"{point.id}: isl and osl are not stated; a load needs both lengths")
    context = point.output_tokens / 2.0 if point.output_tokens else 512.0
    expected, floor = _decode_s(step_model(deployment, constants), point.load_value, context)
    return LatencyPrediction(
        tpot_s=expected, floor_s=floor, batch=point.load_value, out_tokens_per_s=point.load_value / expected,
        notes=(f"lengths are not stated: a decode step at {context:.0f} tokens of context",),
    )  # fmt: skip


def _decode_s(model: StepModel, batch: float, context: float) -> tuple[float, float]:
    """(expected, floor) seconds of a decode step of a whole replica's batch."""
    work = model.decode_work(context, float(model.microbatch(batch)))
    return float(model.times(work).total_s), float(model.floor_s(work).sum())


def _served(point: LatencyPoint, deployment: Deployment, constants: Constants | None) -> LatencyPrediction:
    first: BstarError | None = None
    longest = request_load(point)
    needed = int((longest.input_tokens + longest.output_tokens).max()) + 1
    for tried, note in _with_room(deployment, needed):
        try:
            deployed = deployed_engine(tried, constants)
            share, load, run = _run(point, deployed)
        except (InfeasibleError, SpecError) as error:
            first = first or error
            continue
        found = _means(point, deployed, share, load, run)
        return replace(found, notes=(f"{note}: it was measured, though {first}",)) if note else found
    assert first is not None
    raise first


def _run(point: LatencyPoint, deployed: DeployedEngine) -> tuple[int, Traffic, EngineRun]:
    """(engines, load of one of them, its run). Ranks of data-parallel attention are alike: one stands for all."""
    deployment = deployed.deployment
    way = way_of("engine", deployment.engine.name)
    share = deployed.replicas
    load = request_load(point, share=share, period_s=_period_s(point, deployed))
    longest = int(load.input_tokens.max())
    if longest >= deployed.settings.max_model_len:
        raise SpecError(f"max_model_len: prompts of {longest} tokens do not fit {deployed.settings.max_model_len}")
    s = deployed.per_request_s
    seen = replace(load, arrival_s=load.arrival_s + s, think_s=load.think_s[:1] + s)
    return share, load, way.run(deployed, seen, until_s=math.inf, progress=None, implementation="auto")


def _means(
    point: LatencyPoint, deployed: DeployedEngine, share: int, load: Traffic, run: EngineRun
) -> LatencyPrediction:
    counted = slice(load.warmup_requests, None)
    first, finish, made = run.first_token_s[counted], run.finish_s[counted], run.made_tokens[counted]
    arrival = run.arrival_s[counted]
    several = made > 1
    rest = (finish - first)[several] / (made[several] - 1)
    front = deployed.per_request_s
    begin, end = float(np.nanmin(run.arrival_s)) - front, float(np.nanmax(run.finish_s))
    if load.warmup_requests:
        begin = float(np.nanmin(arrival)) - front
    batch = _mean_batch(first, finish)
    context = float(np.mean(load.input_tokens)) + float(np.mean(load.output_tokens)) / 2.0
    floor = _decode_s(deployed.model, batch * share, context)[1]
    return LatencyPrediction(
        ttft_s=float(np.mean(first - arrival)) + front, tpot_s=float(np.mean(rest)) if rest.size else None,
        e2e_s=float(np.mean(finish - arrival)) + front, out_tokens_per_s=share * float(made.sum()) / (end - begin),
        floor_s=floor, batch=batch * share,
    )  # fmt: skip


def _mean_batch(first: Floats, finish: Floats) -> float:
    """Sequences decoding together, as a decoding sequence sees it on average; at least 1."""
    begin, end = float(np.min(first)), float(np.max(finish))
    return max(1.0, float(np.sum(finish - first)) / max(end - begin, 1e-9))


def _period_s(point: LatencyPoint, deployed: DeployedEngine) -> float:
    """Seconds between two requests of a client of a steady loop, without queueing: about."""
    if point.load != "closed" or point.input_tokens is None or point.output_tokens is None:
        return 0.0
    step, _ = _decode_s(deployed.model, point.load_value, point.input_tokens + point.output_tokens / 2.0)
    values = deployed.model.step.values(BatchShape.prefill(point.input_tokens))
    prompt = float(deployed.model.times(deployed.model.work_of(values)).total_s)
    return point.output_tokens * step + point.load_value / deployed.replicas * prompt


def _with_room(deployment: Deployment, needed: int) -> Iterator[tuple[Deployment, str]]:
    """The deployment, then what a user would have changed for it to start: a shorter max_model_len, all the memory,
    whole experts on each rank; then more memory than there is.
    """
    yield deployment, ""
    engine, device, parallel = deployment.engine, deployment.device, deployment.parallel
    if needed < engine.max_model_len:
        engine = replace(engine, max_model_len=needed)
        yield replace(deployment, engine=engine), f"max_model_len taken as {needed:,}"
    full = replace(engine, gpu_memory_utilization=max(0.95, engine.gpu_memory_utilization))
    yield replace(deployment, engine=full), "memory utilization taken as 0.95"
    if deployment.model.is_moe and parallel.ep == 1:
        whole = replace(parallel, ep=parallel.tp * parallel.attention_dp)
        yield replace(deployment, engine=full, parallel=whole), "experts taken as whole on each rank"
    for factor in _MEMORY_FACTORS:
        larger = with_overrides(device, memory_bytes=round(device.reported_memory_bytes * factor))
        yield replace(deployment, device=larger, engine=full), f"memory taken as {factor:g} times the GPU's"
