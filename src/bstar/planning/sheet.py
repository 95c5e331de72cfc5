"""The physics sheet of a deployment: landmarks, step time, walls, recommended flags, each with its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.calibration.intervals import Range
from bstar.calibration.ranges import step_range
from bstar.errors import SpecError
from bstar.latency.times import StepTime, decode_curve, decode_step_time
from bstar.physics import landmarks as formulas_of
from bstar.physics.deployment_landmarks import Landmarks
from bstar.physics.landmarks import landmarks_of
from bstar.physics.memory import memory_budget
from bstar.physics.operators import compiled_step
from bstar.planning.draws import RequestDraws, request_draws
from bstar.planning.formulas import Formula, sheet_formulas
from bstar.planning.limits import (
    Recommendation,
    largest_batch_within,
    recommend_max_num_seqs,
    recommend_token_budget,
)
from bstar.planning.replica import Replica, prefill_of_a_request_s
from bstar.planning.steps import replica_of
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo, as_slo
from bstar.specs.workload import Workload
from bstar.traffic.lengths import fixed

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A time by the floor (speed of light) and as expected, in seconds; range: where held-out rows say it lies."""

    floor: float
    expected: float
    range: Range | None = None

    def to_dict(self) -> dict[str, Any]:
        found = {"floor": self.floor, "expected": self.expected}
        if self.range is None:
            return found
        return found | {"range_80": self.range.to_list(), "range_basis": self.range.basis}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Everything `bstar explain` prints.

    batch            sequences of the whole replica that the step times are for
    step_time_s      one decode step of `batch` sequences at the mean context, prefill apart
    b_slo            largest batch whose expected step, with its share of prefill, meets the TPOT limit
    prefill_share_s  seconds of prefill that each sequence adds to each step (0 for a bare context)
    bound_by         what most of the expected step goes to, or the wall that `batch` is over
    """

    deployment: Deployment
    landmarks: Landmarks
    b_slo: float | None
    batch: float
    arithmetic_intensity: float
    step_time_s: Pair
    time_per_output_token_amortized_s: Pair
    by_operator: tuple[tuple[str, float, float], ...]
    bound_by: str
    shares: dict[str, float]
    region: str | None
    regions: tuple[tuple[str, float, float | None], ...]
    recommended_max_num_seqs: Recommendation
    recommended_max_num_batched_tokens: Recommendation
    prefill_share_s: float
    fits: bool
    formulas: tuple[Formula, ...]
    notes: tuple[str, ...]
    provenance: str

    @property
    def feasible(self) -> bool:
        """Whether one sequence fits and meets the TPOT limit, if there is one."""
        return self.recommended_max_num_seqs.value is not None

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `bstar explain`."""
        lm = self.landmarks
        names = ("b_star", "b_gemm", "b_compute", "b_mem", "b_mem_full", "b_tok")
        return {
            "model": self.deployment.model.name,
            "gpu": self.deployment.device.id,
            "num_gpus": self.deployment.parallel.num_devices,
            "context_tokens": lm.context_tokens,
            "batch": self.batch,
            "ridge_point": lm.ridge_point,
            "compute_dtype": lm.compute_dtype,
            "arithmetic_intensity": self.arithmetic_intensity,
            "arithmetic_intensity_limit": lm.arithmetic_intensity_limit,
            "landmarks": {n: _json_number(getattr(lm, n)) for n in names} | {"b_slo": _json_number(self.b_slo)},
            "region": self.region,
            "regions": [{"name": name, "from": start, "to": stop} for name, start, stop in self.regions],
            "step_time_s": self.step_time_s.to_dict(),
            "time_per_output_token_amortized_s": self.time_per_output_token_amortized_s.to_dict(),
            "by_operator": [{"name": n, "floor_s": f, "expected_s": e} for n, f, e in self.by_operator],
            "bound_by": self.bound_by,
            "shares": self.shares,
            "prefill_share_s": self.prefill_share_s,
            "recommended_max_num_seqs": self.recommended_max_num_seqs.to_dict(),
            "recommended_max_num_batched_tokens": self.recommended_max_num_batched_tokens.to_dict(),
            "fits": self.fits,
            "formulas": [f.to_dict() for f in self.formulas],
            "notes": list(self.notes),
            "provenance": self.provenance,
        }


