"""Disaggregated measured rows: clients in closed loop over a prefill and a decode pool, as the harness ran them.

    client → front end → prefill worker (queue, prompt steps) → cache over the link → decode worker (queue, steps)

The answer streams from the decode side: its first step shows the first token. What the row leaves out (workers, seats,
drafting) comes from the harness's configurations (`disaggregated_layouts`). Constants are those of the step model; what
this module adds stands at its top, with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bstar.calibration.disaggregated_layouts import DisaggregatedLayout, Split, layout_of
from bstar.calibration.loads import load_of
from bstar.calibration.point import Point
from bstar.calibration.point_deployments import deployment_of
from bstar.errors import BstarError
from bstar.latency.constants import Constants, constants_for
from bstar.latency.experts import ExpertLoad, FloatArray
from bstar.latency.step_model import StepModel, step_model
from bstar.physics.kv_cache import kv_bytes_per_sequence, state_bytes_per_sequence
from bstar.physics.memory import memory_budget
from bstar.sim.cluster.pool_cost import Acceptance, decode_cost, prompt_cost
from bstar.sim.cluster.pool_run import DecodePool, PoolRequests, PoolRun, PromptPool, ShownFrom, run_pools
from bstar.specs.deployment import Deployment

# The chance that a token drafted by a checkpoint's prediction layer is taken: from runs of the same layout with and
# without drafting (DeepSeek's own report has 0.85–0.9 for the first).
ACCEPTANCE: Final = Acceptance(probability=0.8, decay=0.7)
# The second hop of a request, beside the bytes of its cache: Dynamo's request plane and the transfer's handshake (from
# the first tokens of lightly loaded measured runs: 20-45 ms).
HANDOVER_S: Final = 30e-3
# The engine inside a Dynamo release before the one given (Dynamo's support matrix).
_DYNAMO: Final = {
    "trtllm": (((0, 6), "1.1.0rc5"), ((0, 8), "1.2.0rc2"), ((1, 0), "1.2.0rc6")),
    "sglang": (((0, 6), "0.5.3"), ((0, 8), "0.5.5"), ((1, 0), "0.5.8")),
}
# Expert-parallel ranks from which on the harness's configurations place experts by their load (EPLB) or spare copies.
_BALANCED_RANKS: Final = 16
# What the exchange of tokens between the ranks of wide expert parallelism takes beyond the step model's, each way: by
# engine, weights ("": any) and first release after; from decode steps of the measured runs.
_EXCHANGE_S: Final = (
    ("trtllm", "", (1, 2), 40e-6), ("sglang", "fp4", (0, 5, 8), 40e-6), ("sglang", "fp4", (9,), 20e-6),
    ("sglang", "fp8", (0, 5, 5), 70e-6), ("sglang", "fp8", (0, 5, 8), 40e-6),
)  # fmt: skip
# Kernels of experts that SGLang's configurations name, over those of the step model: (compute, bytes).
_GROUPED_FP8: Final = 1.7, 1.25
_WHOLE_FP8: Final = 0.38, 1.0
_CUT_FP8: Final = 0.8, 1.0
_GATHERED_FP4: Final = 0.3, 1.0
_FUSED_FP4: Final = 0.6, 1.0
# Launching kernels takes Grace's cores longer than x86 ones.
_GRACE: Final = 1.2
# Host work of steps that draft (verifying, accepting), of the step and a sequence: by engine and first release after.
_DRAFTING_S: Final = (("sglang", (9,), 1e-3, 80e-6), ("trtllm", (1, 2), 1e-3, 120e-6))
_UNLIMITED: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DisaggregatedReplay:
    """The simulation behind a prediction."""

    layout: DisaggregatedLayout
    prefill: Deployment
    decode: Deployment
    requests: PoolRequests
    output_tokens: NDArray[np.int64]
    run: PoolRun
    notes: tuple[str, ...]

    @property
    def ttft_s(self) -> float:
        """Mean over all requests, the burst included."""
        return float(np.mean(self.run.first_s - self.run.arrival_s))

    @property
    def tpot_s(self) -> float | None:
        """Mean over the requests with more than one token; None: there are none."""
        several = self.output_tokens > 1
        rest = (self.run.finish_s - self.run.first_s)[several] / (self.output_tokens[several] - 1)
        return float(np.mean(rest)) if rest.size else None


def replay_disaggregated(point: Point, constants: Any = None) -> Any:
    """The `calibration.replay.Prediction` for a disaggregated row. Never raises a BstarError: it has a reason then."""
    from bstar.calibration.replay import Prediction

    try:
        found = disaggregated_replay(point, constants)
    except BstarError as error:
        return Prediction(reason=" ".join(str(error).split()))
    return Prediction(ttft_s=found.ttft_s, tpot_s=found.tpot_s, notes=found.notes)


def disaggregated_replay(
    point: Point, constants: Constants | None = None, *, layout: DisaggregatedLayout | None = None, log_rows: int = 0
) -> DisaggregatedReplay:
    """The row's load through its two pools. Raises BstarError where the row names no model, GPU or split."""
    layout = layout_of(point) if layout is None else layout
    prefill, decode = deployments_of(point, layout)
    load = load_of(point)
    prompt, output = np.asarray(load.input_tokens, dtype=np.int64), np.asarray(load.output_tokens, dtype=np.int64)
    made = ACCEPTANCE.tokens_per_step(layout.drafted)
    steps = np.where(output > 1, np.maximum(np.ceil((output - 1) / made), 1), 0).astype(np.int64)
    c = constants_for(prefill) if constants is None else constants
    here = _constants(c, point, prefill, layout.prefill, decodes=False)
    there = _constants(constants_for(decode) if constants is None else constants, point, decode, layout.decode,
                       decodes=True, drafted=layout.drafted)  # fmt: skip
    requests = PoolRequests.of(prompt, steps, _transfer_s(prefill, layout, prompt), clients=point.concurrency,
                               front_s=c["request_s"], growth=made)  # fmt: skip
    pools = _pools(point, layout, prefill, decode, requests)
    prompts = prompt_cost(prefill, _placed(step_model(prefill, here), layout.prefill, prefill), max_tokens=pools[2],
                          max_prompts=min(point.concurrency, layout.prompts, pools[2]))  # fmt: skip
    most = min(pools[1].seats, point.concurrency)
    cost = decode_cost(decode, _placed(step_model(decode, there), layout.decode, decode), max_sequences=most,
                       drafted=layout.drafted)  # fmt: skip
    shown: ShownFrom = "landing" if prefill.engine.name == "sglang" else "decode-step"
    run = run_pools(requests, pools[0], pools[1], prompts, cost, shown=shown, log_rows=log_rows)
    notes = (*layout.notes, *dict.fromkeys((*prefill.engine.notes, *decode.engine.notes)),
             *_without_room(prefill, decode))  # fmt: skip
    return DisaggregatedReplay(layout=layout, prefill=prefill, decode=decode, requests=requests, output_tokens=output,
                               run=run, notes=notes)  # fmt: skip


