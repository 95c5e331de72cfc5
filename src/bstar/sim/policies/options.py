"""Policies by name and text: `sglang`, `sglang:mixed_chunk=true,recv_interval=4`, `speculative:acceptance=0.8/0.6`."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bstar.errors import SpecError

T = TypeVar("T")


def split_policy(text: str) -> tuple[str, dict[str, str]]:
    """Name and options of a policy text. Raises SpecError where it is no NAME[:key=value,…]."""
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key.strip() in given:
            raise SpecError(f"policy: {part!r} in {text!r} is not key=value, or comes twice")
        given[key.strip().replace("-", "_")] = value.strip()
    return name.strip(), given


def options_from(kind: type[T], given: dict[str, str], *, policy: str, **known: Any) -> T:
    """An options dataclass from its fields as text; `known` fills those that were not given."""
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in names:
            raise SpecError(f"policy: {policy} has no option {key!r}; it has {', '.join(names)}")
    values = dict(known)
    for key, text in given.items():
        values[key] = _value(hints[key], text, f"policy: {policy}:{key}")
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name not in values and f.default is MISSING:
            raise SpecError(f"policy: {policy} needs {f.name}; write {policy}:{f.name}=…")
    return kind(**values)


def _value(hint: Any, text: str, name: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if text.lower() in ("none", ""):
            return None
        hint = next(a for a in get_args(hint) if a is not type(None))
    try:
        if get_origin(hint) is Literal:
            if text not in get_args(hint):
                raise SpecError(f"{name}: must be one of {', '.join(map(str, get_args(hint)))}, is {text!r}")
            return text
        if get_origin(hint) is tuple:
            return tuple(_value(get_args(hint)[0], part, name) for part in filter(None, text.split("/")))
        if hint is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return hint(text)
    except (KeyError, ValueError):
        raise SpecError(f"{name}: {text!r} is not a {getattr(hint, '__name__', 'value')}") from None