def explain(
    deployment: Deployment, workload_or_context: Workload | float, *, batch: float | None = None,
    slo: Slo | str | None = None,
) -> Sheet:  # fmt: skip
    """The physics sheet of `deployment` under a workload, or at one context length in tokens.

    batch   sequences of the whole replica to evaluate the step at; None: the recommended max_num_seqs
            (or 1 where nothing is recommended)
    slo     None: no limits were asked for; an empty one (preset "batch") asks for throughput
    A bare context has no prompts, so its steps carry no prefill. Raises SpecError for a batch below 1.
    """
    slo = as_slo(slo)
    workload = workload_or_context if isinstance(workload_or_context, Workload) else None
    if batch is not None and not (1 <= batch < float("inf")):
        raise SpecError(f"batch: must be at least 1, is {batch}")
    marks = landmarks_of(deployment, workload_or_context)
    budget = memory_budget(deployment)
    prefill = _PrefillShare.of(deployment, workload, marks.context_tokens)
    limit_s, notes = _tpot_limit_s(slo, prefill)
    if limit_s is not None and workload is None:
        notes.append("a bare context has no prompts: b_slo leaves their prefill out; give input and output lengths")

    def step_of(batches: Floats) -> Floats:
        expected = decode_curve(deployment, batches, marks.context_tokens).expected_s
        return np.asarray(expected + prefill.per_step_s(batches))

    b_slo = None if limit_s is None else largest_batch_within(step_of, limit_s)
    ranks = deployment.parallel.attention_dp
    sized = replace(slo, tpot_s=limit_s) if slo is not None and limit_s is not None else slo
    seqs = recommend_max_num_seqs(marks, b_slo, sized, attention_dp=ranks, fits=budget.fits, why_not=budget.reason)
    at = float(batch) if batch is not None else float((seqs.value or 1) * ranks)
    tokens = recommend_token_budget(
        lambda chunk: step_of(np.array([at])) + prefill.chunk_s(at, chunk),
        default=deployment.engine.max_num_batched_tokens, max_num_seqs=max(int(at / ranks), 1),
        b_gemm=marks.b_gemm / marks.sequences_per_rank, tpot_s=limit_s,
    )  # fmt: skip
    step = decode_step_time(deployment, at, marks.context_tokens)
    floor, expected = step.floor_s, step.expected_s
    share = float(prefill.per_step_s(np.array([at]))[0])
    intensity, weights = _intensity(deployment, marks, at)
    b_star = marks.b_star if marks.b_star is not None else math.inf
    b_mem = marks.b_mem if marks.b_mem is not None else math.inf
    spread = step_range(deployment, expected, floor, str(step.bound_by), in_flight=at)
    each = None if spread is None else replace(spread, low=spread.low / at, high=spread.high / at)
    return Sheet(
        deployment=deployment, landmarks=marks, b_slo=b_slo, batch=at, arithmetic_intensity=intensity,
        step_time_s=Pair(floor=floor, expected=expected, range=spread),
        time_per_output_token_amortized_s=Pair(floor=floor / at, expected=expected / at, range=each),
        by_operator=step.by_operator, bound_by=_bound(step, at, marks, budget.fits),
        shares={str(k): float(v) for k, v in step.shares.items()},
        region=str(formulas_of.region(at, b_star, b_mem)),
        regions=tuple((str(n), float(a), float(b) if math.isfinite(b) else None)
                      for n, a, b in formulas_of.regions(b_star, b_mem)),
        recommended_max_num_seqs=seqs, recommended_max_num_batched_tokens=tokens,
        prefill_share_s=share / at, fits=budget.fits,
        formulas=sheet_formulas(deployment, marks, batch=at, step=step, weight_bytes=weights, intensity=intensity,
                                b_slo=b_slo, tpot_s=limit_s, prefill_share_s=share / at, seqs=seqs),
        notes=(*notes, *step.notes, *(() if budget.fits else (f"does not fit: {budget.reason}",))),
        provenance=step.provenance,
    )  # fmt: skip


