"""The validation page: what `bstar validate` found, as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from bstar.calibration.heldout import heldout_lines
from bstar.calibration.peer import PEER_NAME
from bstar.calibration.summary import (
    ErrorFigures,
    Metric,
    Outcome,
    Summary,
    kind_of,
    summaries_by,
    summary_of,
)
from bstar.calibration.suspects import worst_rows

HEADINGS: Final = (
    "## All rows", "## Aggregated serving", "## Disaggregated serving", "## Static batches and other loads",
    "## Held out", "## The worst rows", "## What is not covered", "## How the rows are replayed",
    "## Your own rows",
)  # fmt: skip
_CAPTIONS: Final = {
    "tpot": "TPOT, predicted against measured; the lines are equality and 20 % beside it.",
    "ttft": "TTFT, predicted against measured.",
    "regimes": "Errors by what binds the decode step, or keeps clients waiting.",
    "clients": "Errors by the number of clients (of a static batch: its size).",
}
_WORST: Final[tuple[tuple[Metric, int], ...]] = (("tpot", 25), ("ttft", 15))
_FEWEST = 5
_ID: Final = re.compile(r"\b[a-z]{2}\d{5}\b")


def page_text(outcomes: Sequence[Outcome], *, images: Mapping[str, str], command: str) -> str:
    """The page. images: addresses of the charts by name; command: what made it."""
    whole = summary_of(outcomes)
    kinds = summaries_by(outcomes, "kind")
    date = datetime.now(UTC).date().isoformat()
    parts = [
        "# Validation\n",
        f"Made on {date} by `{command}` with bstar {version('bstar')}; do not edit.\n",
        f"{whole.rows:,} measured rows are replayed as their harness ran them, {_percent(whole.coverage_fraction)} are "
        f"answered, and {whole.counted:,} count in the errors: rows whose layout is uncertain, or whose label looks "
        "wrong, are predicted and left out of every figure. Errors are |predicted / measured − 1|; bias is its signed "
        f"mean; |ln| the mean of |ln(predicted / measured)|. The peer is {PEER_NAME} in its default mode, beside bstar "
        "on the very rows that it answers. The constants were fitted to rows of the same file: what the figures are on "
        "rows that a fit has not seen is under Held out.\n",
        *(f"![{name}]({images[name]})\n*{_CAPTIONS[name]}*\n" for name in _CAPTIONS if name in images),
        HEADINGS[0], _table(kinds | ({"all": whole} if len(kinds) > 1 else {}), "kind"),
        *_section(HEADINGS[1], [o for o in outcomes if kind_of(o.point) == "aggregated"],
                  ("engine", "gpu", "model", "dtype", "regime", "harness")),
        *_section(HEADINGS[2], [o for o in outcomes if kind_of(o.point) == "disaggregated"],
                  ("engine", "gpu", "model")),
        *_section(HEADINGS[3], [o for o in outcomes if o.point.schema == "latency"],
                  ("kind", "engine", "gpu", "model", "dtype")),
        HEADINGS[4], *heldout_lines(),
        HEADINGS[5], *_worst(outcomes),
        HEADINGS[6], *_uncovered(outcomes),
        HEADINGS[7], _HARNESSES, HEADINGS[8], _OWN,
    ]  # fmt: skip
    return "\n".join(parts).rstrip("\n") + "\n"


_HARNESSES: Final = """
- `inferencex`: a closed loop of C clients, 10·C prompts, all clients at once at first (which counts), lengths uniform
  in [0.8·L, L], warm-up over before the first; served with the flags of the run where they are known (`bstar.catalog`,
  `runs/inferencex.toml`). TTFT and TPOT are means over all requests.
- Other harnesses: the load is not documented; the same with fixed lengths, and token budgets that explain the TTFT.
- Rows of latency files: by their load: static batches, all requests at once, closed loops, the largest load.
- A row was measured, so it ran: where its layout is impossible the nearest possible one is taken, and where the memory
  model says that it does not fit it is granted more. Both are in the row's notes (`--json`).
"""


_OWN: Final = """
Any CSV with these columns is replayed the same way; others are ignored, and those after `concurrency` may be missing. A
row that cannot be read, that nothing can have run, or whose model or GPU is not known, has a reason instead of a
prediction; one whose labels contradict each other is predicted with a note and counts in no error.

Columns, in any order and case:

- Aggregated: `engine`, `model`, `gpu`, `isl_tokens`, `osl_tokens`, `concurrency`; where known `id`, `engine_version`,
  `harness`, `measured_on`, `weight_dtype`, `kv_cache_dtype`, `num_gpus`, `attention_tp`, `attention_dp`,
  `expert_parallel`, `ttft_ms`, `tpot_ms` (or `ttft_s`, `tpot_s`).
- Disaggregated: those, `mode` (`disagg`; else `agg`), `prefill_tp_size`, `decode_tp_size` (of one worker),
  `prefill_num_workers`, `decode_num_workers`; of either side also `prefill_attention_dp_size`,
  `decode_attention_dp_size`, `…_pp_size`, `…_moe_tp_size`, `…_moe_ep_size`.
