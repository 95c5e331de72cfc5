"""Which metric of which engine says what: the map in data/metrics.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["gauge", "counter", "histogram"]
# Triton serves TensorRT-LLM's metrics under names of its own.
_ENGINES = {"trtllm-triton": "trtllm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One metric, picked by labels, perhaps times another one."""

    name: str
    where: Mapping[str, str] = field(default_factory=dict)
    scale_by: str = ""
    scale_where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """The metrics of one engine.

    engine    its name in the catalog
    prefix    what all its metrics begin with: how it is recognised
    sources   (kind, canonical name) -> candidates, the first that the server shows counts
    info      metric -> labels that describe the configuration
    model_label   the label that names the served model; "": its metrics do not say it
    """

    engine: str
    prefix: str
    sources: Mapping[tuple[Kind, str], tuple[Source, ...]]
    info: Mapping[str, tuple[str, ...]]
    model_label: str = ""


@lru_cache(maxsize=1)
def name_maps() -> tuple[NameMap, ...]:
    """The maps of all engines."""
    raw = tomllib.loads(files("bstar.measure.server").joinpath("data/metrics.toml").read_text(encoding="utf-8"))
    return tuple(_name_map(key, table) for key, table in raw.items())


def _name_map(key: str, table: dict[str, Any]) -> NameMap:
    kinds: tuple[Kind, ...] = ("gauge", "counter", "histogram")
    sources = {
        (kind, name): tuple(Source(**one) for one in candidates)
        for kind in kinds
        for name, candidates in table.get(kind, {}).items()
    }
    info = {metric: tuple(labels) for metric, labels in table.get("info", {}).items()}
    return NameMap(engine=_ENGINES.get(key, key), prefix=table["prefix"], sources=sources, info=info,
                   model_label=table.get("model_label", ""))
