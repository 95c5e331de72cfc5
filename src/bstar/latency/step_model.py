"""From the work of a step to seconds: the floor and the expected time, for one deployment.

    floor       Σ operators max(FLOPs / peak, (weights + cache read) / bandwidth)
    expected    Σ operators launches·t0·g + ((FLOPs of padded rows / e_c·peak)^p + (bytes / e_m·bandwidth)^p)^(1/p)
                (decode attention: activations / e_m·bandwidth + max of the two over the cache: affine in context)
                + Σ collectives launches·latency + bytes / e·link + gaps of every layer
                where the step is not replayed from a CUDA graph: smooth max of that (but for decode attention's reading
                of the cache) with the time that launching its kernels from the host takes
                + engine overhead per step and per sequence

A decode step that is replayed is padded to a captured batch. Routed experts are those of the busiest rank
(`bstar.latency.experts`).
The floor leaves activations and collectives out: what stays on chip or overlaps could cost nothing, so no
engine beats it. Operators are one after another because the kernels of a step are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from bstar.latency.constants import Constants, constants_for
from bstar.latency.experts import ExpertLoad
from bstar.latency.frame import PLACES, frame_for
from bstar.latency.graphs import GraphUse
from bstar.latency.scalar import ScalarSteps
from bstar.physics.operators import CompiledStep
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
    reach                                  of a whole step: what its decode attention takes for the cache it reads
    launching                              of a whole step: launching it from the host; 0 where it is replayed
    """

    compute: FloatArray
    activations: FloatArray
    cache: FloatArray
    weights: FloatArray
    light_compute: FloatArray
    light_memory: FloatArray
    fixed: FloatArray
    sequences: FloatArray
    reach: FloatArray
    launching: FloatArray


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
    base_s     compute of half_rows rows, the most that padding adds; of routed experts, with every expert read
    reach_activations   (statistics,) of decode attention's activations, what grows with the context
    weights_s, light_weights_s   reading all weights; `routed` entries are scaled by the share of experts that is read
    layers_s             gaps of all layers
    launch_s, piece_s    launching all layers from the host; the same where they are replayed in pieces
    """

    step: CompiledStep
    rates: FloatArray
    base_s: FloatArray
    reach_activations: FloatArray
    weights_s: FloatArray
    light_weights_s: FloatArray
    fixed_s: FloatArray
    collective: NDArray[np.bool_]
    streaming: NDArray[np.int64]
    rounded: NDArray[np.int64]
    routed: NDArray[np.int64]
    load: ExpertLoad
    row_index: NDArray[np.int64]
    graphs: GraphUse
    smoothing: float
    constants: Constants
    layers_s: float
    launch_s: float
    piece_s: float
    per_step_s: float
    per_sequence_s: float
    pipeline_stages: int
    names: tuple[str, ...]
    name_matrix: FloatArray
    tokens_index: int
    prefill_index: int
    sequences_index: int
    notes: tuple[str, ...]
    provenance: Provenance
    _scalar: list[ScalarSteps] = field(default_factory=list, repr=False)

    @property
    def scalar(self) -> ScalarSteps:
        """The same for single steps, faster; made at first use."""
        if not self._scalar:
            self._scalar.append(ScalarSteps(self))
        return self._scalar[0]

    def microbatch(self, batch: FloatArray | float) -> FloatArray:
        """Sequences that one pipeline stage holds at a time when `batch` are in flight."""
        b = np.asarray(batch, dtype=float)
        result: FloatArray = np.maximum(b / self.pipeline_stages, np.minimum(b, 1.0))
        return result

    def stage_batch(self, batch: float) -> float:
        """`microbatch` of one number."""
        return max(batch / self.pipeline_stages, min(batch, 1.0))

    def work_of(self, values: FloatArray) -> StepWork:
        """The work of steps with these statistics, (statistics,) or (statistics, m)."""
        n, tokens, prompts = len(self.weights_s), values[self.tokens_index], values[self.prefill_index] > 0
        parts = (self.rates.reshape(5 * n, -1) @ values).reshape(5, n, *values.shape[1:])
        one = parts.ndim == 2
        if self.graphs.sizes.size:
            padding = np.where(prompts, 0.0, self.graphs.padded(tokens) - tokens)
            parts[:2] += np.multiply.outer(self.rates[:2, :, self.tokens_index], padding)
        read = (values[self.row_index] > 0).astype(float)
        compute, activations, light_read = parts[0], parts[1], read
        if self.routed.size:
            expert_tokens = values[self.step.expert_tokens_index]
            share, rows = self.load.busiest(expert_tokens)
            light_read = read.copy()
            light_read[self.routed] *= 1.0 - self.load.missed(expert_tokens)
            read[self.routed] *= share
            compute[self.routed] *= rows
            activations[self.routed] *= rows
        compute += padding_s(compute, _column(self.base_s, one) * read)
        reach = np.maximum(compute[self.streaming], parts[2][self.streaming]).sum(axis=0)
        launching = np.where(prompts | self.graphs.pieces, self.piece_s, 0.0)
        launched = self.graphs.beyond(tokens) | (prompts & (not self.graphs.mixed))
        return StepWork(
            compute=compute, activations=activations, cache=parts[2], weights=_column(self.weights_s, one) * read,
            light_compute=parts[3], light_memory=parts[4] + _column(self.light_weights_s, one) * light_read,
            fixed=_column(self.fixed_s, one) * (values[self.row_index] > 0), sequences=values[self.sequences_index],
            reach=reach + self.reach_activations @ values, launching=np.where(launched, self.launch_s, launching),
        )  # fmt: skip

    def decode_work(self, context: float, sequences: FloatArray | float) -> StepWork:
        """The work of decode steps with `sequences` (a number or (m,)) in each stage."""
        one = self.step.decode_values(context)
        return self.work_of(np.multiply.outer(one, sequences) if np.ndim(sequences) else one * sequences)

    def floor_s(self, work: StepWork) -> FloatArray:
        """Floor per operator: nothing but arithmetic at peak and weights and cache at full bandwidth."""
        result: FloatArray = np.maximum(work.light_compute, work.light_memory)
        return result

    def times(self, work: StepWork) -> OperatorTimes:
        """Expected seconds per operator, in parts."""
        memory = work.weights + work.activations + work.cache
        body = memory.copy()
        rows = self.rounded
        body[rows] = smooth_max(work.compute[rows], memory[rows], self.smoothing)
        # Decode attention streams the cache: every key costs the greater of its bytes and its arithmetic, so the
        # step stays affine in the context (the simulator sums many steps in closed form).
        rows = self.streaming
        body[rows] += np.maximum(work.compute[rows] - work.cache[rows], 0.0)
        return OperatorTimes(
            fixed=work.fixed, body=body, compute_bound=work.compute > memory,
            cache_share=work.cache / np.maximum(memory, 1e-30),
            engine=self.engine_s(work.fixed.sum(axis=0) + body.sum(axis=0), work),
        )  # fmt: skip

    def engine_s(self, kernels_s: FloatArray, work: StepWork) -> FloatArray:
        """What a step takes beside its kernels: the host's work, and launching that lasts longer than they do."""
        engine: FloatArray = (self.per_step_s * self.pipeline_stages + self.layers_s
                              + self.per_sequence_s * work.sequences)
        if np.any(work.launching):
            kernels = kernels_s + self.layers_s - work.reach
            engine = engine + smooth_max(kernels, work.launching, self.smoothing) - kernels
        return engine

    def expected_s(self, values: FloatArray) -> FloatArray:
        """Expected seconds of whole steps; `values` are their statistics, (statistics,) or (statistics, m)."""
        return self.times(self.work_of(values)).total_s


