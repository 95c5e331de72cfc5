"""Checkpoint module names: what a tensor of a spec is called in checkpoints, and patterns over such names.

Quantization configs name modules ("model.layers.3.mlp.gate_proj", "re:.*self_attn.*", "*.mlp.gate",
"lm_head") with the prefixes and spellings of their checkpoint. Here a spec's tensor is expanded to every
spelling it may have, and a list of patterns becomes one predicate over those names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from bstar.errors import ConfigError

# What may stand before "layers.<i>." in checkpoints of text models and of the multimodal ones around them.
_PREFIXES = (
    "model.language_model.model.", "model.language_model.", "language_model.model.", "language_model.",
    "model.decoder.", "model.text_model.", "model.", "backbone.", "transformer.", "gpt_neox.", "decoder.",
)  # fmt: skip
_STACKS = re.compile(r"^(?:layers|h|blocks|layer)(?=[.*])")

_ROOTS: dict[str, tuple[str, ...]] = {
    "self_attn": ("self_attn", "attn", "mixer", "attention", "self_attention", "linear_attn", "cross_attn"),
    "linear_attn": ("linear_attn", "mixer"),
    "mixer": ("mixer", "mamba", "linear_attn"),
    "conv": ("conv", "short_conv"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "mixer", "ffn", "moe", "shared_mlp"),
}
_LEAVES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q_proj", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn", "wq"),
    "k_proj": ("k_proj", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn", "wk"),
    "v_proj": ("v_proj", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn", "wv"),
    "o_proj": ("o_proj", "out_proj", "dense", "wo", "c_proj"),
    "q_a_proj": ("q_a_proj", "fused_qkv_a_proj", "wq_a"),
    "q_b_proj": ("q_b_proj", "wq_b"),
    "kv_a_proj_with_mqa": ("kv_a_proj_with_mqa", "fused_qkv_a_proj", "wkv_a"),
    "kv_proj": ("kv_proj", "wkv"),
    "o_a_proj": ("o_a_proj", "wo_a"),
    "o_b_proj": ("o_b_proj", "wo_b"),
    "gate_proj": ("gate_proj", "gate_up_proj", "w1", "input_linear"),
    "up_proj": ("up_proj", "gate_up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "input_linear"),
    "down_proj": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "fc_out", "output_linear"),
    "in_proj_qkv": ("in_proj_qkv", "in_proj_qkvz"),
    "in_proj_z": ("in_proj_z", "in_proj_qkvz"),
    "in_proj_a": ("in_proj_a", "in_proj_ba"),
    "in_proj_b": ("in_proj_b", "in_proj_ba"),
    "gate": ("gate", "router"),
}
_EXPERT_LEAVES = {
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj"),
    "down_proj": ("down_proj", "w2"),
}


@cache
def local_names(name: str) -> tuple[str, ...]:
    """Every spelling of a spec's tensor name inside its layer."""
    root, _, rest = name.partition(".")
    if not rest:
        return _LEAVES.get(name, (name,))
    roots = _ROOTS.get(root, (root,))
    if "experts" in (root, rest.partition(".")[0]):
        leaf = rest.removeprefix("experts.")
        spelled = _EXPERT_LEAVES.get(leaf, (leaf,))
        tails = tuple([f"experts.{leaf}"] + [f"experts.{i}.{x}" for x in spelled for i in ("0", "*")])
        # Beside a dense FFN (Gemma 4: layers.N.experts, Arctic: block_sparse_moe) or in its place.
        if root == "experts":
            return tails + tuple(f"{r}.{t}" for r in ("block_sparse_moe", "moe") for t in tails)
        return tuple(f"{r}.{t}" for r in roots for t in tails)
    head, _, leaf = rest.rpartition(".")
    heads = ("shared_experts", "shared_expert", "shared_mlp") if head == "shared_experts" else (head,)
    leaves = _LEAVES.get(leaf, (leaf,))
    return tuple(f"{r}.{h}.{x}" if h else f"{r}.{x}" for r in roots for h in heads for x in leaves)


def canonical(entry: str) -> str:
    """A module name or pattern without its checkpoint prefix: "layers.3.mlp.gate_proj"."""
    for prefix in _PREFIXES:
        rest = entry.removeprefix(prefix)
        if rest != entry and (_STACKS.match(rest) or rest in ("embed_tokens", "lm_head")):
            return _STACKS.sub("layers", rest)
    return _STACKS.sub("layers", entry) if _STACKS.match(entry) else entry


_TOKEN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_LAYER_NUMBER = re.compile(r"\d")


