"""Flags that published benchmark runs were served with: `runs/inferencex.toml`, by run and date.

A measured row names engine, model, GPU and load, but not the flags that decide its queueing: token budgets, seats,
memory fractions, polling. They are data with their sources; figures that follow the load are arithmetic in text.
"""

from __future__ import annotations

import ast
import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from bstar.catalog.engines import engine_name
from bstar.errors import SpecError

_BLACKWELL = ("b200", "b300", "gb200", "gb300")
_TEXTS = frozenset({"kv_cache_dtype", "cudagraph_mode"})  # flags whose text is no arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The flags of a run.

    flags   keywords of `bstar.deployment`; they go over what the row says of the layout
    run     which entry they are from; "default": the engine's common flags, because the run is not listed
    source  where it was read
    """

    flags: dict[str, Any]
    run: str
    source: str


def run_settings(
    engine: str, gpu: str, model: str, weight_dtype: str, *, isl_tokens: int, osl_tokens: int, concurrency: int,
    tp: int = 1, attention_dp: int = 1, ep: int = 1, measured_on: str | None = None,
) -> RunSettings:  # fmt: skip
    """The flags that an InferenceX run of this row was served with.

    gpu           as in the measured files (`b200_sxm`) or a catalog id
    weight_dtype  "fp8", "fp4", "bf16" or "" (not known)
    tp            tensor-parallel ranks of the attention
    measured_on   ISO date; None or "": the newest flags that are known
    """
    name, card, family = engine_name(engine), gpu.lower().split("_")[0].split("-")[0], model.rsplit("/", 1)[-1].lower()
    values: dict[str, Any] = {
        "isl": isl_tokens, "osl": osl_tokens, "concurrency": concurrency, "ranks": tp * attention_dp,
        "attention_dp": attention_dp, "ep": ep, "blackwell": card in _BLACKWELL,
        "fp4": "fp4" in weight_dtype, "fp8": "fp8" in weight_dtype,
    }  # fmt: skip
    data = _data()
    known = [
        run for run in data["run"]
        if run["engine"] == name and re.search(run["model"], family)
        and (not run.get("gpus") or card in run["gpus"])
        and (not run.get("dtypes") or any(d in weight_dtype for d in run["dtypes"]))
    ]  # fmt: skip
    known.sort(key=lambda run: str(run["from"]))
    begun = [run for run in known if not measured_on or run["from"] <= measured_on]
    found = (begun or known[:1])[-1:]
    flags: Mapping[str, Any] = found[0]["flags"] if found else data["default"][name]
    merged = dict(flags)
    for rule in found[0].get("when", ()) if found else ():
        if evaluate(rule["if"], values):
            merged |= rule["flags"]
    return RunSettings(
        flags={key: value if key in _TEXTS else evaluate(value, values) for key, value in merged.items()},
        run=f"{found[0]['model']} {found[0]['from']}" if found else "default",
        source=found[0]["source"] if found else data["source"],
    )


def evaluate(text: Any, values: Mapping[str, Any]) -> Any:
    """A number as it is; a text as arithmetic over `values` (+ - * // comparisons, and, or, not, if, max, min)."""
    if not isinstance(text, str):
        return text
    try:
        return _value(ast.parse(text, mode="eval").body, values)
    except (SyntaxError, KeyError, TypeError) as error:
        raise SpecError(f"run settings: {text!r} is no arithmetic over {', '.join(sorted(values))}: {error}") from None


_BINARY: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISONS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"max": max, "min": min}


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(_value(part, values) for part in parts)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, values) else orelse, values)
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_value(arg, values) for arg in args))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_value(term, values) for term in (left, *comparators)]
            return all(
                _COMPARISONS[type(op)](a, b) for op, a, b in zip(ops, terms[:-1], terms[1:], strict=True))
    raise TypeError(type(node).__name__)


@cache
def _data() -> dict[str, Any]:
    text = (files("bstar.catalog") / "runs" / "inferencex.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
