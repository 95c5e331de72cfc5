"""Labels of a measured row that contradict each other: the row is still predicted, with what was made of them.

    seen                                                     taken
    ───────────────────────────────────────────────────────  ────────────────────────────────────────────────
    num_gpus is not attention_tp · attention_dp              the two degrees, one copy of the deployment
    n_gpus is not tp · pp (· dp)                             the degrees
    num_gpus is not the GPUs of all workers                  the workers
    a side with workers and no prefill_tp_size, …            one GPU for each of its workers
    prefill_* and decode_* columns in a row of mode agg      nothing of them
    an engine that is not known                              vLLM

Such a row says something else than what was measured, so it counts in no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bstar.calibration.point import Point


def with_doubts(point: Point) -> Point:
    """The point with its doubts."""
    found = () if point.fault is not None else tuple(_doubts(point))
    return replace(point, doubts=found) if found else point


def _doubts(point: Point) -> Iterator[str]:
    if point.schema == "latency":
        yield from _of_degrees(point)
        return
    from bstar.calibration.point_deployments import engine_name

    yield from engine_name(point.engine)[1]
    if point.is_disaggregated:
        yield from _of_sides(point)
        return
    if point.prefill is not None or point.decode is not None:
        yield "mode agg: the prefill_* and decode_* columns are not used"
    ranks = (point.attention_tp or 1) * (point.attention_dp or 1)
    if point.num_gpus and point.attention_tp and ranks != point.num_gpus:
        yield (f"layout doubtful: num_gpus {point.num_gpus:,} is not attention_tp {point.attention_tp:,} times "
               f"attention_dp {point.attention_dp or 1:,}; {ranks:,} GPUs are taken")


def _of_degrees(point: Point) -> Iterator[str]:
    if not point.num_gpus or not point.attention_tp:
        return
    stages = _count(point.columns.get("pp", ""))
    ranks = point.attention_tp * stages
    if point.num_gpus not in (ranks, ranks * (point.attention_dp or 1)):
        yield f"layout doubtful: n_gpus {point.num_gpus:,} is not tp {point.attention_tp:,} times pp {stages:,}"


def _count(text: str) -> int:
    try:
        return max(int(float(text)), 1)
    except (ValueError, OverflowError):
        return 1


def _of_sides(point: Point) -> Iterator[str]:
    sides = (("prefill", point.prefill), ("decode", point.decode))
    for name, pool in sides:
        columns = [f"{name}_tp_size", f"{name}_attention_dp_size"]
        if pool is not None and not any(point.columns.get(column) for column in columns):
            yield f"layout doubtful: {columns[0]} is empty; one GPU is taken for each {name} worker"
    workers = [pool.workers * pool.gpus for _, pool in sides if pool is not None and pool.workers]
    if point.num_gpus and len(workers) == len(sides) and sum(workers) != point.num_gpus:
        yield (f"layout doubtful: num_gpus {point.num_gpus:,} is not the {sum(workers):,} GPUs of the prefill and "
               "decode workers; the workers are taken")
