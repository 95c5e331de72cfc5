"""Seconds of a step, a decode step, a decode curve and a prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.latency.step_model import BOUNDS, Bound, FloatArray, OperatorTimes, StepModel, step_model
from bstar.physics.batch import BatchShape
from bstar.specs.deployment import Deployment
from bstar.specs.device import Provenance

# Batches evaluated together: operators × block tables stay in the processor's cache.
_CURVE_BLOCK: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDetail:
    """What a step's time is made of, per operator; worked out when asked for.

    values   its statistics
    """

    model: StepModel
    values: FloatArray

    @property
    def floor(self) -> FloatArray:
        """Floor of each operator, seconds."""
        return self.model.floor_s(self.model.work_of(self.values))

    @property
    def times(self) -> OperatorTimes:
        """Expected seconds of each operator, in parts."""
        return self.model.times(self.model.work_of(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step (or of several one after another).

    floor_s       the speed of light: no engine is faster
    expected_s    what an engine is expected to take
    details       what both are made of, a step each; the properties below read it
    """

    floor_s: float
    expected_s: float
    details: tuple[StepDetail, ...] = field(repr=False)

    @property
    def by_operator(self) -> tuple[tuple[str, float, float], ...]:
        """(name, floor_s, expected_s); "engine" is the overhead beside the kernels."""
        matrix, names = self.details[0].model.name_matrix, self.details[0].model.names
        floor = np.sum([matrix @ d.floor for d in self.details], axis=0)
        times = [d.times for d in self.details]
        expected = np.sum([matrix @ (t.fixed + t.body) for t in times], axis=0)
        engine = sum(float(t.engine) for t in times)
        rows = zip(names, floor.tolist(), expected.tolist(), strict=True)
        return (*rows, ("engine", 0.0, engine))

    @property
    def shares(self) -> Mapping[Bound, float]:
        """Fractions of the expected time by what bounds it."""
        seconds = np.sum([_by_bound(d.model, d.times) for d in self.details], axis=0)
        return MappingProxyType(dict(zip(BOUNDS, (seconds / self.expected_s).tolist(), strict=True)))

    @property
    def bound_by(self) -> Bound:
        """What most of the expected time goes to."""
        return BOUNDS[int(np.sum([_by_bound(d.model, d.times) for d in self.details], axis=0).argmax())]

    @property
    def notes(self) -> tuple[str, ...]:
        """Dtypes that the device computes in another dtype."""
        return self.details[0].model.notes

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance of the constants used."""
        return self.details[0].model.provenance


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
    return _step_time(model, model.step.values(shape))


def step_times_s(deployment: Deployment, shapes: Sequence[BatchShape]) -> tuple[FloatArray, FloatArray]:
    """(floor, expected) seconds of many steps at once, each array as long as `shapes`."""
    model = step_model(deployment)
    work = model.work_of(np.stack([model.step.values(shape) for shape in shapes], axis=1))
    times = model.times(work)
    return model.floor_s(work).sum(axis=0), times.total_s


def decode_step_time(deployment: Deployment, batch: float, context: float) -> StepTime:
    """Time between two tokens of a sequence when `batch` sequences of `context` tokens are being decoded.

    batch   sequences of one replica, over all attention-data-parallel ranks and pipeline stages: with pp
            stages, batch/pp of them are in each stage at a time, a token passes the stages in sequence,
            and the replica makes batch tokens in that time. Fractions are means.
    """
    _check(batch, context)
    model = step_model(deployment)
    return _step_time(model, model.step.decode_values(context) * model.stage_batch(batch))


def decode_curve(deployment: Deployment, batches: NDArray[np.float64], context: float) -> Curve:
    """`decode_step_time` of many batches at once (floor, expected and what bounds each)."""
    batch = np.atleast_1d(np.asarray(batches, dtype=float))
    _check(float(batch.min(initial=1.0)), context)
    model = step_model(deployment)
    curve = Curve(batch=batch, floor_s=np.empty(batch.size), expected_s=np.empty(batch.size),
                  bound_index=np.empty(batch.size, dtype=np.int64))
    for start in range(0, batch.size, _CURVE_BLOCK):
        part = slice(start, start + _CURVE_BLOCK)
        work = model.decode_work(context, model.microbatch(batch[part]))
        times = model.times(work)
        curve.floor_s[part] = model.floor_s(work).sum(axis=0)
        curve.expected_s[part] = times.total_s
        curve.bound_index[part] = _by_bound(model, times).argmax(axis=0)
    return curve


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
    return StepTime(
        floor_s=sum(s.floor_s for s in steps), expected_s=sum(s.expected_s for s in steps),
        details=tuple(d for s in steps for d in s.details),
    )  # fmt: skip


def _check(batch: float, context: float) -> None:
    if not batch > 0:
        raise SpecError(f"batch: must be positive, is {batch}")
    if not context >= 0:
        raise SpecError(f"context: must not be negative, is {context}")


def _by_bound(model: StepModel, times: OperatorTimes) -> FloatArray:
    """Seconds by bound, in the order of BOUNDS."""
    local, on_compute = (~model.collective).astype(float), times.compute_bound
    body = times.body * (local if times.body.ndim == 1 else local[:, None])
    on_memory = np.where(on_compute, 0.0, body)
    kv = np.einsum("i...,i...->...", on_memory, times.cache_share)
    everything, fixed = times.body.sum(axis=0), times.fixed.sum(axis=0)
    local_body, local_fixed, memory = body.sum(axis=0), local @ times.fixed, on_memory.sum(axis=0)
    return np.array([
        memory - kv,
        kv,
        local_body - memory,
        everything - local_body + fixed - local_fixed,
        local_fixed + times.engine,
    ])  # fmt: skip


def _step_time(model: StepModel, values: FloatArray) -> StepTime:
    expected_s, floor_s = model.scalar.seconds(values)
    return StepTime(floor_s=floor_s, expected_s=expected_s, details=(StepDetail(model=model, values=values),))