def spelled_in(names: Sequence[str], tokens: frozenset[str] | None) -> tuple[str, ...]:
    """The first spelling, and those others that have a component of their own among `tokens`."""
    if tokens is None:
        return tuple(names)
    usual = set(names[0].split("."))
    return tuple(n for i, n in enumerate(names) if i == 0 or any(
        c in tokens for c in n.split(".") if c not in usual) or not set(n.split(".")) - usual)


class Patterns:
    """A list of module names and patterns, as one predicate over a tensor's names.

    Understood: exact names and parents of modules, "*" and "?" globs, "re:" regular expressions, and bare
    components ("gate", "mlp.gate", "lm_head") that occur in a name.
    """

    __slots__ = ("_components", "_exact", "_prefixes", "_regex", "_substring", "by_layer", "tokens")

    def __init__(self, entries: Iterable[Any], *, where: str, substring: bool = False) -> None:
        self._exact: set[str] = set()
        self._components: tuple[str, ...] = ()
        open_ended = False
        prefixes: list[str] = []
        expressions: list[str] = []
        components: list[str] = []
        for entry in entries:
            if not isinstance(entry, str):
                raise ConfigError(f"config.json: {where} holds a {type(entry).__name__}; it must hold module names")
            if entry.startswith("re:"):
                expressions.append(_checked(entry[3:], where))
                open_ended = open_ended or bool(set("([|\\{") & set(entry[3:].replace("\\.", "")))
            elif "*" in entry or "?" in entry:
                pattern = canonical(entry)
                if pattern.endswith("*") and not set("*?[") & set(pattern[:-1]):
                    prefixes.append(pattern[:-1])
                else:
                    expressions.append(_glob(pattern))
            else:
                name = canonical(entry)
                self._exact.add(name)
                if not name.startswith("layers."):
                    components.append(name)
        # Identifiers in the patterns (None: an alternative or a class may stand for others), and whether a
        # layer's number matters: what the matching can leave out.
        text = " ".join([*self._exact, *prefixes, *expressions])
        self.tokens = None if open_ended else frozenset(_TOKEN.findall(text))
        self.by_layer = bool(_LAYER_NUMBER.search(text))
        self._prefixes = tuple(prefixes)
        self._components = tuple(components)
        self._substring = tuple(components) if substring else ()
        self._regex = [re.compile(x) for x in dict.fromkeys(expressions)]

    def __bool__(self) -> bool:
        return bool(self._exact or self._prefixes or self._regex)

    def match(self, names: Sequence[str]) -> bool:
        """Whether any of the names (canonical, "layers.…") is one of the listed modules or inside one."""
        return any(self._one(name) for name in names)

    def _one(self, name: str) -> bool:
        if self._exact:
            parent = name
            while parent:
                if parent in self._exact:
                    return True
                parent = parent.rpartition(".")[0]
        if self._prefixes and name.startswith(self._prefixes):
            return True
        if self._components:
            dotted = f".{name}."
            if any(f".{c}." in dotted for c in self._components):
                return True
            if any(c in name for c in self._substring):
                return True
        return any(x.match(f"model.{name}") or x.match(name) for x in self._regex)


def _glob(pattern: str) -> str:
    """A glob as a regular expression: "*" runs over dots; a parent of the module matches too."""
    body = re.sub(r"\*+", "*", pattern)
    if body.count("*") > 6:
        raise ConfigError(f"config.json: quantization pattern {pattern[:60]!r} has too many stars; at most 6")
    return "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in body) + r"(?:\..*)?$"


def _checked(expression: str, where: str) -> str:
    """A regular expression that cannot run away: bounded length, no nested and few open repeats."""
    if len(expression) > 2000:
        raise ConfigError(f"config.json: {where} has a pattern of {len(expression)} characters; at most 2000")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = re._parser.parse(expression)  # type: ignore[attr-defined]
            re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        raise ConfigError(f"config.json: {where} pattern {expression[:60]!r} is no regular expression") from None
    if _open_repeats(parsed, inside=False) > 5:
        raise ConfigError(f"config.json: {where} pattern {expression[:60]!r} is too complex; use fewer * and +")
    return expression


def _open_repeats(node: Any, *, inside: bool) -> int:
    """Unbounded repeats in a parsed expression; one inside another counts as too many."""
    total = 0
    if isinstance(node, (list, tuple)) or hasattr(node, "data"):
        items = node.data if hasattr(node, "data") else node
        for item in items:
            if isinstance(item, tuple) and len(item) == 2 and str(item[0]) in (
                    "MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                _, high, body = item[1]
                is_open = int(high) > 16
                total += (100 if inside else 1) * is_open + _open_repeats(body, inside=inside or is_open)
            else:
                total += _open_repeats(item, inside=inside)
    return total
