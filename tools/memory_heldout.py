"""The memory budget against start-up logs that no constant was fitted on: the held-out table of docs/memory.md.

    python tools/memory_heldout.py            errors by group, the worst rows, rows that could not be built
    python tools/memory_heldout.py --rows     every row
    python tools/memory_heldout.py --write    the tables, into docs/memory.md between their markers

Rows: `tests/data/heldout_memory_points.csv` (source = repository and issue or file; blank = not stated, which
means the engine version's default). Rows marked other than "ok" leave an input to be inferred.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "physics"), str(ROOT / "tools")]

from memory_points import HELD_OUT, Point, load_points  # noqa: E402  (after the path is set)
from memory_report import summary  # noqa: E402

from bstar.units import GIB  # noqa: E402

MARKERS = ("<!-- memory-heldout -->", "<!-- /memory-heldout -->")


def agrees(point: Point) -> bool | None:
    """The engine started, or refused, as predicted; None where the row says neither."""
    if point.budget is None or point.row["outcome"] not in ("ok", "fails"):
        return None
    return point.budget.fits == (point.row["outcome"] == "ok")


def space_error(point: Point) -> float | None:
    """KV error as a share of the usable memory: means something where hardly anything is left, too."""
    if point.budget is None or point.kv_gib is None:
        return None
    return (point.budget.kv_cache_bytes / GIB - point.kv_gib) * GIB / point.budget.usable_bytes


def token_error(point: Point) -> float | None:
    """Error of the logged KV cache size beyond that of the KV space: block sizes, groups and padding alone."""
    tokens, error = point.number("kv_tokens"), point.kv_error()
    if point.budget is None or not tokens or error is None:
        return None
    return point.budget.kv_cache_tokens / tokens / (1 + error) - 1


def tables(points: list[Point]) -> str:
    built = [p for p in points if p.budget is not None]
    kv = [(p, e) for p in built if (e := p.kv_error()) is not None]
    groups: tuple[tuple[str, Callable[[Point], bool]], ...] = (
        ("every input stated", _stated),
        ("— text only, one GPU", lambda p: _stated(p) and _ranks(p) == 1 and not _multimodal(p)),
        ("— multimodal, one GPU", lambda p: _stated(p) and _ranks(p) == 1 and _multimodal(p)),
        ("— more GPUs", lambda p: _stated(p) and _ranks(p) > 1),
        ("— experts", lambda p: _stated(p) and p.deployment is not None and p.deployment.model.is_moe),
        ("— before 0.20", lambda p: _stated(p) and p.version < (0, 20)),
        ("— 0.20 and later", lambda p: _stated(p) and p.version >= (0, 20)),
        ("an input inferred", lambda p: not _stated(p)),
    )
    lines = ["| held-out rows | n | median | 90th percentile | worst |", "|---|---|---|---|---|",
             f"| weights after loading | {summary(e for p in built if (e := p.weight_error()) is not None)} |",
             f"| KV space | {summary(e for _, e in kv)} |"]
    lines += [f"| KV space, {name} | {summary(e for p, e in kv if keep(p))} |" for name, keep in groups]
    lines += [
        f"| KV space, error as a share of the usable memory | {_over(built, space_error)} |",
        f"| KV tokens logged, for the same KV space | {_over(built, token_error)} |",
    ]
    said = [a for p in built if (a := agrees(p)) is not None]
    refused = [p for p in built if p.row["outcome"] == "fails"]
    lines += ["", f"Starts or refuses as the engine did: {sum(said)} of {len(said)} rows "
              f"({len(refused)} of them refusals, {sum(agrees(p) is True for p in refused)} predicted)."]
    return "\n".join(lines)


def _over(points: list[Point], error_of: Callable[[Point], float | None]) -> str:
    return summary(e for p in points if (e := error_of(p)) is not None)


def _stated(p: Point) -> bool:
    return p.row["quality"] == "ok"


def _ranks(p: Point) -> int:
    return int(float(p.row["tp"] or 1)) * int(float(p.row["pp"] or 1))


def _multimodal(p: Point) -> bool:
    return p.deployment is not None and bool(p.deployment.model.multimodal)


def row_line(p: Point) -> str:
    if p.budget is None or p.deployment is None:
        return f"{p.id} {p.row['model'][:40]:40s} {p.row['version']:8s} {p.problem[:110]}"
    b, engine = p.budget, p.deployment.engine
    measured = [p.number(c) for c in ("weights_gib_per_gpu", "activation_gib", "non_torch_gib", "cudagraph_gib")]
    predicted = [b.weight_bytes, b.activation_bytes, b.runtime_bytes, b.cuda_graph_bytes]
    parts = " ".join(
        f"{'' if m is None else f'{m:.2f}'}/{v / GIB:.2f}" for m, v in zip(measured, predicted, strict=True))
    kv = "" if p.kv_gib is None else f"{p.kv_gib:.2f}"
    error = p.kv_error()
    tokens = token_error(p)
    name, gpu = p.row["model"].split("/")[-1][:28], p.row["gpu"][:10]
    return " ".join((
        f"{p.id} {name:28s} {p.row['version'][:8]:8s} {gpu:10s} tp{p.row['tp'] or 1}",
        f"s{engine.max_num_seqs} t{engine.max_num_batched_tokens} {parts}",
        f"kv {kv}/{b.kv_cache_bytes / GIB:.2f} {'' if error is None else f'{error:+.1%}'}",
        f"tok {'' if tokens is None else f'{tokens:+.1%}'} {b.activation_set_by}",
        "" if agrees(p) is not False else f"DISAGREES {str(b.reason)[:60]}", f"[{p.row['quality']}]"))


def main(argv: list[str]) -> None:
    points = load_points(HELD_OUT)
    text = tables(points)
    print(text)
    if "--rows" in argv:
        print("\n".join(row_line(p) for p in points))
    else:
        print("\n".join(row_line(p) for p in points if p.budget is None))
    if "--write" in argv:
        path = ROOT / "docs" / "memory.md"
        page = path.read_text(encoding="utf-8")
        before, _, rest = page.partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        path.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
