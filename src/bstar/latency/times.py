"""Seconds of a step, a decode step, a decode curve and a prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.latency.step_model import BOUNDS, Bound, FloatArray, StepModel, step_model
from bstar.physics.batch import BatchShape
from bstar.specs.deployment import Deployment
from bstar.specs.device import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step.

    floor_s       the speed of light: no engine is faster
    expected_s    what an engine is expected to take
    by_operator   (name, floor_s, expected_s); "engine" is the overhead beside the kernels
    bound_by      what most of the expected time goes to; `shares` has the fractions
    notes         dtypes that the device computes in another dtype
    """

    floor_s: float
    expected_s: float
    by_operator: tuple[tuple[str, float, float], ...]
    bound_by: Bound
    shares: Mapping[Bound, float]
    notes: tuple[str, ...] = ()
    provenance: Provenance = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Step time against batch; arrays of equal length. amortized = step / batch (1 / output throughput)."""

    batch: FloatArray
    floor_s: FloatArray
    expected_s: FloatArray
    bound_index: NDArray[np.int64]

    @property
    def amortized_floor_s(self) -> FloatArray:
        return self.floor_s / self.batch

    @property
    def amortized_expected_s(self) -> FloatArray:
        return self.expected_s / self.batch

    @property
    def bound_by(self) -> tuple[Bound, ...]:
        return tuple(BOUNDS[i] for i in self.bound_index)


def step_time(deployment: Deployment, shape: BatchShape) -> StepTime:
    """Time of one step whose batch passes every pipeline stage in sequence.

    shape   the batch of the whole replica (all attention-data-parallel ranks)
    """
    model = step_model(deployment)
    return _from_values(model, model.step.values(shape))


def decode_step_time(deployment: Deployment, batch: float, context: float) -> StepTime:
    """Time between two tokens of a sequence when `batch` sequences of `context` tokens are being decoded.

    batch   sequences of one replica, over all attention-data-parallel ranks and pipeline stages: with pp
            stages, batch/pp of them are in each stage at a time, a token passes the stages in sequence,
            and the replica makes batch tokens in that time. Fractions are means.
    """
    _check(batch, context)
    model = step_model(deployment)
    return _from_values(model, model.decode_values(context) * float(model.microbatch(batch)))


def decode_curve(deployment: Deployment, batches: NDArray[np.float64], context: float) -> Curve:
    """`decode_step_time` of many batches at once (floor, expected and what bounds each)."""
    batch = np.atleast_1d(np.asarray(batches, dtype=float))
    _check(float(batch.min(initial=1.0)), context)
    model = step_model(deployment)
    values = model.decode_values(context)[:, None] * model.microbatch(batch)[None, :]
    fixed, compute, memory, kv_share = model.parts(values)
    body = model.smooth(compute, memory)
    engine = model.overhead_s(values)
    expected = (fixed + body).sum(axis=0) + engine
    totals = _by_bound(model, fixed, body, compute > memory, kv_share, engine)
    return Curve(batch=batch, floor_s=model.floor_s(values).sum(axis=0), expected_s=expected,
                 bound_index=totals.argmax(axis=0))


def prefill_time(deployment: Deployment, prompt_tokens: float, cached_tokens: float = 0) -> StepTime:
    """Time to prefill one prompt alone, in chunks of the engine's token budget.

    cached_tokens   of a prefix that is already in the cache; prompt_tokens come on top of them
    """
    _check(1.0, prompt_tokens)
    budget = float(deployment.engine.max_num_batched_tokens)
    if not deployment.engine.enable_chunked_prefill:
        budget = max(budget, float(prompt_tokens))
    steps: list[StepTime] = []
    done = 0.0
    while done < prompt_tokens:
        new = min(budget, prompt_tokens - done)
        steps.append(step_time(deployment, BatchShape.prefill(new, cached_tokens + done)))
        done += new
    return steps[0] if len(steps) == 1 else _added(steps)


def _check(batch: float, context: float) -> None:
    if not batch > 0:
        raise SpecError(f"batch: must be positive, is {batch}")
    if not context >= 0:
        raise SpecError(f"context: must not be negative, is {context}")


def _by_bound(
    model: StepModel, fixed: FloatArray, body: FloatArray, compute_bound: NDArray[np.bool_], kv_share: FloatArray,
    engine: FloatArray,
) -> FloatArray:
    """Seconds by bound, in the order of BOUNDS."""
    link = model.collective if body.ndim == 1 else model.collective[:, None]
    on_memory = np.where(compute_bound | link, 0.0, body)
    kv = (on_memory * kv_share).sum(axis=0)
    return np.array([
        on_memory.sum(axis=0) - kv,
        kv,
        np.where(compute_bound & ~link, body, 0.0).sum(axis=0),
        np.where(link, fixed + body, 0.0).sum(axis=0),
        np.where(link, 0.0, fixed).sum(axis=0) + engine,
    ])  # fmt: skip


def _from_values(model: StepModel, values: FloatArray) -> StepTime:
    floor = model.floor_s(values)
    fixed, compute, memory, kv_share = model.parts(values)
    body = model.smooth(compute, memory)
    engine = float(model.overhead_s(values))
    times = fixed + body
    expected = float(times.sum()) + engine
    totals = _by_bound(model, fixed, body, compute > memory, kv_share, np.asarray(engine))
    named_floor, named = model.name_matrix @ floor, model.name_matrix @ times
    rows = [(n, float(f), float(t)) for n, f, t in zip(model.names, named_floor, named, strict=True)]
    return StepTime(
        floor_s=float(floor.sum()), expected_s=expected, by_operator=(*rows, ("engine", 0.0, engine)),
        bound_by=BOUNDS[int(totals.argmax())],
        shares=MappingProxyType({b: float(t / expected) for b, t in zip(BOUNDS, totals, strict=True)}),
        notes=model.notes, provenance=model.provenance,
    )  # fmt: skip


def _added(steps: list[StepTime]) -> StepTime:
    """Steps one after another as one time."""
    expected = sum(s.expected_s for s in steps)
    shares = {b: sum(s.shares[b] * s.expected_s for s in steps) / expected for b in BOUNDS}
    names = [row[0] for row in steps[0].by_operator]
    rows = tuple(
        (name, sum(s.by_operator[i][1] for s in steps), sum(s.by_operator[i][2] for s in steps))
        for i, name in enumerate(names)
    )
    return StepTime(
        floor_s=sum(s.floor_s for s in steps), expected_s=expected, by_operator=rows,
        bound_by=max(shares, key=lambda b: shares[b]), shares=MappingProxyType(shares), notes=steps[0].notes,
        provenance=steps[0].provenance,
    )  # fmt: skip
