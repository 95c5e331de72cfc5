"""One measured value of a sweep: what the client saw, what the server counted, and its decode steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bstar.metrics.intervals import replications

if TYPE_CHECKING:
    from bstar.measure.result import BenchRun
    from bstar.measure.tables import RequestTable

Floats = NDArray[np.float64]

_SLICES = 12
# A batch size is a sample of the decode fit where so many gaps were seen at it.
_LEAST_GAPS = 8
_MOST_GAPS = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePoint:
    """One value.

    value              clients of a closed loop, or max_num_seqs of a server that was started with it
    budget             max_num_batched_tokens that it was started with; None: its default
    throughput_per_s   output tokens per second while the load was on; ± half_width (95 %)
    figures            means and p99s: "ttft_s.p99", "tpot_s.mean", "itl_s.mean", …
    attainment_fraction, goodput_per_s   under the SLO, over the same time; all that finished without one
    server             running, waiting_share, preemptions, kv_usage_max, steps; missing: the server shows none
    decode             (batch, median gap s, gaps) of steps without prefill, per batch size
    """

    value: int
    throughput_per_s: float
    half_width: float | None
    figures: Mapping[str, float]
    attainment_fraction: float
    goodput_per_s: float
    budget: int | None = None
    server: Mapping[str, float] = field(default_factory=dict)
    decode: tuple[tuple[float, float, int], ...] = ()
    valid: bool = True
    reasons: tuple[str, ...] = ()

    @property
    def amortized_s(self) -> float:
        """Time per output token of the system: 1 / throughput, not what one user feels."""
        return 1.0 / self.throughput_per_s if self.throughput_per_s > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": self.value, "max_num_batched_tokens": self.budget, "throughput_per_s": self.throughput_per_s,
            "half_width": self.half_width,
            "amortized_s": self.amortized_s if self.throughput_per_s > 0 else None, "figures": dict(self.figures),
            "attainment_fraction": self.attainment_fraction, "goodput_per_s": self.goodput_per_s,
            "server": dict(self.server), "decode": [list(d) for d in self.decode], "valid": self.valid,
            "reasons": list(self.reasons),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TunePoint:
        """What `to_dict` wrote."""
        return cls(
            value=int(raw["value"]), budget=raw.get("max_num_batched_tokens"),
            throughput_per_s=float(raw["throughput_per_s"]), half_width=raw.get("half_width"),
            figures=dict(raw["figures"]), attainment_fraction=float(raw["attainment_fraction"]),
            goodput_per_s=float(raw["goodput_per_s"]), server=dict(raw["server"]),
            decode=tuple((float(b), float(g), int(n)) for b, g, n in raw["decode"]), valid=bool(raw["valid"]),
            reasons=tuple(raw["reasons"]),
        )  # fmt: skip


def point_of(value: int, run: BenchRun, *, budget: int | None = None, seats: int | None = None) -> TunePoint:
    """The point of a run. `seats`: the server's max_num_seqs, where it is known."""
    summary = run.loaded
    figures: dict[str, float] = {}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        for part in ("mean", "p50", "p99"):
            found = run.figure(f"{name}.{part}")
            if found is not None:
                figures[f"{name}.{part}"] = found
    return TunePoint(
        value=value, budget=budget, throughput_per_s=summary.output_tokens_per_s, half_width=_half_width(run),
        figures=figures,
        attainment_fraction=summary.slo_attainment_fraction, goodput_per_s=summary.goodput_requests_per_s,
        server=_server(run), decode=decode_steps(run.table, seats), valid=run.accepted, reasons=run.verdict.reasons,
    )  # fmt: skip


def _half_width(run: BenchRun) -> float | None:
    """Of the throughput: the steady part in slices, whose rates are nearly independent."""
    start, end = run.steady["start_s"], run.steady["end_s"]
    if start is None or end is None or not end > start:
        return None
    edges = np.linspace(start, end, _SLICES + 1)
    tokens = np.histogram(run.table.chunk_s, bins=edges, weights=run.table.chunk_tokens)[0]
    return replications(tokens / np.diff(edges)).half_width


def _server(run: BenchRun) -> dict[str, float]:
    found = next((o.summary for o in run.observations if o.name == "server"), {})
    gauges, counters = found.get("gauges") or {}, found.get("counters") or {}
    out = {
        "running": (gauges.get("running") or {}).get("mean"), "running_max": (gauges.get("running") or {}).get("max"),
        "waiting": (gauges.get("waiting") or {}).get("mean"), "waiting_share": found.get("waiting_share"),
        "kv_usage_max": (gauges.get("kv_usage_fraction") or {}).get("max"), "preemptions": counters.get("preemptions"),
        "steps": found.get("steps"),
    }  # fmt: skip
    return {name: float(value) for name, value in out.items() if value is not None}


def decode_steps(table: RequestTable, seats: int | None = None) -> tuple[tuple[float, float, int], ...]:
    """(batch, median gap, gaps) of the gaps between tokens in which no request was being prefilled.

    A request counts as prefilling from when it was sent, or a seat for it was free if there are only so many `seats`,
    to its first token; gaps are of chunks of one token.
    """
    good = np.flatnonzero(table.succeeded)
    starts, ends, owners = [], [], []
    for i in good.tolist():
        times, tokens = table.chunks_of(i)
        single = tokens[1:] == 1
        starts.append(times[:-1][single])
        ends.append(times[1:][single])
        owners.append(np.count_nonzero(single))
    if not owners or sum(owners) == 0:
        return ()
    start, end = np.concatenate(starts), np.concatenate(ends)
    if start.size > _MOST_GAPS:
        chosen = np.linspace(0, start.size - 1, _MOST_GAPS).astype(np.int64)
        start, end = start[chosen], end[chosen]
    answered = ~np.isnan(table.first_token_s)
    sent = np.sort(table.sent_s[answered])
    first = np.sort(table.first_token_s[answered])
    last = np.sort(table.last_token_s[answered])
    # Nobody who was sent before the gap's end, and had a seat, still waits for a first token at its start.
    begun = np.searchsorted(sent, end, side="left")
    if seats is not None:
        begun = np.minimum(begun, seats + np.searchsorted(last, end, side="left"))
    started = np.searchsorted(first, start, side="right")
    free = (begun - started <= 0) & (end > start)
    batch = started - np.searchsorted(last, start, side="right")
    return _by_batch(batch[free].astype(float), (end - start)[free])


def _by_batch(batch: Floats, gap: Floats) -> tuple[tuple[float, float, int], ...]:
    out = []
    for b in np.unique(batch):
        seen = gap[batch == b]
        if b >= 1 and seen.size >= _LEAST_GAPS:
            out.append((float(b), float(np.median(seen)), int(seen.size)))
    return tuple(out)
