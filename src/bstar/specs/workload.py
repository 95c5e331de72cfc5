"""What users send: length distributions and the load they make. Sampling is in `bstar.traffic`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bstar.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """A distribution of token counts, by its parameters.

    kind      "fixed" (value), "uniform" (low..high inclusive), "normal" (mean, cv),
              "lognormal" (mean, cv), "empirical" (values)
    """

    kind: Literal["fixed", "uniform", "normal", "lognormal", "empirical"]
    mean: float
    cv: float = 0.0
    low: int = 0
    high: int = 0
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.mean > 0:
            raise SpecError(f"length: the mean must be positive, is {self.mean}")
        if self.cv < 0:
            raise SpecError(f"length: cv must not be negative, is {self.cv}")
        if self.kind == "uniform" and not 0 < self.low <= self.high:
            raise SpecError(f"length: uniform needs 1 ≤ low ≤ high, has {self.low}-{self.high}")

    @property
    def second_moment(self) -> float:
        """E[X²] in tokens²."""
        return self.mean * self.mean * (1.0 + self.cv * self.cv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests: their lengths and how they come.

    rate_per_s    open loop, requests per second (None: not an open loop)
    concurrency   closed loop, clients (None: not a closed loop)
    burstiness    gamma shape of the gaps: 1 Poisson, below 1 burstier (CV² = 1/burstiness)
    prefix_tokens / prefix_hit_fraction  prompt tokens shared between requests and how often they hit
    joint         paired (input, output) lengths of a trace; the distributions are then its marginals
    """

    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    rate_per_s: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    prefix_tokens: int = 0
    prefix_hit_fraction: float = 0.0
    joint: tuple[tuple[int, int], ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise SpecError(f"rate: must be positive, is {self.rate_per_s}")
        if self.concurrency is not None and self.concurrency < 1:
            raise SpecError(f"concurrency: must be at least 1, is {self.concurrency}")
        if not self.burstiness > 0:
            raise SpecError(f"burstiness: must be positive, is {self.burstiness}")
        if not 0 <= self.prefix_hit_fraction <= 1:
            raise SpecError(f"prefix hit fraction: must be in [0, 1], is {self.prefix_hit_fraction}")

    @property
    def mean_decode_context_tokens(self) -> float:
        """Mean context that a decode step sees: E[O·(I + O/2)] / E[O].

        A request with output O is decoded for O steps at contexts I … I + O; long answers weigh more.
        """
        if self.joint:
            weight = sum(o for _, o in self.joint)
            return sum(o * (i + o / 2) for i, o in self.joint) / weight
        o = self.output_tokens
        return self.input_tokens.mean + o.second_moment / (2 * o.mean)

    @property
    def mean_full_context_tokens(self) -> float:
        """Mean length of a finished request, I + O."""
        return self.input_tokens.mean + self.output_tokens.mean
