"""Measured points in files: what `bstar calibrate` reads.

    a folder of bstar bench       its very requests are simulated again; of a sweep, each load is a point
    a result of another tool      vllm bench serve, GuideLLM, AIPerf, inference-perf: its requests, where it keeps them
    FILE.csv (or .csv.gz)         measured points with the columns of `bstar validate`
    FILE.json, .toml, .yaml       {"points": [{"concurrency": 8, "input_tokens": 512, …}, …]}

and what a running server shows of its own load: `of_window`, through scrapes of its /metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bstar.calibration.observations import Observation, of_mapping, of_point
from bstar.catalog.served import served_in
from bstar.errors import ConfigError
from bstar.metrics.rates import whole_run
from bstar.metrics.records import RequestRecords
from bstar.specs.workload import LengthDistribution
from bstar.traffic.load import Traffic

if TYPE_CHECKING:
    from bstar.calibration.point import Point
    from bstar.measure.folder import RecordedRun
    from bstar.measure.imports import ImportedRun
    from bstar.measure.server.snapshot import Window

# Requests between two scrapes below which their means say little.
_FEWEST_ANSWERS: Final = 20
_MOST_NOTED: Final = 8
# Clients wait for a place, not for cache: in so many scrapes, with so much of the cache in use at most.
_OFTEN_WAITING, _CACHE_FREE = 0.5, 0.9


def observations_in(path: Path) -> list[Observation]:
    """The observations of a file or folder. Raises ConfigError naming it and the remedy."""
    if not path.exists():
        raise ConfigError(f"points {str(path)!r}: does not exist; name a run of bstar bench or a file of points")
    if _is_foreign(path):
        from bstar.measure.imports import read_results

        return [of_imported(one) for one in read_results(path)]
    if path.is_dir():
        return _of_folder(path)
    if path.name.endswith((".csv", ".csv.gz")):
        found = _of_rows(path)
    else:
        from bstar.codec.spec_files import read_mapping

        _not_a_list(path)
        raw = read_mapping(path, what="points")
        listed = raw.get("points")
        if set(raw) != {"points"} or not isinstance(listed, list) or not all(isinstance(p, Mapping) for p in listed):
            raise ConfigError(f"points {str(path)!r}: must hold one key, points, with a list of measured points")
        found = [of_mapping(one, f"{path.name} points[{number}]") for number, one in enumerate(listed, 1)]
    if not found:
        raise ConfigError(f"points {str(path)!r}: has no row with ttft or tpot; measure some with bstar bench")
    return found


def _of_rows(path: Path) -> list[Observation]:
    """The rows of a CSV file that have a figure; the first says which were left out."""
    from bstar.calibration.points import read_points

    points = read_points(path)
    out = [f"{path.name}: row {p.id} is left out: {p.fault or 'it has neither ttft nor tpot'}"
           for p in points if not _usable(p)]
    if len(out) > _MOST_NOTED:
        out = [*out[:_MOST_NOTED], f"{path.name}: {len(out) - _MOST_NOTED} more rows are left out"]
    return _noting([of_point(p) for p in points if _usable(p)], out)


def _usable(point: Point) -> bool:
    return point.fault is None and bool(point.ttft_s or point.tpot_s)


def _noting(found: list[Observation], notes: Sequence[str]) -> list[Observation]:
    """The same, the first with the notes."""
    return [replace(found[0], notes=(*notes, *found[0].notes)), *found[1:]] if found and notes else found


def _not_a_list(path: Path) -> None:
    """Raises ConfigError where the file is a bare JSON list, with what it should be."""
    try:
        with path.open("rb") as file:
            first = file.read(64).lstrip()[:1]
    except OSError:
        return  # told by the reader
    if path.suffix.lower() == ".json" and first == b"[":
        raise ConfigError(f'points {str(path)!r}: is a list; write {{"points": [...]}}')


def _of_folder(path: Path) -> list[Observation]:
    """The observations of a run, or of the runs in a sweep's folder that are results of the server.

    The first says which of the others were left out, and why.
    """
    from bstar.codec.safe_json import read_json
    from bstar.measure.folder import broke_off, is_unfinished, read_run, runs_in

    runs = runs_in(path)
    if runs == [path]:
        return [of_run(path)]
    tuning = path / "tune.json"
    if tuning.is_file() and (read_json(tuning, what="tuning").get("settings") or {}).get("serve"):
        raise ConfigError(f"run {str(path)!r}: its servers had different max_num_seqs; name one of its runs ("
                          f"{', '.join(run.name for run in runs[:6])})")
    read = {run: read_run(run) for run in runs}
    refused = {run: why for run in runs if (why := _refusal(read[run].summary))}
    if len(refused) == len(runs):
        raise ConfigError(f"run {str(path)!r}: none of its {len(runs)} runs is a result of the server "
                          f"({runs[0].name}: {refused[runs[0]]}); measure again")
    out = [f"{run.name} is left out: it is no result of the server ({why})" for run, why in refused.items()]
    cut = {run: why for run in runs if run not in refused and (why := broke_off(read[run]))}
    if len(refused) + len(cut) < len(runs):  # else they are all there is
        out += [f"{run.name} is left out: it {why}" for run, why in cut.items()]
        refused |= cut
    out += [f"{one.name} is left out: it broke off" for one in sorted(path.iterdir())
            if is_unfinished(one) and one not in runs]
    return _noting([of_run(run) for run in runs if run not in refused], out)


def _refusal(summary: Mapping[str, Any]) -> str:
    """Why a run is no result of the server; empty where it is one."""
    verdict = summary.get("verdict") or {}
    if verdict.get("valid") is not False:
        return ""
    return "; ".join(str(r) for r in verdict.get("reasons", ())) or "see its summary.json"


def of_run(path: Path) -> Observation:
    """The observation of a run's folder (`bstar bench --out`). Raises ConfigError where the run is no result."""
    from bstar.measure.folder import broke_off, read_run

    run = read_run(path)
    reasons = _refusal(run.summary)
    if reasons:
        raise ConfigError(f"run {str(path)!r}: is no result of the server ({reasons}); measure again")
    broken = broke_off(run)
    sent = _as_answered(_sent_of(run.traffic, run.table) if broken else run.traffic, run.table)
    kept = run.measured & (run.table.error == "")
    if not kept.any():
        raise ConfigError(f"run {str(path)!r}: no request of it was answered; measure again")
    rate = None if sent.concurrency is not None else sent.rate_per_s
    return Observation(
        id=path.name, sent=sent, concurrency=sent.concurrency, rate_per_s=rate, measured=_figures_of(run),
        input_tokens=_mean_length(run.table.input_tokens[kept]),
        output_tokens=_mean_length(run.table.output_tokens[kept]), served=served_in(run.environment),
        seats=_seats(run.summary), notes=(f"{path.name} {broken}",) if broken else (),
    )  # fmt: skip


