"""A measured run as one HTML page with everything inside: figures, charts, errors, the server's counters, the settings.

Charts are SVG from the extra `charts`; without it the page has its tables and says what is missing.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bstar.errors import ConfigError
from bstar.files import write_whole
from bstar.units import format_seconds

if TYPE_CHECKING:
    from bstar.measure.folder import RecordedRun

NAME: Final = "report.html"
_LATENCIES: Final = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "max")
# A chart shows at most so many points of a run: the eye sees no more, and the page stays small.
_POINTS: Final = 1_500
_WIDTH, _HEIGHT = 420, 190
_STYLE: Final = """
body{font:15px/1.45 system-ui,'Liberation Sans',Arial,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;
color:#1b1b1b;background:#fff}
h1{font-size:1.4rem;margin:0 0 .2rem}h2{font-size:1.05rem;margin:1.8rem 0 .5rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem;text-align:right}
th{font-weight:600;border-bottom:1px solid #bbb}td:first-child,th:first-child{text-align:left}
.bad{color:#a30000;font-weight:600}.soft{color:#555}.charts{display:flex;flex-wrap:wrap;gap:1rem}
pre{background:#f5f5f5;padding:.8rem;overflow:auto;font-size:12px}svg{max-width:100%;height:auto}
"""


def write_run_page(folder: Path) -> Path:
    """Write the page of a run's folder into it. Raises ConfigError where the folder is no run."""
    from bstar.measure.folder import read_run

    target = folder / NAME
    write_whole(target, run_page(read_run(folder)), what="report")
    return target


def run_page(run: RecordedRun) -> str:
    """The page of a run."""
    summary = run.summary
    load, verdict = summary.get("load") or {}, summary.get("verdict") or {}
    server = _mapping(run.environment.get("server"))
    title = f"{server.get('model') or 'run'} · {load.get('name') or run.path.name}"
    parts = [f"<h1>{_text(title)}</h1>", f'<p class="soft">{_text(_subtitle(run, server))}</p>']
    parts += [f'<p class="bad">no result of the server: {_text(r)}</p>' for r in verdict.get("reasons") or ()]
    parts += ["<h2>Latency</h2>", _latency(summary), "<h2>Throughput</h2>", _facts(_rates(summary))]
    parts += ["<h2>In time</h2>", _charts(run)]
    if summary.get("errors"):
        rows = [(kind, str(e.get("count")), str(e.get("example") or "")) for kind, e in summary["errors"].items()]
        parts += ["<h2>Errors</h2>", _table(("kind", "requests", "example"), rows)]
    if _mapping(summary.get("server")):
        parts += ["<h2>What the server says</h2>", _server(summary["server"])]
    if _mapping(summary.get("gpu")):
        parts += ["<h2>GPUs</h2>", _facts(_gpu(summary["gpu"]))]
    parts += ["<h2>Client</h2>", _facts(_client(summary))]
    parts += [f'<p class="soft">note: {_text(n)}</p>' for n in verdict.get("notes") or ()]
    parts += ["<h2>Settings</h2>", _json(run.config), "<h2>Environment</h2>", _json(run.environment)]
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
            f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n")


def _subtitle(run: RecordedRun, server: Mapping[str, Any]) -> str:
    engine = f"{server.get('engine') or ''} {server.get('version') or ''}".strip()
    summary = run.summary
    done, sent = summary.get("num_finished", 0), summary.get("num_sent", 0)
    said = [engine, str(server.get("url") or ""),
            f"{done:,} of {sent:,} requests in {format_seconds(float(summary.get('duration_s') or 0.0))}",
            str(run.environment.get("started_utc") or "")]  # fmt: skip
    return " · ".join(s for s in said if s)


def _latency(summary: Mapping[str, Any]) -> str:
    rows = []
    intended = _mapping(summary.get("from_intended"))
    for label, name in _LATENCIES:
        rows.append((label, *(_seconds(_mapping(summary.get(name)).get(s)) for s in _STATISTICS),
                     _width(_mapping(summary.get("intervals")).get(name))))
        if label == "TTFT" and intended:
            late = _mapping(intended.get(name))
            rows.append(("TTFT from intended", *(_seconds(late.get(s)) for s in _STATISTICS), ""))
    return _table(("", *_STATISTICS, "± of mean (95 %)"), rows)


def _rates(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(label, _number(summary.get(key))) for label, key in (
        ("output tokens/s", "output_tokens_per_s"), ("all tokens/s", "total_tokens_per_s"),
        ("requests/s", "requests_per_s"), ("goodput, requests/s", "goodput_requests_per_s"),
        ("SLO attainment", "slo_attainment_fraction"))]  # fmt: skip
    steady = _mapping(summary.get("steady")).get("output_tokens_per_s")
    return [*rows, ("output tokens/s while loaded", _number(steady))]


def _client(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    health = _mapping(summary.get("health"))
    rows = [("limited by the client", "yes" if health.get("client_limited") else "no")]
    for key, label in (("dispatch_delay_s", "sent late (p99)"), ("loop_lag_s", "event loop late (p99)")):
        rows.append((label, _seconds(_mapping(health.get(key)).get("p99"))))
    rows.append(("of a core", _number(health.get("cpu_fraction"))))
    tokens = _mapping(summary.get("tokens"))
    rows.append(("tokens counted by", ", ".join(_mapping(tokens.get("counted_by"))) or "–"))
    hits = _mapping(summary.get("prefix_cache")).get("hit_fraction")
    return [*rows, ("prefix cache hits", "–" if hits is None else f"{hits:.1%}")]


def _server(server: Mapping[str, Any]) -> str:
    gauges = [(name, _number(g.get("mean")), _number(g.get("max"))) for name, g in
              _mapping(server.get("gauges")).items()]  # fmt: skip
    counters = [(name, _number(value)) for name, value in _mapping(server.get("counters")).items()]
    histograms = [(name, *(_number(_mapping(h).get(s)) for s in ("count", "mean", "p50", "p95", "p99")))
                  for name, h in _mapping(server.get("histograms")).items()]
    parts = [_table(("gauge", "mean", "max"), gauges)] if gauges else []
    parts += [_table(("counter", "in the run"), counters)] if counters else []
    parts += [_table(("histogram", "count", "mean", "p50", "p95", "p99"), histograms)] if histograms else []
    return "<br>".join(parts)


def _gpu(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, f"{_number(v.get('mean'))} (max {_number(v.get('max'))})") for name, v in gpu.items()
            if isinstance(v, Mapping) and "mean" in v]


# charts ----------------------------------------------------------------------------------------------------


def _charts(run: RecordedRun) -> str:
    try:
        from bstar.interfaces.report.charts import require_extra

        require_extra()
    except ConfigError as error:
        return f'<p class="soft">no charts: {_text(str(error))}</p>'
    from bstar.interfaces.report.rendering import render

    drawn = [render(spec, ".svg").decode() for spec in chart_specs(run)]
    return f'<div class="charts">{"".join(drawn)}</div>'


def chart_specs(run: RecordedRun) -> list[dict[str, Any]]:
    """Vega-Lite specifications: TTFT and TPOT by the moment of sending, their shares, tokens and requests in time."""
    table = run.table
    records = table.records()
    finished = np.flatnonzero(records.finished)
    if finished.size == 0:
        return []
    shown = finished[np.linspace(0, finished.size - 1, min(_POINTS, finished.size)).astype(int)]
    specs = []
    for label, values in (("TTFT", records.ttft_s), ("TPOT", records.tpot_s)):
        rows = [{"x": float(records.sent_s[i]), "y": float(values[i])} for i in shown if not math.isnan(values[i])]
        if rows:
            specs.append(_spec(rows, "sent, s", f"{label}, s", {"type": "point", "size": 8, "opacity": 0.5}))
            ordered = np.sort(values[finished][~np.isnan(values[finished])])
            picked = np.linspace(0, ordered.size - 1, min(200, ordered.size)).astype(int)
            shares = [{"x": float(ordered[i]), "y": (int(i) + 1) / ordered.size} for i in picked]
            specs.append(_spec(shares, f"{label}, s", "share of requests", {"type": "line"}))
    edges = np.arange(0.0, max(math.ceil(float(np.nanmax(table.end_s))), 1) + 1.0)
    tokens = np.histogram(table.chunk_s, bins=edges, weights=table.chunk_tokens)[0]
    flying = np.searchsorted(np.sort(table.sent_s), edges[1:], side="right") - np.searchsorted(
        np.sort(table.end_s[~np.isnan(table.end_s)]), edges[1:], side="right")
    for name, series in (("output tokens/s", tokens), ("requests in flight", flying)):
        rows = [{"x": float(edges[i + 1]), "y": float(v)} for i, v in enumerate(series)]
        specs.append(_spec(rows, "s", name, {"type": "line"}))
    return specs


def _spec(rows: list[dict[str, float]], x: str, y: str, mark: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "width": _WIDTH, "height": _HEIGHT,
        "data": {"values": rows}, "mark": dict(mark),
        "encoding": {"x": {"field": "x", "type": "quantitative", "title": x, "scale": {"nice": True}},
                     "y": {"field": "y", "type": "quantitative", "title": y}},
        "config": {"font": "Liberation Sans, Arial, Helvetica, sans-serif", "view": {"stroke": "#ddd"}},
    }  # fmt: skip


# pieces ----------------------------------------------------------------------------------------------------


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: str) -> str:
    return html.escape(value)


def _seconds(value: Any) -> str:
    return "–" if not isinstance(value, int | float) else format_seconds(float(value))


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return f"{value:,.4g}"


def _width(interval: Any) -> str:
    found = _mapping(interval)
    mean, half = found.get("mean"), found.get("half_width")
    return f"{half / mean:.1%}" if mean and half is not None else "–"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{_text(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in rows)
    return f"<table><tbody>{body}</tbody></table>"


def _json(value: Any) -> str:
    return f"<pre>{_text(json.dumps(value, indent=1, ensure_ascii=False, default=str))}</pre>"
