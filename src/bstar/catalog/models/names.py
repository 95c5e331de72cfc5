"""How a model's name becomes a catalog key.

Key space: the last path component, lower case, one kind of separator, no separator between a letter and
a digit ("Meta-Llama-3.1-8B" and "llama3.1:8b" are both "llama3-1-8b"). Suffixes that say how the weights
were stored or tuned ("-Instruct", "-FP8-dynamic", "-AWQ-4bit") are peeled off one at a time until the
catalog knows what is left; the storage they name comes back as a weight format.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

# Storage suffixes, spelled as keys, and the weight format (`bstar.specs.formats`) that each names.
_STORAGE_SUFFIXES: dict[str, str] = {
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
    "fp8": "fp8", "fp8-static": "fp8", "fp8-kv": "fp8", "fp8-static-pertensor": "fp8", "fp8-pertensor": "fp8",
    "autofp8": "fp8", "fp8-dynamic": "fp8_channel", "fp8-block": "fp8_block", "mxfp8": "mxfp8",
    "nvfp4": "nvfp4", "fp4": "nvfp4", "nvfp4-v2": "nvfp4", "fp4-v2": "nvfp4", "nvfp4a16": "nvfp4_w4a16",
    "mxfp4": "mxfp4", "mxfp4-preview": "mxfp4", "w-mxfp4-a-fp8": "mxfp4",
    "int4": "w4a16", "w4a16": "w4a16", "quantized-w4a16": "w4a16", "w4a16-g128": "w4a16", "4bit": "w4a16",
    "awq": "w4a16", "awq4bit": "w4a16", "awq-int4": "w4a16", "marlin": "w4a16",
    "gptq": "w4a16", "gptq4bit": "w4a16", "gptq-int4": "w4a16", "gptq-marlin": "w4a16",
    "autoround": "w4a16", "autoround-int4": "w4a16", "int4-autoround": "w4a16", "int4-mixed-autoround": "w4a16",
    "bnb4bit": "w4a16", "unsloth-bnb4bit": "w4a16", "mlx4bit": "w4a16",
    "int8": "int8", "w8a8": "int8", "quantized-w8a8": "int8", "w8a8-int8": "int8",
    "w8a16": "w8a16", "quantized-w8a16": "w8a16", "gptq-int8": "w8a16", "gptq8bit": "w8a16", "8bit": "w8a16",
    "mlx8bit": "w8a16",
    "gguf": "gguf:",  # of some type, which only the file's own name says
}  # fmt: skip

# Other spellings under which the catalog may hold the same checkpoint.
_RESPELT = {"fp4": "nvfp4", "fp4-v2": "nvfp4", "nvfp4-v2": "nvfp4"}

# Suffixes of variants that share the architecture of what they were tuned from.
_NEUTRAL_SUFFIXES = (
    "instruct", "chat", "it", "pt", "base", "hf", "text", "thinking", "mlx", "qat",
    "vllm",
)

_DATE = re.compile(r"-?(?<!\d)(2[3-9]|0[1-9]|1[0-2])\d\d$")  # "-2507" (year, month) and "-0528" (month, day)
_GGUF_TYPE = re.compile(r"-(ud-)?(iq[1-4]|q[2-8])(-?[0-9a-z]){0,4}$")
_BY_LENGTH = sorted((*_STORAGE_SUFFIXES, *_NEUTRAL_SUFFIXES), key=len, reverse=True)


def key_of(name: str) -> str:
    """The catalog key of a model name or path: only its last component counts."""
    last = name.strip().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].rsplit("--", 1)[-1]
    last = re.sub(r"\s*\([^()]*\)\s*$", "", last.lower()).replace("+", "-plus")
    key = re.sub(r"[^0-9a-z]+", "-", last).strip("-")
    key = re.sub(r"(?<=[a-z])-(?=\d)", "", key)
    return re.sub(r"^meta-(?=llama)", "", key)


def _peel(key: str) -> Iterator[tuple[str, str]]:
    """Ways to take one suffix off `key`, longest suffix first: (rest, suffix)."""
    gguf = _GGUF_TYPE.search(key)
    if gguf:
        yield key[: gguf.start()], key[gguf.start() + 1 :]
    for suffix in _BY_LENGTH:
        rest = key.removesuffix(suffix)
        # Keys hold no separator between a letter and a digit: "…-8b-4bit" ends in "8b4bit".
        if rest != key and (rest.endswith("-") or (suffix[0].isdigit() and rest[-1:].isalpha())):
            yield rest.removesuffix("-"), suffix
    date = _DATE.search(key)
    if date:
        yield key[: date.start()], ""


def _format_of(suffix: str) -> str | None:
    """The weight format that a suffix names; None: it names none."""
    if suffix in _STORAGE_SUFFIXES:
        return _STORAGE_SUFFIXES[suffix]
    return "gguf:" + suffix.replace("-", "_") if _GGUF_TYPE.fullmatch("-" + suffix) else None


def find_key(name: str, known: Container[str]) -> tuple[str, str | None] | None:
    """The key among `known` that `name` means, and the weight format that its suffixes name (or None).

    The fewest suffixes are peeled that leave a known key; the outermost storage suffix gives the format.
    A key with that suffix put back is looked for first ("…-Instruct-FP4" is the known "…-nvfp4").
    """
    level: dict[str, str] = {key_of(name): ""}  # key -> its outermost storage suffix
    seen: set[str] = set()
    while level:
        for key, storage in level.items():
            for spelling in (storage, _RESPELT.get(storage, "")):
                if spelling and f"{key}-{spelling}" in known:
                    return f"{key}-{spelling}", None
            if key in known:
                return key, _format_of(storage)
        seen.update(level)
        following: dict[str, str] = {}
        for key, storage in level.items():
            for rest, suffix in _peel(key):
                if rest and rest not in seen:
                    following.setdefault(rest, storage or (suffix if _format_of(suffix) else ""))
        level = following
    return None


def stem_of(name: str) -> str:
    """The key of `name` without any suffix that can be peeled off: what a misspelt name is compared by."""
    key = key_of(name)
    while rests := [rest for rest, _ in _peel(key) if rest]:
        key = min(rests, key=len)
    return key
