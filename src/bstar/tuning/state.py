"""The state of a tuning in its folder: written after every point, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bstar.codec.masking import masked_command
from bstar.errors import BstarError, ConfigError, SpecError
from bstar.files import write_whole
from bstar.tuning.points import TunePoint

FILE: Final = "tune.json"
SCHEMA: Final = "bstar.tune/1"


class InterruptedTuningError(BstarError):
    """Ctrl-C: what was measured is on disk."""

    exit_code = 130


@dataclass(slots=True, kw_only=True)
class TuneState:
    """Points measured so far.

    settings   what makes points comparable: the server or command (its secrets masked), the load, the SLO
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

    def drop_if_empty(self) -> bool:
        """Remove the folder where nothing was measured and no server said a word; whether it is gone."""
        try:
            inside = list(self.folder.iterdir())
            if self.points or self.compared or any(f.name != FILE and not _is_empty_log(f) for f in inside):
                return False
            for file in inside:
                file.unlink()
            self.folder.rmdir()
        except OSError:
            return False
        return True


def open_state(folder: Path, settings: Mapping[str, Any]) -> TuneState:
    """A new state, on disk, or that of an earlier tuning of the same server and load in this folder.

    An earlier one that measured nothing may go on with other settings: there is nothing that they have to fit.
    Raises SpecError where the folder holds a tuning of something else, ConfigError where it cannot be made.
    """
    settings = _kept(settings)
    found = folder / FILE
    if found.is_file():
        try:
            raw = json.loads(found.read_text(encoding="utf-8"))
            points = [TunePoint.from_dict(p) for p in raw["points"]]
            compared = {k: TunePoint.from_dict(p) for k, p in raw.get("compared", {}).items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--out: {found} cannot be read ({error}); choose another folder") from None
        before = _kept(raw.get("settings") or {})
        if before != settings and (points or compared):
            differ = [k for k in settings if before.get(k) != settings[k]]
            raise SpecError(f"--out: {folder} holds a tuning with another {', '.join(differ) or 'setting'}; choose "
                            "another folder, or the same settings to go on with it")
        state = TuneState(folder=folder, settings=settings, points=points, compared=compared,
                          failed=dict(raw.get("failed", {})) if before == settings else {})
        state.save()
        return state
    if folder.exists() and any(folder.iterdir()):
        raise SpecError(f"--out: {folder} is not empty and holds no tuning; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder}: {error.strerror or error}") from None
    state = TuneState(folder=folder, settings=settings)
    state.save()  # before the first server starts: that may take minutes, and end by Ctrl-C
    return state


def _kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the file has them."""
    found: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    if found.get("serve"):
        found["serve"] = masked_command(found["serve"])
    return found


def _is_empty_log(file: Path) -> bool:
    return file.suffix == ".log" and file.stat().st_size == 0
