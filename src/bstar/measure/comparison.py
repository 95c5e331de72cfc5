"""Runs side by side, measured, imported or simulated: each figure, its interval, its ratio to the first run.

Runs have the same records whoever made them, so one comparison serves all: a server before and after a change, two
clients on one server, a prediction and what was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from bstar.errors import ConfigError, SpecError
from bstar.measure.folder import broke_off, read_run, runs_in
from bstar.metrics.definitions import METRICS
from bstar.metrics.intervals import Interval, batch_means, quantile_interval, rate_interval, share_interval
from bstar.metrics.records import RequestRecords
from bstar.specs.slo import Slo

Kind = Literal["measured", "imported", "simulated"]
LATENCIES: Final = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
PARTS: Final = ("mean", "p50", "p95", "p99")
RATES: Final = ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "slo_attainment_fraction")
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_LIMITS: Final = ("ttft_s", "tpot_s", "e2e_s")
# Requests of a batch at least: 40 of them make five.
_LEAST: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRun:
    """One run.

    source    "bstar bench", "bstar simulate", or the other tool
    figures   by name: "ttft_s.p95", "output_tokens_per_s"
    records   its requests, in the order of sending; None where the file keeps none
    slo       the limits that attainment and goodput are about; None: none, or not known
    facts     what it was: model, server, load
    invalid   why it is no result of the server; empty where it is
    """

    name: str
    kind: Kind
    source: str
    figures: Mapping[str, float]
    records: RequestRecords | None = None
    slo: Slo | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    invalid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def interval(self, name: str) -> Interval | None:
        """The 95 % interval of a figure from the run's requests (`bstar.metrics.intervals`); None where there is none.

        Of a mean by batches of consecutive requests, of a percentile by ranks, of a rate by slices of the time, of the
        attainment as of a share.
        """
        metric, _, part = name.partition(".")
        if self.records is None or len(self.records) == 0:
            return None
        if name in RATES:
            found = self._interval_of_rate(name)
        elif metric in ("ttft_s", "tpot_s", "e2e_s") and part in PARTS:
            values = getattr(self.records, metric)[np.argsort(self.records.sent_s, kind="stable")]
            quantile = _QUANTILES.get(part)
            found = batch_means(values, least=_LEAST) if quantile is None else quantile_interval(values, quantile)
        else:
            return None
        return found if found is not None and found.half_width is not None else None

    def _interval_of_rate(self, name: str) -> Interval | None:
        """Of the steady part: from one mean request's time after the first was sent, when clients that began with
        requests that do not count have ended them, to when the last was sent.

        The figure is of the whole run, its ends included; its interval is as wide relative to it.
        """
        records, figure = self.records, self.figures.get(name)
        assert records is not None
        if figure is None or not records.finished.any() or (self.slo is None and name in RATES[2:]):
            return None
        good = records.meets(self.slo)
        if name == "slo_attainment_fraction":
            return share_interval(good[np.argsort(records.sent_s, kind="stable")])
        tokens = name == "output_tokens_per_s"
        request_s = float(np.nanmean(records.e2e_s))
        found = rate_interval(
            records.first_token_s if tokens else records.sent_s, records.finish_s,
            records.output_tokens if tokens else good if name == "goodput_requests_per_s" else np.ones(len(records)),
            from_s=float(np.nanmin(records.sent_s)) + request_s, to_s=float(np.nanmax(records.sent_s)),
            request_s=request_s)  # fmt: skip
        width = found.relative_half_width
        return None if width is None else replace(found, mean=figure, half_width=width * figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One figure of all runs; ratios are to the first.

    apart   whether the 95 % intervals of a run and of the first one do not touch; None: not known
    """

    name: str
    values: tuple[float | None, ...]
    ratios: tuple[float | None, ...]
    intervals: tuple[Interval | None, ...]
    apart: tuple[bool | None, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"values": list(self.values), "ratios": list(self.ratios), "apart": list(self.apart),
                "intervals": [None if i is None else i.to_dict() for i in self.intervals]}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs and their figures."""

    runs: tuple[ComparedRun, ...]
    figures: tuple[ComparedFigure, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": [{"name": r.name, "kind": r.kind, "source": r.source, "facts": dict(r.facts),
                      "invalid": list(r.invalid), "notes": list(r.notes)} for r in self.runs],
            "figures": {f.name: f.to_dict() for f in self.figures}, "notes": list(self.notes),
        }  # fmt: skip


def compare_runs(runs: Sequence[ComparedRun]) -> RunComparison:
    """Every figure that two or more runs have. Raises SpecError for fewer than two runs."""
    if len(runs) < 2:
        raise SpecError("compare: give two or more runs: folders of bstar bench, files of other tools, simulations")
    names = [f"{metric}.{part}" for metric in LATENCIES for part in PARTS] + list(RATES)
    figures = [_figure(name, runs) for name in names if sum(name in r.figures for r in runs) > 1]
    return RunComparison(runs=tuple(runs), figures=tuple(figures), notes=_notes(runs))


def _figure(name: str, runs: Sequence[ComparedRun]) -> ComparedFigure:
    values = tuple(r.figures.get(name) for r in runs)
    intervals = tuple(r.interval(name) for r in runs)
    base = values[0]
    ratios = tuple(None if v is None or not base else v / base for v in values)
    return ComparedFigure(name=name, values=values, ratios=ratios, intervals=intervals,
                          apart=tuple(_apart(intervals[0], i) for i in intervals))


def _apart(one: Interval | None, other: Interval | None) -> bool | None:
    return None if one is None or other is None or one is other else one.is_apart_from(other)


def _notes(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """What makes runs less than comparable."""
    notes = [f"{r.name} is no result of the server: {reason}" for r in runs for reason in r.invalid]
    for key, label in (("load", "the load"), ("fingerprint", "the requests"), ("model", "the model")):
        told = [str(r.facts[key]) for r in runs if r.facts.get(key)]
        # "meta-llama/Llama-3.1-8B" and "llama-3.1-8b" are one model.
        said = set({(name.rpartition("/")[2].lower() if key == "model" else name): name for name in told}.values())
        if len(said) > 1 and key != "fingerprint":
            notes.append(f"{label} differs: " + "; ".join(sorted(said)))
        elif len(said) > 1:
            notes.append(f"{label} differ (other lengths, seed or arrivals)")
    return tuple(dict.fromkeys(notes + [f"{r.name}: {note}" for r in runs for note in r.notes]))


def better(name: str) -> str:
    """Which direction of a figure is better."""
    return METRICS[name.partition(".")[0]].better


# reading ---------------------------------------------------------------------------------------------------


def read_compared(path: str | Path) -> list[ComparedRun]:
    """The runs of a path: a folder of bench (of a sweep: one a load), a result of another tool, the JSON or requests of
    a simulation.

    Raises ConfigError naming the file and the remedy.
    """
    from bstar.measure.imports import is_foreign_result, read_results

    place = Path(path)
    if place.suffix in (".parquet", ".csv", ".jsonl") and place.is_file():
        return [_of_simulated_requests(place)]
    if is_foreign_result(place):
        return [_of_import(run) for run in read_results(place)]
    if place.is_dir():
        runs = runs_in(place)
        return [_of_bench(run, name=run.name if runs == [place] else f"{place.name}/{run.name}") for run in runs]
    if place.suffix == ".json" and place.is_file():
        return [_of_simulation(place)]
    raise ConfigError(f"compare: {path} is no run; give a folder of bstar bench, the result of another tool, or what "
                      "bstar simulate wrote (--json > FILE.json, --requests-out FILE.parquet)")


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a summary as JSON."""
    out: dict[str, float] = {}
    for metric in LATENCIES:
        for part in PARTS:
            value = (summary.get(metric) or {}).get(part)
            if isinstance(value, int | float) and not math.isnan(value):
                out[f"{metric}.{part}"] = float(value)
    limited = summary.get("meets_slo") is not None  # without limits every finished request counts as good
    for name in RATES if limited else RATES[:2]:
        value = summary.get(name)
        if isinstance(value, int | float):
            out[name] = float(value)
    return out


