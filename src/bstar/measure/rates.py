"""Over which time the rates of a measured run are.

    whole run   from the first measured request that was sent to the last token of one: what other clients define
    loaded      from the first measured request that was sent to the last one that was due: without the end, where the
                requests in flight grow fewer

A run with a warm-up or a cool-down asks for the steady state: its rates are those of the loaded time. Without one they
are of the whole run, and `steady` has the others beside them. Whatever was served in that time counts, warm-up too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bstar.metrics.rates import LEAST_REQUESTS_LONG, Rates, rates_of, whole_run

if TYPE_CHECKING:
    from bstar.measure.result import BenchRun
    from bstar.measure.tables import RequestTable


def rates_of_run(run: BenchRun) -> Rates:
    """Those of the summary."""
    if len(run.measured) == len(run.table):
        return whole_run(run.records)
    loaded = loaded_rates(run)
    if loaded is not None:
        return loaded
    whole = whole_run(run.records)
    return _between(run.table, whole.start_s, whole.end_s)


def loaded_rates(run: BenchRun) -> Rates | None:
    """Rates while the load was on; None where that was too short to say anything."""
    start, end = loaded_time(run)
    took = run.records.e2e_s[run.records.finished]
    if start is None or end is None or not took.size or end - start < LEAST_REQUESTS_LONG * float(took.mean()):
        return None
    return _between(run.table, start, end)


def loaded_time(run: BenchRun) -> tuple[float | None, float | None]:
    """(start, end) in seconds since the start of the run; None where nothing was sent."""
    if len(run.table) == 0:
        return None, None
    first = float(run.measured.sent_s.min()) if len(run.measured) else 0.0
    return max(run.window.warmup_s, first), float(run.table.intended_s.max()) - run.window.cooldown_s


def _between(table: RequestTable, start_s: float, end_s: float) -> Rates:
    """Of whole answers, and of those that an interrupt cut off: the server made their tokens all the same."""
    cut = table.error == "interrupted"
    inside = np.where((table.chunk_s >= start_s) & (table.chunk_s <= end_s), table.chunk_tokens, 0)
    part, made = (np.diff(np.concatenate(([0], np.cumsum(tokens)))[table.chunk_offsets])
                  for tokens in (inside, table.chunk_tokens))
    whole = np.maximum(np.where(cut, table.asked_output_tokens, 1), made)
    share = np.where(table.succeeded | cut, part / whole, 0.0)
    outputs = np.where(cut, whole, table.output_tokens)
    return rates_of(share, table.input_tokens, outputs, start_s=start_s, seconds=end_s - start_s)
