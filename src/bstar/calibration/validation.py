"""Replay many measured points, on several processes, with the same outcome in the same order on any number of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TYPE_CHECKING

from bstar.calibration.peer import peer_prediction
from bstar.calibration.point import Point
from bstar.calibration.replay import Prediction, replay
from bstar.calibration.summary import Outcome

if TYPE_CHECKING:
    from bstar.calibration.profile import Profile

# Below so many points a process more costs more than it saves; points are handed out so many at a time.
_FEW = 100
_CHUNK = 16


def validate(
    points: Sequence[Point], *, profile: Profile | None = None, jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:  # fmt: skip
    """The outcome of every point, in their order.

    profile    a calibration, used where a row is of its model, GPU and engine
    jobs       processes; None: as many as there are processors
    progress   called with (points done, of how many)
    """
    outcomes = []
    predictions = _predictions(points, profile, jobs or os.cpu_count() or 1)
    for done, (point, prediction) in enumerate(zip(points, predictions, strict=True), start=1):
        outcomes.append(Outcome(point=point, prediction=prediction, peer=peer_prediction(point)))
        if progress is not None:
            progress(done, len(points))
    return outcomes


def _predictions(points: Sequence[Point], profile: Profile | None, jobs: int) -> Iterator[Prediction]:
    one = partial(_safely, profile=profile)
    if jobs == 1 or len(points) < _FEW:
        yield from map(one, points)
        return
    # A fresh interpreter each: compiled code and its threads do not survive a fork everywhere.
    context = multiprocessing.get_context("spawn")
    done = 0
    try:
        with ProcessPoolExecutor(min(jobs, len(points) // _CHUNK + 1), mp_context=context) as pool:
            for prediction in pool.map(one, points, chunksize=_CHUNK):
                yield prediction
                done += 1
    except BrokenProcessPool:  # a program without a file of its own cannot be started again; nor one out of memory
        yield from map(one, points[done:])


def _safely(point: Point, profile: Profile | None) -> Prediction:
    """One row must not end a file: what bstar should never raise is the row's reason, and says that it is a bug."""
    try:
        return replay(point, profile=profile)
    except MemoryError:
        return Prediction(reason="the row's requests do not fit in this machine's memory")
    except Exception as error:
        return Prediction(reason=f"bug in bstar ({type(error).__name__}: {error})"[:300])
