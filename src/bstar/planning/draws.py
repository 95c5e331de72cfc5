"""A fixed set of requests that stands for a workload: stratified points instead of random numbers.

Every prediction of the planner is an average over the same points, so that a candidate at a higher rate is
worse on each point and comparisons are not blurred by luck (common random numbers). Each coordinate is
stratified: its marginal is exact to 1/count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.specs.workload import Workload
from bstar.traffic.lengths import longest, normal_quantile, quantile

Floats = NDArray[np.float64]
COUNT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraws:
    """Points of shape (count,).

    input_tokens, output_tokens   lengths; `cached_tokens` of the prompt come from the prefix cache
    new_tokens, pairs             prompt tokens to compute (at least 1), and the (query, key) pairs they attend
    crowd, wait, phase            uniform ranks of: how many are in flight, the prefill queue, the step's age
    crowd_z, wait_z               the same ranks as standard normals
    weighted_new_tokens           mean over tokens, not requests: E[q²]/E[q]
    stall_z, company_z            standard normals of the prefills of others: while it decodes, in its first steps
    """

    input_tokens: Floats
    cached_tokens: Floats
    output_tokens: Floats
    new_tokens: Floats
    pairs: Floats
    crowd: Floats
    wait: Floats
    phase: Floats
    stall_z: Floats
    company_z: Floats
    crowd_z: Floats
    wait_z: Floats
    mean_new_tokens: float
    mean_pairs: float
    weighted_new_tokens: float
    mean_decode_tokens: float

    @property
    def decode_tokens(self) -> Floats:
        """Decode steps of a request: the first output token comes from the prefill."""
        return self.output_tokens - 1.0


def request_draws(workload: Workload, *, count: int = COUNT) -> RequestDraws:
    """`count` points of a workload. A trace's pairs are thinned along their total length, pairs kept together.

    Raises SpecError where the shared prefix is longer than the mean prompt.
    """
    if workload.prefix_tokens > workload.input_tokens.mean:
        raise SpecError(f"prefix: {workload.prefix_tokens:,} tokens are more than the mean prompt of "
                        f"{workload.input_tokens.mean:,.0f}, which counts the prefix too; raise the input length "
                        "or shorten the prefix")
    rng = np.random.default_rng(20_260)

    def ranks() -> Floats:
        return np.asarray(rng.permutation((np.arange(count) + 0.5) / count), dtype=np.float64)

    if workload.joint:
        inputs, outputs = _thin(np.asarray(workload.joint, dtype=np.float64), ranks())
    else:
        inputs = quantile(workload.input_tokens, ranks())
        outputs = quantile(workload.output_tokens, ranks())
    hits = ranks() < workload.prefix_hit_fraction
    # At least one prompt token is always computed, even if the whole prompt is cached.
    crowd, wait = ranks(), ranks()
    cached = np.where(hits, np.minimum(workload.prefix_tokens, inputs - 1.0), 0.0)
    cached = np.maximum(cached, 0.0)
    new = np.maximum(inputs - cached, 1.0)
    pairs = new * cached + new * (new + 1.0) / 2.0
    return RequestDraws(
        input_tokens=inputs, cached_tokens=cached, output_tokens=outputs, new_tokens=new, pairs=pairs,
        mean_new_tokens=float(new.mean()), mean_pairs=float(pairs.mean()),
        weighted_new_tokens=float((new * new).mean() / new.mean()), mean_decode_tokens=float(outputs.mean() - 1.0),
        crowd=crowd, wait=wait,
        crowd_z=normal_quantile(crowd), wait_z=normal_quantile(wait), phase=ranks(), stall_z=normal_quantile(ranks()),
        company_z=normal_quantile(ranks()),
    )  # fmt: skip


def _thin(pairs: Floats, rank: Floats) -> tuple[Floats, Floats]:
    ordered = pairs[np.argsort(pairs.sum(axis=1), kind="stable")]
    chosen = ordered[np.minimum((rank * len(ordered)).astype(np.int64), len(ordered) - 1)]
    return chosen[:, 0], chosen[:, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthNeeds:
    """How long sequences get.

    longest_tokens   the longest one to make room for: the maximum where there is one, else about p99.9
    p99_tokens       99 % of the requests end within this
    """

    longest_tokens: int
    p99_tokens: int


def length_needs(workload: Workload, draws: RequestDraws) -> LengthNeeds:
    """Longest and p99 length of input + output."""
    if workload.joint:
        longest_sum = float(max(i + o for i, o in workload.joint))
    else:
        longest_sum = longest(workload.input_tokens) + longest(workload.output_tokens)
    totals = draws.input_tokens + draws.output_tokens
    if not np.isfinite(longest_sum):
        raise SpecError("lengths: a length is not finite")
    return LengthNeeds(longest_tokens=int(longest_sum), p99_tokens=int(np.quantile(totals, 0.99)))
