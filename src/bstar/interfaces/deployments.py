"""`bstar.deployment(...)`: the DEPLOY flags as keywords, checked against the model and fitted to the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bstar.codec.engine_values import AUTO_LENGTH
from bstar.errors import SpecError
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec
from bstar.specs.model import ModelSpec


def deployment(model: str | ModelSpec, gpu: str | DeviceSpec, **flags: Any) -> Deployment:
    """One replica of an engine: a model on GPUs with its flags, every unset one at the engine's default.

        bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", tp=2, max_num_seqs=256)

    Flags are those of `bstar.codec.build.build_deployment`; max_model_len="auto" (or -1) takes as many
    tokens as the KV space holds, as vLLM does. profile: a `bstar.calibrate`d profile or its file; every prediction of
    the deployment then uses it. Raises SpecError where the engine would refuse the layout, or where the profile is of
    another model, GPU or engine.
    """
    from bstar.codec.build import build_deployment
    from bstar.physics.partition import check_parallel

    profile = flags.pop("profile", None)
    wanted = flags.get("max_model_len")
    if isinstance(wanted, str):
        from bstar.codec.engine_values import max_model_len

        wanted = flags["max_model_len"] = max_model_len(wanted)
    built = build_deployment(model, gpu, **flags)
    reasons = check_parallel(built.model, built.parallel, built.engine)
    if reasons:
        raise SpecError(reasons[0])
    if profile is not None:
        from bstar.calibration.profile import as_profile, calibrated

        built = calibrated(built, as_profile(profile))
    return _fitted_length(built) if wanted == AUTO_LENGTH else built


def _fitted_length(built: Deployment) -> Deployment:
    """The same deployment with the longest max_model_len that one request can use; unchanged where nothing fits."""
    from bstar.physics.memory import memory_budget

    budget = memory_budget(built)
    if budget.fits:
        return built
    fitted = _with_length(built, max(1, min(budget.longest_request_tokens, built.engine.max_model_len)))
    return fitted if memory_budget(fitted).fits else built


def _with_length(built: Deployment, length: int) -> Deployment:
    return replace(built, engine=replace(built.engine, max_model_len=length))
