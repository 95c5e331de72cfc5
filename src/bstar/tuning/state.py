"""The state of a tuning in its folder: written after every point, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bstar.errors import ConfigError, SpecError
from bstar.files import write_whole
from bstar.tuning.points import TunePoint

FILE: Final = "tune.json"
SCHEMA: Final = "bstar.tune/1"


@dataclass(slots=True, kw_only=True)
class TuneState:
    """Points measured so far.

    settings   what makes points comparable: the server or command, the load, the SLO
    compared   the recommended value and the engine's default, measured again side by side
    """

    folder: Path
    settings: Mapping[str, Any]
    points: list[TunePoint] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    compared: dict[str, TunePoint] = field(default_factory=dict)

    def find(self, value: int, budget: int | None = None) -> TunePoint | None:
        """The point of a value, if it was measured."""
        return next((p for p in self.points if p.value == value and p.budget == budget), None)

    def add(self, point: TunePoint) -> None:
        self.points.append(point)
        self.save()

    def save(self, more: Mapping[str, Any] | None = None) -> None:
        """Write the file. Raises ConfigError where it cannot be written."""
        content = {"schema": SCHEMA, "settings": dict(self.settings), "points": [p.to_dict() for p in self.points],
                   "failed": self.failed, "compared": {k: p.to_dict() for k, p in self.compared.items()},
                   **(more or {})}  # fmt: skip
        write_whole(self.folder / FILE, json.dumps(content, indent=1, allow_nan=False, default=str), what="--out")


def open_state(folder: Path, settings: Mapping[str, Any]) -> TuneState:
    """A new state, or that of an earlier tuning of the same server and load in this folder.

    Raises SpecError where the folder holds a tuning of something else, ConfigError where it cannot be made.
    """
    settings = json.loads(json.dumps(dict(settings), default=str))
    found = folder / FILE
    if found.is_file():
        try:
            raw = json.loads(found.read_text(encoding="utf-8"))
            points = [TunePoint.from_dict(p) for p in raw["points"]]
            compared = {k: TunePoint.from_dict(p) for k, p in raw.get("compared", {}).items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--out: {found} cannot be read ({error}); choose another folder") from None
        if raw.get("settings") != settings:
            differ = [k for k in settings if raw.get("settings", {}).get(k) != settings[k]]
            raise SpecError(f"--out: {folder} holds a tuning with another {', '.join(differ) or 'setting'}; choose "
                            "another folder, or the same settings to go on with it")
        return TuneState(folder=folder, settings=settings, points=points, compared=compared,
                         failed=dict(raw.get("failed", {})))
    if folder.exists() and any(folder.iterdir()):
        raise SpecError(f"--out: {folder} is not empty and holds no tuning; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder}: {error.strerror or error}") from None
    return TuneState(folder=folder, settings=settings)
