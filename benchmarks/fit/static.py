"""Fit the engines that serve static batches: TensorRT-LLM's C++ runtime (before 1.0) and vLLM of 2023 (before 0.3).

    PYTHONPATH=src python benchmarks/fit/static.py             fit, print, write latency/data/fitted_static.toml
    PYTHONPATH=src python benchmarks/fit/static.py --check     print errors of groups that the fit did not see
    PYTHONPATH=src python benchmarks/fit/static.py --ablate    what each constant is worth

Rows: the static batches bundled in bstar.calibration, those left out whose labels cannot be right. A static batch
needs no simulation: its mean decode step and its prefill are means of the step model over known batches, so a fit
evaluates the product's own step model and nothing else.

Residuals are log(predicted / measured) of TPOT and, at half weight, of TTFT, under a soft-L1 loss of scale 5 %.
Constants are fitted as logarithms, each pulled to a start (the kernel measurements, or a first guess) by the strength
that `Free.spread` says; a generation's or a card's constant deviates from the shared one so. Nothing is random.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from bstar.calibration.bundled import LATENCY, bundled_points
from bstar.calibration.latency_points import LatencyPoint, latency_point
from bstar.calibration.latency_points_labels import label_notes
from bstar.calibration.latency_points_mapping import latency_deployment
from bstar.calibration.latency_points_static import decode_contexts, with_identical_tokens
from bstar.latency.constant_values import resolved_values
from bstar.latency.constants import Constants, constant_key, constant_specs
from bstar.latency.step_model import StepModel, build_step_model
from bstar.physics.batch import BatchShape
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
OUT: Final = Path(__file__).parents[2] / "src" / "bstar" / "latency" / "data" / "fitted_static.toml"
WRITTEN: Final = ("fitted_static.toml", "fitted_static_later.toml")
SCALE: Final = 0.05
TTFT_WEIGHT: Final = 0.5
FOLDS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A constant to fit. where: {} shared by the family, or generation=… or device=…; spread: of its logarithm."""

    name: str
    start: float
    spread: float
    where: tuple[tuple[str, str], ...] = ()

    def holds(self, group: Group) -> bool:
        return all(getattr(group, key) == value for key, value in self.where)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Rows of one deployment: statistics of their steps, and how the steps make up TPOT (rows of `mix`)."""

    label: tuple[str, str, str, int]
    deployment: Deployment
    constants: Constants
    generation: str
    device: str
    dummy: bool
    values: Floats
    mix: Floats
    tpot_s: Floats
    ttft_s: Floats

    def predicted(self, changes: dict[str, float]) -> tuple[Floats, Floats]:
        """(TPOT, TTFT) of the rows with these constants."""
        model = build_step_model(self.deployment, self.constants.replace(changes))
        if self.dummy and model.routed.size:
            model = with_identical_tokens(model)
        seconds = model.times(model.work_of(self.values)).total_s
        steps = self.mix.shape[1]
        return self.mix @ seconds[:steps], seconds[steps:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Versions of an engine that are fitted together, and the first guesses of what they share.

    zero   constants whose removal cost nothing (--ablate): they are 0
    """

    engine: str
    until: str
    shared: tuple[Free, ...]
    by_generation: tuple[Free, ...]
    by_device: tuple[Free, ...] = field(default=())
    zero: tuple[str, ...] = ()


def _free(name: str, start: float, spread: float) -> Free:
    return Free(name=name, start=start, spread=spread)


