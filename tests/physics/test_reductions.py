"""How often tensor-parallel ranks add up: twice a layer; once where attention and FFN, side by side, join first."""

from __future__ import annotations

import pytest

from bstar.codec.resolve import resolve_model
from bstar.physics.operators import compiled_step
from bstar.specs.formats import kv_format
from bstar.specs.parallel import ParallelSpec


@pytest.mark.parametrize(("model", "times"), [("llama-2-7b", 2), ("gpt-j-6b", 2), ("falcon-7b", 1), ("falcon-180b", 1)])
def test_all_reduces_of_a_layer(model: str, times: int) -> None:
    """vLLM: falcon.py reduces the sum of attention and FFN; gpt_j.py reduces each by itself."""
    spec = resolve_model(model)
    step = compiled_step(spec, ParallelSpec(tp=2), kv_format("auto", model_dtype=spec.dtype), "all")
    launches = sum(step.launches[i] for i, w in enumerate(step.works) if w.name == "allreduce")
    assert launches == times * spec.num_layers + 1  # and one for the embedding
