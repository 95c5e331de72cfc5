"""The step times of a deployment in the form that the kernel evaluates, exactly those of `bstar.latency`.

Operators are sorted by what their time depends on:

    tokens of the step alone            a table over the token budget
    positions that need logits alone    a table over max_num_seqs
    linear in the batch's counts        coefficients (no arithmetic to speak of, or decode attention)
    two resources, several counts       a rounded corner, evaluated per step (prompt attention, states)

Counts are those of a whole replica, shared out evenly over the ranks of attention data parallelism, as in
`bstar.latency.step_times_s`; or of one rank, the others being as busy. With pipeline stages a step stands for one
round, in which each stage holds a share of the batch at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from bstar.latency.step_model import StepModel, step_model
from bstar.physics.statistics import FULL, Span, Statistic
from bstar.sim.kernel.cost import CACHED, DECODE, FIRST_SPAN, PROMPT, SEQUENCES, StepCost
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]

_TOKENS: Final = frozenset({("tokens", None), ("expert_tokens", None)})
_SAMPLED: Final = frozenset({("sampled", None)})
_PHASE: Final[dict[Statistic, int]] = {("decode_tokens", None): 1, ("prefill_tokens", None): 2}


def step_cost(
    deployment: Deployment, *, max_tokens: int, max_sequences: int, one_rank: bool = False,
    model: StepModel | None = None,
) -> StepCost:  # fmt: skip
    """Step times of steps of up to `max_tokens` tokens of up to `max_sequences` sequences.

    one_rank   these are counts of one attention-data-parallel rank; else of the replica
    model      step times that differ from the deployment's own: a calibrated model
    """
    ranks = deployment.parallel.attention_dp
    return _Sorter(model or step_model(deployment), ranks, one_rank).cost(max_tokens, max_sequences)


class _Sorter:
    """One pass over the operators of a step model."""

    def __init__(self, model: StepModel, attention_dp: int, one_rank: bool) -> None:
        self.model = model
        self.statistics = model.step.statistics
        # What one more of a statistic adds on a rank; experts see the tokens of all ranks.
        own, everybody = (1.0, float(attention_dp)) if one_rank else (1.0 / attention_dp, 1.0)
        self.unit = np.array([everybody if name == "expert_tokens" else own for name, _ in self.statistics])
        self.own, self.everybody = own, everybody
        spans = [s for name, s in self.statistics if s is not None and name.endswith("_prefill")]
        self.prompt_spans = list(dict.fromkeys(spans))
        self.width = FIRST_SPAN + 2 * len(self.prompt_spans)
        self.compute, self.activations, self.cache = model.rates[0], model.rates[1], model.rates[2]

    def cost(self, max_tokens: int, max_sequences: int) -> StepCost:
        m = self.model
        by_tokens, by_sampled = np.zeros(max_tokens + 1), np.zeros(max_sequences + 2)
        linear, fixed = np.zeros(self.width), np.zeros(3)
        reach: dict[tuple[int, bool], float] = {(0, False): 0.0}
        rows: list[tuple[Floats, Floats, float, int]] = []
        linear[SEQUENCES] += m.per_sequence_s * self.own / m.pipeline_stages
        streaming, rounded = set(m.streaming.tolist()), set(m.rounded.tolist())
        for i, work in enumerate(m.step.works):
            phase = _PHASE.get(self.statistics[int(m.row_index[i])], 0)
            used = {self.statistics[j] for j in np.flatnonzero(self.compute[i] + self.activations[i] + self.cache[i])}
            row = self.statistics[int(m.row_index[i])]
            if used <= _TOKENS and row in _TOKENS:
                by_tokens[1:] += self._table(i, np.arange(1, max_tokens + 1))
            elif used <= _SAMPLED and row in _SAMPLED:
                by_sampled[1:] += self._table(i, np.arange(1, max_sequences + 2))
            elif i in streaming:
                linear += self._decode_attention(i, reach)
                fixed[phase] += m.fixed_s[i] + m.weights_s[i]
            elif i in rounded:
                rows.append((self._over_x(self.compute[i]), self._over_x(self.activations[i] + self.cache[i]),
                             float(m.weights_s[i]), phase))  # fmt: skip
                fixed[phase] += m.fixed_s[i]
            else:
                linear += self._over_x(self.activations[i] + self.cache[i])
                fixed[phase] += m.fixed_s[i] + m.weights_s[i]
            assert work.routing is None or (used <= _TOKENS and row in _TOKENS), "routed weights follow the tokens"
        return self._assembled(by_tokens, by_sampled, linear, fixed, reach, rows, max_sequences)

    def _table(self, i: int, counts: NDArray[np.int64]) -> Floats:
        """Seconds of operator i where its statistics all are `counts`."""
        m = self.model
        share = m.microbatch(counts.astype(float))
        compute = (self.compute[i] @ self.unit) * share
        memory = ((self.activations[i] + self.cache[i]) @ self.unit) * share
        weights = np.full(len(counts), m.weights_s[i])
        routed = np.flatnonzero(m.routed == i)
        if routed.size:
            weights *= 1.0 - m.miss[routed[0]] ** (share * self.everybody)
        body = memory + weights
        if i in set(m.rounded.tolist()):
            body = (compute**m.smoothing + body**m.smoothing) ** (1.0 / m.smoothing)
        result: Floats = m.fixed_s[i] + body
        return result

    def _over_x(self, rates: Floats) -> Floats:
        """Rates per statistic as rates per entry of x. Decode spans have no entry: they are handled apart."""
        out = np.zeros(self.width)
        for j in np.flatnonzero(rates):
            name, span = self.statistics[j]
            value = rates[j] * self.unit[j] / self.model.pipeline_stages
            if name in ("tokens", "expert_tokens"):
                out[DECODE] += value
                out[PROMPT] += value
            elif name == "decode_tokens":
                out[DECODE] += value
            elif name == "prefill_tokens":
                out[PROMPT] += value
            elif name in ("sequences", "sampled"):
                out[SEQUENCES] += value
            elif name == "cached_prefill":
                out[CACHED] += value
            elif span is not None and name.endswith("_prefill"):
                at = FIRST_SPAN + 2 * self.prompt_spans.index(span) + (name == "keys_prefill")
                out[at] += value
            else:
                raise AssertionError(f"statistic {name} has no place in a prompt step")
        return out

    def _decode_attention(self, i: int, reach: dict[tuple[int, bool], float]) -> Floats:
        """Decode attention: its rates per token of reach go into `reach`, the rest is returned per x."""
        rest = self.activations[i].copy()
        per_span: dict[Span, list[float]] = {}
        for j, (name, span) in enumerate(self.statistics):
            if span is None or not name.endswith("_decode"):
                continue
            entry = per_span.setdefault(span, [0.0, 0.0, 0.0])
            share = self.unit[j] / self.model.pipeline_stages
            entry[0] += self.compute[i, j] * share
            entry[1] += self.cache[i, j] * share
            entry[2] += rest[j] * share
            rest[j] = 0.0
        busy = {span: e for span, e in per_span.items() if any(e)}
        assert len(busy) <= 1 and not np.any(self.cache[i] * (rest != 0)), "decode attention sees one span"
        for span, (compute, cache, moved) in busy.items():
            key = (span.limit or 0, span.chunked and span.limit is not None)
            reach[key] = reach.get(key, 0.0) + (max(compute, cache) + moved) / span.stride
        return self._over_x(rest)

    def _assembled(
        self, by_tokens: Floats, by_sampled: Floats, linear: Floats, fixed: Floats,
        reach: dict[tuple[int, bool], float], rows: list[tuple[Floats, Floats, float, int]], max_sequences: int,
    ) -> StepCost:  # fmt: skip
        m = self.model
        prompts = self.prompt_spans or [FULL]
        if not self.prompt_spans:
            linear = np.concatenate([linear, np.zeros(2)])
            rows = [(np.append(c, (0.0, 0.0)), np.append(y, (0.0, 0.0)), w, p) for c, y, w, p in rows]
        cost = StepCost(
            decode_s=np.zeros(max_sequences + 2), span_rate=np.array(list(reach.values())),
            span_limit=np.array([limit for limit, _ in reach], dtype=np.int64),
            span_restarts=np.array([int(restarts) for _, restarts in reach], dtype=np.int64),
            token_s=by_tokens, sampled_s=by_sampled, linear=linear, prompt_fixed_s=float(fixed[2]),
            decode_fixed_s=float(fixed[1]), step_s=float(fixed[0] + m.layers_s + m.per_step_s * m.pipeline_stages),
            row_compute=np.array([r[0] for r in rows]).reshape(-1, len(linear)),
            row_memory=np.array([r[1] for r in rows]).reshape(-1, len(linear)),
            row_base=np.array([r[2] for r in rows]), row_phase=np.array([r[3] for r in rows], dtype=np.int64),
            power=m.smoothing, prompt_limit=np.array([s.limit or 0 for s in prompts], dtype=np.int64),
            prompt_restarts=np.array([int(s.chunked and s.limit is not None) for s in prompts], dtype=np.int64),
            prompt_gathers=np.array([int(s.gather) for s in prompts], dtype=np.int64),
            prompt_stride=np.array([float(s.stride) for s in prompts]),
        )  # fmt: skip
        cost.decode_s[1:] = _decode_steps(cost, max_sequences + 1)
        return cost


def _decode_steps(cost: StepCost, most: int) -> Floats:
    """Seconds of decode steps of 1 … most sequences at no context."""
    batch = np.minimum(np.arange(1, most + 1), len(cost.token_s) - 1)
    each = cost.linear[DECODE] + cost.linear[SEQUENCES]
    total = cost.step_s + cost.decode_fixed_s + cost.token_s[batch] + cost.sampled_s[batch] + each * batch
    for compute, memory, base, phase in zip(
        cost.row_compute, cost.row_memory, cost.row_base, cost.row_phase, strict=True
    ):
        if phase != 2:
            work = (compute[DECODE] + compute[SEQUENCES]) * batch
            moved = base + (memory[DECODE] + memory[SEQUENCES]) * batch
            total = total + (work**cost.power + moved**cost.power) ** (1.0 / cost.power)
    result: Floats = total
    return result