# start 0: the value that the kernel measurements give.
FAMILIES: Final = (
    Family(
        engine="trtllm", until="1.0",
        shared=(
            _free("layer_s", 1e-5, 1.5), _free("sequence_s", 4e-6, 1.0),
            _free("collective.nvlink.latency_s", 6e-6, 0.7), _free("collective.nvlink.rank_latency_s", 2e-6, 0.7),
            _free("collective.nvlink.bandwidth", 0.7, 0.3), _free("collective.pcie.latency_s", 2e-5, 0.7),
            _free("collective.pcie.rank_latency_s", 8e-6, 0.7), _free("collective.pcie.bandwidth", 0.75, 0.3),
        ),
        by_generation=(
            _free("gemm.fp8.memory", 0, 0.1), _free("gemm.fp8.compute", 0, 0.25), _free("gemm.bf16.memory", 0, 0.1),
            _free("gemm.bf16.compute", 0, 0.25), _free("moe_gemm.bf16.memory", 0, 0.1),
            _free("moe_gemm.bf16.compute", 0, 0.25), _free("attention_decode.narrow.memory", 0.85, 0.1),
            _free("attention_decode.narrow.compute", 0.04, 0.6), _free("attention_decode.wide.memory", 0.85, 0.1),
            _free("attention_decode.wide.compute", 0.04, 0.6), _free("attention_decode.scalar.memory", 0, 0.1),
            _free("attention_decode.scalar.compute", 0, 0.6), _free("attention_prefill.compute", 0, 0.4),
        ),
        by_device=(_free("scale.gemm_memory", 1.0, 0.04), _free("scale.gemm_compute", 1.0, 0.1)),
        zero=("step_s", "eager_layer_s", "moe_layer_s", "collective.pcie.sharing"),
    ),
    Family(
        engine="vllm", until="0.3",
        shared=(
            _free("sequence_s", 2e-5, 1.0), _free("collective.nvlink.latency_s", 1e-5, 0.7),
            _free("collective.nvlink.rank_latency_s", 2e-6, 0.7), _free("collective.nvlink.bandwidth", 0.6, 0.3),
        ),
        by_generation=(
            _free("eager_layer_s", 4.5e-4, 1.0), _free("gemm.bf16.compute", 0.7, 0.3),
            _free("gemm.bf16.memory", 0.8, 0.1), _free("attention_prefill.compute", 0.4, 0.5),
            _free("attention_decode.wide.memory", 0.7, 0.3),
        ),
        zero=("step_s",),
    ),
)  # fmt: skip


def groups_of(family: Family, points: Sequence[LatencyPoint]) -> list[Group]:
    """The family's rows, a group for each deployment."""
    faults = label_notes(points)
    rows: dict[tuple[object, ...], list[LatencyPoint]] = defaultdict(list)
    for p in points:
        if p.load == "static_batch" and p.tpot_s and p.ttft_s and p.id not in faults:
            rows[p.source, p.engine, p.engine_version, p.model, p.gpu, p.weight_dtype, p.kv_dtype, p.tp, p.pp].append(p)
    out = []
    for members in rows.values():
        deployment = latency_deployment(members[0]).deployment
        until = tuple(int(part) for part in family.until.split("."))
        if deployment.engine.name == family.engine and deployment.engine.version_tuple < until:
            out.append(_group(members, deployment, family))
    return out


def _group(members: list[LatencyPoint], deployment: Deployment, family: Family) -> Group:
    # What the fit starts from must not be what an earlier run of it found.
    base = Constants(resolved_values(constant_key(deployment), without=WRITTEN))
    constants = base.replace(dict.fromkeys(family.zero, 0.0))
    model = build_step_model(deployment, constants)
    decodes, shares = [], []
    for p in members:
        assert p.input_tokens is not None and p.output_tokens is not None
        contexts, share = decode_contexts(model, p.input_tokens + 1, p.input_tokens + p.output_tokens - 1)
        decodes += [float(model.microbatch(p.load_value)) * model.step.decode_values(c) for c in contexts]
        shares.append(share)
    prefills = [model.step.values(BatchShape.prefill(p.input_tokens or 1.0, count=p.load_value)) for p in members]
    mix, at = np.zeros((len(members), len(decodes))), 0
    for row, share in enumerate(shares):
        mix[row, at:at + len(share)] = share
        at += len(share)
    p = members[0]
    return Group(
        label=(p.gpu, p.model, p.weight_dtype[:4], p.tp or 1), deployment=deployment, constants=constants,
        generation=_generation(deployment), device=deployment.device.id, dummy="dummy" in p.dataset.lower(),
        values=np.stack([*decodes, *prefills], axis=1), mix=mix,
        tpot_s=np.array([p.tpot_s for p in members], dtype=float),
        ttft_s=np.array([p.ttft_s for p in members], dtype=float),
    )  # fmt: skip


