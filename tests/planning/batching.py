"""Continuous batching step by step, as small as it can be: the oracle of the planner's closed forms.

Decodes go first, prompts fill what is left of the token budget in order of arrival, at most `cap` in flight.
With `lag` a request that comes during a step joins the step after the next (asynchronous scheduling).
"""

import heapq

import numpy as np


class Batching:
    def __init__(self, replica, cap, lag, inputs, outputs):
        self.replica, self.cap, self.lag = replica, cap, lag
        self.inputs, self.outputs = np.asarray(inputs), np.asarray(outputs)
        n = len(inputs)
        self.first, self.finish, self.arrival = (np.full(n, np.nan) for _ in range(3))
        self.done, self.made = np.zeros(n), np.zeros(n)
        self.waiting, self.running, self.prefilling, self.pending = [], [], [], []

    @property
    def busy(self):
        return bool(self.running or self.prefilling or self.waiting or self.pending)

    def admit(self, new):
        if self.lag and (self.running or self.prefilling):
            self.waiting += self.pending
            self.pending = new
        else:
            self.waiting += self.pending + new
            self.pending = []

    def step(self, now):
        """Run one step; (its end, requests that ended)."""
        budget, tokens, pairs, last = self.replica.token_budget - len(self.running), 0.0, 0.0, []
        queue = list(self.prefilling)
        while budget > 0:
            if queue:
                r = queue.pop(0)
            elif self.waiting and len(self.running) + len(self.prefilling) < self.cap:
                r = self.waiting.pop(0)
                self.prefilling.append(r)
            else:
                break
            q = min(budget, self.inputs[r] - self.done[r])
            pairs += q * self.done[r] + q * (q + 1) / 2
            self.done[r] += q
            budget, tokens = budget - q, tokens + q
            if self.done[r] >= self.inputs[r]:
                last.append(r)
        n, g = len(self.running), self.replica.tokens_s
        now += (self.replica.decode_step_s[n - 1] if n else 0.0) + self.replica.pair_s * pairs
        if tokens:
            now += float(g(np.array(n + tokens))) - (float(g(np.array(n))) if n else 0.0)
        ended = []
        if n:
            ids = np.array(self.running)
            self.made[ids] += 1
            over = self.made[ids] >= self.outputs[ids]
            ended, self.running = list(ids[over]), list(ids[~over])
        for r in last:
            self.prefilling.remove(r)
            self.first[r], self.made[r] = now, 1
            (self.running if self.outputs[r] > 1 else ended).append(r)
        self.finish[ended] = now
        return now, ended


def metrics(engine, kept):
    ttft = (engine.first - engine.arrival)[kept]
    e2e = (engine.finish - engine.arrival)[kept]
    tpot = ((engine.finish - engine.first) / np.maximum(engine.outputs - 1, 1))[kept]
    return ttft, tpot, e2e


def open_loop(replica, arrivals, inputs, outputs, *, cap, lag=1):
    """(ttft, tpot, e2e) of the requests between a fifth and nine tenths of the run."""
    engine = Batching(replica, cap, lag, inputs, outputs)
    engine.arrival = arrivals
    now, i, n = 0.0, 0, len(arrivals)
    while i < n or engine.busy:
        if not engine.busy:
            now = max(now, arrivals[i])
        stop = i + int(np.searchsorted(arrivals[i:], now, side="right"))
        engine.admit(list(range(i, stop)))
        i = stop
        now, _ = engine.step(now)
    return metrics(engine, slice(n // 5, n * 9 // 10))


def closed_loop(replica, clients, inputs, outputs, *, cap, lag=1):
    """(requests per second, (ttft, tpot, e2e)) of the middle of a run of that many clients, started one by one."""
    engine = Batching(replica, cap, lag, inputs, outputs)
    n, started, now, finished = len(inputs), clients, 0.0, 0
    due = [(0.02 * i, i) for i in range(clients)]
    while finished < n - clients:
        if not engine.busy:
            now = max(now, due[0][0])
        new = []
        while due and due[0][0] <= now:
            moment, r = heapq.heappop(due)
            engine.arrival[r] = moment
            new.append(r)
        engine.admit(new)
        now, ended = engine.step(now)
        finished += len(ended)
        for _ in ended:
            if started < n:
                heapq.heappush(due, (now, started))
                started += 1
    start, stop = np.nanquantile(engine.finish, [0.3, 0.9])
    inside = (engine.finish > start) & (engine.finish < stop)
    return inside.sum() / (stop - start), metrics(engine, inside)
