"""Typed reads from a config.json: every size checked, every key that was looked at remembered.

Precedence of a value: the config's own key, then the other spellings of it (transformers' attribute
maps and older names), then the default of transformers' configuration class for the model type
(`class_defaults.json`). A key that is nowhere is a ConfigError; nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from bstar.errors import ConfigError

MAX_LAYERS = 4096
MAX_SIZE = 1 << 25  # vocabulary, widths
MAX_CONTEXT = 1 << 40
MAX_EXPERTS = 1 << 16

# Every config.json states these at its top level; a file without one is not what it seems. Inside a nested
# text_config transformers leaves out what equals the class's default.
STATED: frozenset[str] = frozenset({
    "hidden_size", "n_embd", "n_embed", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "num_attention_heads", "n_head", "n_heads", "num_heads", "vocab_size", "intermediate_size", "ffn_dim",
})  # fmt: skip

_MISSING = object()


@cache
def _class_table() -> dict[str, dict[str, Any]]:
    text = files("bstar.codec.hf_config").joinpath("class_defaults.json").read_text("utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def class_defaults(model_type: str) -> Mapping[str, Any]:
    """The default of each architectural field of the configuration class of `model_type`."""
    found: dict[str, Any] = _class_table().get(model_type, {}).get("defaults", {})
    return found


def attribute_map(model_type: str) -> Mapping[str, str]:
    """Other spellings of a class's fields: spelling -> field."""
    found: dict[str, str] = _class_table().get(model_type, {}).get("aliases", {})
    return found


def architectures() -> Mapping[str, str]:
    """transformers' causal model classes of the described types: class name -> model type."""
    return {e["architecture"]: model_type for model_type, e in _class_table().items() if "architecture" in e}