def _generation(deployment: Deployment) -> str:
    from bstar.latency.constant_values import generation_name

    return generation_name(deployment.device.compute_capability)


def free_of(family: Family, groups: Sequence[Group]) -> list[Free]:
    """The constants that these groups can say something about."""
    used: dict[str, set[str]] = defaultdict(set)
    for g in groups:
        model: StepModel = build_step_model(g.deployment, g.constants)
        used[g.generation] |= _names_used(g.deployment, model)
    everything = set().union(*used.values())
    out = [f for f in family.shared if not f.name.startswith("collective.") or f.name in everything]
    for generation in sorted(used):
        start = next(g.constants for g in groups if g.generation == generation)
        for f in family.by_generation:
            if f.name in used[generation] or "." not in f.name:
                slow = f.name.endswith(("narrow.compute", "wide.compute")) and generation == "ada"
                value = start[f.name] if f.start == 0 or slow else f.start
                out.append(Free(name=f.name, start=value, spread=f.spread, where=(("generation", generation),)))
    for generation in sorted(used):
        cards = sorted({g.device for g in groups if g.generation == generation})
        if len(cards) > 1:
            out += [Free(name=f.name, start=f.start, spread=f.spread, where=(("device", card),))
                    for card in cards for f in family.by_device]
    return out


def _names_used(deployment: Deployment, model: StepModel) -> set[str]:
    from bstar.latency.frame import frame_for

    return set(frame_for(deployment).constants)


