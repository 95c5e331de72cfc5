"""Step times of workers whose ranks step together: each rank's own work, and what all ranks share.

    a step of a worker   shared_s(tokens of all ranks) + max over ranks of own_s(its batch), at least (smoothly) what
                         launching its kernels takes where it is not replayed from a graph

The experts of a MoE layer see the tokens of every rank of attention data parallelism; all else is a rank's own.
With one rank (tensor parallelism) the two add up to the deployment's step time.

    prompts   own_s: prompt attention and GEMMs of the rank's chunks (`own`, as the kernel's mixed steps)
    decode    own_s: decode_s[sequences] + Σ spans rate · Σ reach(context); with drafting, of a step that verifies
              `drafted` tokens beside the next one and drafts as many
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstar.latency.step_model import StepModel, step_model
from bstar.physics.batch import BatchShape
from bstar.physics.statistics import Span, count, statistic_values
from bstar.sim.kernel.cost import StepCost
from bstar.sim.step_cost import step_cost
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# What a further query of a sequence adds to its decode attention, as a share of the first one's: the cache is read
# once for all of them, and the multipliers have rows to spare (from verifying steps of disaggregated runs).
_FURTHER_QUERY = 0.5
# Counts that have an entry each; beyond them, every stride-th of as many again. Sequences, tokens of prompts.
_DENSE = 1024
_DENSE_TOKENS = 512


class Curve(NamedTuple):
    """A function of a count: `dense` entries, one for each, then one every `stride` counts, and lines between."""

    entries: Floats
    dense: int
    stride: int


class PromptCost(NamedTuple):
    """Prompt steps of a worker. own: kernels of a rank's chunks; shared: by the tokens of all ranks.

    host_s, host_sequence_s   beside the kernels, of a step and of each prompt of a rank
    launch_s                  launching the kernels of a step of more than `graph_tokens` tokens of a rank; else piece_s
    """

    own: StepCost
    shared: Curve
    host_s: float
    host_sequence_s: float
    launch_s: float
    piece_s: float
    graph_tokens: int


class DecodeCost(NamedTuple):
    """Decode steps of a worker. own: kernels by the sequences of a rank, at no context; shared: by those of all.

    span_rate, span_limit     seconds per token of context that a sequence sees, up to the limit (0: none)
    tokens                    of a sequence in a step (above 1 with drafting)
    host_s … graph_tokens     as of prompts
    """

    own: Curve
    shared: Curve
    span_rate: Floats
    span_limit: Ints
    tokens: int
    host_s: float
    host_sequence_s: float
    launch_s: float
    piece_s: float
    graph_tokens: int
    power: float


def curve_at(curve: Curve, n: int) -> float:
    """The value at n (as the compiled `curve_s`)."""
    if n < curve.dense:
        return float(curve.entries[n])
    place = curve.dense - 1 + (n - curve.dense + 1) / curve.stride
    low = int(place)
    if low + 1 >= len(curve.entries):
        return float(curve.entries[-1])
    return float(curve.entries[low] + (place - low) * (curve.entries[low + 1] - curve.entries[low]))


def prompt_cost(
    deployment: Deployment, model: StepModel | None = None, *, max_tokens: int, max_prompts: int,
    dense: int | None = None,
) -> PromptCost:  # fmt: skip
    """Prompt steps of one worker of `deployment`, of up to `max_tokens` tokens and `max_prompts` prompts a rank.

    dense   up to so many tokens of all ranks the shared part is exact, beyond them within 1e-3
    """
    model = model if model is not None else step_model(deployment)
    own = step_cost(deployment, max_tokens=max_tokens, max_sequences=max_prompts, one_rank=True,
                    model=_own_part(model))  # fmt: skip
    return PromptCost(
        own=own._replace(host_s=0.0, host_sequence_s=0.0, launch_s=0.0, piece_s=0.0),
        shared=_shared(model, max_tokens * deployment.parallel.attention_dp, dense=dense or _DENSE_TOKENS),
        host_s=own.host_s, host_sequence_s=own.host_sequence_s, launch_s=own.launch_s, piece_s=own.piece_s,
        graph_tokens=own.graph_tokens,
    )  # fmt: skip


def decode_cost(
    deployment: Deployment, model: StepModel | None = None, *, max_sequences: int, drafted: int = 0,
) -> DecodeCost:  # fmt: skip
    """Decode steps of one worker of `deployment`, of up to `max_sequences` sequences a rank.

    drafted   tokens that the checkpoint's prediction layer drafts for each sequence and step
    """
    model = model if model is not None else step_model(deployment)
    ranks, tokens = deployment.parallel.attention_dp, drafted + 1
    counts, stride = _counts(max_sequences, _DENSE)
    own = _Own(model, tokens)
    kernels, rates = own.at(counts), own.rates
    shared = _shared(model, max_sequences * ranks, tokens)
    if drafted:
        own_s, shared_s = _draft_share(model)
        one = _Own(model, 1)
        rates = one.rates * (1.0 + _FURTHER_QUERY * drafted)
        kernels += drafted * own_s * (one.at(counts) + one.reach_s * counts)
        few = _shared(model, max_sequences * ranks)
        shared = shared._replace(entries=shared.entries + drafted * shared_s * few.entries)
    kernels[0] = 0.0
    return DecodeCost(
        own=Curve(kernels, min(_DENSE, max_sequences) + 1, stride), shared=shared, span_rate=rates,
        span_limit=own.limits, tokens=tokens, host_s=model.per_step_s, host_sequence_s=model.per_sequence_s,
        launch_s=model.launch_s, piece_s=model.piece_s if model.graphs.pieces else 0.0,
        graph_tokens=int(model.graphs.largest), power=model.smoothing,
    )  # fmt: skip


class _Own:
    """The kernels of decode steps of one rank, `tokens` a sequence: affine in the contexts."""

    def __init__(self, model: StepModel, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        statistics, context = model.step.statistics, float(tokens + 1)
        one = statistic_values(statistics, BatchShape.decode(1, context, tokens_per_sequence=tokens), 1)
        one[model.step.expert_tokens_index] = 0.0
        self.one = one
        spans = list(dict.fromkeys(s for name, s in statistics if s is not None and name.endswith("_decode")))
        rates: dict[int, float] = {0: 0.0}
        base = float(self._kernels(one))
        self.reach_s = 0.0
        for span in spans:
            rate = self._more(span) - base
            limit = span.limit or 0
            rates[limit] = rates.get(limit, 0.0) + rate
            self.reach_s += rate * (context if limit == 0 else min(context, limit))
        self.rates = np.array(list(rates.values()))
        self.limits = np.array(list(rates), dtype=np.int64)

    def _kernels(self, values: Floats) -> Floats:
        """Seconds of the kernels, gaps between them included."""
        times = self.model.times(self.model.work_of(values))
        seconds: Floats = times.fixed.sum(axis=0) + times.body.sum(axis=0) + self.model.layers_s
        return seconds

    def _more(self, span: Span) -> float:
        """Seconds of a sequence with one more token of reach."""
        longer = self.one.copy()
        for j, (name, reach) in enumerate(self.model.step.statistics):
            if reach == span and name == "pairs_decode":
                longer[j] += self.tokens / span.stride
            elif reach == span and name == "keys_decode":
                longer[j] += 1.0 / span.stride
        return float(self._kernels(longer))

    def at(self, counts: Ints) -> Floats:
        """Seconds of steps with these numbers of sequences, at no context."""
        return self._kernels(np.outer(self.one, counts.astype(float))) - self.reach_s * counts


def _own_part(model: StepModel) -> StepModel:
    """The model without what depends on the tokens of all ranks."""
    everybody = model.step.expert_tokens_index
    rates, gone = model.rates.copy(), model.row_index == everybody
    rates[:, :, everybody] = 0.0
    return replace(
        model, rates=rates, weights_s=np.where(gone, 0.0, model.weights_s), base_s=np.where(gone, 0.0, model.base_s),
        light_weights_s=np.where(gone, 0.0, model.light_weights_s), fixed_s=np.where(gone, 0.0, model.fixed_s),
    )  # fmt: skip


def _shared(model: StepModel, most: int, tokens: int = 1, *, dense: int | None = None) -> Curve:
    """What the ranks do together, by the sequences (of `tokens` each) of all of them."""
    dense = _DENSE if dense is None else dense
    counts, stride = _counts(most, dense)
    values = np.zeros((len(model.step.statistics), len(counts)))
    values[model.step.expert_tokens_index] = counts * float(tokens)
    times = model.times(model.work_of(values))
    seconds: Floats = times.fixed.sum(axis=0) + times.body.sum(axis=0)
    return Curve(seconds, min(dense, most) + 1, stride)


def _counts(most: int, dense: int) -> tuple[Ints, int]:
    """Counts with an entry: all up to `dense`, then about as many again up to `most`."""
    few = np.arange(min(most, dense) + 1, dtype=np.int64)
    if most <= dense:
        return few, 1
    stride = -(-(most - dense) // dense)
    return np.concatenate([few, np.arange(dense + stride, most + stride, stride, dtype=np.int64)]), stride


def _draft_share(model: StepModel) -> tuple[float, float]:
    """Share of a decode step's own and shared work that one pass of the prediction layer costs.

    One layer of the model's, and its head: what the layers take is divided by their number.
    """
    layers = max(work.layers for work in model.step.works)
    whole = statistic_values(model.step.statistics, BatchShape.decode(1, 1.0), 1)
    head = np.zeros_like(whole)
    j = model.step.statistics.index(count("sampled")) if count("sampled") in model.step.statistics else None
    head_s = 0.0
    if j is not None:
        head[j] = whole[j]
        times = model.times(model.work_of(head))
        head_s = float(times.fixed.sum(axis=0) + times.body.sum(axis=0))
    own = float(model.expected_s(np.where(np.arange(len(whole)) == model.step.expert_tokens_index, 0.0, whole)))
    return (1.0 / layers + head_s / own), 1.0 / max(1, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How many tokens a step with drafts makes: the first is taken with a probability, each further one, where those
    before it were, with `decay` times that of the one before: a prediction layer works on its own guesses."""

    probability: float
    decay: float = 1.0

    def tokens_per_step(self, drafted: int) -> float:
        """Expected tokens of a step: 1 + p + p·(p·d) + …"""
        taken, tokens = 1.0, 1.0
        for k in range(drafted):
            taken *= self.probability * self.decay**k
            tokens += taken
        return tokens
