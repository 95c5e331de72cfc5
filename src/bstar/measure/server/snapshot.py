"""One reading of a server's metrics in bstar's names, and what happened through a series of them."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bstar.errors import ConfigError
from bstar.measure.server.histogram import Histogram
from bstar.measure.server.names import NameMap, Source, name_maps

if TYPE_CHECKING:
    from prometheus_client import Metric

# Gauges that are shares: several engines behind one endpoint are averaged, not added.
_SHARES: Final = frozenset({"kv_usage_fraction"})
_COUNTER_SUFFIX: Final = "_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a server showed at `time_s` (monotonic). A missing name: the server does not show it.

    engines   how many engines (label sets) were added up
    info      labels of the engine's configuration metrics
    served    what its metrics call the model (several: each of them)
    """

    time_s: float
    engine: str
    engines: int = 1
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)
    served: tuple[str, ...] = ()

    def gauge(self, name: str) -> float:
        return self.gauges.get(name, math.nan)

    def counter(self, name: str) -> float:
        return self.counters.get(name, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened through a series of snapshots.

    duration_s   the time that was counted: without what lies between two snapshots around a restart
    restarted    a counter fell: the server was restarted in it
    served       what its metrics call the model
    """

    duration_s: float
    engine: str
    restarted: bool
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    served: tuple[str, ...] = ()

    def rate(self, name: str) -> float:
        """Per second; nan where the server does not count it."""
        return self.counters.get(name, math.nan) / self.duration_s if self.duration_s > 0 else math.nan

    def count(self, name: str) -> float:
        """How much the counter rose; nan where there is none."""
        return self.counters.get(name, math.nan)

    def held(self, histogram: str) -> float:
        """Requests in a state at a time, on average, by Little's law: the seconds that a histogram of it counted, over
        the window's ("e2e_s": in the server, "queue_s": waiting). nan where the server does not count it.
        """
        found = self.histograms.get(histogram)
        if found is None or not self.duration_s > 0:
            return math.nan
        return found.total / self.duration_s if found.count > 0 else 0.0

    @property
    def steps(self) -> float:
        """Engine steps: counted, or the observations of the tokens-per-step histogram; nan where neither is."""
        if "steps" in self.counters:
            return self.counters["steps"]
        found = self.histograms.get("step_tokens")
        return found.count if found is not None else math.nan


def window(snapshots: Sequence[Snapshot]) -> Window:
    """What happened through one snapshot or more, in the order of time.

    Between the two around a restart nobody knows what was done, before the end or since the start: that time is left
    out, and figures are the sums over the stretches without one.
    """
    starts = [0, *restarts(snapshots), len(snapshots)]
    stretches = [_between(snapshots[a], snapshots[b - 1]) for a, b in itertools.pairwise(starts)]
    return functools.reduce(_together, stretches)


def restarts(snapshots: Sequence[Snapshot]) -> list[int]:
    """Numbers of the snapshots that are the first after a restart: of those that show less than the one before."""
    return [i for i in range(1, len(snapshots)) if _fell(snapshots[i - 1], snapshots[i])]


def _fell(before: Snapshot, after: Snapshot) -> bool:
    """Whether something that only rises is lower, or gone: engines show some counters from their first use on."""
    if any(after.counters.get(name, 0.0) < value for name, value in before.counters.items()):
        return True
    return any(name not in after.histograms or after.histograms[name].count < h.count
               for name, h in before.histograms.items() if h.count > 0)


def _between(before: Snapshot, after: Snapshot) -> Window:
    """Without a restart between the two."""
    return Window(
        duration_s=after.time_s - before.time_s, engine=after.engine, restarted=False,
        counters={name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()},
        histograms={name: h.minus(before.histograms.get(name)) for name, h in after.histograms.items()},
        served=after.served,
    )  # fmt: skip


def _together(one: Window, two: Window) -> Window:
    """The stretches before and after a restart."""
    histograms = {**one.histograms, **two.histograms}
    for name in one.histograms.keys() & two.histograms.keys():
        histograms[name] = one.histograms[name].plus(two.histograms[name])
    return Window(
        duration_s=one.duration_s + two.duration_s, engine=two.engine, restarted=True,
        counters={name: one.counters.get(name, 0.0) + two.counters.get(name, 0.0)
                  for name in {**one.counters, **two.counters}},
        histograms=histograms, served=tuple(dict.fromkeys((*one.served, *two.served))),
    )  # fmt: skip


def read_snapshot(text: str, time_s: float) -> Snapshot:
    """From the body of /metrics: Prometheus text, or TensorRT-LLM's JSON of iterations.

    Raises ConfigError where it is neither, or no engine that bstar knows.
    """
    stripped = text.lstrip()
    if stripped.startswith(("[", "{")):
        return _from_iterations(stripped, time_s)
    families = _families(text)
    found = next((m for m in name_maps() if any(name.startswith(m.prefix) for name in families)), None)
    if found is None:
        some = ", ".join(sorted(families)[:3]) or "nothing"
        known = ", ".join(dict.fromkeys(m.engine for m in name_maps()))
        raise ConfigError(f"metrics: no engine that bstar knows ({known}) shows {some}; check the URL of the server")
    return _snapshot(found, families, time_s)


def _families(text: str) -> dict[str, Metric]:
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, Metric] = {}
    try:
        for family in text_string_to_metric_families(text):
            # A metric whose samples do not stand together comes in pieces.
            if family.name in found:
                found[family.name].samples += family.samples
            else:
                found[family.name] = family
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"metrics: not Prometheus text: {error}; check the URL of the server") from None
    return found


def _snapshot(names: NameMap, families: Mapping[str, Metric], time_s: float) -> Snapshot:
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    engines = 1
    for (kind, canonical), candidates in names.sources.items():
        for source in candidates:
            family = _family(families, source.name)
            if family is None:
                continue
            if kind == "histogram":
                found = _histogram(family, source)
                if found is not None:
                    histograms[canonical] = found
                    break
                continue
            values = _values(family, source)
            if not values:
                continue
            scale = _scale(families, source)
            if kind == "gauge":
                engines = max(engines, len(values)) if canonical == "running" else engines
                total = math.fsum(values) * scale
                gauges[canonical] = total / len(values) if canonical in _SHARES else total
            else:
                counters[canonical] = math.fsum(values) * scale
            break
    info = {
        label: sample.labels[label]
        for metric, labels in names.info.items()
        for sample in (families[metric].samples[:1] if metric in families else ())
        for label in labels
        if sample.labels.get(label) not in (None, "None", "")
    }
    return Snapshot(time_s=time_s, engine=names.engine, engines=engines, gauges=gauges, counters=counters,
                    histograms=histograms, info=info, served=_served(names, families))


def _served(names: NameMap, families: Mapping[str, Metric]) -> tuple[str, ...]:
    """What the engine's metrics call the model, where they name it."""
    if not names.model_label:
        return ()
    found = {sample.labels.get(names.model_label, "") for name, family in families.items()
             if name.startswith(names.prefix) for sample in family.samples}
    return tuple(sorted(found - {"", "None"}))


def _family(families: Mapping[str, Metric], name: str) -> Metric | None:
    """By name; a counter may have been declared with or without its suffix."""
    return families.get(name) or families.get(name + _COUNTER_SUFFIX)


def _values(family: Metric, source: Source) -> list[float]:
    plain = (source.name, source.name + _COUNTER_SUFFIX)
    return [s.value for s in family.samples
            if s.name in plain and _matches(s.labels, source.where) and not math.isnan(s.value)]


def _scale(families: Mapping[str, Metric], source: Source) -> float:
    """The value that a count is multiplied by; 1 without one. The first label set counts: it is a setting."""
    if not source.scale_by:
        return 1.0
    family = _family(families, source.scale_by)
    values = _values(family, Source(name=source.scale_by, where=source.scale_where)) if family else []
    return values[0] if values else math.nan


def _matches(labels: Mapping[str, str], where: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in where.items())


def _histogram(family: Metric, source: Source) -> Histogram | None:
    buckets: dict[float, float] = {}
    total, count = 0.0, 0.0
    for sample in family.samples:
        if not _matches(sample.labels, source.where):
            continue
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
        elif sample.name.endswith("_count"):
            count += sample.value
    return Histogram.of_cumulative(buckets, total, count) if buckets else None


def _from_iterations(text: str, time_s: float) -> Snapshot:
    """trtllm-serve's own /metrics: a list of iterations since it was last read."""
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"metrics: not JSON: {error}; check the URL of the server") from None
    iterations = [r for r in _records(read) if "numActiveRequests" in r or "kvCacheStats" in r]
    if not iterations:
        raise ConfigError("metrics: JSON without iterations; TensorRT-LLM shows Prometheus text at /prometheus/metrics")
    last = iterations[-1]
    cache = last.get("kvCacheStats") or {}
    batch = last.get("inflightBatchingStats") or {}
    per_block = float(cache.get("tokensPerBlock") or 0)
    gauges = {
        "running": batch.get("numScheduledRequests", last.get("numActiveRequests")),
        "waiting": last.get("numQueuedRequests"),
        "kv_used_tokens": cache.get("usedNumBlocks", 0) * per_block if per_block else None,
        "kv_total_tokens": cache.get("maxNumBlocks", 0) * per_block if per_block else None,
        "kv_usage_fraction": cache["usedNumBlocks"] / cache["maxNumBlocks"] if cache.get("maxNumBlocks") else None,
        "step_s": last["iterLatencyMS"] / 1000.0 if last.get("iterLatencyMS") else None,
    }
    counters = {"steps": float(last["iter"])} if "iter" in last else {}
    known = {name: float(value) for name, value in gauges.items() if value is not None}
    return Snapshot(time_s=time_s, engine="trtllm", gauges=known, counters=counters)


def _records(read: Any) -> Iterable[dict[str, Any]]:
    rows = read if isinstance(read, list) else [read]
    return [row for row in rows if isinstance(row, dict)]
