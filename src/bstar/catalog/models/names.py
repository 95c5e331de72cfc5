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
    "fp8": "fp8", "fp8-static": "fp8", "fp8-kv": "fp8", "fp8-static-pertensor": "fp8", "fp8-pertensor": "fp8",
    "fp8-dynamic": "fp8_channel", "fp8-block": "fp8_block", "mxfp8": "mxfp8",
    "nvfp4": "nvfp4", "fp4": "nvfp4", "nvfp4a16": "nvfp4_w4a16", "mxfp4": "mxfp4", "mxfp4-preview": "mxfp4",
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
    "int4": "w4a16", "w4a16": "w4a16", "quantized-w4a16": "w4a16", "4bit": "w4a16",
    "awq": "w4a16", "awq4bit": "w4a16", "awq-int4": "w4a16", "marlin": "w4a16",
    "gptq": "w4a16", "gptq4bit": "w4a16", "gptq-int4": "w4a16", "gptq-marlin": "w4a16",
    "autoround": "w4a16", "autoround-int4": "w4a16", "int4-autoround": "w4a16", "int4-mixed-autoround": "w4a16",
    "bnb4bit": "w4a16", "unsloth-bnb4bit": "w4a16",
    "int8": "int8", "w8a8": "int8", "quantized-w8a8": "int8", "w8a8-int8": "int8",
    "w8a16": "w8a16", "quantized-w8a16": "w8a16", "gptq-int8": "w8a16", "gptq8bit": "w8a16",
}  # fmt: skip

# Suffixes of variants that share the architecture of what they were tuned from.
_NEUTRAL_SUFFIXES = ("instruct", "chat", "it", "pt", "base", "hf", "text", "thinking", "gguf", "vllm")

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


def _peel(key: str) -> Iterator[tuple[str, str | None]]:
    """Ways to take one suffix off, longest first: (rest, weight format it names or None)."""
    gguf = _GGUF_TYPE.search(key)
    if gguf:
        yield key[: gguf.start()], "gguf:" + key[gguf.start() + 1 :].replace("-", "_")
    for suffix in _BY_LENGTH:
        if key.endswith("-" + suffix):
            yield key[: -len(suffix) - 1], _STORAGE_SUFFIXES.get(suffix)
    date = _DATE.search(key)
    if date:
        yield key[: date.start()], None


def find_key(name: str, known: Container[str]) -> tuple[str, str | None] | None:
    """The key among `known` that `name` means, and the weight format that its suffixes name (or None).

    The fewest suffixes are peeled that leave a known key; the outermost storage suffix gives the format.
    """
    level: dict[str, str | None] = {key_of(name): None}
    seen: set[str] = set()
    while level:
        for key, weight_format in level.items():
            if key in known:
                return key, weight_format
        seen.update(level)
        following: dict[str, str | None] = {}
        for key, weight_format in level.items():
            for rest, found in _peel(key):
                if rest and rest not in seen:
                    following.setdefault(rest, weight_format or found)
        level = following
    return None


def stem_of(name: str) -> str:
    """The key of `name` without any suffix that can be peeled off: what a misspelt name is compared by."""
    key = key_of(name)
    while rests := [rest for rest, _ in _peel(key) if rest]:
        key = min(rests, key=len)
    return key
