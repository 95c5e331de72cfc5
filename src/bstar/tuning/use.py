"""What the physics says of a window: MBU and MFU, what a step is made of, where the batch lies between landmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bstar.latency.step_model import step_model
from bstar.physics.batch import BatchShape
from bstar.physics.landmarks import landmarks_of
from bstar.specs.deployment import Deployment
from bstar.tuning.evidence import Evidence

_DATASHEET: Final = "of the datasheet's bandwidth and peak"
_MEASURED: Final = "of the bandwidth and peak that were measured on this CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A mean step of a window.

    batch, context    sequences that decode, and their mean tokens
    step_s            measured; predicted_s: what the step model expects
    memory_s, compute_s   reading weights and cache once at full bandwidth, arithmetic at peak
    memory_fraction, compute_fraction, kv_fraction   shares of the step at the rates that kernels reach: what reads
                      (weights, cache), what computes, and of what reads the cache
    overhead_fraction what is left of the step: launches, collectives, the host
    mbu, mfu          memory_s / step_s, compute_s / step_s; above 1 the step is shorter than the device can do it
    basis             whose bandwidth and peak those are of
    """

    batch: float
    context: float
    prompt_tokens: float
    step_s: float
    predicted_s: float
    memory_s: float
    compute_s: float
    memory_fraction: float
    compute_fraction: float
    kv_fraction: float
    b_star: float | None
    basis: str = _DATASHEET

    @property
    def overhead_fraction(self) -> float:
        return max(1.0 - self.memory_fraction - self.compute_fraction, 0.0)

    @property
    def mbu(self) -> float:
        return self.memory_s / self.step_s

    @property
    def mfu(self) -> float:
        return self.compute_s / self.step_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "context_tokens": self.context, "prompt_tokens_per_step": self.prompt_tokens,
            "step_s": self.step_s, "predicted_step_s": self.predicted_s, "mbu": self.mbu, "mfu": self.mfu,
            "basis": self.basis, "b_star": self.b_star,
            "fractions": {"memory": self.memory_fraction, "kv": self.kv_fraction, "compute": self.compute_fraction,
                          "overhead": self.overhead_fraction},
        }  # fmt: skip


def use_of(seen: Evidence, deployment: Deployment, *, context: float | None = None) -> Use | None:
    """The mean step of a window of one replica of `deployment`; None where the server shows too little.

    context   mean tokens of a running sequence, where it is known better than from the server's histograms
    """
    step_s, batch = seen.step_s, _decoding(seen)
    if not step_s > 0 or not batch > 0:
        return None
    context = context if context is not None else _context(seen)
    if context is None:
        return None
    steps = seen.seen.steps
    prompt = seen.seen.count("prompt_tokens") - np.nan_to_num(seen.seen.counters.get("prefix_hit_tokens", 0.0))
    prompt = prompt / steps if steps > 0 and prompt > 0 else 0.0
    model = step_model(deployment)
    work = model.work_of(model.step.values(_shape(batch, context, prompt)))
    times = model.times(work)
    predicted = float(times.total_s)
    local = ~model.collective
    compute_bound = times.compute_bound & local
    reading = times.body * (~times.compute_bound & local)
    # Shares of the measured step: what the model expects of each kind, however long the rest takes.
    computing, memory = float(times.body[compute_bound].sum()), float(reading.sum())
    b_star = landmarks_of(deployment, max(context, 1.0)).b_star
    return Use(
        batch=batch, context=context, prompt_tokens=prompt, step_s=step_s, predicted_s=predicted,
        memory_s=float(work.light_memory.sum()), compute_s=float(work.light_compute.sum()),
        memory_fraction=min(memory / step_s, 1.0), compute_fraction=min(computing / step_s, 1.0),
        kv_fraction=min(float((reading * times.cache_share).sum()) / step_s, 1.0), b_star=b_star,
        basis=_MEASURED if deployment.device.vendor == "cpu" else _DATASHEET,
    )  # fmt: skip


def _shape(batch: float, context: float, prompt: float) -> BatchShape:
    shape = BatchShape.decode(batch, context)
    return shape if prompt < 1 else shape + BatchShape.prefill(prompt)


def _decoding(seen: Evidence) -> float:
    """Sequences that decode in a step: tokens made over steps while busy, else those that run."""
    steps, made = seen.seen.steps, seen.seen.count("generated_tokens")
    if steps > 0 and made > 0:
        return made / steps
    busy = seen.running[seen.running > 0]
    return float(busy.mean()) if busy.size else math.nan


def _context(seen: Evidence) -> float | None:
    """Mean tokens of a running sequence: prompt and half the answer of finished requests, else what the cache holds."""
    prompt, answer = seen.mean_of("input_tokens"), seen.mean_of("output_tokens")
    if not math.isnan(prompt):
        return prompt + (0.0 if math.isnan(answer) else answer / 2.0)
    used = seen.kv_usage * seen.kv_total_tokens
    busy = seen.running.size == used.size and seen.running > 0
    if not used.size or not np.any(busy) or math.isnan(seen.kv_total_tokens):
        return None
    # A sequence's last block is half empty on average.
    return max(float(np.mean(used[busy] / seen.running[busy])) - seen.block_tokens / 2.0, 1.0)
