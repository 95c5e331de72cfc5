"""From a question to a plan: every layout screened, the promising ones sized, the best worked out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bstar.errors import SpecError
from bstar.planning.arrivals import replay_of
from bstar.planning.cost import gpu_price, is_named
from bstar.planning.draws import length_needs, request_draws
from bstar.planning.evaluate import Sized, finish, size
from bstar.planning.feasibility import NoAnswerError, needed_model_len
from bstar.planning.rank import bound_key, sized_key, with_pareto
from bstar.planning.results import Candidate, PlanResult, Rejected, Simulated
from bstar.planning.screen import Screened, Spot, Task, screen
from bstar.planning.space import EngineChoice, Layout, build, layouts
from bstar.specs.device import DeviceSpec
from bstar.specs.formats import kv_format
from bstar.specs.model import ModelSpec
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload

# What is shown at most; every layout is screened, only those that can be among the best are worked out.
MOST_CANDIDATES = 20
# What costs more than this many times the best is no alternative to it.
MOST_TIMES_BEST = 10.0

Tell = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan is asked for, parsed.

    variants   the model at each weight dtype to try
    simulate   how many of the best candidates are simulated
    """

    model: ModelSpec
    variants: tuple[ModelSpec, ...]
    devices: tuple[DeviceSpec, ...]
    kv_cache_dtypes: tuple[str, ...]
    workload: Workload
    slo: Slo
    choice: EngineChoice
    prices: Mapping[str, float]
    max_model_len: int | None = None
    max_gpus: int | None = None
    peak_factor: float = 1.0
    headroom_fraction: float = 0.0
    most_candidates: int = MOST_CANDIDATES
    simulate: int = 0


def answer(question: Question, tell: Tell | None = None) -> PlanResult:
    """Candidates best first, and what was rejected and why.

    tell   called before each candidate that is simulated, with its number and its name
    Raises SpecError for flags that no layout could have; what only some layouts cannot have is a rejection.
    """
    draws = request_draws(question.workload)
    needs = length_needs(question.workload, draws)
    try:
        length, note = needed_model_len(question.model, needs.longest_tokens, needs.p99_tokens)
    except NoAnswerError as no:
        return _no_answer(question, no)
    task = Task(
        workload=question.workload, slo=question.slo, draws=draws, choice=question.choice,
        replay=replay_of(question.workload, draws), context=question.workload.mean_decode_context_tokens,
        max_model_len=_model_len(question.max_model_len, length, needs.p99_tokens), max_gpus=question.max_gpus,
        peak_factor=question.peak_factor, headroom_fraction=question.headroom_fraction,
    )  # fmt: skip
    for device in question.devices:
        build(question.variants[0], device, Layout(), task.choice, kv_cache_dtype=question.kv_cache_dtypes[0],
              max_model_len=task.max_model_len, max_num_seqs=task.choice.max_num_seqs or 1,
              max_num_batched_tokens=task.choice.max_num_batched_tokens)  # fmt: skip
    screened, rejected = _screen(task, question)
    sized, refused = _size_best(task, screened, question.most_candidates)
    left = len(screened) - len(sized) - len(refused)
    more = f"{left} more layouts fit and cannot be better than the last one shown" if left > 0 else None
    simulated: list[tuple[Sized, Simulated | None]] = [(one, None) for one in sized]
    if question.simulate and sized:
        from bstar.planning.simulated import simulate_best

        simulated, fallen = simulate_best(task, sized, question.simulate, lambda s: sized_key(s, task), tell)
        refused += [_rejected(spot, no) for spot, no in fallen]
    candidates = with_pareto([finish(task, one, seen) for one, seen in simulated])
    notes = (note, more, _peak_note(question), _headroom_note(question), _profile_note(question, candidates),
             *_price_notes(question))
    return PlanResult(
        model=question.model.name, workload=question.workload, slo=question.slo, max_model_len=task.max_model_len,
        candidates=candidates, rejected=(*rejected, *refused), notes=tuple(text for text in notes if text),
    )  # fmt: skip


def _profile_note(question: Question, candidates: Sequence[Candidate]) -> str | None:
    """Which candidates a profile predicts: those that it does not are compared with them as fitted."""
    profile = question.choice.profile
    if profile is None:
        return None
    mine = sum(c.deployment.calibration is not None for c in candidates)
    if mine == len(candidates):
        return f"profile {profile.name} predicts every candidate; it was measured on {profile.scope.layout}"
    return (f"profile {profile.name} ({profile.scope.model} on {profile.scope.gpu}, {profile.scope.layout}) predicts "
            f"{mine} of {len(candidates)} candidates; the others are as fitted")


