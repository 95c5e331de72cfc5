"""Compiled engines side by side in the same arrays, for `compiled.route`; what is by request number they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstar.sim.arrays import KernelLoad, blocks_of, engine_of
from bstar.sim.cluster.compiled import Desk, engine_of_row, pool_of_row
from bstar.sim.engine import KernelEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.state import GAPS, NOW, RUNS, Blocks, Engine, Outcome, Slots
from bstar.sim.settings import SchedulerSettings

ROWS = 1 << 12  # of the run log of one engine, before it is put aside
_LARGE = 1 << 16


class Row(KernelEngine):
    """An engine whose state lies in a stack, and must stay there."""

    def _drain(self) -> None:
        s = self.state
        self._runs.append(s.runs[: s.n[RUNS]].copy())
        self._gaps.append(s.gaps[: s.n[GAPS]].copy())
        s.n[RUNS] = s.n[GAPS] = 0


class Stack:
    """`rows` engines, more when asked.

    states, pools   the arrays of `Engine` and `Blocks` with the row as their first index
    desk            where the router stands
    """

    def __init__(
        self, settings: SchedulerSettings, cost: StepCost, loaded: KernelLoad, out: Outcome, draws: NDArray[Any],
        rows: int, keep_runs: bool, feedback: bool,
    ) -> None:  # fmt: skip
        self.settings, self.cost, self.loaded, self.out = settings, cost, loaded, out
        count = len(loaded.load.prompt)
        self.fresh = engine_of(settings, cost, [], count, run_rows=ROWS if keep_runs else 0)
        self.empty = blocks_of(settings, loaded)
        self.rows: list[Row] = []
        none = np.zeros(0, np.int64)
        self.desk = Desk(
            arrivals=loaded.order, draws=draws, given=np.full(count, -1, dtype=np.int64),
            row=np.full(count, -1, dtype=np.int64), next=np.zeros(6, np.int64), open=none, sent=none, finished=none,
            quiet_s=np.zeros(0), answer_s=np.full(count if feedback else 0, np.nan),
            answers=np.zeros(count if feedback else 0, np.int64), born=np.zeros(count if feedback else 0, np.int64),
        )  # fmt: skip
        self._build(rows)

    def _build(self, rows: int) -> None:
        one, count = self.fresh, rows
        slots = Slots(*(_repeated(array, count) for array in one.slots))
        stacked = {name: _repeated(getattr(one, name), count) for name in Engine._fields
                   if name not in ("slots", "known", "last_s")}  # fmt: skip
        self.states = Engine(**stacked, slots=slots, known=one.known, last_s=one.last_s)
        self.pools = Blocks(*(_repeated(array, count) for array in self.empty))
        self.desk = self.desk._replace(
            sent=np.zeros(count, np.int64), finished=np.zeros(count, np.int64), quiet_s=np.full(count, np.inf))
        few = replace(self.loaded, load=self.loaded.load._replace(prompt=self.loaded.load.prompt[:1]))
        for k in range(len(self.rows), count):
            row = Row(self.settings, self.cost, few, out=self.out, feedback=False, expects_order=False)
            row.load = self.loaded.load
            self.rows.append(row)
            self._place(k)

    def _place(self, k: int) -> None:
        self.rows[k].state = engine_of_row(self.states, k)
        self.rows[k].blocks = pool_of_row(self.pools, k)

    def grow(self) -> None:
        """Twice the rows; those that there are go on."""
        states, pools, desk, had = self.states, self.pools, self.desk, len(self.rows)
        self._build(2 * had)
        for name in Engine._fields:
            if name not in ("slots", "known", "last_s"):
                getattr(self.states, name)[:had] = getattr(states, name)
        for into, array in zip(_arrays(self.states.slots, self.pools), _arrays(states.slots, pools), strict=True):
            into[:had] = array
        for name in ("sent", "finished", "quiet_s"):
            getattr(self.desk, name)[:had] = getattr(desk, name)
        for k in range(had):
            self._place(k)

    def renew(self, k: int, ready_s: float) -> None:
        """Row k is a new engine from `ready_s` on; its logs are kept."""
        row = self.rows[k]
        if row.state.runs.shape[0]:
            row._drain()
        for name in Engine._fields:
            if name not in ("slots", "known", "last_s", "order", "runs", "gaps", "log", "log_s"):
                getattr(row.state, name)[...] = getattr(self.fresh, name)
        mine, new = _arrays(row.state.slots, row.blocks), _arrays(self.fresh.slots, self.empty)
        for into, array in zip(mine, new, strict=True):
            into[...] = array
        row.state.t[NOW] = ready_s
        self.desk.sent[k] = self.desk.finished[k] = 0
        self.desk.quiet_s[k] = np.inf

    def take_logs(self, k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The run log and the irregular gaps of row k, which forgets them."""
        row = self.rows[k]
        runs, gaps = row.runs, row.gaps_s
        row._runs.clear()
        row._gaps.clear()
        row.state.n[RUNS] = row.state.n[GAPS] = 0
        return runs, gaps


def _arrays(slots: Slots, blocks: Blocks) -> list[NDArray[Any]]:
    return [*slots, *blocks]


def _repeated(array: NDArray[Any], times: int) -> NDArray[Any]:
    """`times` copies in one array; memory that is zero is not touched."""
    if array.size > _LARGE and not array.any():
        return np.zeros((times, *array.shape), array.dtype)
    return np.repeat(array[np.newaxis], times, axis=0)
