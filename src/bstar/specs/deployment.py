"""A model on devices behind an engine: everything a prediction needs."""

from __future__ import annotations

from dataclasses import dataclass

from bstar.specs.calibration import Calibration
from bstar.specs.device import DeviceSpec
from bstar.specs.engine import EngineSettings
from bstar.specs.formats import KvFormat, kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.parallel import ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One replica of an engine serving a model. Build it with `bstar.deployment(...)`.

    calibration   what a profile measured of it; None: the fitted constants hold
    """

    model: ModelSpec
    device: DeviceSpec
    parallel: ParallelSpec
    engine: EngineSettings
    calibration: Calibration | None = None

    @property
    def kv_format(self) -> KvFormat:
        """The KV cache format: the flag, else what the checkpoint asks for, else the model's dtype."""
        name = self.engine.kv_cache_dtype
        if name == "auto" and self.model.kv_cache_dtype is not None:
            name = self.model.kv_cache_dtype
        return kv_format(name, model_dtype=self.model.dtype)
