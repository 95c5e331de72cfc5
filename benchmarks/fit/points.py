"""The measured points that are fitted: what is held out together, and what is left out, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from parameters import ERAS, Cell

from bstar.calibration.bundled import SERVING, bundled_points
from bstar.calibration.point import Point
from bstar.calibration.points import deployment_of
from bstar.latency.constant_values import generation_name
from bstar.specs.deployment import Deployment
from bstar.specs.engine import EngineSettings

# Runs that no steady state explains: (engine, GPU, model, versions or dates that begin so, reason). Never fitted; they
# stay in every error that is reported.
_UNSTEADY = (
    ("sglang", "b200", "DeepSeek", "2025-11", "kernels are compiled inside the timed run: TTFT of 5-9 s at 4 clients"),
    ("sglang", "b300", "DeepSeek", "2026-04-17", "prefill 5-8 times slower than on B200: a fallback kernel"),
    ("trtllm", "gb200", "Qwen3-32B", "2026-03", "TPOT 42, 28, 41, 29 ms at 2, 8, 16, 32 clients"),
    ("trtllm", "b200", "DeepSeek", "2026-03-17", "TPOT 87 ms where the runs beside it have 17"),
)  # fmt: skip
_FAMILIES = ("DeepSeek", "Qwen3-235B", "Qwen3-32B", "Qwen3.5", "Llama-3.1-70B", "gpt-oss", "MiniMax")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPoint:
    """A measured point and what it is grouped by. unsteady: why it is not fitted."""

    point: Point
    deployment: Deployment
    engine: str
    generation: str
    era: str
    family: str
    unsteady: str | None

    @property
    def cell(self) -> Cell:
        return self.engine, self.generation, self.era

    @property
    def group(self) -> str:
        """GPU × engine × model: what is held out together."""
        return f"{self.point.gpu}|{self.engine}|{self.family}"


def family_of(model: str) -> str:
    """Models with the same weights but for their training, or their format."""
    return next((f for f in _FAMILIES if f in model), model.rpartition("/")[2])


def unsteady(point: Point) -> str | None:
    """Why the run that a point belongs to is not fitted."""
    for engine, gpu, model, date, reason in _UNSTEADY:
        if (point.engine == engine and point.gpu.startswith(gpu) and model in point.model
                and point.measured_on.startswith(date)):  # fmt: skip
            return reason
    return None


def fit_points(*, every: int = 1) -> list[FitPoint]:
    """The bundled aggregated serving points with certain labels."""
    out = []
    for point in [p for p in bundled_points(SERVING) if not p.is_disaggregated and p.counts and p.tpot_s][::every]:
        deployment = deployment_of(point)
        out.append(FitPoint(
            point=point, deployment=deployment, engine=deployment.engine.name,
            generation=generation_name(deployment.device.compute_capability), era=_era(deployment.engine),
            family=family_of(point.model), unsteady=unsteady(point)))  # fmt: skip
    return out


def _era(engine: EngineSettings) -> str:
    """The release that the engine is older than, of those that matter; ""."""
    before = ERAS.get(engine.name)
    version = engine.version_tuple
    return before if before and version and version < tuple(int(n) for n in before.split(".")) else ""


def folds(points: list[FitPoint], seed: int) -> dict[str, NDArray[np.int64]]:
    """Ways to hold out, each as a fold number per point.

    known     a random fifth of every group: others of the same GPU × engine × model are seen
    group     a GPU × engine × model
    family    a model, on every GPU and engine
    machine   a GPU × engine, every model on it
    """
    def numbered(names: list[str]) -> NDArray[np.int64]:
        return np.unique(np.array(names), return_inverse=True)[1].astype(np.int64)

    known = np.empty(len(points), dtype=np.int64)
    groups, rng = numbered([p.group for p in points]), np.random.default_rng(seed)
    for group in np.unique(groups):
        inside = np.flatnonzero(groups == group)
        known[rng.permutation(inside)] = np.arange(inside.size) % 5
    return {"known": known, "group": groups, "family": numbered([p.family for p in points]),
            "machine": numbered([f"{p.point.gpu}|{p.engine}" for p in points])}
