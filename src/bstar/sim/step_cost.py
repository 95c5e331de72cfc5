"""The step times of a deployment in the form that the kernel evaluates, exactly those of `bstar.latency`.

Operators are sorted by what their time depends on:

    tokens of the step alone            a table over the token budget
    positions that need logits alone    a table over max_num_seqs
    nothing but a decode batch          a table over max_num_seqs (padded to what was captured), for pure decode steps
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

from bstar.latency.step_model import StepModel, padding_s, smooth_max, step_model
from bstar.physics.statistics import FULL, Span, Statistic
from bstar.sim.kernel.cost import CACHED, DECODE, FIRST_SPAN, PROMPT, SEQUENCES, StepCost
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
# An operator with a rounded corner: compute and memory seconds per x, seconds of weights and of half_rows rows, phase.
_Row = tuple[Floats, Floats, float, float, int]

_TOKENS: Final = frozenset({("tokens", None), ("expert_tokens", None)})
_SAMPLED: Final = frozenset({("sampled", None)})
_DECODE_COUNTS: Final = frozenset({"tokens", "expert_tokens", "sampled", "sequences", "decode_tokens"})
_PHASE: Final[dict[Statistic, int]] = {("decode_tokens", None): 1, ("prefill_tokens", None): 2}


def step_cost(
    deployment: Deployment, *, max_tokens: int, max_sequences: int, one_rank: bool = False,
    model: StepModel | None = None, decode_tokens: int = 1,
) -> StepCost:  # fmt: skip
    """Step times of steps of up to `max_tokens` tokens of up to `max_sequences` sequences.

    one_rank   these are counts of one attention-data-parallel rank; else of the replica
    model      step times that differ from the deployment's own: a calibrated model
    decode_tokens   tokens of each decoding sequence: 1 + drafts in a verification step (drafting itself is not in it).
               Windows count at their fullest, the greater of cache and arithmetic is taken per key
    """
    ranks = deployment.parallel.attention_dp
    sorter = _Sorter(model or step_model(deployment), ranks, one_rank, float(decode_tokens))
    return sorter.cost(max_tokens, max_sequences)


class _Sorter:
    """One pass over the operators of a step model."""

    def __init__(self, model: StepModel, attention_dp: int, one_rank: bool, each: float) -> None:
        self.model, self.each = model, each
        self.statistics = model.step.statistics
        # What one more of a count adds to a statistic on a rank; experts see the tokens of all ranks.
        own, everybody = (1.0, float(attention_dp)) if one_rank else (1.0 / attention_dp, 1.0)
        self.unit = np.array([everybody if name == "expert_tokens" else own for name, _ in self.statistics])
        self.own, self.everybody = own, everybody
        spans = [s for name, s in self.statistics if s is not None and name.endswith("_prefill")]
        self.prompt_spans = list(dict.fromkeys(spans))
        self.width = FIRST_SPAN + 2 * len(self.prompt_spans)
        self.compute, self.activations, self.cache = model.rates[0], model.rates[1], model.rates[2]

    def cost(self, max_tokens: int, max_sequences: int) -> StepCost:
        m = self.model
        linear, fixed = np.zeros(self.width), np.zeros(3)
        reach: dict[tuple[int, bool], float] = {(0, False): 0.0}
        rows: list[_Row] = []
        streaming, rounded = set(m.streaming.tolist()), set(m.rounded.tolist())
        drafts = int(self.each - 1.0) * max_sequences
        by_tokens, by_sampled = (_Table(m, most + drafts, self.unit) for most in (max_tokens, max_sequences + 1))
        extra_s = 0.0
        for i in range(len(m.step.works)):
            row = self.statistics[int(m.row_index[i])]
            phase = _PHASE.get(row, 0)
            used = {self.statistics[j] for j in np.flatnonzero(self.compute[i] + self.activations[i] + self.cache[i])}
            if used <= _TOKENS and row in _TOKENS:
                by_tokens.add(i, rounded=i in rounded)
            elif used <= _SAMPLED and row in _SAMPLED:
                by_sampled.add(i, rounded=i in rounded)
            elif i in streaming:
                more, extra = self._decode_attention(i, reach)
                linear, extra_s = linear + more, extra_s + extra
                fixed[phase] += m.fixed_s[i] + m.weights_s[i]
            elif i in rounded:
                rows.append((self._over_x(self.compute[i]), self._over_x(self.activations[i] + self.cache[i]),
                             float(m.weights_s[i]), float(m.base_s[i]), phase))  # fmt: skip
                fixed[phase] += m.fixed_s[i]
            else:
                linear += self._over_x(self.activations[i] + self.cache[i])
                fixed[phase] += m.fixed_s[i] + m.weights_s[i]
            assert m.step.works[i].routing is None or used <= _TOKENS, "routed weights follow the tokens"
        decode = self._decode_steps(max_sequences + 1, extra_s)
        cost = self._assembled(by_tokens.seconds(), by_sampled.seconds(), decode, linear, fixed, reach, rows)
        return cost._replace(decode_tokens=int(self.each), decode_reach_s=extra_s)

    def _decode_steps(self, most: int, extra_s: float) -> Floats:
        """Seconds of decode steps of 1 … most sequences at no context, as the model has them; entry 0 is 0."""
        batch = np.arange(1.0, most + 1)
        counts = np.array([
            (1.0 if name == "sequences" else self.each) * float(name in _DECODE_COUNTS) for name, _ in self.statistics])
        values = np.multiply.outer(counts * self.unit, self.model.microbatch(batch))
        return np.concatenate([[0.0], self.model.expected_s(values) + extra_s * batch])

    def _over_x(self, rates: Floats) -> Floats:
        """Rates per statistic as rates per entry of x. Decode spans have no entry: they are handled apart."""
        out = np.zeros(self.width)
        for j in np.flatnonzero(rates):
            name, span = self.statistics[j]
            value = rates[j] * self.unit[j] / self.model.pipeline_stages
            if name in ("tokens", "expert_tokens"):
                out[DECODE] += value * self.each
                out[PROMPT] += value
            elif name == "decode_tokens":
                out[DECODE] += value * self.each
            elif name == "prefill_tokens":
                out[PROMPT] += value
            elif name in ("sequences", "sampled"):
                out[SEQUENCES] += value
                out[DECODE] += value * (self.each - 1.0) * (name == "sampled")
            elif name == "cached_prefill":
                out[CACHED] += value
            elif span is not None and name.endswith("_prefill"):
                at = FIRST_SPAN + 2 * self.prompt_spans.index(span) + (name == "keys_prefill")
                out[at] += value
            else:
                raise AssertionError(f"statistic {name} has no place in a prompt step")
        return out

    def _decode_attention(self, i: int, reach: dict[tuple[int, bool], float]) -> tuple[Floats, float]:
        """Decode attention: its rates per token of reach go into `reach`; returned are the rest per x, and per sequence
        what q > 1 tokens take beyond the reach of the first.

        They attend q·c − q(q − 1)/2 pairs and c keys at the context c of the last, q − 1 beyond that of the first.
        """
        rest, q = self.activations[i].copy(), self.each
        per_span: dict[Span, list[float]] = {}
        extra_s, pairs_more = 0.0, q * (q - 1.0) / 2.0
        for j, (name, span) in enumerate(self.statistics):
            if span is None or not name.endswith("_decode"):
                continue
            entry = per_span.setdefault(span, [0.0, 0.0, 0.0])
            share = self.unit[j] / self.model.pipeline_stages
            pairs = name == "pairs_decode"
            entry[0] += self.compute[i, j] * share * q
            entry[1] += self.cache[i, j] * share
            entry[2] += rest[j] * share * (q if pairs else 1.0)
            extra_s += rest[j] * share / span.stride * (pairs_more if pairs else q - 1.0)
            rest[j] = 0.0
        busy = {span: e for span, e in per_span.items() if any(e)}
        assert len(busy) <= 1 and not np.any(self.cache[i] * (rest != 0)), "decode attention sees one span"
        for span, (compute, cache, moved) in busy.items():
            key = (span.limit or 0, span.chunked and span.limit is not None)
            reach[key] = reach.get(key, 0.0) + (max(compute, cache) + moved) / span.stride
            extra_s += (compute * (q - 1.0) / 2.0 if compute > cache else cache * (q - 1.0)) / span.stride
        return self._over_x(rest), extra_s

    def _assembled(
        self, by_tokens: Floats, by_sampled: Floats, decode: Floats, linear: Floats, fixed: Floats,
        reach: dict[tuple[int, bool], float], rows: list[_Row],
    ) -> StepCost:  # fmt: skip
        m = self.model
        prompts = self.prompt_spans or [FULL]
        if not self.prompt_spans:
            linear = np.concatenate([linear, np.zeros(2)])
            rows = [(np.append(c, (0.0, 0.0)), np.append(y, (0.0, 0.0)), w, b, p) for c, y, w, b, p in rows]
        per_rank = m.microbatch(np.arange(1.0, len(by_tokens))) * self.own
        replayed = int(np.count_nonzero(~m.graphs.beyond(per_rank))) if m.graphs.mixed else 0
        return StepCost(
            decode_s=decode, span_rate=np.array(list(reach.values())),
            span_limit=np.array([limit for limit, _ in reach], dtype=np.int64),
            span_restarts=np.array([int(restarts) for _, restarts in reach], dtype=np.int64),
            token_s=by_tokens, sampled_s=by_sampled, linear=linear, prompt_fixed_s=float(fixed[2]),
            decode_fixed_s=float(fixed[1]), step_s=float(fixed[0] + m.layers_s),
            row_compute=np.array([r[0] for r in rows]).reshape(-1, len(linear)),
            row_memory=np.array([r[1] for r in rows]).reshape(-1, len(linear)),
            row_base=np.array([r[2] for r in rows]), row_compute_base=np.array([r[3] for r in rows]),
            row_phase=np.array([r[4] for r in rows], dtype=np.int64),
            power=m.smoothing, prompt_limit=np.array([s.limit or 0 for s in prompts], dtype=np.int64),
            prompt_restarts=np.array([int(s.chunked and s.limit is not None) for s in prompts], dtype=np.int64),
            prompt_gathers=np.array([int(s.gather) for s in prompts], dtype=np.int64),
            prompt_stride=np.array([float(s.stride) for s in prompts]),
            host_s=m.per_step_s * m.pipeline_stages, host_sequence_s=m.per_sequence_s * self.own / m.pipeline_stages,
            launch_s=m.launch_s, piece_s=m.piece_s, graph_tokens=replayed,
        )  # fmt: skip


class _Table:
    """Seconds by one count of a mixed step: the sum over operators that depend on nothing else."""

    def __init__(self, model: StepModel, most: int, unit: Floats) -> None:
        self.model, self.unit = model, unit
        self.count = model.microbatch(np.arange(1.0, most + 1))
        self.total, self.slope, self.constant = np.zeros(most), 0.0, 0.0
        self.busiest: tuple[Floats, Floats] | None = None

    def add(self, i: int, *, rounded: bool) -> None:
        """Count operator i."""
        m = self.model
        compute, memory = float(m.rates[0, i] @ self.unit), float((m.rates[1, i] + m.rates[2, i]) @ self.unit)
        self.constant += float(m.fixed_s[i])
        routed = np.flatnonzero(m.routed == i)
        if not routed.size and not rounded:
            self.slope, self.constant = self.slope + memory, self.constant + float(m.weights_s[i])
            return
        if not routed.size:
            own = compute * self.count
            self.total += smooth_max(
                own + padding_s(own, m.base_s[i]), memory * self.count + m.weights_s[i], m.smoothing)
            return
        if self.busiest is None:
            self.busiest = m.load.busiest(self.count * self.unit[m.step.expert_tokens_index])
        share, rows = self.busiest[0][routed[0]], self.busiest[1][routed[0]]
        activations, cache = float(m.rates[1, i] @ self.unit), float(m.rates[2, i] @ self.unit)
        own = compute * self.count * rows
        self.total += smooth_max(
            own + padding_s(own, m.base_s[i] * share),
            (activations * rows + cache) * self.count + m.weights_s[i] * share, m.smoothing)

    def seconds(self) -> Floats:
        """By count, from 0 (0 seconds)."""
        return np.concatenate([[0.0], self.total + self.slope * self.count + self.constant])