def _sent_of(traffic: Traffic, table: Any) -> Traffic:
    """Of a run that broke off: the requests that it came to."""
    count = int(table.index.max(initial=0)) + 1
    return replace(traffic.take(np.arange(count)), warmup_requests=min(traffic.warmup_requests, count - 1))


def _figures_of(run: RecordedRun) -> dict[str, float]:
    """Its figures as those of a simulated point are (`observations.figures_of`): with a warm-up the rate is of the
    measured requests alone, where the summary's is of everything that was served (`bstar.measure.rates`)."""
    found = figures_in(run.summary)
    if run.measured.all() or "output_tokens_per_s" not in found:
        return found
    alone = whole_run(run.table.take(run.measured).records())
    return found | {"output_tokens_per_s": alone.output_tokens_per_s}


def _seats(summary: Mapping[str, Any]) -> int | None:
    """The most requests that ran while others waited and cache was free; None where none waited, or nothing shows."""
    server = summary.get("server") or {}
    running, cache = ((server.get("gauges") or {}).get(name) or {} for name in ("running", "kv_usage_fraction"))
    often = (server.get("waiting_share") or 0.0) >= _OFTEN_WAITING
    if not often or not running.get("max") or (cache.get("max") or 0.0) > _CACHE_FREE:
        return None
    return int(running["max"])


def _is_foreign(path: Path) -> bool:
    if path.name.endswith((".csv", ".csv.gz", ".toml", ".yaml", ".yml")):
        return False
    from bstar.measure.imports import is_foreign_result

    return bool(is_foreign_result(path))


def of_imported(run: ImportedRun) -> Observation:
    """The observation of another tool's run. Raises ConfigError where it does not say what its load was."""
    measured = {name: run.figure(f"{name}.mean") for name in ("ttft_s", "tpot_s", "e2e_s")}
    measured |= {"output_tokens_per_s": run.figure("output_tokens_per_s")}
    known = {name: value for name, value in measured.items() if value is not None and value > 0}
    if not known:
        raise ConfigError(f"{run.tool} {run.name}: has no latencies; measure again")
    if run.concurrency is None and run.rate_per_s is None:
        raise ConfigError(f"{run.tool} {run.name}: does not say its concurrency or rate; give its figures as a point")
    means = [run.figure(f"{name}.mean") for name in ("input_tokens", "output_tokens")]
    sent = None
    if run.records is not None:
        sent = _sent(run.records, run.concurrency)
        means = [float(run.records.input_tokens.mean()), float(run.records.output_tokens.mean())]
    if any(mean is None or not mean >= 1 for mean in means):
        raise ConfigError(f"{run.tool} {run.name}: does not say how long prompts and answers are; give its figures as "
                          "a point")
    rate = None if run.concurrency is not None else run.rate_per_s
    return Observation(
        id=run.name, sent=sent, concurrency=run.concurrency, rate_per_s=rate, burstiness=run.burstiness or 1.0,
        input_tokens=_mean_length(means[0]), output_tokens=_mean_length(means[1]), measured=known,
        measured_on=run.date, served=(run.model,) if run.model else ())  # fmt: skip


