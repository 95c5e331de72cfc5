"""What bstar predicts for a measured point: its load through its deployment, as its harness ran it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from bstar.calibration.loads import load_of
from bstar.calibration.plausibility import is_the_rows, latency_doubts
from bstar.calibration.point import Point
from bstar.calibration.point_deployments import deployment_of
from bstar.calibration.regimes import Regime, decode_regime, digits, regime_of
from bstar.catalog.devices import with_overrides
from bstar.errors import BstarError, InfeasibleError, SpecError
from bstar.sim.deployed import DeployedEngine, deployed_engine
from bstar.sim.stepwise import EngineRun
from bstar.sim.ways import Way, way_of
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic

if TYPE_CHECKING:
    from bstar.calibration.profile import Profile
    from bstar.latency.constants import Constants

# Where the memory model says no and the row was measured: how much more memory to grant, the first that does.
_MEMORY_FACTORS: Final = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of a point; means over its requests, the initial burst included.

    ttft_s, tpot_s   None where there is none: `reason` says why
    output_tokens_per_s   of the whole system (latency rows)
    ttft_range_s, tpot_range_s   (low, high) that hold the measured mean for four of five rows that a fit has not seen
    floor_s          TPOT that physics allows at the batch that the simulation found: no engine is faster
    regime           what held the engine back
    notes            what was assumed
    counts           False: what was assumed makes the row another one, so it is in no error figure
    profiled         whether a calibration was used
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_range_s: tuple[float, float] | None = None
    tpot_range_s: tuple[float, float] | None = None
    floor_s: float | None = None
    reason: str | None = None
    regime: Regime | None = None
    notes: tuple[str, ...] = ()
    counts: bool = True
    profiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineShare:
    """`engines` equal engines that each serve the clients of `load`, and the run of one of them."""

    engines: int
    load: Traffic
    run: EngineRun

    @property
    def clients(self) -> int:
        return self.engines * (self.load.concurrency or 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """The simulation behind a prediction; `ranks` of data-parallel attention are in one run."""

    deployed: DeployedEngine
    shares: tuple[EngineShare, ...]
    ranks: int = 1
    notes: tuple[str, ...] = ()


def replay(
    point: Point, deployment: Deployment | None = None, constants: Constants | None = None,
    profile: Profile | None = None,
) -> Prediction:  # fmt: skip
    """The prediction for `point` on `deployment` (None: the one that its row names).

    constants   latency constants that replace the deployment's own
    profile     a calibration; it is used where the row is of its model, GPU and engine
    Never raises a BstarError: what cannot be answered has a reason.
    """
    try:
        if point.fault is not None:
            return Prediction(reason=point.fault)
        found = _predicted(point, deployment, constants, profile)
    except MemoryError:
        return Prediction(reason=_too_large(point))
    except BstarError as error:
        return Prediction(reason=_reason(point, error))
    if found.reason is not None:
        found = replace(found, reason=_reason(point, found.reason))
    return replace(found, notes=tuple(dict.fromkeys((*point.doubts, *found.notes))))


def _predicted(
    point: Point, deployment: Deployment | None, constants: Constants | None, profile: Profile | None
) -> Prediction:
    if point.schema == "latency":
        return _latency(point, deployment, constants, profile)
    if point.is_disaggregated:
        return _disaggregated(point, constants)
    own = deployment_of(point) if deployment is None else deployment
    used = _calibrated(own, profile)
    found = predict(point, replayed(point, used, constants))
    return _profiled(replace(found, counts=is_the_rows(used)), profile if used is not own else None)


def _reason(point: Point, error: BstarError | str) -> str:
    """One line, without the row's name, which stands beside it."""
    return " ".join(str(error).split()).removeprefix(f"{point.id}: ")


def _too_large(point: Point) -> str:
    name = "load_value" if point.schema == "latency" else "concurrency"
    return f"{name}: the requests of {point.concurrency:,} clients do not fit in this machine's memory; use fewer"


def _profiled(prediction: Prediction, profile: Profile | None) -> Prediction:
    if profile is None:
        return prediction
    return replace(prediction, profiled=True, notes=(*prediction.notes, "predicted with the profile"))


def replayed(point: Point, deployment: Deployment, constants: Constants | None = None) -> Replayed:
    """The point's load through `deployment`: every engine behind its endpoint gets its share of the clients.

    Raises InfeasibleError or SpecError where the deployment cannot serve it with any memory.
    """
    first: BstarError | None = None
    for tried, note in _with_room(deployment):
        try:
            deployed = _deployed(tried, constants)
            shares = tuple(_shares(point, deployed))
        except (InfeasibleError, SpecError) as error:
            first = first or error
            continue
        notes = deployment.engine.notes
        if note:
            notes += (f"{note}: it was measured, though {first}",)
        return Replayed(deployed=deployed, shares=shares, ranks=_ranks(deployed), notes=notes)
    assert first is not None
    raise first


def predict(point: Point, found: Replayed) -> Prediction:
    """Means over the requests of all engines that count."""
    means = np.array([_means(share) for share in found.shares])
    weights = [share.clients for share in found.shares]
    ttft_s, tpot_s = (np.average(means, axis=0, weights=weights)).tolist()
    regime = regime_of(found.deployed, [share.run.log for share in found.shares], weights, point, ranks=found.ranks)
    known = math.isfinite(tpot_s)
    prediction = Prediction(
        ttft_s=digits(ttft_s + found.deployed.per_request_s), tpot_s=digits(tpot_s) if known else None,
        floor_s=regime.floor_s if known else None, regime=regime, notes=found.notes,
    )  # fmt: skip
    return _ranged(prediction, point, found.deployed.deployment)


