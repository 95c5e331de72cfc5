"""A diagnosis: the wall of a window, its evidence, what the physics says of it, and what would move it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bstar.catalog.served import is_served, last_part
from bstar.errors import BstarError, SpecError
from bstar.measure.server.scraper import MetricsSource
from bstar.measure.server.snapshot import Snapshot
from bstar.measure.telemetry.table import Telemetry
from bstar.specs.deployment import Deployment
from bstar.tuning.evidence import Evidence, evidence_of
from bstar.tuning.knobs import Effect, effects, load_seen
from bstar.tuning.use import Use, use_of
from bstar.tuning.walls import Finding, fills_steps, find_wall, waits_often
from bstar.units import format_seconds

_FLAGS: Final = ("max_num_seqs", "max_num_batched_tokens")
_BUSY: Final = 0.5


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

    @property
    def requests_wait(self) -> bool:
        """Whether TTFT is what suffers; else throughput."""
        return waits_often(self.evidence)

    @property
    def best(self) -> Effect | None:
        """The knob to turn: the first one with a command that helps what suffers; None where none does."""
        return next((e for e in self.effects if e.command and e.helps(requests_wait=self.requests_wait)), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "wall": self.finding.wall, "title": self.finding.title, "because": list(self.finding.because),
            "also": list(self.finding.also), "evidence": self.evidence.to_dict(),
            "use": None if self.use is None else self.use.to_dict(),
            "effects": [e.to_dict() for e in self.effects],
            "best": None if self.best is None else self.best.change, "notes": list(self.notes),
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
        seen = _with_flags(seen, deployment)
    use = None if deployment is None else use_of(seen, deployment)
    finding = find_wall(seen, use)
    found: tuple[Effect, ...] = ()
    if deployment is not None and simulate:
        load = load_seen(seen, input_tokens=input_tokens, output_tokens=output_tokens)
        found = effects(_as_seen(deployment, seen, finding), finding.wall, load, requests_wait=waits_often(seen))
    return Diagnosis(finding=finding, evidence=seen, use=use, effects=found,
                     notes=_notes(seen, deployment, use, finding))


def _with_flags(seen: Evidence, deployment: Deployment) -> Evidence:
    """The deployment's flags where no others were told; those that are the engine's defaults are but assumed."""
    from bstar.catalog.engines import engine_defaults

    engine, parallel = deployment.engine, deployment.parallel
    defaults = engine_defaults(engine.name, engine.version, deployment.device, world_size=parallel.tp * parallel.pp,
                               strict=False)
    left = dict(zip(_FLAGS, defaults.batch_limits(engine.max_model_len), strict=True))
    untold = [name for name in _FLAGS if getattr(seen, name) is None]
    return replace(seen, **{name: getattr(engine, name) for name in untold},
                   assumed=frozenset(name for name in untold if getattr(engine, name) == left[name]))


def _as_seen(deployment: Deployment, seen: Evidence, finding: Finding) -> Deployment:
    """What is changed by a knob: the deployment with the flags that the server was told or seen to have."""
    all_seats = finding.seats or (int(seen.running.max()) if seen.outrun else None)
    seats = seen.max_num_seqs or deployment.engine.max_num_seqs
    if all_seats is not None:
        seats = math.ceil(all_seats / seen.engines)
    budget = seen.max_num_batched_tokens or deployment.engine.max_num_batched_tokens
    try:
        return replace(deployment, engine=replace(deployment.engine, max_num_seqs=seats, max_num_batched_tokens=budget))
    except BstarError:
        return deployment


def _notes(seen: Evidence, deployment: Deployment | None, use: Use | None, finding: Finding) -> tuple[str, ...]:
    notes = [*_of_the_model(seen, deployment), *_of_the_seats(seen, finding)]
    if finding.wall == "token_budget" and "max_num_batched_tokens" in seen.assumed and not fills_steps(seen):
        notes.append(f"a step holds {seen.step_tokens:,.0f} tokens, the deployment assumes a budget of "
                     f"{seen.max_num_batched_tokens:,}: give --max-num-batched-tokens as the server was started")
    if use is not None and max(use.mbu, use.mfu) > 1.0:
        name, value = ("MFU", use.mfu) if use.mfu >= use.mbu else ("MBU", use.mbu)
        notes.append(f"{name} {value:.0%}: a step is shorter than its work at the device's full rates; the deployment "
                     "given is not what runs, or the device is faster than its entry")
    if seen.seen.restarted:
        notes.append("the server was restarted in the window: rates are of the time that its counters cover, "
                     f"{format_seconds(seen.duration_s)}")
    if deployment is not None and seen.engine != deployment.engine.name:
        notes.append(f"the server is {seen.engine}, the deployment says {deployment.engine.name}")
    if use is not None and not 1 / 3 < use.predicted_s / use.step_s < 3:
        notes.append(f"a step took {use.step_s / use.predicted_s:.2g} times its prediction: calibrate on this server "
                     "(bstar calibrate) before the effects are trusted")  # fmt: skip
    if seen.telemetry is not None:
        notes += _of_gpus(seen.telemetry, finding)
    if seen.telemetry is not None and seen.telemetry.mean("dram_active_fraction") is None:
        notes.append("the telemetry shows a share of time, not of bandwidth: DCGM or NVML's GPM counters would")
    return tuple(notes)


def _of_the_model(seen: Evidence, deployment: Deployment | None) -> list[str]:
    """Whether another model is served than the physics, the effects and their commands are of."""
    if deployment is None or not seen.served or is_served(deployment.model, seen.served):
        return []
    return [f"the server served {last_part(seen.served[0])}, the deployment is {deployment.model.name}: unless that is "
            "another name of it, what is said of its steps, its settings and their effects is of another model"]


def _of_the_seats(seen: Evidence, finding: Finding) -> list[str]:
    """Whether the server has other seats than were told or assumed."""
    if seen.seats is None or not (seen.outrun or finding.seats not in (None, seen.seats)):
        return []
    stated = (f"the deployment assumes {seen.seats:,}" if "max_num_seqs" in seen.assumed
              else f"{seen.seats:,} {'was' if seen.seats == 1 else 'were'} told")
    found = (f"{finding.seats:,} seats seem to be set" if finding.seats is not None
             else f"{seen.running.max():,.0f} requests ran at a time, there are at least as many seats")
    return [f"{found}, {stated}: give --max-num-seqs as the server was started"]


def _of_gpus(telemetry: Telemetry, finding: Finding) -> list[str]:
    busy = telemetry.mean("gpu_busy_fraction")
    notes = [telemetry.note] if telemetry.note else []
    if finding.wall == "idle" and busy is not None and busy > _BUSY:
        notes.append(f"the server is idle, but the GPU is busy {busy:.0%} of the time: something else runs on it, or "
                     "the telemetry is of another time or GPU")
    return notes
