"""What a plan says: candidates best first, what was rejected and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.calibration.intervals import Range
from bstar.calibration.ranges import with_ranges
from bstar.planning.cost import Cost
from bstar.planning.space import Layout
from bstar.specs.deployment import Deployment
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """mean, p50, p95, p99 over requests, in seconds; None where no request has the metric."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Floats) -> Percentiles:
        """Of an array; nan entries (a request of one token has no TPOT) do not count."""
        known = values[~np.isnan(values)]
        if known.size == 0:
            return cls(mean=None, p50=None, p95=None, p99=None)
        if not np.isfinite(known).all():  # some wait without end: percentiles between them and others are theirs
            p50, p95, p99 = np.quantile(known, (0.5, 0.95, 0.99), method="higher")
        else:
            p50, p95, p99 = np.quantile(known, (0.5, 0.95, 0.99))
        return cls(mean=float(known.mean()), p50=float(p50), p95=float(p95), p99=float(p99))

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "p50": self.p50, "p95": self.p95, "p99": self.p99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the users of a candidate experience, by the closed forms of `planning.outcomes`.

    in_flight         mean requests that one replica has: queueing, in prefill or decoding (rate · mean E2E)
    decoding          of them decoding, the batch of a mean step
    step_s            mean step of a replica, prefill included
    prefill_fraction  share of a replica's time that prefill takes
    queued_fraction   share of requests that find every place taken
    kv_usage_fraction share of the KV space that sequences in flight hold, in the mean
    preemption_risk_fraction  share of busy moments (p99 of those in flight) in which they outgrow the KV space
    ranges            of the means of ttft_s, tpot_s and e2e_s: where held-out rows say that they lie
    """

    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    in_flight: float
    decoding: float
    step_s: float
    prefill_fraction: float
    queued_fraction: float
    kv_usage_fraction: float
    preemption_risk_fraction: float
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return with_ranges({
            "ttft_s": self.ttft_s.to_dict(), "tpot_s": self.tpot_s.to_dict(), "e2e_s": self.e2e_s.to_dict(),
            "in_flight_per_replica": self.in_flight, "decoding_per_replica": self.decoding, "step_s": self.step_s,
            "prefill_fraction": self.prefill_fraction, "queued_fraction": self.queued_fraction,
            "kv_usage_fraction": self.kv_usage_fraction, "preemption_risk_fraction": self.preemption_risk_fraction,
        }, self.ranges)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What the users of one replica experience at its share of the load, request by request (`bstar.simulate`).

    slo_attainment_fraction   with `attainment_low` and `attainment_high`, its 95 % interval
    num_requests              that were measured, warm-up apart; num_preemptions are of the whole run
    requests_per_s            that the replica answered
    ranges                    of the means, as in `Predicted`
    closed_form_replicas, closed_form_capacity_requests_per_s   what closed forms had said
    """

    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    slo_attainment_fraction: float
    attainment_low: float | None
    attainment_high: float | None
    num_requests: int
    num_preemptions: int
    requests_per_s: float
    closed_form_replicas: int
    closed_form_capacity_requests_per_s: float
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return with_ranges({
            "ttft_s": self.ttft_s.to_dict(), "tpot_s": self.tpot_s.to_dict(), "e2e_s": self.e2e_s.to_dict(),
            "slo_attainment_fraction": self.slo_attainment_fraction,
            "slo_attainment_interval": [self.attainment_low, self.attainment_high],
            "num_requests": self.num_requests, "num_preemptions": self.num_preemptions,
            "requests_per_s": self.requests_per_s,
            "closed_forms": {"replicas": self.closed_form_replicas,
                             "capacity_requests_per_s": self.closed_form_capacity_requests_per_s},
        }, self.ranges)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One answer: `replicas` of `deployment`.

    capacity_requests_per_s   what all replicas together carry inside the SLO (closed loop: at that many clients)
    headroom_fraction         capacity / load − 1
    pareto                    no other candidate is both cheaper and faster (p95 E2E)
    simulated                 None: closed forms only. Else replicas, capacity, attainment and goodput are from there
    """

    deployment: Deployment
    layout: Layout
    replicas: int
    memory: dict[str, Any]
    landmarks: dict[str, float | None]
    predicted: Predicted
    requests_per_s: float
    output_tokens_per_s: float
    goodput_requests_per_s: float
    slo_attainment_fraction: float
    capacity_requests_per_s: float
    headroom_fraction: float
    cost: Cost
    bound_by: str
    launch_command: str
    clients_per_replica: float | None = None
    pareto: bool = False
    notes: tuple[str, ...] = ()
    mode: str = "aggregated"
    simulated: Simulated | None = None

    @property
    def expected(self) -> Predicted | Simulated:
        """The latencies to trust: those of the simulation where there is one."""
        return self.predicted if self.simulated is None else self.simulated

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.layout.num_gpus

    def to_dict(self) -> dict[str, Any]:
        engine = self.deployment.engine
        return {
            "deployment": {
                "gpu": self.deployment.device.id, "num_gpus": self.num_gpus, "replicas": self.replicas,
                "gpus_per_replica": self.layout.num_gpus, "tp": self.layout.tp, "pp": self.layout.pp,
                "dp": self.layout.attention_dp, "attention_dp": self.layout.attention_dp, "ep": self.layout.ep,
                "weight_dtype": self.deployment.model.weight_dtype, "kv_dtype": self.deployment.kv_format.name,
                "max_num_seqs": engine.max_num_seqs, "max_num_batched_tokens": engine.max_num_batched_tokens,
                "max_model_len": engine.max_model_len, "gpu_memory_utilization": engine.gpu_memory_utilization,
                "engine": engine.name, "engine_version": engine.version, "mode": self.mode,
            },
            "memory": self.memory,
            "landmarks": self.landmarks,
            "predicted": self.predicted.to_dict(),
            "simulated": None if self.simulated is None else self.simulated.to_dict(),
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests_per_s": self.requests_per_s,
            "goodput_requests_per_s": self.goodput_requests_per_s,
            "slo_attainment_fraction": self.slo_attainment_fraction,
            "capacity_requests_per_s": self.capacity_requests_per_s,
            "headroom_fraction": self.headroom_fraction,
            "clients_per_replica": self.clients_per_replica,
            "cost": self.cost.to_dict(),
            "bound_by": self.bound_by,
            "launch_command": self.launch_command,
            "pareto": self.pareto,
            "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout that is no answer, and the one reason that decided it."""

    gpu: str
    layout: Layout
    weight_dtype: str
    kv_dtype: str
    reason: str
    kind: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu, "num_gpus": self.layout.num_gpus, "tp": self.layout.tp, "pp": self.layout.pp,
            "attention_dp": self.layout.attention_dp, "ep": self.layout.ep, "weight_dtype": self.weight_dtype,
            "kv_dtype": self.kv_dtype, "kind": self.kind, "reason": self.reason,
        }  # fmt: skip


