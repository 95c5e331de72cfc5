"""The memory budget against measured start-up logs: the tables of docs/memory.md.

    python tools/memory_report.py            errors by group, the worst rows, and the leave-one-model-out check
    python tools/memory_report.py --write    the same, into docs/memory.md between its markers

Leave-one-model-out: every fitted constant of `physics/data/memory.toml` is fitted again without one model's rows,
by the same rule, and that model's rows are predicted with it.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "physics")]

from memory_points import Point, load_points  # noqa: E402  (after the path is set)

from bstar.physics import activation, memory  # noqa: E402
from bstar.physics.activation import constants, model_runner  # noqa: E402
from bstar.units import GIB  # noqa: E402

MARKERS = ("<!-- memory-report -->", "<!-- /memory-report -->")


def usable(points: Iterable[Point]) -> list[Point]:
    """vLLM 0.11 and later that started, with model, GPU, utilization and KV space stated."""
    return [p for p in points if p.version >= (0, 11) and p.row["outcome"] == "ok" and p.row["gpu_mem_util"]
            and p.kv_error() is not None]


def fit(points: list[Point]) -> dict[str, Any]:
    """The constants again, from the terms that these rows state (a term without rows keeps its value)."""
    out: dict[str, Any] = copy.deepcopy(dict(constants()))
    vllm = out["vllm"]
    units = vllm["activations"]
    sort = [_sampler_bytes(p, units["sampler_units"]) for p in points if _runs_sampler(p) and p.version < (0, 17)]
    if sort:
        vllm["sampler"][0]["bytes_per_logit"] = statistics.median(sort)
    held = [_sampler_units(p) for p in points if _runs_sampler(p) and p.version >= (0, 17)]
    if held:
        units["sampler_units"] = statistics.median(held)
    layers = [_layer_units(p) for p in points if p.row["activation_gib"] and _stages(p) > 1]
    if layers:
        units["layer_units"] = statistics.median(layers)
    for entry, low, high in ((0, (0, 11), (0, 17)), (1, (0, 17), (0, 27)), (2, (0, 27), (9,))):
        alone = [v for p in points if low <= p.version < high and _ranks(p) == 1 and (v := p.number("non_torch_gib"))]
        if alone:
            vllm["non_torch"][entry]["single_gib"] = statistics.median(alone)
    single = vllm["non_torch"][1]["single_gib"]
    together = [v - single for p in points
                if (0, 17) <= p.version < (0, 27) and _tp(p) > 1 and (v := p.number("non_torch_gib"))]
    if together:
        vllm["communication"][2]["tensor_parallel_switch_gib"] = statistics.median(together)
    return out


def _tp(p: Point) -> int:
    return int(float(p.row["tp"] or 1))


def _stages(p: Point) -> int:
    return int(float(p.row["pp"] or 1))


def _ranks(p: Point) -> int:
    return _tp(p) * _stages(p)


def _runs_sampler(p: Point) -> bool:
    """The row states the activation peak and the sampler sets it."""
    if not p.row["activation_gib"] or p.budget is None or p.deployment is None or _stages(p) > 1:
        return False
    return p.budget.activation_set_by == "sampler" and model_runner(p.deployment.model, p.version) == 1


def _logits(p: Point) -> float:
    assert p.deployment is not None
    return float(p.deployment.engine.max_num_seqs * p.deployment.model.vocab_size)


def _hidden(p: Point) -> float:
    assert p.deployment is not None
    return float(p.deployment.engine.max_num_batched_tokens * p.deployment.model.hidden_size * 2)


def _peak(p: Point) -> float:
    return float(p.row["activation_gib"]) * GIB


def _sampler_bytes(p: Point, units: float) -> float:
    return (_peak(p) - units * _hidden(p)) / _logits(p)


def _sampler_units(p: Point) -> float:
    return (_peak(p) - 14.0 * _logits(p)) / _hidden(p)


def _layer_units(p: Point) -> float:
    """Hidden states beside the FFN of a dense model's first stage."""
    assert p.deployment is not None
    width = max(3.0 * getattr(g.ffn, "width", 0) for g in p.deployment.model.layers)
    return (_peak(p) - width * p.deployment.engine.max_num_batched_tokens * 2) / _hidden(p)


def predicted_errors(points: list[Point], numbers: dict[str, Any]) -> list[tuple[Point, float]]:
    """KV errors of these rows with these constants."""
    original: Callable[[], Any] = activation.constants
    for module in (activation, memory):
        module.constants = lambda: numbers  # type: ignore[attr-defined]
    try:
        out = []
        for p in points:
            assert p.deployment is not None and p.kv_gib is not None
            out.append((p, memory.memory_budget(p.deployment).kv_cache_bytes / GIB / p.kv_gib - 1.0))
        return out
    finally:
        for module in (activation, memory):
            module.constants = original  # type: ignore[attr-defined]


def leave_one_model_out(points: list[Point]) -> list[tuple[Point, float]]:
    out: list[tuple[Point, float]] = []
    for model in sorted({p.row["model"] for p in points}):
        numbers = fit([p for p in points if p.row["model"] != model])
        out += predicted_errors([p for p in points if p.row["model"] == model], numbers)
    return out


def summary(errors: Iterable[float]) -> str:
    sizes = sorted(abs(e) for e in errors)
    if not sizes:
        return "0 | – | – | –"
    tail = sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
    return f"{len(sizes)} | {statistics.median(sizes):.2%} | {tail:.2%} | {sizes[-1]:.1%}"


def report() -> str:
    points = load_points()
    rows = usable(points)
    kv = [(p, e) for p in rows if (e := p.kv_error()) is not None]
    weights = [e for p in points if p.version >= (0, 11) and (e := p.weight_error()) is not None]
    stated = [e for p, e in kv if p.row["activation_gib"] or p.row["max_num_batched_tokens"]]
    held_out = leave_one_model_out(rows)
    lines = ["| rows (vLLM ≥ 0.11) | n | median | 90th percentile | worst |", "|---|---|---|---|---|",
             f"| weights after loading | {summary(weights)} |", f"| KV space | {summary(e for _, e in kv)} |"]
    for label, keep in (
        ("one GPU", lambda p: _ranks(p) == 1), ("tensor parallel", lambda p: _tp(p) > 1),
        ("pipeline parallel", lambda p: _stages(p) > 1), ("0.11 – 0.16", lambda p: p.version < (0, 17)),
        ("0.17 – 0.19", lambda p: (0, 17) <= p.version < (0, 20)), ("0.20 and later", lambda p: p.version >= (0, 20)),
    ):
        lines.append(f"| KV space, {label} | {summary(e for p, e in kv if keep(p))} |")
    lines += [f"| KV space, row states what sets the activation peak | {summary(stated)} |",
              f"| KV space, **leave one model out** | {summary(e for _, e in held_out)} |", "",
              "Worst rows:", "", "| row | model | measured GiB | predicted GiB | error | left-out error |",
              "|---|---|---|---|---|---|"]
    left_out = {p.id: e for p, e in held_out}
    for p, error in sorted(kv, key=lambda r: -abs(r[1]))[:8]:
        assert p.budget is not None and p.kv_gib is not None
        predicted = p.budget.kv_cache_bytes / GIB
        lines.append(f"| {p.id} | {p.row['model']} | {p.kv_gib:.2f} | {predicted:.2f} | {error:+.1%} | "
                     f"{left_out[p.id]:+.1%} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    text = report()
    print(text)
    if "--write" in argv:
        path = ROOT / "docs" / "memory.md"
        page = path.read_text(encoding="utf-8")
        before, _, rest = page.partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        path.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
