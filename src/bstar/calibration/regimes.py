"""What held an engine back while it served a load: read off the simulation's step log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bstar.calibration.point import Point
from bstar.latency import decode_step_time
from bstar.sim.deployed import DeployedEngine
from bstar.sim.steps import StepLog
from bstar.specs.deployment import Deployment

# A load queues where on average this share of its clients has no place in the engine.
_QUEUED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Where an engine stood.

    bound_by           what most of the time of a decode step goes to; or what keeps clients waiting
                       ("kv_capacity", "max_num_seqs", "queueing")
    batch              mean sequences per decode step of a whole replica
    prefill_fraction   share of the busy time in steps that hold prompt tokens
    waiting_fraction   mean share of the clients that wait for a place
    kv_usage_fraction  the most of the KV cache that was in use
    floor_s            a decode step at that batch at the speed of light
    The rest is None where no step log was kept.
    """

    bound_by: str
    batch: float
    floor_s: float
    prefill_fraction: float | None = None
    waiting_fraction: float | None = None
    kv_usage_fraction: float | None = None
    preemptions: int | None = None


def digits(value: float) -> float:
    """Ten of them: sums of arrays differ in the last ones with where the arrays lie in memory."""
    return float(f"{value:.10g}")


def decode_regime(deployment: Deployment, batch: float, context: float) -> Regime:
    """The regime of decode steps of a replica's `batch` at `context` tokens, without what a simulation adds."""
    batch = digits(max(batch, 1.0))
    step = decode_step_time(deployment, batch, max(context, 1.0))
    return Regime(bound_by=step.bound_by, batch=batch, floor_s=digits(step.floor_s))


def regime_of(
    deployed: DeployedEngine, logs: Sequence[StepLog], weights: Sequence[int], point: Point, *, ranks: int = 1
) -> Regime:
    """The regime of the engine with the most clients (the others are alike).

    ranks   of data-parallel attention whose sequences are in one log
    """
    log = logs[int(np.argmax(weights))]
    seconds = log.duration_s
    busy = float(seconds.sum()) or 1.0
    decodes = np.where(log.prompt_tokens > 0, 0, log.sequences)
    spent = float(seconds[log.prompt_tokens == 0].sum())
    batch = float(decodes @ seconds) / spent if spent > 0 else float(log.sequences @ seconds) / busy
    batch = max(batch, 1.0) * deployed.deployment.parallel.attention_dp / ranks
    context = point.input_tokens + point.output_tokens / 2.0
    decode = decode_regime(deployed.deployment, batch, context)
    running = float(log.running @ seconds) / busy
    waiting = float(log.waiting @ seconds) / busy
    queued = waiting / max(running + waiting, 1.0)
    usage = log.max_kv_usage()
    return replace(
        decode, bound_by=_queue(deployed, queued, usage, running, ranks) or decode.bound_by,
        prefill_fraction=digits(float(seconds[log.prompt_tokens > 0].sum()) / busy), waiting_fraction=digits(queued),
        kv_usage_fraction=digits(usage), preemptions=int(log.preempted.sum()),
    )  # fmt: skip


def _queue(deployed: DeployedEngine, queued: float, usage: float, running: float, ranks: int) -> str | None:
    """What keeps clients waiting; None: few do."""
    if queued < _QUEUED:
        return None
    if usage > 0.9:
        return "kv_capacity"
    return "max_num_seqs" if running > 0.9 * ranks * deployed.settings.seat_limit else "queueing"