def slo_batch(
    deployment: Deployment, workload: Workload, slo: Slo, *, draws: RequestDraws | None = None
) -> float | None:
    """B_slo alone: the largest batch whose step, with its share of prefill, meets the TPOT limit; None: none."""
    prefill = _PrefillShare.of(deployment, workload, workload.mean_decode_context_tokens, draws)
    limit_s, _ = _tpot_limit_s(slo, prefill)
    if limit_s is None:
        return None
    context = workload.mean_decode_context_tokens

    def step_of(batches: Floats) -> Floats:
        return np.asarray(decode_curve(deployment, batches, context).expected_s + prefill.per_step_s(batches))

    return largest_batch_within(step_of, limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefillShare:
    """Prefill work as a decode step sees it; of a bare context (draws None) there is none."""

    replica: Replica
    draws: RequestDraws | None

    @classmethod
    def of(
        cls, deployment: Deployment, workload: Workload | None, context: float, draws: RequestDraws | None = None
    ) -> _PrefillShare:
        if draws is None and workload is not None:
            draws = request_draws(workload)
        replica = replica_of(
            deployment, draws or _one_request(context), context=context, room_sequences=math.inf, largest_batch=1
        )
        return cls(replica=replica, draws=draws)

    def chunk_s(self, batch: float, tokens: Floats) -> Floats:
        """Seconds that a prompt chunk of `tokens` on one data-parallel rank adds to a step of `batch` decodes."""
        replica = self.replica
        added = tokens * replica.marginal_prefill_s(np.array([batch]), tokens)
        return np.asarray(added + replica.pair_s * replica.attention_dp * tokens * (tokens + 1.0) / 2.0)

    def per_step_s(self, batch: Floats) -> Floats:
        """Prefill seconds in a step of `batch`: each sequence ends after D steps, and a new prompt takes its place."""
        if self.draws is None or self.draws.mean_decode_tokens <= 0:
            return np.zeros_like(batch)
        starts = batch / self.draws.mean_decode_tokens
        return np.asarray(starts * prefill_of_a_request_s(self.replica, self.draws, batch, starts))


def _one_request(context: float) -> RequestDraws:
    """A prompt of that length and one more token: what a bare context stands for."""
    length = fixed(max(int(context), 1))
    return request_draws(Workload(input_tokens=length, output_tokens=fixed(1)), count=1)


def _tpot_limit_s(slo: Slo | None, prefill: _PrefillShare) -> tuple[float | None, list[str]]:
    """The TPOT that the SLO asks for: its own limit, or what its E2E limit leaves to each output token."""
    if slo is None:
        return None, []
    if slo.e2e_s is None or prefill.draws is None or prefill.draws.mean_decode_tokens <= 0:
        return slo.tpot_s, []
    first = float(prefill.chunk_s(1.0, prefill.draws.new_tokens).mean() + prefill.replica.decode_step_s[0])
    left = max(slo.e2e_s - first, 1e-9) / prefill.draws.mean_decode_tokens
    if slo.tpot_s is not None and slo.tpot_s <= left:
        return slo.tpot_s, []
    return left, [f"the E2E limit leaves {left * 1e3:.3g} ms to each output token of a mean request; b_slo is for that"]


def _intensity(deployment: Deployment, marks: Landmarks, batch: float) -> tuple[float, float]:
    """AI(B) of a decode step, and the weight bytes per rank (all stages) that it streams."""
    compiled = compiled_step(deployment.model, deployment.parallel, deployment.kv_format, "all")
    per_rank = batch / marks.sequences_per_rank
    tokens = np.array([per_rank * deployment.parallel.attention_dp])
    weights = float(compiled.touched_weights(tokens).sum())
    intensity = formulas_of.arithmetic_intensity(
        per_rank, marks.parameters, weights, marks.kv_bytes_per_sequence, marks.attention_flops_per_sequence
    )
    return float(intensity), weights


def _bound(step: StepTime, batch: float, marks: Landmarks, fits: bool) -> str:
    """What limits a step of this batch: a wall that it is over, else the largest part of its time."""
    if not fits or (marks.b_mem is not None and batch > marks.b_mem):
        return "kv_capacity"
    return str(step.bound_by)


def _json_number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)

