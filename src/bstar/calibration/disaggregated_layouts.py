"""How a disaggregated run was laid out, where its measured row leaves that out: from the configurations of the harness.

`data/disaggregated_runs.txt` lists them. A row names its GPU, lengths, clients and some of its splits; the
configurations that agree with all that it does say are candidates. A row with its workers given is completed (seats,
drafting); one without is identified, and where several are left the notes say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from bstar.calibration.point import Point, Pool
from bstar.errors import SpecError

_SPLIT = re.compile(r"(\d+)x(tp|tep|dep|dp)(\d+)")
_UNLIMITED = 1 << 40
# The day of the first SGLang runs that draft.
_SGLANG_DRAFTS = "2026-02-11"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One side: workers, and how each is spread over its GPUs."""

    workers: int
    kind: str
    gpus: int

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks of attention."""
        return 1 if self.attention_dp > 1 else self.gpus

    @property
    def attention_dp(self) -> int:
        """Ranks of attention data parallelism."""
        return self.gpus if self.kind in ("dep", "dp") else 1

    @property
    def ep(self) -> int:
        """Ranks over which whole experts are spread; 1: each expert is cut."""
        return self.gpus if self.kind in ("dep", "tep") else 1

    @property
    def pool(self) -> Pool:
        """As the columns of a measured row."""
        return Pool(workers=self.workers, tp=self.tp, pp=1, attention_dp=self.attention_dp,
                    moe_tp=self.gpus // self.ep, moe_ep=self.ep, batch_size=None)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregatedLayout:
    """Both sides of a run.

    seats, prompts   sequences of a decode rank, prompts in a step of a prefill rank at most
    prompt_tokens    of a step of a prefill rank at most; None: not known
    """

    prefill: Split
    decode: Split
    drafted: int = 0
    seats: int = _UNLIMITED
    prompts: int = _UNLIMITED
    prompt_tokens: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """All GPUs of the run."""
        return self.prefill.workers * self.prefill.gpus + self.decode.workers * self.decode.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A configuration of the harness: where it was run, with which numbers of clients, laid out how."""

    key: tuple[str, str, str, int, int, str]
    clients: tuple[int, ...]
    layout: DisaggregatedLayout


