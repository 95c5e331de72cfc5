"""Labels of latency points that cannot be right, found by rules that a reader can check row by row.

    rule                        what is seen                                              what follows
    ──────────────────────────  ────────────────────────────────────────────────────────  ──────────────────────
    tpot is e2e over tokens     tpot · osl = ttft + (osl - 1) · itl, and tpot is not itl  TPOT is the itl column
    same figures twice          TTFT, TPOT and throughput equal to the digit under        one of them is no
                                another GPU, engine, model or number of GPUs              measurement of its label
    figures made of others      a GPU with a remark, "X (…)": TPOT equal to X's row for   not measured under that
                                row, TTFT a constant times it                             label
    flags of another engine     options that only another engine has                      labels of two runs mixed
    speculative decoding        the flags draft tokens                                    TPOT depends on how many
                                                                                          are accepted, not stated
    below the floor             TPOT under what reading weights and cache takes           a format or a load other
                                at full bandwidth                                         than the label says
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from bstar.calibration.latency_points import LatencyPoint
from bstar.calibration.latency_points_mapping import engine_of
from bstar.errors import SpecError

_SPECULATION: Final = re.compile(r"speculative|--draft|num_speculative_tokens", re.IGNORECASE)
# Options that one engine alone has.
_OWN_FLAGS: Final = {
    "sglang": ("--enable-dp-attention", "--mem-fraction-static", "--tp-size", "--max-running-requests"),
    "vllm": ("--gpu-memory-utilization", "--max-num-seqs", "--enable-expert-parallel"),
    "trtllm": ("--max_num_tokens", "--tp_size", "--ep_size", "--enable_chunked_prefill"),
}  # fmt: skip
# A remark on a GPU's name, and how alike ratios have to be to be one constant.
_REMARK: Final = re.compile(r"\s*\([^()]*\)\s*$")
_CONSTANT: Final = 0.01
_EQUAL: Final = 0.01


def measured_tpot_s(point: LatencyPoint) -> float | None:
    """The time between two tokens of a request as measured: the tpot column, or itl where tpot is e2e over tokens."""
    return point.itl_s if tpot_is_share_of_e2e(point) else point.tpot_s


def tpot_is_share_of_e2e(point: LatencyPoint) -> bool:
    """Whether the tpot column is (TTFT + decoding) / tokens, not the time between tokens."""
    p = point
    if p.tpot_s is None or p.itl_s is None or p.ttft_s is None or not p.output_tokens or p.output_tokens < 2:
        return False
    if abs(p.tpot_s / p.itl_s - 1.0) < 5 * _EQUAL:
        return False
    whole = p.ttft_s + (p.output_tokens - 1.0) * p.itl_s
    return abs(p.tpot_s * p.output_tokens / whole - 1.0) < _EQUAL


def label_notes(points: Sequence[LatencyPoint]) -> dict[str, str]:
    """What is wrong with a row's labels, by id; rows without fault are left out."""
    notes: dict[str, list[str]] = defaultdict(list)
    for point in points:
        for note in _own_notes(point):
            notes[point.id].append(note)
    for row, others in _copies(points):
        notes[row.id].append(f"same figures as {others}, whose labels differ")
    for row, original, factor in _derived(points):
        notes[row.id].append(
            f"made of {original}'s figures: TPOT equal row by row, TTFT times {factor:.3g}; not measured by itself")
    return {name: "; ".join(found) for name, found in notes.items()}


def below_floor_note(point: LatencyPoint, floor_s: float | None) -> str | None:
    """Why a measured TPOT under the physical floor cannot be of what the row names; None where it is not under it."""
    measured = measured_tpot_s(point)
    if measured is None or floor_s is None or measured >= floor_s:
        return None
    return (f"TPOT {measured * 1e3:.2f} ms is below the {floor_s * 1e3:.2f} ms that reading weights and cache takes at "
            "full bandwidth: a narrower format, fewer tokens or a smaller batch than the row says")


def _own_notes(point: LatencyPoint) -> Iterable[str]:
    if tpot_is_share_of_e2e(point):
        yield "tpot is e2e over output tokens; the time between tokens is itl"
    if _SPECULATION.search(point.flags):
        yield "speculative decoding: how many drafted tokens are accepted is not stated"
    try:
        engine = engine_of(point.engine)
    except SpecError:
        return
    foreign = [f for name, flags in _OWN_FLAGS.items() if name != engine for f in flags
               if re.search(rf"(^|\s){re.escape(f)}(=|\s|$)", point.flags) and f not in _OWN_FLAGS.get(engine, ())]
    if foreign:
        yield f"{', '.join(foreign[:3])}: no options of {point.engine}"


def _copies(points: Sequence[LatencyPoint]) -> Iterable[tuple[LatencyPoint, str]]:
    """Rows whose three figures stand under other labels too."""
    by_figures: dict[tuple[float, float, float], list[LatencyPoint]] = defaultdict(list)
    for p in points:
        if p.ttft_s and p.tpot_s and p.out_tokens_per_s:
            by_figures[p.ttft_s, p.tpot_s, p.out_tokens_per_s].append(p)
    for same in by_figures.values():
        for p in same:
            others = [q.id for q in same if _label(q) != _label(p)]
            if others:
                yield p, ", ".join(others)


def _label(p: LatencyPoint) -> tuple[object, ...]:
    return p.engine, p.model, p.gpu, p.num_gpus


def _derived(points: Sequence[LatencyPoint]) -> Iterable[tuple[LatencyPoint, str, float]]:
    """Rows of a GPU with a remark that are another GPU's rows times a constant."""
    rows: dict[tuple[object, ...], LatencyPoint] = {}
    for p in points:
        rows[_case(p, p.gpu)] = p
    for gpu in sorted({p.gpu for p in points if _REMARK.search(p.gpu)}):
        plain = _REMARK.sub("", gpu)
        pairs = [(p, rows[_case(p, plain)]) for p in points if p.gpu == gpu and _case(p, plain) in rows]
        ratios = [p.ttft_s / q.ttft_s for p, q in pairs if p.ttft_s and q.ttft_s]
        if len(ratios) < 3 or any(p.tpot_s != q.tpot_s for p, q in pairs):
            continue
        middle = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
        if all(abs(r / middle - 1.0) < _CONSTANT for r in ratios):
            yield from ((p, plain, middle) for p, _ in pairs)


def _case(p: LatencyPoint, gpu: str) -> tuple[object, ...]:
    lengths = p.input_tokens, p.output_tokens
    return p.source, p.engine, p.model, gpu, p.tp, p.weight_dtype, p.load, p.load_value, lengths
