"""Reading an engine's flags: names, arity, spellings; no meaning yet (that is `engine_settings`).

vLLM's table is extracted from its own parser (tools/make_vllm_flags.py), so that the value of a flag that
bstar does not model is never taken for the model's name. Spellings follow that parser: `--a_b` is
`--a-b`, `--flag=value`, unique prefixes, `--no-flag`, `-tp 2`, `-O3`, `--config.key value`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from bstar.errors import ConfigError, SpecError

Kind = Literal["switch", "boolean", "value", "optional", "list"]
_NEGATIVE_NUMBER = re.compile(r"^-\d+(\.\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of an engine: its destination, how many values it takes, whether bstar knows the name."""

    dest: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One flag as given: `text` is how it was written, `value` None for a switch, False for --no-flag."""

    dest: str
    value: str | bool | tuple[str, ...] | None
    text: str
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The flags of one engine by spelling, and the release that they are of ("" where it is not known)."""

    engine: str
    flags: Mapping[str, Flag]
    version: str = ""

    def find(self, name: str) -> tuple[Flag, bool] | None:
        """(flag, negated) of a spelling or of a prefix that only one flag has."""
        if name in self.flags:
            return self.flags[name], False
        positive = self.flags.get("--" + name.removeprefix("--no-")) if name.startswith("--no-") else None
        if positive is not None and positive.kind == "boolean":
            return positive, True
        if not name.startswith("--") or len(name) < 5:
            return None
        near = {f.dest: f for spelling, f in self.flags.items() if spelling.startswith(name)}
        if len(near) == 1:
            return next(iter(near.values())), False
        return None


@cache
def grammar(engine: str) -> Grammar:
    """The flag table of "vllm", "sglang" or "trtllm"."""
    flags: dict[str, Flag] = {}
    version = ""
    for file_name in {"vllm": ("vllm_flags.json", "vllm_old_flags.json")}.get(engine, (f"{engine}_flags.json",)):
        raw = json.loads((files("bstar.codec.data") / file_name).read_text(encoding="utf-8"))
        version = version or str(raw.get("version", ""))
        for dest, entry in raw["flags"].items():
            for name in entry["names"]:
                flags.setdefault(name, Flag(dest=dest, kind=entry["kind"]))
    return Grammar(engine=engine, flags=flags, version=version)


def read_arguments(engine: str, tokens: Sequence[str]) -> tuple[list[Argument], list[str]]:
    """(arguments in order, positional words) of the words after the launcher.

    Raises ConfigError where a flag has no value.
    """
    table = grammar(engine)
    arguments: list[Argument] = []
    positional: list[str] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token == "--":
            positional += tokens[index:]
            break
        if not _is_flag(token):
            positional.append(token)
            continue
        argument, index = _read_one(table, token, tokens, index)
        arguments.append(argument)
    return arguments, positional


def refused_flag(engine: str, word: str, *, version: str | None = None) -> str | None:
    """Why `engine` would not start with a word of its command that it does not have; None: it may well have it.

    vLLM's table is its own parser's, so what is not in it is refused by vLLM too, unless `version` is newer. Those
    of the others hold the common flags: there only the misspelling of one that bstar models is told from a flag that
    is merely rare.
    """
    from difflib import SequenceMatcher, get_close_matches

    from bstar.codec.engine_settings import HANDLERS

    name = _spelling(word.split("=", 1)[0].split(" ", 1)[0])
    flags = grammar(engine).flags
    shown_name = name if name.isprintable() and len(name) <= 60 else repr(name[:60])
    is_complete = engine == "vllm" and not (version and _release(version) > _release(grammar(engine).version))
    if not name.startswith("-"):
        return None if engine != "vllm" else f"{shown_name} is neither a flag nor a flag's value, and vllm refuses it"
    near = get_close_matches(name, sorted(flags, key=lambda f: -len(f)), n=1, cutoff=0.6)
    if not is_complete:
        is_misspelt = bool(near) and flags[near[0]].dest in HANDLERS[engine] and (
            SequenceMatcher(None, name, near[0]).ratio() > 0.9)
        return f"{shown_name} is not a flag of {engine}; did you mean {near[0]}?" if is_misspelt else None
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{shown_name} is not a flag of vllm, which refuses to start with it{hint}"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _is_flag(token: str) -> bool:
    return len(token) > 1 and token.startswith("-") and not _NEGATIVE_NUMBER.match(token)


