"""Secrets in launch commands: API keys, tokens and passwords are masked before anything is kept or printed."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Iterable, Sequence

MASK = "***"

# The words that end the name of a secret; "num_speculative_tokens" and "bos_token_id" do not end in one.
_NAME = r"(?:api[_-]?keys?|access[_-]?key|private[_-]?key|secret(?:[_-]?key)?|token|password|passwd|credentials?|auth)"
_FLAG_NAME = rf"--?(?:[\w.\-]*[_\-.])?{_NAME}"
_FLAG = re.compile(rf"^({_FLAG_NAME})(?P<gap>=|\s+)(?P<value>.*)$", re.IGNORECASE | re.DOTALL)
_FLAG_INSIDE = re.compile(rf"((?<!\S){_FLAG_NAME}\s+)(?:\"[^\"]*\"|'[^']*'|[^\s\-]\S*)", re.IGNORECASE)
_PAIR = re.compile(
    rf"(?P<name>(?<![\w-])[\"']?(?:[\w\-]*[_\-])?{_NAME}[\"']?\s*[:=]\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|\[[^\]]*\]|[^\s,;}\"'&]+)", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_KNOWN_SHAPES = re.compile(r"\b(?:hf_|sk-|nvapi-|ghp_|glpat-)[\w\-]{8,}")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/\-]+=*")

_FLAG_WORD = re.compile(_FLAG_NAME, re.IGNORECASE)
_VARIABLE_WORD = re.compile(rf"(?:\w*_)?(?:{_NAME}|key)", re.IGNORECASE)
_TAKES_SEVERAL = re.compile(r"api[_-]?keys?$", re.IGNORECASE)
_PLAIN_WORD = re.compile(r"[\w@%+=:,./{}*&|;<>\-]+")
# Shorter values, and these, are no secrets (`--hf-token true`): a log without them could not be read.
_LEAST_SECRET, _NO_SECRETS = 4, frozenset({"true", "false", "none", "null"})


def masked(text: str) -> str:
    """`text` with every value that looks like a secret replaced by ***: of a flag, a JSON key, NAME=value, a URL."""
    found = _FLAG.match(text)
    if found is not None:
        gap = "=" if found["gap"] == "=" else " "
        return f"{found[1]}{gap}'{MASK}'"
    text = _PAIR.sub(_without_value, _FLAG_INSIDE.sub(rf"\g<1>{MASK}", text))
    return _BEARER.sub(rf"\1{MASK}", _KNOWN_SHAPES.sub(MASK, _LOGIN.sub(MASK, text)))


def _without_value(pair: re.Match[str]) -> str:
    quote = pair["value"][0] if pair["value"][0] in "\"'" else ""
    return f"{pair['name']}{quote}{MASK}{quote}"


def masked_command(text: str) -> str:
    """A command line with every secret in it replaced by ***; as written where it holds none.

    Words keep the quotes that they need, and {placeholders} stay as they are.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return masked(text)
    shown = [_shown(word, secret) for word, secret in _told_apart(words)]
    if shown == words:
        return text
    return " ".join(word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word) for word in shown)


def secrets_of(words: Sequence[str]) -> tuple[str, ...]:
    """The values that `masked_command` hides in these words of a command, the longest first."""
    found = set()
    for word, secret in _told_apart(words):
        found.add(secret)
        for inner in (word, secret):  # bash -c "… --api-key …"
            if any(c.isspace() for c in inner):
                with contextlib.suppress(ValueError):
                    found.update(secrets_of(shlex.split(inner)))
    return tuple(sorted((s for s in found if len(s) >= _LEAST_SECRET and s.lower() not in _NO_SECRETS),
                        key=len, reverse=True))


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """`text` masked, and without these values wherever they stand: a server says them in words of its own."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return masked(text)


def _told_apart(words: Sequence[str]) -> list[tuple[str, str]]:
    """Each word as what may be shown and the secret after it ("" where there is none)."""
    out: list[tuple[str, str]] = []
    values = 0.0  # words to come that are values of a secret-like flag
    for word in words:
        if values and not word.startswith(("-", "{")):
            out.append(("", word))
            values -= 1
            continue
        values = 0.0
        name, sign, value = word.partition("=")
        if sign and (_FLAG_WORD.fullmatch(name) or _VARIABLE_WORD.fullmatch(name)):
            out.append((name + sign, value))
            continue
        if _FLAG_WORD.fullmatch(word):
            values = math.inf if _TAKES_SEVERAL.search(word) else 1.0
        out.append((word, ""))
    return out


def _shown(word: str, secret: str) -> str:
    if secret:
        return word + MASK
    return masked(masked_command(word) if any(c.isspace() for c in word) else word)
