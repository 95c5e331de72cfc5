"""The load that a harness put on the server of a measured point."""

from __future__ import annotations

from math import ceil, floor

from bstar.calibration.point import Point
from bstar.specs.workload import LengthDistribution
from bstar.traffic import Traffic, closed_loop
from bstar.traffic.lengths import parse_lengths

# Prompts for each client (benchmark_serving.py with --num-prompts 10·C; its 2·C warm-up requests have ended before the
# first of them is sent), and InferenceX's shortest length as a share of the nominal one (--random-range-ratio 0.8).
_PROMPTS_PER_CLIENT = 10
_SHORTEST = 0.8


def load_of(point: Point, clients: int | None = None, *, seed: int = 0) -> Traffic:
    """The requests that `clients` (None: all) of the point's clients sent: all at once at first, then in closed loop.

    inferencex   lengths uniform in [0.8·L, L]
    others       fixed lengths
    """
    count = point.concurrency if clients is None else clients
    shortest = _SHORTEST if point.harness == "inferencex" else 1.0
    return closed_loop(count, _lengths(point.input_tokens, shortest), _lengths(point.output_tokens, shortest),
                       _PROMPTS_PER_CLIENT * count, seed=seed)  # fmt: skip


def _lengths(nominal: float, shortest: float) -> LengthDistribution:
    """Uniform from `shortest` of the nominal length to all of it; a mean that is not whole: both lengths beside it."""
    low, high = floor(shortest * nominal), floor(nominal) if shortest < 1.0 else ceil(nominal)
    return parse_lengths(f"{max(low, 1)}" if low >= high else f"uniform:{max(low, 1)}-{high}", field="tokens")
