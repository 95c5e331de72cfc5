"""bstar: the capacity planner for LLM serving.

Names are imported when they are first used, so that `import bstar` costs a few milliseconds:

    import bstar
    d = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", max_num_seqs=256)
    bstar.memory(d).kv_cache_tokens
    bstar.explain(d, 8192)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bstar import (
        calibration,
        catalog,
        codec,
        errors,
        latency,
        metrics,
        physics,
        planning,
        queueing,
        sim,
        specs,
        traffic,
        units,
    )
    from bstar.calibration.few_points import calibrate
    from bstar.calibration.profile import Profile
    from bstar.codec.resolve import resolve_model as model
    from bstar.interfaces.deployments import deployment
    from bstar.physics.memory import memory_budget as memory
    from bstar.planning.plan import plan
    from bstar.planning.sheet import explain
    from bstar.sim.run import simulate
    from bstar.specs.deployment import Deployment
    from bstar.specs.model import ModelSpec
    from bstar.specs.parallel import ParallelSpec
    from bstar.specs.slo import Slo
    from bstar.specs.workload import Workload

__version__ = "0.1.0"

# public name -> (module, attribute)
_NAMES: dict[str, tuple[str, str]] = {
    "deployment": ("bstar.interfaces.deployments", "deployment"),
    "model": ("bstar.codec.resolve", "resolve_model"),
    "memory": ("bstar.physics.memory", "memory_budget"),
    "explain": ("bstar.planning.sheet", "explain"),
    "plan": ("bstar.planning.plan", "plan"),
    "simulate": ("bstar.sim.run", "simulate"),
    "calibrate": ("bstar.calibration.few_points", "calibrate"),
    "Profile": ("bstar.calibration.profile", "Profile"),
    "Deployment": ("bstar.specs.deployment", "Deployment"),
    "ModelSpec": ("bstar.specs.model", "ModelSpec"),
    "ParallelSpec": ("bstar.specs.parallel", "ParallelSpec"),
    "Slo": ("bstar.specs.slo", "Slo"),
    "Workload": ("bstar.specs.workload", "Workload"),
}
_ROOMS = ("calibration", "catalog", "codec", "errors", "latency", "metrics", "physics", "planning", "queueing", "sim",
          "specs", "traffic", "units")

__all__ = [
    "Deployment",
    "ModelSpec",
    "ParallelSpec",
    "Profile",
    "Slo",
    "Workload",
    "__version__",
    "calibrate",
    "calibration",
    "catalog",
    "codec",
    "deployment",
    "errors",
    "explain",
    "latency",
    "memory",
    "metrics",
    "model",
    "physics",
    "plan",
    "planning",
    "queueing",
    "sim",
    "simulate",
    "specs",
    "traffic",
    "units",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"bstar.{name}")
    entry = _NAMES.get(name)
    if entry is None:
        raise AttributeError(f"module 'bstar' has no attribute {name!r}")
    value = getattr(import_module(entry[0]), entry[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
