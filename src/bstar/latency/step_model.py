"""From the work of a step to seconds: the floor and the expected time, for one deployment.

    floor       Σ operators max(FLOPs / peak, (weights + cache read) / bandwidth)
    expected    Σ operators launches·t0·g + ((FLOPs / e_c·peak)^p + (bytes / e_m·bandwidth)^p)^(1/p)
                (decode attention: activations / e_m·bandwidth + max of the two over the cache: affine in context)
                + Σ collectives launches·latency + bytes / e·link + engine overhead per step and per sequence

The floor leaves activations and collectives out: what stays on chip or overlaps could cost nothing, so no
engine beats it. Operators are one after another because the kernels of a step are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from bstar.latency.constants import Constants, constants_for
from bstar.latency.frame import frame_for
from bstar.physics.operators import CompiledStep
from bstar.physics.statistics import count
from bstar.specs.deployment import Deployment
from bstar.specs.device import Provenance

FloatArray = NDArray[np.float64]
Bound = Literal["weight_bandwidth", "kv_bandwidth", "compute", "communication", "overhead"]
BOUNDS: Final[tuple[Bound, ...]] = ("weight_bandwidth", "kv_bandwidth", "compute", "communication", "overhead")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWork:
    """Seconds that each resource needs, per operator, of one step (or of m steps: a last axis more).

    compute, activations, cache, weights   at the rates that the kernels reach (collectives: activations = link)
    light_compute, light_memory            at peak and full bandwidth: weights and cache alone
    fixed                                  launches and latencies
    """

    compute: FloatArray
    activations: FloatArray
    cache: FloatArray
    weights: FloatArray
    light_compute: FloatArray
    light_memory: FloatArray
    fixed: FloatArray
    sequences: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTimes:
    """Expected seconds per operator: fixed + body; `engine` beside them."""

    fixed: FloatArray
    body: FloatArray
    compute_bound: NDArray[np.bool_]
    cache_share: FloatArray
    engine: FloatArray

    @property
    def total_s(self) -> FloatArray:
        """Seconds of whole steps."""
        result: FloatArray = self.fixed.sum(axis=0) + self.body.sum(axis=0) + self.engine
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepModel:
    """Everything about a deployment that a step's time needs, one entry per operator.

    rates      (5, operators, statistics): seconds per unit of each statistic of compute, activations, cache (at the
               kernels' rates), compute and cache (at light speed); one product gives a step's resources
    weights_s, light_weights_s   reading all weights; `routed` entries are scaled by the touched share of experts
    """

    step: CompiledStep
    rates: FloatArray
    weights_s: FloatArray
    light_weights_s: FloatArray
    fixed_s: FloatArray
    collective: NDArray[np.bool_]
    streaming: NDArray[np.int64]
    rounded: NDArray[np.int64]
    routed: NDArray[np.int64]
    miss: FloatArray
    row_index: NDArray[np.int64]
    smoothing: float
    constants: Constants
    layers_s: float
    per_step_s: float
    per_sequence_s: float
    pipeline_stages: int
    names: tuple[str, ...]
    name_matrix: FloatArray
    sequences_index: int
    notes: tuple[str, ...]
    provenance: Provenance

    def microbatch(self, batch: FloatArray | float) -> FloatArray:
        """Sequences that one pipeline stage holds at a time when `batch` are in flight."""
        b = np.asarray(batch, dtype=float)
        result: FloatArray = np.maximum(b / self.pipeline_stages, np.minimum(b, 1.0))
        return result

    def work_of(self, values: FloatArray) -> StepWork:
        """The work of steps with these statistics, (statistics,) or (statistics, m)."""
        n = len(self.weights_s)
        parts = (self.rates.reshape(5 * n, -1) @ values).reshape(5, n, *values.shape[1:])
        tokens = values[self.step.expert_tokens_index]
        return self._with_weights(parts, values[self.row_index] > 0, tokens, values[self.sequences_index])

    def decode_work(self, context: float, sequences: FloatArray | float) -> StepWork:
        """The work of decode steps with `sequences` (a number or (m,)) in each stage: linear but for the experts."""
        one = self.step.decode_values(context)
        n = len(self.weights_s)
        parts = (self.rates.reshape(5 * n, -1) @ one).reshape(5, n)
        active = one[self.row_index] > 0
        many = np.ndim(sequences) > 0
        scaled = np.multiply.outer(parts, sequences) if many else parts * sequences
        return self._with_weights(
            scaled, active[:, None] if many else active, sequences * one[self.step.expert_tokens_index],
            sequences * one[self.sequences_index],
        )  # fmt: skip

    def _with_weights(
        self, parts: FloatArray, active: NDArray[np.bool_], expert_tokens: FloatArray, sequences: FloatArray
    ) -> StepWork:
        one = parts.ndim == 2
        touched: FloatArray = active.astype(float)
        if self.routed.size:
            touched = np.broadcast_to(touched, parts.shape[1:]).copy()
            miss = self.miss if one else self.miss[:, None]
            touched[self.routed] *= 1.0 - miss**expert_tokens
        return StepWork(
            compute=parts[0], activations=parts[1], cache=parts[2],
            weights=_column(self.weights_s, one) * touched, light_compute=parts[3],
            light_memory=parts[4] + _column(self.light_weights_s, one) * touched,
            fixed=_column(self.fixed_s, one) * active, sequences=sequences,
        )  # fmt: skip

    def floor_s(self, work: StepWork) -> FloatArray:
        """Floor per operator: nothing but arithmetic at peak and weights and cache at full bandwidth."""
        result: FloatArray = np.maximum(work.light_compute, work.light_memory)
        return result

    def times(self, work: StepWork) -> OperatorTimes:
        """Expected seconds per operator, in parts."""
        memory = work.weights + work.activations + work.cache
        body = memory.copy()
        rows = self.rounded
        body[rows] = _smooth_max(work.compute[rows], memory[rows], self.smoothing)
        # Decode attention streams the cache: every key costs the greater of its bytes and its arithmetic, so the
        # step stays affine in the context (the simulator sums many steps in closed form).
        rows = self.streaming
        body[rows] += np.maximum(work.compute[rows] - work.cache[rows], 0.0)
        return OperatorTimes(
            fixed=work.fixed, body=body, compute_bound=work.compute > memory,
            cache_share=work.cache / np.maximum(memory, 1e-30),
            engine=self.per_step_s * self.pipeline_stages + self.layers_s + self.per_sequence_s * work.sequences,
        )  # fmt: skip

    def expected_s(self, values: FloatArray) -> FloatArray:
        """Expected seconds of whole steps; `values` are their statistics, (statistics,) or (statistics, m)."""
        return self.times(self.work_of(values)).total_s


def _smooth_max(a: FloatArray, b: FloatArray, power: float) -> FloatArray:
    """(a^p + b^p)^(1/p): a max with a round corner, both resources are busy near the ridge."""
    if power == 3.0:
        cubes: FloatArray = np.cbrt(a * a * a + b * b * b)
        return cubes
    result: FloatArray = (a**power + b**power) ** (1.0 / power)
    return result


def _column(vector: FloatArray, one: bool) -> FloatArray:
    """`vector` as a column where there are many steps at once."""
    return vector if one else vector[:, None]


_CACHE: OrderedDict[tuple[int, int], tuple[Deployment, Constants, StepModel]] = OrderedDict()
_CACHE_SIZE: Final = 256


def step_model(deployment: Deployment, constants: Constants | None = None) -> StepModel:
    """The step model of `deployment` (with its own constants, or others), kept by identity: a look-up hashes nothing.

    Raises SpecError for an engine or a link that is not known.
    """
    if constants is None:
        constants = constants_for(deployment)
    key = id(deployment), id(constants)
    found = _CACHE.get(key)
    if found is not None and found[0] is deployment and found[1] is constants:
        return found[2]
    model = build_step_model(deployment, constants)
    _CACHE[key] = (deployment, constants, model)
    if len(_CACHE) > _CACHE_SIZE:
        _CACHE.popitem(last=False)
    return model


def build_step_model(deployment: Deployment, constants: Constants) -> StepModel:
    """A step model that nothing keeps (a fit builds thousands)."""
    frame = frame_for(deployment)
    step, c = frame.step, np.append(constants.array(frame.constants), 1.0)
    compute = np.minimum(c[frame.compute] * c[frame.scale_compute], 1.0)
    memory = np.minimum(c[frame.memory] * c[frame.scale_memory], 1.0)
    launch = 1.0 if deployment.engine.enforce_eager else constants["graph_fraction"]
    effective = frame.bandwidth * memory
    collective = frame.collective[:, None]
    moved = step.reads + np.where(collective, 0.0, step.writes)
    share, bus = frame.host_share, frame.bus_s_per_byte
    routed = np.flatnonzero(step.routed)
    return StepModel(
        step=step, collective=frame.collective, smoothing=constants["smoothing"], names=frame.names, notes=frame.notes,
        constants=constants, fixed_s=step.launches * c[frame.fixed] * np.where(frame.launch_share, launch, 1.0),
        rates=np.stack([
            step.flops / (frame.peak * compute)[:, None], moved / effective[:, None],
            step.kv_reads / effective[:, None], step.flops / frame.peak[:, None],
            np.where(collective, 0.0, step.kv_reads / frame.bandwidth[:, None]),
        ]),
        weights_s=step.weight_bytes * ((1 - share) / effective + share * bus / constants["host_bus.bandwidth"]),
        light_weights_s=step.weight_bytes * ((1 - share) / frame.bandwidth + share * bus),
        streaming=np.flatnonzero([w.kind == "attention_decode" for w in step.works]),
        rounded=np.flatnonzero([bool(w.flops) and w.kind != "attention_decode" for w in step.works]),
        routed=routed, miss=step.miss_base[routed], row_index=step.rows.argmax(axis=1),
        layers_s=frame.layers * constants["layer_s"] + frame.moe_layers * constants["moe_layer_s"],
        per_step_s=constants["step_s"], per_sequence_s=constants["sequence_s"],
        pipeline_stages=deployment.parallel.pp, name_matrix=frame.name_matrix,
        sequences_index=step.statistics.index(count("sequences")), provenance=constants.provenance,
    )  # fmt: skip
