"""The cluster over compiled engines: between events of the fleet, all arrivals are routed in compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.cluster.compiled import CODES, GIVEN, look, route, serve
from bstar.sim.cluster.loop import DRAINING, GONE, LOOK, READY, STARTING, Cluster, Member, Progress
from bstar.sim.cluster.stack import Row, Stack
from bstar.sim.kernel.state import (
    DECODE,
    ENDED,
    EXPECTED,
    FINISHED,
    FULL,
    GAPS,
    NOW,
    PAUSED,
    PREFILL,
    RUN_SPANS,
    RUNS,
    SEEN,
    STEPS,
)
from bstar.sim.slices import in_slices, is_second

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 50_000
_SLICES = 100  # looks at the progress bar and at Ctrl-C while requests are sent
_TIMES_EVEN = 16  # engines that nobody looks at come up with the requests sent to them so often


class RowReplica:
    """A replica in a stack, to the eyes of a fleet and of a router."""

    takes_prompts = True

    def __init__(self, number: int, row: int, cluster: FastCluster) -> None:
        self.number, self.row, self.cluster = number, row, cluster
        self.settings = cluster.stack.settings
        self.logs: tuple[Floats, Floats] | None = None
        self._seen = np.zeros(2, np.int64)

    def _look(self, rank: int = -1) -> None:
        stack, at = self.cluster.stack, self.cluster.now
        engine = stack.rows[self.row]
        engine.advance(at)
        look(engine.limits, stack.loaded.load, stack.cost, stack.out, stack.pools, stack.states, stack.desk, self.row,
             rank, at, self._seen)  # fmt: skip

    @property
    def outstanding(self) -> int:
        desk = self.cluster.stack.desk
        if desk.quiet_s[self.row] < self.cluster.now:
            self._look()
        return int(desk.sent[self.row] - desk.finished[self.row])

    @property
    def used_blocks(self) -> int:
        self._look()
        return int(self._seen[0])

    def cached_blocks(self, rank: int) -> int:
        self._look(rank)
        return int(self._seen[1])

    @property
    def now(self) -> float:
        return self.cluster.stack.rows[self.row].now_s

    @now.setter
    def now(self, at_s: float) -> None:
        self.cluster.stack.rows[self.row].state.t[NOW] = at_s

    def give(self, rank: int, at_s: float) -> None:
        """A request comes in."""
        desk = self.cluster.stack.desk
        self.cluster.stack.rows[self.row].submit(rank, at_s)
        desk.sent[self.row] += 1
        desk.row[rank] = self.row
        desk.quiet_s[self.row] = min(desk.quiet_s[self.row], self.now)
        self.cluster.replica[rank] = self.number

    def had(self) -> Ints:
        """Requests that it was given, in order."""
        state = self.cluster.stack.rows[self.row].state
        return state.order[: state.n[EXPECTED]].astype(np.int64)

    def lose(self) -> list[int]:
        """It fails: tokens of the step that runs are lost, and the cache; requests go on from the tokens they have."""
        cluster, stack, at = self.cluster, self.cluster.stack, self.cluster.now
        row, out = stack.rows[self.row], stack.out
        row.advance(at)
        state, n, slots = row.state, row.state.n, row.state.slots
        cut = float(state.t[NOW]) > at and int(n[STEPS]) > 0
        lost = [r for r in self.had().tolist() if math.isnan(out.finish_s[r])]
        prompts, known = stack.loaded.load.prompt, state.known
        for slot in np.flatnonzero((slots.state == DECODE) | (slots.state == PREFILL)).tolist():
            request = int(slots.request[slot])
            if slots.state[slot] == PREFILL:
                known[request] = slots.target[slot]
                continue
            tokens = int(n[STEPS] - slots.offset[slot]) + 1
            passed_over = not math.isnan(slots.last_s[slot])
            known[request] = tokens = tokens - int(cut and not passed_over)
            if cut and tokens == slots.target[slot]:  # it computed a prompt in that step
                if tokens > prompts[request] and state.gaps.size:
                    n[GAPS] -= 1  # the gap to a token that is lost
            else:
                state.last_s[request] = slots.last_s[slot] if passed_over else state.t[SEEN if cut else NOW]
            if tokens == slots.total[slot]:
                out.finish_s[request] = state.t[NOW]
        lost = [r for r in lost if math.isnan(out.finish_s[r])]
        for request in lost:
            if known[request] <= prompts[request]:
                known[request] = 0
                out.first_token_s[request] = np.nan
            if not math.isnan(out.scheduled_s[request]):
                cluster.kept.setdefault(request, (float(out.scheduled_s[request]), int(out.cached_tokens[request])))
        if cut and state.runs.shape[0]:
            _cut_last(row)
        cluster.retired += int(stack.desk.sent[self.row]) - len(lost)
        stack.renew(self.row, at)
        return lost


def _cut_last(row: Row) -> None:
    """The last step in the run log gave no tokens: it becomes a run of its own without gaps."""
    state = row.state
    steps = float(state.runs[state.n[RUNS] - 1, 1])
    if steps > 1:
        if state.n[RUNS] >= state.runs.shape[0]:
            last = state.runs[state.n[RUNS] - 1].copy()
            state.n[RUNS] -= 1
            row._drain()
            state.runs[0] = last
            state.n[RUNS] = 1
        whole, single = state.runs[state.n[RUNS] - 1], state.runs[state.n[RUNS]]
        single[:] = whole
        whole[1] = steps - 1
        single[0], single[1], single[2], single[3] = state.t[SEEN], 1, whole[2] + whole[3] * steps, 0.0
        single[10] += whole[11] * (steps - 1)
        groups = row.cost.span_limit.size
        at = RUN_SPANS + 2 * row.cost.prompt_limit.size
        for g in range(groups):
            single[at + 2 * g] += whole[at + 2 * g + 1] * (steps - 1)
        state.n[RUNS] += 1
    state.runs[state.n[RUNS] - 1, 4] = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class FastCluster(Cluster):
    """`Cluster` for loads whose arrivals are given.

    replica   per request: who got it last
    kept      what was first noted of requests that lost a replica: when scheduled, cached tokens
    retired   requests finished by engines that are no more
    even_s    all engines have come to it
    """

    stack: Stack
    replica: Ints
    kept: dict[int, tuple[float, int]] = field(default_factory=dict)
    retired: int = 0
    even_s: float = 0.0
    _free_rows: list[int] = field(default_factory=list)
    _times: Floats = field(default_factory=lambda: np.zeros(0))

    def load_kernels(self, until_s: float) -> bool:
        """Load the compiled functions of the run by calling them before time 0, when nothing happens."""
        stack, code = self.stack, CODES[self.router.name]
        row, load = stack.rows[0], stack.loaded.load
        args = row.limits, load, stack.cost, stack.out, stack.pools, stack.states, stack.desk
        row.advance(until_s)
        if stack.desk.answers.size:
            serve(*args, code, until_s, 1)
            return True
        route(*args, code, 0)
        if not self.fleet.fixed:
            look(*args, 0, -1, until_s, np.zeros(2, np.int64))
        return True

    def run(self, *, until_s: float = math.inf, progress: Progress | None = None) -> None:
        order = self.stack.loaded.order
        self._times = self.stack.loaded.load.arrival_s[order].copy()
        self.expected = len(order)
        if self.stack.desk.answers.size:
            self._serve(until_s, progress)
            return
        coming = int(np.searchsorted(self._times, until_s))
        try:
            self.begin_fleet()
            while True:
                event_s, kind = self.events[0][:2] if self.events else (math.inf, 0)
                before = np.searchsorted(self._times, event_s, side="right" if kind == LOOK else "left")
                last = min(int(before), coming)
                self._send(last, progress)
                if self.stack.desk.next[0] < last or (self.events and self.events[0][0] < event_s):
                    continue  # what an arrival led to comes before the next one
                if event_s >= until_s or not self.events:
                    break
                self.now = event_s
                self._sweep()
                self.happen()
            self._come_to(until_s, progress)
            self.now = until_s
            self._sweep()
        except KeyboardInterrupt as pressed:
            if is_second(pressed):
                raise
            self.interrupted = True
            self._stop()
        self._restore()

    def _come_to(self, at_s: float, progress: Progress | None = None) -> None:
        """Bring all engines to one moment; an interrupt leaves them at an earlier one."""
        total = len(self.stack.loaded.order)

        def advance(horizon_s: float) -> bool:
            rows = [self.stack.rows[self._row(m).row] for m in self.members if m.state != GONE]
            done = [row.advance(horizon_s) for row in rows]
            self.even_s = horizon_s
            if progress is not None:
                progress(self.retired + int(self.stack.states.n[:, FINISHED].sum()), total, min(horizon_s, at_s))
            return all(done)

        if in_slices(advance, from_s=self.even_s, span_s=float(self._times[-1]), until_s=at_s):
            raise KeyboardInterrupt
        self.even_s = at_s

    def _stop(self) -> None:
        """After an interrupt: all engines to where the first of them is."""
        rows = [self.stack.rows[self._row(m).row] for m in self.members if m.state not in (GONE, STARTING)]
        at_s = max((row.now_s for row in rows), default=0.0)
        for row in rows:
            row.advance(at_s)

    def _serve(self, until_s: float, progress: Progress | None) -> None:
        """A load whose answers make requests come, on a fleet to which nothing happens."""
        stack, router, code = self.stack, self.router, CODES[self.router.name]
        load, first, total = stack.loaded.load, stack.rows[0], len(stack.loaded.load.prompt)
        try:
            self.begin_fleet()
            rows = [self._row(m) for m in self.members]
            desk = stack.desk = stack.desk._replace(open=np.array([r.row for r in rows], dtype=np.int64))
            if code == GIVEN:
                desk.given[:] = router.hashed(np.arange(total), [r.number for r in rows])
            status = PAUSED
            while status != ENDED:
                status = serve(first.limits, load, stack.cost, stack.out, stack.pools, stack.states, desk, code,
                               until_s, _ROUNDS)  # fmt: skip
                if status == FULL:
                    stack.rows[int(desk.next[1])]._drain()
                elif status not in (PAUSED, ENDED):
                    raise SpecError(stack.rows[int(desk.next[1])]._fault(status))
                if progress is not None:
                    progress(int(desk.finished.sum()), total, float(stack.states.t[:, NOW].max()))
        except KeyboardInterrupt:
            self.interrupted = True
            self._stop()
        self.replica[:] = stack.desk.row

    @property
    def answered(self) -> int:
        there = [r for r in map(self._row, self.members) if r.logs is None]
        return self.retired + sum(int(self.stack.desk.sent[r.row]) - r.outstanding for r in there)

    def make_row(self, number: int, ready_s: float) -> RowReplica:
        """A replica in a row that is free."""
        if not self._free_rows:
            had = len({self._row(m).row for m in self.members})
            if had == len(self.stack.rows):
                self.stack.grow()
            replica = RowReplica(number, had, self)
        else:
            replica = RowReplica(number, self._free_rows.pop(), self)
            self.stack.renew(replica.row, ready_s)
        replica.now = ready_s
        return replica

    def _row(self, member: Member) -> RowReplica:
        replica = member.replica
        assert isinstance(replica, RowReplica)
        return replica

    def _sweep(self) -> None:
        """Draining replicas that have become empty are gone since their last answer."""
        for member in self.members:
            if member.state == DRAINING and not member.replica.outstanding:
                had = self._row(member).had()
                self.leave(member, float(np.nanmax(self.stack.out.finish_s[had])))
        for member in self.members:
            replica = self._row(member)
            if member.state == GONE and replica.logs is None:
                self.retired += int(self.stack.desk.sent[replica.row])
                replica.logs = self.stack.take_logs(replica.row)
                self._free_rows.append(replica.row)

    def _send(self, last: int, progress: Progress | None) -> None:
        """Route arrivals until `last` of them have been sent."""
        desk, stack, order = self.stack.desk, self.stack, self.stack.loaded.order
        scaler = self.fleet.autoscaler
        each = scaler is not None and scaler.interval_s == 0
        while desk.next[0] < last:
            ready = [self._row(m) for m in self.members if m.state == READY]
            if each or not ready:
                rank = int(order[desk.next[0]])
                self.now = float(self._times[desk.next[0]])
                stack.desk.next[0] += 1
                if each and scaler is not None:
                    self._sweep()
                    self.scale(scaler, extra=1)
                    desk = self.stack.desk
                self.route(rank)
                if each:
                    return
                continue
            begin = int(desk.next[0])
            upto = min(last, begin + max(len(order) // _SLICES, 1000))
            self._bulk(ready, begin, upto)
            desk = self.stack.desk
            at_s = float(self._times[upto - 1])
            if at_s - self.even_s >= float(self._times[-1]) / _TIMES_EVEN:
                self._come_to(at_s, progress)
            elif progress is not None:
                progress(self.retired + int(desk.finished.sum()), len(order), at_s)

    def _bulk(self, ready: Sequence[RowReplica], begin: int, upto: int) -> None:
        stack, router, code = self.stack, self.router, CODES[self.router.name]
        requests = stack.loaded.order[begin:upto]
        desk = stack.desk = stack.desk._replace(open=np.array([r.row for r in ready], dtype=np.int64))
        numbers = np.full(len(stack.rows), -1, dtype=np.int64)
        numbers[desk.open] = [r.number for r in ready]
        if code == GIVEN:
            places = router.hashed(requests, [r.number for r in ready])
            desk.given[requests] = np.where(places < 0, -1, desk.open[places])
        desk.next[2] = router.sent
        load, first = stack.loaded.load, stack.rows[0]
        status = PAUSED + 1
        while status != PAUSED:
            status = route(first.limits, load, stack.cost, stack.out, stack.pools, stack.states, desk, code, upto)
            if status != PAUSED:  # a full log, or a request that can never be served: the engine itself says so
                stack.rows[int(desk.next[1])].advance(float(self._times[desk.next[0]]))
        router.sent = int(desk.next[2])
        self.replica[requests] = numbers[desk.row[requests]]

    def _restore(self) -> None:
        """What failures moved in the shared arrays."""
        out, load = self.stack.out, self.stack.loaded.load
        load.arrival_s[self.stack.loaded.order] = self._times
        for rank, (scheduled_s, cached) in self.kept.items():
            out.scheduled_s[rank], out.cached_tokens[rank] = scheduled_s, cached

    def logs_of(self, member: Member) -> tuple[Floats, Floats]:
        """The run log and the irregular gaps of a replica."""
        replica = self._row(member)
        if replica.logs is None:
            replica.logs = self.stack.take_logs(replica.row)
        return replica.logs
