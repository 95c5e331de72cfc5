"""What two measured points of a deployment say about its other loads.

    python benchmarks/calibration.py [--worst N] [--only TEXT] [--every N] [--residuals FILE]

Each deployment of the bundled measured_serving_points.csv (same engine, GPU, model, dtypes, layout and lengths) that
was measured at three concurrencies or more is calibrated on the first row of its lowest and of its highest; its rows
in between are predicted. Rows with an uncertain layout or a label_note are left out. Beside it, on the same rows:

    fitted        bstar without calibration
    interpolated  bstar without calibration, times the two points' measured/predicted, log-interpolated in concurrency
    peer          AIConfigurator 0.12 (its default mode, then its hybrid one) with the same interpolated correction
    measured      no model at all: the two measurements log-interpolated in log concurrency

--residuals FILE writes residuals of these predictions (JSON lines of `bstar.calibration.residuals.Residual`), and of
predictions of the same deployment's rows with other lengths: what `benchmarks/residuals.py` makes ranges of.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bstar.calibration.bundled import PEER, SERVING, bundled_points, bundled_text
from bstar.calibration.few_points import calibrated_on
from bstar.calibration.observations import of_point
from bstar.calibration.point import Point
from bstar.calibration.points import deployment_of
from bstar.calibration.profile import Profile, calibrated
from bstar.calibration.replay import replay
from bstar.errors import BstarError

METRICS = ("tpot_s", "ttft_s")
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One deployment under one pair of lengths: the two points that calibrate, and the rows in between."""

    label: str
    deployment: tuple[Any, ...]
    low: Point
    high: Point
    rest: tuple[Point, ...]


def server_of(p: Point) -> tuple[Any, ...]:
    """What names a deployment, lengths apart."""
    return (p.harness, p.engine, p.gpu, p.model, p.weight_dtype, p.gemm_dtype, p.moe_dtype, p.num_gpus, p.attention_tp,
            p.attention_dp, p.expert_parallel)


def groups(points: list[Point]) -> Iterator[Group]:
    """Deployments that were measured at three concurrencies or more."""
    found: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for p in points:
        if p.mode == "agg" and p.counts and p.tpot_s:
            found[(*server_of(p), p.input_tokens, p.output_tokens)].append(p)
    for rows in found.values():
        rows.sort(key=lambda p: (p.concurrency, p.id))
        low, most = rows[0], rows[-1].concurrency
        high = next(p for p in rows if p.concurrency == most)
        rest = tuple(p for p in rows if low.concurrency < p.concurrency < most)
        if rest:
            label = f"{low.engine} {low.gpu} {low.model.split('/')[-1]} {low.weight_dtype} tp{low.attention_tp} " \
                    f"dp{low.attention_dp} ep{low.expert_parallel} {low.input_tokens:.0f}/{low.output_tokens:.0f}"
            yield Group(label=label, deployment=server_of(low), low=low, high=high, rest=rest)


def corrected(group: Group, answer: Callable[[Point], Figures]) -> list[tuple[Point, Figures]]:
    """Answers times measured/answered at the two points, log-interpolated in log concurrency; None: no answer."""
    ends = [(math.log(p.concurrency), p, answer(p)) for p in (group.low, group.high)]
    out = []
    for p in group.rest:
        share = (math.log(p.concurrency) - ends[0][0]) / (ends[1][0] - ends[0][0])
        given = answer(p)
        figures: Figures = {}
        for m in METRICS:
            parts = [(getattr(end, m), of[m]) for _, end, of in ends]
            one = given[m]
            if one is None or any(a is None or b is None for a, b in parts):
                figures[m] = None
                continue
            first, last = (math.log(a / b) for a, b in parts)
            figures[m] = one * math.exp((1 - share) * first + share * last)
        out.append((p, figures))
    return out


def peer(mode: str) -> Callable[[Point], Figures]:
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(bundled_text(PEER)))}

    def answer(p: Point) -> Figures:
        row = rows.get(p.id, {})
        cells = {m: row.get(f"aiconfigurator_0.12.0_{mode}_{m[:-2]}_ms") for m in METRICS}
        return {m: float(text) / 1e3 if text else None for m, text in cells.items()}

    return answer


class Fitted:
    """Predictions of bstar without calibration, each made once."""

    def __init__(self) -> None:
        self._known: dict[str, Figures] = {}

    def __call__(self, p: Point) -> Figures:
        if p.id not in self._known:
            found = replay(p)
            self._known[p.id] = {"ttft_s": found.ttft_s, "tpot_s": found.tpot_s}
        return self._known[p.id]


def calibrated_rows(group: Group) -> tuple[Profile, list[tuple[Point, Figures]]]:
    """The profile of the two points, and what it says of the rest."""
    profile = calibrated_on([(deployment_of(p), of_point(p)) for p in (group.low, group.high)])
    return profile, [(p, with_profile(p, profile)) for p in group.rest]


def with_profile(p: Point, profile: Profile) -> Figures:
    found = replay(p, calibrated(deployment_of(p), profile))
    bound = found.regime.bound_by if found.regime is not None else ""
    return {"ttft_s": found.ttft_s, "tpot_s": found.tpot_s, "bound_by": bound}


