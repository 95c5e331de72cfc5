"""One layout under one load: its capacity, its replicas, what its users experience, what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bstar.calibration.intervals import Range, likeness_of
from bstar.calibration.ranges import mean_ranges
from bstar.latency.times import decode_step_time
from bstar.physics.deployment_landmarks import Landmarks
from bstar.physics.landmarks import landmarks_of
from bstar.physics.memory import memory_budget
from bstar.planning.capacity import Capacity, capacity_of, outcomes_of
from bstar.planning.cost import cost_of
from bstar.planning.experience import Outcomes
from bstar.planning.feasibility import NoAnswerError
from bstar.planning.lanes import MEMORY_SHARE, Lanes
from bstar.planning.replica import Replica, overflow_fraction, secure_room
from bstar.planning.results import Candidate, Percentiles, Predicted, Simulated
from bstar.planning.screen import Screened, Spot, Task, searched
from bstar.planning.sheet import slo_batch
from bstar.planning.space import build
from bstar.specs.deployment import Deployment

_MANY_QUEUE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sized:
    """A layout with its capacity and replicas: what ranking needs; `finish` makes the candidate of it."""

    screened: Screened
    lanes: Lanes
    capacity: Capacity
    replicas: int

    @property
    def spot(self) -> Spot:
        return self.screened.spot

    @property
    def replica(self) -> Replica:
        """The replica at the chosen places and token budget."""
        found, room = self.screened.replica, self.lanes.room
        return replace(
            found, token_budget=self.capacity.budget, decode_step_s=found.decode_step_s[: self.capacity.cap],
            floor_step_s=found.floor_step_s[: self.capacity.cap], room_sequences=room[self.capacity.budget],
        )  # fmt: skip

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.spot.layout.num_gpus

    @property
    def carried_per_s(self) -> float:
        """Requests per second of all replicas at their capacity."""
        return self.capacity.requests_per_s * self.replicas


def size(task: Task, screened: Screened) -> Sized:
    """The capacity and the replicas of a layout. Raises NoAnswerError with the reason where it is no answer."""
    total = None if task.load is None else task.load / (1.0 - task.headroom_fraction)
    lanes = searched(task, screened)
    capacity, replicas = capacity_of(screened.replica, task.draws, task.workload, task.slo, lanes, total, task.replay)
    each = screened.spot.layout.num_gpus
    if task.max_gpus is not None and replicas * each > task.max_gpus:
        needs = f"needs {replicas * each} GPUs ({replicas} replicas of {each})"
        raise NoAnswerError("max_gpus", f"{needs}, more than the {task.max_gpus} allowed")
    return Sized(screened=screened, lanes=lanes, capacity=capacity, replicas=replicas)


def finish(task: Task, sized: Sized, seen: Simulated | None = None) -> Candidate:
    """The candidate of a sized layout: flags, memory, landmarks, predictions, cost, command.

    seen   what its simulation says: attainment, goodput and what clients get are then taken from there
    """
    saturated = task.load is None and task.slo.is_empty
    workload = replace(task.workload, concurrency=sized.capacity.cap) if saturated else task.workload
    load = (task.load if task.load is not None else sized.capacity.load) / sized.replicas
    found = outcomes_of(
        sized.replica, task.draws, workload, load=load, cap=sized.capacity.cap, replicas=sized.replicas,
        replay=task.replay,
    )
    deployment = final_deployment(task, sized)
    predicted = _predicted(sized, found, deployment.engine.max_num_seqs)
    if seen is not None:
        seen = replace(seen, ranges=_ranges(predicted, seen, task, deployment))
    bound_by = _bound(task, sized, deployment, found)
    attainment = float(found.attainment(task.slo)[0]) if seen is None else seen.slo_attainment_fraction
    closed = workload.concurrency is not None
    each_per_s = float(found.rate_per_s[0]) if seen is None or not closed else seen.requests_per_s
    rate = each_per_s * sized.replicas
    mean_rate = rate / task.peak_factor
    tokens_per_s = mean_rate * float(task.draws.output_tokens.mean())
    return Candidate(
        deployment=deployment, layout=sized.spot.layout, replicas=sized.replicas,
        memory=memory_budget(deployment).to_dict(),
        landmarks=_landmarks(deployment, landmarks_of(deployment, task.workload), task),
        predicted=replace(predicted, ranges=_ranges(predicted, predicted, task, deployment)),
        requests_per_s=mean_rate, output_tokens_per_s=tokens_per_s,
        goodput_requests_per_s=mean_rate * attainment, slo_attainment_fraction=attainment,
        capacity_requests_per_s=max(sized.carried_per_s, rate) if task.load is not None else sized.carried_per_s,
        headroom_fraction=max(sized.capacity.load / load - 1.0, 0.0),
        cost=cost_of(sized.spot.price, sized.num_gpus, tokens_per_s),
        bound_by=bound_by, launch_command=_command(deployment),
        clients_per_replica=load if closed else None, notes=(*_notes(task, sized, seen), *deployment.engine.notes),
        simulated=seen,
    )  # fmt: skip


def final_deployment(task: Task, sized: Sized) -> Deployment:
    """The deployment with the chosen max_num_seqs, which counts per data-parallel rank, and what follows from it."""
    spot = sized.spot
    seqs = task.choice.max_num_seqs or max(sized.capacity.cap // spot.layout.attention_dp, 1)
    return build(
        spot.model, spot.device, spot.layout, task.choice, kv_cache_dtype=spot.kv_cache_dtype,
        max_model_len=task.max_model_len, max_num_seqs=seqs,
        max_num_batched_tokens=sized.capacity.budget,
    )  # fmt: skip


def _landmarks(deployment: Deployment, marks: Landmarks, task: Task) -> dict[str, float | None]:
    names = ("ridge_point", "b_star", "b_gemm", "b_compute", "b_mem", "b_mem_full", "b_tok")
    out: dict[str, float | None] = {name: getattr(marks, name) for name in names}
    out["b_slo"] = slo_batch(deployment, task.workload, task.slo, draws=task.draws)
    return out


def _predicted(sized: Sized, found: Outcomes, max_num_seqs: int) -> Predicted:
    replica, decoding = sized.replica, float(found.decoding[0])
    places = float(max_num_seqs * sized.spot.layout.attention_dp)
    full = float(found.queued_fraction[0]) > _MANY_QUEUE
    crowd = places if full else min(decoding + 2.33 * math.sqrt(decoding), places)
    return Predicted(
        kv_usage_fraction=min(decoding / replica.room_sequences, 1.0),
        preemption_risk_fraction=overflow_fraction(replica.room_sequences, replica.context_cv, crowd),
        ttft_s=Percentiles.of(found.ttft_s[0]), tpot_s=Percentiles.of(found.tpot_s[0]),
        e2e_s=Percentiles.of(found.e2e_s[0]), in_flight=float(found.in_flight[0]), decoding=decoding,
        step_s=float(found.step_s[0]),
        prefill_fraction=float(found.prefill_fraction[0]), queued_fraction=float(found.queued_fraction[0]),
    )  # fmt: skip


def _ranges(
    predicted: Predicted, means: Predicted | Simulated, task: Task, deployment: Deployment
) -> Mapping[str, Range]:
    """The ranges of `means` that a simulated run has: by what its decode steps are bound by, or "queueing"."""
    bound_by = "queueing" if predicted.queued_fraction > _MANY_QUEUE else _step_bound(
        deployment, predicted.decoding, task.context)
    likeness = likeness_of(
        deployment, in_flight=predicted.in_flight, input_tokens=task.workload.input_tokens.mean,
        output_tokens=task.workload.output_tokens.mean)
    return mean_ranges(likeness, bound_by, ttft_s=means.ttft_s.mean, tpot_s=means.tpot_s.mean, e2e_s=means.e2e_s.mean)


def _bound(task: Task, sized: Sized, deployment: Deployment, found: Outcomes) -> str:
    """What keeps this candidate from carrying more, in the words of the contract."""
    cap, replica = sized.capacity.cap, sized.replica
    queued = float(found.queued_fraction[0]) > _MANY_QUEUE
    secure = secure_room(replica.room_sequences, replica.context_cv)
    at_memory = cap >= 0.9 * min(MEMORY_SHARE * replica.room_sequences, secure)
    if queued or (task.slo.is_empty and task.load is None):
        if at_memory:
            return "kv_capacity"
        if queued:
            return "max_num_seqs"
    missed = ~found.meets(task.slo)[0]
    if missed.any() and task.slo.ttft_s is not None:
        late = found.ttft_s[0][missed] > task.slo.ttft_s
        if late.mean() > 0.5 and float(found.prefill_fraction[0]) < 0.5:
            return "queueing"
    if float(found.prefill_fraction[0]) >= 0.5:
        return "compute"
    return _step_bound(deployment, float(found.decoding[0]), task.context)


def _step_bound(deployment: Deployment, decoding: float, context: float) -> str:
    return str(decode_step_time(deployment, max(decoding, 1.0), context).bound_by)


def _command(deployment: Deployment) -> str:
    from bstar.codec.engine_command import format_command

    return format_command(deployment)


def _notes(task: Task, sized: Sized, seen: Simulated | None) -> tuple[str, ...]:
    notes = []
    if seen is not None and sized.spot.layout.pp > 1:
        notes.append("simulated with stages that always hold equal shares of the batch: the bubbles of a real pipeline "
                     "come on top")
    if sized.spot.price.usd_per_hour is None:
        notes.append(sized.spot.price.source)
    if seen is not None:
        return tuple(notes)  # what follows is about closed forms
    if task.replay is not None:
        notes.append("arrivals are the trace's own, spread over the replicas at random and replayed through each one's "
                     "prefill queue; decoding is by closed forms")
    elif task.workload.gap_cv_squared > 4.0:
        notes.append(f"arrivals are very bursty (CV² {task.workload.gap_cv_squared:.1f}): closed forms err; give a "
                     "--trace with its arrivals, or keep headroom")
    return tuple(notes)
