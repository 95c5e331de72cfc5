"""The cluster in time: arrivals, failures, starts and looks of the autoscaler between the actions of the replicas.

Whoever is due first goes first: an event before a replica that could plan a step with what the event brings. So a
router sees every replica as it is at that moment, and an answer reaches the client before anything later is decided.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from bstar.sim.cluster.fleet import Autoscaler, Drain, Failure, Stabilizer, check_number
from bstar.sim.cluster.ledger import Ledger
from bstar.sim.cluster.replica import TIE, Finished, Replica
from bstar.sim.cluster.routers import Router, Seen
from bstar.sim.settings import SchedulerSettings

Progress = Callable[[int, int, float], None]

STARTING, READY, DRAINING, GONE = "starting", "ready", "draining", "gone"
# What comes first of events at one time.
_FAIL, _DRAIN, _READY, LAND, ARRIVE, LOOK = range(6)
_REPORT_EVERY: Final = 512


class Pooled(Seen, Protocol):
    """What a fleet does with a replica. `now` is set when it comes back."""

    takes_prompts: bool
    settings: SchedulerSettings
    now: float

    def give(self, rank: int, at_s: float) -> None: ...

    def lose(self) -> list[int]: ...


MakeReplica = Callable[[int, float, Finished], Pooled]  # number, ready, told when a request finishes


@dataclass(slots=True, eq=False)
class Member:
    """A replica and its place in the fleet."""

    replica: Pooled
    state: str
    started_s: float
    gone_s: float = math.nan


@dataclass(slots=True, kw_only=True)
class Fleet:
    """What the operator decides.

    startup_s   from the decision to the first request that a new replica takes; the first `replicas` are there at 0
    most        replicas that the simulator holds at once
    """

    replicas: int
    startup_s: float = 0.0
    autoscaler: Autoscaler | None = None
    failures: Sequence[Failure] = ()
    drains: Sequence[Drain] = ()
    most: int = 1_000_000

    @property
    def fixed(self) -> bool:
        """Whether nothing happens to it."""
        return self.autoscaler is None and not self.failures and not self.drains


@dataclass(slots=True, eq=False)
class Cluster:
    """A pool of replicas behind a router, and its load. `run` it once.

    rejected   requests that no engine takes; they are answered at once
    held       requests that no replica is there for
    expected   requests that will come, as far as is known
    """

    ledger: Ledger
    router: Router
    fleet: Fleet
    make: MakeReplica
    rejected: Sequence[bool] = ()
    members: list[Member] = field(default_factory=list)
    states: list[tuple[float, int, str]] = field(default_factory=list)
    held: deque[int] = field(default_factory=deque)
    finished: int = 0
    expected: int = 0
    now: float = 0.0
    interrupted: bool = False
    events: list[tuple[float, int, int, object]] = field(default_factory=list)
    _children: dict[int, list[int]] = field(default_factory=dict)
    _unsent: list[int] = field(default_factory=list)
    _stabilizer: Stabilizer | None = None
    _serial: int = 0

    def run(self, *, until_s: float = math.inf, progress: Progress | None = None) -> None:
        """To the end, to `until_s`, or to an interrupt."""
        self._begin_load()
        self.begin_fleet()
        turns = 0
        try:
            while True:
                turns += 1
                if progress is not None and turns % _REPORT_EVERY == 0:
                    progress(self.finished, len(self.ledger.keys), self.now)
                event_s = self.events[0][0] if self.events else math.inf
                replicas = self._stepped()
                first = min(replicas, key=lambda r: r.due_s, default=None)
                due_s = first.due_s if first is not None else math.inf
                if min(event_s, due_s) >= until_s:
                    return
                if first is not None and due_s * TIE < event_s:
                    self.now = due_s
                    first.act(event_s)
                    continue
                for replica in replicas:  # tokens that are out by then
                    if replica.due_s <= event_s:
                        replica.act(event_s)
                self.happen()
        except KeyboardInterrupt:
            self.interrupted = True

    def _stepped(self) -> list[Replica]:
        return [m.replica for m in self.members if m.state in (READY, DRAINING) and isinstance(m.replica, Replica)]

    def at(self, when_s: float, kind: int, what: object) -> None:
        """Put down an event. Of those at one time and of one kind the first put down goes first; arrivals by number."""
        serial = what if kind == ARRIVE and isinstance(what, int) else self._serial
        heapq.heappush(self.events, (when_s, kind, serial, what))
        self._serial += 1

    # The load.

    def _begin_load(self) -> None:
        traffic = self.ledger.traffic
        parents = traffic.parent.tolist()
        for rank, parent in enumerate(parents):
            if parent >= 0:
                self._children.setdefault(parent, []).append(rank)
        known = traffic.num_scheduled
        for rank, arrival_s in enumerate(traffic.arrival_s[:known].tolist()):
            self.at(arrival_s, ARRIVE, rank)
        self.expected = known
        self._unsent = [r for r in range(known, len(parents)) if parents[r] < 0][::-1]

    def begin_fleet(self) -> None:
        """The replicas of the start, and what will happen to them."""
        for _ in range(self.fleet.replicas):
            self._start(0.0, startup_s=0.0)
        for failure in self.fleet.failures:
            self.at(failure.at_s, _FAIL, failure)
        for drain in self.fleet.drains:
            self.at(drain.at_s, _DRAIN, drain)
        scaler = self.fleet.autoscaler
        if scaler is not None:
            self._stabilizer = Stabilizer(scaler.stabilization_s)
            if scaler.interval_s > 0:
                self.at(scaler.interval_s, LOOK, None)

    def happen(self) -> None:
        """The next event."""
        self.now, kind, _, what = heapq.heappop(self.events)
        if kind == ARRIVE:
            assert isinstance(what, int)
            self._arrive(what)
        elif kind == _FAIL:
            assert isinstance(what, Failure)
            self._fail(what)
        elif kind == _DRAIN:
            assert isinstance(what, Drain)
            self._drain(what.replica)
        elif kind == _READY:
            assert isinstance(what, Member)
            self._ready(what)
        elif kind == LAND:
            self.landed(what)
        else:
            self._look()

    def _arrive(self, rank: int) -> None:
        self.ledger.arrival_s[rank] = self.now
        if self.rejected and self.rejected[rank]:
            self._answered(rank, self.now)
            return
        scaler = self.fleet.autoscaler
        if scaler is not None and scaler.interval_s == 0:
            self.scale(scaler, extra=1)
        self.route(rank)

    def route(self, rank: int) -> None:
        """Hand a request to a replica that is ready; it waits for one where none is."""
        ready = [m.replica for m in self.members if m.state == READY and m.replica.takes_prompts]
        if ready:
            self.router.choose(rank, ready).give(rank, self.now)
        else:
            self.held.append(rank)

    def landed(self, what: object) -> None:
        """A KV cache has arrived: see `SplitCluster`."""
        raise AssertionError("one pool sends no caches")

    @property
    def answered(self) -> int:
        """Requests finished or refused so far."""
        return self.finished + sum(self.rejected)

    def done(self, member: Member, rank: int, at_s: float) -> None:
        """A replica has made all tokens that it was to make of a request."""
        self.ledger.finish_s[rank] = at_s
        self.finished += 1
        self._answered(rank, at_s)
        self.emptied(member, at_s)

    def emptied(self, member: Member, at_s: float) -> None:
        """A replica has answered one more: it may have been waiting for that to go."""
        if member.state == DRAINING and not member.replica.outstanding:
            self.leave(member, at_s)

    def _answered(self, rank: int, at_s: float) -> None:
        """Whoever waited for this answer sends its next request."""
        traffic = self.ledger.traffic
        refused = bool(self.rejected) and self.rejected[rank]
        following = [] if refused else [c for c in self._children.get(rank, []) if math.isnan(traffic.arrival_s[c])]
        if not following and traffic.concurrency is not None and self._unsent:
            following = [self._unsent.pop()]
        self.expected += len(following)
        for child in following:
            self.at(at_s + float(traffic.think_s[child]), ARRIVE, child)

    # The fleet.

    def _set(self, member: Member, state: str) -> None:
        member.state = state
        self.states.append((self.now, member.replica.number, state))

    def _start(self, at_s: float, startup_s: float) -> None:
        number = len(self.members)
        replica = self.make(number, at_s + startup_s, lambda rank, when: self.done(member, rank, when))
        member = Member(replica, STARTING, at_s)
        self.members.append(member)
        self.states.append((at_s, number, STARTING))
        self._later(member, at_s + startup_s)

    def _later(self, member: Member, ready_s: float) -> None:
        if ready_s <= self.now:
            self._ready(member)
        else:
            self.at(ready_s, _READY, member)

    def _ready(self, member: Member) -> None:
        if member.state != STARTING:
            return
        self._set(member, READY)
        self.dispatch()

    def dispatch(self) -> None:
        """A replica has become ready: whoever waited for one goes."""
        held, self.held = self.held, deque()
        for rank in held:
            self.route(rank)

    def leave(self, member: Member, at_s: float) -> None:
        member.gone_s = at_s
        member.state = GONE
        self.states.append((at_s, member.replica.number, GONE))

    def _fail(self, failure: Failure) -> None:
        if failure.replica >= len(self.members) or self.members[failure.replica].state == GONE:
            return
        member = self.members[failure.replica]
        lost = member.replica.lose()
        self.leave(member, self.now)
        if failure.back_s is not None:
            member.replica.now = self.now
            member.state = STARTING
            self.at(self.now + failure.back_s + self.fleet.startup_s, _READY, member)
        for rank in lost:
            self.ledger.retries[rank] += 1
            self.route(rank)

    def _drain(self, number: int) -> None:
        if number >= len(self.members) or self.members[number].state in (GONE, DRAINING):
            return
        member = self.members[number]
        self._set(member, DRAINING)
        if not member.replica.outstanding:
            self.leave(member, self.now)

    # The autoscaler.

    def _look(self) -> None:
        scaler = self.fleet.autoscaler
        assert scaler is not None
        if self.answered < self.expected or self.events:
            self.at(self.now + scaler.interval_s, LOOK, None)
        self.scale(scaler, extra=0)

    def scale(self, scaler: Autoscaler, extra: int) -> None:
        assert self._stabilizer is not None
        serving = [m for m in self.members if m.state in (READY, STARTING)]
        if scaler.metric == "kv":
            total = sum(m.replica.used_blocks / (m.replica.settings.num_blocks - 1) for m in serving)
        else:
            total = float(sum(m.replica.outstanding for m in serving) + len(self.held) + extra)
        wish = self._stabilizer.settle(self.now, scaler.wanted(total, len(serving)))
        if wish > len(serving):
            check_number(f"autoscale, at {self.now:,.4g} s", wish, self.fleet.most)
            self._more(wish - len(serving))
        elif wish < len(serving):
            # The least busy go; among equals the youngest.
            order = sorted(serving, key=lambda m: (m.state == READY, m.replica.outstanding, -m.replica.number))
            for member in order[: len(serving) - wish]:
                self._drain(member.replica.number)

    def _more(self, count: int) -> None:
        """Replicas that were leaving stay; the rest are new."""
        leaving = [m for m in self.members if m.state == DRAINING]
        for member in leaving[:count]:
            self._set(member, READY)
        for _ in range(count - len(leaving)):
            self._start(self.now, self.fleet.startup_s)