def changes_for(free: Sequence[Free], x: Floats, group: Group) -> dict[str, float]:
    specs = constant_specs()
    return {
        f.name: float(np.clip(value, specs[f.name].low, specs[f.name].high))
        for f, value in zip(free, x, strict=True) if f.holds(group)
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    free: list[Free]
    x: Floats
    errors: Floats
    loss: float


def fit(free: list[Free], groups: Sequence[Group], *, most: int = 40) -> Fit:
    """The constants that explain `groups`, with standard errors that take a group's rows for alike."""
    start = np.array([f.start for f in free])
    spread = np.array([f.spread for f in free])
    specs = constant_specs()
    low = np.array([math.log(max(specs[f.name].low, f.start * 1e-3) / f.start) for f in free]) - 1e-9
    high = np.array([math.log(specs[f.name].high / f.start) for f in free]) + 1e-9
    sizes: list[int] = []

    def residuals(z: Floats) -> Floats:
        parts = []
        for g in groups:
            tpot, ttft = g.predicted(changes_for(free, start * np.exp(z), g))
            parts.append(np.concatenate([np.log(tpot / g.tpot_s), TTFT_WEIGHT * np.log(ttft / g.ttft_s)]))
        sizes[:] = [len(p) for p in parts]
        r = np.concatenate(parts)
        soft = np.sign(r) * np.sqrt(2.0 * (np.sqrt(1.0 + (r / SCALE) ** 2) - 1.0)) * SCALE
        return np.concatenate([soft, z / spread * SCALE])

    found = least_squares(residuals, np.zeros(len(free)), bounds=(low, high), max_nfev=most, diff_step=1e-3)
    ends = np.cumsum(sizes)
    inverse = np.linalg.inv(found.jac.T @ found.jac)
    scores = [found.jac[b:e].T @ found.fun[b:e] for b, e in zip(ends - sizes, ends, strict=True)]
    middle = sum((np.outer(s, s) for s in scores), np.zeros_like(inverse))
    errors = np.sqrt(np.maximum(np.diag(inverse @ middle @ inverse), 0.0))
    x = start * np.exp(found.x)
    return Fit(free=free, x=x, errors=x * errors, loss=float(np.sum(found.fun**2)))


def ratios(found: Fit, groups: Sequence[Group]) -> list[tuple[Group, Floats, Floats]]:
    """Per group (predicted / measured) of TPOT and TTFT."""
    out = []
    for g in groups:
        tpot, ttft = g.predicted(changes_for(found.free, found.x, g))
        out.append((g, tpot / g.tpot_s, ttft / g.ttft_s))
    return out


def show(title: str, found: list[tuple[Group, Floats, Floats]], *, groups: bool) -> None:
    tpot = np.abs(np.concatenate([a for _, a, _ in found]) - 1.0)
    ttft = np.abs(np.concatenate([b for _, _, b in found]) - 1.0)
    print(f"{title}: {len(tpot)} rows, TPOT median {np.median(tpot):.1%} mean {tpot.mean():.1%}, "
          f"TTFT median {np.median(ttft):.1%}")
    for g, a, b in sorted(found, key=lambda item: item[0].label) if groups else ():
        print(f"    {' '.join(str(x) for x in g.label):64s} TPOT {np.median(np.abs(a - 1)):6.1%} (bias "
              f"{np.median(a) - 1:+6.1%})   TTFT {np.median(np.abs(b - 1)):6.1%} ({np.median(b) - 1:+6.1%})")


def held_out(family: Family, groups: list[Group]) -> list[tuple[Group, Floats, Floats]]:
    """Each (GPU, model) predicted by a fit that has not seen it."""
    pairs = sorted({g.label[:2] for g in groups})
    np.random.default_rng(0).shuffle(pairs)
    out = []
    for fold in range(FOLDS):
        unseen = {tuple(pair) for pair in pairs[fold::FOLDS]}
        rest = [g for g in groups if g.label[:2] not in unseen]
        found = fit(free_of(family, rest), rest, most=15)
        out += ratios(found, [g for g in groups if g.label[:2] in unseen])
    return out


def ablation(family: Family, groups: list[Group], whole: Fit) -> None:
    """What the loss and the TPOT error become without each shared constant (0, or a bandwidth at its start)."""
    for gone in [f.name for f in whole.free if not f.where]:
        free = [f for f in whole.free if f.name != gone or f.where]
        zero = gone.endswith("_s")
        fixed = [g if not zero else _without(g, gone) for g in groups]
        found = fit(free, fixed, most=15)
        error = np.abs(np.concatenate([a for _, a, _ in ratios(found, fixed)]) - 1.0)
        print(f"    without {gone:34s} loss ×{found.loss / whole.loss:.3f}   TPOT median {np.median(error):.2%} "
              f"mean {error.mean():.2%}")


def _without(group: Group, name: str) -> Group:
    from dataclasses import replace

    return replace(group, constants=group.constants.replace({name: 0.0}))


def lines_of(family: Family, found: Fit, rows: int) -> list[str]:
    """The family's entries in TOML."""
    out = []
    for name in family.zero:
        out += ["[[value]]", f'name = "{name}"', "value = 0.0", f'engine = "{family.engine}"',
                f'until = "{family.until}"', f"rows = {rows}", ""]
    for f, value, error in zip(found.free, found.x, found.errors, strict=True):
        out += ["[[value]]", f'name = "{f.name}"', f"value = {value:.4g}", f"standard_error = {error:.2g}",
                f'engine = "{family.engine}"', f'until = "{family.until}"', *(f'{k} = "{v}"' for k, v in f.where),
                f"rows = {rows}", ""]
    return out


HEAD: Final = """# Written by benchmarks/fit/static.py from static batches of measured_latency_points.csv; do not edit.
# Constants of the step time (meanings: constants.toml) of engines before the versions that `until` names.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    points = [latency_point(p.columns) for p in bundled_points(LATENCY)]
    lines = [HEAD]
    for family in FAMILIES:
        groups = groups_of(family, points)
        rows = sum(len(g.tpot_s) for g in groups)
        found = fit(free_of(family, groups), groups)
        show(f"{family.engine} before {family.until}, fitted", ratios(found, groups), groups=True)
        for f, value, error in zip(found.free, found.x, found.errors, strict=True):
            print(f"    {f.name:36s} {value:10.4g} ± {error:8.2g}  (start {f.start:8.3g})  "
                  f"{' '.join(v for _, v in f.where)}")
        if options.check:
            show("held out by (GPU, model)", held_out(family, groups), groups=True)
        if options.ablate:
            ablation(family, groups, found)
        lines += lines_of(family, found, rows)
    if not options.dry:
        OUT.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
        print(f"{OUT} written")


if __name__ == "__main__":
    main()
