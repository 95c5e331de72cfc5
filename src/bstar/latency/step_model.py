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

from bstar.latency.efficiency import (
    EngineOverhead,
    Kernel,
    KernelSet,
    engine_overhead,
    kernel_set,
    link_for,
)
from bstar.latency.host_weights import host_reads
from bstar.physics.arithmetic import computed_dtype, fallback_note
from bstar.physics.operators import CompiledStep, compiled_step
from bstar.physics.statistics import count
from bstar.physics.work import Work
from bstar.specs.deployment import Deployment
from bstar.specs.device import Provenance
from bstar.specs.formats import FORMATS, KvFormat

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
            engine=self.per_step_s * self.pipeline_stages + self.per_sequence_s * work.sequences,
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


_CACHE: OrderedDict[int, tuple[Deployment, StepModel]] = OrderedDict()
_CACHE_SIZE: Final = 128


def step_model(deployment: Deployment) -> StepModel:
    """The step model of `deployment`, built once (kept by identity, so that a look-up costs no hashing)."""
    found = _CACHE.get(id(deployment))
    if found is not None and found[0] is deployment:
        return found[1]
    model = _build(deployment)
    _CACHE[id(deployment)] = (deployment, model)
    if len(_CACHE) > _CACHE_SIZE:
        _CACHE.popitem(last=False)
    return model


def _build(deployment: Deployment) -> StepModel:
    device, overhead = deployment.device, engine_overhead(deployment.engine.name)
    step = compiled_step(deployment.model, deployment.parallel, deployment.kv_format, "all")
    kernels = kernel_set(
        device.compute_capability, half_rate_accumulation=device.half_rate_accumulation, inline_ecc=device.inline_ecc)
    n = len(step.works)
    peak, effective_peak = np.full(n, np.inf), np.full(n, np.inf)
    effective_bandwidth, fixed = np.empty(n), np.empty(n)
    launch_share = 1.0 if deployment.engine.enforce_eager else kernels.graph_fraction
    notes: dict[str, None] = {}
    for i, work in enumerate(step.works):
        if work.collective is not None:
            ranks = _span(deployment, work)
            link = link_for(device, ranks, overhead)
            effective_bandwidth[i] = link.bandwidth_bytes_per_s * link.efficiency
            fixed[i] = step.launches[i] * link.latency_s
            continue
        computed = None
        if work.compute_dtype is not None:
            computed = computed_dtype(device, work.compute_dtype)
            peak[i] = device.peak(computed)
            note = fallback_note(device, work.compute_dtype)
            if note is not None:
                notes[note] = None
        kernel = _kernel_of(work, kernels, overhead, deployment.kv_format, computed)
        effective_peak[i] = peak[i] * kernel.compute
        effective_bandwidth[i] = device.bandwidth_bytes_per_s * kernel.memory
        fixed[i] = step.launches[i] * kernel.t0_s * launch_share
    names = tuple(dict.fromkeys(w.name for w in step.works))
    collective = np.array([w.collective is not None for w in step.works])
    moved = step.reads + np.where(collective[:, None], 0.0, step.writes)
    local = np.where(collective, 0.0, 1.0)[:, None]
    bandwidth = device.bandwidth_bytes_per_s
    routed = np.flatnonzero(step.routed)
    host = host_reads(deployment, step)
    return StepModel(
        step=step, collective=collective, smoothing=kernels.smoothing, fixed_s=fixed, names=names, notes=tuple(notes),
        rates=np.stack([
            step.flops / effective_peak[:, None], moved / effective_bandwidth[:, None],
            step.kv_reads / effective_bandwidth[:, None], step.flops / peak[:, None],
            local * step.kv_reads / bandwidth,
        ]),
        weights_s=step.weight_bytes * ((1 - host.share) / effective_bandwidth + host.share * host.s_per_byte),
        light_weights_s=step.weight_bytes * ((1 - host.share) / bandwidth + host.share * host.light_s_per_byte),
        streaming=np.flatnonzero([w.kind == "attention_decode" for w in step.works]),
        rounded=np.flatnonzero([bool(w.flops) and w.kind != "attention_decode" for w in step.works]),
        routed=routed, miss=step.miss_base[routed], row_index=step.rows.argmax(axis=1),
        per_step_s=overhead.per_step_s, per_sequence_s=overhead.per_sequence_s,
        pipeline_stages=deployment.parallel.pp,
        name_matrix=np.array([[float(w.name == name) for w in step.works] for name in names]),
        sequences_index=step.statistics.index(count("sequences")),
        provenance="assumed" if "assumed" in (kernels.provenance, overhead.provenance) else kernels.provenance,
    )  # fmt: skip


def _span(deployment: Deployment, work: Work) -> int:
    """Devices that a collective spans: a pipeline hop may cross a node though it joins two ranks."""
    assert work.collective is not None
    if work.collective.kind == "p2p":
        return deployment.parallel.devices_per_copy
    return work.collective.ranks


def _kernel_of(
    work: Work, kernels: KernelSet, overhead: EngineOverhead, kv: KvFormat, computed: str | None
) -> Kernel:
    if work.kind in ("gemm", "moe_gemm"):
        fmt = FORMATS.get(work.weight_format)
        kind = kernels.gemm_class(work.weight_format, fmt.bits if fmt else 16, computed or "", work.compute_dtype or "")
        table = kernels.gemm if work.kind == "gemm" else kernels.moe_gemm
        kernel = table.get(kind, table["bf16"])
        if work.kind == "moe_gemm":
            # Two grouped GEMMs a layer carry the layer's routing and sorting.
            return Kernel(
                t0_s=kernel.t0_s + overhead.per_moe_layer_s / 2, compute=kernel.compute, memory=kernel.memory)
        return kernel
    if work.kind == "attention_decode":
        return kernels.attention_decode["narrow" if kv.bits < 16 else "wide"]
    if work.kind == "attention_prefill":
        return kernels.attention_prefill
    return kernels.state if work.kind == "state" else kernels.elementwise