# Kinds of reasons and what they say of a layout, those that ask for the least change first.
_KINDS = {
    "context": "lengths beyond the model's context", "slo": "SLO out of reach", "cost": "far more than the best",
    "max_gpus": "more GPUs than allowed", "memory": "no room in the memory", "layout": "refused by the engine",
    "dtype": "dtype without a peak",
}  # fmt: skip


def _nearest(one: Rejected) -> tuple[int, int, int]:
    """Sorts rejections by how little would have to change."""
    kinds = list(_KINDS)
    rank = kinds.index(one.kind) if one.kind in kinds else len(kinds)
    return rank, one.layout.pp, -one.layout.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Candidates best first. `feasible` is False where there is none: then `rejected` says why."""

    model: str
    workload: Workload
    slo: Slo
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    max_model_len: int
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        return bool(self.candidates)

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def reasons(self) -> tuple[str, ...]:
        """Why nothing is feasible: each distinct reason once, the ones that ask for the least change first."""
        return tuple(dict.fromkeys(f"{r.gpu} {r.layout}: {r.reason}" for r in sorted(self.rejected, key=_nearest)))

    def rejected_summary(self) -> tuple[str, ...]:
        """What was rejected, one line per kind of reason with a count and the example nearest to an answer."""
        found: dict[str, list[Rejected]] = {}
        for one in sorted(self.rejected, key=_nearest):
            found.setdefault(one.kind, []).append(one)
        lines = []
        for kind, group in found.items():
            count = "1 layout" if len(group) == 1 else f"{len(group)} layouts"
            first = group[0]
            lines.append(f"{count}: {_KINDS.get(kind, kind)}, e.g. {first.gpu} {first.layout}: {first.reason}")
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `bstar plan`."""
        load = self.workload
        return {
            "model": self.model,
            "feasible": self.feasible,
            "workload": {
                "name": load.name, "mean_input_tokens": load.input_tokens.mean,
                "mean_output_tokens": load.output_tokens.mean, "rate_per_s": load.rate_per_s,
                "concurrency": load.concurrency, "burstiness": load.burstiness,
                "mean_decode_context_tokens": load.mean_decode_context_tokens,
            },
            "slo": {
                "ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s, "e2e_s": self.slo.e2e_s,
                "attainment_fraction": self.slo.attainment_fraction, "name": self.slo.name,
            },
            "max_model_len": self.max_model_len,
            "candidates": [c.to_dict() for c in self.candidates],
            "rejected": [r.to_dict() for r in self.rejected],
            "notes": list(self.notes),
        }  # fmt: skip