def smooth_max(a: FloatArray, b: FloatArray, power: float) -> FloatArray:
    """(a^p + b^p)^(1/p): a max with a round corner, both resources are busy near the ridge."""
    if power == 3.0:
        cubes: FloatArray = np.cbrt(a * a * a + b * b * b)
        return cubes
    result: FloatArray = (a**power + b**power) ** (1.0 / power)
    return result


def padding_s(compute: FloatArray, most: FloatArray) -> FloatArray:
    """What tiles add to a compute time: n rows take n + n·h/(n + h), h = half_rows; `most` is the time of h rows.

    Tiles adapt to few rows (twice the rows at most), and of many rows they lose h.
    """
    result: FloatArray = compute * most / np.maximum(compute + most, 1e-30)
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
    step, values = frame.step, np.append(constants.array(frame.constants), 1.0)
    c = dict(zip(PLACES, values[frame.places], strict=True))
    linked, ranks = frame.collective, frame.ranks
    compute = np.where(linked, 1.0, np.minimum(c["compute"] * c["scale_compute"], 1.0))
    memory = np.minimum(c["memory"] * c["scale_memory"], 1.0)
    effective = frame.bandwidth * memory * np.where(linked, (2.0 / ranks) ** c["compute"], 1.0)
    fixed = np.where(linked, c["fixed"] + (ranks - 2.0) * c["half_rows"], c["fixed"] * constants["graph_fraction"])
    peak = frame.peak * compute
    moved = step.reads + np.where(linked[:, None], 0.0, step.writes)
    share, bus = frame.host_share, frame.bus_s_per_byte
    rates = np.stack([
        step.flops / peak[:, None], moved / effective[:, None],
        step.kv_reads / effective[:, None], step.flops / frame.peak[:, None],
        np.where(linked[:, None], 0.0, step.kv_reads / frame.bandwidth[:, None]),
    ])  # fmt: skip
    return StepModel(
        step=step, collective=frame.collective, smoothing=constants["smoothing"], names=frame.names, notes=frame.notes,
        constants=constants, fixed_s=step.launches * fixed, rates=rates,
        base_s=np.where(linked, 0.0, c["half_rows"] * frame.row_flops / peak),
        reach_activations=rates[1][frame.streaming].sum(axis=0) * frame.reaches,
        weights_s=step.weight_bytes * ((1 - share) / effective + share * bus / constants["host_bus.bandwidth"])
        + frame.held_experts * (constants["expert_s"] / 2.0),
        light_weights_s=step.weight_bytes * ((1 - share) / frame.bandwidth + share * bus),
        streaming=frame.streaming, rounded=frame.rounded, routed=frame.routed,
        load=replace(frame.load, skew=constants["expert_skew"]), row_index=frame.row_index, graphs=frame.graphs,
        layers_s=frame.layers * constants["layer_s"] + frame.moe_layers * constants["moe_layer_s"],
        launch_s=(frame.layers - frame.latent_layers - frame.state_layers) * constants["eager_layer_s"]
        + frame.latent_layers * constants["eager_latent_layer_s"]
        + frame.state_layers * constants["eager_state_layer_s"]
        + frame.moe_layers * constants["eager_moe_layer_s"],
        piece_s=frame.layers * constants["piece_layer_s"],
        per_step_s=constants["step_s"], per_sequence_s=constants["sequence_s"],
        pipeline_stages=deployment.parallel.pp, name_matrix=frame.name_matrix, tokens_index=frame.tokens_index,
        prefill_index=frame.prefill_index, sequences_index=frame.sequences_index, provenance=constants.provenance,
    )  # fmt: skip
