"""Workers on the nodes of a Ray cluster: the same driver in an actor a node, on one clock by measured offsets.

Every node needs bstar with its `bench` extra, and the API key in its own environment. The load and the answers'
figures travel through Ray; the clocks of other machines are compared by round trips (see `clock`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

from bstar.errors import ConfigError
from bstar.measure.clock import now
from bstar.measure.driver import Driver
from bstar.measure.fleet import Inbox
from bstar.measure.job import Job
from bstar.measure.worker import new_loop, progress_of

_POLL_S = 0.5


class Sender:
    """Runs in an actor: prepares a job, runs it in a thread, is polled for what happened."""

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._rows: list[tuple[Any, ...]] = []
        self._end: dict[str, Any] | None = None
        self._error = ""
        self._loop: Any = None

    def prepare(self, job: Job) -> None:
        self._driver = Driver(job, self._rows.extend)
        self._driver.prepare()

    def clock(self) -> float:
        return now()

    def go(self, origin_s: float) -> None:
        threading.Thread(target=self._run, args=(origin_s,), daemon=True).start()

    def poll(self) -> tuple[list[tuple[Any, ...]], dict[str, int], dict[str, Any] | None, str]:
        """(rows since the last poll, counts, what the worker saw once it has ended, a traceback)."""
        assert self._driver is not None
        end, error = self._end, self._error
        rows = self._rows[:]
        del self._rows[: len(rows)]
        return rows, progress_of(self._driver), end, error

    def stop(self) -> None:
        if self._loop is not None and self._driver is not None:
            self._loop.call_soon_threadsafe(self._driver.stop)

    def _run(self, origin_s: float) -> None:
        import traceback

        from bstar.measure.keys import hide

        assert self._driver is not None
        self._loop = new_loop()
        try:
            self._end = self._loop.run_until_complete(self._driver.run(origin_s))
        except Exception:
            self._error = hide(traceback.format_exc(), self._driver.job.endpoint.key.read())
        finally:
            self._loop.close()
            self._loop = None


class RayWorker:
    """A `Sender` actor as a worker of the fleet."""

    def __init__(self, number: int, actor: Any, ray: Any) -> None:
        self.number = number
        self._actor, self._ray = actor, ray

    def prepare(self, job: Job) -> None:
        self._ray.get(self._actor.prepare.remote(job))

    def clock(self) -> float:
        return float(self._ray.get(self._actor.clock.remote()))

    def go(self, origin_s: float, inbox: Inbox) -> None:
        self._ray.get(self._actor.go.remote(origin_s))
        threading.Thread(target=self._poll, args=(inbox,), daemon=True).start()

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def _poll(self, inbox: Inbox) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                rows, counts, end, error = self._ray.get(self._actor.poll.remote())
            except Exception:
                inbox.put((self.number, ("lost",)))
                return
            if rows:
                inbox.put((self.number, ("rows", rows)))
            inbox.put((self.number, ("progress", counts)))
            if error or end is not None:
                inbox.put((self.number, ("bug", error) if error else ("end", end)))
                return


def ray_nodes() -> int:
    """Nodes of the cluster that are alive; starts or joins it. Raises ConfigError without Ray."""
    ray = _ray()
    return sum(1 for node in ray.nodes() if node.get("Alive"))


def ray_worker(number: int) -> RayWorker:
    """An actor on the `number`-th node, spread over the cluster."""
    ray = _ray()
    actor = ray.remote(Sender).options(num_cpus=1, max_concurrency=2, scheduling_strategy="SPREAD").remote()
    return RayWorker(number, actor, ray)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--workers ray: needs Ray; pip install 'bstar[ray]', or give a number of processes") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR")
    return ray
