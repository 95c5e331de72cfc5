"""Input and output lengths drawn together: as a trace has them, or from two marginals with a correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bstar.errors import SpecError
from bstar.specs.workload import LengthDistribution
from bstar.traffic.lengths import CHUNK, Ints, from_normal, parse_lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointLengths:
    """Pairs (input, output), equally likely, or two marginals under a Gaussian copula.

    input_tokens, output_tokens   the pairs, shape (k,) each; or
    marginals, correlation        of the two normals under the copula, in [-1, 1]
    """

    input_tokens: Ints | None = None
    output_tokens: Ints | None = None
    marginals: tuple[LengthDistribution, LengthDistribution] | None = None
    correlation: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """`count` independent pairs."""
        if self.marginals is None:
            assert self.input_tokens is not None and self.output_tokens is not None
            index = rng.integers(0, self.input_tokens.size, count)
            return self.input_tokens[index], self.output_tokens[index]
        first, second = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            z = rng.standard_normal((2, part.stop - part.start))
            z[1] = self.correlation * z[0] + math.sqrt(1.0 - self.correlation**2) * z[1]
            first[part] = from_normal(self.marginals[0], z[0])
            second[part] = from_normal(self.marginals[1], z[1])
        return first, second


def pairs(input_tokens: Sequence[int] | Ints, output_tokens: Sequence[int] | Ints) -> JointLengths:
    """The given (input, output) pairs, equally likely: a trace's lengths with their dependence."""
    source, target = np.asarray(input_tokens, dtype=np.int64), np.asarray(output_tokens, dtype=np.int64)
    if source.shape != target.shape or source.ndim != 1 or source.size == 0:
        raise SpecError("lengths: joint lengths need as many inputs as outputs, and at least one")
    if min(int(source.min()), int(target.min())) < 1:
        raise SpecError("lengths: a request has at least 1 input and 1 output token")
    return JointLengths(input_tokens=source, output_tokens=target)


def correlated(
    input_tokens: int | str | LengthDistribution, output_tokens: int | str | LengthDistribution, correlation: float
) -> JointLengths:
    """Two marginals joined by a Gaussian copula; `correlation` is that of the normals under it.

    For two lognormals it is the correlation of their logarithms.
    """
    if not -1 <= correlation <= 1:
        raise SpecError(f"correlation: must be in [-1, 1], is {correlation}")
    ends = [d if isinstance(d, LengthDistribution) else parse_lengths(str(d), field=f)
            for d, f in ((input_tokens, "input_tokens"), (output_tokens, "output_tokens"))]  # fmt: skip
    return JointLengths(marginals=(ends[0], ends[1]), correlation=correlation)