def deployments_of(point: Point, layout: DisaggregatedLayout) -> tuple[Deployment, Deployment]:
    """One worker of each side.

    As the harness's recipes have it: caches in fp8, prompt steps without CUDA graphs, decode steps captured up to the
    seats.
    """
    kv = point.kv_dtype or ("fp8" if point.harness == "inferencex" else None)
    laid = replace(point, prefill=layout.prefill.pool, decode=layout.decode.pool, kv_dtype=kv,
                   engine_version=_engine_version(point))  # fmt: skip
    prefill, decode = deployment_of(laid, side="prefill"), deployment_of(laid, side="decode")
    seats = min(layout.seats, point.concurrency)
    return (
        replace(prefill, engine=replace(prefill.engine, enforce_eager=True)),
        replace(decode, engine=replace(decode.engine, max_num_seqs=seats,
                                       cudagraph_max_size=seats * (1 + layout.drafted))),
    )  # fmt: skip


class _Placed(ExpertLoad):
    """Experts placed by their load (or with spare copies): ranks differ by chance alone."""

    def busiest(self, tokens: FloatArray | float) -> tuple[FloatArray, FloatArray]:
        even = ExpertLoad(experts=self.experts, top_k=self.top_k, ranks=self.ranks, skew=0.0)
        return super().busiest(tokens)[0], even.busiest(tokens)[1]


def _placed(model: StepModel, split: Split, deployment: Deployment) -> StepModel:
    """The model with the experts placed as the harness's configurations have it."""
    spare = deployment.engine.name == "sglang" and deployment.device.id.startswith("gb")
    if split.ep < (2 if spare else _BALANCED_RANKS):
        return model
    load = model.load
    return replace(model, load=_Placed(experts=load.experts, top_k=load.top_k, ranks=load.ranks, skew=load.skew))


