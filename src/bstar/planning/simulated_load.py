"""The requests that one of several replicas gets from a router that spreads at random.

    Poisson arrivals        Poisson at its share of the rate
    bursty arrivals         gamma gaps whose excess over Poisson falls with the number of replicas
    a trace's own arrivals  every request with probability one in so many replicas
    clients                 their share, whole
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from bstar.planning.screen import Task
from bstar.specs.workload import Workload
from bstar.traffic.generators import from_workload
from bstar.traffic.load import Traffic

_SEED: Final = 20_261
_WARM_UP: Final = 8  # one request in so many comes before measuring
# Of a trace: enough for its rush hours.
_MOST_OF_A_TRACE: Final = 60_000


def replica_load(task: Task, load: float, replicas: float, count: int) -> Traffic:
    """`count` requests of one replica that gets `load` (requests per second, or clients), one of `replicas`."""
    workload = task.workload
    if workload.concurrency is not None or (task.load is None and task.slo.is_empty):
        return closed_load(workload, load, count)
    if task.replay is not None:
        return _warm(_of_trace(workload, load * replicas, replicas))
    burstiness = 1.0 / (1.0 + (workload.gap_cv_squared - 1.0) / replicas)
    shared = replace(workload, rate_per_s=load, burstiness=burstiness)
    # Near its capacity a replica feels the two percent by which the rate of some thousand draws is off.
    return _warm(from_workload(shared, num_requests=count, seed=_SEED, rescale=True))


def closed_load(workload: Workload, clients: float, count: int) -> Traffic:
    """`count` requests of so many clients."""
    whole = max(math.ceil(clients - 1e-9), 1)
    return _warm(from_workload(replace(workload, rate_per_s=None, concurrency=whole), num_requests=count, seed=_SEED))


def _warm(load: Traffic) -> Traffic:
    return replace(load, warmup_requests=load.num_requests // _WARM_UP)


def _of_trace(workload: Workload, rate_per_s: float, replicas: float) -> Traffic:
    """What one of `replicas` gets of the trace at that mean rate of all."""
    moments = np.asarray(workload.arrivals_s, dtype=np.float64)
    lengths = np.asarray(workload.joint, dtype=np.int64)
    mine = np.flatnonzero(np.random.default_rng(_SEED).random(moments.size) * replicas < 1.0)[:_MOST_OF_A_TRACE]
    mean_gap = (moments[-1] - moments[0]) / (moments.size - 1)
    return Traffic(arrival_s=(moments[mine] - moments[0]) / mean_gap / rate_per_s, input_tokens=lengths[mine, 0],
                   output_tokens=lengths[mine, 1], name=workload.name)  # fmt: skip
