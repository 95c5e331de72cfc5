"""One step at a time, fast: the same seconds as `StepModel` has them, in a few small products.

Operators without a rounded corner add up to one row; what depends on which operators run at all (their weights, their
fixed times) is kept per pattern of counts that are not zero, of which a deployment sees a handful.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import cbrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bstar.latency.step_model import StepModel

FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class _Pattern:
    """Of the operators that run: seconds of the constants of the plain ones; per rounded one its padding and its
    weights; light weights of all; each without routed experts, which follow per routed operator."""

    constant: float
    base: FloatArray
    weights: FloatArray
    light_weights: FloatArray


class ScalarSteps:
    """`StepModel.expected_s` and `floor_s` of single steps."""

    def __init__(self, model: StepModel) -> None:
        n, self.model = len(model.weights_s), model
        self.rounded, streaming = model.rounded, model.streaming
        plain = np.ones(n, dtype=bool)
        plain[self.rounded] = plain[streaming] = False
        memory = model.rates[1] + model.rates[2]
        r, s = len(self.rounded), len(streaming)
        self.rows = np.concatenate([
            memory[plain].sum(axis=0, keepdims=True), model.rates[1][streaming].sum(axis=0, keepdims=True),
            model.reach_activations[None, :], model.rates[0][self.rounded], memory[self.rounded],
            model.rates[0][streaming], model.rates[2][streaming], model.rates[3], model.rates[4],
        ])  # fmt: skip
        self.ends = np.cumsum([3, r, r, s, s, n, n])
        self.padding = np.zeros(len(self.rows))
        self.padding[: 3 + 2 * r] = np.concatenate([
            [model.rates[1][plain, model.tokens_index].sum(), model.rates[1][streaming, model.tokens_index].sum(), 0.0],
            model.rates[0][self.rounded, model.tokens_index], model.rates[1][self.rounded, model.tokens_index],
        ])  # fmt: skip
        self.sizes: list[float] = model.graphs.sizes.tolist()
        self.kinds = sorted(set(model.row_index.tolist()))
        self.patterns: dict[tuple[bool, ...], _Pattern] = {}
        place = {i: k for k, i in enumerate(self.rounded.tolist())}
        self.routed = [(place[i], i) for i in model.routed.tolist()]
        self.pieces, self.plain_ops = model.graphs.pieces, plain

    def _pattern(self, key: tuple[bool, ...]) -> _Pattern:
        m = self.model
        running = dict(zip(self.kinds, key, strict=True))
        active = np.array([running[j] for j in m.row_index.tolist()], dtype=float)
        stream = np.zeros(len(active))
        stream[m.streaming] = 1.0
        constant = float((active * (m.fixed_s + (self.plain_ops + stream) * m.weights_s)).sum())
        found = _Pattern(
            constant=constant + m.layers_s, base=(m.base_s * active)[self.rounded],
            weights=(m.weights_s * active)[self.rounded], light_weights=m.light_weights_s * active,
        )  # fmt: skip
        self.patterns[key] = found
        return found

    def seconds(self, values: FloatArray) -> tuple[float, float]:
        """(expected, floor) seconds of one step with these statistics, (statistics,)."""
        m = self.model
        key = tuple([values[j] > 0.0 for j in self.kinds])
        pattern = self.patterns.get(key) or self._pattern(key)
        tokens, prompts = float(values[m.tokens_index]), bool(values[m.prefill_index] > 0.0)
        y = self.rows @ values
        beyond = not self.sizes or tokens > self.sizes[-1] * (1.0 + 1e-9)
        if not prompts and not beyond and tokens > 0.0:
            size = self.sizes[min(bisect_left(self.sizes, tokens * (1.0 - 1e-9)), len(self.sizes) - 1)]
            if size != tokens:
                y += self.padding * (size - tokens)
        a, b, c, d, e, f, g = self.ends.tolist()
        compute, memory = y[a:b], y[b:c] + pattern.weights
        compute = compute + compute * pattern.base / np.maximum(compute + pattern.base, 1e-30)
        light_read = pattern.light_weights
        if self.routed:
            light_read = light_read.copy()
            shares, rows = self._routed(values)
            for (k, i), (share, read), factor in zip(self.routed, shares, rows, strict=True):
                own, most = float(y[a + k]) * factor, float(pattern.base[k]) * share
                compute[k] = own + own * most / max(own + most, 1e-30)
                # Activations follow the rows; of the cache routed experts read nothing.
                memory[k] = y[b + k] * factor + pattern.weights[k] * share
                light_read[i] *= read
        if m.smoothing == 3.0:
            body = float(np.cbrt(compute * compute * compute + memory * memory * memory).sum())
        else:
            body = float(((compute**m.smoothing + memory**m.smoothing) ** (1.0 / m.smoothing)).sum())
        attended = float(np.maximum(y[c:d], y[d:e]).sum())
        kernels = float(y[0] + y[1]) + pattern.constant + body + attended
        launching = m.launch_s if beyond or (prompts and not m.graphs.mixed) else (
            m.piece_s if prompts or self.pieces else 0.0)
        if launching:
            reach = attended + float(y[2])
            rest, power = kernels - reach, m.smoothing
            kernels = reach + (cbrt(rest**3 + launching**3) if power == 3.0 else (
                rest**power + launching**power) ** (1.0 / power))
        engine = m.per_step_s * m.pipeline_stages + m.per_sequence_s * float(values[m.sequences_index])
        floor = float(np.maximum(y[e:f], y[f:g] + light_read).sum())
        return kernels + engine, floor

    def _routed(self, values: FloatArray) -> tuple[list[tuple[float, float]], list[float]]:
        """Per routed operator: (share read on the busiest rank, mean share), rows of the busiest over the mean."""
        tokens = float(values[self.model.step.expert_tokens_index])
        return self.model.load.scalar(tokens)
