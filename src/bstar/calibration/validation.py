"""Replay many measured points, on several processes, with the same outcome in the same order on any number of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from bstar.calibration.peer import peer_prediction
from bstar.calibration.point import Point
from bstar.calibration.replay import Prediction, replay
from bstar.calibration.summary import Outcome

# Below so many points a process more costs more than it saves; points are handed out so many at a time.
_FEW = 100
_CHUNK = 16


def validate(
    points: Sequence[Point], *, jobs: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Outcome]:
    """The outcome of every point, in their order.

    jobs       processes; None: as many as there are processors
    progress   called with (points done, of how many)
    """
    outcomes = []
    predictions = _predictions(points, jobs or os.cpu_count() or 1)
    for done, (point, prediction) in enumerate(zip(points, predictions, strict=True), start=1):
        outcomes.append(Outcome(point=point, prediction=prediction, peer=peer_prediction(point)))
        if progress is not None:
            progress(done, len(points))
    return outcomes


def _predictions(points: Sequence[Point], jobs: int) -> Iterator[Prediction]:
    if jobs == 1 or len(points) < _FEW:
        yield from map(_safely, points)
        return
    # A fresh interpreter each: compiled code and its threads do not survive a fork everywhere.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(points) // _CHUNK + 1), mp_context=context) as pool:
        yield from pool.map(_safely, points, chunksize=_CHUNK)


def _safely(point: Point) -> Prediction:
    """One row must not end a file: what bstar should never raise is the row's reason, and says that it is a bug."""
    try:
        return replay(point)
    except Exception as error:
        return Prediction(reason=f"bug in bstar ({type(error).__name__}: {error})"[:300])
