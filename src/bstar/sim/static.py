"""Static batching: whoever waits when the engine is free becomes a batch, and the batch runs to the end of its
longest answer. Prompts are padded to the longest one, finished members keep their slots.

What continuous batching is compared with: the same step times, the same memory, other admission. Tokens are
streamed, so a member has its last token when it is made; its slot stays taken until the batch ends.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.physics.batch import BatchShape
from bstar.sim.deployed import DeployedEngine, StepFigures, step_figures
from bstar.sim.steps import StepRows
from bstar.sim.stepwise import EngineRun, Progress
from bstar.traffic.load import Traffic


def run_static(
    deployed: DeployedEngine, traffic: Traffic, *, until_s: float = math.inf, progress: Progress | None = None
) -> EngineRun:
    """Serve `traffic` in batches of at most max_num_seqs, in the order of arrival, as far as memory goes."""
    run = _StaticEngine(deployed, traffic)
    try:
        run.loop(until_s, progress)
    except KeyboardInterrupt:
        return run.result(interrupted=True)
    return run.result(interrupted=False)


class _StaticEngine:
    def __init__(self, deployed: DeployedEngine, traffic: Traffic) -> None:
        if traffic.has_sessions:
            raise SpecError("policy: static batching does not take sessions; give single requests")
        self.deployed, self.settings, self.traffic = deployed, deployed.settings, traffic
        n = traffic.num_requests
        self.arrival_s = np.array(traffic.arrival_s, dtype=float)
        self.scheduled_s, self.first_s, self.finish_s = (np.full(n, math.nan) for _ in range(3))
        longest = np.maximum(self.settings.max_model_len - traffic.input_tokens, 1)
        self.output = np.minimum(traffic.output_tokens, longest).astype(np.int64)
        self.made = np.zeros(n, dtype=np.int64)
        self.queue = [(float(self.arrival_s[r]), r) for r in range(traffic.num_scheduled)]
        self.unsent = list(range(traffic.num_scheduled, n))[::-1]
        self.rows = StepRows()
        self.done = 0

    def loop(self, until_s: float, progress: Progress | None) -> None:
        now = 0.0
        while self.queue and now < until_s:
            now = max(now, self.queue[0][0])
            batch = self._batch(now)
            now = self._serve(batch, now)
            self.done += len(batch)
            if progress is not None:
                progress(self.done, self.traffic.num_requests, now)

    def _batch(self, now: float) -> list[int]:
        """Those that wait, in order, while their padded cache fits."""
        s, chosen = self.settings, list[int]()
        longest_in = longest_out = 0
        while self.queue and self.queue[0][0] <= now and len(chosen) < s.seat_limit:
            rank = self.queue[0][1]
            most_in = max(longest_in, int(self.traffic.input_tokens[rank]))
            most_out = max(longest_out, int(self.output[rank]))
            needed = (len(chosen) + 1) * -(-(most_in + most_out) // s.block_size)
            if needed > s.num_blocks - 1:
                if not chosen:
                    raise SpecError(f"request {rank}: {most_in + most_out} tokens outgrow the whole KV cache")
                break
            longest_in, longest_out = most_in, most_out
            chosen.append(heapq.heappop(self.queue)[1])
        return chosen

    def _serve(self, batch: list[int], now: float) -> float:
        """Run a batch from `now`; returns when it ends."""
        size, members = len(batch), np.array(batch)
        prompt, outputs = int(self.traffic.input_tokens[members].max()), self.output[members]
        self.scheduled_s[members] = now
        figures = self._figures(BatchShape.prefill(prompt, count=size))
        self._row(now, 1, figures, figures, made=size, regular=0, size=size, tokens=prompt, prompt=prompt * size)
        now += figures.seconds
        self.first_s[members] = now
        ordered = np.sort(outputs)
        self._leave(members[outputs == 1], 1, now)
        done = 1  # tokens that each member has
        for last in np.unique(ordered[ordered > 1]).tolist():
            steps = last - done
            first = self._figures(BatchShape.decode(size, prompt + done + 1))
            final = self._figures(BatchShape.decode(size, prompt + last))
            left = int((outputs > done).sum())
            self._row(now, steps, first, final, made=left, regular=left, size=size, tokens=prompt + last, prompt=0)
            now += steps * (first.seconds + final.seconds) / 2.0
            self._leave(members[outputs == last], last, now)
            done = last
        for rank in sorted(batch, key=lambda r: (float(self.finish_s[r]), r)):
            if self.traffic.concurrency is not None and self.unsent:
                follower = self.unsent.pop()
                self.arrival_s[follower] = self.finish_s[rank] + self.traffic.think_s[follower]
                heapq.heappush(self.queue, (float(self.arrival_s[follower]), follower))
        return now

    def _leave(self, members: NDArray[np.int64], tokens: int, now: float) -> None:
        """Members whose last token is out. Tokens come first: an interrupt leaves no answer without any."""
        self.made[members] = tokens
        self.finish_s[members] = now

    def _figures(self, shape: BatchShape) -> StepFigures:
        return step_figures(self.deployed.model, shape)

    def _row(
        self, now: float, steps: int, first: StepFigures, last: StepFigures, *, made: int, regular: int, size: int,
        tokens: int, prompt: int,
    ) -> None:  # fmt: skip
        slope = max(last.seconds - first.seconds, 0.0) / (steps - 1) if steps > 1 else 0.0
        base = (first.seconds + last.seconds) / 2.0 - slope * (steps + 1) / 2.0
        waiting = sum(1 for arrival, _ in self.queue if arrival <= now)
        self.rows.add(
            start_s=now, steps=steps, base_s=base, slope_s=slope, made=made, regular=regular, sequences=size,
            running=size, waiting=waiting, used_blocks=size * -(-tokens // self.settings.block_size), preempted=0,
            prompt_tokens=prompt, flops=steps * (first.flops + last.flops) / 2.0,
            compute_s=steps * (first.compute_s + last.compute_s) / 2.0,
            memory_s=steps * (first.memory_s + last.memory_s) / 2.0,
        )  # fmt: skip

    def result(self, *, interrupted: bool) -> EngineRun:
        none = np.zeros(self.traffic.num_requests, dtype=np.int64)
        return EngineRun(
            arrival_s=self.arrival_s, scheduled_s=self.scheduled_s, first_token_s=self.first_s,
            finish_s=self.finish_s, made_tokens=self.made, preemptions=none, cached_tokens=none.copy(),
            log=self.rows.log(kv_blocks=self.settings.num_blocks - 1, block_size=self.settings.block_size),
            interrupted=interrupted,
        )  # fmt: skip