@lru_cache(maxsize=1)
def known_runs() -> tuple[_Line, ...]:
    """Every configuration of the data file."""
    text = files("bstar.calibration").joinpath("data/disaggregated_runs.txt").read_text(encoding="utf-8")
    lines: list[_Line] = []
    key: tuple[str, str, str, int, int, str] | None = None
    for line in text.splitlines():
        if line.startswith("["):
            engine, gpu, weights, isl, osl, era, budget = line.strip("[]").split()
            key = engine, gpu, weights, int(isl), int(osl), era
        elif line and not line.startswith("#"):
            assert key is not None, "a configuration stands under a heading"
            clients, drafted, prefill, decode, seats, *rest = line.removesuffix("~").split()
            prompts, computes = int(rest[0]) if rest else 0, _split(prefill)
            shared = computes.attention_dp if key[0] == "sglang" else 1
            lines.append(_Line(key=key, clients=tuple(map(int, clients.split(","))), layout=DisaggregatedLayout(
                prefill=computes, decode=_split(decode), drafted=int(drafted), seats=int(seats) or _UNLIMITED,
                prompts=prompts or _UNLIMITED, prompt_tokens=int(budget) // shared)))  # fmt: skip
    return tuple(lines)


def _split(text: str) -> Split:
    found = _SPLIT.fullmatch(text)
    assert found is not None, f"{text!r} is no split"
    return Split(workers=int(found[1]), kind=found[2], gpus=int(found[3]))


def layout_of(point: Point) -> DisaggregatedLayout:
    """The layout of a disaggregated row. Raises SpecError where it names neither side."""
    if point.prefill is None or point.decode is None:
        raise SpecError("mode: a disaggregated row needs prefill_tp_size and decode_tp_size (or "
                        "prefill_attention_dp_size, decode_attention_dp_size), and their *_num_workers")
    if point.prefill.workers and point.decode.workers:
        return _completed(point, point.prefill, point.decode)
    return _identified(point, point.prefill, point.decode)


def _completed(point: Point, prefill: Pool, decode: Pool) -> DisaggregatedLayout:
    """The row's own layout, with what the harness says about seats and drafting where it knows that run."""
    own = DisaggregatedLayout(prefill=_labelled(prefill), decode=_labelled(decode))
    same = [run.layout for run in _runs(point) if point.concurrency in run.clients
            and _alike(run.layout.prefill, own.prefill) and _alike(run.layout.decode, own.decode)]  # fmt: skip
    plain = [layout for layout in same if not layout.drafted]
    if same:
        known = (plain or same)[0]
        return known if _is_old(point) else replace(known, prefill=own.prefill)
    near = _runs(point)
    return replace(own, prompt_tokens=near[0].layout.prompt_tokens if near else None)


def _labelled(pool: Pool) -> Split:
    """The split that the columns of a side name. Experts of data-parallel attention that are labelled as cut over many
    ranks were spread whole: no engine cuts one over 16 ranks."""
    ranks = pool.tp * pool.attention_dp
    if pool.attention_dp > 1:
        whole = (pool.moe_ep or 1) > 1 or ranks >= 16
        return Split(workers=pool.workers or 1, kind="dep" if whole else "dp", gpus=ranks)
    return Split(workers=pool.workers or 1, kind="tep" if (pool.moe_ep or 1) > 1 else "tp", gpus=ranks)


def _alike(one: Split, other: Split) -> bool:
    """The same workers; what a label says about experts is not asked."""
    return (one.workers, one.gpus, one.attention_dp > 1) == (other.workers, other.gpus, other.attention_dp > 1)


def _identified(point: Point, prefill: Pool, decode: Pool) -> DisaggregatedLayout:
    """The run of the harness that the row's GPUs and clients point to."""
    labelled = prefill.gpus, decode.gpus
    runs = [run for run in _runs(point) if _fits(run.layout, *labelled)]
    spread = [run for run in runs if run.layout.prefill.ep == prefill.moe_ep]
    if prefill.gpus > 1 and spread and prefill.gpus != runs[0].layout.gpus:
        runs = spread  # the prefill side's split of the experts is as labelled
    exact = [run.layout for run in runs if point.concurrency in run.clients]
    if exact:
        # Where the same clients were run with and without drafting, most rows of this kind drafted; those of the
        # first runs, which have no version, did not.
        early = point.engine.lower() == "sglang" and point.measured_on < _SGLANG_DRAFTS
        plain = not point.engine_version or early
        drafted = [layout for layout in exact if layout.drafted and not plain]
        if plain:
            exact.sort(key=lambda layout: layout.drafted)
        chosen = (drafted or exact)[0]
        if len(exact) == 1:
            return chosen
        others = f"{len(exact)} runs of the harness fit the row"
        return replace(chosen, notes=(f"layout: {others}; the first{' that drafts' if drafted else ''} is taken",))
    if runs:
        def distance(run: _Line) -> float:
            return min(abs(math.log(point.concurrency / clients)) for clients in run.clients)

        nearest = min(runs, key=distance)
        return replace(nearest.layout, seats=_UNLIMITED, notes=(
            "layout: that of the run of the harness with the nearest number of clients",))
    note = "layout: the row does not say how many workers there are; one of each side is taken"
    return DisaggregatedLayout(prefill=_labelled(prefill), decode=_labelled(decode), notes=(note,))


def _fits(layout: DisaggregatedLayout, prefill_gpus: int, decode_gpus: int) -> bool:
    """Whether a run agrees with the GPUs of a row: of one worker of each side, of all together, or not said (1)."""
    if prefill_gpus == decode_gpus == 1:
        return True
    if (layout.prefill.gpus, layout.decode.gpus) == (prefill_gpus, decode_gpus):
        return True
    return prefill_gpus == decode_gpus == layout.gpus


def _runs(point: Point) -> Sequence[_Line]:
    """Configurations of the row's model on its GPU for its lengths, in its time."""
    era = "old" if _is_old(point) else "new"
    dtype = "fp4" if "fp4" in (point.weight_dtype or "") else "fp8" if "fp8" in (point.weight_dtype or "") else ""
    key = (point.engine.lower(), _gpu(point.gpu), dtype, round(point.input_tokens), round(point.output_tokens), era)
    if "deepseek" not in point.model.lower():
        return ()
    return [run for run in known_runs() if run.key == key]


def _is_old(point: Point) -> bool:
    if point.measured_on:
        return point.measured_on < "2026"
    return point.engine_version.startswith(("0.5.1-", "0.5.5"))


def _gpu(name: str) -> str:
    key = name.lower().replace("-", "_")
    return key if key.startswith("gb") or key.endswith("_sxm") else f"{key}_sxm"