def _read_one(table: Grammar, token: str, tokens: Sequence[str], index: int) -> tuple[Argument, int]:
    """The argument that begins with `token`; `index` is the first word after it."""
    if table.engine == "vllm" and token.startswith("-O") and token[:3] != "-O." and not token.startswith("--"):
        level, index = (token[2:].lstrip("="), index) if token != "-O" else _take(token, tokens, index)
        return Argument(dest="optimization_level", value=level, text=f"-O{level}"), index
    name, has_value, inline = token.partition("=")
    name = _spelling(name)
    dotted, _, key = name.partition(".")
    if key and table.find(dotted) is not None:
        value, index = (inline, index) if has_value else _take(name, tokens, index)
        found = table.find(dotted)
        assert found is not None
        return Argument(dest=found[0].dest, value=_nested(key, value), text=_join(name, value)), index
    found = table.find(name)
    if found is None:
        return _unknown(name, inline if has_value else None, tokens, index)
    flag, negated = found
    if negated or flag.kind in ("switch", "boolean"):
        if has_value:
            return Argument(dest=flag.dest, value=_truth(name, inline), text=token), index
        return Argument(dest=flag.dest, value=not negated, text=name), index
    if flag.kind == "list":
        values = [inline] if has_value else []
        while not has_value and index < len(tokens) and not _is_flag(tokens[index]):
            values.append(tokens[index])
            index += 1
        return Argument(dest=flag.dest, value=tuple(values), text=_join(name, *values)), index
    if has_value:
        return Argument(dest=flag.dest, value=inline, text=_join(name, inline)), index
    if flag.kind == "optional" and (index >= len(tokens) or _is_flag(tokens[index])):
        return Argument(dest=flag.dest, value=None, text=name), index
    value, index = _take(name, tokens, index)
    return Argument(dest=flag.dest, value=value, text=_join(name, value)), index


def _take(name: str, tokens: Sequence[str], index: int) -> tuple[str, int]:
    if index >= len(tokens) or _is_flag(tokens[index]):
        raise ConfigError(f"{name}: needs a value in the engine command; write {name} VALUE")
    return tokens[index], index + 1


def _unknown(name: str, inline: str | None, tokens: Sequence[str], index: int) -> tuple[Argument, int]:
    """A flag that the engine does not have: the next word is taken for its value unless it is a flag."""
    dest = name.lstrip("-").replace("-", "_")
    if inline is not None:
        return Argument(dest=dest, value=inline, text=_join(name, inline), known=False), index
    if index < len(tokens) and not _is_flag(tokens[index]):
        return Argument(dest=dest, value=tokens[index], text=_join(name, tokens[index]), known=False), index + 1
    return Argument(dest=dest, value=None, text=name, known=False), index


def _spelling(name: str) -> str:
    """`--a_b.c_d` as the parsers read it: underscores are dashes up to the first dot."""
    if not name.startswith("--"):
        return name
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail


def _nested(key: str, value: str) -> str:
    """JSON of {"a": {"b": value}} for the dotted key "a.b"."""
    is_list = key.endswith("+")
    try:
        leaf: Any = value.split(",") if is_list else json.loads(value)
    except ValueError:
        leaf = value
    for part in reversed(key.removesuffix("+").split(".")):
        leaf = {part: leaf}
    return json.dumps(leaf)


def _truth(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value in ("true", "1", "yes", "on"):
        return True
    if value in ("false", "0", "no", "off"):
        return False
    raise SpecError(f"{name}: {text[:40]!r} is neither true nor false in the engine command")


def _join(name: str, *values: str) -> str:
    from shlex import quote

    return " ".join([name, *(quote(v) for v in values)])
