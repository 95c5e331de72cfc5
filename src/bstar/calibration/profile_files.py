"""Profile files: the strict reader, the writer and the schema, all from one table of the keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from bstar.calibration.profile import FORMAT, Profile, ProfileConstant, ProfileDevice, ProfilePoint, Scope
from bstar.errors import ConfigError

_SUFFIXES: Final = (".json", ".toml")
_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 1}
_FIGURES: Final = {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}}


def _table(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required),
            "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_SCOPE: Final = _table(
    {"model": _TEXT, "gpu": _TEXT, "engine": _TEXT},
    {"engine_version": _TEXT, "tp": _COUNT, "pp": _COUNT, "dp": _COUNT, "attention_dp": _COUNT, "ep": _COUNT,
     "dcp": _COUNT, "weight_dtype": _TEXT, "kv_dtype": _TEXT})
_DEVICE: Final = _table({"name": _TEXT, "bandwidth_bytes_per_s": {"type": "number", "exclusiveMinimum": 0},
                         "peak_flops_per_s": _FIGURES})
_CONSTANT: Final = _table({"name": _TEXT, "value": _NUMBER, "prior": _NUMBER, "standard_error": _NUMBER})
_POINT: Final = _table(
    {"id": _TEXT, "load": {"enum": ["concurrency", "rate_per_s"]}, "load_value": _NUMBER, "input_tokens": _NUMBER,
     "output_tokens": _NUMBER, "measured": _FIGURES, "before": _FIGURES, "after": _FIGURES},
    {"measured_on": _TEXT})


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a profile file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "bstar profile",
        **_table({"format": {"const": FORMAT}, "name": _TEXT, "scope": _SCOPE, "constants": _list(_CONSTANT),
                  "points": _list(_POINT)},
                 {"device": _DEVICE, "covariance": _list(_list(_NUMBER)), "created_by": _TEXT, "notes": _list(_TEXT)}),
    }  # fmt: skip


def profile_from(raw: Mapping[str, Any], *, source: str) -> Profile:
    """The profile of a file's content. Raises ConfigError naming the key; SpecError for constants out of range."""
    found = raw.get("format")
    if found != FORMAT:
        raise ConfigError(f"profile {source!r}: format must be {FORMAT!r}, is {str(found)[:60]!r}; "
                          "bstar calibrate writes such files")
    _check(raw, schema(), f"profile {source!r}")

    def numbers(point: Mapping[str, Any]) -> dict[str, Any]:
        return {key: {k: float(v) for k, v in value.items()} if isinstance(value, Mapping) else value
                for key, value in point.items()}

    return Profile(
        name=raw["name"], scope=Scope(**raw["scope"]),
        constants=tuple(ProfileConstant(**one) for one in raw["constants"]),
        points=tuple(ProfilePoint(**numbers(one)) for one in raw["points"]),
        device=ProfileDevice(**numbers(raw["device"])) if "device" in raw else None,
        covariance=tuple(tuple(float(v) for v in row) for row in raw.get("covariance", ())),
        created_by=raw.get("created_by", ""), notes=tuple(raw.get("notes", ())),
    )  # fmt: skip


def profile_text(profile: Profile, suffix: str) -> str:
    """The file's text. Raises ConfigError for another suffix than .json and .toml."""
    if suffix == ".json":
        return json.dumps(profile.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if suffix == ".toml":
        return _toml(profile.to_dict())
    raise ConfigError(f"profile: its name must end in {' or '.join(_SUFFIXES)}")


def _check(value: Any, what: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError where `value` does not match the schema: the small part of JSON schema that is used here."""
    if "enum" in what and value not in what["enum"]:
        raise ConfigError(f"{where}: must be {' or '.join(what['enum'])}, is {str(value)[:60]!r}")
    kind = what.get("type")
    if kind is None:
        return
    words, fits = _KINDS[kind]
    if not fits(value):
        raise ConfigError(f"{where}: must be {words}, is {str(value)[:60]!r}")
    least = what.get("minimum", what.get("exclusiveMinimum"))
    if least is not None and (value < least or ("exclusiveMinimum" in what and value <= least)):
        raise ConfigError(f"{where}: must be {'more than' if 'exclusiveMinimum' in what else 'at least'} {least}, "
                          f"is {value}")
    if kind == "array":
        for number, one in enumerate(value):
            _check(one, what["items"], f"{where}[{number}]")
    if kind == "object":
        _check_table(value, what, where)


def _check_table(value: Mapping[str, Any], what: Mapping[str, Any], where: str) -> None:
    known: Mapping[str, Any] = what.get("properties", {})
    others = what["additionalProperties"]
    for key in what.get("required", ()):
        if key not in value:
            raise ConfigError(f"{where}: has no {key!r}; make the profile with bstar calibrate")
    for key, one in value.items():
        if key not in known and not others:
            near = get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {str(key)[:60]!r}; {hint}")
        _check(one, known.get(key, others), f"{where}: {key}" if ": " not in where else f"{where}.{key}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "string": ("text", lambda v: isinstance(v, str)),
    "number": ("a number", _is_number),
    "integer": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "array": ("a list", lambda v: isinstance(v, list)),
    "object": ("a table", lambda v: isinstance(v, dict)),
}


def _toml(content: Mapping[str, Any]) -> str:
    """Top-level values, then [scope] and [device], then [[constants]] and [[points]]."""
    plain = {k: v for k, v in content.items() if k not in ("scope", "device", "constants", "points")}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for table in ("scope", "device"):
        if table in content:
            lines += ["", f"[{table}]", *(f"{key} = {_toml_value(value)}" for key, value in content[table].items())]
    for table in ("constants", "points"):
        for one in content[table]:
            lines += ["", f"[[{table}]]", *(f"{key} = {_toml_value(value)}" for key, value in one.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(one) for one in value) + "]"
    # JSON's texts, numbers and truth values are TOML's, but for the DEL character.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
