"""Speculative decoding: what a draft takes, and a step that verifies drafts.

A step of k drafts verifies 1 + k tokens of every sequence in one forward pass, after the checkpoint's own prediction
layer (or another drafter) made the k one after another. A prediction layer is one decoder layer of the model's last
group that reads two hidden states (embedding and last hidden state, joined by one product of 2h × h, here left out:
under 1 % of an expert layer) and the shared head.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from bstar.errors import SpecError
from bstar.latency.constants import Constants, constants_for
from bstar.latency.step_model import StepModel, step_model
from bstar.physics.batch import BatchShape
from bstar.specs.deployment import Deployment

_CACHE: OrderedDict[tuple[int, int], tuple[Deployment, Constants, StepModel]] = OrderedDict()
_CACHE_SIZE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """Seconds of one step that drafts and verifies: drafting_s of all drafts, verifying_s of the forward pass."""

    drafting_s: float
    verifying_s: float

    @property
    def total_s(self) -> float:
        return self.drafting_s + self.verifying_s


def prediction_model(deployment: Deployment, constants: Constants | None = None) -> StepModel:
    """The step model of the checkpoint's prediction layer: one layer of the last group, embedding and head.

    What the engine does once a step (`step_s`, `sequence_s`) is the verifying step's.
    """
    base = constants_for(deployment) if constants is None else constants
    key = id(deployment), id(base)
    found = _CACHE.get(key)
    if found is not None and found[0] is deployment and found[1] is base:
        return found[2]
    last = deployment.model.layers[-1]
    model = replace(deployment.model, layers=(replace(last, indices=(0,)),), blocks=())
    parallel = replace(deployment.parallel, pp=1)
    alone = replace(deployment, model=model, parallel=parallel)
    made = step_model(alone, base.replace(step_s=0.0, sequence_s=0.0))
    _CACHE[key] = (deployment, base, made)
    if len(_CACHE) > _CACHE_SIZE:
        _CACHE.popitem(last=False)
    return made


def speculative_step(
    deployment: Deployment, batch: float, context: float, *, drafts: int, constants: Constants | None = None
) -> SpeculativeStep:
    """A step of `batch` sequences at `context` tokens that makes and verifies `drafts` drafts each.

    The drafts come from the checkpoint's prediction layer. Raises SpecError where drafts is negative.
    """
    if drafts < 0:
        raise SpecError(f"drafts: must not be negative, is {drafts}")
    model = step_model(deployment, constants)
    share = model.stage_batch(batch)
    shape = BatchShape.decode(share, context + drafts, tokens_per_sequence=1.0 + drafts)
    verifying_s, _ = model.scalar.seconds(model.step.values(shape))
    if not drafts:
        return SpeculativeStep(drafting_s=0.0, verifying_s=verifying_s)
    drafter = prediction_model(deployment, constants)
    draft_s, _ = drafter.scalar.seconds(drafter.step.decode_values(context) * batch)
    return SpeculativeStep(drafting_s=drafts * draft_s, verifying_s=verifying_s)
