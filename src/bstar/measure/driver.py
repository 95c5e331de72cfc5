"""Sends the requests of a job at their times, or when their clients are free, and hands over what happened.

Callbacks, not tasks: a request costs a few dictionary moves and a write. The rules are the simulator's: scheduled
arrivals come when they come; whoever has an answer sends the next turn of its session after the think time, or, in a
closed loop, the next request that has no parent.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from bstar.measure.clock import now
from bstar.measure.connection import Pool
from bstar.measure.contents import Answer, Prompt
from bstar.measure.exchange import Exchange
from bstar.measure.failures import of_exception
from bstar.measure.health import LoopMonitor
from bstar.measure.job import Job
from bstar.measure.keys import hide
from bstar.measure.outcome import Outcome

Row = tuple[Any, ...]

_SWEEP_S, _LEAST_SWEEP_S, _FLUSH_S, _FLUSH_ROWS = 0.1, 0.005, 1.0, 64
# Bodies are made ahead of time up to so many bytes; the rest while waiting.
_PREPARED_BYTES: Final = 256_000_000
_LOOKAHEAD: Final = 32
# A closed-loop client whose request fails waits before the next: without that a broken server eats the load at once.
_BACKOFF_S, _MOST_BACKOFF_S, _MOST_RETRY_AFTER_S = 0.05, 5.0, 60.0
# Clients of a closed loop give up on a server where nothing has listened for so long.
_GONE_S: Final = 10.0
# The timers of an event loop are whole milliseconds: aim behind the moment, never before it.
_TIMER_S = 0.0005


class Driver:
    """One run of a job on the running event loop.

    emit   gets rows of finished requests (`Outcome.row`), a few at a time
    """

    def __init__(self, job: Job, emit: Callable[[list[Row]], None]) -> None:
        self.job = job
        self.sent = self.finished = self.failed = self.tokens = 0
        self._emit = emit
        self._rows: list[Row] = []
        self._contents = job.contents()
        self._secret = job.endpoint.key.read()
        self._head = job.endpoint.post_head(job.endpoint.path, self._secret)
        self._in_flight: set[Exchange] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._held: deque[tuple[float, int]] = deque()
        self._bodies: dict[int, bytes] = {}
        self._prompts: dict[int, Prompt] = {}
        self._answers: dict[int, Answer] = {}
        self._failures_in_a_row = 0
        self._refused_since_s = math.inf
        self._refused_in_a_row = self._gave_up_after = 0
        self._stopping = False
        self._gone: set[int] = set()  # requests whose body is not needed any more
        self._over: asyncio.Future[None] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._plan()

    def _plan(self) -> None:
        traffic = self.job.traffic
        share = self.job.share.tolist()
        arrivals = traffic.arrival_s
        parents = traffic.parent
        self._outputs = traffic.output_tokens
        self._think = traffic.think_s
        self._closed = traffic.concurrency is not None
        self._due = [(float(arrivals[r]), r) for r in share if not math.isnan(arrivals[r])]
        self._unsent = [r for r in share if math.isnan(arrivals[r]) and parents[r] < 0][::-1]
        self._children: dict[int, list[int]] = {}
        for r in share if traffic.has_sessions else ():
            if parents[r] >= 0:
                self._children.setdefault(int(parents[r]), []).append(r)
        self._parents = {c: p for p, cs in self._children.items() for c in cs}
        heapq.heapify(self._due)
        self._ahead = iter([r for _, r in sorted(self._due) if r not in self._parents] + self._unsent[::-1])

    # before

    def prepare(self) -> None:
        """Make the bodies of the first requests, up to a quarter of a gigabyte; collect garbage once and for all."""
        gc.collect()
        total = 0
        for request in self._ahead:
            body = self._bodies[request] = self._body(request)
            total += len(body)
            if total > _PREPARED_BYTES:
                break

    # the run

    async def run(self, origin_s: float) -> dict[str, Any]:
        """Send everything, time 0 of the traffic being `origin_s` on the monotonic clock; returns what the worker saw.

        A stop (`stop`) ends it early; whatever has happened by then has been emitted.
        """
        loop = self._loop = asyncio.get_running_loop()
        endpoint = self.job.endpoint
        self._origin = origin_s
        self._pool = Pool(
            loop, self.job.addresses, context=endpoint.ssl_context(), server_name=endpoint.host,
            connect_timeout_s=endpoint.timeouts.connect_s,
        )  # fmt: skip
        over = self._over = loop.create_future()
        loop.set_exception_handler(self._bug)
        self._due = [(origin_s + t, r) for t, r in self._due]
        self._stop_sending_s = math.inf if self.job.stop_after_s is None else origin_s + self.job.stop_after_s
        monitor = LoopMonitor(loop)
        gc.freeze()
        try:
            self._loop.call_later(max(origin_s - now(), 0.0), monitor.start)
            self._tick()
            self._sweep()
            self._flush_later()
            self._refill()
            await over
        finally:
            monitor.stop()
            for timer in self._timers.values():
                timer.cancel()
            for task in self._opening:
                task.cancel()
            self._pool.close()
            self._flush()
            gc.unfreeze()
        return {**monitor.report(), "opened": self._pool.opened, "ended_s": now(),
                "refused_in_a_row": self._gave_up_after}

    def stop(self) -> None:
        """Send nothing more and give up what is in flight."""
        self._stopping = True
        self._due.clear()
        self._unsent.clear()
        self._held.clear()
        self._children.clear()
        for exchange in list(self._in_flight):
            exchange.give_up("interrupted", "", now())
        self._check_over()

    def _tick(self) -> None:
        """Send what is due, and come back for the next."""
        moment = now()
        while self._due and self._due[0][0] <= moment:
            due_s, request = heapq.heappop(self._due)
            if due_s > self._stop_sending_s:
                self._stop_sending()
                break
            self._admit(request, due_s)
            moment = now()
        self._check_over()
        if self._due:
            wait = max(min(self._due[0][0], self._stop_sending_s) - now(), 0.0)
            self._arm("tick", wait + _TIMER_S if wait > 0 else 0.0, self._tick)
            if self._stop_sending_s <= now():
                self._stop_sending()

    def _stop_sending(self) -> None:
        self._due.clear()
        self._unsent.clear()
        self._held.clear()
        self._children.clear()
        self._check_over()

    def _admit(self, request: int, due_s: float) -> None:
        cap = self.job.max_in_flight
        if cap is not None and len(self._in_flight) >= cap:
            self._held.append((due_s, request))
            return
        self._send(request, due_s, due_s)

    def _send(self, request: int, due_s: float, allowed_s: float) -> None:
        body = self._bodies.pop(request, None)
        if body is None:
            body = self._body(request)
            self._gone.add(request)
        outcome = Outcome(request, due_s, allowed_s)
        if self.job.keep_text or request in self._children:
            outcome.text = []
        if self.job.body.return_token_ids and request in self._children:
            outcome.answer_ids = []
        outcome.sent_s = moment = now()
        exchange = Exchange(
            outcome, self._head + b"Content-Length: %d\r\n\r\n" % len(body) + body, self._finish,
            output_tokens=int(self._outputs[request]), deadline_s=moment + self.job.endpoint.timeouts.request_s,
        )  # fmt: skip
        self.sent += 1
        self._in_flight.add(exchange)
        connection = self._pool.take()
        if connection is not None:
            exchange.start(connection, moment)
        else:
            self._open(exchange)

    def _open(self, exchange: Exchange) -> None:
        task = self._loop.create_task(self._connect(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            connection = await self._pool.open()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            kind, text = of_exception(error)
            exchange.give_up(kind, text, now())
            return
        if exchange in self._in_flight:
            exchange.start(connection, now())
        else:
            connection.abandon()

    def _finish(self, exchange: Exchange) -> None:
        """An answer is whole, or will never be."""
        outcome = exchange.outcome
        if exchange.may_begin_again and not self._stopping:
            exchange.begin_again()
            self._open(exchange)
            return
        self._in_flight.discard(exchange)
        self.finished += 1
        self.tokens += max(outcome.completion_tokens, len(outcome.chunk_s) if outcome.completion_tokens < 0 else 0)
        if outcome.error:
            outcome.error_text = hide(outcome.error_text, self._secret)  # servers send keys back
            self.failed += 1
            self._failures_in_a_row += 1
        else:
            self._failures_in_a_row = 0
        refused = outcome.error == "refused"
        self._refused_since_s = min(self._refused_since_s, outcome.end_s) if refused else math.inf
        self._refused_in_a_row = self._refused_in_a_row + 1 if refused else 0
        self._answered(outcome)
        if self._closed and outcome.end_s - self._refused_since_s > _GONE_S:
            self._gave_up_after = self._refused_in_a_row
            self._stop_sending()
        if not self.job.keep_text:
            outcome.text = None
        self._rows.append(outcome.row())
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()
        if self._held and (self.job.max_in_flight is None or len(self._in_flight) < self.job.max_in_flight):
            due_s, request = self._held.popleft()
            self._send(request, due_s, now())
        self._check_over()

    def _answered(self, outcome: Outcome) -> None:
        """Whoever waited for this answer sends its next request."""
        following = self._children.pop(outcome.index, [])
        if following and outcome.error:
            following = []  # a conversation that broke off; those turns count as never sent
        elif following:
            self._answers[outcome.index] = Answer(
                text="".join(outcome.text or ()), ids=tuple(outcome.answer_ids or ()))
        else:
            self._prompts.pop(outcome.index, None)
        if not following and self._closed and self._unsent and not self._stopping:
            following = [self._unsent.pop()]
        for request in following:
            due = outcome.end_s + float(self._think[request]) + self._patience(outcome)
            heapq.heappush(self._due, (due, request))
        moment = now()
        if following and not self._stopping:
            if self._due[0][0] <= moment and moment < self._stop_sending_s:
                self._loop.call_soon(self._tick)
            else:
                self._arm("tick", max(self._due[0][0] - moment, 0.0) + _TIMER_S, self._tick)

    def _patience(self, outcome: Outcome) -> float:
        """Seconds that a client waits after a failure: what the server asks for, or longer each time."""
        if not outcome.error:
            return 0.0
        if not math.isnan(outcome.retry_after_s):
            return min(outcome.retry_after_s, _MOST_RETRY_AFTER_S)
        again = max(self._failures_in_a_row - len(self._in_flight), 0)
        return float(min(_BACKOFF_S * 2.0 ** min(again, 10), _MOST_BACKOFF_S))

    def _check_over(self) -> None:
        if not (self._in_flight or self._due or self._held) and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in one of our own callbacks ends the run with its traceback; others are the transport's."""
        error = context.get("exception")
        ours = "callback" in str(context.get("message", "")) or "data_received" in str(context.get("message", ""))
        if isinstance(error, Exception) and ours and self._over is not None and not self._over.done():
            self._over.set_exception(error)

    # prompts

    def _body(self, request: int) -> bytes:
        parent = self._parents.get(request)
        before = answer = None
        if parent is not None:
            before, answer = self._prompts.pop(parent, None), self._answers.pop(parent, None)
        prompt = self._contents.prompt(request, before, answer)
        if request in self._children:
            self._prompts[request] = prompt
        return self.job.body.body(prompt, int(self._outputs[request]))

    def _refill(self) -> None:
        """Make a body or two while there is time."""
        soon = self._due[0][0] - now() if self._due else 1.0
        if soon > 0.002 and len(self._bodies) < _LOOKAHEAD:
            request = next(self._ahead, None)
            if request is None:
                return
            if request in self._gone:
                self._gone.discard(request)
            else:
                self._bodies[request] = self._body(request)
        self._arm("refill", 0.002, self._refill)

    # now and then

    def _sweep(self) -> None:
        """Give up what is overdue."""
        moment = now()
        limits = self.job.endpoint.timeouts
        for exchange in list(self._in_flight):
            if exchange.outcome.done:
                exchange.close_if_done(moment)
            elif exchange.is_overdue(moment):
                exchange.time_out(moment)
            elif moment - exchange.heard_s > limits.stall_s:
                exchange.give_up("stalled", f"no byte for {limits.stall_s:g} s", moment)
        if moment > self._stop_sending_s:
            self._stop_sending()
        # Answers that come late are told apart when they come; those that never come hold a client until the sweep.
        self._arm("sweep", min(_SWEEP_S, max(limits.request_s / 10.0, _LEAST_SWEEP_S)), self._sweep)

    def _flush_later(self) -> None:
        self._flush()
        self._arm("flush", _FLUSH_S, self._flush_later)

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._emit(rows)

    def _arm(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        timer = self._timers.get(name)
        if timer is not None:
            timer.cancel()
        self._timers[name] = self._loop.call_later(delay_s, call)