def _means(share: EngineShare) -> tuple[float, float]:
    """(TTFT from the scheduler on, TPOT; nan with answers of one token): means over the requests that count."""
    run, counted = share.run, slice(share.load.warmup_requests, None)
    first, made = run.first_token_s[counted], run.made_tokens[counted]
    several = made > 1
    rest = (run.finish_s[counted] - first)[several] / (made[several] - 1)
    return float(np.mean(first - run.arrival_s[counted])), float(np.mean(rest)) if rest.size else math.nan


def _way(deployed: DeployedEngine) -> Way:
    return way_of("engine", deployed.deployment.engine.name, deployed.deployment.parallel.attention_dp)


def _ranks(deployed: DeployedEngine) -> int:
    """Ranks of data-parallel attention that one run covers."""
    return deployed.deployment.parallel.attention_dp if _way(deployed).covers_ranks else 1


def _shares(point: Point, deployed: DeployedEngine) -> Iterator[EngineShare]:
    """The clients are dealt out to the engines in turn: two numbers of clients at most."""
    way = _way(deployed)
    engines = deployed.deployment.parallel.dp if way.covers_ranks else deployed.replicas
    fewest, more = divmod(point.concurrency, engines)
    for clients, count in ((fewest + 1, more), (fewest, engines - more)):
        if clients and count:
            load = load_of(point, clients)
            seen = replace(load, arrival_s=load.arrival_s + deployed.per_request_s,
                           think_s=load.think_s[:1] + deployed.per_request_s)
            run = way.run(deployed, seen, until_s=math.inf, progress=None, implementation="auto")
            yield EngineShare(engines=count, load=load, run=run)


def _deployed(deployment: Deployment, constants: Constants | None) -> DeployedEngine:
    return deployed_engine(deployment) if constants is None else deployed_engine(deployment, constants)


def _calibrated(deployment: Deployment, profile: Profile | None) -> Deployment:
    """The deployment with the profile, where it is one that the profile holds for."""
    from bstar.calibration.profile import calibrated, holds_for

    if profile is None or not holds_for(profile, deployment):
        return deployment
    return calibrated(deployment, profile)


def _with_room(deployment: Deployment) -> Iterator[tuple[Deployment, str]]:
    """The deployment, then the same with more memory: all that could have been used, then more than there is."""
    yield deployment, ""
    full = replace(deployment.engine, gpu_memory_utilization=max(0.95, deployment.engine.gpu_memory_utilization))
    yield replace(deployment, engine=full), "memory utilization taken as 0.95"
    device = deployment.device
    for factor in _MEMORY_FACTORS:
        larger = with_overrides(device, memory_bytes=round(device.reported_memory_bytes * factor))
        yield replace(deployment, device=larger, engine=full), f"memory taken as {factor:g} times the GPU's"


def _disaggregated(point: Point, constants: Constants | None) -> Prediction:
    from bstar.calibration.disaggregated import ACCEPTANCE, disaggregated_replay

    found = disaggregated_replay(point, constants)
    ttft_s, tpot_s, regime = digits(found.ttft_s), None if found.tpot_s is None else digits(found.tpot_s), None
    if tpot_s is not None and tpot_s > 0:
        answer_s = point.output_tokens * tpot_s
        batch = point.concurrency * answer_s / (ttft_s + answer_s) / found.layout.decode.workers
        regime = decode_regime(found.decode, batch, point.input_tokens + point.output_tokens / 2.0)
        regime = replace(regime, floor_s=regime.floor_s / ACCEPTANCE.tokens_per_step(found.layout.drafted))
    prediction = Prediction(ttft_s=ttft_s, tpot_s=tpot_s, floor_s=None if regime is None else regime.floor_s,
                            regime=regime, notes=found.notes, counts=is_the_rows(found.prefill, found.decode))
    return _ranged(prediction, point, found.decode)


def _latency(
    point: Point, deployment: Deployment | None, constants: Constants | None, profile: Profile | None
) -> Prediction:
    from bstar.calibration.latency_points import latency_point
    from bstar.calibration.latency_points_mapping import latency_deployment
    from bstar.calibration.latency_points_replay import replay_latency_point

    measured = latency_point({**point.columns, "id": point.id})
    mapped = latency_deployment(measured)
    own = deployment or mapped.deployment
    used = _calibrated(own, profile)
    doubts = latency_doubts(point, used)
    found = replay_latency_point(measured, used, constants)
    regime = None
    if found.batch is not None and found.reason is None:
        regime = decode_regime(used, found.batch, point.input_tokens + point.output_tokens / 2.0)
    prediction = Prediction(
        ttft_s=found.ttft_s, tpot_s=found.tpot_s, output_tokens_per_s=found.out_tokens_per_s, reason=found.reason,
        regime=regime, floor_s=found.floor_s, notes=(*mapped.notes, *found.notes, *doubts),
        counts=not any(note.startswith(("layout", "memory")) for note in doubts))
    return _ranged(_profiled(prediction, profile if used is not own else None), point, used)


def _ranged(prediction: Prediction, point: Point, deployment: Deployment) -> Prediction:
    """The prediction with its ranges, where held-out residuals of like rows are known."""
    from bstar.calibration.intervals import likeness_of, range_of

    like = likeness_of(deployment, in_flight=float(point.concurrency), input_tokens=point.input_tokens,
                       output_tokens=point.output_tokens)
    bound_by = "" if prediction.regime is None else prediction.regime.bound_by
    ttft = range_of(prediction.ttft_s, "ttft", like, bound_by)
    tpot = range_of(prediction.tpot_s, "tpot", like, bound_by, floor=prediction.floor_s or 0.0)
    return replace(prediction, ttft_range_s=None if ttft is None else (ttft.low, ttft.high),
                   tpot_range_s=None if tpot is None else (tpot.low, tpot.high))
