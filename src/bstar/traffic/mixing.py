"""Several loads as one: tenants, priorities, a chat product beside a batch job."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from bstar.errors import SpecError
from bstar.traffic.lengths import Ints
from bstar.traffic.load import Traffic

# Numbers that mean something inside one load only, and are shifted so that those of two loads differ.
_NUMBERED = ("prefix_group", "session")


def merge(*loads: Traffic, name: str = "") -> Traffic:
    """The requests of several open loops, in the order of their arrivals.

    Groups, sessions and parents stay those of their own load. Raises SpecError for closed loops, for warm-up
    and for loads that say what their blocks hold, which have no meaning together.
    """
    if not loads:
        raise SpecError("merge: needs at least one load")
    for load in loads:
        if load.concurrency is not None or load.warmup_requests or load.block_hashes is not None:
            raise SpecError(f"merge: takes open loops without warm-up and without block hashes; {load.name!r} is none")
    arrival = np.concatenate([load.arrival_s for load in loads])
    order = np.argsort(arrival, kind="stable")  # nan last, and among themselves in their own order
    place = np.empty(order.size, dtype=np.int64)
    place[order] = np.arange(order.size)
    columns: dict[str, Any] = {}
    for key in _COLUMNS:
        columns[key] = np.concatenate([np.ascontiguousarray(getattr(load, key)) for load in loads])[order]
    starts = np.cumsum([0] + [load.num_requests for load in loads])[:-1]
    parents = [_shifted(load.parent, int(start)) for load, start in zip(loads, starts, strict=True)]
    parent = np.concatenate(parents)
    columns["parent"] = np.where(parent >= 0, place[parent], -1)[order]
    for key in _NUMBERED:
        used, parts = 0, []
        for load in loads:
            numbers: Ints = getattr(load, key)
            parts.append(_shifted(numbers, used))
            used += int(numbers.max()) + 1
        columns[key] = np.concatenate(parts)[order]
    return Traffic(arrival_s=arrival[order], **columns, name=name or " + ".join(load.name for load in loads),
                   seed=loads[0].seed)  # fmt: skip


def _shifted(numbers: Ints, by: int) -> Ints:
    return np.where(numbers >= 0, numbers + by, -1)


_COLUMNS = tuple(f.name for f in fields(Traffic) if f.name in (
    "input_tokens", "output_tokens", "priority", "prefix_tokens", "turn", "think_s",
))  # fmt: skip
