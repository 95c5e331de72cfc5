"""Traffic: length distributions, arrivals, sessions and request traces; named random streams.

    import bstar
    load = bstar.traffic.poisson(rate_per_s=6.5, input_tokens="lognormal:mean=900,cv=1.1", output_tokens=200,
                                 num_requests=10_000, seed=0)

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bstar.traffic.arrivals import Gaps
    from bstar.traffic.conversations import sessions
    from bstar.traffic.export import write_trace
    from bstar.traffic.generators import (
        closed_loop,
        constant,
        from_workload,
        gamma,
        poisson,
        ramp_up,
        varying,
        weibull,
    )
    from bstar.traffic.joint import JointLengths, correlated, pairs
    from bstar.traffic.load import BlockHashes, Traffic
    from bstar.traffic.mixing import merge
    from bstar.traffic.prefixes import PrefixGroups, prefix_groups
    from bstar.traffic.rates import RateCurve
    from bstar.traffic.replay import from_trace
    from bstar.traffic.times import TimeDistribution
    from bstar.traffic.traces import Trace, read_trace

_NAMES = {
    "BlockHashes": "load", "Gaps": "arrivals", "JointLengths": "joint", "PrefixGroups": "prefixes",
    "RateCurve": "rates", "TimeDistribution": "times", "Trace": "traces", "Traffic": "load",
    "closed_loop": "generators", "constant": "generators", "correlated": "joint", "from_trace": "replay",
    "from_workload": "generators", "gamma": "generators", "merge": "mixing", "pairs": "joint",
    "poisson": "generators", "prefix_groups": "prefixes", "ramp_up": "generators", "read_trace": "traces",
    "sessions": "conversations", "varying": "generators", "weibull": "generators", "write_trace": "export",
}  # fmt: skip

__all__ = [
    "BlockHashes",
    "Gaps",
    "JointLengths",
    "PrefixGroups",
    "RateCurve",
    "TimeDistribution",
    "Trace",
    "Traffic",
    "closed_loop",
    "constant",
    "correlated",
    "from_trace",
    "from_workload",
    "gamma",
    "merge",
    "pairs",
    "poisson",
    "prefix_groups",
    "ramp_up",
    "read_trace",
    "sessions",
    "varying",
    "weibull",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'bstar.traffic' has no attribute {name!r}")
    value = getattr(import_module(f"bstar.traffic.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
