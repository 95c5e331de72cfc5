"""Whether what a row's labels name can have run: what the memory and the model's shape say of it."""

from __future__ import annotations

from typing import Final

from bstar.calibration.point import Point
from bstar.errors import SpecError
from bstar.physics.kv_cache import kv_bytes_per_sequence
from bstar.physics.loading import loaded_weight_bytes
from bstar.physics.partition import check_parallel
from bstar.specs.deployment import Deployment
from bstar.units import format_bytes

# A cache so many times a GPU's memory is no error of the memory model.
_MOST_MEMORY: Final = 100.0


def is_the_rows(*deployments: Deployment) -> bool:
    """Whether what runs can be what the row means. GPUs of a mixture of experts can be laid out in ways that labels do
    not name; those of a dense model cannot, so a label that is impossible for one is wrong."""
    for deployment in deployments:
        for note in deployment.engine.notes:
            if note.startswith("weight dtype") and "is not known" in note:
                return False
            if note.startswith("layout taken as") and not deployment.model.is_moe:
                return False
    return True


def latency_doubts(point: Point, deployment: Deployment) -> tuple[str, ...]:
    """What no run can have been. Raises SpecError for a batch that no memory holds."""
    model, split = deployment.model, deployment.parallel
    refused = check_parallel(model, split, deployment.engine)
    notes = tuple(f"layout doubtful: it was measured, though {reason}" for reason in refused[:1])
    if point.mode != "static_batch" or not point.input_tokens:
        return notes
    tokens = point.input_tokens + point.output_tokens
    limit, memory = model.max_context_tokens, deployment.device.reported_memory_bytes
    if limit and tokens > limit:
        notes += (f"requests of {round(tokens)} tokens on a model of {limit}",)
    ranks = split.dp * split.attention_dp
    cache = kv_bytes_per_sequence(model, deployment.kv_format, tokens, split) * point.concurrency / ranks
    said = f"the cache of {point.concurrency:,} sequences of {round(tokens):,} tokens is {format_bytes(cache)} a GPU"
    if cache > _MOST_MEMORY * memory:
        raise SpecError(f"load_value: {said}, which has {format_bytes(memory)}; nothing can have run so")
    weights = max(loaded_weight_bytes(model, split, deployment.device))
    if weights > memory:
        said = f"the weights are {format_bytes(weights)} a GPU"
    if max(cache, weights) > memory:
        notes += (f"memory not limited: {said}, which has {format_bytes(memory)}",)
    return notes