- Other loads: `engine`, `model`, `gpu`, `isl`, `osl`, `load_kind`, `load_value`; where known `n_gpus`, `tp`, `pp`,
  `dp`, `ep`, `weight_dtype`, `kv_dtype`, `max_concurrency`, `num_prompts`, `flags`, `ttft_ms`, `tpot_ms`, `itl_ms`,
  `e2e_ms`, `out_tok_s`. `load_kind` is `static_batch` (`load_value`: sequences), `all_at_once` or `max_load` (prompts,
  or `inf`), `closed` (clients), `rate` or `trace` (requests per second).

<!-- output: free -->
```console
$ printf '%s\\n' \\
    engine,model,gpu,isl_tokens,osl_tokens,concurrency,weight_dtype,num_gpus,attention_tp,harness,ttft_ms,tpot_ms \\
    vllm,llama-3.1-70b,h100,1024,1024,64,fp8,4,4,inferencex,256,19.5 > points.csv
$ bstar validate --points points.csv --by engine
```
"""


def _section(heading: str, outcomes: Sequence[Outcome], axes: Iterable[str]) -> list[str]:
    if not outcomes:
        return []
    return [heading, *(_table(summaries_by(outcomes, axis), axis) for axis in axes)]


def _table(groups: Mapping[str, Summary], axis: str) -> str:
    peer = any(summary.peer is not None for summary in groups.values())
    head = [axis, "rows", "counted", "answered", "TPOT median", "mean", "bias", "TTFT median", "|ln|"]
    rates = any(summary.throughput.count for summary in groups.values())
    head += ["tokens/s median"] if rates else []
    head += ["peer answers", "TPOT: peer", "bstar", "TTFT: peer", "bstar"] if peer else []
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for name, s in groups.items():
        ratio = "–" if s.ttft.mean_abs_log_ratio is None else f"{s.ttft.mean_abs_log_ratio:.2f}"
        cells = [name, f"{s.rows:,}", f"{s.counted:,}", _percent(s.coverage_fraction), _percent(s.tpot.median_ape),
                 _percent(s.tpot.mape), _signed(s.tpot.bias), _percent(s.ttft.median_ape), ratio]
        cells += [_percent(s.throughput.median_ape)] if rates else []
        lines.append(_row(cells + (_peer(s) if peer else [])))
    return "\n" + "\n".join(lines) + "\n"


def _peer(summary: Summary) -> list[str]:
    if summary.peer is None:
        return ["0", "–", "–", "–", "–"]
    figures: list[ErrorFigures] = [summary.peer[m][who] for m in ("tpot", "ttft") for who in ("peer", "bstar")]
    return [f"{summary.peer['answered']:,}", *(_percent(f.median_ape) for f in figures)]


def _worst(outcomes: Sequence[Outcome]) -> list[str]:
    parts = ["\nThe reason is suspected by rule (`bstar.calibration.suspects`), not established.\n"]
    for metric, count in _WORST:
        lines = [_row([metric.upper(), "row", "error", "suspected"]), _row(["---", "---", "---:", "---"])]
        lines += [
            _row([w.outcome.point.id, w.label, _signed(w.error), w.reason])
            for w in worst_rows(outcomes, count, metric=metric)
        ]
        parts.append("\n".join(lines) + "\n")
    return parts


def _uncovered(outcomes: Sequence[Outcome]) -> list[str]:
    """Rows without an answer, rows that do not count, and what had to be assumed to answer."""
    silent = Counter(o.prediction.reason or "no figure" for o in outcomes if not o.answered)
    left_out = Counter(_left_out(o) for o in outcomes if o.answered and not o.counts)
    notes = Counter(_kind_of_note(n) for o in outcomes for n in dict.fromkeys(map(_kind_of_note, o.prediction.notes)))
    return [
        "", *_list("Rows that are not answered", silent), *_list("Rows that do not count in the errors", left_out),
        *_list("What was assumed to answer (rows)", notes, fewest=_FEWEST),
        "Speculative decoding is not predicted: rows measured with it are slower here than they were. Load "
        "that no harness documents, flags of servers that no recipe lists, clocks under a power cap are not known.\n",
    ]  # fmt: skip


def _left_out(outcome: Outcome) -> str:
    """Why an answered row does not count."""
    point = outcome.point
    doubt = _kind_of_note(point.doubts[0]) if point.doubts else "what was assumed makes it another row"
    return _without_ids((point.label_note or (point.layout_note if not point.counts else "") or doubt).split(";")[0])


def _kind_of_note(note: str) -> str:
    """A note without what differs from row to row."""
    if note.startswith("requests of "):
        return "requests longer than the model's context"
    return note.split(": ")[0].split(", because of")[0].split(" taken as ")[0]


def _without_ids(text: str) -> str:
    return _ID.sub("another row", text)


def _list(title: str, counts: Counter[str], *, fewest: int = 1) -> list[str]:
    shown = [(text, count) for text, count in counts.most_common() if count >= fewest]
    if not shown:
        return [f"{title}: none.\n"] if fewest == 1 else []
    return [f"{title}:\n", *(f"- {count:,}: {text}" for text, count in shown), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}".replace("-", "−")
