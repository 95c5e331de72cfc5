"""Clusters with a step time that queueing theory knows, and small real ones."""

from __future__ import annotations

from functools import cache

import numpy as np

import bstar
from bstar.physics.batch import BatchShape
from bstar.sim.cluster.fast import run_fast
from bstar.sim.cluster.fleet import Autoscaler
from bstar.sim.cluster.ledger import Ledger
from bstar.sim.cluster.loop import Cluster, Fleet
from bstar.sim.cluster.replica import Replica
from bstar.sim.cluster.routers import Router
from bstar.sim.decisions import unit_cost
from bstar.sim.deployed import StepFigures
from bstar.sim.settings import SchedulerSettings
from bstar.specs.deployment import Deployment
from bstar.traffic.load import Traffic


@cache
def small(gpu: str = "h100-sxm-80gb", **more: object) -> Deployment:
    return bstar.deployment(model="llama-3.1-8b", gpu=gpu, **more)


def tight(num_blocks: int = 200, **more: object) -> SchedulerSettings:
    """An engine that preempts."""
    given = {"block_size": 16, "num_blocks": num_blocks, "max_num_seqs": 16, "max_num_batched_tokens": 256,
             "max_model_len": 2048}  # fmt: skip
    return SchedulerSettings(**{**given, **more})


def per_token(shape: BatchShape) -> StepFigures:
    """A step takes a millisecond a token: with one seat, a server whose service times are the prompts' lengths."""
    return StepFigures(seconds=float(shape.new_tokens @ shape.count) * 1e-3, flops=0.0, compute_s=0.0, memory_s=0.0)


def affine(shape: BatchShape) -> StepFigures:
    """Like a GPU: a fixed time, and some for tokens and contexts."""
    tokens, contexts = float(shape.new_tokens @ shape.count), float(shape.context_after @ shape.count)
    return StepFigures(seconds=5e-3 + 2e-5 * tokens + 1e-8 * contexts, flops=0.0, compute_s=0.0, memory_s=0.0)


SERVER = SchedulerSettings(block_size=16, num_blocks=4000, max_num_seqs=1, max_num_batched_tokens=60_000,
                           max_model_len=60_000)  # fmt: skip


def cluster(
    traffic: Traffic, replicas: int, router: str, *, settings: SchedulerSettings = SERVER, figures=per_token,
    seed: int = 0, **fleet: object,
) -> Cluster:  # fmt: skip
    """A pool that has run."""
    ledger = Ledger.of(traffic, settings.block_size)
    out = Cluster(
        ledger, Router(router, traffic, seed=seed), Fleet(replicas=replicas, **fleet),
        lambda number, ready_s, finished: Replica(number, settings, figures, ledger, finished, ready_s=ready_s))
    out.run()
    return out


def serve(load: Traffic, replicas: int, router: str, seed: int = 0):
    """`cluster(load, replicas, router)` with the compiled engines: waits and stays in seconds, replicas."""
    cost = unit_cost(SERVER)
    cost = cost._replace(step_s=0.0, linear=np.array([0.0, 1e-3, 0.0, 0.0]), decode_s=np.zeros_like(cost.decode_s))
    run = run_fast(SERVER, cost, load, Router(router, load, seed=seed), Fleet(replicas=replicas), keep_runs=False)
    return run.out.scheduled_s - load.arrival_s, run.out.finish_s - load.arrival_s, run.replica


def markov(rate_per_s: float, mean_s: float, count: int, seed: int) -> Traffic:
    """Poisson arrivals; one step each, exponential (in whole milliseconds)."""
    rng = np.random.default_rng(seed)
    return Traffic(
        arrival_s=np.cumsum(rng.exponential(1 / rate_per_s, count)),
        input_tokens=np.minimum(np.ceil(rng.exponential(mean_s * 1e3, count)), 50_000).astype(np.int64),
        output_tokens=np.ones(count, dtype=np.int64))


def mixed(count: int, rate_per_s: float, seed: int, **more: object) -> Traffic:
    """Prompts and answers of all sizes."""
    rng = np.random.default_rng(seed)
    return Traffic(
        arrival_s=np.cumsum(rng.exponential(1 / rate_per_s, count)), input_tokens=rng.integers(1, 700, count),
        output_tokens=rng.integers(1, 120, count), **more)  # fmt: skip


def in_flight(replica: np.ndarray, number: int, arrival_s: np.ndarray, finish_s: np.ndarray) -> int:
    """The most requests that one replica had at a time."""
    mine = replica == number
    times = np.concatenate([arrival_s[mine], finish_s[mine]])
    change = np.concatenate([np.ones(mine.sum()), -np.ones(mine.sum())])
    order = np.lexsort((change, times))
    return int(np.cumsum(change[order]).max(initial=0))


QUICK = Autoscaler(target=4, interval_s=0.0, stabilization_s=5.0, tolerance_fraction=0.0)