class Reader:
    """One (sub-)config of a known model type.

    path     where it sits in the file ("text_config."), for messages
    nested   whether it is a config inside another, which may leave sizes to its class
    sizes    whether a size that is missing may be the class's default (not where only the architecture's
             class is known, not the configuration class)
    touched  the keys that were asked for, present or not
    assumed  sizes every model must have that came from the class's defaults (nested configs only)
    """

    __slots__ = ("_by_field", "aliases", "assumed", "defaults", "model_type", "nested", "path", "raw", "touched")

    def __init__(
        self, raw: Mapping[str, Any], model_type: str, *, path: str = "", defaults: Mapping[str, Any] | None = None,
        class_of: str | None = None, sizes: bool = True, nested: bool = True,
    ) -> None:
        self.raw = raw
        self.model_type = model_type
        self.path = path
        self.aliases = attribute_map(class_of or model_type)
        own = class_defaults(class_of or model_type)
        if not sizes:
            own = {k: v for k, v in own.items() if isinstance(v, bool) or not isinstance(v, (int, float, list))}
        # A field that the class maps to another field is only a spelling: its own default never shows.
        self.defaults = {k: v for k, v in own.items() if self.aliases.get(k) not in own} | dict(defaults or {})
        self.nested = nested
        self.touched: set[str] = set()
        self.assumed: set[str] = set()
        self._by_field: dict[str, list[str]] = {}
        for spelling, field in self.aliases.items():
            self._by_field.setdefault(field, []).append(spelling)

    # -- lookup -----------------------------------------------------------------------------------

    def find(self, *keys: str) -> Any:
        """The value of the first key that the config (then the class) has, or None."""
        value = self._find(keys)
        return None if value is _MISSING else value

    def has(self, *keys: str) -> bool:
        """Whether the config itself has one of the keys, not null."""
        self.touched.update(keys)
        return any(self.raw.get(k) is not None for k in keys)

    def unused(self, *keys: str) -> None:
        """Note keys of a mechanism that the class has and that no layer of this config uses."""
        self.touched.update(self._spellings(keys))

    def _find(self, keys: Sequence[str]) -> Any:
        spellings = self._spellings(keys)
        self.touched.update(spellings)
        null = False
        for key in spellings:
            if key in self.raw:
                if self.raw[key] is not None:
                    return self.raw[key]
                null = True
        if null:
            return None
        for key in spellings:
            if key in self.defaults:
                value = self.defaults[key]
                if key in STATED and isinstance(value, int):
                    if not self.nested:
                        return _MISSING
                    self.assumed.add(key)
                return value
        return _MISSING

    def _spellings(self, keys: Sequence[str]) -> list[str]:
        out: list[str] = []
        for key in keys:
            field = self.aliases.get(key, key)
            out += [key, field, *self._by_field.get(field, ())]
        return out

    def name_of(self, keys: Sequence[str]) -> str:
        """The spelling that the config itself uses of `keys`; the first of them where it has none."""
        return next((k for k in self._spellings(keys) if k in self.raw), keys[0])

    def fail(self, key: str, problem: str) -> ConfigError:
        """The error to raise about `key`."""
        return ConfigError(f"config.json: {self.path}{key} {problem}")

    # -- numbers ----------------------------------------------------------------------------------

    def size(self, *keys: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number of at least `low`; `default` where the config and the class have none."""
        value = self._find(keys)
        if value is _MISSING or value is None:
            if default is not None:
                return default
            state = "is null" if value is None else "is missing"
            raise self.fail(self.name_of(keys), f"{state}; give it as a whole number of at least {low}")
        return self.whole(self.name_of(keys), value, low=low, high=high)

    def optional_size(self, *keys: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """A whole number, or None where it is null, absent everywhere, or switched off (-1)."""
        value = self._find(keys)
        if value is _MISSING or value is None:
            return None
        return self.whole(self.name_of(keys), value, low=low, high=high)

    def whole(self, key: str, value: Any, *, low: int, high: int = MAX_SIZE) -> int:
        """`value` as a whole number in [low, high]."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"is {_shown(value)}; it must be a whole number of at least {low}")
        if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
            raise self.fail(key, f"is {value}; it must be a whole number of at least {low}")
        number = int(value)
        if number < low:
            raise self.fail(key, f"is {_shown(number)}; it must be at least {low}")
        if number > high:
            raise self.fail(key, f"is {_shown(number)}, more than any model has; the largest accepted is {high}")
        return number

    def number(self, *keys: str, default: float) -> float:
        """A finite number."""
        value = self._find(keys)
        if value is _MISSING or value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(self.name_of(keys), f"is {_shown(value)}; it must be a finite number")
        return float(value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        """true or false."""
        value = self._find(keys)
        if value is _MISSING or value is None:
            return default
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise self.fail(self.name_of(keys), f"is {_shown(value)}; it must be true or false")

    def text(self, *keys: str, default: str = "") -> str:
        """A string."""
        value = self._find(keys)
        if value is _MISSING or value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(self.name_of(keys), f"is {_shown(value)}; it must be a string")
        return value

    # -- lists ------------------------------------------------------------------------------------

    def items(self, *keys: str, length: int | None = None) -> list[Any] | None:
        """A list (of `length` entries where one is given), or None where there is none."""
        value = self._find(keys)
        if value is _MISSING or value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.fail(self.name_of(keys), f"is {_shown(value)}; it must be a list")
        if len(value) > 4 * MAX_LAYERS:
            raise self.fail(self.name_of(keys), f"has {len(value)} entries; at most {4 * MAX_LAYERS} are accepted")
        if length is not None and len(value) != length:
            raise self.fail(self.name_of(keys),
                            f"has {len(value)} entries; it must have one for each of the {length} layers")
        return list(value)

    def words(self, *keys: str, length: int | None = None, allowed: Sequence[str] = ()) -> list[str] | None:
        """A list of strings out of `allowed`."""
        values = self.items(*keys, length=length)
        if values is None:
            return None
        for value in values:
            if not isinstance(value, str) or (allowed and value not in allowed):
                raise self.fail(self.name_of(keys), f"holds {_shown(value)}; known kinds are {', '.join(allowed)}")
        return values

    def numbers(self, *keys: str, length: int | None = None, low: int = 0) -> list[int] | None:
        """A list of whole numbers."""
        values = self.items(*keys, length=length)
        return None if values is None else [self.whole(self.name_of(keys), v, low=low) for v in values]

    # -- nesting ----------------------------------------------------------------------------------

    def child(self, key: str) -> Mapping[str, Any] | None:
        """The nested object under `key`, or None."""
        self.touched.add(key)
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"is {_shown(value)}; it must be an object")
        return value

    # -- what every decoder has -------------------------------------------------------------------

    def layer_count(self, *keys: str) -> int:
        """The number of decoder layers."""
        return self.size(*(keys or ("num_hidden_layers", "n_layer", "n_layers", "num_layers")), high=MAX_LAYERS)

    def hidden_size(self) -> int:
        if self.has("n_embed"):  # BLOOM's and Falcon's first spelling, which their classes prefer
            return self.size("n_embed")
        return self.size("hidden_size", "n_embd", "d_model", "n_embed")

    def vocab_size(self) -> int:
        return self.size("vocab_size")


def _shown(value: Any) -> str:
    """A value as an error message shows it: short, and safe to print."""
    if isinstance(value, str):
        return repr(value[:40] + ("…" if len(value) > 40 else ""))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 10**24 else "a number of more than 24 digits"
    if isinstance(value, float):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"an object of {len(value)} keys" if isinstance(value, Mapping) else f"a {type(value).__name__}"
