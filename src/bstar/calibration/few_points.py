"""Calibration from few points: the constants of one deployment that explain what was measured on it.

    profile = bstar.calibrate(deployment, [{"concurrency": 4, "input_tokens": 1024, "output_tokens": 1024,
                                            "ttft_s": 0.06, "tpot_s": 0.0087}, {"concurrency": 128, …}])
    bstar.simulate(bstar.deployment(…, profile=profile), load)

Two points cannot say twelve constants. So each constant has a prior: its fitted value, and how far those of single
deployments scatter around it (`priors.toml`); what is found is the most probable set of constants given prior and
points (maximum a posteriori). What the points do not say stays as it was; constants that hardly moved are put back.

The prediction of a point is the simulation of its load. A mean latency is a sum of times, each in proportion to one
constant's time, as long as steps keep their order: so derivatives are taken once, and each round of the search is one
simulation a point, which corrects what the sum got wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bstar.calibration.observations import Observation, observations, predicted, spread_of
from bstar.calibration.points import deployment_of
from bstar.calibration.priors import Knob, knobs_for
from bstar.calibration.profile import (
    BANDWIDTH,
    PEAK,
    Profile,
    ProfileConstant,
    ProfileDevice,
    ProfilePoint,
    Scope,
    carried,
    carrying,
)
from bstar.catalog.devices import PROBED_IDS
from bstar.catalog.served import is_served, last_part
from bstar.errors import BstarError, SpecError
from bstar.latency import decode_step_time
from bstar.specs.calibration import Calibration
from bstar.specs.deployment import Deployment

Floats = NDArray[np.float64]
Case = tuple[Deployment, Observation]

MOST_POINTS: Final = 64
_ROUNDS: Final = 3
_FAR_ROUNDS: Final = 4
_FAR: Final = 0.7  # ln, of a figure: beyond it derivatives are taken again
_SETTLED_COST: Final = 0.5
_HALF: Final = -0.5
_SETTLED: Final = 0.002  # of a mean, between two rounds
_STEP: Final = 1.0  # standard deviations, for derivatives (of a sum of times: a larger step is less noise)
_NEAR_STEP: Final = 0.25
_MOVED: Final = 0.1  # standard deviations: less is no news
_ODD: Final = 3.0  # expected errors: a figure beyond is one that the constants do not explain
_LESS: Final = (0.5, 0.25, 0.125)
_DEVICE_STEPS: Final = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
_ROBUST: Final = 3.0  # residuals beyond so many expected errors count less


def calibrate(deployment: Deployment, points: Any, *, name: str = "calibrated") -> Profile:
    """A profile of `deployment` from measured points of it: mappings, Points, or a file of points.

    2 to 6 points, the lowest and the highest load among them, say most; TTFT and TPOT (or throughput) of each are
    enough, see `bstar.calibration.observations`. Raises SpecError naming the point and what is wrong with it,
    InfeasibleError where the deployment does not start.
    """
    if not isinstance(deployment, Deployment):
        raise SpecError(f"deployment: must be a bstar.deployment(…), is {type(deployment).__name__}")
    found = observations(points)
    for one in found:
        _check_row(deployment, one)
    profile = calibrated_on([(deployment, one) for one in found], name=name)
    doubts = (*_other_models(deployment, found), *_fewer_seats(deployment, found))
    left_out = (note for one in found for note in one.notes)
    return replace(profile, notes=tuple(dict.fromkeys((*doubts, *left_out, *profile.notes))))


def _other_models(deployment: Deployment, found: Sequence[Observation]) -> list[str]:
    """Runs whose server had another model, by all its names."""
    model = deployment.model
    return [f"{one.id} served {last_part(one.served[0])}, the deployment is {model.name}: a calibration on another "
            "model says nothing of this one" for one in found if one.served and not is_served(model, one.served)]


def _fewer_seats(deployment: Deployment, found: Sequence[Observation]) -> list[str]:
    """Runs in which clients waited for a place below the max_num_seqs that is predicted with."""
    seats = deployment.engine.max_num_seqs
    return [f"{one.id} never ran more than {one.seats} requests while others waited, the deployment has max_num_seqs "
            f"{seats}: was it started with --max-num-seqs {one.seats}?" for one in found
            if one.seats is not None and one.seats < seats]  # fmt: skip


def _check_row(deployment: Deployment, one: Observation) -> None:
    """Raises SpecError where the observation's row names another model, GPU or engine than the deployment's."""
    if one.point is None:
        return
    try:
        named = Scope.of(deployment_of(one.point)).binding
    except BstarError:  # a name of the user's own: taken on trust
        return
    here = Scope.of(deployment).binding
    if named != here:
        raise SpecError(f"point {one.id}: its row is of {' '.join(named)}, the deployment is {' '.join(here)}; leave "
                        "the row out, or calibrate each on its own")


def _check_floor(deployment: Deployment, one: Observation) -> None:
    """Raises SpecError for a time per token that no engine reaches (of a device whose peaks are known)."""
    measured = one.measured.get("tpot_s")
    if measured is None or deployment.device.id in PROBED_IDS or deployment.engine.num_speculative_tokens:
        return
    floor = decode_step_time(deployment, 1.0, one.input_tokens.mean + one.output_tokens.mean / 2.0).floor_s
    if measured < floor:
        raise SpecError(f"point {one.id}: tpot_s of {measured * 1e3:.3g} ms is below what the memory's bandwidth "
                        f"allows ({floor * 1e3:.3g} ms); it is of another deployment, or drafted tokens came along")


def calibrated_on(cases: Sequence[Case], *, name: str = "calibrated") -> Profile:
    """The profile of points that were measured with deployments that differ in their engine's flags alone."""
    if not cases:
        raise SpecError("points: none given; give 2 to 6 measured points of the deployment")
    if len(cases) > MOST_POINTS:
        raise SpecError(f"points: {len(cases)} are more than a calibration takes ({MOST_POINTS}); give the loads that "
                        "matter, lowest and highest among them")
    scope = Scope.of(cases[0][0])
    for deployment, one in cases:
        if Scope.of(deployment).binding != scope.binding:
            raise SpecError(f"point {one.id}: is of another model, GPU or engine than the first point; calibrate each "
                            "on its own")
    for deployment, one in cases:
        _check_floor(deployment, one)
    problem = _Problem.of([(carrying(d, None), one) for d, one in cases])
    fit = problem.solved()
    near = problem.nearest_device()
    if near is not None and near.cost < fit.cost:
        problem = problem.derived(near.u, near.after, far=True)
        fit = problem.solved(start=near)
    for _ in range(_FAR_ROUNDS):
        # Far from the fitted constants, as on an unknown device, the sum of times holds no longer.
        if np.max(np.abs(problem.figures(fit.after) - problem.figures(problem.before))) < _FAR:
            break
        problem = problem.derived(fit.u, fit.after, far=True)
        again = problem.solved(start=fit)
        done, fit = fit.cost - again.cost < _SETTLED_COST, again
        if done:
            break
    kept = [k for k, moved in enumerate(fit.u) if abs(moved) >= _MOVED]
    if len(kept) < len(fit.u):
        fit = problem.solved(kept, _without(problem, fit, kept))
    constants, covariance = _constants(problem, fit)
    return Profile(
        name=name, scope=scope, device=ProfileDevice.of(problem.cases[0][0].device), constants=constants,
        covariance=covariance, created_by=_version(),
        points=tuple(_point(one, problem.before[i], fit.after[i]) for i, (_, one) in enumerate(cases)),
        notes=_notes(problem, fit),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """u: (knobs,) standard deviations from the fitted constants; its covariance; predictions with it, a point each."""

    u: Floats
    covariance: Floats
    after: tuple[dict[str, float], ...]
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """Points, priors, the predictions with the fitted constants and their derivatives.

    names       (point, metric) of every figure
    measured, expected_error   (figures,) ln, and its standard deviation
    at          (knobs,) u of the derivatives
    slopes      (figures, knobs) relative change of a figure per unit of `Knob.time`; where `far`, of its ln per u
    """

    cases: tuple[Case, ...]
    knobs: tuple[Knob, ...]
    before: tuple[dict[str, float], ...]
    names: tuple[tuple[int, str], ...]
    measured: Floats
    expected_error: Floats
    at: Floats
    slopes: Floats
    far: bool = False

    @classmethod
    def of(cls, cases: Sequence[Case]) -> _Problem:
        knobs = knobs_for(cases[0][0])
        before = tuple(predicted(d, one) for d, one in cases)
        names = tuple((i, m) for i, (_, one) in enumerate(cases) for m in one.measured if m in before[i])
        if not names:
            raise SpecError("points: none has a figure that is predicted (one-token answers have no TPOT); give ttft_s")
        plain = cls(
            cases=tuple(cases), knobs=knobs, before=before, names=names, at=np.zeros(len(knobs)),
            measured=np.log([cases[i][1].measured[m] for i, m in names]),
            expected_error=spread_of([m for _, m in names]), slopes=np.zeros((len(names), len(knobs))),
        )  # fmt: skip
        return plain.derived(plain.at, before, far=False)

    def derived(self, at: Floats, there: Sequence[dict[str, float]], *, far: bool) -> _Problem:
        """The same with derivatives at `at`, where `there` is predicted."""
        base, size = self.figures(there), _NEAR_STEP if far else _STEP
        slopes = np.zeros_like(self.slopes)
        for k, knob in enumerate(self.knobs):
            moved = at.copy()
            moved[k] += size if knob.value(at[k] + size) != knob.value(at[k]) else -size
            change = knob.time(moved[k]) - knob.time(at[k])
            if change == 0.0:
                continue
            grown = self.figures(self._simulated(moved)) - base
            slopes[:, k] = grown / (moved[k] - at[k]) if far else np.expm1(grown) / change
        return replace(self, at=at.copy(), slopes=slopes, far=far)

    def _simulated(self, u: Floats) -> tuple[dict[str, float], ...]:
        changes = {k.name: k.value(x) for k, x in zip(self.knobs, u, strict=True) if x}
        return tuple(_predictions(self.cases, changes))

    def solved(self, kept: Sequence[int] | None = None, start: Fit | None = None) -> Fit:
        """The most probable constants, from `start`; only those in `kept` (None: all) are moved."""
        chosen = np.arange(len(self.knobs)) if kept is None else np.array(kept, dtype=int)
        if start is None:
            zero = np.zeros(len(self.knobs))
            start = Fit(u=zero, covariance=np.eye(zero.size), after=self.before, cost=self._cost(zero, self.before))
        u, after, best = start.u, start.after, start
        first: Fit | None = None
        for _ in range(_ROUNDS if chosen.size else 0):
            u_next, covariance = self._searched(u, after, chosen)
            found = self._simulated(u_next)
            change = np.max(np.abs(self.figures(found) - self.figures(after)), initial=0.0)
            u, after = u_next, found
            found_fit = Fit(u=u, covariance=covariance, after=after, cost=self._cost(u, after))
            first = first or found_fit
            best = min(best, found_fit, key=lambda fit: fit.cost)
            if change < _SETTLED:
                break
        return self._nearer(start, first) if best is start and first is not None else best

    def _nearer(self, start: Fit, first: Fit) -> Fit:
        """Less of the first step, where all steps went too far for the sum of times to hold; `start` where that is no
        better either, or explains the points already."""
        if not self.unexplained(start.after).any():
            return start
        for share in _LESS:
            fit = self.fit_at(start.u + share * (first.u - start.u), first.covariance)
            if fit.cost < start.cost:
                return fit
        return start

    def unexplained(self, predictions: Sequence[dict[str, float]]) -> NDArray[np.bool_]:
        """Of each figure, whether it is off by more than model and measurement together usually are."""
        found: NDArray[np.bool_] = np.abs(self.measured - self.figures(predictions)) > _ODD * self.expected_error
        return found

    def nearest_device(self) -> Fit | None:
        """The best of a grid of the device's own figures, where those are a guess: other constants may stand for them
        near by, and lead away from them. None for a device with a datasheet."""
        own = [k for k, knob in enumerate(self.knobs) if knob.name in (PEAK, BANDWIDTH)]
        if not own:
            return None
        fits = []
        for steps in itertools.product(*(_DEVICE_STEPS for _ in own)):
            u = np.zeros(len(self.knobs))
            u[own] = [-math.log(step) / self.knobs[k].spread for k, step in zip(own, steps, strict=True)]
            fits.append(self.fit_at(u, np.eye(u.size)))
        return min(fits, key=lambda fit: fit.cost)

    def fit_at(self, u: Floats, covariance: Floats) -> Fit:
        """What these constants say."""
        after = self._simulated(u)
        return Fit(u=u, covariance=covariance, after=after, cost=self._cost(u, after))

    def figures(self, predictions: Sequence[dict[str, float]]) -> Floats:
        result: Floats = np.log([predictions[i][m] for i, m in self.names])
        return result

    def _cost(self, u: Floats, predictions: Sequence[dict[str, float]]) -> float:
        off = (self.figures(predictions) - self.measured) / self.expected_error
        robust = 2.0 * _ROBUST**2 * (np.sqrt(1.0 + (off / _ROBUST) ** 2) - 1.0)
        return float(robust.sum() + u @ u)

    def _model(self, u: Floats) -> Floats:
        """ln of the figures by the derivatives, against that at `at`."""
        if self.far:
            there: Floats = self.slopes @ (u - self.at)
            return there
        moved = np.array([k.time(x) - k.time(x0) for k, x, x0 in zip(self.knobs, u, self.at, strict=True)])
        change: Floats = self.slopes @ moved
        # Less than half of the time: straight on, so that a search never ends where everything looks the same.
        near = np.maximum(change, _HALF)
        result: Floats = np.log1p(near) + (change - near) / (1.0 + _HALF)
        return result

    def _searched(self, start: Floats, simulated: Sequence[dict[str, float]], chosen: NDArray[np.int64]
                  ) -> tuple[Floats, Floats]:
        """(u, covariance of u): Gauss-Newton on the sum of times, corrected to what was simulated at `start`."""
        offset = self.figures(simulated) - self._model(start)
        u, unit = start.copy(), np.eye(len(start))
        hessian = unit
        for _ in range(12):
            now = self._model(u)
            slopes = np.stack([(self._model(u + 1e-4 * unit[k]) - self._model(u - 1e-4 * unit[k])) / 2e-4
                               for k in chosen], axis=1)
            off = self.measured - offset - now
            weight = self.expected_error**-2 / np.sqrt(1.0 + (off / self.expected_error / _ROBUST) ** 2)
            hessian = (slopes.T * weight) @ slopes + np.eye(chosen.size)
            move = np.linalg.solve(hessian, slopes.T @ (weight * off) - u[chosen])
            u[chosen] += np.clip(move, -1.5, 1.5)
            if np.max(np.abs(move)) < 1e-4:
                break
        covariance = unit.copy()
        covariance[np.ix_(chosen, chosen)] = np.linalg.inv(hessian)
        return u, covariance


def _without(problem: _Problem, fit: Fit, kept: Sequence[int]) -> Fit:
    """The fit with the constants that are not in `kept` put back."""
    u = np.zeros_like(fit.u)
    u[list(kept)] = fit.u[list(kept)]
    return problem.fit_at(u, fit.covariance)


def _predictions(cases: Sequence[Case], changes: dict[str, float]) -> list[dict[str, float]]:
    trial = Calibration(name="trial", **carried(changes)) if changes else None
    return [predicted(carrying(d, trial), one) for d, one in cases]


def _constants(problem: _Problem, fit: Fit) -> tuple[tuple[ProfileConstant, ...], tuple[tuple[float, ...], ...]]:
    """The constants that moved, and their covariance (products of their units)."""
    moved = [k for k, x in enumerate(fit.u) if x]
    slopes = np.array([problem.knobs[k].slope(float(fit.u[k])) for k in moved])
    covariance = fit.covariance[np.ix_(moved, moved)] * np.outer(slopes, slopes)
    constants = tuple(
        ProfileConstant(
            name=problem.knobs[k].name, value=problem.knobs[k].value(float(fit.u[k])), prior=problem.knobs[k].fitted,
            standard_error=float(np.sqrt(max(covariance[j, j], 0.0))))
        for j, k in enumerate(moved)
    )  # fmt: skip
    return constants, tuple(tuple(float(v) for v in row) for row in covariance)


def _point(one: Observation, before: dict[str, float], after: dict[str, float]) -> ProfilePoint:
    kind, value = one.load
    shown = [m for m in one.measured if m in after]
    return ProfilePoint(
        id=one.id, load=kind, load_value=value, input_tokens=one.input_tokens.mean,
        output_tokens=one.output_tokens.mean, measured=dict(one.measured),
        before={m: before[m] for m in shown}, after={m: after[m] for m in shown},
        measured_on=one.measured_on,
    )  # fmt: skip


def _notes(problem: _Problem, fit: Fit) -> tuple[str, ...]:
    """What a reader should know: one point alone, figures that stayed off, constants at the end of their range."""
    notes = []
    if len(problem.cases) == 1:
        notes.append("one point: it says how large the times are, not how they grow with the load; measure another")
    odd: dict[int, list[str]] = {}
    off = np.expm1(problem.figures(fit.after) - problem.measured)
    for number in np.flatnonzero(problem.unexplained(fit.after)).tolist():
        point, metric = problem.names[number]
        odd.setdefault(point, []).append(f"{metric} {off[number]:+.0%}")
    notes += [f"{problem.cases[point][1].id} stays off (predicted / measured − 1): {', '.join(figures)}; no constant "
              "explains that: is the load what was said?" for point, figures in odd.items()]
    for knob, x in zip(problem.knobs, fit.u, strict=True):
        if x and abs(x) > 3.0:
            notes.append(f"{knob.name} moved {abs(x):.1f} times its usual scatter, to {knob.value(float(x)):.3g}: "
                         "something else may differ from the description of the deployment")
    return tuple(notes)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"bstar {version('bstar')}"
    except PackageNotFoundError:  # run from its source
        return "bstar"
