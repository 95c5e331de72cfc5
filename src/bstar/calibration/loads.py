"""The load that a harness put on the server of a measured point."""

from __future__ import annotations

from math import ceil, floor

from bstar.calibration.point import Point
from bstar.specs.workload import LengthDistribution
from bstar.traffic import Traffic, closed_loop
from bstar.traffic.lengths import parse_lengths

# InferenceX: prompts for each client, and the shortest length as a share of the nominal one (benchmark_serving.py with
# --num-prompts 10·C, --random-range-ratio 0.8). Its 2·C warm-up requests have ended before the first of them is sent.
_PROMPTS_PER_CLIENT = 10
_SHORTEST = 0.8
# Of the others, whose load is not documented: requests for each client that are left out of the means.
_WARM_UP_PER_CLIENT = 2


def load_of(point: Point, clients: int | None = None, *, period_s: float = 0.0, seed: int = 0) -> Traffic:
    """The requests that `clients` (None: all) of the point's clients sent, in a closed loop.

    inferencex   lengths uniform in [0.8·L, L], all clients at once at first, which counts
    others       fixed lengths; clients that begin together would stay in step for ever, so they begin spread over
                 `period_s` seconds (about one request's), and their first requests do not count
    """
    count = point.concurrency if clients is None else clients
    if point.harness == "inferencex":
        return closed_loop(count, _lengths(point.input_tokens, _SHORTEST), _lengths(point.output_tokens, _SHORTEST),
                           _PROMPTS_PER_CLIENT * count, seed=seed)  # fmt: skip
    return closed_loop(
        count, _lengths(point.input_tokens, 1.0), _lengths(point.output_tokens, 1.0), _PROMPTS_PER_CLIENT * count,
        seed=seed, start="even", start_s=period_s, warmup_requests=_WARM_UP_PER_CLIENT * count)


def _lengths(nominal: float, shortest: float) -> LengthDistribution:
    """Uniform from `shortest` of the nominal length to all of it; a mean that is not whole: both lengths beside it."""
    low, high = floor(shortest * nominal), floor(nominal) if shortest < 1.0 else ceil(nominal)
    return parse_lengths(f"{max(low, 1)}" if low >= high else f"uniform:{max(low, 1)}-{high}", field="tokens")