def residuals(p: Point, figures: Figures, distance: str) -> Iterator[str]:
    """JSON lines of the row's residuals."""
    deployment = deployment_of(p)
    for m in METRICS:
        if figures[m] and getattr(p, m):
            yield json.dumps({
                "id": p.id, "metric": m[:-2], "distance": distance, "engine": deployment.engine.name,
                "gpu": deployment.device.id, "model": deployment.model.name, "bound_by": figures["bound_by"],
                "value": math.log(getattr(p, m) / figures[m])})


def line(name: str, rows: list[tuple[Point, Figures]]) -> str:
    cells = [f"{name:24}"]
    for m in METRICS:
        pairs = [(f[m], getattr(p, m)) for p, f in rows if getattr(p, m)]
        e = np.array([a / b - 1 for a, b in pairs if a is not None])
        if not e.size:
            cells.append(f"{0:5}" + " " * 40)
            continue
        size = np.abs(e)
        cells.append(f"{e.size:5} {np.median(size):7.1%} {size.mean():7.1%} {np.quantile(size, 0.9):7.1%} "
                     f"{np.median(e):+7.1%} {np.mean(np.abs(np.log1p(e))):7.3f}")
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--worst", type=int, default=0, help="deployments to print, with what moved")
    parser.add_argument("--only", default="", help="deployments whose label holds this")
    parser.add_argument("--every", type=int, default=1, help="every N-th deployment")
    parser.add_argument("--residuals", type=Path, help="write residuals, other lengths too, as JSON lines")
    arguments = parser.parse_args()
    chosen = [g for g in groups(list(bundled_points(SERVING))) if arguments.only in g.label][:: arguments.every]
    fitted, begun, spent = Fitted(), time.perf_counter(), 0.0
    tables: dict[str, list[tuple[Point, Figures]]] = defaultdict(list)
    ours: list[tuple[Group, Profile, list[tuple[Point, Figures]]]] = []
    for group in chosen:
        started = time.perf_counter()
        try:
            profile, rows = calibrated_rows(group)
        except BstarError as error:
            print(f"{group.label}: {error}")
            continue
        spent += time.perf_counter() - started
        ours.append((group, profile, rows))
        tables["calibrated"] += rows
        tables["fitted"] += [(p, fitted(p)) for p in group.rest]
        tables["interpolated"] += corrected(group, fitted)
        tables["peer, default"] += corrected(group, peer("silicon"))
        tables["peer, hybrid"] += corrected(group, peer("hybrid"))
        tables["measured"] += corrected(group, lambda p: dict.fromkeys(METRICS, 1.0))
    print(f"{len(ours)} deployments of {len(chosen)}, {time.perf_counter() - begun:.0f} s "
          f"({spent / max(len(ours), 1):.2f} s a calibration with its predictions)\n")
    head = "    n  median    mean     p90    bias |ln|   "
    print(f"{'':24}  {'TPOT':47}  TTFT\n{'':24}  {head}  {head}")
    for name, rows in tables.items():
        print(line(name, rows))
    print()
    for engine in sorted({p.engine for p, _ in tables["calibrated"]}):
        for name in ("calibrated", "peer, default"):
            print(line(f"{engine}: {name}", [(p, f) for p, f in tables[name] if p.engine == engine]))
    answered = {p.id for p, f in tables["peer, default"] if f["tpot_s"] is not None}
    print(line("\nwhere the peer answers", [(p, f) for p, f in tables["calibrated"] if p.id in answered]))
    if arguments.residuals:
        other = defaultdict(list)
        lines = [text for p, f in tables["calibrated"] for text in residuals(p, f, "calibrated")]
        for group, profile, _ in ours:
            for sibling, _, _ in ours:
                if sibling.deployment == group.deployment and sibling is not group:
                    picked = (sibling.low, *sibling.rest, sibling.high)[::3]
                    other[group.label] += [(p, with_profile(p, profile)) for p in picked]
        tables["other lengths"] = [row for rows in other.values() for row in rows]
        lines += [text for p, f in tables["other lengths"] for text in residuals(p, f, "calibrated_lengths")]
        arguments.residuals.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(line("other lengths", tables["other lengths"]))
    for group, profile, rows in sorted(ours, key=lambda one: -_badness(one[2]))[: arguments.worst]:
        print(f"\n{group.label}   calibrated on {group.low.concurrency} and {group.high.concurrency}")
        print("   " + "  ".join(f"{p.concurrency}: {_off(f['tpot_s'], p.tpot_s)}/{_off(f['ttft_s'], p.ttft_s)}"
                                for p, f in rows))
        print("   " + "  ".join(f"{c.name} {c.prior:.3g}→{c.value:.3g}" for c in profile.constants))
        for note in profile.notes:
            print("   " + note)


def _badness(rows: list[tuple[Point, Figures]]) -> float:
    return sum(abs(f["tpot_s"] / p.tpot_s - 1) for p, f in rows if f["tpot_s"] and p.tpot_s)


def _off(predicted: float | None, measured: float | None) -> str:
    return "–" if not predicted or not measured else f"{predicted / measured - 1:+.0%}"


if __name__ == "__main__":
    main()
