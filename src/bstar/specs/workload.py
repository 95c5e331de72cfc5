"""What users send: length distributions and the load they make. Sampling is in `bstar.traffic`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bstar.errors import SpecError

LengthKind = Literal["fixed", "uniform", "normal", "lognormal", "exponential", "zipf", "empirical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """A distribution of token counts, by its parameters.

    kind      "fixed" (mean), "uniform" (low..high inclusive), "normal" and "lognormal" (location,
              spread), "exponential" (location), "zipf" (low..high inclusive, spread), "empirical" (values)
    mean, cv  of the distribution as drawn: after clipping to [low, high] where that is asked for
    low, high the range of a uniform or a zipf; elsewhere the bounds that draws are clipped to (0: none, at least 1)
    location, spread  of the curve under the clipping: μ and σ of the normal, or of ln X of the lognormal;
              the mean of the exponential; spread is the exponent of the zipf
    Build one with `bstar.traffic.lengths.parse_lengths`.
    """

    kind: LengthKind
    mean: float
    cv: float = 0.0
    low: int = 0
    high: int = 0
    location: float = 0.0
    spread: float = 0.0
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.mean > 0 or self.mean == float("inf"):
            raise SpecError(f"length: the mean must be positive and finite, is {self.mean}")
        if not self.cv >= 0 or self.cv == float("inf"):
            raise SpecError(f"length: cv must not be negative, is {self.cv}")
        if self.kind in ("uniform", "zipf") and not 0 < self.low <= self.high:
            raise SpecError(f"length: {self.kind} needs 1 ≤ low ≤ high, has {self.low}-{self.high}")
        if self.kind == "empirical" and not self.values:
            raise SpecError("length: an empirical distribution needs at least one value")
        if self.kind not in ("uniform", "zipf") and self.high and self.high < max(self.low, 1):
            raise SpecError(f"length: max {self.high} is below min {max(self.low, 1)}")

    @property
    def second_moment(self) -> float:
        """E[X²] in tokens²."""
        return self.mean * self.mean * (1.0 + self.cv * self.cv)

    @property
    def is_fixed(self) -> bool:
        """Whether every draw is the same."""
        return self.cv == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests: their lengths and how they come.

    rate_per_s    open loop, requests per second (None: not an open loop)
    concurrency   closed loop, clients (None: not a closed loop)
    burstiness    gamma shape of the gaps: 1 Poisson, below 1 burstier (CV² = 1/burstiness)
    prefix_tokens / prefix_hit_fraction  prompt tokens shared between requests and how often they hit
    joint         paired (input, output) lengths of a trace; the distributions are then its marginals
    arrivals_s    when each of them came, ascending; empty where that is not known. `rate_per_s` rescales them
    """

    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    rate_per_s: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    prefix_tokens: int = 0
    prefix_hit_fraction: float = 0.0
    joint: tuple[tuple[int, int], ...] = ()
    arrivals_s: tuple[float, ...] = field(default=(), repr=False)
    name: str = ""

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise SpecError(f"rate: must be positive and finite, is {self.rate_per_s}")
        if self.concurrency is not None and self.concurrency < 1:
            raise SpecError(f"concurrency: must be at least 1, is {self.concurrency}")
        if self.rate_per_s is not None and self.concurrency is not None:
            raise SpecError("concurrency: a load is an open loop (rate) or a closed loop (concurrency); give one")
        if not 0 < self.burstiness < float("inf"):
            raise SpecError(f"burstiness: must be positive and finite, is {self.burstiness}")
        if self.prefix_tokens < 0:
            raise SpecError(f"prefix tokens: must not be negative, is {self.prefix_tokens}")
        if not 0 <= self.prefix_hit_fraction <= 1:
            raise SpecError(f"prefix hit fraction: must be in [0, 1], is {self.prefix_hit_fraction}")

    @property
    def gap_cv_squared(self) -> float:
        """Squared coefficient of variation of the gaps between arrivals, 1/burstiness."""
        return 1.0 / self.burstiness

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
