"""Secrets in launch commands: API keys, tokens and passwords are masked before anything is kept or printed."""

from __future__ import annotations

import re

MASK = "***"

# The words that end the name of a secret; "num_speculative_tokens" and "bos_token_id" do not end in one.
_NAME = r"(?:api[_-]?key|access[_-]?key|private[_-]?key|secret(?:[_-]?key)?|token|password|passwd|credentials?|auth)"
_FLAG = re.compile(rf"^(--?(?:[\w.\-]*[_\-.])?{_NAME})(?P<gap>=|\s+)(?P<value>.*)$", re.IGNORECASE | re.DOTALL)
_PAIR = re.compile(
    rf"(?P<name>(?<![\w-])[\"']?(?:[\w\-]*[_\-])?{_NAME}[\"']?\s*[:=]\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;}\"'&]+)", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_KNOWN_SHAPES = re.compile(r"\b(?:hf_|sk-|nvapi-|ghp_|glpat-)[\w\-]{8,}")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/\-]+=*")


def masked(text: str) -> str:
    """`text` with every value that looks like a secret replaced by ***: of a flag, a JSON key, NAME=value, a URL."""
    found = _FLAG.match(text)
    if found is not None:
        gap = "=" if found["gap"] == "=" else " "
        return f"{found[1]}{gap}'{MASK}'"
    text = _PAIR.sub(lambda m: m["name"] + (m["value"][0] + MASK + m["value"][0] if m["value"][0] in "\"'" else MASK),
                     text)
    return _BEARER.sub(rf"\1{MASK}", _KNOWN_SHAPES.sub(MASK, _LOGIN.sub(MASK, text)))