def _of_bench(place: Path, *, name: str) -> ComparedRun:
    run = read_run(place)
    load, verdict = run.summary.get("load") or {}, run.summary.get("verdict") or {}
    server = (run.environment.get("server") or {}) if isinstance(run.environment, Mapping) else {}
    return ComparedRun(
        name=name, kind="measured", source="bstar bench", figures=figures_of(run.summary),
        records=run.table.take(run.measured).records(), slo=_slo_of(run.config),
        facts={"model": server.get("model"), "load": _load(load), "fingerprint": load.get("fingerprint")},
        invalid=tuple(map(str, verdict.get("reasons", ()))) if verdict.get("valid") is False else (),
        notes=tuple(filter(None, (broke_off(run),))),
    )  # fmt: skip


def _slo_of(config: Mapping[str, Any]) -> Slo | None:
    """The limits that a run was held to; None where it had none."""
    said = config.get("slo")
    limits = {name: value for name in _LIMITS if isinstance(said, dict) and (value := said.get(name)) is not None}
    return Slo(**limits) if limits else None


def _of_import(run: Any) -> ComparedRun:
    summary = run.summary()
    figures = dict(run.figures) if summary is None else figures_of(summary.to_dict())
    load = {"concurrency": run.concurrency, "rate_per_s": run.rate_per_s}
    notes = run.notes + ((f"{run.failed} requests failed",) if run.failed else ())
    return ComparedRun(name=run.name, kind="imported", source=run.tool, figures=figures, records=run.records,
                       facts={"model": run.model, "load": _load(load)}, notes=notes)


