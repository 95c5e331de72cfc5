"""Which replica a request goes to. A router is a function on one screen; what it looks at decides how fast it runs.

    blind      looks at the request alone: round robin, random, hashes of session or prefix. The traffic splits
               before anything is simulated
    seeing     looks at the replicas as they are when the request comes

Draws come from one named stream, two numbers a request whatever the router, so that routers can be compared on
common random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.traffic.load import Traffic
from bstar.traffic.streams import stream

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STREAM: Final = "router"  # of bstar.traffic.streams


class Seen(Protocol):
    """What a router may know of a replica."""

    number: int

    @property
    def outstanding(self) -> int: ...

    @property
    def used_blocks(self) -> int: ...

    def cached_blocks(self, rank: int) -> int: ...


_Replica = TypeVar("_Replica", bound=Seen)


class Router:
    """Chooses among the replicas that are ready, for one request after another.

    name    one of ROUTERS
    seed    of its draws
    sent    requests that were dealt in turn so far
    """

    def __init__(self, name: str, traffic: Traffic, *, seed: int = 0) -> None:
        self.name, self.traffic = checked(name), traffic
        self.draws = stream(seed, STREAM).random((traffic.num_requests, 2))
        self.keys = _affinity_keys(name, traffic)
        self.sent = 0
        self._choose = _CHOICES[name]

    def choose(self, rank: int, ready: Sequence[_Replica]) -> _Replica:
        """The replica for a request; `ready` in order of number, at least one."""
        return ready[self._choose(self, rank, ready)]

    def hashed(self, requests: NDArray[np.signedinteger[Any]], numbers: Sequence[int]) -> Ints:
        """Of a hash router: the index in `numbers` of each request's replica, -1 where it has no key."""
        places = np.full(len(requests), -1, dtype=np.int64)
        if self.keys is not None:
            keys = self.keys[requests]
            found, place = np.unique(keys[keys >= 0], return_inverse=True)
            places[keys >= 0] = np.array([_rendezvous(int(k), numbers) for k in found], dtype=np.int64)[place]
        return places

    def split(self, replicas: int) -> Ints | None:
        """Of a blind router: the replica of every request, if all come in the order of the traffic; else None."""
        n = self.traffic.num_requests
        if replicas == 1:
            return np.zeros(n, dtype=np.int64)
        if self.name not in BLIND:
            return None
        if self.name == "random":
            return np.minimum((self.draws[:, 0] * replicas).astype(np.int64), replicas - 1)
        owner = self.hashed(np.arange(n), range(replicas))
        owner[owner < 0] = np.arange(int((owner < 0).sum())) % replicas
        return owner


def checked(name: str) -> str:
    """`name`, if there is such a router. Raises SpecError."""
    if name not in ROUTERS:
        raise SpecError(f"router: {name!r} is not known; use one of {', '.join(ROUTERS)}")
    return name


def can_run(traffic: Traffic, fixed: bool) -> bool:
    """Whether compiled engines can: answers that make requests come and changes of the fleet do not go together."""
    return traffic.is_open_loop or fixed


def _in_turn(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    router.sent += 1
    return (router.sent - 1) % len(ready)


def _random(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    return min(int(router.draws[rank, 0] * len(ready)), len(ready) - 1)


def _least(ready: Sequence[Seen], busy: Callable[[Seen], tuple[int, ...]]) -> int:
    """The first of the least busy."""
    return min(range(len(ready)), key=lambda i: busy(ready[i]))


def _least_outstanding(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    return _least(ready, lambda r: (r.outstanding,))


def _least_kv(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    """Fewest blocks in use; requests that wait hold none, so that queues decide among equals."""
    return _least(ready, lambda r: (r.used_blocks, r.outstanding))


def _power_of_two(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    """The less busy of two different ones drawn at random (the first, if both are alike)."""
    count, (first, second) = len(ready), router.draws[rank]
    if count == 1:
        return 0
    a = min(int(first * count), count - 1)
    b = (a + 1 + min(int(second * (count - 1)), count - 2)) % count
    return a if ready[a].outstanding <= ready[b].outstanding else b


def _prefix_affinity(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    """Fewest blocks of work: those of the prompt that the replica would have to compute, and those it holds already.

    As a router does that follows the caches by their events (Dynamo's KV router with equal weights).
    """
    return _least(ready, lambda r: (r.used_blocks - r.cached_blocks(rank), r.outstanding))


def _by_hash(router: Router, rank: int, ready: Sequence[Seen]) -> int:
    """Always the same replica for one key while it is there; requests without a key are dealt in turn."""
    key = -1 if router.keys is None else int(router.keys[rank])
    return _in_turn(router, rank, ready) if key < 0 else _rendezvous(key, [r.number for r in ready])


_Choice = Callable[[Router, int, Sequence[Seen]], int]
_CHOICES: Final[dict[str, _Choice]] = {
    "round-robin": _in_turn, "random": _random, "session-affinity": _by_hash, "prefix-hash": _by_hash,
    "least-outstanding": _least_outstanding, "least-kv": _least_kv, "power-of-two": _power_of_two,
    "prefix-affinity": _prefix_affinity,
}  # fmt: skip
ROUTERS: Final = tuple(_CHOICES)
BLIND: Final = frozenset({"round-robin", "random", "session-affinity", "prefix-hash"})


def _rendezvous(key: int, numbers: Sequence[int]) -> int:
    """Index of the highest random weight: when a replica goes, only its own keys move."""
    weights = [hashlib.blake2b(f"{key}:{n}".encode(), digest_size=8).digest() for n in numbers]
    return weights.index(max(weights))


def _affinity_keys(name: str, traffic: Traffic) -> Ints | None:
    """What a hash router hashes, -1 where a request has none."""
    if name == "session-affinity":
        return np.ascontiguousarray(traffic.session)
    if name != "prefix-hash":
        return None
    keys = np.array(traffic.prefix_group, dtype=np.int64)
    if traffic.block_hashes is not None:
        starts, ends = traffic.block_hashes.offsets[:-1], traffic.block_hashes.offsets[1:]
        some = ends > starts
        keys[some] = traffic.block_hashes.ids[starts[some]]
    return np.where(keys < 0, traffic.session, keys)
