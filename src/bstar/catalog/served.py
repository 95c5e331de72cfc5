"""Whether what a server says that it serves is a model: by its names, which differ in case, punctuation and folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bstar.catalog.devices import normalized
from bstar.specs.model import ModelSpec


def is_served(model: ModelSpec, names: Iterable[str]) -> bool:
    """Whether one of the names (of a path, a Hub id, an alias) is one of the model's."""
    mine = set().union(*(_spellings(name) for name in (model.name, model.served_as) if name))
    return not mine.isdisjoint(set().union(*map(_spellings, names)))


def served_in(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """The model of a run's environment: as the server named it, and where it had it from."""
    server = environment.get("server") or {}
    return tuple(str(server[key]) for key in ("model", "model_root") if server.get(key))


def last_part(name: str) -> str:
    """Of a path or Hub id."""
    return name.rstrip("/").rpartition("/")[2] or name


def _spellings(name: str) -> set[str]:
    """The last part without case and punctuation, and what the catalog calls it."""
    from bstar.catalog.models import get_entry

    entry = get_entry(last_part(name))
    return {normalized(last_part(name)), *([normalized(entry.id)] if entry is not None else [])}
