"""Ranges of what is printed together: a step, the means of a plan's candidate, the means of a simulated run.

TTFT and TPOT have residuals of their own. E2E is TTFT and the decode steps after it, which are taken to be off together
(the wider answer); a closed loop's throughput is clients / E2E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bstar.calibration.intervals import Likeness, Range, likeness_of, range_of
from bstar.latency import decode_step_time
from bstar.sim.result import SimResult
from bstar.specs.deployment import Deployment

# A run queues where on average this share of what is in the engine waits for a place.
_QUEUED = 0.05


def step_range(
    deployment: Deployment, expected_s: float, floor_s: float, bound_by: str, *, in_flight: float
) -> Range | None:
    """The range of a decode step's time; None where no residual is known."""
    likeness = likeness_of(deployment, in_flight=in_flight)
    return range_of(expected_s, "tpot", likeness, bound_by, floor=floor_s)


def mean_ranges(
    likeness: Likeness, bound_by: str, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
) -> dict[str, Range]:
    """Ranges of the means that there are: "ttft_s", "tpot_s", "itl_s", "e2e_s"."""
    ttft, tpot = range_of(ttft_s, "ttft", likeness, bound_by), range_of(tpot_s, "tpot", likeness, bound_by)
    out = {name: one for name, one in (("ttft_s", ttft), ("tpot_s", tpot)) if one is not None}
    if e2e_s is not None and ttft is not None and ttft_s is not None:
        rest, low, high = max(e2e_s - ttft_s, 0.0), 1.0, 1.0
        if tpot is not None and tpot_s:
            low, high = tpot.low / tpot_s, tpot.high / tpot_s
        if tpot is not None or rest <= 1e-9 * e2e_s:
            out["e2e_s"] = replace(ttft, low=ttft.low + rest * low, high=ttft.high + rest * high)
    return out


def run_ranges(deployment: Deployment, result: SimResult) -> dict[str, Range]:
    """Ranges of a run's means (and of a closed loop's `output_tokens_per_s` and `requests_per_s`)."""
    summary = result.summary
    values = {"ttft_s": summary.ttft_s.mean, "tpot_s": summary.tpot_s.mean, "e2e_s": summary.e2e_s.mean}
    if values["ttft_s"] is None:
        return {}
    records = result.records
    inputs, outputs = float(records.input_tokens.mean()), float(records.output_tokens.mean())
    likeness = likeness_of(
        deployment, in_flight=result.mean_in_flight / max(result.steps.replicas, 1), input_tokens=inputs,
        output_tokens=outputs)
    found = mean_ranges(likeness, _bound_of(deployment, result, inputs + outputs / 2.0), **values)
    if "tpot_s" in found and summary.itl_s.mean and summary.tpot_s.mean:
        share = summary.itl_s.mean / summary.tpot_s.mean
        found["itl_s"] = replace(found["tpot_s"], low=found["tpot_s"].low * share, high=found["tpot_s"].high * share)
    if not result.open_loop and "e2e_s" in found and values["e2e_s"]:
        e2e, mean = found["e2e_s"], values["e2e_s"]
        for name in ("output_tokens_per_s", "requests_per_s"):
            rate = getattr(summary, name)
            if rate:
                found[name] = replace(e2e, low=rate * mean / e2e.high, high=rate * mean / e2e.low)
    return found


def with_ranges(sheet: Mapping[str, object], ranges: Mapping[str, Range]) -> dict[str, object]:
    """The sheet with `range_80` in every distribution that has one (it is of the mean), and beside every number."""
    out = dict(sheet)
    for name, one in ranges.items():
        value = out.get(name)
        if isinstance(value, Mapping):
            out[name] = {**value, "range_80": one.to_list()}
        elif name in out:
            out[f"{name}_range_80"] = one.to_list()
    if ranges:
        out["range_basis"] = next(iter(ranges.values())).basis
    return out


def _bound_of(deployment: Deployment, result: SimResult, context: float) -> str:
    """What a decode step of the run is bound by; "queueing" where requests wait for a place."""
    steps = result.steps
    if not len(steps):
        return "queueing"
    seconds = steps.duration_s
    busy = float(seconds.sum()) or 1.0
    running, waiting = float(steps.running @ seconds) / busy, float(steps.waiting @ seconds) / busy
    if waiting / max(running + waiting, 1.0) >= _QUEUED:
        return "queueing"
    batch = max(running, 1.0) * deployment.parallel.attention_dp
    return str(decode_step_time(deployment, batch, max(context, 1.0)).bound_by)