def _sent(records: RequestRecords, concurrency: int | None) -> Traffic:
    """The recorded requests as a load: at the times they were sent, or as a closed loop's clients took them."""
    order = np.argsort(records.sent_s, kind="stable")
    arrival = records.sent_s[order].astype(float)
    if concurrency is not None:
        arrival = np.full(order.size, np.nan)
        arrival[: min(concurrency, order.size)] = 0.0
    return Traffic(
        arrival_s=arrival, input_tokens=np.maximum(records.input_tokens[order], 1),
        output_tokens=np.maximum(records.output_tokens[order], 1),
        concurrency=None if concurrency is None else min(concurrency, order.size))  # fmt: skip


def of_window(found: Window, *, name: str = "server") -> Observation:
    """The observation of a server through a window of its metrics: no load of our own.

    Its load is taken for Poisson arrivals at the rate that was seen, with the mean lengths, its latencies are the means
    of its histograms (as the server sees them: the client's way to it is not in them). Raises ConfigError where too
    little happened or the server does not show enough.
    """
    histograms = found.histograms
    lengths = {name: _window_mean(found, name, total) for name, total in
               (("input_tokens", "prompt_tokens"), ("output_tokens", "generated_tokens"))}
    answered = found.count("requests")
    if found.restarted:
        raise ConfigError("metrics: the server was restarted between the scrapes; watch again")
    if math.isnan(answered):
        raise ConfigError("metrics: the server shows no count of answered requests: it has answered none (is there "
                          "load?), or does not count them; then use bstar bench")
    if not answered and not found.counters.get("generated_tokens", 0.0) > 0:
        raise ConfigError("metrics: the server was idle, no request was answered between the scrapes; is there load? "
                          "watch while there is, or use bstar bench")
    if answered < _FEWEST_ANSWERS:
        raise ConfigError(f"metrics: {answered:.0f} requests were answered between the scrapes, fewer than "
                          f"{_FEWEST_ANSWERS}; watch for longer (--window)")
    if not all(value >= 1 for value in lengths.values()):
        raise ConfigError("metrics: the server does not show how long prompts and answers are; use bstar bench")
    measured = {name: histograms[name].mean for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")
                if name in histograms and histograms[name].count >= _FEWEST_ANSWERS}
    measured = {name: value for name, value in measured.items() if value > 0}
    if "tpot_s" in measured:
        measured.pop("itl_s", None)
    if not measured:
        raise ConfigError("metrics: the server shows no latencies; measure with bstar bench")
    return Observation(
        id=name, rate_per_s=found.rate("requests"), input_tokens=_mean_length(lengths["input_tokens"]),
        output_tokens=_mean_length(lengths["output_tokens"]), measured=measured, served=found.served)


def _window_mean(found: Window, name: str, total: str) -> float:
    """Mean tokens of a request: of its histogram, else of the counters; nan where neither is shown."""
    if name in found.histograms and found.histograms[name].count > 0:
        return found.histograms[name].mean
    return found.count(total) / found.count("requests") if found.count("requests") else math.nan


def figures_in(summary: Mapping[str, Any]) -> dict[str, float]:
    """Means and rates of a summary of `bstar bench` or `bstar simulate`."""
    out: dict[str, float] = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        mean = (summary.get(name) or {}).get("mean")
        if mean:
            out[name] = float(mean)
    rate = summary.get("output_tokens_per_s")
    return out | ({"output_tokens_per_s": float(rate)} if rate else {})


def _as_answered(traffic: Traffic, table: Any) -> Traffic:
    """The requests with the lengths that the server counted: answers may have ended early."""
    inputs, outputs = (np.array(np.broadcast_to(a, (traffic.num_requests,))) for a in
                       (traffic.input_tokens, traffic.output_tokens))
    whole = np.asarray(table.error == "") & (table.output_tokens > 0) & (table.input_tokens > 0)
    inputs[table.index[whole]] = table.input_tokens[whole]
    outputs[table.index[whole]] = table.output_tokens[whole]
    return replace(traffic, input_tokens=inputs, output_tokens=outputs)


def _mean_length(tokens: Any) -> LengthDistribution:
    return LengthDistribution(kind="fixed", mean=max(float(round(float(np.mean(tokens)))), 1.0))