def _constants(
    c: Constants, point: Point, deployment: Deployment, split: Split, *, decodes: bool, drafted: int = 0
) -> Constants:
    """Those of a side: what the harness's configurations change."""
    engine, weights = deployment.engine, "fp4" if "fp4" in (point.weight_dtype or "") else "fp8"
    grace = point.gpu.startswith("gb")
    changes: dict[str, float] = {}
    if grace:
        for name in ("eager_layer_s", "eager_latent_layer_s", "eager_moe_layer_s"):
            changes[name] = c[name] * _GRACE
    if split.ep >= _BALANCED_RANKS:
        more = next((s for name, w, before, s in _EXCHANGE_S
                     if name == engine.name and w in ("", weights) and engine.version_tuple < before), 0.0)  # fmt: skip
        changes["collective.nvlink.latency_s"] = c["collective.nvlink.latency_s"] + more
    if engine.name == "sglang":
        many = split.attention_dp > 1
        compute, memory = 1.0, 1.0
        if weights == "fp8" and grace and many and (decodes or engine.version_tuple >= (0, 5, 5)):
            compute, memory = _GROUPED_FP8
        elif not decodes:
            if weights == "fp8":
                compute, memory = _WHOLE_FP8 if split.ep > 1 else _CUT_FP8
            else:
                compute, memory = _GATHERED_FP4 if many and grace else _FUSED_FP4
        kernel = "moe_gemm.fp4" if weights == "fp4" else "moe_gemm.fp8_block"
        changes[f"{kernel}.compute"] = min(c[f"{kernel}.compute"] * compute, 1.0)
        changes[f"{kernel}.memory"] = min(c[f"{kernel}.memory"] * memory, 1.0)
    if drafted:
        for name, before, step_s, sequence_s in _DRAFTING_S:
            if name == engine.name and engine.version_tuple < before:
                changes |= {"step_s": c["step_s"] + step_s, "sequence_s": c["sequence_s"] + sequence_s}
    return c.replace(changes) if changes else c


def _engine_version(point: Point) -> str:
    """The engine's version, where the row has that of the Dynamo release that served it (or none, the first runs)."""
    versions = _DYNAMO.get(point.engine.lower())
    if point.harness != "inferencex" or versions is None:
        return point.engine_version
    if not point.engine_version:
        return versions[0][1]
    if point.engine.lower() == "sglang" and "-rc" not in point.engine_version:
        return point.engine_version
    release = tuple(int(n) for n in point.engine_version.split("-")[0].split(".")[:2] if n.isdigit())
    if release >= (1, 0):
        return point.engine_version
    return next((engine for until, engine in versions if release < until), versions[-1][1])


def _pools(
    point: Point, layout: DisaggregatedLayout, prefill: Deployment, decode: Deployment, requests: PoolRequests
) -> tuple[PromptPool, DecodePool, int]:
    """The pools, and the most tokens that a prompt step of a rank can have."""
    longest = int(requests.prompt.max())
    chunked = prefill.engine.name != "trtllm"
    tokens = layout.prompt_tokens or prefill.engine.max_num_batched_tokens
    shared = not chunked  # TensorRT-LLM balances its ranks; SGLang deals requests out as they come
    prompts = PromptPool(workers=layout.prefill.workers, ranks=layout.prefill.attention_dp, tokens=tokens,
                         prompts=min(layout.prompts, point.concurrency), chunked=chunked, shared=shared)  # fmt: skip
    room = max(_room(decode, layout.decode.attention_dp), int(requests.hold.max()))
    decodes = DecodePool(workers=layout.decode.workers, ranks=layout.decode.attention_dp,
                         seats=min(layout.seats, point.concurrency), room=room, shared=shared)  # fmt: skip
    return prompts, decodes, tokens if chunked else max(tokens, longest)


def _without_room(prefill: Deployment, decode: Deployment) -> tuple[str, ...]:
    """What the memory model says of sides that it would not start: they are predicted as if it did."""
    notes = []
    for side, deployment in (("prefill", prefill), ("decode", decode)):
        try:
            budget = memory_budget(deployment)
            refused = None if budget.fits else budget.reason or "no room for the cache"
        except BstarError as error:
            refused = str(error)
        if refused is not None:
            notes.append(f"memory of a {side} worker not limited: it was measured, though {refused}")
    return tuple(notes)


def _room(decode: Deployment, ranks: int) -> int:
    """Tokens of cache of a decode rank; not limited where the memory model says that it would not start."""
    try:
        budget = memory_budget(decode)
    except BstarError:
        return _UNLIMITED
    return int(budget.kv_cache_tokens) if budget.fits and budget.kv_cache_tokens > 0 else _UNLIMITED


def _transfer_s(prefill: Deployment, layout: DisaggregatedLayout, prompt: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds from a prompt's end until its cache is at the decode side: ranks send side by side."""
    link = prefill.device.link_between(layout.gpus) or prefill.device.inter_node
    if link is None:
        return np.full(prompt.shape, HANDOVER_S)
    most = float(prompt.max())
    whole = kv_bytes_per_sequence(prefill.model, prefill.kv_format, most, prefill.parallel)
    state = state_bytes_per_sequence(prefill.model, prefill.parallel)
    per_token = whole / most if most else 0.0
    moved = prompt.astype(np.float64) * per_token + state
    return HANDOVER_S + link.latency_s + moved / link.bandwidth_bytes_per_s