def _of_simulation(place: Path) -> ComparedRun:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"compare: {place}: {error}; write it with bstar simulate … --json > {place.name}") from None
    if not isinstance(content, dict) or "ttft_s" not in content or "output_tokens_per_s" not in content:
        raise ConfigError(f"compare: {place} is no run; bstar simulate … --json > {place.name} writes one")
    kind: Kind = "measured" if content.get("kind") == "measured" else "simulated"
    load, served = (found if isinstance(found := content.get(key), dict) else {} for key in ("load", "deployment"))
    return ComparedRun(name=place.name, kind=kind, source="bstar bench" if kind == "measured" else "bstar simulate",
                       figures=figures_of(content), facts={"load": _load(load), "model": served.get("model")})


def _of_simulated_requests(place: Path) -> ComparedRun:
    from bstar.metrics.gaps import TokenGaps
    from bstar.metrics.summary import summarize

    columns = _columns(place)
    needed = {"arrival_s", "first_token_s", "finish_s", "input_tokens", "output_tokens"}
    if not needed <= set(columns):
        raise ConfigError(f"compare: {place} lacks columns {', '.join(sorted(needed - set(columns)))}; "
                          "write it with bstar simulate --requests-out")
    kept = np.asarray(columns.get("measured", np.ones(len(columns["arrival_s"]), dtype=bool)), dtype=bool)
    records = RequestRecords(
        sent_s=columns["arrival_s"][kept].astype(float), first_token_s=columns["first_token_s"][kept].astype(float),
        finish_s=columns["finish_s"][kept].astype(float), input_tokens=columns["input_tokens"][kept].astype(np.int64),
        output_tokens=columns["output_tokens"][kept].astype(np.int64),
    )  # fmt: skip
    figures = figures_of(summarize(records, TokenGaps.of_samples(np.zeros(0))).to_dict())
    # Requests alone say nothing of single gaps, nor of an SLO.
    figures = {k: v for k, v in figures.items() if not k.startswith(("itl_s", "goodput", "slo"))}
    return ComparedRun(name=place.name, kind="simulated", source="bstar simulate", figures=figures, records=records)


def _columns(place: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        if place.suffix == ".parquet":
            from pyarrow import parquet

            table = parquet.read_table(place)
            return {name: table.column(name).to_numpy() for name in table.column_names}
        if place.suffix == ".csv":
            import csv

            with place.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        else:
            rows = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ImportError:
        raise ConfigError(f"compare: {place} needs pyarrow; pip install 'bstar[parquet]'") from None
    except Exception as error:
        raise ConfigError(f"compare: {place} cannot be read: {error}") from None
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _array([row.get(name) for row in rows]) for name in names}


def _array(values: list[Any]) -> np.ndarray[Any, Any]:
    words = {"true": True, "false": False, "": math.nan, None: math.nan}
    known = [words.get(v.lower(), v) if isinstance(v, str) else words.get(v, v) if v is None else v for v in values]
    try:
        return np.asarray(known, dtype=float)
    except (TypeError, ValueError):
        return np.asarray(known, dtype=object)


def _load(load: Mapping[str, Any]) -> str:
    if load.get("concurrency"):
        clients = int(load["concurrency"])
        return f"{clients} client" + ("s" if clients > 1 else "")
    if load.get("rate_per_s"):
        return f"{float(load['rate_per_s']):.4g} requests/s"
    return ""