def _peak_note(question: Question) -> str | None:
    load, factor = question.workload, question.peak_factor
    if factor == 1.0 or (load.rate_per_s is None and load.concurrency is None):
        return None
    peak = (f"{load.rate_per_s * factor:,.4g} requests/s" if load.rate_per_s is not None
            else f"{(load.concurrency or 0) * factor:,.4g} clients")
    return f"sized for the peak of {peak}, {factor:g} times the mean; TTFT, TPOT and E2E are those of the peak"


def _headroom_note(question: Question) -> str | None:
    load = question.workload
    if not question.headroom_fraction or load.rate_per_s is not None or load.concurrency is not None:
        return None
    return "headroom is of a load, and none was given: what is shown is all that one replica carries"


def _price_notes(question: Question) -> list[str]:
    """A price of a GPU that is not planned with counts for nothing: said, with what may have been meant."""
    notes = []
    for name in question.prices:
        if any(is_named(device, name) for device in question.devices):
            continue
        names = {n.lower(): d.id for d in question.devices for n in (d.id, d.name, *d.aliases)}
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        asked = names[close[0]] if close else ", ".join(d.id for d in question.devices)
        notes.append(f"the price of {name} is not used: it is not among the GPUs of this plan; did you mean {asked}?")
    return notes


def _no_answer(question: Question, no: NoAnswerError) -> PlanResult:
    """Nothing to try: the same reason for every GPU."""
    spots = [
        Spot(model=question.model, device=device, layout=Layout(), kv_cache_dtype=question.kv_cache_dtypes[0],
             price=gpu_price(device, question.prices))
        for device in question.devices
    ]  # fmt: skip
    return PlanResult(
        model=question.model.name, workload=question.workload, slo=question.slo, candidates=(),
        max_model_len=question.model.max_context_tokens, rejected=tuple(_rejected(spot, no) for spot in spots),
    )  # fmt: skip


def _model_len(asked: int | None, needed: int, p99_tokens: int) -> int:
    if asked is None:
        return needed
    if asked < p99_tokens:
        raise SpecError(f"max_model_len: {asked:,} is too short, 1 % of the requests reach {p99_tokens:,}; raise it")
    return asked


def _screen(task: Task, question: Question) -> tuple[list[Screened], list[Rejected]]:
    """Every layout, screened or rejected. Replicas over more than one node only where no smaller one works."""
    screened: list[Screened] = []
    rejected: list[Rejected] = []
    for device in question.devices:
        price = gpu_price(device, question.prices)
        for model in question.variants:
            for kv in question.kv_cache_dtypes:
                found = 0
                for layout in layouts(model, device, max_gpus=task.max_gpus or 1 << 30):
                    if found and layout.num_gpus > min(device.devices_per_node, 8):
                        break
                    spot = Spot(model=model, device=device, layout=layout, kv_cache_dtype=kv, price=price)
                    try:
                        screened.append(screen(task, spot))
                        found += 1
                    except NoAnswerError as no:
                        rejected.append(_rejected(spot, no))
    return screened, rejected


def _size_best(task: Task, screened: Sequence[Screened], most: int) -> tuple[list[Sized], list[Rejected]]:
    """The best `most` layouts, sized; a layout is left out when even its bound is behind all of them."""
    sized: list[Sized] = []
    refused: list[Rejected] = []
    for one in sorted(screened, key=lambda s: bound_key(s, task)):
        if len(sized) >= most and bound_key(one, task)[:2] > sized_key(sized[most - 1], task)[:2]:
            break
        try:
            sized.append(size(task, one))
        except NoAnswerError as no:
            refused.append(_rejected(one.spot, no))
        sized.sort(key=lambda s: sized_key(s, task))
    kept: list[Sized] = []
    for found in sized[:most]:
        # Layouts of unknown price are compared with each other.
        best = next(s for s in sized if sized_key(s, task)[0] == sized_key(found, task)[0])
        least = sized_key(best, task)[1]
        times = sized_key(found, task)[1] / least if least > 0 else 1.0  # GPUs that cost nothing
        if times <= MOST_TIMES_BEST:
            kept.append(found)
            continue
        reason = f"takes {found.num_gpus:,} GPUs ({found.replicas:,} replicas) and costs {times:,.3g} times the best"
        refused.append(_rejected(found.spot, NoAnswerError("cost", reason)))
    return kept, refused


def _rejected(spot: Spot, no: NoAnswerError) -> Rejected:
    kv = kv_format(spot.kv_cache_dtype, model_dtype=spot.model.dtype)
    return Rejected(
        gpu=spot.device.id, layout=spot.layout, weight_dtype=spot.model.weight_dtype, kv_dtype=kv.name,
        reason=str(no), kind=no.kind,
    )  # fmt: skip
