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
from bstar.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from bstar.measure.folder import RecordedRun

NAME: Final = "report.html"
_LATENCIES: Final = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "max")
# A chart shows at most so many points of a run: the eye sees no more, and the page stays small.
_POINTS: Final = 1_500
# Last word of a field's name -> how it is written beside a value.
_UNITS: Final = {"w": "W", "c": "°C", "tokens": "tokens", "running": "requests", "waiting": "requests",
                 "capacity": "requests", "requests": "requests"}  # fmt: skip
_WITH_UNIT: Final = ("s", "fraction", "bytes", "hz", "w", "c")
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
    parts += _wall(run)
    parts += ["<h2>Latency</h2>", _latency(summary), "<h2>Throughput</h2>", _facts(_rates(summary))]
    parts += _slo(summary, _mapping(run.config.get("slo")))
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


def _wall(run: RecordedRun) -> list[str]:
    """The wall that the server stood at, and why, where its own counters tell it."""
    from bstar.tuning.recorded import evidence_of_recorded
    from bstar.tuning.walls import find_wall

    seen = evidence_of_recorded(run)
    if seen is None:
        return []
    found = find_wall(seen)
    because = "; ".join(found.because)
    return [f'<p>wall: <b>{_text(found.title)}</b> <span class="soft">{_text(because)} '
            "(more: bstar diagnose --run)</span></p>"]


def _rates(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    steady = _mapping(summary.get("steady"))
    return [("output", _number(summary.get("output_tokens_per_s"), "tokens/s")),
            ("with prompts", _number(summary.get("total_tokens_per_s"), "tokens/s")),
            ("requests", _number(summary.get("requests_per_s"), "requests/s")),
            ("output while loaded", _number(steady.get("output_tokens_per_s"), "tokens/s")),
            ("requests while loaded", _number(steady.get("requests_per_s"), "requests/s"))]


def _slo(summary: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What was asked and what was kept; nothing where nothing was asked."""
    limits = [f"{name.removesuffix('_s').upper()} ≤ {format_seconds(float(asked[name]))}"
              for name in ("ttft_s", "tpot_s", "e2e_s") if asked.get(name) is not None]
    if not limits:
        return []
    wanted = _quantity("fraction", asked.get("attainment_fraction"))
    attained = _quantity("fraction", summary.get("slo_attainment_fraction"))
    return ["<h2>SLO</h2>", _facts([
        ("limits", f"{', '.join(limits)} for {wanted} of the requests"),
        ("attainment", f"{attained}: {'met' if summary.get('meets_slo') else 'missed'}"),
        ("goodput", _number(summary.get("goodput_requests_per_s"), "requests/s"))])]


def _client(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    health = _mapping(summary.get("health"))
    rows = [("limited by the client", "yes" if health.get("client_limited") else "no")]
    for key, label in (("dispatch_delay_s", "sent late (p99)"), ("loop_lag_s", "event loop late (p99)")):
        rows.append((label, _seconds(_mapping(health.get(key)).get("p99"))))
    rows.append(("CPU share of a core", _quantity("fraction", health.get("cpu_fraction"))))
    tokens = _mapping(summary.get("tokens"))
    rows.append(("tokens counted by", ", ".join(_mapping(tokens.get("counted_by"))) or "–"))
    hits = _mapping(summary.get("prefix_cache")).get("hit_fraction")
    return [*rows, ("prefix cache hits", "–" if hits is None else f"{hits:.1%} of prompt tokens")]


def _server(server: Mapping[str, Any]) -> str:
    gauges = [(_name(name), _quantity(name, g.get("mean")), _quantity(name, g.get("max"))) for name, g in
              _mapping(server.get("gauges")).items()]  # fmt: skip
    held = _mapping(server.get("in_flight"))
    # By the latencies that it counts: gauges are read at moments, and some of those lie between two waves.
    gauges += [(f"{label}, by latencies", _number(held.get(name), "requests"), "") for label, name in
               (("in the server", "requests"), ("waiting", "waiting")) if held.get(name) is not None]
    counters = [(_name(name), _quantity(name, value)) for name, value in _mapping(server.get("counters")).items()]
    histograms = [(_name(name), _number(h.get("count")), _quantity(name, h.get("mean")),
                   *(_percentile(name, h, s) for s in ("p50", "p95", "p99")))
                  for name, h in ((n, _mapping(h)) for n, h in _mapping(server.get("histograms")).items())]
    parts = [_table(("gauge, while loaded", "mean", "max"), gauges)] if gauges else []
    parts += [_table(("counter", "in the run"), counters)] if counters else []
    if histograms:
        parts += [_table(("histogram", "observations", "mean", "p50", "p95", "p99"), histograms),
                  '<p class="soft">a range: the bucket that the percentile lies in is all that the server tells</p>']
    return "<br>".join(parts)


def _percentile(name: str, histogram: Mapping[str, Any], statistic: str) -> str:
    """The value, or the bucket where that is wider than the value; nothing where one bucket holds all."""
    bucket = _mapping(histogram.get("buckets")).get(statistic)
    if bucket is None:
        return "–"
    if histogram.get(statistic) is not None:
        return _quantity(name, histogram[statistic])
    low, high = bucket
    return f"> {_quantity(name, low)}" if high is None else f"{_quantity(name, low)} – {_quantity(name, high)}"


def _gpu(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(_name(name), f"{_quantity(name, v.get('mean'))} (max {_quantity(name, v.get('max'))})")
            for name, v in gpu.items() if isinstance(v, Mapping) and "mean" in v]


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


def _number(value: Any, unit: str = "") -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return "–"
    return f"{format_count(value, digits=4)} {unit}".rstrip()


def _name(name: str) -> str:
    """A field's name without its unit, which stands beside the value."""
    words = name.split("_")
    return " ".join(words[:-1] if words[-1] in _WITH_UNIT and words[1:] else words)


def _quantity(name: str, value: Any) -> str:
    """A value with the unit that its field's name ends in."""
    number, unit = _number(value), name.split("_")[-1]
    if number == "–":
        return number
    if unit == "s":
        return format_seconds(value)
    if unit == "fraction":
        return f"{format_count(100.0 * value, digits=3)}%"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "hz":
        return format_rate(value, "Hz")
    return f"{number} {_UNITS.get(unit, '')}".rstrip()


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
