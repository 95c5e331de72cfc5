"""Shared prefixes: groups of requests that begin with the same text (system prompts, few-shot examples)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bstar.errors import SpecError
from bstar.specs.workload import LengthDistribution
from bstar.traffic import streams
from bstar.traffic.lengths import Floats, Ints, fixed, parse_lengths, sample

_MOST_GROUPS = 10_000_000


class SharedPrefixes(NamedTuple):
    """Per request: its prompt length, its group (-1: none) and how many tokens the group shares."""

    input_tokens: Ints
    group: Ints
    tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """`count` prefixes of lengths `tokens`; a request takes the one of rank k with probability ∝ 1/k^popularity.

    popularity  exponent of the Zipf law over the groups (0: all alike)
    fraction    share of the requests that have a prefix at all
    added       True: the prefix comes on top of input_tokens, as `--random-prefix-len` of `vllm bench serve`;
                False: it is a part of them, and a shorter prompt is all prefix
    """

    count: int = 1
    tokens: LengthDistribution
    popularity: float = 0.0
    fraction: float = 1.0
    added: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST_GROUPS:
            raise SpecError(f"prefix groups: must be between 1 and {_MOST_GROUPS:,}, is {self.count}")
        if not 0 <= self.popularity < math.inf:
            raise SpecError(f"prefix popularity: must be at least 0 and finite, is {self.popularity}")
        if not 0 <= self.fraction <= 1:
            raise SpecError(f"prefix fraction: must be in [0, 1], is {self.fraction}")

    @property
    def probabilities(self) -> Floats:
        """Of each group, given that a request has one; shape (count,)."""
        weights = np.arange(1.0, self.count + 1.0) ** -self.popularity
        return np.asarray(weights / weights.sum())

    def draw(self, input_tokens: Ints, seed: int) -> SharedPrefixes:
        """The groups of as many requests as `input_tokens` has."""
        lengths = sample(self.tokens, self.count, streams.stream(seed, streams.PREFIX_LENGTH))
        rng = streams.stream(seed, streams.PREFIX_GROUP)
        n = input_tokens.size
        edges = np.cumsum(self.probabilities) * self.fraction
        group = np.searchsorted(edges, rng.random(n), side="right")
        if self.fraction == 1.0:  # the last edge is 1 but for rounding
            group = np.minimum(group, self.count - 1)
        group = np.where(group < self.count, group, -1)
        tokens = np.where(group >= 0, lengths[group], 0)
        if self.added:
            return SharedPrefixes(input_tokens + tokens, group, tokens)
        return SharedPrefixes(input_tokens, group, np.minimum(tokens, input_tokens))


def parse_prefix_groups(text: str, *, field: str = "prefix") -> PrefixGroups:
    """The groups of "1000", "1000,hit=0.8", "2000,groups=50,zipf=1.1" (all optional, ",added": on top of the input).

    Raises SpecError or UnitError that names `field`.
    """
    first, *parts = [part.strip() for part in text.split(",")]
    given: dict[str, float] = {}
    added = "added" in parts
    for part in parts:
        key, sign, value = part.partition("=")
        if part == "added":
            continue
        if not sign or key not in ("hit", "groups", "zipf") or key in given:
            raise SpecError(f"{field}: {part!r} is not understood; write it like 1000,hit=0.8,groups=50,zipf=1.1,added")
        try:
            given[key] = float(value)
        except ValueError:
            raise SpecError(f"{field}: {key} must be a number, is {value!r}") from None
    count = given.get("groups", 1.0)
    if not count.is_integer():
        raise SpecError(f"{field}: groups must be a whole number, is {count:g}")
    return PrefixGroups(
        count=int(count), tokens=parse_lengths(first.removeprefix("tokens="), field=field),
        popularity=given.get("zipf", 0.0), fraction=given.get("hit", 1.0), added=added,
    )  # fmt: skip


def prefix_groups(
    tokens: int | str | LengthDistribution, count: int = 1, *, popularity: float = 0.0, fraction: float = 1.0,
    added: bool = False,
) -> PrefixGroups:  # fmt: skip
    """`PrefixGroups`, with the lengths as an int or a DIST text as well."""
    if isinstance(tokens, (int, np.integer)):
        tokens = fixed(int(tokens))
    law = parse_lengths(tokens, field="prefix tokens") if isinstance(tokens, str) else tokens
    return PrefixGroups(count=count, tokens=law, popularity=popularity, fraction=fraction, added=added)
