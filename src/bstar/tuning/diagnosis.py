"""A diagnosis: the wall of a window, its evidence, what the physics says of it, and what would move it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bstar.errors import SpecError
from bstar.measure.server.scraper import MetricsSource
from bstar.measure.server.snapshot import Snapshot
from bstar.measure.telemetry.table import Telemetry
from bstar.specs.deployment import Deployment
from bstar.tuning.evidence import Evidence, evidence_of
from bstar.tuning.knobs import Effect, effects, load_seen
from bstar.tuning.use import Use, use_of
from bstar.tuning.walls import Finding, find_wall


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a window showed.

    use       of the mean step, where the deployment was given
    effects   knobs of the wall, simulated under the load that was seen
    """

    finding: Finding
    evidence: Evidence
    use: Use | None = None
    effects: tuple[Effect, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "wall": self.finding.wall, "title": self.finding.title, "because": list(self.finding.because),
            "also": list(self.finding.also), "evidence": self.evidence.to_dict(),
            "use": None if self.use is None else self.use.to_dict(),
            "effects": [e.to_dict() for e in self.effects], "notes": list(self.notes),
        }  # fmt: skip


def watch(
    source: MetricsSource, *, window_s: float, interval_s: float, on_scrape: Callable[[Snapshot], None] | None = None,
) -> list[Snapshot]:  # fmt: skip
    """Scrape for `window_s`. A scrape that fails is left out; raises ConfigError where the first one does."""
    if not window_s > 0 or not interval_s > 0:
        raise SpecError("window: must be positive, and so must the interval between scrapes")
    snapshots = [source.read()]
    end = time.monotonic() + window_s
    while time.monotonic() < end:
        time.sleep(min(interval_s, max(end - time.monotonic(), 0.0)))
        try:
            snapshots.append(source.read())
        except Exception:
            if time.monotonic() >= end and len(snapshots) < 2:
                raise
            continue
        if on_scrape is not None:
            on_scrape(snapshots[-1])
    return snapshots


def diagnose(
    snapshots: list[Snapshot], deployment: Deployment | None = None, *, telemetry: Telemetry | None = None,
    client_limits: Sequence[str] | None = None, max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None, simulate: bool = True, input_tokens: float | None = None,
    output_tokens: float | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of a window.

    client_limits   why the load's own client was the limit, where it says so (`Health.limited`)
    The rest is as for `diagnose_evidence`.
    """
    seen = evidence_of(snapshots, telemetry=telemetry, client_limits=client_limits, max_num_seqs=max_num_seqs,
                       max_num_batched_tokens=max_num_batched_tokens)
    return diagnose_evidence(seen, deployment, simulate=simulate, input_tokens=input_tokens,
                             output_tokens=output_tokens)


def diagnose_evidence(
    seen: Evidence, deployment: Deployment | None = None, *, simulate: bool = True, input_tokens: float | None = None,
    output_tokens: float | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of what was seen.

    deployment      what is served, on what, with which flags; without it walls are told by counters alone
    simulate        whether knobs are simulated
    input_tokens, output_tokens   means of the load, where the server does not show them
    """
    if deployment is not None:
        engine = deployment.engine
        seen = replace(
            seen, max_num_seqs=engine.max_num_seqs if seen.max_num_seqs is None else seen.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens if seen.max_num_batched_tokens is None
            else seen.max_num_batched_tokens)
    use = None if deployment is None else use_of(seen, deployment)
    finding = find_wall(seen, use)
    found: tuple[Effect, ...] = ()
    if deployment is not None and simulate:
        load = load_seen(seen, input_tokens=input_tokens, output_tokens=output_tokens)
        found = effects(deployment, finding.wall, load)
    return Diagnosis(finding=finding, evidence=seen, use=use, effects=found, notes=_notes(seen, deployment, use))


def _notes(seen: Evidence, deployment: Deployment | None, use: Use | None) -> tuple[str, ...]:
    notes: list[str] = []
    if seen.seen.restarted:
        notes.append("the server was restarted in the window")
    if deployment is not None and seen.engine != deployment.engine.name:
        notes.append(f"the server is {seen.engine}, the deployment says {deployment.engine.name}")
    if use is not None and not 1 / 3 < use.predicted_s / use.step_s < 3:
        notes.append(f"a step took {use.step_s / use.predicted_s:.2g} times its prediction: calibrate on this server "
                     "(bstar calibrate) before the effects are trusted")  # fmt: skip
    if seen.telemetry is not None and seen.telemetry.mean("dram_active_fraction") is None:
        notes.append("the telemetry shows a share of time, not of bandwidth: DCGM or NVML's GPM counters would")
    return tuple(notes)
